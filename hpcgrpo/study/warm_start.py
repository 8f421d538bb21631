"""`hpcgrpo warm-start`: tiny models of one task for studies, measured, and refused where they would not be fair."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgrpo.config import ConfigError
from hpcgrpo.journal import write_atomically

if TYPE_CHECKING:
    from hpcgrpo.tiny import WarmStart

MEASURES = "warm_start.json"  # in the model's folder
NEXT_SEED = 1000  # added for another try, so that tries of neighbouring seeds never meet
LEAST_EMPTY = 0.95  # of the accuracy without a draft that an empty draft must leave
LARGEST_GAP = 0.05  # in accuracy between a right draft and a corrupted one


def admitted(result: WarmStart) -> bool:
    """Whether skill moves between the two forms of prompt and drafts are not trusted blindly, so that a comparison of
    one-pass and two-pass training is about the training.
    """
    return result.empty >= LEAST_EMPTY * result.single and abs(result.right - result.corrupted) <= LARGEST_GAP


def task_options(items: Sequence[str]) -> dict[str, Any]:
    """`key=value` of a generated task, values as YAML reads them. Raises ConfigError."""
    from omegaconf import OmegaConf

    if bad := [item for item in items if not item.partition("=")[2]]:
        raise ConfigError(f"--option {bad[0]}: write it as key=value, for example --option digits=12")
    return dict(OmegaConf.to_container(OmegaConf.from_dotlist(list(items))))  # type: ignore[arg-type]


def make(
    folder: Path, *, data: Mapping[str, Any], seed: int, admit: bool, tries: int, **options: Any
) -> dict[str, Any] | None:
    """Make one warm start; with `admit` from the next seed (`NEXT_SEED` on) until one is admitted, `tries` at most.

    -> what was measured, as in `MEASURES`; None where none was admitted. `options` go to tiny.make_warm_start. Raises
    ConfigError where the folder is taken.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; delete it, or give the model another folder")
    from hpcgrpo import tiny

    for attempt in range(tries if admit else 1):
        own = seed + NEXT_SEED * attempt
        try:
            result = tiny.make_warm_start(
                folder,
                data=data,
                seed=own,
                admit=admitted if admit else lambda result: True,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
                **options,
            )
        except tiny.NotAdmitted as refused:
            print(f"seed {own}: {refused}", file=sys.stderr, flush=True)
            continue
        said = {**asdict(result), "seed": own, "admitted": admitted(result), "data": dict(data), **options}
        write_atomically(folder / MEASURES, json.dumps(said, indent=1) + "\n")
        return said
    return None
