"""The process that runs llama.cpp for `embedded.py`: `python -m kvgate.edge.embedded_child OPTIONS`.

Promises: one JSON line on stdout when the server answers, `{"port", "slot_context"}`; everything
else, llama.cpp's log included, on stderr; and it ends when its parent ends, however that ends. It
watches twice: its stdin closes with the parent, and the kernel signals the parent's death.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import urllib.request
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1
# Each stream holds one of the server's HTTP threads for its whole life; a counting call or a look
# at /health must find one free.
HTTP_THREADS = 64


def end_with_parent(parent: int) -> None:
    """End this process when `parent` is gone."""

    def gone(_signal: int, _frame: FrameType | None) -> None:
        # The kernel also signals when only the thread that started us has ended.
        if os.getppid() != parent:
            os._exit(0)

    def watch_stdin() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    signal.signal(signal.SIGUSR1, gone)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked for the signal
        os._exit(0)
    threading.Thread(target=watch_stdin, daemon=True).start()


def serve(options: dict[str, Any]) -> Any:
    """Start llama.cpp's server in this process; it runs for as long as the result lives."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.model_alias = {options["alias"]}
    params.n_ctx = options["cells"]
    params.n_parallel = options["slots"]
    params.kv_unified = options["unified"]
    if options["context"] is not None:
        params.kv_unified_per_slot = options["context"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = options["threads"]
    params.cpuparams_batch.n_threads = options["threads"]
    # Threads that spin while they wait would take the cores from the gateway beside them.
    params.cpuparams.poll = 0
    params.cpuparams_batch.poll = 0
    params.n_threads_http = HTTP_THREADS
    params.ctx_shift = False
    params.fit_params = False  # the sizes are ours; it must not adjust them to free memory
    params.cache_ram_mib = 0  # a second cache in main memory would only blur what is measured
    return xllamacpp.Server(params)


def main() -> None:
    options = json.loads(sys.argv[1])
    # llama.cpp may print to stdout: keep the real one for the ready line alone.
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end_with_parent(options["parent"])
    server = serve(options)
    port = int(server.listening_address.rsplit(":", 1)[1])
    # Not through a proxy that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/props", timeout=30) as answer:
        slot_context = json.load(answer)["default_generation_settings"]["n_ctx"]
    print(json.dumps({"port": port, "slot_context": slot_context}), file=ready, flush=True)
    ready.close()
    threading.Event().wait()


if __name__ == "__main__":
    main()
