"""The process that counts long prompts where the tokenizer would hold up the gateway's own.

`python -m kvgate.edge.counting.count_child OPTIONS`: reads jobs from its standard input and writes
their counts to its standard output, one at a time, until the input ends. Each frame is four bytes of
length and a marshalled value. It serves nobody but the gateway that started it.
"""

from __future__ import annotations

import json
import marshal
import sys
from typing import Any, BinaryIO

from kvgate.edge.counting.local_count import count_parts, source_of
from kvgate.tokens import CannotCount, load
from kvgate.wire.dialects.shape import Conversation, Mixed, Part

LENGTH_BYTES = 4


def packed(value: Any) -> bytes:
    """One frame."""
    body = marshal.dumps(value)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def plain(parts: tuple[Part, ...], add_special: bool) -> list[Any]:
    """A job in types that `marshal` knows. Raises `TypeError` for a part that is not counted."""
    return [add_special, [_plain(part) for part in parts]]


def _plain(part: Part) -> Any:
    if isinstance(part, str | list):
        return part
    if isinstance(part, Conversation):
        return (part.messages, part.tools, part.options, part.media)
    if isinstance(part, Mixed):
        return {"pieces": part.pieces, "overhead": part.overhead}
    raise TypeError(f"a prompt that is not seen cannot be counted: {part.why}")


def _part(value: Any) -> Part:
    if isinstance(value, tuple):
        return Conversation(*value)
    if isinstance(value, dict):
        return Mixed(**value)
    whole: str | list[int] = value
    return whole


def _read(source: BinaryIO) -> Any:
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return marshal.loads(source.read(int.from_bytes(head, "big")))


def main() -> None:
    options = json.loads(sys.argv[1])
    counter = load(options["directory"], **options["counter"])
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (job := _read(source)) is not None:
        add_special, parts = job
        try:
            counts = count_parts(counter, tuple(map(_part, parts)), add_special)
            answer: Any = [[count.prompt_tokens for count in counts], source_of(counts)]
        except CannotCount as error:
            answer = str(error)
        sink.write(packed(answer))
        sink.flush()


if __name__ == "__main__":
    main()
