"""The tables of `kvgate plan`. Only words and columns: the figures are made by `plan`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_ROWS = (
    ("full_attention_bytes_per_token", ("full_attention", "mla"), "for every token"),
    ("indexer_bytes_per_token", (), "for every token, beside the KV"),
    ("sliding_bytes_per_token", ("sliding_attention", "chunked_attention"), "for a token inside the window"),
    ("cross_bytes_per_token", ("cross_attention",), "for a token of the encoder"),
    ("state_bytes_per_sequence", ("state",), "once for each sequence"),
)
_NAMES = {
    "full_attention_bytes_per_token": "full attention",
    "indexer_bytes_per_token": "sparse index",
    "sliding_bytes_per_token": "sliding window or chunk",
    "cross_bytes_per_token": "cross attention",
    "state_bytes_per_sequence": "state",
}


def show(console: Console, figures: dict[str, Any]) -> None:
    """Print a plan: bytes by kind of layer, then the pool and what it holds, then what is not known."""
    if "layers" in figures:
        console.print(_bytes(figures))
        for note in figures["notes"]:
            console.print(f"Note: {note}", style="yellow")
    if "engine" in figures:
        console.print(_engine(figures))
    if "total_blocks" in figures:
        _show_pool(console, figures)
    elif "engine" not in figures:
        console.print("Add --gpu-memory and --weights-gib to see blocks and concurrent requests.")
    for line in figures.get("unknown", ()):
        console.print(Text.assemble(("unknown  ", "bold red"), line), soft_wrap=True)
    for each in figures.get("findings", ()):
        fix = f". Fix: {each['fix']}" if each["fix"] else ""
        head = (f"{each['level']:<8} ", "yellow")
        console.print(Text.assemble(head, f"{each['code']}: {each['what']}{fix}"), soft_wrap=True)
    for line in figures.get("cannot_know", ()):
        console.print(Text.assemble(("hidden   ", "dim"), line), soft_wrap=True)


def _show_pool(console: Console, figures: dict[str, Any]) -> None:
    fraction, seqs = figures["safety_fraction"], figures.get("max_seqs")
    console.print(_pool(figures))
    where = " of one rank" if figures.get("ranks", 1) > 1 else ""
    console.print(_holds(figures["shapes"], f"Concurrent requests{where}", fraction, seqs))
    split = figures.get("if_split")
    if split is not None:
        title = f"The same if the cache is split: {split['total_blocks']:,} cells"
        console.print(_holds(split["shapes"], title, fraction, seqs))
    console.print(_holds(figures["caps"], "What the output cap does", fraction, seqs))
    if figures.get("whole_slots"):
        console.print("Capacity is whole slots: caps and the safety fraction change nothing.")
        return
    console.print(_fractions(figures["safety_fractions"]))


def _engine(figures: dict[str, Any]) -> Table:
    title = f"{figures['engine']} {figures['version'] or ''}".strip() + f" at {figures['url']}"
    table = Table(title=title, title_justify="left", show_header=False)
    for _ in range(3):
        table.add_column()
    table.add_row("models", ", ".join(figures["models"]) or "none", "")
    least = {"lookahead": 1, "ranks": 2}  # to be worth a line
    for name in ("total_blocks", "block_size", "context", "max_seqs", "lookahead", "ranks"):
        value = figures.get(name)
        if value is not None and value >= least.get(name, 0):
            table.add_row(name, f"{value:,}", figures["sources"].get(name, ""))
    return table


def _bytes(figures: dict[str, Any]) -> Table:
    where = f"tp {figures['tp']}" if figures["tp"] > 1 else "one GPU"
    dtype = "bf16" if figures["kv_dtype"] == "auto" else figures["kv_dtype"]
    table = Table(title=f"KV cache of {figures['model_type']} ({dtype}, {where})", title_justify="left")
    for name, side in (("layers", "left"), ("count", "right"), ("bytes a GPU", "right"), ("", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for field, kinds, when in _ROWS:
        if figures[field]:
            count = sum(figures["layers"].get(kind, 0) for kind in kinds)
            table.add_row(_NAMES[field], f"{count}" if count else "", f"{figures[field]:,}", when)
    if figures["kv_shared_layers"]:
        table.add_row("shares another layer's KV", str(figures["kv_shared_layers"]), "0", "")
    return table


def _pool(figures: dict[str, Any]) -> Table:
    table = Table(title="Pool", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    groups = figures.get("groups")
    if groups is None:
        table.add_row("tokens a block", f"{figures['block_size']:,}")
    else:
        spans = sorted({group["block_size"] for group in groups if group["kind"] != "state"})
        table.add_row("groups (a sequence takes blocks from each)", str(len(groups)))
        table.add_row("tokens a block", ", ".join(f"{span:,}" for span in spans) or "a state each")
        table.add_row("bytes a block", f"{figures['bytes_per_block']:,}")
    table.add_row("blocks", f"{figures['total_blocks']:,}")
    table.add_row(
        f"usable at safety fraction {figures['safety_fraction']:g}", f"{figures['usable_blocks']:,}"
    )
    if figures.get("reserve_blocks"):
        table.add_row("kept back for tokens in flight", f"{figures['reserve_blocks']:,}")
    table.add_row("context", f"{figures['context']:,}")
    return table


def _holds(rows: list[dict[str, Any]], title: str, fraction: float, seqs: int | None = None) -> Table:
    table = Table(title=f"{title} (safety fraction {fraction:g})", title_justify="left")
    for name in ("prompt", "output cap", "blocks each", "at the end", "concurrent"):
        table.add_column(name, justify="right")
    before = None
    for row in rows:
        if before not in (None, row["prompt_tokens"]):
            table.add_section()
        before = row["prompt_tokens"]
        cap = f"{row['output_cap']:,}" if row["cap_set"] else f"unset = {row['output_cap']:,}"
        fit = f"{row['concurrent']:,}" + (" (all sequences)" if row["concurrent"] == seqs else "")
        style = "red" if row["concurrent"] == 0 else None
        table.add_row(f"{before:,}", cap, f"{row['blocks']:,}", f"{row['final_blocks']:,}", fit, style=style)
    return table


def _fractions(rows: list[dict[str, Any]]) -> Table:
    fractions = sorted({row["safety_fraction"] for row in rows})
    table = Table(title="What the safety fraction does (concurrent requests)", title_justify="left")
    for name in ("prompt", "output cap", *(f"{fraction:.2f}" for fraction in fractions)):
        table.add_column(name, justify="right")
    shapes = dict.fromkeys((row["prompt_tokens"], row["output_cap"]) for row in rows)
    for prompt, cap in shapes:
        counts = [
            row["concurrent"] for row in rows if (row["prompt_tokens"], row["output_cap"]) == (prompt, cap)
        ]
        table.add_row(f"{prompt:,}", "unset" if cap is None else f"{cap:,}", *(f"{n:,}" for n in counts))
    return table
