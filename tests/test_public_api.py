"""The public API, in one place. What is added here is kept; what is changed here is announced."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "kvgate": """
        Admission AdmissionRefused Ask CapRules Ending Gate Granted KVAdmissionController KVReservation
        Ledger Misuse PoolFacts Queued Reason Refused Serving Tenant ThreadAdmission Ticket
        UnknownGeometry __version__ effective_output_cap kv_bytes_per_token request_reservation_bytes
        request_reservation_tokens
    """,
    "kvgate.asgi": "AdmissionMiddleware DIALECTS SeveralWorkers fields",
    "kvgate.vllm": "Middleware",
}
# What a caller writes: parameters in order, those after * by name alone.
SIGNATURES = {
    "kvgate.KVAdmissionController": "(total_kv_bytes, per_token_bytes, safety_fraction)",
    "kvgate.KVAdmissionController.try_admit": "(self, prompt_tokens, output_cap)",
    "kvgate.KVAdmissionController.release": "(self, handle)",
    "kvgate.Admission.admit": "(self, prompt_tokens, max_tokens, *, n, max_wait, tenant, identity)",
    "kvgate.ThreadAdmission.admit": "(self, prompt_tokens, max_tokens, *, n, max_wait, tenant, identity)",
    "kvgate.kv_bytes_per_token": "(num_layers, num_kv_heads, head_dim, bytes_per_element)",
    "kvgate.request_reservation_tokens": "(prompt_tokens, output_cap)",
    "kvgate.request_reservation_bytes": "(prompt_tokens, output_cap, per_token_bytes)",
    "kvgate.effective_output_cap": "(requested, prompt_tokens, context)",
    "kvgate.asgi.fields": "(prompt, max_tokens, *, n, default, dialect)",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module].split())
    for name in found.__all__:
        assert hasattr(found, name), name


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_are_these(name: str) -> None:
    path = name.split(".")
    depth = 2 if path[1] in ("asgi", "vllm") else 1
    value = importlib.import_module(".".join(path[:depth]))
    for step in path[depth:]:
        value = getattr(value, step)
    shown, is_by_name = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_by_name:
            is_by_name = True
            shown.append("*")
        shown.append(parameter.name)
    assert f"({', '.join(shown)})" == SIGNATURES[name]


def test_everything_public_says_what_it_does() -> None:
    for module in PUBLIC:
        found = importlib.import_module(module)
        for name in found.__all__:
            value = getattr(found, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), name


def test_the_reference_is_what_the_docstrings_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_api.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
