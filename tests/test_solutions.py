"""The exercises' solutions are right: each is run against what its lesson checks."""

import runpy

import pytest

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
