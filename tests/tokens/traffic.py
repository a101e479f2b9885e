"""Mixed chat requests of every kind that counting meets, drawn from a seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

TEXTS = {
    "prose": "The committee met on Tuesday to discuss the budget, and it didn't go well. ",
    "json": '{"id": 1234, "name": "Zoë", "tags": ["a", "b"], "nested": {"deep": [1, 2.5, null, true]}} ',
    "code": "def add(a, b):\n    # adds\n    return a + b\n\n\nclass Foo(Bar):\n\tx: int = 0\n",
    "chinese": "今天天气很好，我们去公园散步吧。",
    "japanese": "東京タワーはとても高いです。カタカナも書きます。",
    "arabic": "السلام عليكم، كيف حالك اليوم؟ ١٢٣ ",
    "hindi": "नमस्ते दुनिया, आप कैसे हैं? ",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 😀😀 ",
    "marks": "e\u0301a\u0308o\u0302 \u0338 각 ﬁ ½ ",
    "numbers": "3.14159 1,000,000 2024-05-06 0xDEADBEEF 12345678901234567890 ",
    "spaces": "a  b   c\t\td \n\n\n e\r\n   f\u00a0g\u3000h ",
    "markup": "<div class='x'>&amp;</div> **bold** `code` # heading\n- item\n",
}


def requests(
    seed: int, how_many: int, specials: Sequence[str], roles_alternate: bool
) -> list[dict[str, Any]]:
    """Bodies of chat completions. `specials`: the model's special tokens, which users inject."""
    random = Random(seed)
    bodies: list[dict[str, Any]] = []
    while len(bodies) < how_many:
        if bodies and random.random() < 0.25:
            bodies.append(_next_turn(random, random.choice(bodies[-20:]), specials))
        else:
            bodies.append(_body(random, specials, roles_alternate))
    return bodies


def _text(random: Random, specials: Sequence[str], long: bool = False) -> str:
    pieces = []
    for _ in range(random.randint(1, 5)):
        times = random.randint(1, 200 if long else 4)
        pieces.append(TEXTS[random.choice(list(TEXTS))] * times)
        if specials and random.random() < 0.15:
            token = random.choice(specials)
            pieces.append(random.choice((token, token[:-1], token[1:], f" {token} ", token * 2)))
    text = "".join(pieces)
    return text.strip() if random.random() < 0.5 else text


def _body(random: Random, specials: Sequence[str], roles_alternate: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if random.random() < 0.5:
        messages.append({"role": "system", "content": _text(random, specials)})
    messages.append(_user(random, specials, long=random.random() < 0.05))
    with_tools = random.random() < 0.3
    for _ in range(random.choice((0, 0, 1, 2, 5))):
        if with_tools and not roles_alternate and random.random() < 0.5:
            messages += _tool_turn(random, specials)
        answer = _text(random, specials)
        if random.random() < 0.2:
            answer = f"<think>\n{_text(random, ())}\n</think>\n\n{answer}"
        messages.append({"role": "assistant", "content": answer})
        messages.append(_user(random, specials))
    body: dict[str, Any] = {"model": "m", "messages": messages}
    if with_tools:
        body["tools"] = [_tool(random, index) for index in range(random.randint(1, 4))]
    if random.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": random.random() < 0.5}
    if random.random() < 0.1:
        body["add_generation_prompt"] = False
    elif random.random() < 0.1 and not with_tools:
        messages[-1] = {**messages[-1], "role": "user"}
        messages.append({"role": "assistant", "content": "Certainly: " + _text(random, specials) + "."})
        body.update(continue_final_message=True, add_generation_prompt=False)
    return body


def _user(random: Random, specials: Sequence[str], long: bool = False) -> dict[str, Any]:
    text = _text(random, specials, long)
    if random.random() < 0.1:
        parts = [{"type": "text", "text": text}, {"type": "text", "text": _text(random, specials)}]
        return {"role": "user", "content": parts}
    return {"role": "user", "content": text}


def _tool_turn(random: Random, specials: Sequence[str]) -> list[dict[str, Any]]:
    arguments = json.dumps(
        {"query": _text(random, ())[:80], "limit": random.randint(1, 9)}, ensure_ascii=False
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": _text(random, specials)},
    ]


def _tool(random: Random, index: int) -> dict[str, Any]:
    properties = {
        f"field_{n}": {"type": random.choice(("string", "integer")), "description": _text(random, ())[:60]}
        for n in range(random.randint(0, 4))
    }
    function: dict[str, Any] = {
        "name": f"tool_{index}",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
    }
    if random.random() < 0.7:
        function["description"] = _text(random, ())[:120]
    return {"type": "function", "function": function}


def _next_turn(random: Random, earlier: dict[str, Any], specials: Sequence[str]) -> dict[str, Any]:
    """The same chat, one turn on: what a cache of counts meets all the time."""
    if earlier.get("continue_final_message"):
        return earlier
    answer = {"role": "assistant", "content": _text(random, specials)}
    return {**earlier, "messages": [*earlier["messages"], answer, _user(random, specials)]}
