"""The smallest complete server: FastAPI around a llama.cpp model in the same process, with admission.

    pip install 'kvgate[embedded]' fastapi uvicorn
    python examples/fastapi_llamacpp.py --port 8000
    curl -d '{"prompt": "Once upon a time", "max_tokens": 32}' localhost:8000/generate

The model's unified cache has CELLS cells for all requests together. Without admission a few long
answers overrun it and llama.cpp ends every one of them; here each request holds what it may reach.
"""

import argparse
from pathlib import Path
from typing import Any

import uvicorn
import xllamacpp
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool

from kvgate import Admission
from kvgate.asgi import AdmissionMiddleware, fields
from kvgate.edge.embedded import gemma_model

CELLS, SLOTS, CONTEXT = 2048, 8, 1024


def load(path: Path) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.kv_unified = CELLS, SLOTS, True
    params.cpuparams.n_threads = 2
    params.hostnames, params.port, params.n_gpu_layers = ["127.0.0.1"], 0, 0
    params.ctx_shift, params.fit_params = False, False  # the sizes are ours
    return xllamacpp.Server(params)


def make_app(model: xllamacpp.Server) -> FastAPI:
    app = FastAPI()
    admission = Admission.from_blocks(CELLS, 1, CONTEXT, max_seqs=SLOTS)

    app.add_middleware(
        AdmissionMiddleware,
        admission=admission,
        routes={"/generate": fields("prompt", "max_tokens")},
        # Without `count` a prompt costs its bytes: more than its tokens, never fewer.
        max_wait=60,
    )

    @app.post("/generate")
    async def generate(request: Request) -> dict[str, Any]:
        asked = await request.json()
        # max_tokens is what was reserved, whether the client set it or not.
        body = {"prompt": asked["prompt"], "n_predict": asked["max_tokens"]}
        answer = await run_in_threadpool(model.handle_completions, body)
        return {"text": answer["choices"][0]["text"], "tokens": answer["usage"]["completion_tokens"]}

    @app.get("/books")
    async def books() -> dict[str, int]:
        return admission.snapshot()

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", type=Path, help="a GGUF file  [default: Gemma 3 270M]")
    given = parser.parse_args()
    model = load(given.model or gemma_model(print))
    uvicorn.run(make_app(model), host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
