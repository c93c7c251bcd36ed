"""The record `engine`: what it holds, what it refuses. On a CPU its times mean nothing, and are not looked at."""

import itertools
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nanoqwen import bench, bench_engine
from nanoqwen.bench_engine import RUNGS, STEPS, WARM, check, engine_table, measure, timeline
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
    results = measure(engine, [24], PROBE, EAGER, steps=4, rounds=2, prompt=5, seen=4)
    entry = results["depths"]["24"]
    assert results["weights"] == "random" and results["group"] == 64
    assert entry["bytes"] == engine.ledger(24).total
    for name in EAGER:
        figures = entry["rungs"][name]
        assert figures["seconds"]["n"] == 8
        assert figures["bytes_per_s"] == pytest.approx(entry["bytes"] * figures["tokens_per_s"])
    launches = {name: region["launches"] for name, region in entry["regions"].items()}
    assert launches == {"embed": 1, "lm_head": 1, "choose": 1} | dict.fromkeys(
        ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj"), 2
    )
    assert [name for name, *_ in entry["step"]] == ["embed", *list(launches)[1:-2] * 2, "lm_head", "choose"]
    for (_, start, end), (_, later, _) in pairwise(entry["step"]):
        assert 0 <= start <= end <= later
    assert entry["on_device"]["seconds"]["n"] == 2 * bench_engine.UNSEEN
    assert entry["one_by_one"].keys() == {"regions", "gap", "step"}
    json.dumps(results, allow_nan=False)
    table = engine_table("small", results)
    assert "random weights" in table and "eager, pdl" in table and "gate_up_proj" in table
    assert engine.kv.free_pages == 6


def test_a_launch_counts_from_where_the_one_before_it_ended(engine, monkeypatch):
    """Two steps of launches that overlap, and one of them late."""
    names = [name.split()[-1] for name, _, _ in engine.launches(engine.chooser())]
    n, late = len(names), names.index("attention")

    def spans(engine, steps, launch, position):
        made = [(i - 0.5, i + 1.0) for i in range(steps * n)]
        return [(start + (0.75 if i % n == late else 0), end) for i, (start, end) in enumerate(made)]

    monkeypatch.setattr(bench_engine, "_spans", spans)
    found = timeline(engine, list(range(20)), 4)
    assert found["gap"]["p50"] == 0.25 and found["regions"]["attention"]["seconds"]["p50"] == 1.75
    assert found["regions"]["o_proj"] == {"seconds": found["regions"]["o_proj"]["seconds"], "launches": 2}
    assert found["regions"]["o_proj"]["seconds"]["p50"] == 2.0
    assert sum(region["seconds"]["p50"] for region in found["regions"].values()) + 0.25 == n
    assert found["step"][1] == [names[1], 5e5, 2e6]
    monkeypatch.setattr(bench_engine, "_spans", lambda *how: spans(*how)[1:])
    with pytest.raises(RuntimeError, match=rf"the profiler saw {4 * n - 1} launches of 4 steps of {n}"):
        timeline(engine, list(range(20)), 4)


def test_the_steps_that_are_taken_apart_are_those_that_are_timed(engine, monkeypatch):
    """From some position on attention has more splits: parts of other steps would add up to another time."""
    names, positions, overlaps = [name for name, _, _ in engine.launches(engine.chooser())], [], []
    launched = engine.show

    def show(sequence, count, sampler=None):
        launch, at = launched(sequence, count, sampler), engine.kv.length(sequence)
        if count != 1:  # else it is a step of a run
            positions.append((at, count))
            overlaps.append(engine.pdl)
        return launch

    def spans(engine, steps, launch, position):
        assert (position, steps) == positions[-1]
        return [(float(i), i + 0.75) for i in range(steps * len(names))]

    monkeypatch.setattr(engine, "show", show)
    monkeypatch.setattr(bench_engine, "_spans", spans)
    clock = itertools.count()  # a second passes between two looks
    monkeypatch.setattr(bench_engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    entry = measure(engine, [24], PROBE, EAGER, steps=2, rounds=1, prompt=5, seen=6)["depths"]["24"]
    assert positions == [(24, 6)] * (bench_engine.UNSEEN + 2)
    assert overlaps == [True] * (bench_engine.UNSEEN + 1) + [False] and engine.pdl
    assert entry["on_device"]["seconds"]["p50"] == 1 and entry["explained"] == len(names)


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
