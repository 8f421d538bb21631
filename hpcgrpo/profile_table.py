"""The table of `hpcgrpo profile` for people, as Table S.3 of the iGRPO paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

HOURS = {"gpu_hours": "GPU-h", "cpu_rank_hours": "rank-h"}  # key of a row -> what its column is called


def show(said: Mapping[str, Any]) -> None:
    """Print the table (where the terminal is too narrow, a line for each row) and how to read it."""
    from rich.console import Console

    console, table = Console(), _table(said)
    if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
        console.print(table)
    else:
        console.print(_title(said), markup=False, highlight=False, style="bold")
        for row in said["rows"]:
            cells = ", ".join(f"{n} {v} ({d})" if d else f"{n} {v}" for n, v, d in _cells(row, said))
            console.print(f"{row['name']}: {cells}", markup=False, highlight=False)
    for text in _remarks(said):
        console.print(text, style="bright_black", markup=False, highlight=False)


def _table(said: Mapping[str, Any]) -> Any:
    """Differences stand in a column of their own; `steps` and `s/step` have none."""
    from rich import box
    from rich.table import Column, Table

    rows = {row["name"]: list(_cells(row, said)) for row in said["rows"]}
    heads = [h for n, _, d in next(iter(rows.values())) for h in ((n,) if d is None else (n, "diff."))]
    table = Table(
        Column("", no_wrap=True),
        *(Column(head, no_wrap=True, justify="right") for head in heads),
        title=_title(said),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name, cells in rows.items():
        table.add_row(name, *(text for _, v, d in cells for text in ((v,) if d is None else (v, d))))
    return table


def _title(said: Mapping[str, Any]) -> str:
    lengths = f", completions of the lengths {said['lengths']}" if said["lengths"] else ""
    return f"{said['name']}: {said['steps']} steps measured after {said['warm_up']}{lengths}"


def _hours(said: Mapping[str, Any]) -> str:
    return "gpu_hours" if "gpu_hours" in said["rows"][0] else "cpu_rank_hours"


def _cells(row: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """What a column is called, its value, its difference to the first row: empty there, None where none is told."""
    differences, hours = row["differences"], _hours(said)
    is_first = row is said["rows"][0]
    memory = f"{differences['peak_memory_gb']:+.4f}"
    yield "peak GB", f"{row['peak_memory_gb']:.4f}", "" if is_first else memory
    for name, key in (("samples/s", "samples_per_second"), (HOURS[hours], hours)):
        yield name, f"{row[key]:.3g}", "" if is_first else f"{differences[key]:+.1%}"
    yield "steps", f"{row['steps']:,}", None
    yield "s/step", f"{row['step_seconds']:.3g}", None


def _remarks(said: Mapping[str, Any]) -> Iterator[str]:
    yield from said["notes"]
    if said["kept"]:
        names = ", ".join(row["name"] for row in said["kept"])
        yield f"Kept from earlier profiles, in profiled.json: {names}."
    yield "samples/s as Appendix D of the iGRPO paper counts them, without gradient accumulation."
    of = "all reserved GPUs" if _hours(said) == "gpu_hours" else "all ranks, on CPUs"
    yield f"Hours of {of} for the steps of the configuration's full length."
    if len({row["steps"] for row in said["rows"]}) > 1:
        yield "Steps differ: a step trains as many completions, of more questions where a question has fewer."
    for name, r in said["published"].items():
        yield (
            f"Published, {name} on 16 A100 (Table S.3): {r['peak_memory_gb']} GB, {r['samples_per_second']} samples/s,"
            f" {r['gpu_hours']} GPU-hours."
        )
