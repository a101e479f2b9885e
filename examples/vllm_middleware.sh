#!/bin/sh
# vLLM with admission inside, no proxy. kvgate must be installed in vLLM's environment.
# Sizes and counts come from vLLM itself; these are the only settings worth a thought.
set -e
export KVGATE_MAX_WAIT=30            # seconds that a request may stand in line
export KVGATE_SAFETY_FRACTION=0.95   # share of the KV blocks that may be reserved
exec vllm serve "${1:?name a model}" --middleware kvgate.vllm.Middleware
