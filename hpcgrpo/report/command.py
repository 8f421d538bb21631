"""`hpcgrpo report RUN`: collect what the run's folder tells, and write it as one HTML file or print it as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from hpcgrpo.config_file import ConfigError
from hpcgrpo.journal import write_atomically
from hpcgrpo.report import facts, measured, page, samples

MAX_BYTES = 2_000_000  # of the page
SHORTER = (1000, 200)  # characters of a sample's text, where a page with more is too large


def run(folder: Path, *, output: Path | None, as_json: bool) -> int:
    """Write `output` (default RUN/report.html), or with `as_json` print the facts and write nothing -> 0.

    Raises ConfigError (exit code 2) for a folder that holds no run and for a file that cannot be written.
    """
    if as_json:
        print(json.dumps(facts.collect(folder), indent=1, allow_nan=False))
        return 0
    path = output or folder / "report.html"
    text = render(folder)
    try:
        write_atomically(path, text)
    except OSError as error:
        way_out = "" if output else "; write it elsewhere with --output FILE"
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}){way_out}") from None
    print(f"wrote {path} ({len(text.encode()) / 1e6:.2f} MB)")
    return 0


def render(folder: Path) -> str:
    """The page, with the texts of the samples as long as MAX_BYTES lets them be. Raises ConfigError as `run`."""
    found = facts.collect(folder)
    text = page.render(found, characters=samples.MAX_CHARACTERS)
    for characters in SHORTER:
        if len(text.encode()) <= MAX_BYTES:
            break
        found["samples"] = measured.plain(samples.of_run(folder, [], characters=characters))
        text = page.render(found, characters=characters)
    return text
