"""What the operator says about tenants: names, shares, limits. Records only; `edge.tenants` finds whose
a request is, and `shares` enforces what is said here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.core.records import CapRules, Misuse, Tenant

DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True)
class TenantRule:
    """One `[[tenant]]` of the config file.

    `key_hashes`: SHA-256 of its API keys, in hex. `ceiling_blocks` or `ceiling_fraction` (of the usable
    blocks): the most it may hold at once. `default_output_cap`, `max_output_cap`: tokens, where they
    differ from what holds for everybody.
    """

    name: str
    key_hashes: tuple[str, ...] = ()
    weight: float = 1.0
    ceiling_blocks: int | None = None
    ceiling_fraction: float | None = None
    default_output_cap: int | None = None
    max_output_cap: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if self.ceiling_blocks is not None and self.ceiling_fraction is not None:
            raise Misuse(f"tenant {self.name}: a ceiling is given in blocks or as a fraction, not both")
        if self.ceiling_fraction is not None and not 0 < self.ceiling_fraction <= 1:
            raise Misuse(f"tenant {self.name}: a ceiling as a fraction must be above 0 and at most 1")
        for cap in (self.default_output_cap, self.max_output_cap):
            if cap is not None and cap < 1:
                raise Misuse(f"tenant {self.name}: an output cap must be at least 1")
        self.tenant(1)  # the rest is held to the rules of a Tenant

    def tenant(self, usable_blocks: int, most_blocks: int | None = None) -> Tenant:
        """As the gate knows it, in a pool of so many usable blocks, that may become `most_blocks` (None:
        never more)."""
        if self.ceiling_fraction is None:
            return Tenant(self.name, self.weight, self.ceiling_blocks, self.priority)
        ceiling, most = (
            max(1, int(blocks * self.ceiling_fraction)) for blocks in (usable_blocks, most_blocks or 0)
        )
        return Tenant(self.name, self.weight, ceiling, self.priority, most if most > ceiling else None)

    @property
    def rules(self) -> CapRules:
        return CapRules(self.default_output_cap, self.max_output_cap)


@dataclass(frozen=True, slots=True)
class ClassRule:
    """One `[[class]]`: tenants of `priority` go before all others while they hold less than `floor`, a
    share of the usable blocks."""

    priority: int
    floor: float

    def __post_init__(self) -> None:
        if not 0 <= self.floor < 1:
            raise Misuse(f"class {self.priority}: a floor must be at least 0 and below 1, got {self.floor}")


def both(everybody: CapRules, own: CapRules) -> CapRules:
    """The caps of one tenant: its own default where it has one, and the lower of the two ceilings."""
    if own.default is None and own.ceiling is None:
        return everybody
    ceilings = [cap for cap in (everybody.ceiling, own.ceiling) if cap is not None]
    default = everybody.default if own.default is None else own.default
    return CapRules(default, min(ceilings, default=None))
