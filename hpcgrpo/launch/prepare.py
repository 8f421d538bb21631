"""What a script that was queued by hand does first: the checks and the folder that `hpcgrpo submit` sees to itself."""

from __future__ import annotations

import sys

from hpcgrpo import config
from hpcgrpo.launch import local
from hpcgrpo.launch.ranks import USER_ERROR


def main() -> int:
    """Read a configuration from stdin, check it, write it into the run's folder -> 0, or 2 with what is wrong."""
    try:
        local.preflight(config.load("the configuration in this script", text=sys.stdin.read()), fresh=False)
    except ValueError as error:
        print(f"hpcgrpo: error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
