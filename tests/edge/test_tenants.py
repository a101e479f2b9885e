"""Whose a request is, who may come in, and that no key is kept in clear."""

from __future__ import annotations

import asyncio
import hashlib
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from harness import Client, Stack, request
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.records import ANYONE, CapRules, Misuse, Tenant
from kvgate.core.tenancy import ClassRule, TenantRule
from kvgate.edge.relay.heads import Headers
from kvgate.edge.tenants import (
    LABELS_MAX,
    OTHER,
    Labels,
    Tenants,
    class_rules,
    hash_of,
    read_keys,
    tenant_rules,
)

SECRET = "sk-very-secret-0001"
HASH = hashlib.sha256(SECRET.encode()).hexdigest()
ACME = {"name": "acme", "keys": [SECRET], "weight": 3, "ceiling": 0.5, "max-output-cap": 100, "priority": 1}


def bearer(key: str = SECRET) -> Headers:
    return [(b"Host", b"x"), (b"Authorization", b"Bearer " + key.encode())]


def tenants(*tables: dict[str, Any], **options: Any) -> Tenants:
    return Tenants(tenant_rules(list(tables)), usable_blocks=1000, **options)


@pytest.mark.parametrize(
    "headers",
    [
        bearer(),
        [(b"x-api-key", SECRET.encode())],
        [(b"API-Key", SECRET.encode())],
        [(b"authorization", b"  bearer   " + SECRET.encode() + b" ")],
        [(b"authorization", SECRET.encode())],
    ],
)
def test_a_tenant_is_known_by_its_key_however_it_is_sent(headers: Headers) -> None:
    assert tenants(ACME).of(headers) == (Tenant("acme", 3, 500, 1), CapRules(None, 100))


def test_a_hash_in_the_file_is_as_good_as_the_key() -> None:
    by_hash = {"name": "acme", "key-hashes": [f"sha256:{HASH.upper()}"]}
    assert tenants(by_hash).of(bearer())[0].name == "acme"


def test_strangers_are_the_default_tenant_and_share_its_values() -> None:
    known = tenants(ACME, {"name": "default", "weight": 0.5, "ceiling": 100, "default-output-cap": 64})
    for headers in (bearer("other"), [], [(b"authorization", b"")]):
        assert known.of(headers) == (Tenant("default", 0.5, 100), CapRules(64, None))
    assert tenants(ACME).of(bearer("other")) == (ANYONE, CapRules())


def test_each_key_may_be_a_tenant_of_its_own() -> None:
    known = tenants(ACME, {"name": "default", "weight": 2, "ceiling": 10}, per_key=True)
    one, two = known.of(bearer("one"))[0], known.of(bearer("two"))[0]
    assert one != two
    assert (one.weight, one.ceiling) == (2, 10)
    assert known.of(bearer("one"))[0] == one
    assert known.of(bearer())[0].name == "acme"
    assert known.of([])[0].name == "default"


def test_a_tenant_header_is_ignored_unless_it_is_trusted() -> None:
    claim: Headers = [(b"X-Tenant", b"acme")]
    assert tenants(ACME).of([*bearer("other"), *claim])[0] is ANYONE
    trusting = tenants(ACME, trusted_header="x-tenant")
    assert trusting.of([*bearer("other"), *claim])[0].name == "acme"
    assert trusting.of(bearer())[0].name == "acme"
    assert trusting.of([(b"x-tenant", b"nobody")])[0] is ANYONE


@given(st.binary(max_size=100))
def test_a_trusted_header_cannot_make_a_strange_name(value: bytes) -> None:
    name = tenants(per_key=True, trusted_header="x-tenant").of([(b"x-tenant", value)])[0].name
    assert len(name) <= 64
    assert all(c.isascii() and (c.isalnum() or c in "._-") for c in name)


