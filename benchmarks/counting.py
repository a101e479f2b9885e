"""Microseconds to count a request's prompt tokens: kvgate, `tokenizers`, transformers and LiteLLM.

    python benchmarks/counting.py --tokenizer DIR [--json] [--litellm PYTHON]

Three requests: a chat of 2 kB, a chat of 20 turns with one new turn, and a document of 100,000
tokens. *Cold* is text that was never counted before, *warm* the same request again. Each figure is
the best of several runs, so that another process on the machine does not count. `--litellm` names a
Python that has LiteLLM; its counter is given the same tokenizer.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from kvgate.tokens import PromptCounter
from kvgate.tokens.loader import load_files

SEED = 41
SENTENCE = (
    "the quick model answers a long question about memory and caches while people wait for tokens "
    'def return value {"key": [1, 2]} don\'t naïve 日本語 12345 https://example.org/a?b=c 🙂'
)
WORDS = SENTENCE.split(" ")
Body = dict[str, Any]


def text(random: Random, characters: int) -> str:
    pieces: list[str] = []
    while characters > 0:
        pieces.append(random.choice(WORDS))
        characters -= len(pieces[-1]) + 1
    return " ".join(pieces)


def chat(*texts: str) -> Body:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": one} for i, one in enumerate(texts)]}


def best(makes: Callable[[int], Callable[[], Any]], runs: int) -> float:
    """The least microseconds of one call; `makes(run)` prepares a call that nothing has seen yet."""
    found = float("inf")
    for run in range(runs):
        call = makes(run)
        begin = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - begin)
    return found * 1e6


def workloads(random: Random, runs: int) -> dict[str, tuple[list[Body | None], list[Body]]]:
    """For each request: what is counted before (None: nothing), and then what is timed."""
    small = [chat(text(random, 2_000)) for _ in range(runs)]
    turns = [[text(random, 400) for _ in range(39)] for _ in range(runs)]
    seen = [chat(*one) for one in turns]
    grown = [chat(*one, text(random, 400), text(random, 200)) for one in turns]
    documents = [chat(text(random, 330_000)) for _ in range(min(runs, 5))]
    return {
        "2 kB chat, cold": ([None] * runs, small),
        "2 kB chat, warm": (list(small), small),
        "20 turns, cold": ([None] * runs, seen),
        "20 turns, one new": (list(seen), grown),
        "document, cold": ([None] * len(documents), documents),
        "document, warm": (list(documents), documents),
    }


def kvgate_row(
    counter: PromptCounter, jobs: dict[str, tuple[list[Body | None], list[Body]]]
) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, (before, timed) in jobs.items():
        counter.cache.clear()

        def make(
            run: int, before: list[Body | None] = before, timed: list[Body] = timed
        ) -> Callable[[], Any]:
            seen = before[run]
            if seen is not None:
                counter.count_chat(seen)
            return lambda: counter.count_chat(timed[run])

        row[name] = best(make, len(timed))
    return row


def plain_row(
    count: Callable[[Body], Any], jobs: dict[str, tuple[list[Body | None], list[Body]]]
) -> dict[str, float]:
    """For counters that remember nothing."""
    row: dict[str, float] = {}
    for name, (_, timed) in jobs.items():
        row[name] = best(lambda run, timed=timed: lambda: count(timed[run]), len(timed))
    return row


LITELLM = """
import json, sys, time
import litellm
jobs = json.load(sys.stdin)
tokenizer = litellm.create_tokenizer(open(jobs["path"]).read())
row = {}
for name, bodies in jobs["jobs"].items():
    best = 1e9
    for body in bodies:
        begin = time.perf_counter()
        litellm.token_counter(model="m", custom_tokenizer=tokenizer, messages=body["messages"])
        best = min(best, time.perf_counter() - begin)
    row[name] = best * 1e6
print(json.dumps(row))
"""


def litellm_row(
    python: str, path: Path, jobs: dict[str, tuple[list[Body | None], list[Body]]]
) -> dict[str, float]:
    work = {"path": str(path), "jobs": {name: timed for name, (_, timed) in jobs.items()}}
    done = subprocess.run(
        [python, "-c", LITELLM], input=json.dumps(work), capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def transformers_row(
    folder: str, jobs: dict[str, tuple[list[Body | None], list[Body]]]
) -> dict[str, float] | None:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return plain_row(
        lambda body: tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True), jobs
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", default=".cache/tokenizers/qwen3/models", metavar="DIR")
    parser.add_argument("--litellm", metavar="PYTHON", default=".cache/peers/litellm/bin/python")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (Path(options.tokenizer) / "tokenizer.json").is_file():
        sys.exit(f"no tokenizer.json in {options.tokenizer}; name a model's directory with --tokenizer DIR")
    jobs = workloads(Random(SEED), options.runs)
    files = load_files(options.tokenizer)
    fast, slow = PromptCounter(files), PromptCounter(files, accelerators=())
    rows: dict[str, dict[str, float]] = {f"kvgate ({fast.counted_by})": kvgate_row(fast, jobs)}
    memory = {"entries": fast.cache.entries, "bytes": fast.cache.bytes_held}
    rows["kvgate (no accelerator)"] = kvgate_row(slow, jobs)
    template = files.template
    assert template is not None
    rows["tokenizers (rendered text)"] = plain_row(
        lambda body: len(files.reference.encode(template.render(body).text, add_special_tokens=False)), jobs
    )
    row = transformers_row(options.tokenizer, jobs)
    if row is not None:
        rows["transformers"] = row
    if Path(options.litellm).exists():
        rows["LiteLLM token_counter"] = litellm_row(options.litellm, files.path, jobs)
    document = jobs["document, cold"][1][0]
    answer = {
        "seed": SEED,
        "tokenizer": options.tokenizer,
        "document_tokens": fast.count_chat(document).prompt_tokens,
        "microseconds": rows,
        "cache": memory,
    }
    if options.json:
        print(json.dumps(answer, indent=2))
        return
    print(f"seed {SEED}, document of {answer['document_tokens']:,} tokens; microseconds, best of the runs")
    print(f"{'':28}" + "".join(f"{name:>19}" for name in jobs))
    for name, values in rows.items():
        print(f"{name:28}" + "".join(f"{values[job]:>19,.0f}" for job in jobs))
    print(f"cache after the last request: {memory['entries']} counts in {memory['bytes']:,} bytes")


if __name__ == "__main__":
    main()
