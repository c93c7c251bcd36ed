"""The record `awq`: every launch is timed and compared with the reference, in any order, and the tuner has a price."""

from dataclasses import replace

import pytest
import torch

from nanoqwen import bench_awq, kernels, readme, records
from nanoqwen.bench_awq import LARGE, SHAPES, autotuner, awq_table, bytes_moved, launches, measure, stress
from nanoqwen.hardware import Probe
from nanoqwen.kernels import awq
from nanoqwen.paths import REPO
from nanoqwen.timing import percentiles

CPU = torch.device("cpu")
SMALL = {"7B gate_up": (256, 64), "7B down": (128, 16)}


@pytest.fixture
def probe(monkeypatch):
    probe = Probe("copy", 1e10, "B", percentiles([1.0, 1.0]), 1.0, "none", "cpu")
    monkeypatch.setattr(bench_awq.hardware, "copy_probe", lambda device: probe)


@pytest.fixture
def record(probe):
    """A record as a GPU would make it, of small matrices on this CPU."""
    results = {
        **measure(CPU, SMALL, rotate_bytes=1, rounds=2, replay_s=1e-6),
        "stress": stress(CPU, SMALL, flush_bytes=1, seeds=2, trials=3),
        "autotuner": autotuner(CPU, SMALL["7B down"], calls=2, rounds=2),
    }
    return replace(records.make("awq", results, "words", bench_awq.SOURCES), device="NVIDIA H200")


def test_the_record_has_every_launch_and_comes_back(record, tmp_path):
    records.save(record, tmp_path)
    results = records.load("awq", "NVIDIA H200", tmp_path).results
    entry = results["shapes"]["7B gate_up"]
    assert list(entry["kernels"]) == list(launches()) and len(launches()) == 2 + 16
    assert entry["bytes"] == bytes_moved(256, 64) == 256 * 32 + 2 * (32 + 128) + 2 * 256 * 64
    for figures in entry["kernels"].values():
        assert figures["of_copy"] == entry["bytes"] / figures["seconds"]["p50"] / 1e10
    assert entry["best_v3"].startswith("v3 block")
    for found in results["stress"]["shapes"].values():
        assert list(found) == ["v1", "v2", "v3", "tuned"]
        for figures in found.values():
            assert figures["seconds"]["n"] == 6 and len(figures["by_seed"]) == 2
    assert results["autotuner"]["candidates"] == 16 and results["autotuner"]["first_call_s"] > 0
    assert awq_table(record).count("\n") == 2 * 18 + 3


def test_mean_and_median_that_part_are_flagged():
    assert not bench_awq._spread([[1.0, 1.0, 1.0], [1.0, 1.0, 1.1]])["parted"]
    assert bench_awq._spread([[1.0, 1.0, 1.0], [1.0, 1.0, 9.0]])["parted"]


@pytest.mark.parametrize("spoil", ["nothing", "one", "nan"])
def test_a_kernel_that_is_timed_and_wrong_is_refused(monkeypatch, probe, spoil):
    right = kernels.awq_dequantize_v2

    def wrong(*packed, out):
        if spoil != "nothing":
            right(*packed, out=out)
            out[-1, -1] = 1 + out[-1, -1] if spoil == "one" else float("nan")

    monkeypatch.setattr(kernels, "awq_dequantize_v2", wrong)
    with pytest.raises(RuntimeError, match="v2 on 7B down gave another result than the reference"):
        measure(CPU, {"7B down": (128, 16)}, 1, rounds=1, replay_s=1e-6)
    with pytest.raises(RuntimeError, match="v2 on 7B down, seed 0 gave another result than the reference"):
        stress(CPU, {"7B down": (128, 16)}, 1, seeds=1, trials=1)


def test_the_usual_tuner_is_back_after_a_failure():
    usual = awq.TUNER
    with pytest.raises(KeyError), bench_awq._tuner(REPO / "nowhere.json") as tuner:
        assert awq.TUNER is tuner and tuner is not usual and tuner.candidates == usual.candidates
        raise KeyError
    assert awq.TUNER is usual


def test_without_a_gpu_there_is_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        bench_awq.record_awq(tmp_path)
    assert not list(tmp_path.iterdir())


def test_sources_are_there_and_the_shapes_are_whole_groups():
    assert [path for path in bench_awq.SOURCES if not (REPO / path).is_file()] == []
    assert all(rows % bench_awq.GROUP == 0 and cols % 8 == 0 for rows, cols in SHAPES.values())
    assert set(LARGE) <= set(SHAPES) and bench_awq.SEEDS >= 5 and bench_awq.TRIALS >= 15


# What the committed record shows


@pytest.fixture
def recorded():
    if (record := readme._record("awq")) is None:
        pytest.skip("awq has not been recorded yet")
    return record.results


def test_the_recorded_v3_writes_at_the_speed_of_a_copy(recorded):
    for name in LARGE:
        entry = recorded["shapes"][name]
        assert entry["kernels"][entry["best_v3"]]["of_copy"] >= 0.85


def test_the_recorded_stress_is_whole(recorded):
    assert recorded["stress"]["seeds"] >= 5 and recorded["stress"]["trials"] >= 15
    for found in recorded["stress"]["shapes"].values():
        for figures in found.values():
            away = abs(figures["mean"] - figures["seconds"]["p50"])
            assert figures["parted"] == (away > 0.15 * figures["seconds"]["p50"])


def test_a_recorded_tuned_call_costs_far_less_than_the_first(recorded):
    tuner = recorded["autotuner"]
    assert tuner["overhead_s"]["p50"] < 5e-6 < tuner["first_call_s"]
