"""Five real model families, counted like transformers counts them. `make test-tokenizers`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from families import FAMILIES, directory
from traffic import requests

from kvgate.tokens import PromptCounter, TemplateRefused, load
from kvgate.tokens.accelerators import ACCELERATORS
from kvgate.tokens.corpus import check_texts
from kvgate.tokens.loader import load_files
from kvgate.tokens.messages import template_messages, template_tools

SEED = 7
REQUESTS = 1_000
pytestmark = pytest.mark.tokenizers


def expected(tokenizer: Any, body: dict[str, Any], wraps: bool) -> int:
    """Transformers' own rendering and counting, given the messages in the engine's form."""
    ids = tokenizer.apply_chat_template(
        copy.deepcopy(template_messages(body["messages"], wraps).messages),
        tools=template_tools(body),
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False),
        return_dict=False,
        **body.get("chat_template_kwargs", {}),
    )
    return len(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_mixed_requests_count_like_transformers(family: str) -> None:
    from transformers import AutoTokenizer

    folder = directory(family)
    tokenizer, counter = AutoTokenizer.from_pretrained(folder), load(folder)
    specials = [*counter.separators, *(token.content for token in load_files(folder).added[:40])]
    alternate = family in ("gemma3", "deepseek_v3")

    refused = 0
    for number, body in enumerate(requests(SEED, REQUESTS, specials, alternate)):
        try:
            truth = expected(tokenizer, body, family == "gemma3")
        except ValueError:  # a final message that the template does not write as it is
            with pytest.raises(TemplateRefused):
                counter.count_chat(body)
            refused += 1
            continue
        assert counter.count_chat(body).prompt_tokens == truth, f"seed {SEED}, request {number}"
    assert refused < REQUESTS / 100
    assert counter.counted_by in {name for name, _ in ACCELERATORS}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name, _ in ACCELERATORS])
def test_no_accelerator_that_is_taken_ever_differs(family: str, name: str) -> None:
    files = load_files(directory(family))
    counter = PromptCounter(files, accelerators=[one for one in ACCELERATORS if one[0] == name])
    for text in check_texts(SEED, 3_000, [token.content for token in files.added]):
        exact = len(files.reference.encode(text, add_special_tokens=False))
        assert counter.count_text(text, add_special=False).prompt_tokens == exact, repr(text)
    assert not [dropped for dropped in counter.dropped if "running" in dropped.why]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_gets_the_special_tokens_that_transformers_puts_around_it(family: str) -> None:
    from transformers import AutoTokenizer

    folder = directory(family)
    tokenizer, counter = AutoTokenizer.from_pretrained(folder), load(folder)
    for text in ("hello", "<|im_start|>user", "今天 5\n\n"):
        count = counter.count_text(text)
        truth = len(tokenizer(text)["input_ids"])
        assert count.prompt_tokens == truth or (not count.is_exact and count.prompt_tokens == truth + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hostile_text_takes_time_in_proportion(family: str) -> None:
    """The most text that the check allows is counted; a quadratic step would not end."""
    counter = load(directory(family))
    for unit in ("a", " ", "\n", "中", "1", "!", "e\u0301", "👩‍👩‍👧", "aB", " \n", "<|", "\u0301"):
        text = unit * (1_000_000 // len(unit))
        assert counter.count_text(text).prompt_tokens > 0
