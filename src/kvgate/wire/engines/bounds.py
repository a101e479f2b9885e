"""Upper bounds on prompt tokens, for where nobody counts.

A token covers at least one byte of the text that the tokenizer sees, so bytes bound tokens; what a
chat template adds is an allowance. A template that writes more than that, out of nothing that the
request holds, is outside the bound: give kvgate the tokenizer where that matters.
"""

from __future__ import annotations

import json
import unicodedata

from kvgate.wire.dialects.shape import Conversation, Mixed

# Special tokens around a text, and the space that some tokenizers put before it.
TEXT_MARGIN = 4
# The longest default system prompts of public chat templates have some 500 tokens.
TEMPLATE_MARGIN = 1024
# Role, header and end of one message or one call.
MESSAGE_MARGIN = 16
# The instructions that templates write before a list of tools.
TOOLS_MARGIN = 512


def text_bound(text: str) -> int:
    """Tokens that `text` can have at most, special tokens around it included."""
    return _bytes_of(text) + TEXT_MARGIN


def mixed_bound(mixed: Mixed) -> int:
    """Tokens that texts and token ids one after another can have at most."""
    return mixed.overhead + sum(
        text_bound(piece) if isinstance(piece, str) else len(piece) for piece in mixed.pieces
    )


def conversation_bound(conversation: Conversation) -> int:
    """Tokens that the rendered conversation can have at most; media are not in it."""
    return _bytes_of(conversation_text(conversation)) + conversation_margin(conversation)


def conversation_text(conversation: Conversation) -> str:
    """One text that has at least the tokens of everything that a template may write of the request.

    Tools are indented as the most spacious templates do.
    """
    written = [json.dumps(conversation.messages, ensure_ascii=False)]
    if conversation.tools:
        written.append(json.dumps(conversation.tools, ensure_ascii=False, indent=4))
    if conversation.options:
        written.append(json.dumps(conversation.options, ensure_ascii=False, indent=4))
    return "\n".join(written)


def conversation_margin(conversation: Conversation) -> int:
    """Tokens that a template may add to those of the text."""
    tools = TOOLS_MARGIN if conversation.tools else 0
    pieces = len(conversation.tools)
    for message in conversation.messages:
        content, calls = message.get("content"), message.get("tool_calls")
        pieces += 1 + (len(content) if isinstance(content, list) else 0)
        pieces += len(calls) if isinstance(calls, list) else 0
    return TEMPLATE_MARGIN + tools + MESSAGE_MARGIN * pieces


def _bytes_of(text: str) -> int:
    if text.isascii():
        return len(text)
    # Tokenizers may normalise first, and one character can become eighteen.
    forms = (text, unicodedata.normalize("NFC", text), unicodedata.normalize("NFKC", text))
    return max(len(form.encode("utf-8", "surrogatepass")) for form in forms)
