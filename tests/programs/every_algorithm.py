"""Train two steps with each algorithm named on the command line (YAML), one after the other in one process.

usage: every_algorithm.py FOLDER SPEC [SPEC ...]; prints one JSON object per algorithm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from omegaconf import OmegaConf

from hpcgrpo import config, train
from hpcgrpo.journal import read_metrics
from hpcgrpo.launch import local
from hpcgrpo.launch.one_rank import then_leave


def main() -> int:
    folder, *specs = sys.argv[1:]
    for i, spec in enumerate(specs):
        overrides = [f"name=run{i}", f"output_dir={folder}/logs", f"algorithm={spec}", "train.max_steps=2"]
        run = config.load(Path(folder) / "run.yaml", overrides)
        local.preflight(run, fresh=False)
        train.rank_main(run)
        print(
            json.dumps(
                {"spec": OmegaConf.to_container(OmegaConf.create(spec)), "steps": read_metrics(run.folder)}
            )
        )
    return 0


if __name__ == "__main__":
    then_leave(main)
