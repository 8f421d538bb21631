"""The command line. Nothing here imports torch before it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcgrpo.arguments import STARTED, check_together, parse

USER_ERROR = 2  # exit code for what the user can mend

FROM_CHECKPOINT = "; the same command goes on from the last checkpoint"
GOES_ON = {  # command -> what the same command does after an interruption
    "train": FROM_CHECKPOINT,
    "submit": "; a job that is queued goes on",
    "study": FROM_CHECKPOINT,
    "quickstart": FROM_CHECKPOINT,
    "profile": "; what was measured is kept, and the same command goes on",
    "eval": "; what was graded is kept, and the same command goes on",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 for an error the user can mend, 1 for any other."""
    arguments = parse(argv)
    try:
        check_together(arguments)
        return int(BODIES[arguments.command](arguments) or 0)
    except ValueError as error:
        if os.environ.get("HPCGRPO_TRACEBACK"):
            raise
        for line in str(error).splitlines() or [repr(error)]:
            print(f"hpcgrpo: error: {line}", file=sys.stderr)
        return USER_ERROR
    except (PermissionError, NotADirectoryError) as error:
        if os.environ.get("HPCGRPO_TRACEBACK") or arguments.command in STARTED or error.filename is None:
            raise  # the logs of a job keep the traceback
        from hpcgrpo.journal import why_denied

        print(f"hpcgrpo: error: {why_denied(error)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"hpcgrpo: interrupted{GOES_ON.get(arguments.command, '')}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


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
        from hpcgrpo import profile_run, train  # torch, after the log is set up

        train.rank_main(run, summary, profile_run.preparation(run))

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
    if arguments.eval:
        return _submit_with_evaluation(arguments, run)
    if arguments.dry_run:
        return submit.dry_run(run, as_json=arguments.json)
    return submit.submit(
        run, executor=arguments.executor, wait=arguments.wait, fresh=arguments.fresh, as_json=arguments.json
    )


def _submit_with_evaluation(arguments: argparse.Namespace, run: Any) -> int:
    """A training, and the evaluation that waits for it; with --wait both are followed."""
    from evaluation import command, queueing

    if arguments.executor != "slurm":
        raise ValueError(
            "--eval: jobs that wait for jobs need Slurm; without it, run hpcgrpo eval after the training"
        )
    options = command.Options(
        config=arguments.eval,
        as_json=arguments.json,
        dry_run=arguments.dry_run,
        fresh=arguments.fresh,
        wait=arguments.wait,
    )
    return queueing.submit_both(run, options, rolling_too=arguments.rolling)


def evaluate(arguments: argparse.Namespace) -> int:
    """Benchmarks of a model, here or with Slurm; comparisons and lists."""
    from evaluation import command, compare, published, queueing

    if arguments.list:
        return command.list_benchmarks(as_json=arguments.json)
    if arguments.list_published:
        return published.list_rows(as_json=arguments.json)
    if arguments.compare:
        return compare.run(*arguments.compare, common_only=arguments.common_only, as_json=arguments.json)
    if arguments.source is None or "=" in arguments.source:
        raise ValueError(
            "name what to evaluate: hpcgrpo eval MODEL benchmarks=gsm8k (a run, a checkpoint or a model)"
        )
    options = command.Options(
        config=arguments.config,
        overrides=tuple(arguments.overrides),
        checkpoint=arguments.checkpoint,
        output_dir=arguments.output_dir,
        fresh=arguments.fresh,
        after=arguments.after,
        wait=arguments.wait,
        dry_run=arguments.dry_run,
        every=arguments.every,
        published=arguments.published,
        pass_at_n=arguments.pass_n,
        as_json=arguments.json,
    )
    if arguments.executor == "slurm":
        body = queueing.evaluate_rolling if arguments.rolling else queueing.evaluate
    else:
        body = command.follow_training if arguments.rolling else command.here
    return body(arguments.source, options)


def eval_task(arguments: argparse.Namespace) -> int:
    """One element of an evaluation's job array."""
    from evaluation import run

    return run.task(arguments.path)


def eval_merge(arguments: argparse.Namespace) -> int:
    """The table of an evaluation whose tasks have ended."""
    from evaluation import run

    return run.merge(arguments.path)


def eval_watch(arguments: argparse.Namespace) -> int:
    """Queue an evaluation of each checkpoint as it appears."""
    from evaluation import command

    return command.watch(arguments.path)


def grade(arguments: argparse.Namespace) -> int:
    """The grader as the training uses it, on a file."""
    from evaluation import audit, grade

    if arguments.audit:
        return audit.audit(
            Path(arguments.path),
            as_json=arguments.json,
            processes=arguments.processes,
            limit=arguments.limit,
            judge=arguments.judge or audit.SECOND,
        )
    if arguments.judge:
        raise ValueError(f"--judge {arguments.judge}: names the second grader of --audit; add that")
    return grade.run(
        Path(arguments.path),
        as_json=arguments.json,
        processes=arguments.processes,
        time_limit_seconds=arguments.time_limit,
        gold_column=arguments.gold_column,
        prediction_column=arguments.prediction_column,
        strict=arguments.strict,
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


def report(arguments: argparse.Namespace) -> int:
    """A run on one page."""
    from hpcgrpo.report import command

    return command.run(arguments.folder, output=arguments.output, as_json=arguments.json)


def plan(arguments: argparse.Namespace) -> int:
    """What a run will take."""
    from hpcgrpo.planner import command

    return command.plan(arguments)


def profile(arguments: argparse.Namespace) -> int:
    """What some steps of several algorithms take."""
    from hpcgrpo import profile_run

    options = profile_run.Options(
        algorithms=tuple(filter(None, arguments.algorithms.split(","))),
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        lengths=arguments.lengths,
        executor=arguments.executor,
        as_json=arguments.json,
    )
    return profile_run.run(arguments.config, arguments.overrides, options)


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


BODIES: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": train,
    "check": check,
    "algorithms": show_algorithms,
    "quickstart": quickstart,
    "import-gguf": import_gguf,
    "tiny-model": tiny_model,
    "submit": submit,
    "render": render,
    "doctor": doctor,
    "report": report,
    "plan": plan,
    "profile": profile,
    "study": study,
    "warm-start": warm_start,
    "eval": evaluate,
    "grade": grade,
    "node": node,
    "ranks": ranks,
    "rank": rank,
    "eval-task": eval_task,
    "eval-merge": eval_merge,
    "eval-watch": eval_watch,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        from hpcgrpo.launch.one_rank import then_leave

        then_leave(main)
    sys.exit(main())