@pytest.mark.as_python
def test_no_key_is_kept_in_clear() -> None:
    known = tenants(ACME, per_key=True)
    known.of(bearer())
    known.of(bearer("sk-another-secret"))
    shown = repr(tenant_rules([ACME])) + repr(vars(known)) + repr(known.of(bearer("sk-another-secret")))
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "name must be"),
        ({"name": "a b"}, "name must be"),
        ({"name": "a", "wieght": 1}, "unknown key 'wieght'"),
        ({"name": "a", "weight": "1"}, "weight must be a number"),
        ({"name": "a", "weight": True}, "weight must be a number"),
        ({"name": "a", "weight": -1}, "weight"),
        ({"name": "a", "ceiling": 1.5}, "fraction"),
        ({"name": "a", "priority": 1.5}, "whole number"),
        ({"name": "a", "key-hashes": ["abc"]}, "64 hex digits"),
        ({"name": "a", "keys": SECRET}, "a list"),
    ],
)
def test_a_mistake_in_a_table_is_named_and_shows_no_key(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as wrong:
        tenant_rules([table])
    assert SECRET not in str(wrong.value)


def test_two_tenants_cannot_share_a_name_or_a_key() -> None:
    with pytest.raises(Misuse, match="share a key"):
        tenants(ACME, {"name": "b", "keys": [SECRET]})
    with pytest.raises(Misuse, match="named acme"):
        Tenants([TenantRule("acme"), TenantRule("acme")], usable_blocks=1)


def test_tenants_in_a_pool_of_another_size_are_the_same_with_other_ceilings() -> None:
    table = {"name": "default", "ceiling": 0.1}
    known = tenants(ACME, table, per_key=True, trusted_header="x-tenant", keys=frozenset({HASH}))
    smaller = known.sized(400, 1000)
    before = [known.of(h)[0] for h in (bearer(), [], bearer("k9"), [(b"x-tenant", b"acme")])]
    after = [smaller.of(h)[0] for h in (bearer(), [], bearer("k9"), [(b"x-tenant", b"acme")])]

    assert [each.ceiling for each in before] == [500, 100, 100, 500]
    assert [(each.ceiling, each.never_above) for each in after] == [
        (200, 500),
        (40, 100),
        (40, 100),
        (200, 500),
    ]
    assert [smaller.again(each) for each in before] == after
    assert smaller.again(Tenant("gone", 2.0, 7)).ceiling == 40  # a stranger's, as any other
    assert tenants(ACME).again(Tenant("gone", 2.0, 7)) == Tenant("gone", 2.0, 7)
    assert smaller.may_enter(bearer())
    assert not smaller.may_enter(bearer("k9"))


def test_floors_are_read_and_cannot_promise_more_than_there_is() -> None:
    assert class_rules([{"priority": 0, "floor": 0.2}]) == (ClassRule(0, 0.2),)
    for wrong, says in (
        ([{"priority": 0}], "floor is missing"),
        ([{"priority": 0, "floor": 2}], "floor"),
        ([{"priority": 0, "floor": 0.6}, {"priority": 1, "floor": 0.6}], "add up"),
        ([{"priority": 0, "floor": 0.1}] * 2, "twice"),
    ):
        with pytest.raises(ValueError, match=says):
            class_rules(wrong)


def test_a_keys_file_lets_in_its_keys_and_those_of_the_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    other = hashlib.sha256(b"hashed-one").hexdigest()
    file.write_text(f"# who may come in\nplain-one\nsha256:{other}  # the second\n\n")
    keys = read_keys(file)
    assert all(len(key) == 64 for key in keys)
    known = tenants(ACME, keys=keys)
    for good in ("plain-one", "hashed-one", SECRET):
        assert known.may_enter(bearer(good))
    for bad in ([], bearer("wrong"), bearer(other)):
        assert not known.may_enter(bad)
    assert tenants(ACME).may_enter([])


def test_a_keys_file_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(ValueError, match=name):
            read_keys(tmp_path / name)


def test_names_in_the_metrics_are_bounded() -> None:
    labels = Labels(["acme"])
    shown = [labels.of(f"key-{n}") for n in range(3 * LABELS_MAX)]
    assert shown[:2] == ["key-0", "key-1"]
    assert set(shown[LABELS_MAX:]) == {OTHER}
    assert labels.of("key-0") == "key-0"
    assert labels.of("acme") == "acme"
    assert Labels().of("") == "default"
    labels.know(["late"])
    assert labels.of("late") == "late"


def test_a_request_without_a_key_has_no_hash() -> None:
    assert hash_of([(b"authorization", b"Bearer ")]) is None
    assert hash_of(bearer()) == HASH


def test_the_metrics_tell_tenants_apart_and_follow_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "kvgate.toml"
    table = '[[tenant]]\nname = "{}"\nkeys = ["{}"]\n'
    file.write_text(table.format("acme", SECRET))
    stack = Stack("--config", str(file))
    name = "kvgate_tenant_requests_total"
    done = f'{name}{{outcome="completed",tenant="%s"}} %s'
    held = 'kvgate_tenant_reserved_blocks{tenant="acme"} %s'
    try:
        assert done % ("acme", "0.0") in stack.metrics()
        asyncio.run(one_request_each(stack, held % "0.0"))
        shown = stack.metrics()
        assert done % ("acme", "1.0") in shown
        assert done % ("default", "1.0") in shown
        assert SECRET not in shown
        file.write_text(table.format("acme", SECRET) + table.format("late", "sk-late"))
        url = f"http://127.0.0.1:{stack.gateway.admin_port}/reload"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=5) as answer:
            told = json.loads(answer.read())
        assert told["changed"]["tenants"] == {
            "from": [{"name": "acme"}],
            "to": [{"name": "acme"}, {"name": "late"}],
        }
        shown = stack.metrics()
        assert done % ("acme", "1.0") in shown
        assert done % ("late", "0.0") in shown
    finally:
        stack.stop()


async def one_request_each(stack: Stack, nothing_held: str) -> None:
    key = f"Authorization: Bearer {SECRET}\r\n"
    slow = {"chunks": 200, "interval_ms": 20}
    client = await Client.connect(stack.port)
    client.send(request(script=slow, headers=key))
    await client.events(1)
    assert nothing_held not in await asyncio.to_thread(stack.metrics)
    client.cut()
    await stack.until(reserved_blocks=0)
    assert nothing_held in await asyncio.to_thread(stack.metrics)
    assert (await stack.fetch(request(headers=key))).status == 200
    assert (await stack.fetch(request(headers="Authorization: Bearer sk-other\r\n"))).status == 200
    await stack.until(reserved_blocks=0)
