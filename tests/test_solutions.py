"""The exercises' solutions are right: each is run against what its lesson checks."""

import runpy

import pytest
import torch
from lessons import cell

from nanoqwen import lesson
from nanoqwen.config import SHAPES
from nanoqwen.hardware import DATASHEETS
from nanoqwen.ledger import ledger
from nanoqwen.paths import NOTEBOOKS


def solution(name: str):
    return runpy.run_path(str(NOTEBOOKS / "solutions" / f"{name}.py"))


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("bits", [16, 4])
def test_token_bound(model, bits):
    got = solution("00_token_bound")["token_bound"](SHAPES[model], DATASHEETS["rtx-3060"], bits / 8)
    assert got == pytest.approx(ledger(SHAPES[model]).read / 2 * bits / 8 / 360e9, rel=1e-3)


@pytest.mark.parametrize("tokens, wanted", [(8, 65), (16, 129), (32, 385), (64, None)])
def test_pays_from(tokens, wanted):
    assert solution("08_pays_from")["pays_from"](tokens, DATASHEETS["h200"]) == wanted


@pytest.mark.parametrize("model", SHAPES)
def test_cache_bytes(model):
    got = solution("01_cache_bytes")["cache_bytes"](SHAPES[model], 1000)
    assert got == ledger(SHAPES[model], depth=1000).by_kind()["kv_read"]


def changed_solution(name, right, wrong):
    """What a solution defines with `wrong` in the place of `right`."""
    text = (NOTEBOOKS / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    assert right in text
    names = {}
    exec(text.replace(right, wrong), names)
    return names


@pytest.fixture
def judge():
    """What the exercise of lesson 06 says of a loop: its own cells, run with that loop in the stub's place."""
    device, judged, cases = (cell("06_graph_capture.ipynb", start) for start in ("class Device", "def judged", "cases"))

    def run(loop=None) -> bool:
        names = {"torch": torch, "lesson": lesson}
        exec(device, names)
        if loop:
            names["my_loop"] = loop
        exec(judged, names)
        exec(cases, names)
        return names["solved"]

    return run


def test_the_loop_is_not_yet_until_its_solution_is_in(judge):
    assert judge() is False
    assert judge(solution("06_loop")["my_loop"]) is True


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ('"opening" if device.position % 16 == 0 else "plain"', '"plain"', "position 16 needs the graph 'opening'"),
        ("min(look, most - len(tokens))", "look", "the last look is a short one: .*'steps': 48"),
        ("min(look, most - len(tokens))", "1", "16 in flight: .*'looks': 38"),
        ("if token in stop:", "if False:", "a look at each token: .*'looks': 40"),
    ],
)
def test_a_wrong_loop_is_refused(judge, right, wrong, words):
    names = changed_solution("06_loop", right, wrong)
    with pytest.raises(lesson.NotRight, match=words):
        judge(names["my_loop"])


@pytest.fixture
def judge_claims():
    """The check of lesson 07's exercise: its own cells, run with these functions in the stubs' place."""
    starts = "def most_tokens", "claims", "def right_bound"
    stubs, claims, checks = (cell("07_scoreboard.ipynb", start) for start in starts)

    def run(mine: dict | None = None) -> bool:
        names = {"lesson": lesson, "h200": DATASHEETS["h200"], "shape": SHAPES["qwen2.5-coder-7b"]}
        exec(stubs, names)
        names |= mine or {}
        exec(claims, names)
        exec(checks, names)
        return names["solved"]

    return run


def test_the_claims_are_not_yet_until_the_solution_is_in(judge_claims):
    assert judge_claims() is False
    mine = solution("07_claims")
    assert judge_claims({name: mine[name] for name in ("most_tokens", "impossible")}) is True


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("torch.float16 if bits == 16 else Grouped(bits, 128)", "Grouped(bits, 128)", "16 bits, head 16, 0 tokens"),
        ("form(head_bits)", "form(16)", "4 bits, head 4, 128 tokens"),
        ("forms, depth)", "forms, 128)", "16 bits, head 16, 0 tokens"),
        ("if rate > most", "if rate < most", "rates of those that cannot be true"),
        (".bandwidth\n    return [", ".bandwidth * 0.9\n    return [", "rates of those that cannot be true"),
    ],
)
def test_wrong_counts_of_claims_are_refused(judge_claims, right, wrong, words):
    mine = changed_solution("07_claims", right, wrong)
    with pytest.raises(lesson.NotRight, match=words):
        judge_claims({name: mine[name] for name in ("most_tokens", "impossible")})
