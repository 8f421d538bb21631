"""`hpcgrpo profile`: some steps of several algorithms in turn on the same hardware, as the iGRPO paper's Table S.3."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hpcgrpo import config as configuration
from hpcgrpo import profile_table, profiler
from hpcgrpo.algorithms import ALGORITHMS
from hpcgrpo.algorithms.schema import layers, nearest, parameters
from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.config import ConfigError
from hpcgrpo.journal import claim, read_metrics, write_atomically
from hpcgrpo.launch import local
from hpcgrpo.planner import lengths as known_lengths
from hpcgrpo.planner import paper
from hpcgrpo.sections import RunConfig

if TYPE_CHECKING:
    from hpcgrpo.launch.follow import Submitted
    from hpcgrpo.running import Run

RESULT = "profiled.json"  # in the profile's folder: what was measured, and which runs lie beside it
REQUEST = "measure.json"  # in a measured run's folder: what its ranks are to do otherwise than in training
UTILISATION = ("mfu", "hfu", "mbu")


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    algorithms: tuple[str, ...] = ()  # names or files; empty: GRPO, iGRPO and the configuration's own
    steps: int = 5
    warm_up: int = 2
    lengths: str | None = None
    executor: str = "local"
    as_json: bool = False


def run(path: str, overrides: Sequence[str], options: Options) -> int:
    """Measure each algorithm, print the table -> 0, or the exit code of the first run that failed.

    Nothing is written but in `<output_dir>/<name>-profile`. There a later profile takes the place of what earlier ones
    measured of the same algorithms, and keeps the others; one that did not come to its end goes on.
    Raises ConfigError for what the user can mend, before anything is run.
    """
    if options.steps < 1 or options.warm_up < 0:
        raise ConfigError(
            f"profile: --steps {options.steps} --warm-up {options.warm_up}: measure 1 step or more, after 0 or more"
        )
    base = configuration.load(path, overrides)
    forced = forced_lengths(options.lengths, base)
    request = json.dumps({"lengths": forced}) + "\n"
    runs = runs_of(base, options)
    home = Path(base.output_dir) / f"{base.name}-profile"
    lock, kept = _take(home, runs, request)
    notes = batch_notes(base, runs)
    for note in notes:
        say(note)
    for number, (label, each) in enumerate(runs.items(), 1):
        steps = f"{options.steps} steps after {options.warm_up} to warm up"
        if is_measured(each, request) and live_job(each.folder) is None:
            say(f"{label} ({number} of {len(runs)}) is measured already, in {each.folder}")
            continue
        say(f"profiling {label} ({number} of {len(runs)}): {steps}, in {each.folder}")
        write_atomically(each.folder / REQUEST, request)
        if code := launch(each, options.executor):
            say(
                f"{label} ended with exit code {code}; nothing is compared. What was measured is kept, and the same"
                f" command starts {label} over, or follows its job where that is still live"
            )
            return code
    found = {label: measured(base, each, options.warm_up) for label, each in runs.items()}
    said = {
        "name": base.name,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "lengths": options.lengths,
        "rows": [{"name": label, **row} for label, row in compared(found).items()],
        "kept": kept,
        "notes": notes,
        "published": paper.published(),
    }
    beside = sorted(asked.parent.name for asked in home.glob(f"*/{REQUEST}"))
    write_atomically(home / RESULT, json.dumps({"runs": beside, **said}, indent=1) + "\n")
    lock.close()
    if options.as_json:
        print(json.dumps(said, indent=1))
    else:
        profile_table.show(said)
    return 0


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds the result alone."""
    print(text, file=sys.stderr, flush=True)


