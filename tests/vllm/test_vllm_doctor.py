"""kvgate finds a real vLLM's facts by itself, and `kvgate doctor` says what it found: `make test-vllm`."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from test_real_vllm import BLOCKS, Server, run, vllm

from kvgate.cli.doctor import doctor, examine
from kvgate.core.records import PoolFacts

pytestmark = pytest.mark.vllm

__all__ = ["vllm"]  # the fixture: one server for this file


def test_the_facts_that_are_found_are_those_that_it_was_started_with(vllm: Server) -> None:
    found = asyncio.run(examine(vllm.url)).found

    assert found.facts == PoolFacts(
        BLOCKS - 1, vllm.block_size, vllm.context, engine="vllm", engine_context=vllm.context
    )
    assert (found.models, found.ranks, found.is_exact, found.preemptions) == (("tiny",), 1, True, 0)


def test_the_doctor_shows_them_and_finds_the_preemptions_of_an_ungated_storm(vllm: Server) -> None:
    before = CliRunner().invoke(doctor, [vllm.url, "--json"], catch_exceptions=False)
    assert run(vllm, vllm.url).preemptions > 0
    after = CliRunner().invoke(doctor, [vllm.url, "--json", "--strict"], catch_exceptions=False)

    assert (before.exit_code, after.exit_code) == (0, 1)
    shown = json.loads(after.stdout)
    assert "preempted" in {finding["code"] for finding in shown["findings"]}
    assert shown["facts"]["total_blocks"] == BLOCKS - 1
