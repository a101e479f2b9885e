"""Change a running gateway's limits: no stream is dropped, nothing held is lost.

Promises: every setting either takes effect for the next request or is reported as one that needs a
restart, and keeps its old value; either all of it is applied or, on an error, nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from kvgate.config import Settings, UpstreamSettings
from kvgate.core.records import CapRules, Misuse, PoolFacts
from kvgate.edge import tls
from kvgate.edge.upstreams import sizing
from kvgate.edge.upstreams.access import access_of
from kvgate.edge.upstreams.upstream import Upstream, fraction_of, sizes_of, tenants_of
from kvgate.wire.dialects.shape import RequestShape

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway

# What a running process stands on: its sockets, its engine.
FIXED = frozenset(
    {
        *("listen_host", "listen_port", "admin_host", "admin_port"),
        *("upstream", "upstream_ca", "engine", "tokenizer", "tls_cert", "tls_key"),
        *("embedded_cells", "embedded_slots", "embedded_context"),
    }
)
# What of an upstream can be changed while it runs.
LIMITS = ("total_blocks", "block_size", "context", "max_seqs", "safety_fraction")


class CannotReload(ValueError):
    """Nothing was changed; the message says why."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Settings by name: `changed` from one value to another; `kept` would need a restart."""

    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    kept: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people: one line each."""
        told = [f"{_flag(name)} {_shown(old)} -> {_shown(new)}" for name, (old, new) in self.changed.items()]
        told += [
            f"{_flag(name)} stays {_shown(old)}, not {_shown(new)}: it needs a restart"
            for name, (old, new) in self.kept.items()
        ]
        return told or ["nothing has changed"]


def apply(gateway: Gateway, wanted: Settings) -> Reloaded:
    """Swap `gateway.settings` for `wanted`, as far as it can be done now. Raises `CannotReload`."""
    old = gateway.settings
    differing = {
        each.name: (getattr(old, each.name), getattr(wanted, each.name))
        for each in fields(Settings)
        if getattr(old, each.name) != getattr(wanted, each.name)
    }
    kept = {name: pair for name, pair in differing.items() if name in FIXED}
    if not _are_the_same(old.upstreams, wanted.upstreams):
        kept["upstreams"] = differing["upstreams"]
    changed = {name: pair for name, pair in differing.items() if name not in kept}
    settings = replace(wanted, **{name: pair[0] for name, pair in kept.items()})
    sizes = _sizes(gateway, settings) if changed.keys() & {*LIMITS, "upstreams"} else {}
    if gateway.tls is not None and settings.tls_cert is not None:
        # The files may hold a new certificate under the old name.
        try:
            tls.load(gateway.tls, settings.tls_cert, settings.tls_key)
        except tls.BadCertificate as bad:
            raise CannotReload(str(bad)) from None
    try:
        tenants_of(settings, 1)
        for given in settings.upstreams:
            access_of(given, settings)
        gateway.use(settings)
    except (Misuse, ValueError) as wrong:
        raise CannotReload(str(wrong)) from None
    for upstream in gateway.upstreams:
        facts = sizes.get(upstream, upstream.facts)
        if upstream in sizes:
            upstream.resize(facts)
            upstream.use(settings, gateway.keys)
            sizing.watch(upstream, settings)
        elif changed.keys() & {"line_limit", "line_tokens"}:
            # Those who wait are looked at again: there may be room for them now.
            upstream.keeper.resize(facts)
    return Reloaded(changed, kept)


def _are_the_same(old: tuple[UpstreamSettings, ...], new: tuple[UpstreamSettings, ...]) -> bool:
    """Whether they differ in nothing but their limits."""
    blank: dict[str, Any] = dict.fromkeys(LIMITS)
    return [replace(each, **blank) for each in old] == [replace(each, **blank) for each in new]


def cap_rules(settings: Settings, shape: RequestShape) -> CapRules:
    """The engine's default for the endpoint counts only where the operator has none."""
    if not shape.generates:
        return CapRules()
    default = settings.default_output_cap
    return CapRules(shape.default_cap if default is None else default, settings.max_output_cap)


def _sizes(gateway: Gateway, settings: Settings) -> dict[Upstream, PoolFacts]:
    """The pools that have other sizes with `settings`. Raises `CannotReload`."""
    found = {}
    engines = {given.url: given for given in settings.upstreams}
    for upstream in gateway.upstreams:
        given = engines[upstream.url]
        sizes = sizes_of(given, settings)
        # What is not given was told by the engine itself, and still holds.
        is_told = upstream.found_name is not None or sizes["total_blocks"] is None
        told: dict[str, Any] = {k: v for k, v in sizes.items() if v is not None or not is_told}
        try:
            fraction = fraction_of(given, settings)
            # What a correction of the old sizes had left open is looked at anew.
            facts = replace(upstream.facts, safety_fraction=fraction, most_fraction=None, **told)
        except (Misuse, TypeError) as wrong:
            raise CannotReload(f"the sizes of the engine are not complete: {wrong}") from None
        if upstream.is_sized and facts.usable_blocks < 1:
            raise CannotReload("the sizes leave no usable block: every request would be refused")
        upstream.given = given
        if upstream.is_sized and facts != upstream.facts:
            found[upstream] = facts
    return found


def _flag(name: str) -> str:
    return "--" + _FLAGS.get(name, name.replace("_", "-"))


_FLAGS = {"allow_paths": "allow-path", "upstreams": "upstream", "tenants": "tenant", "classes": "class"}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(_shown(each) for each in value) or "none"
    if is_dataclass(value):
        told = getattr(value, "url", None)
        return told or ",".join(f"{name}={each}" for name, each in plain(value).items())
    return "unset" if value is None else str(value)


def plain(value: Any) -> Any:
    """A setting as JSON has it. Of a record what differs from the default, and no hash of a key."""
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if not is_dataclass(value):
        return value
    named = {each.name: getattr(value, each.name) for each in fields(value) if each.name != "key_hashes"}
    defaults = {each.name: each.default for each in fields(value)}
    return {name: plain(each) for name, each in named.items() if each != defaults[name]}
