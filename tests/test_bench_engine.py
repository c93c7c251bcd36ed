"""The record `engine`: what it holds, what it refuses. On a CPU its times mean nothing, and are not looked at."""

import json
from types import SimpleNamespace

import pytest
import torch

from nanoqwen import bench, bench_engine
from nanoqwen.bench_engine import RUNGS, STEPS, WARM, check, engine_table, measure
from nanoqwen.config import ModelConfig
from nanoqwen.engine import Engine
from nanoqwen.graphs import CHAIN, MODES
from nanoqwen.paths import REPO

SMALL = ModelConfig(257, 128, 192, 2, 4, 2, head_dim=64, max_position_embeddings=256)
PROBE = SimpleNamespace(rate=1e15)
EAGER = {"eager": ("eager", False), "eager, pdl": ("eager", True)}


@pytest.fixture
def engine():
    with Engine.random(SMALL, "cpu", 64, max_tokens=96, blocks=2) as made:
        yield made


def test_a_measurement_has_every_rung_region_and_the_bytes_of_the_depth(engine):
    results = measure(engine, [24], PROBE, EAGER, steps=4, rounds=2, prompt=5)
    entry = results["depths"]["24"]
    assert results["weights"] == "random" and results["group"] == 64
    assert entry["bytes"] == engine.ledger(24).total
    for name in EAGER:
        figures = entry["rungs"][name]
        assert figures["seconds"]["n"] == 8
        assert figures["bytes_per_s"] == pytest.approx(entry["bytes"] * figures["tokens_per_s"])
    launches = {name: region["launches"] for name, region in entry["regions"].items()}
    assert launches == {"embed": 1, "lm_head": 1, "choose": 1} | dict.fromkeys(
        ("qkv_proj", "rope_append", "attention", "o_proj", "gate_up_proj", "down_proj"), 2
    )
    json.dumps(results, allow_nan=False)
    table = engine_table("small", results)
    assert "random weights" in table and "eager, pdl" in table and "gate_up_proj" in table
    assert engine.kv.free_pages == 6


def test_rungs_that_make_other_tokens_are_refused(engine, monkeypatch):
    right, runs = bench_engine.run, []

    def wrong(*how):
        seconds, tokens = right(*how)
        runs.append(tokens)
        return seconds, tokens if len(runs) < 2 else [*tokens[:-1], tokens[-1] ^ 1]

    monkeypatch.setattr(bench_engine, "run", wrong)
    with pytest.raises(
        RuntimeError, match="eager, pdl made another token than the first rung at step 18 from depth 24"
    ):
        measure(engine, [24], PROBE, EAGER, steps=2, rounds=1, prompt=5)


def test_logits_that_are_wrong_are_refused(engine):
    ids = list(range(20))
    engine.prefill(ids)
    right = engine.logits.clone()
    check(engine, ids, right)
    for wrong in (right + 0.1 * right.norm(), torch.zeros_like(right), right * float("nan"), right.flip(0)):
        with pytest.raises(RuntimeError, match="after 20 tokens the logits are off by"):
            check(engine, ids, wrong)


def test_the_ladder_names_modes_and_its_steps_fill_whole_looks():
    assert {mode for mode, _ in RUNGS.values()} == set(MODES)
    assert all(STEPS % mode.look == 0 for mode in MODES.values()) and WARM % CHAIN == 0
    assert all(depth > WARM + STEPS // 2 for _, depths in bench_engine.SIZES.values() for depth in depths)


def test_without_a_gpu_there_is_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        bench.RECORDS["engine"](tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_sources_of_the_record_are_there():
    assert [path for path in bench_engine.SOURCES if not (REPO / path).is_file()] == []
