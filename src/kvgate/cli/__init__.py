"""The `kvgate` command: turns flags, environment and file into Settings, and runs a part of kvgate.

Nothing is decided here. A mistake in what the user typed is told in one message without a
traceback, and exits with 2; something that failed exits with 1.
"""

from __future__ import annotations

import click

from kvgate import __version__
from kvgate.cli.conformance import conformance as conformance_command
from kvgate.cli.count import count as count_command
from kvgate.cli.demo import demo as demo_command
from kvgate.cli.doctor import doctor as doctor_command
from kvgate.cli.explain import explain as explain_command
from kvgate.cli.plan import plan as plan_command
from kvgate.cli.serve import serve as serve_command
from kvgate.cli.storm import storm as storm_command
from kvgate.edge.compiled import is_compiled

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(f"{__version__}{', compiled' if is_compiled else ''}", prog_name="kvgate")
def main() -> None:
    """Admission control for self-hosted LLM servers.

    kvgate stands in front of vLLM, SGLang or llama.cpp and reserves the KV cache that a request may come to
    need (its prompt + its output cap) before the engine sees it. What does not fit is told when to
    come back, instead of stalling or killing the streams that run.

    \b
    See it work, on a real model:
      kvgate demo
    Run a small real engine with the gate in front of it:
      kvgate serve
      curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'
    Look at your engine, and put the gate in front of it:
      kvgate doctor http://127.0.0.1:8000
      kvgate serve --upstream http://127.0.0.1:8000
    Ask the running gate why a request is refused:
      kvgate explain request.json
    Count a request's tokens, and see what a model's cache holds:
      kvgate count request.json --tokenizer DIR
      kvgate plan --model-config config.json --gpu-memory 80GiB
    Load an engine or a gateway as your clients would:
      kvgate storm http://127.0.0.1:8080
    Test a gateway, this or another, against what went wrong in the field:
      kvgate conformance http://127.0.0.1:8080 --engine http://127.0.0.1:9000

    kvgate COMMAND --help shows the options of each.
    """


main.add_command(serve_command, "serve")
main.add_command(demo_command, "demo")
main.add_command(explain_command, "explain")
main.add_command(doctor_command, "doctor")
main.add_command(count_command, "count")
main.add_command(plan_command, "plan")
main.add_command(storm_command, "storm")
main.add_command(conformance_command, "conformance")
