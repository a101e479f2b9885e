"""One pool that requests can be sent to: an engine, or one data-parallel rank of an engine.

Promises: every pool has a gate, a keeper and a line of its own; the ranks of one engine share its
connections and its counter. A pool whose sizes are not known takes nothing. Knows no request.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from kvgate.config import Settings, UpstreamSettings
from kvgate.core.gate import Gate
from kvgate.core.policy import Policy, worst_case
from kvgate.core.records import Misuse, PoolFacts
from kvgate.edge.counting.counter import Counter
from kvgate.edge.counting.local_count import tokenizer_for
from kvgate.edge.gatekeeper import Gatekeeper
from kvgate.edge.relay.pool import EnginePool
from kvgate.edge.tenants import Tenants
from kvgate.edge.upstreams.access import access_of
from kvgate.wire.engines.known import ENGINES

if TYPE_CHECKING:
    from kvgate.edge.upstreams.drift import Drift

SIZES = ("total_blocks", "block_size", "context", "max_seqs")
NEEDED = SIZES[:3]
# vLLM (X-data-parallel-rank) and SGLang (X-Data-Parallel-Rank) pin a request to a rank by it.
RANK_HEADER = b"x-data-parallel-rank"
PINNED_BY_HEADER = frozenset({"vllm", "sglang"})
# Where `auto` begins.
AUTO_START = 0.90
# No block of it is usable.
UNKNOWN = PoolFacts(total_blocks=1, block_size=1, context=1, safety_fraction=0.5)


class Upstream:
    """One pool behind the gate. `rank`: which of the engine's, where it is pinned."""

    keeper: Gatekeeper  # these three from `open` on
    pool: EnginePool
    counter: Counter

    def __init__(
        self,
        given: UpstreamSettings,
        settings: Settings,
        facts: PoolFacts | None,
        *,
        policy: Policy = worst_case,
        rank: int | None = None,
    ) -> None:
        self.given = given
        self.url = given.url
        self.be_rank(rank)
        self.gate = Gate(facts or UNKNOWN, policy=policy, line_limit=settings.line_limit)
        self.is_sized = facts is not None
        self.unsized_why = "its sizes are not known yet"
        self.needs_key = False  # it answers, and tells nobody without the right key
        self.aliases = dict(given.aliases)
        # Names that requests may use; None while nobody has said.
        self.models: frozenset[str] | None = None
        self.model_objects: list[dict[str, Any]] = []
        self.drift: Drift | None = None
        self.warnings: list[dict[str, str]] = []
        self.found_name: str | None = None  # the kind of engine, where it was asked for its sizes
        self._directory = given.tokenizer or settings.tokenizer
        self.was_away = False  # since it was last asked
        self.be(engine_name(given, settings) or "llamacpp")
        self.list_models([])

    @property
    def facts(self) -> PoolFacts:
        return self.gate.facts

    @property
    def is_up(self) -> bool:
        """True while requests can be sent to it."""
        return self.is_sized and self.pool.is_up

    def be_rank(self, rank: int | None) -> None:
        """It is this rank of its engine; None: the engine as a whole."""
        self.rank = rank
        name = self.given.label or label_of(self.given.url)
        self.label = name if rank is None else f"{name}/{rank}"
        self.added_head = b"" if rank is None else b"%s: %d\r\n" % (RANK_HEADER, rank)

    def be(self, engine: str) -> None:
        """It is an engine of this kind."""
        self.engine = ENGINES[engine]
        # A client's own choice of a rank would go past the books.
        self.dropped = self.engine.drop_headers | {RANK_HEADER}
        if not self.rank:  # the others have the first one's counter
            self._tokenizer = tokenizer_for(engine, self._directory)
            if hasattr(self, "counter"):
                self.counter = Counter(self.pool, self.engine, self.counter.timeout, self._tokenizer)

    def open(self, loop: asyncio.AbstractEventLoop, settings: Settings, tls: ssl.SSLContext | None) -> None:
        """Make its keeper, and connections of its own."""
        self.keeper = Gatekeeper(self.gate, loop)
        self.pool = EnginePool(
            self.url,
            loop,
            connect_timeout=settings.connect_timeout,
            idle_timeout=self.engine.idle_connection,
            tls=tls,
        )
        self.pool.access = access_of(self.given, settings)
        self.counter = Counter(self.pool, self.engine, settings.count_timeout, self._tokenizer)

    def open_beside(self, sibling: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        """Another rank of the engine that `sibling` is a rank of."""
        self.keeper = Gatekeeper(self.gate, loop)
        self.pool, self.counter = sibling.pool, sibling.counter

    def use(self, settings: Settings, keys: frozenset[str] | None) -> None:
        """Take over what can change at any time. `keys`: hashes of those that may come in."""
        grace = settings.abort_grace
        self.abort_grace = self.engine.abort_grace if grace is None else grace
        line = self.gate.line
        line.limit = settings.line_limit
        line.shares.floors = {each.priority: each.floor for each in settings.classes}
        self.tenants = tenants_of(settings, self.facts.usable_blocks, keys)
        self._size_tenants(self.facts)
        tokens = settings.line_tokens
        line.blocks_limit = None if tokens is None else -(-tokens // self.facts.block_size)
        if hasattr(self, "pool"):
            self.pool.connect_timeout = settings.connect_timeout
            self.counter.timeout = settings.count_timeout

    def read_key(self, settings: Settings) -> None:
        """Read the engine's API key anew. Raises `ValueError`."""
        if hasattr(self, "pool"):
            self.pool.access = access_of(self.given, settings)

    def resize(self, facts: PoolFacts) -> None:
        """Its sizes are these from now on, and ceilings that are shares of them follow. What is held stays
        held."""
        self.is_sized = True
        self._size_tenants(facts)
        self.keeper.resize(facts)

    def _size_tenants(self, facts: PoolFacts) -> None:
        self.tenants = self.tenants.sized(facts.usable_blocks, facts.most_blocks)
        self.gate.line.shares.tell(self.tenants.again)

    def list_models(self, objects: list[dict[str, Any]]) -> None:
        """Take over what the engine lists; the operator's own list goes before it."""
        self.model_objects = objects
        names = set(self.given.models)
        if not names:
            for each in objects:
                names.add(each["id"])
                names.update(n for n in each.get("aliases") or () if isinstance(n, str))
        if names:
            self.models = frozenset(names | set(self.aliases))

    def target(self, model: str | None) -> str | None:
        """The name by which the engine knows `model`."""
        return self.aliases.get(model, model) if model is not None else None


def upstreams_of(settings: Settings, facts: PoolFacts | None, policy: Policy) -> list[Upstream]:
    """Every pool that `settings` names. `facts`: of the first, instead of its settings."""
    found = []
    for given in settings.upstreams:
        own, facts = facts or facts_of(given, settings), None
        # Ranks that cannot be pinned: any request may go to any of them, and only what fits into
        # one is safe wherever it goes. So they are one pool, of the size of one.
        ranks = given.ranks or 1
        pinned = ranks > 1 and engine_name(given, settings) in PINNED_BY_HEADER
        for rank in range(ranks) if pinned else (None,):
            found.append(Upstream(given, settings, own, policy=policy, rank=rank))
    return found


def engine_name(given: UpstreamSettings, settings: Settings) -> str | None:
    return given.engine or settings.engine


def tenants_of(settings: Settings, usable_blocks: int, keys: frozenset[str] | None = None) -> Tenants:
    """The tenants of one pool. Raises `Misuse` where they, or their classes, contradict each other."""
    priorities = {each.priority for each in settings.classes}
    if len(priorities) < len(settings.classes) or sum(each.floor for each in settings.classes) > 1:
        raise Misuse("the classes have a priority twice, or floors that add up to more than the pool")
    return Tenants(
        settings.tenants,
        usable_blocks=usable_blocks,
        per_key=settings.tenant_per_key,
        trusted_header=settings.trust_tenant_header,
        keys=keys,
    )


def is_auto(given: UpstreamSettings, settings: Settings) -> bool:
    """Whether the engine's own figures may raise the share that is reserved."""
    return (given.safety_fraction or settings.safety_fraction) == "auto"


def fraction_of(given: UpstreamSettings, settings: Settings) -> float:
    """The share of its blocks that may be reserved, at first."""
    fraction = settings.safety_fraction if given.safety_fraction is None else given.safety_fraction
    return AUTO_START if fraction == "auto" else fraction


def sizes_of(given: UpstreamSettings, settings: Settings) -> dict[str, int | None]:
    """The operator's figures: its own before those for all."""
    sizes = {name: getattr(given, name) for name in SIZES}
    return {name: getattr(settings, name) if size is None else size for name, size in sizes.items()}


def facts_of(given: UpstreamSettings, settings: Settings) -> PoolFacts | None:
    """The pool as the operator describes it; None where the engine has to be asked. Raises `Misuse`."""
    sizes = sizes_of(given, settings)
    blocks, size, context = (sizes[name] for name in NEEDED)
    if blocks is None or size is None or context is None or engine_name(given, settings) is None:
        return None
    if given.model_config or settings.model_config:
        # Its groups are priced with what the engine tells of its cache.
        return None
    return PoolFacts(
        blocks,
        size,
        context,
        max_seqs=sizes["max_seqs"],
        safety_fraction=fraction_of(given, settings),
        lookahead=(settings.lookahead if given.lookahead is None else given.lookahead) or 0,
        engine=engine_name(given, settings) or "generic",
    )


def label_of(url: str) -> str:
    """Host and port, or the path of the socket: short, and without a secret."""
    return url.partition("://")[2].rstrip("/") or url
