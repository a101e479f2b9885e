"""Whose a request is: by its API key, or by a header where the operator trusts whoever sets it.

Promises: a key is hashed as soon as it is looked at, and is never kept, logged or shown in clear; a
header that nobody was told to trust is ignored, so no client can choose its tenant; what clients send
cannot grow the number of names in the metrics without end.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvgate.core.records import ANYONE, CapRules, Misuse, Tenant
from kvgate.core.tenancy import DEFAULT_NAME, ClassRule, TenantRule
from kvgate.edge.relay.heads import Headers
from kvgate.edge.upstreams.access import key_in

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
# Names of tenants in the metrics beside those in the config file.
LABELS_MAX = 50
OTHER = "other"
_NO_RULES = CapRules()


class Tenants:
    """The tenants of one configuration and one size of pool; made anew when either changes (`sized`).

    `usable_blocks`: what ceilings are fractions of; `most_blocks`: what that may become again, where
    something is held back now (None: nothing is). `per_key`: a key that no rule names is a tenant of its
    own, with the values of the default one. `trusted_header`: its value is the name of the tenant.
    `keys`: hashes of the keys that may come in at all (None: authentication is the engine's business).
    """

    def __init__(
        self,
        rules: Iterable[TenantRule] = (),
        *,
        usable_blocks: int,
        most_blocks: int | None = None,
        per_key: bool = False,
        trusted_header: str | None = None,
        keys: frozenset[str] | None = None,
    ) -> None:
        self._header = trusted_header
        self._trusted = None if trusted_header is None else trusted_header.lower().encode("latin-1")
        self._per_key = per_key
        self._keys = keys
        self._rules = tuple(rules)
        self._by_name: dict[str, tuple[Tenant, CapRules]] = {}
        self._by_hash: dict[str, tuple[Tenant, CapRules]] = {}
        for rule in self._rules:
            if rule.name in self._by_name:
                raise Misuse(f"two tenants are named {rule.name}")
            found = self._by_name[rule.name] = rule.tenant(usable_blocks, most_blocks), rule.rules
            for key_hash in rule.key_hashes:
                if key_hash in self._by_hash:
                    raise Misuse(f"tenants {self._by_hash[key_hash][0].name} and {rule.name} share a key")
                self._by_hash[key_hash] = found
        self._default = self._by_name.get(DEFAULT_NAME, (ANYONE, _NO_RULES))
        self.names = frozenset(self._by_name)

    def sized(self, usable_blocks: int, most_blocks: int | None = None) -> Tenants:
        """The same tenants in a pool of another size."""
        return Tenants(
            self._rules,
            usable_blocks=usable_blocks,
            most_blocks=most_blocks,
            per_key=self._per_key,
            trusted_header=self._header,
            keys=self._keys,
        )

    def again(self, tenant: Tenant) -> Tenant:
        """What holds now for a tenant that was found before; itself where it has no rule any more."""
        found = self._by_name.get(tenant.name)
        if found is not None:
            return found[0]
        return self._stranger(tenant.name)[0] if self._per_key and tenant.name else tenant

    def of(self, headers: Headers) -> tuple[Tenant, CapRules]:
        """The tenant of a request and the caps that are its own (None in them: as for everybody)."""
        if self._trusted is not None:
            named = next((value for name, value in headers if name.lower() == self._trusted), None)
            if named is not None:
                return self._named(named.decode("latin-1"))
        if not self._by_hash and not self._per_key:
            return self._default
        key_hash = hash_of(headers)
        if key_hash is None:
            return self._default
        return self._by_hash.get(key_hash) or self._stranger(f"key-{key_hash[:12]}")

    def may_enter(self, headers: Headers) -> bool:
        """False where a keys file is in use and the request has none of its keys."""
        if self._keys is None:
            return True
        key_hash = hash_of(headers)
        return key_hash in self._keys or key_hash in self._by_hash

    def _named(self, name: str) -> tuple[Tenant, CapRules]:
        found = self._by_name.get(name)
        if found is not None:
            return found
        return self._stranger(name) if _NAME.fullmatch(name) else self._default

    def _stranger(self, name: str) -> tuple[Tenant, CapRules]:
        tenant, rules = self._default
        if not self._per_key:
            return tenant, rules
        return Tenant(name, tenant.weight, tenant.ceiling, tenant.priority, tenant.most_ceiling), rules


class Labels:
    """Names for the metrics: all that are configured, the first few others, and then `other`.

    May be asked from any thread; only a name that is new waits for the lock.
    """

    def __init__(self, configured: Iterable[str] = (), limit: int = LABELS_MAX) -> None:
        self._known = set(configured)
        self._left = limit
        self._lock = threading.Lock()

    def know(self, configured: Iterable[str]) -> None:
        """These are configured now, too: they have labels of their own whatever else came before."""
        self._known.update(configured)

    def of(self, name: str) -> str:
        """The label of the tenant of this name (empty: of everybody who is not told apart)."""
        name = name or DEFAULT_NAME
        if name in self._known:
            return name
        with self._lock:
            if name not in self._known:
                if self._left <= 0:
                    return OTHER
                self._left -= 1
                self._known.add(name)
        return name


def hash_of(headers: Headers) -> str | None:
    """SHA-256 of the API key of a request, in hex; None where it has none."""
    key = key_in(headers)
    return None if key is None else hashlib.sha256(key).hexdigest()


def read_keys(path: Path) -> frozenset[str]:
    """The hashes of a keys file: a key or `sha256:HEX` on each line, `#` begins a comment.

    Raises `ValueError` without quoting what is wrong: it may be most of a key.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as wrong:
        raise ValueError(f"{path}: {wrong.__class__.__name__}, cannot be read") from None
    found = [line.partition("#")[0].strip() for line in lines]
    keys = frozenset(_hashed(key) for key in found if key)
    if not keys:
        raise ValueError(f"{path}: no key in it; everybody would be turned away")
    return keys


def tenant_rules(tables: list[Mapping[str, Any]]) -> tuple[TenantRule, ...]:
    """The `[[tenant]]` tables of a config file. Raises `ValueError` that names the tenant and the key.

    Keys in clear are hashed here and go no further.
    """
    return tuple(_tenant_rule(number, table) for number, table in enumerate(tables, start=1))


def class_rules(tables: list[Mapping[str, Any]]) -> tuple[ClassRule, ...]:
    """The `[[class]]` tables. Raises `ValueError` where they promise more than there is."""
    made = []
    for table in tables:
        values = _known(table, {"priority": int, "floor": float}, "[[class]]")
        try:
            made.append(ClassRule(int(values["priority"]), float(values["floor"])))
        except KeyError as missing:
            raise ValueError(f"[[class]]: {missing.args[0]} is missing") from None
        except Misuse as wrong:
            raise ValueError(str(wrong)) from None
    if len({each.priority for each in made}) < len(made):
        raise ValueError("[[class]]: a priority is there twice")
    if sum(each.floor for each in made) > 1:
        raise ValueError("[[class]]: the floors add up to more than the pool")
    return tuple(made)


_TENANT_KEYS: dict[str, type] = {
    "name": str,
    "keys": list,
    "key_hashes": list,
    "weight": float,
    "ceiling": float,
    "default_output_cap": int,
    "max_output_cap": int,
    "priority": int,
}


def _tenant_rule(number: int, table: Mapping[str, Any]) -> TenantRule:
    where = f"[[tenant]] {table.get('name', number)}"
    values = _known(table, _TENANT_KEYS, where)
    name = values.get("name")
    if name is None or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: name must be 1 to 64 letters, digits, dots, - or _")
    hashes = [hashlib.sha256(str(key).encode("utf-8")).hexdigest() for key in values.pop("keys", [])]
    for text in values.pop("key_hashes", []):
        match = _HASH.fullmatch(str(text))
        if match is None:
            raise ValueError(f"{where}: a key hash is sha256: and 64 hex digits (sha256sum makes them)")
        hashes.append(match[1].lower())
    ceiling = values.pop("ceiling", None)
    if isinstance(ceiling, float):
        values["ceiling_fraction"] = ceiling
    elif ceiling is not None:
        values["ceiling_blocks"] = ceiling
    try:
        return TenantRule(key_hashes=tuple(dict.fromkeys(hashes)), **values)
    except Misuse as wrong:
        raise ValueError(f"{where}: {wrong}") from None


def _known(table: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        kind = kinds.get(name)
        if kind is None:
            choices = ", ".join(each.replace("_", "-") for each in kinds)
            raise ValueError(f"{where}: unknown key {key!r}. There are {choices}.")
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{where}: {key} must be {_KIND_NAMES[kind]}")
        values[name] = value
    return values


_KIND_NAMES = {str: "a string", list: "a list of strings", float: "a number", int: "a whole number"}


def _hashed(text: str) -> str:
    match = _HASH.fullmatch(text) if text.startswith("sha256:") else None
    return match[1].lower() if match else hashlib.sha256(text.encode("utf-8")).hexdigest()
