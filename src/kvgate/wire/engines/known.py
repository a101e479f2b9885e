"""The engines that kvgate knows, by name."""

from kvgate.wire.engines import Engine
from kvgate.wire.engines.llamacpp import LLAMACPP
from kvgate.wire.engines.vllm import VLLM

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (LLAMACPP, VLLM)}
