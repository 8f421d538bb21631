"""Rewards: what each function pays, and what `build` and `score` accept and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hpcgrpo.rewards import REWARDS, Rewards, build
from hpcgrpo.rewards.answers import extract_answer
from hpcgrpo.rewards.format import well_formed
from hpcgrpo.rewards.gsm8k import cppo_accuracy
from hpcgrpo.rewards.judge import fill, read_score
from hpcgrpo.rewards.overlong import soft_penalty
from hpcgrpo.types import Completion, Prompt


def prompt(row: int = 0, *, conversational: bool = False, **columns: Any) -> Prompt:
    messages = ({"role": "system", "content": "Be exact."}, {"role": "user", "content": "What is 3+4?"})
    return Prompt(row, row, messages, "<rendered>", (1, 2), columns, conversational)


def completion(text: str, length: int = 3) -> Completion:
    return Completion(tuple(range(length)), (0.0,) * length, "stop", text, seed=0)


def built(spec: dict[str, Any], *, max_completion_length: int = 100) -> Rewards:
    return build(spec, max_completion_length=max_completion_length, num_processes=1)


def parts(spec: dict[str, Any], texts: list[str], **columns: Any) -> list[float | None]:
    with built(spec) as rewards:
        scores = rewards.score(
            [prompt(i, **columns) for i in range(len(texts))], [completion(t) for t in texts]
        )
    (name,) = rewards.names
    return [s.parts[name] for s in scores]


# ---------------------------------------------------------------------------------------------- extraction


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"a \boxed{1} b \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {x}", "x"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} and then \boxed{2", "1"),
        ("{ \\boxed{5}", "5"),
        ("<answer> 4 </answer>", "4"),
        ("<answer>4</answer><answer>5</answer>", "5"),
        ("<answer>4</answer> <answer>5", "4"),
        ("<answer><answer>4</answer>", "4"),
        (r"\boxed{9} <answer>so \(\boxed{4}\).</answer>", "4"),
        (r"\boxed{9} <answer></answer>", ""),
        ("the answer is 4", None),
        (r"\boxed{4", None),
        ("</answer>4<answer>", None),
        ("", None),
    ],
)
def test_extraction(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("it is 3, or 4.", "4"), ("costs $1,250.50!", "1,250.50"), ("no", None), ("x2 3/4", "3/4")],
)
def test_last_number_where_no_box_is_required(text: str, answer: str | None) -> None:
    assert extract_answer(text, require_box_or_tag=False) == answer


# ------------------------------------------------------------------------------------------------ accuracy


def test_accuracy_and_its_outcomes() -> None:
    endless = r"\boxed{\sum_{n=1}^{\infty} \frac{\sin(n^2)}{n^2}}"
    texts = [r"\boxed{7}", r"\boxed{8}", "7", endless, r"\boxed{\frac{14}{2}}"]
    with built({"accuracy": {"weight": 2.0, "time_limit_seconds": 0.4}}) as rewards:
        scores = rewards.score([prompt(answer="7")] * 5, [completion(t) for t in texts])
    assert [s.outcomes["accuracy"] for s in scores] == ["right", "wrong", "unparsed", "timeout", "right"]
    assert [s.parts["accuracy"] for s in scores] == [1, 0, 0, 0, 1]
    assert [s.reward for s in scores] == [2, 0, 0, 0, 2]


def test_accuracy_names_the_row_without_an_answer() -> None:
    with (
        built({"accuracy": 1.0}) as rewards,
        pytest.raises(ValueError, match=r"accuracy: row 3 .* no 'answer'.*solution"),
    ):
        rewards.score([prompt(3, solution="7")], [completion("7")])
    with built({"accuracy": {"answer_column": "solution"}}) as rewards:
        assert rewards.score([prompt(3, solution=7)], [completion(r"\boxed{7}")])[0].reward == 1


def test_accuracy_without_box() -> None:
    assert parts({"accuracy": {"require_box_or_tag": False}}, ["it is 7", "it is 8"], answer="7") == [1, 0]


# -------------------------------------------------------------------------------------------------- format


GOOD = "<think>\nhm\n</think>\n<answer>\n7\n</answer>"


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        (GOOD, True, True),
        ("<think>a</think><answer>7</answer>", True, False),
        ("<think>a</think> \n\n <answer>7</answer>\n", True, False),
        (GOOD + " and more", False, False),
        (GOOD + "\nand more", False, False),  # a multi-line $ would let this pass
        ("hello " + GOOD, False, False),
        (GOOD + GOOD, False, False),
        ("<think>a</think>\n<answer>7", False, False),
        ("<think>a</think>\n<answer>7</answer></answer>", False, False),
        ("<answer>7</answer>\n<think>a</think>", False, False),
        ("a</think>\n<answer>7</answer>", False, False),
    ],
)
def test_format(text: str, lenient: bool, strict: bool) -> None:
    assert (well_formed(text), well_formed(text, strict=True)) == (lenient, strict)
    assert parts({"format": 1.0}, [text]) == [float(lenient)]
    assert parts({"cppo_format": 1.0}, [text]) == [float(strict)]


def test_format_where_the_prompt_opens_the_think_block() -> None:
    assert parts({"format": {"think_in_prompt": True}}, ["a</think>\n<answer>7</answer>", GOOD]) == [1, 0]


# ---------------------------------------------------------------------------------------------- CPPO GSM8K


def test_the_four_classes_of_cppo() -> None:
    """Right/right 3, format only 1, answer only 2 or 1.5, wrong/wrong 0 (arXiv 2503.22342, Appendix A)."""
    texts = [
        "<think>a</think>\n<answer>1,250</answer>",
        "<think>a</think>\n<answer>1251</answer>",
        "<answer>1250</answer>",
        "<answer>$1250 in all</answer>",
        "1250",
    ]
    with built({"cppo_gsm8k": 1.0, "cppo_format": 1.0}) as rewards:
        scores = rewards.score([prompt(answer="some steps\n#### 1250")] * 5, [completion(t) for t in texts])
    assert [s.reward for s in scores] == [3, 1, 2, 1.5, 0]
    assert [s.outcomes["cppo_gsm8k"] for s in scores] == ["right", "wrong", "right", "right", "unparsed"]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("18", 2),
        (" 18 ", 2),
        ("18.0", 1.5),
        ("18 eggs", 1.5),
        ("9 + 9", 0),
        ("9+9=18", 0),
        ("-18", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_cppo_accuracy(answer: str | None, value: float) -> None:
    assert cppo_accuracy(answer, "18") == value


def test_cppo_accuracy_of_a_number_without_end() -> None:
    assert cppo_accuracy("1" * 100_000, "18") == 0


# ------------------------------------------------------------------------------------------------ overlong


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0), (16384, 0), (17408, -0.25), (18432, -0.5), (20480, -1), (30000, -1)]
)
def test_overlong_as_dapo(length: int, penalty: float) -> None:
    assert soft_penalty(length, 20480, 4096) == penalty


def test_overlong_counts_token_ids_and_takes_the_runs_maximum() -> None:
    with built({"overlong": {"cache_length": 50}}, max_completion_length=100) as rewards:
        scores = rewards.score([prompt()] * 4, [completion("long text " * 99, n) for n in (50, 75, 100, 120)])
    assert [s.reward for s in scores] == [0, -0.5, -1, -1]


# ----------------------------------------------------------------------------------------- user functions

USER = """
import asyncio, math
SEEN = {}
def length(prompts, completions, completion_ids, **columns):
    SEEN.update(prompts=prompts, completions=completions, columns=columns)
    return [len(ids) / 10 for ids in completion_ids]
