"""Run by vLLM's own interpreter: the tokens of each body of a chat or a completion, by vLLM's code.

Arguments: the directory, and `mistral` or `hf`. One body a line on standard input; one line each on
standard output: the tokens, or `-` where vLLM refuses.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.mistral import safe_apply_chat_template
from vllm.tokenizers.mistral import (
    maybe_serialize_tool_calls,
    truncate_tool_call_ids,
    validate_request_params,
)
from vllm.tokenizers.registry import get_tokenizer


def chat_tokens(tokenizer: Any, body: dict[str, Any]) -> int:
    """What the front end of a chat completion does in the mistral mode."""
    request = ChatCompletionRequest.model_validate(body)
    maybe_serialize_tool_calls(request)
    truncate_tool_call_ids(request)
    validate_request_params(request)
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": True})
    ids = safe_apply_chat_template(tokenizer, request.messages, **params.get_apply_chat_template_kwargs())
    return len(ids)


def main() -> None:
    directory, mode = sys.argv[1:]
    tokenizer = get_tokenizer(directory, tokenizer_mode=mode)
    for line in sys.stdin:
        body = json.loads(line)
        try:
            if "prompt" in body:
                print(len(tokenizer.encode(body["prompt"])))
            else:
                print(chat_tokens(tokenizer, body))
        except Exception:
            print("-")


if __name__ == "__main__":
    main()