def _take(home: Path, runs: Mapping[str, RunConfig], request: str) -> tuple[Any, list[dict[str, Any]]]:
    """Lock the profile's folder, clear what is measured again out of it -> the lock, earlier rows of other algorithms.

    Each of those rows has what its own profile was. A profile without rows did not come to its end, and goes on: with
    what is measured, and with a job of this very run that is still live. Raises ConfigError for any other live job.
    """
    if (home / local.CONFIG_FILE).exists():
        raise ConfigError(
            f"{home} holds a run, where the profile would go; give the configuration another name (name=...)"
        )
    lock = claim(home)
    path = home / RESULT
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    goes_on = "rows" not in earlier
    for label in (label for label in runs if (home / label / REQUEST).exists()):
        each = runs[label]
        job = live_job(home / label)
        if goes_on and (is_measured(each, request) or (job and _is_asked_for(each, request))):
            continue
        if job:
            raise ConfigError(
                f"{home / label}: the earlier {label} is live as job {job.job_id} ({job.state()}); end it with"
                f" `{job.cancel}`, or give this profile's configuration another name (name=...)"
            )
        claim(home / label).close()  # refused where it still runs
        say(f"replacing the earlier {label} in {home}")
        shutil.rmtree(home / label, ignore_errors=True)
    how = {k: earlier.get(k) for k in ("steps", "warm_up", "lengths")}
    rows = [{"name": row["name"], "profile": how, **row} for row in earlier.get("rows", ())]
    kept = [row for row in (*rows, *earlier.get("kept", ())) if row["name"] not in runs]
    write_atomically(path, json.dumps({"kept": kept}) + "\n")
    return lock, kept


def is_measured(run: RunConfig, request: str) -> bool:
    """Whether the run's folder holds every step of this very run, sampled as asked for."""
    return _is_asked_for(run, request) and [line["step"] for line in read_metrics(run.folder)][-1:] == [
        run.train.max_steps
    ]


def _is_asked_for(run: RunConfig, request: str) -> bool:
    """Whether the run's folder was made for this very run, to be sampled as asked for."""
    made = ((run.folder / REQUEST, request), (run.folder / local.CONFIG_FILE, configuration.to_yaml(run)))
    return all(path.exists() and path.read_text(encoding="utf-8") == text for path, text in made)


def live_job(folder: Path) -> Submitted | None:
    """The job of the run in a folder where it is still queued or running. Raises ConfigError where nobody can tell."""
    if not (folder / "slurm").exists():
        return None
    from hpcgrpo.launch import submit

    return submit.find_live(folder)


# ---- what is run


def runs_of(base: RunConfig, options: Options) -> dict[str, RunConfig]:
    """A short run of each algorithm, by its name; it trains as many completions a step as `base`.

    Raises ConfigError for an algorithm that is not known, is there twice, or cannot be run so.
    """
    wanted = options.algorithms or tuple(dict.fromkeys(("grpo", "igrpo", str(base.algorithm["name"]))))
    specs: dict[str, dict[str, Any]] = {}
    for label, spec in (algorithm_of(base, name) for name in wanted):
        if label in specs:
            raise ConfigError(f"profile: --algorithms has {label} twice; give each one once")
        specs[label] = spec
    shares = {}
    for label, spec in specs.items():
        with _refused(label):
            algorithm = base.model_copy(update={"algorithm": spec}).build_algorithm()
            shares[label] = algorithm.batch_share or algorithm.num_generations
    batch = common_batch(base, shares)
    found: dict[str, RunConfig] = {}
    for label, spec in specs.items():
        values = base.model_dump(mode="json")
        values |= {"name": label, "output_dir": f"{base.output_dir}/{base.name}-profile", "algorithm": spec}
        values |= {"eval": None, "report_to": []}
        values["train"] |= {"max_steps": options.warm_up + options.steps, "train_batch_size": batch}
        with _refused(label):
            found[label] = configuration.parse(values)
    return found


@contextmanager
def _refused(label: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"profile: {label} cannot be run with this configuration: {error}\nAn algorithm with options of its own"
            " is given as the YAML file of a run that has it: --algorithms grpo,my-run.yaml"
        ) from None


