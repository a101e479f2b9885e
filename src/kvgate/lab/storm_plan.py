"""What a storm consists of: which requests, when, by whom. Drawn from one seed, before anything is sent.

Promise: the same options and seed make the same plan, and no plan is longer than it was told to be.
"""

from __future__ import annotations

import csv
import enum
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random


class Client(enum.StrEnum):
    """How a client takes a refusal."""

    OBEYING = "obeying"  # comes back at the moment that it was told, again and again
    SDK = "sdk"  # OpenAI's and Anthropic's libraries: obeys up to 60 s, three tries in all
    STUBBORN = "stubborn"  # hammers every 100 to 300 ms, whatever it is told
    GIVING_UP = "giving-up"  # goes at the first refusal, or when nothing comes for long


class Arrivals(enum.StrEnum):
    """When requests come: as earlier ones end, at random, at random in bursts, or as recorded."""

    CLOSED = "closed"
    POISSON = "poisson"
    BURST = "burst"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of about `prompt` tokens and an output cap (None: unset); `weight` of them in the mix."""

    prompt: int
    cap: int | None
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`PROMPT:CAP` or `PROMPT:CAP:WEIGHT`, CAP a number or `unset`. Raises `ValueError`."""
        parts = text.split(":")
        if len(parts) not in (2, 3):
            raise ValueError(f"{text!r} is not PROMPT:CAP or PROMPT:CAP:WEIGHT, as in 1000:512:3")
        cap = None if parts[1] == "unset" else int(parts[1])
        shape = cls(int(parts[0]), cap, float(parts[2]) if len(parts) == 3 else 1.0)
        if shape.prompt < 1 or (cap is not None and cap < 1) or not 0 < shape.weight < math.inf:
            raise ValueError(f"{text!r}: prompt and cap must be at least 1, the weight above 0")
        return shape


# Mostly short, some long: what chat traffic looks like, in small.
MIX = (Shape(100, 128, 6), Shape(400, 256, 3), Shape(1000, 512, 1))


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. `at`: seconds from the start (0 in a closed loop, which sends when it can)."""

    number: int
    at: float
    prompt: int
    cap: int | None
    client: Client
    key: int

    def body(self, *, model: str | None, ignore_eos: bool) -> bytes:
        # The number first, so that no two prompts share a prefix in the engine's cache.
        words = f"{self.number} " + "word " * max(1, self.prompt - 2)
        fields: dict[str, object] = {
            "messages": [{"role": "user", "content": words}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model is not None:
            fields["model"] = model
        if self.cap is not None:
            fields["max_tokens"] = self.cap
        if ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `plan` draws from. `rate` in requests a second; in every `period` seconds of a burst the
    first third has `times` the rate of the rest."""

    requests: int
    seconds: float
    arrivals: Arrivals = Arrivals.CLOSED
    rate: float = 5.0
    times: float = 3.0
    period: float = 30.0
    shapes: tuple[Shape, ...] = MIX
    clients: tuple[tuple[Client, float], ...] = ((Client.OBEYING, 1.0),)
    keys: int = 1
    seed: int = 1


def plan(recipe: Recipe, recorded: Sequence[tuple[float, Shape]] = ()) -> list[Planned]:
    """The requests, in the order of their moments: at most so many, none after the last second."""
    rng = Random(recipe.seed)
    kinds, shares = zip(*recipe.clients, strict=True)
    weights = [shape.weight for shape in recipe.shapes]
    made: list[Planned] = []
    for at, recorded_shape in _moments(recipe, rng, recorded):
        if at > recipe.seconds or len(made) >= recipe.requests:
            break
        shape = recorded_shape or rng.choices(recipe.shapes, weights)[0]
        client = rng.choices(kinds, shares)[0]
        made.append(Planned(len(made), at, shape.prompt, shape.cap, client, rng.randrange(recipe.keys)))
    return made


def _moments(
    recipe: Recipe, rng: Random, recorded: Sequence[tuple[float, Shape]]
) -> Iterator[tuple[float, Shape | None]]:
    if recipe.arrivals is Arrivals.TRACE:
        yield from recorded
        return
    now = 0.0
    is_burst = recipe.arrivals is Arrivals.BURST
    calm = recipe.rate * 3 / (2 + recipe.times) if is_burst else recipe.rate
    top = calm * max(1.0, recipe.times) if is_burst else calm
    while True:
        if recipe.arrivals is Arrivals.CLOSED:
            yield 0.0, None
            continue
        now += rng.expovariate(top)
        rate = calm * recipe.times if is_burst and now % recipe.period < recipe.period / 3 else calm
        if rng.random() * top < rate:
            yield now, None


def read_trace(path: Path, *, speed: float = 1.0, cap: int | None = None) -> list[tuple[float, Shape]]:
    """A trace with the columns arrival_s, prompt_tokens, output_tokens (`.csv` or `.csv.gz`).

    The cap is `cap`, or the power of two above twice the answer. Raises `ValueError` for a file that is
    not such a trace.
    """
    found = []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for row in csv.DictReader(file):
                answer = int(row["output_tokens"])
                own = cap if cap is not None else 1 << math.ceil(math.log2(2 * max(1, answer)))
                found.append((float(row["arrival_s"]) / speed, Shape(max(1, int(row["prompt_tokens"])), own)))
    except (OSError, EOFError, UnicodeDecodeError, KeyError, TypeError, ValueError) as wrong:
        raise ValueError(
            f"{path} is no trace with arrival_s, prompt_tokens, output_tokens: {wrong!r}"
        ) from None
    if not found:
        raise ValueError(f"{path} holds no request")
    return sorted(found, key=lambda pair: pair[0])


def parse_clients(text: str) -> tuple[tuple[Client, float], ...]:
    """`obeying=6,sdk=3,stubborn=1`, or one name alone. Raises `ValueError`."""
    made = []
    for part in text.split(","):
        name, equals, share = part.partition("=")
        try:
            made.append((Client(name.strip()), float(share) if equals else 1.0))
        except ValueError:
            raise ValueError(f"{part!r} is none of {', '.join(Client)}, as in obeying=6,sdk=3") from None
    if any(not 0 <= share < math.inf for _, share in made) or not sum(share for _, share in made) > 0:
        raise ValueError(f"{text!r}: the shares must not be negative, and one must be above 0")
    return tuple(made)
