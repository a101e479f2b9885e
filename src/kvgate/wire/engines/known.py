"""The engines that kvgate knows, by name."""

from kvgate.wire.engines import Engine
from kvgate.wire.engines.generic import GENERIC
from kvgate.wire.engines.llamacpp import LLAMACPP
from kvgate.wire.engines.lmdeploy import LMDEPLOY
from kvgate.wire.engines.ollama import OLLAMA
from kvgate.wire.engines.sglang import SGLANG
from kvgate.wire.engines.tensorrt_llm import TENSORRT_LLM
from kvgate.wire.engines.tgi import TGI
from kvgate.wire.engines.vllm import VLLM

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (GENERIC, LLAMACPP, LMDEPLOY, OLLAMA, SGLANG, TENSORRT_LLM, TGI, VLLM)
}