def common_batch(base: RunConfig, shares: Mapping[str, int]) -> int | None:
    """train.train_batch_size of every run: the configuration's own, or the nearest multiple of all shares.

    `shares` are the completions that each algorithm trains of a prompt. Raises ConfigError where another key fixes the
    batch, with the size that would do.
    """
    own = arithmetic(base, base.build_algorithm(), rows=None)
    size, step = own.train_batch_size, math.lcm(*shares.values())
    if size % step == 0:
        return base.train.train_batch_size
    step = math.lcm(
        step, math.gcd(size, own.ranks * base.train.gradient_accumulation_steps)
    )  # ranks alike, as before
    near = max(
        step, (size + (step - 1) // 2) // step * step
    )  # of two as near the smaller: it needs less memory
    train = base.train
    fixed = ("generation_batch_size", "per_device_train_batch_size", "steps_per_generation")
    if found := [f"train.{key}" for key in fixed if getattr(train, key)]:
        raise ConfigError(
            f"profile: the batch of {size} completions serves not every algorithm: {_shares_text(shares)}. Each is to"
            f" train as many, so give train.train_batch_size={near}, and another value or none to {', '.join(found)}"
        )
    return near


def _shares_text(shares: Mapping[str, int]) -> str:
    return "of a prompt " + ", ".join(f"{label} trains {share}" for label, share in shares.items())


def batch_notes(base: RunConfig, runs: Mapping[str, RunConfig]) -> list[str]:
    """What is to be known where the runs train other batches than `base`: one line, or none."""
    algorithms = {label: run.build_algorithm() for label, run in runs.items()}
    shares = {label: a.batch_share or a.num_generations for label, a in algorithms.items()}
    own = arithmetic(base, base.build_algorithm(), rows=None).train_batch_size
    size = next(iter(runs.values())).train.train_batch_size or own
    if size == own:
        return []
    return [
        f"Measured with train.train_batch_size {size}, not the configuration's {own}, which serves not every algorithm:"
        f" {_shares_text(shares)} completions, and those that are compared sample as many of each."
    ]


def algorithm_of(base: RunConfig, name: str) -> tuple[str, dict[str, Any]]:
    """A name on the command line -> the run's label, the algorithm's specification.

    The configuration's own algorithm is taken as it is. Another one gets the options of its innermost base as far as it
    has them, and samples as many completions of a prompt; iGRPO half of them as drafts, which its paper compares.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name).stem, configuration.load(name).algorithm
    if name == base.algorithm["name"]:
        return name, base.algorithm
    if name not in ALGORITHMS:
        raise ConfigError(
            f"profile: --algorithms {name}: no algorithm{nearest(name, ALGORITHMS)} and no YAML file; one of"
            f" {', '.join(ALGORITHMS)}"
        )
    own = base.build_algorithm()
    count = own.num_generations + own.num_drafts
    inner = dict([*layers(base.algorithm)][-1])
    if name == "igrpo":
        return name, {"name": name, "drafts": count // 2, "base": _plain("", inner, count - count // 2)}
    if "base" in parameters(ALGORITHMS[name]):
        return name, {"name": name, "base": _plain("", inner, count)}
    return name, _plain(name, inner, count)


def _plain(name: str, inner: Mapping[str, Any], count: int) -> dict[str, Any]:
    """An algorithm without a base, `inner`'s own where it has no name, with `inner`'s options."""
    name = name or str(inner["name"])
    taken = {k: v for k, v in inner.items() if k in parameters(ALGORITHMS[name])}
    return {"name": name, **taken, "num_generations": count}


def forced_lengths(asked: str | None, base: RunConfig) -> list[int] | None:
    """Tokens of completions by `--lengths`: a number, or those of a run or a file; None: as they come.

    Raises ConfigError for what is neither, and for lengths that the configuration does not allow.
    """
    if asked is None:
        return None
    if asked.isdecimal():
        found = [int(asked)]
    else:
        completion = known_lengths.read_lengths(asked).completion
        if completion is None:
            raise ConfigError(f"--lengths {asked}: it tells no length of a completion; give one, in tokens")
        found = list(completion.values)
    longest = base.generation.max_completion_length
    if not 1 <= min(found) <= max(found) <= longest:
        raise ConfigError(
            f"--lengths {asked}: completions of {min(found)} to {max(found)} tokens, but"
            f" generation.max_completion_length is {longest}; give lengths from 1 to that, or raise it"
        )
    return found


def launch(run: RunConfig, executor: str) -> int:
    """Run it to its end -> its exit code: here under torchrun, or as a job, whose words go to stderr.

    Its job that is still live is followed instead.
    """
    here = executor == "local" and run.cluster.nodes == 1 and run.generation.backend != "vllm"
    if here and live_job(run.folder) is None:
        return local.launch(run, resumes=False) if local.preflight(run, fresh=False) else 0
    from hpcgrpo.launch import submit

    with redirect_stdout(sys.stderr):
        return submit.submit(run, executor=executor, wait=True, fresh=False, as_json=False)


def preparation(run: RunConfig) -> Callable[[Run], None]:
    """What a rank does before its first step: nothing, but in a run that is measured."""
    path = run.folder / REQUEST
    if not path.exists():
        return lambda made: None
    asked = json.loads(path.read_text(encoding="utf-8"))["lengths"]

    def prepare(made: Run) -> None:
        from hpcgrpo.generation.forced import ForcedGenerator

        made.saves = False
        if asked:
            sampler: Any = made.trainer.explorer.generator
            made.trainer.explorer.generator = ForcedGenerator(sampler, asked)

    return prepare


# ---- what came of it


def measured(base: RunConfig, run: RunConfig, warm_up: int) -> dict[str, Any]:
    """A run's measured steps: what Table S.3 has, the hours being those of `base`'s full length, and more beside."""
    lines = [m for m in read_metrics(run.folder) if m["step"] > warm_up]
    profile = local.profile(run)
    counts = arithmetic(run, run.build_algorithm(), rows=None)
    seconds = [m["step_time"] for m in lines]
    updates = round(sum(m["updates"] for m in lines))
    steps = full_length(base, run, lines[-1])
    hours = "gpu_hours" if profile["device"] == "cuda" else "cpu_rank_hours"
    phases = {k.removeprefix("timing_s/") for m in lines for k in m if k.startswith("timing_s/")}
    return {
        "algorithm": run.algorithm,
        "peak_memory_gb": lines[-1]["perf/peak_memory_gb"],
        "samples_per_second": profiler.samples_per_second(
            updates, counts.rows_per_device, counts.ranks, sum(seconds)
        ),
        "steps": steps,
        hours: profiler.gpu_hours(profile["devices"], steps * fmean(seconds)),
        "devices": profile["devices"],
        "step_seconds": fmean(seconds),
        "step_seconds_range": [min(seconds), max(seconds)],
        "completions_per_second": sum(m["completions/sampled"] for m in lines) / sum(seconds),
        "completion_length": fmean(m.get("completions/mean_length", 0.0) for m in lines),
        "tokens_per_second_per_device": fmean(m["perf/tokens_per_second_per_device"] for m in lines),
        "phase_seconds": {p: fmean(m.get(f"timing_s/{p}", 0.0) for m in lines) for p in sorted(phases)},
        **{k: fmean(m[f"perf/{k}"] for m in lines) for k in UTILISATION if f"perf/{k}" in lines[-1]},
    }


def full_length(base: RunConfig, run: RunConfig, line: Mapping[str, float]) -> int:
    """Steps of `base` with `run`'s algorithm, for as many questions as a step's line tells that there are."""
    questions = round(line["epoch_position"] / line["epoch"])
    values = base.model_dump(mode="json") | {"algorithm": run.algorithm}
    values["train"] |= {"train_batch_size": run.train.train_batch_size}
    whole = configuration.parse(values)
    return arithmetic(whole, whole.build_algorithm(), questions).max_steps


def compared(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each row with its differences to the first: of memory in GB, of the others as a share."""
    first = next(iter(found.values()))
    hours = "gpu_hours" if "gpu_hours" in first else "cpu_rank_hours"
    return {
        label: row
        | {
            "differences": {
                "peak_memory_gb": row["peak_memory_gb"] - first["peak_memory_gb"],
                **{k: row[k] / first[k] - 1 for k in ("samples_per_second", hours, "step_seconds")},
            }
        }
        for label, row in found.items()
    }