def some(completions, answer):
    return [None if a is None else float(c == a) for c, a in zip(completions, answer)]
def graded(completions, **_): return [(0.5, "half") for _ in completions]
async def later(completions, **_):
    await asyncio.sleep(0)
    return [4.0] * len(completions)
def scaled(completions, *, factor=1.0, **_): return [factor] * len(completions)
def fixed(completions, factor=1.0): return [factor] * len(completions)
def raises(**_): raise KeyError("oops")
def short(completions, **_): return [1.0]
def text(**_): return "11"
def number(**_): return 1.0
def nothing(**_): return None
def nan(completions, **_): return [math.nan] * len(completions)
def infinite(completions, **_): return [math.inf] * len(completions)
def words(completions, **_): return ["1.0"] * len(completions)
constant = 3
"""


@pytest.fixture
def user(tmp_path: Path) -> Callable[[str], str]:
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return lambda name: f"{path}:{name}"


def seen_by(function: str) -> dict[str, Any]:
    """What a function of USER's got last."""
    path, _, _ = function.rpartition(":")
    (module,) = (m for m in [*sys.modules.values()] if getattr(m, "__file__", None) == path)
    return dict(module.SEEN)


def two(spec: dict[str, Any], **columns: Any) -> list[Any]:
    with built(spec) as rewards:
        return rewards.score(
            [prompt(0, **columns), prompt(1, **columns)], [completion("7", 3), completion("8", 5)]
        )


