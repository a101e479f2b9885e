"""The demo's storm, and the ways of admitting it that are compared.

Promises: every run gets a fresh engine of the same sizes and the same streams, so that only the
admission differs; in front of the engine stands the gateway that `kvgate serve` runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import uvloop

from kvgate.config import Settings, at
from kvgate.core.policy import Policy, unsafe_concurrency, unsafe_none, unsafe_prompt_only, worst_case
from kvgate.edge.embedded import EmbeddedEngine
from kvgate.edge.embedded import Progress as StartProgress
from kvgate.edge.gateway import Gateway
from kvgate.lab.storm import Progress, StormResult, Wanted, storm

SAFETY_FRACTION = 0.9
# Of four streams the last sets no cap, as many clients do.
UNSET_EVERY = 4
# Longer than any run should take: a slow machine ends later, it does not change the figures.
PATIENCE = 600.0
SUBJECTS = (
    "a lighthouse",
    "a night train",
    "an old map",
    "a lost dog",
    "a snowed-in village",
    "a broken clock",
    "a river in spring",
    "a letter that came late",
)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way of admitting. `policy` None: no gateway in between."""

    key: str
    label: str
    policy: Policy | None
    safe: bool = False


DIRECT = Strategy("direct", "straight to the engine", None)
GATED = Strategy("gated", "through kvgate", worst_case, safe=True)
COMPARED = (
    Strategy("none", "none", unsafe_none),
    Strategy("concurrency", "concurrency cap", unsafe_concurrency),
    Strategy("prompt_only", "prompt length only", unsafe_prompt_only),
    Strategy("worst_case", "prompt + output cap", worst_case, safe=True),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is common to all runs."""

    cells: int
    slots: int
    streams: int
    max_tokens: int
    model: Path | None = None

    def wanted(self) -> list[Wanted]:
        """Short prompts; most ask for `max_tokens`, the others leave the cap unset."""
        return [
            Wanted(
                f"Write a long story about {SUBJECTS[n % len(SUBJECTS)]}. Take your time.",
                None if n % UNSET_EVERY == UNSET_EVERY - 1 else self.max_tokens,
            )
            for n in range(self.streams)
        ]

    @property
    def unset(self) -> int:
        return self.streams // UNSET_EVERY


def run(
    scene: Scene,
    strategy: Strategy,
    *,
    starting: StartProgress | None = None,
    progress: Progress | None = None,
) -> StormResult:
    """Send the storm of `scene` to a fresh engine, admitted as `strategy` says. Blocking."""
    with EmbeddedEngine.start(
        cells=scene.cells, slots=scene.slots, model=scene.model, progress=starting
    ) as engine:
        return uvloop.run(_send(scene, strategy, engine, progress))


async def _send(
    scene: Scene, strategy: Strategy, engine: EmbeddedEngine, progress: Progress | None
) -> StormResult:
    if strategy.policy is None:
        return await storm(engine.url, scene.wanted(), patience=PATIENCE, progress=progress)

    settings = Settings(
        upstreams=at(engine.url),
        listen_port=0,
        # Unset means the rest of the context, which is more than is usable: such a request would be
        # refused for good. An operator of so small a pool sets what an unset cap means.
        default_output_cap=scene.max_tokens,
        max_output_cap=scene.max_tokens,
    )
    gateway = Gateway(settings, engine.facts(SAFETY_FRACTION), policy=strategy.policy)
    await gateway.start()
    try:
        url = f"http://127.0.0.1:{gateway.port}"
        return await storm(url, scene.wanted(), patience=PATIENCE, progress=progress)
    finally:
        await gateway.stop()
