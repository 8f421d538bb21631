"""Train with each override set named on the command line (JSON lists), one after the other in one process.

usage: two_policies.py CONFIG OVERRIDES [OVERRIDES ...]; prints one JSON object of metrics lines per run.
"""

from __future__ import annotations

import json
import sys

from hpcgrpo import config, train
from hpcgrpo.journal import read_metrics
from hpcgrpo.launch import local
from hpcgrpo.launch.one_rank import then_leave


def main() -> int:
    path, *runs = sys.argv[1:]
    for i, overrides in enumerate(json.loads(text) for text in runs):
        run = config.load(path, [f"name=run{i}", *overrides])
        local.preflight(run, fresh=False)
        train.rank_main(run)
        print(json.dumps({"folder": str(run.folder), "steps": read_metrics(run.folder)}))
    return 0


if __name__ == "__main__":
    then_leave(main)