def test_user_functions_get_what_trl_gives(user: Callable[[str], str]) -> None:
    scores = two({user("length"): 2.0}, answer="7", level=3)
    assert [s.reward for s in scores] == [0.6, 1.0] and scores[0].parts == {"length": 0.3}
    seen = seen_by(user("length"))
    assert seen["prompts"] == ["What is 3+4?"] * 2 and seen["completions"] == ["7", "8"]
    assert seen["columns"] == {"answer": ["7", "7"], "level": [3, 3]}


def test_conversational_rows_give_messages(user: Callable[[str], str]) -> None:
    with built({user("length"): 1.0}) as rewards:
        rewards.score([prompt(conversational=True)], [completion("7")])
    seen = seen_by(user("length"))
    assert seen["completions"] == [[{"role": "assistant", "content": "7"}]]
    assert [m["role"] for m in seen["prompts"][0]] == ["system", "user"]


def test_none_is_left_out_of_the_sum(user: Callable[[str], str]) -> None:
    with built({user("some"): 10.0, user("scaled"): 1.0}) as rewards:
        scores = rewards.score([prompt(answer="7"), prompt(answer=None)], [completion("7")] * 2)
    assert [s.reward for s in scores] == [11, 1] and scores[1].parts == {"some": None, "scaled": 1.0}
    with built({user("some"): 10.0}) as rewards:
        assert rewards.score([prompt(answer=None)], [completion("7")])[0].reward == 0


def test_outcomes_coroutines_and_options(user: Callable[[str], str]) -> None:
    assert two({user("graded"): 1.0})[0].outcomes == {"graded": "half"}
    assert two({user("later"): 1.0})[1].reward == 4
    assert two({user("scaled"): {"weight": 2, "factor": 3.0}})[0].reward == 6
    assert two({user("fixed"): {"factor": 3.0}}, answer="7")[0].reward == 3
    assert two({user("scaled"): {"factor": 3.0}}, factor=9.0)[0].reward == 3  # an option beats a column


