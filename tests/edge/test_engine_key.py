"""The key that an engine asks for: where it is read, with what it is sent, and that it is shown nowhere."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from guarded_engine import PUBLIC, Guarded, guarded, guarded_llamacpp, keys_in
from harness import fetch, payload, request
from inside import settle

from engine_pages import llamacpp, model_list, pages, sglang, tgi, vllm
from kvgate.config import Settings, UpstreamSettings
from kvgate.edge.gateway import Gateway
from kvgate.edge.housekeeping import probe
from kvgate.edge.observing.telemetry import Telemetry
from kvgate.edge.reload import CannotReload
from kvgate.edge.upstreams import sizing
from kvgate.edge.upstreams.access import OPEN, Access, access_of, key_from, key_in
from kvgate.edge.upstreams.sizing import SizesUnknown
from kvgate.lab.tiny_gguf import write_tiny_gguf
from kvgate.wire.engines.found import Page

SECRET, OTHER = "sk-engine-0815", "sk-client-4711"
CALLERS = f"Authorization: Bearer {OTHER}\r\n"
OWN = f"Authorization: Bearer {SECRET}\r\n"
COMPLETIONS = "/v1/completions"
ALL: dict[str, Mapping[str, Page]] = {
    "vllm": vllm(),
    "sglang": sglang(),
    "llamacpp": llamacpp(),
    "tgi": tgi(),
    "lmdeploy": pages({"/v1/models": model_list("lmdeploy", "m"), "/metrics": ""}),
    "tensorrt-llm": pages({"/v1/models": model_list("tensorrt_llm", "m")}),
    "generic": pages({"/v1/models": model_list("somebody", "m")}),
}
SIZES = {"total_blocks": 500, "block_size": 16, "context": 4096}


@pytest.fixture(autouse=True)
def in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", SECRET)


def access(given: UpstreamSettings | None = None, **settings: Any) -> Access:
    return access_of(given or UpstreamSettings("http://e"), Settings(**settings), {"A": SECRET, "B": OTHER})


def test_a_key_comes_from_a_variable_or_a_file_and_one_engines_own_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")

    assert access().own == []
    assert access(upstream_api_key_env="A").own == [(b"authorization", b"Bearer " + SECRET.encode())]
    assert access(upstream_api_key_file=str(file)).own == access(upstream_api_key_env="A").own
    own = UpstreamSettings("http://e", api_key_env="B")
    assert access(own, upstream_api_key_file=str(file)).own == [
        (b"authorization", b"Bearer " + OTHER.encode())
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"upstream_api_key_env": "MISSING"}, "variable MISSING is empty or not set"),
        ({"upstream_api_key_env": "A", "upstream_api_key_file": "f"}, "not in both"),
        ({"upstream_api_key_file": "nowhere"}, "nowhere: FileNotFoundError"),
    ],
)
def test_a_key_that_is_not_there_is_told_by_where_it_should_be(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        access(**settings)


@pytest.mark.parametrize("text", ["", "\n", f"{SECRET}\r\nx-evil: 1", f"{SECRET} two", "schl\u00fcssel"])
def test_a_file_with_something_else_is_refused_and_not_quoted(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ValueError, match="key") as wrong:
        access(upstream_api_key_file=str(file))
    assert SECRET not in str(wrong.value)
    assert "evil" not in str(wrong.value)


def test_it_goes_with_clients_requests_only_where_that_is_said_and_then_in_place_of_theirs() -> None:
    line = b"authorization: Bearer " + SECRET.encode() + b"\r\n"
    everywhere = frozenset({b"authorization", b"x-api-key", b"api-key"})

    assert Access(SECRET, replaces=True).towards == (everywhere, line)
    assert access(upstream_api_key_env="A").towards == OPEN.towards == (frozenset(), b"")
    assert key_in([(b"Authorization", b"Bearer " + OTHER.encode())]) == OTHER.encode()


def test_the_keys_of_clients_are_replaced_where_kvgate_itself_asks_for_them() -> None:
    known = {"upstream_api_key_env": "A"}

    assert not access(**known).replaces
    assert access(**known, api_keys="file").replaces
    assert not access(**known, api_keys="file", replace_client_keys=False).replaces
    assert access(UpstreamSettings("http://e", replace_client_keys=True), **known).replaces
    assert not access(replace_client_keys=True).replaces  # there is nothing to put in their place


def test_no_repr_shows_it() -> None:
    assert SECRET not in repr(Access(SECRET)) + repr(vars(type(Access(SECRET))))


@asynccontextmanager
async def before(engine: Guarded, /, **settings: Any) -> AsyncIterator[Gateway]:
    chosen = Settings(
        upstreams=(UpstreamSettings(engine.url),),
        upstream_api_key_env="ENGINE_KEY",
        listen_port=0,
        abort_grace=0.0,
        drain_timeout=0.0,
    )
    gateway = Gateway(replace(chosen, **settings))
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()
        await settle()


@pytest.mark.parametrize("name", sorted(ALL))
async def test_a_guarded_engine_is_found_and_looked_at_with_its_key(name: str) -> None:
    given: dict[str, Any] = SIZES if name in ("lmdeploy", "tensorrt-llm", "generic") else {}
    known = {"engine": name} if name == "generic" else {}
    async with (
        guarded(ALL[name], SECRET, PUBLIC[name]) as engine,
        before(engine, **given, **known) as gateway,
    ):
        upstream = gateway.upstreams[0]
        assert (upstream.engine.name, upstream.is_sized, upstream.is_up) == (name, True, True)
        assert "key_needed" not in {each["code"] for each in upstream.warnings}
        await sizing.look(gateway.upstreams)
        assert all(keys_in(head) == [b"Bearer " + SECRET.encode()] for head in engine.seen)
        shown = json.dumps(gateway.snapshot()) + Telemetry(gateway.snapshot).render().decode()
        assert SECRET not in shown


@pytest.mark.parametrize("name", sorted(set(ALL) - {"tgi"}))
@pytest.mark.parametrize("key", [None, "wrong"])
async def test_an_engine_that_refuses_the_question_ends_the_start_with_the_fix(
    name: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", key or "x")
    variable = None if key is None else "ENGINE_KEY"
    async with guarded(ALL[name], SECRET, PUBLIC[name]) as engine:
        with pytest.raises(
            SizesUnknown, match=r"asks for an API key.*401 at /v1/models.*--upstream-api-key-env"
        ):
            async with before(engine, upstream_api_key_env=variable):
                pass
    await settle()


async def test_sizes_that_are_given_make_the_question_unnecessary() -> None:
    known = {"engine": "vllm", "upstream_api_key_env": None, **SIZES}
    async with guarded(vllm(), SECRET) as engine, before(engine, **known) as gateway:
        ours = await fetch(gateway.port, completion(f"Authorization: Bearer {SECRET}\r\n"))
        assert (gateway.upstreams[0].is_sized, ours.status) == (True, 200)
        assert (await fetch(gateway.port, completion())).status == 401


def completion(headers: str = "") -> bytes:
    return request(COMPLETIONS, {"model": "tiny", "prompt": "hello", "max_tokens": 4}, headers=headers)


@pytest.mark.parametrize(
    ("settings", "headers", "sent"),
    [
        ({}, "", ""),
        ({}, CALLERS, OTHER),
        ({}, f"Authorization: Bearer {SECRET}\r\n", SECRET),
        ({"replace_client_keys": True}, "", SECRET),
        ({"replace_client_keys": True}, CALLERS, SECRET),
        ({"replace_client_keys": True}, f"{CALLERS}x-api-key: {OTHER}\r\n", SECRET),
    ],
)
async def test_counting_and_generating_go_with_the_same_key(
    settings: dict[str, Any], headers: str, sent: str
) -> None:
    async with guarded(vllm(), SECRET, ("/metrics", "/version")) as engine:
        async with before(engine, **settings) as gateway:
            answer = await fetch(gateway.port, completion(headers))
        assert answer.status == (200 if sent == SECRET else 401)
        asked = engine.posts(b"/tokenize") + engine.posts(COMPLETIONS.encode())
        assert asked
        assert [keys_in(head) for head in asked] == [[b"Bearer " + sent.encode()] if sent else []] * len(
            asked
        )
        if sent == SECRET:
            assert not any(OTHER.encode() in head for head in engine.seen)


async def test_a_list_of_client_keys_at_kvgate_keeps_them_from_the_engine(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{OTHER}\n")
    async with guarded(vllm(), SECRET) as engine, before(engine, api_keys=str(keys)) as gateway:
        assert (await fetch(gateway.port, completion(CALLERS))).status == 200
        assert (await fetch(gateway.port, completion())).code == "invalid_api_key"
        assert not any(OTHER.encode() in head for head in engine.seen)


async def test_a_key_that_changes_in_its_file_is_used_after_a_reload_and_an_empty_one_is_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET)
    own = {"upstream_api_key_env": None, "upstream_api_key_file": str(file), "replace_client_keys": True}
    async with guarded(vllm(), SECRET) as engine, before(engine, **own) as gateway:
        engine.key = "sk-rotated"
        assert (await fetch(gateway.port, completion())).status == 401
        file.write_text("sk-rotated")
        gateway.reload(gateway.settings)
        assert (await fetch(gateway.port, completion())).status == 200
        file.write_text("")
        with pytest.raises(CannotReload, match="must hold the engine's API key"):
            gateway.reload(gateway.settings)
        assert (await fetch(gateway.port, completion())).status == 200


async def test_a_key_file_that_is_away_while_the_engine_comes_back_keeps_nobody_out(tmp_path: Path) -> None:
    """The file is read at the start and with a reload, and at no other moment."""
    file = tmp_path / "key"
    file.write_text(SECRET)
    own = {"upstream_api_key_env": None, "upstream_api_key_file": str(file), "replace_client_keys": True}
    async with guarded(vllm(), SECRET) as engine, before(engine, **own) as gateway:
        file.unlink()
        gateway.upstreams[0].was_away = True
        await probe(gateway, gateway.engines)

        assert (gateway.upstreams[0].is_up, gateway.upstreams[0].was_away) == (True, False)
        assert (await fetch(gateway.port, completion())).status == 200


async def test_a_reload_whose_keys_file_cannot_be_read_changes_nothing() -> None:
    always = {"replace_client_keys": True}
    async with guarded(vllm(), SECRET) as engine, before(engine, **always) as gateway:
        old = gateway.settings
        with pytest.raises(CannotReload, match="nowhere: FileNotFoundError"):
            gateway.reload(replace(old, api_keys="nowhere", max_connections=1, allow_paths=("/x",)))
        assert gateway.settings is old
        assert (gateway.keys, gateway.allow_paths) == (None, frozenset())
        assert (await fetch(gateway.port, completion())).status == 200


def test_a_variable_is_read_without_what_stands_around_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, key in ((f"{SECRET}\n", SECRET), (" ", None), ("", None)):
        monkeypatch.setenv("A_KEY", text)
        assert key_from("A_KEY") == key
    assert key_from("NOT_SET_HERE") is None


# --- the real one


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with guarded_llamacpp(model, SECRET) as url:
        yield url


async def test_a_real_llama_cpp_with_a_key_is_found_counted_on_and_used(
    real: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Guarded({}, SECRET, url=real)
    body = payload(False, model="tiny", max_tokens=5)
    with caplog.at_level(logging.DEBUG):
        async with before(engine) as gateway:
            upstream = gateway.upstreams[0]
            assert (upstream.engine.name, upstream.facts.max_seqs) == ("llamacpp", 4)
            assert {each["code"] for each in upstream.warnings} == {"unified_or_split"}
            answer = await fetch(gateway.port, request(body=body, headers=OWN))
            assert (answer.status, answer.header("x-kvgate-output-cap")) == (200, "5")
            assert gateway.snapshot()["pools"][0]["counting"]["sources"] == {"engine": 1}
            await sizing.look(gateway.upstreams)
            assert upstream.drift is not None
            assert (upstream.drift.looks, upstream.drift.blind_looks) == (1, 0)
            theirs = await fetch(gateway.port, request(body=body, headers=CALLERS))
            assert theirs.status == 401
            assert (await fetch(gateway.port, request(body=body))).status == 401
    assert SECRET not in caplog.text


async def test_a_real_llama_cpp_with_a_key_tells_nothing_without_it(real: str) -> None:
    engine = Guarded({}, SECRET, url=real)
    with pytest.raises(SizesUnknown, match=r"asks for an API key.*--upstream-api-key-env"):
        async with before(engine, upstream_api_key_env=None):
            pass
    sizes = {"engine": "llamacpp", "total_blocks": 2048, "block_size": 1, "context": 1024}
    async with before(engine, upstream_api_key_env=None, **sizes) as gateway:
        body = payload(False, model="tiny")
        own = request(body=body, headers=f"Authorization: Bearer {SECRET}\r\n")
        assert (await fetch(gateway.port, own)).status == 200
        assert (await fetch(gateway.port, request(body=body))).status == 401
