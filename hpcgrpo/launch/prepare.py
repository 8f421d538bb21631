"""What a script that was queued by hand does first: the checks and the folder that `hpcgrpo submit` sees to itself."""

from __future__ import annotations

import os
import sys

from hpcgrpo import config
from hpcgrpo.launch import local, submit
from hpcgrpo.launch.ranks import USER_ERROR


def main() -> int:
    """Read a configuration from stdin, check it, write it into the run's folder -> 0, or 2 with what is wrong."""
    try:
        run = config.load("the configuration in this script", text=sys.stdin.read())
        live = submit.find_live(run.folder)
        job = os.environ.get("SLURM_JOB_ID")
        if live is not None and live.job_id != job:
            raise ValueError(f"{run.folder}: its job {live.job_id} is live; wait for it, or `{live.cancel}`")
        local.preflight(run, fresh=False)
        if job is not None:
            submit.record_job(run.folder, job, [run.folder / "slurm" / f"job-{job}.log"])
    except ValueError as error:
        print(f"hpcgrpo: error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
