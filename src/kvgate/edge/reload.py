"""Change a running gateway's limits: no stream is dropped, nothing held is lost.

Promises: every setting either takes effect for the next request or is reported as one that needs a
restart, and keeps its old value; either all of it is applied or, on an error, nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from kvgate.config import Settings
from kvgate.core.records import CapRules, Misuse, PoolFacts
from kvgate.edge import tls
from kvgate.wire.dialects.shape import RequestShape

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway

# What a running process stands on: its sockets, its engine.
FIXED = frozenset(
    {
        *("listen_host", "listen_port", "admin_host", "admin_port"),
        *("upstream", "upstream_ca", "engine", "tls_cert", "tls_key"),
        *("embedded_cells", "embedded_slots", "embedded_context"),
    }
)
SIZES = ("total_blocks", "block_size", "context", "max_seqs")


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
    changed = {name: pair for name, pair in differing.items() if name not in FIXED}
    settings = replace(wanted, **{name: pair[0] for name, pair in kept.items()})
    facts = _facts(gateway.gate.facts, settings)
    if gateway.tls is not None and settings.tls_cert is not None:
        # The files may hold a new certificate under the old name.
        try:
            tls.load(gateway.tls, settings.tls_cert, settings.tls_key)
        except tls.BadCertificate as wrong:
            raise CannotReload(str(wrong)) from None
    gateway.use(settings)
    if facts != gateway.gate.facts or "line_limit" in changed:
        # Those who wait are looked at again: there may be room for them now.
        gateway.keeper.resize(facts)
    return Reloaded(changed, kept)


def cap_rules(settings: Settings, shape: RequestShape) -> CapRules:
    """The engine's default for the endpoint counts only where the operator has none."""
    if not shape.generates:
        return CapRules()
    default = settings.default_output_cap
    return CapRules(shape.default_cap if default is None else default, settings.max_output_cap)


def _facts(now: PoolFacts, settings: Settings) -> PoolFacts:
    # The embedded engine has sizes of its own, and none in the settings.
    given = {name: getattr(settings, name) for name in SIZES if settings.total_blocks is not None}
    try:
        facts = replace(now, safety_fraction=settings.safety_fraction, **given)
    except (Misuse, TypeError) as wrong:
        raise CannotReload(f"the sizes of the engine are not complete: {wrong}") from None
    if facts.usable_blocks < 1:
        raise CannotReload("the sizes leave no usable block: every request would be refused")
    return facts


def _flag(name: str) -> str:
    return "--" + ("allow-path" if name == "allow_paths" else name.replace("_", "-"))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "unset" if value is None else str(value)
