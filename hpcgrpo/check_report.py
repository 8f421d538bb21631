"""What a check found and which options there are, printed for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def show(report: Mapping[str, Any]) -> None:
    """Print a report of `checks.check`."""
    from rich.console import Console

    console = Console()
    _show_counts(console, report)
    _show_prompts(console, report)
    _show_rewards(console, report["rewards"])
    for text in report["warnings"]:
        console.print("warning: " + text, style="yellow", markup=False, highlight=False)
    for text in report["not_checked"]:
        console.print("not checked: " + text, style="magenta", markup=False, highlight=False)


def _show_counts(console: Console, report: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table("count", "value", title=f"{report['name']}: what follows from the configuration")
    for name, value in report["counts"].items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:,}")
    too_long = report["questions_too_long"]
    if report["questions"] is not None:
        left_out = f"{too_long:,} too long, left out" if too_long is not None else "not read"
        table.add_row("questions", f"{report['questions']:,} ({left_out})")
    if servers := report["servers"]:
        on = f"{servers['gpus']} GPU each" if servers["gpus"] else "on the CPU"
        table.add_row("vLLM servers", f"{servers['count']} ({servers['per_node']} a node, {on})")
    if report["model"]["parameters"]:
        table.add_row("model parameters", f"{report['model']['parameters']:,}")
    if report["peer"] and report["peer"]["parameters"]:
        table.add_row("peer parameters", f"{report['peer']['parameters']:,}")
    if needed := report["memory"]["learner_needed_bytes"]:
        of = f" of {gigabytes(report['memory']['gpu_memory_bytes'])}" if report["memory"]["gpu"] else ""
        table.add_row("a learner GPU needs", gigabytes(needed) + of)
    if found := report["checkpoints"]:
        table.add_row("checkpoint", f"{gigabytes(found['bytes_each'])}, {found['at_once']} at once")
        table.add_row("free space", gigabytes(found["bytes_free"]))
    console.print(table)


def gigabytes(count: int) -> str:
    """1,234,567,890 -> `1.23 GB`; below a gigabyte in MB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _show_prompts(console: Console, report: Mapping[str, Any]) -> None:
    from rich.panel import Panel
    from rich.text import Text

    answer = f"answer {report['answer_of_first']}"
    for stage, text in report["prompts"].items():
        console.print(Panel(Text(text), title=f"first prompt: {stage}", subtitle=Text(answer)))


def _show_rewards(console: Console, samples: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not samples:
        return
    table = Table(
        "completion", *samples[0]["parts"], "reward", title="rewards of a sample", title_justify="left"
    )
    for sample in samples:
        text = Text(f"{sample['sample']}: {sample['text']}")
        table.add_row(text, *[_value(sample, name) for name in sample["parts"]], f"{sample['reward']:g}")
    console.print(table)


def _value(sample: Mapping[str, Any], name: str) -> str:
    value, outcome = sample["parts"][name], sample["outcomes"].get(name)
    shown = "does not apply" if value is None else f"{value:g}"
    return f"{shown} ({outcome})" if outcome else shown


def show_options(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of options per algorithm."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=140)
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        table = Table(title=f"algorithm: {name}", title_justify="left", show_header=True)
        table.add_column("option", no_wrap=True)
        table.add_column("default", no_wrap=True)
        table.add_column("values", max_width=30)
        table.add_column("what it does")
        for row in rows:
            if row["algorithm"] == name:
                table.add_row(row["option"], row["default"], row["type"], row["doc"])
        console.print(table)
