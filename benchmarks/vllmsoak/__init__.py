"""The parts of `vllm_soak.py`: clients, servers, and the comparison of the books with the engine."""