def test_a_module_on_the_path(
    user: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_module_of_mine.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    assert two({"reward_module_of_mine:scaled": 1.0})[0].parts == {"scaled": 1.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "reward raises raised KeyError: 'oops'"),
        ("short", "reward short returned 1 values for 2 completions"),
        ("text", r"reward text returned '11' \(str\); it must return a list of 2"),
        ("number", r"reward number returned 1.0 \(float\)"),
        ("nothing", r"reward nothing returned None"),
        ("nan", r"reward nan returned nan \(float\) for completion 0"),
        ("infinite", r"reward infinite returned inf"),
        ("words", r"reward words returned '1.0' \(str\)"),
    ],
)
def test_what_a_user_function_may_not_do(user: Callable[[str], str], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        two({user(name): 1.0})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"acuracy": 1.0}, "no reward is called 'acuracy'.*did you mean 'accuracy'"),
        ({"accuracy": {"wieght": 1.0}}, "no option 'wieght'.*options: weight, answer_column"),
        ({"accuracy": {"answer_colum": "x"}}, "did you mean 'answer_column'"),
        ({"accuracy": float("nan")}, "weight of accuracy is nan"),
        ({"accuracy": "1.0"}, "weight of accuracy is '1.0'"),
        ({"accuracy": {"weight": None}}, "weight of accuracy is None"),
        ({"accuracy": {"time_limit_seconds": 0}}, "time_limit_seconds=0"),
        (
            {"accuracy": {"time_limit_seconds": "nan"}},
            "^rewards: accuracy.time_limit_seconds is 'nan'; it must be a finite number$",
        ),
        (
            {"accuracy": {"time_limit_seconds": float("nan")}},
            "time_limit_seconds is nan; it must be a finite",
        ),
        (
            {"accuracy": {"memory_limit_bytes": True}},
            "memory_limit_bytes is True; it must be a whole number$",
        ),
        ({"accuracy": {"require_box_or_tag": "no"}}, "require_box_or_tag is 'no'; it must be true or false"),
        ({"overlong": {"cache_length": 200}}, "cache_length=200 must be between 1 and max_length=100"),
        ({"overlong": {"max_length": "many"}}, "overlong.max_length is 'many'; .* a whole number, or null$"),
        ({"judge": 1.0}, "judge needs the options base_url, model"),
        ({"judge": {"base_url": "node:8000", "model": "m"}}, "base_url='node:8000' must start with http"),
        ({"judge": {"base_url": "http://n", "model": "m", "api_key_env": "NO_SUCH_KEY_1"}}, "NO_SUCH_KEY_1"),
        (
            {"judge": {"base_url": "http://n", "model": "m", "template": "grade!"}},
            "must contain {completion}",
        ),
        ({"no_such_module_1:f": 1.0}, "no_such_module_1 could not be imported"),
        ({"no/such/file.py:f": 1.0}, "there is no file .*no/such/file.py"),
        ({}, "at least one is needed"),
    ],
)
def test_bad_specifications(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(spec)


def test_bad_user_functions(user: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'scald' does not exist \(did you mean 'scaled'\?\)"):
        built({user("scald"): 1.0})
    with pytest.raises(ValueError, match=r"'absent' does not exist \(functions there: raises, wrong\)"):
        path = tmp_path / "few.py"
        path.write_text("def raises(completions): ...\ndef wrong(x): return [1.0]\n")
        built({f"{path}:absent": 1.0})
    with pytest.raises(ValueError) as caught:
        two({f"{path}:wrong": 1.0}, answer="7")
    assert str(caught.value) == (
        "reward wrong cannot be called: wrong() missing 1 required positional argument: 'x'. It is given answer,"
        " prompts, completions, completion_ids by name, lists with one item a completion; write it as def"
        " wrong(prompts, completions, **columns)"
    )
    with pytest.raises(ValueError, match="'constant' is not callable"):
        built({user("constant"): 1.0})
    with pytest.raises(ValueError, match=r"has no option 'facter' \(did you mean 'factor'\?\)"):
        built({user("fixed"): {"facter": 1.0}})
    (tmp_path / "broken.py").write_text("def f(:")
    with pytest.raises(ValueError, match=r"broken.py could not be imported: SyntaxError"):
        built({f"{tmp_path / 'broken.py'}:f": 1.0})


def test_building_is_light() -> None:
    """On a login node: no torch, no sympy, no process."""
    code = (
        "import sys, subprocess\n"
        "subprocess.Popen = None\n"
        "from hpcgrpo.rewards import build, REWARDS\n"
        "spec = dict.fromkeys(REWARDS, 1.0) | {'judge': {'base_url': 'http://n', 'model': 'm'}}\n"
        "build(spec, max_completion_length=9, num_processes=1).close()\n"
        "print(sorted({'torch', 'sympy', 'math_verify', 'httpx', 'numpy'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_table_and_weights() -> None:
    rewards = built({"accuracy": 1, "format": {"strict": True}})
    assert rewards.names == ("accuracy", "format") and rewards.weights == (1.0, 1.0)
    mathematical, of_form = (
        {"accuracy", "cppo_gsm8k", "judge"},
        {"format", "cppo_format", "closing_tags", "overlong"},
    )
    assert set(REWARDS) == mathematical | of_form
    assert rewards.score([], []) == []


# --------------------------------------------------------------------------------------------------- judge


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("SCORE: 0.75", 0.75),
        ("The text says score: 1.\n**Score:** 0.25", 0.25),
        ('{"score": 0.5, "why": "half"}', 0.5),
        ("<think>score: 1</think>\nScore = .5", 0.5),
        ("Score: 7/10", 0.7),
        ("score is 70%", 0.7),
        (" 1 ", 1.0),
        ("**0**", 0.0),
        ("Score: 3", None),
        ("Score: -0.5", None),
        ("Score: 1/0", None),
        ("Score: high", None),
        ("I like 1 thing", None),
        ("", None),
    ],
)
def test_reading_a_score(reply: str, score: float | None) -> None:
    assert read_score(reply) == score


def test_what_a_model_writes_is_not_filled_in_again() -> None:
    values = {"question": "{answer}", "answer": "7", "completion": r"\boxed{7} {question}"}
    assert fill("{question}|{answer}|{completion}|{x}", values) == r"{answer}|7|\boxed{7} {question}|{x}"


class Endpoint(ThreadingHTTPServer):
    """A chat completions endpoint that answers by what stands in the request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers["authorization"])
            tries = sum(b["messages"] == body["messages"] for b in self.server.bodies)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        threading.Event().wait(0.02)
        with self.server.lock:
            self.server.at_once -= 1
        if "refused" in text:
            return self.reply(401, {"error": "bad key"})
        if "always busy" in text or ("busy" in text and tries < 3):
            return self.reply(503, {"error": "busy"})
        if "slow" in text:
            threading.Event().wait(1.0)
        content = {"garbled": "no idea", "good": "fine.\nSCORE: 0.9", "empty": None}
        answer = next((v for k, v in content.items() if k in text), "SCORE: 0.5")
        self.reply(200, {"choices": [{"message": {"content": answer}}]} if "broken" not in text else [])

    def reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        return None


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def judged(endpoint: Endpoint, texts: list[str], **options: Any) -> list[Any]:
    spec = {"judge": {"base_url": endpoint.url, "model": "m", "backoff_seconds": 0.01, **options}}
    with built(spec) as rewards:
        return rewards.score([prompt(answer="7")] * len(texts), [completion(t) for t in texts])


def test_judge_over_http(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    texts = ["good", "plain", "busy twice", "always busy", "garbled", "empty", "broken"]
    scores = judged(
        endpoint, texts, api_key_env="JUDGE_KEY", retries=2, max_concurrency=3, request={"seed": 1}
    )
    assert [s.parts["judge"] for s in scores] == [0.9, 0.5, 0.5, None, None, None, None]
    assert [s.outcomes.get("judge") for s in scores] == [None] * 3 + ["error"] * 4
    assert [s.reward for s in scores] == [0.9, 0.5, 0.5, 0, 0, 0, 0]
    assert set(endpoint.keys) == {"Bearer secret"} and endpoint.most_at_once <= 3
    body = endpoint.bodies[0]
    assert (body["model"], body["seed"], body["temperature"]) == ("m", 1, 0)
    assert "What is 3+4?" in body["messages"][0]["content"]


def test_judge_that_is_slow_or_gone_is_an_error_of_that_part(endpoint: Endpoint) -> None:
    (slow,) = judged(endpoint, ["slow"], retries=0, timeout_seconds=0.3)
    assert slow.outcomes == {"judge": "error"}
    spec = {
        "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m", "retries": 1, "backoff_seconds": 0.01}
    }
    with built(spec) as rewards:
        assert rewards.score([prompt()], [completion("good")])[0].parts == {"judge": None}


def test_judge_that_refuses_the_key_ends_the_run(endpoint: Endpoint) -> None:
    with pytest.raises(ValueError, match=r"answered 401.*bad key"):
        judged(endpoint, ["refused"])


def test_closing_tags_count_those_that_stand_exactly_once() -> None:
    """With a weight of 0.5: 0.25 for each of the two (CoDistill-GRPO's set-up)."""
    texts = ["a</think>b</answer>", "a</think>b", "a</think></think></answer>", "<think><answer>", ""]
    assert parts({"closing_tags": 1.0}, texts) == [1.0, 0.5, 0.5, 0.0, 0.0]
    with built({"closing_tags": 0.5}) as rewards:
        assert rewards.weights == (0.5,)
