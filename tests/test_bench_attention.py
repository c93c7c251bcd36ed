"""The record `attention`: what is timed is checked, every copy of the cache differs, and the sizes are the models'."""

from dataclasses import replace

import pytest
import torch

from nanoqwen import bench, bench_attention, kernels, records
from nanoqwen.bench_attention import SIZES, STEPS, Rotation, attention_table, measure
from nanoqwen.config import SHAPES
from nanoqwen.hardware import Probe
from nanoqwen.ledger import CeilingError
from nanoqwen.paths import REPO
from nanoqwen.timing import percentiles

CPU = torch.device("cpu")


@pytest.fixture
def record(monkeypatch):
    """A record as a GPU would make it, of short contexts on this CPU, under a ceiling that nobody had to measure."""
    probe = Probe("read", 1e10, "B", percentiles([1.0, 1.0]), 1.0, "none", "cpu")
    monkeypatch.setattr(bench_attention.hardware, "read_ceiling", lambda device: probe)
    results = measure(CPU, {"small": (4, 2, 64)}, (20, 33), rotate_bytes=1, rounds=3, replay_s=1e-5)
    return replace(records.make("attention", results, "words", ["csrc/attention.cu"]), device="NVIDIA H200")


def test_the_sizes_are_those_of_the_models():
    for name, size in SIZES.items():
        config = SHAPES[f"qwen2.5-coder-{name.lower()}"]
        assert size == (config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def test_a_record_has_every_step_at_every_context_and_comes_back(record, tmp_path):
    records.save(record, tmp_path)
    contexts = records.load("attention", "NVIDIA H200", tmp_path).results["sizes"]["small"]["contexts"]
    assert list(contexts) == ["20", "33"]
    for tokens, entry in contexts.items():
        assert list(entry["cold"]) == list(STEPS)
        assert entry["bytes"] == (2 * int(tokens) * 2 * 64 + 2 * 4 * 64) * 2
        for figures in entry["cold"].values():
            assert figures["bytes_per_s"] == entry["bytes"] / figures["seconds"]["p50"]
            assert figures["of_probe"] == figures["bytes_per_s"] / 1e10
    assert attention_table(record).count("\n") == 2 * len(STEPS)


def test_a_rate_above_the_datasheet_is_refused(record, tmp_path):
    record.results["sizes"]["small"]["contexts"]["33"]["cold"]["mma"]["bytes_per_s"] = 4.9e12
    with pytest.raises(CeilingError, match=r"cold\.mma\.bytes_per_s"):
        records.save(record, tmp_path)


def test_copies_cover_what_is_asked_and_torch_gets_the_numbers_of_the_pages():
    rotation = Rotation(40, 100, 4, 2, 64, CPU, 5 * 40 * 2 * 2 * 64 * 2 - 1)
    assert rotation.copies == 5 and len(rotation.table) == 7 and rotation.length.item() == 40
    assert not torch.equal(rotation.k[0], rotation.k[1])
    for token in (0, 17, 39):
        page = rotation.pool[3, rotation.table[token // 16], :, :, token % 16]  # (kv_heads, 2, D)
        assert torch.equal(page[:, 0], rotation.k[3, :, token]) and torch.equal(page[:, 1], rotation.v[3, :, token])


def test_a_slow_kernel_never_follows_itself(monkeypatch):
    """Every other round runs backwards; what reads few copies would find them warm."""
    order, calls = [], iter((1, 1, 2, 4))  # of two copies
    monkeypatch.setattr(bench_attention, "calls_per_replay", lambda *_: next(calls))

    def time_replays(replays, *_):
        order.extend(replays)
        return {name: [4.0] for name in replays}

    monkeypatch.setattr(bench_attention, "time_replays", time_replays)
    steps = {name: STEPS[name] for name in ("online", "paged", "split", "torch")}
    samples = Rotation(20, 33, 4, 2, 64, CPU, 1).samples(steps, 1, 1e-5)
    assert order == ["split", "online", "paged", "torch"]
    assert samples == {"online": [4.0], "paged": [4.0], "split": [2.0], "torch": [1.0]}
    assert list(samples) == list(steps)


@pytest.mark.parametrize("spoil", ["zeros", "one", "nan"])
def test_a_kernel_that_is_timed_and_wrong_is_refused(monkeypatch, spoil):
    right = kernels.paged_attention

    def wrong(*inputs):
        out = right(*inputs)
        if spoil == "zeros":
            return out.zero_()
        out[-1, -1] = float("nan") if spoil == "nan" else 7.0
        return out

    monkeypatch.setattr(kernels, "paged_attention", wrong)
    with pytest.raises(RuntimeError, match="paged at 20 tokens is off by"):
        Rotation(20, 20, 4, 2, 64, CPU, 1).samples({"paged": STEPS["paged"], "torch": STEPS["torch"]}, 1, 1e-6)


def test_other_launches_can_be_compared():
    launches = {f"{n} splits": {"kernel": "paged_attention_mma", "splits": n} for n in (1, 2)}
    samples = Rotation(70, 70, 4, 2, 64, CPU, 1).samples(launches, 2, 1e-6)
    assert {name: len(times) for name, times in samples.items()} == {"1 splits": 2, "2 splits": 2}


def test_without_a_gpu_there_is_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        bench.RECORDS["attention"](tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_sources_of_the_record_are_there():
    assert [path for path in bench_attention.SOURCES if not (REPO / path).is_file()] == []
