"""Percentiles, pairs and decode timings: right on numbers known beforehand, closed to numbers that are none."""

import math
import time
from dataclasses import replace

import numpy
import pytest
import torch
from toys import random_weights

from nanoqwen import hardware, measure, quantize
from nanoqwen.config import ModelConfig
from nanoqwen.generation import Sampler, generate
from nanoqwen.hardware import Machine, Probe
from nanoqwen.ledger import Grouped
from nanoqwen.measure import CeilingError, check_last, decode, graph_decode, paired, percentiles, time_calls
from nanoqwen.reference import build
from nanoqwen.roofline import ledger

TOY = ModelConfig(
    vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, eos_token_id=(3,),
)  # fmt: skip
PROMPT = [5, 250, 17, 99, 3, 42]


@pytest.fixture
def toy():
    return build(TOY, random_weights(TOY, bias=0.1))


def machine_with(cache: int) -> Machine:
    return Machine("cpu", "test", 2, cache, None, "3", "2", None, None, None, None)


def probe_of(rate: float) -> Probe:
    return Probe("read", rate, "B", percentiles([1.0]), 1.0, "by hand", "test")


@pytest.mark.parametrize("n", [1, 2, 3, 10, 101, 256])
def test_percentiles_are_numpy_s(n):
    samples = numpy.random.default_rng(n).normal(1, 0.2, n)
    got = percentiles(list(samples))
    assert [got.p10, got.p50, got.p90, got.p99] == pytest.approx(list(numpy.percentile(samples, [10, 50, 90, 99])))
    assert got.n == n


def test_no_samples_have_no_percentiles():
    with pytest.raises(ValueError, match="no samples"):
        percentiles([])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match="sample 2 of 4"):
        percentiles([1.0, 2.0, bad, 3.0])


def test_percentiles_print_in_a_unit_that_fits():
    assert "p50 4 ms" in str(percentiles([4e-3]))
    assert "p50 7 µs" in str(percentiles([7e-6]))
    assert "p50 2 ×" in str(percentiles([2.0], unit="×"))


def test_time_calls_throws_the_warm_up_away():
    calls = []
    samples = time_calls(lambda: calls.append(len(calls)), repeats=5, warmup=2)
    assert len(calls) == 7 and len(samples) == 5 and all(s >= 0 for s in samples)
    naps = time_calls(lambda: time.sleep(0.01), repeats=2, warmup=0)
    assert min(naps) >= 0.01


@pytest.mark.parametrize(("repeats", "warmup"), [(0, 1), (1, -1)])
def test_time_calls_needs_a_repeat(repeats, warmup):
    with pytest.raises(ValueError, match=f"repeats is {repeats} and warmup {warmup}"):
        time_calls(lambda: None, repeats=repeats, warmup=warmup)


def test_pairs_alternate_and_are_compared_within_their_round():
    order, drift = [], iter(range(1, 100))

    def contender(name, factor):
        def once():
            order.append(name)
            return factor * (next(drift) + 1) // 2 * 1.0  # a machine that slows down round by round

        return once

    pairs = paired({"a": contender("a", 2), "b": contender("b", 4)}, rounds=3, warmup=1)
    assert "".join(order) == "abababab"
    assert len(pairs.samples["a"]) == 3
    assert pairs.ratios("a", "b") == [a / b for a, b in zip(pairs.samples["a"], pairs.samples["b"], strict=True)]
    assert pairs.ratio("a", "b") == sorted(pairs.ratios("a", "b"))[1]


@pytest.mark.parametrize("bad", [None, 0.0, math.nan, math.inf])
def test_a_contender_without_a_time_is_named(bad):
    with pytest.raises(ValueError, match="b returned"):
        paired({"a": lambda: 1.0, "b": lambda: bad}, rounds=1)


def test_one_contender_is_no_comparison():
    with pytest.raises(ValueError, match="1 contenders"):
        paired({"a": lambda: 1.0})


def test_decode_times_what_generate_makes_and_ignores_stop_tokens(toy):
    timing = decode(toy, PROMPT, 24)
    assert list(timing.tokens) == list(generate(toy, PROMPT, 24, stop=()))
    assert len(set(timing.tokens)) > 12  # lively: a step that repeats itself would show
    assert timing.ttft.n == 1 and timing.tpot.n == 23
    # Steps 1 … 23 find 6 … 28 tokens in the cache.
    assert timing.mean_depth == sum(range(6, 29)) / 23
    assert timing.bytes_per_token == ledger(TOY, torch.float32, depth=17).total
    assert timing.tokens_per_s == 1 / timing.tpot.p50
    assert timing.peak_memory > 1 << 20 and "process" in timing.peak_memory_is


@pytest.mark.parametrize("head_bits", [16, 8])
def test_a_quantised_model_is_charged_what_its_matrices_hold(toy, head_bits, monkeypatch):
    twin = quantize.quantize_model(toy, 32, "rtn", head_bits)
    forms = dict.fromkeys(("qkv", "o", "gate_up", "down"), Grouped(4, 32)) | {"default": torch.float32}
    counted = ledger(TOY, forms | ({"lm_head": Grouped(8, 32)} if head_bits == 8 else {}), depth=17).total
    monkeypatch.setattr(hardware, "machine", lambda device=None: machine_with(cache=1024))
    timing = decode(twin, PROMPT, 24, probe=probe_of(1e15))
    assert timing.bytes_per_token == counted < ledger(TOY, torch.float32, depth=17).total
    assert timing.mbu_probe == pytest.approx(counted / timing.tpot.p50 / 1e15)
    assert list(timing.tokens) == list(generate(twin, PROMPT, 24, stop=()))


def test_decode_draws_the_same_tokens_in_the_timed_run_as_in_any_other(toy):
    sampler = Sampler(temperature=1.0, seed=11)
    runs = [decode(toy, PROMPT, 12, sampler, warmup=warmup).tokens for warmup in (0, 2)]
    assert runs[0] == runs[1] == tuple(generate(toy, PROMPT, 12, Sampler(temperature=1.0, seed=11), stop=()))


def test_more_first_tokens_give_more_samples_of_ttft(toy):
    assert decode(toy, PROMPT, 2, first_tokens=4).ttft.n == 5


def test_one_token_has_no_time_between_tokens(toy):
    timing = decode(toy, PROMPT, 1)
    assert timing.tpot is None and timing.mbu_probe is None and "one token" in timing.note
    assert "TTFT" in str(timing)


def test_no_token_is_refused(toy):
    with pytest.raises(ValueError, match="new_tokens is 0"):
        decode(toy, PROMPT, 0)


def test_a_model_that_fits_in_the_cache_has_no_mbu(toy, monkeypatch):
    monkeypatch.setattr(hardware, "machine", lambda device=None: machine_with(cache=32 << 20))
    timing = decode(toy, PROMPT, 8, probe=probe_of(1.0))  # any speed is above one byte a second
    assert timing.mbu_probe is None and timing.mbu_datasheet is None
    assert "cache" in timing.note and "cache" in str(timing)


def test_above_the_probe_is_an_error(toy, monkeypatch):
    monkeypatch.setattr(hardware, "machine", lambda device=None: machine_with(cache=1024))
    with pytest.raises(CeilingError):
        decode(toy, PROMPT, 8, probe=probe_of(1.0))
    assert 0 < decode(toy, PROMPT, 8, probe=probe_of(1e15)).mbu_probe < 1


def test_a_probe_from_a_bad_moment_is_measured_again_before_it_accuses(toy, monkeypatch):
    asked = []

    def ceiling(device=None, again=False):
        asked.append(again)
        return probe_of(1e15 if again else 1.0)

    monkeypatch.setattr(hardware, "machine", lambda device=None: machine_with(cache=1024))
    monkeypatch.setattr(hardware, "read_ceiling", ceiling)
    assert 0 < decode(toy, PROMPT, 8).mbu_probe < 1
    assert asked == [False, True]


def test_above_the_datasheet_is_an_error_without_a_second_chance(toy, monkeypatch):
    slow = replace(hardware.DATASHEETS["t4"], bandwidth=1.0)
    monkeypatch.setattr(hardware, "machine", lambda device=None: replace(machine_with(cache=1024), spec=slow))
    with pytest.raises(CeilingError, match="ceiling"):
        decode(toy, PROMPT, 8, probe=probe_of(1e15))


def test_a_step_that_yields_nan_counts_for_nothing(toy):
    toy.model.layers[1].mlp.down_proj.weight[3, 5] = math.nan
    with pytest.raises(RuntimeError, match="not finite"):
        decode(toy, PROMPT, 4)


def test_a_run_that_ends_in_another_token_is_caught(toy):
    tokens = list(generate(toy, PROMPT, 6, stop=()))
    check_last(toy, PROMPT, tokens)
    for wrong in (0, 256):
        if wrong != tokens[-1]:
            with pytest.raises(RuntimeError, match="computed something else"):
                check_last(toy, PROMPT, [*tokens[:-1], wrong])
    with pytest.raises(RuntimeError, match="has 257"):
        check_last(toy, PROMPT, [*tokens[:-1], 257])


def test_graph_decode_on_a_cpu_says_what_it_needs(toy):
    with pytest.raises(ValueError, match="CUDA device; this one is on cpu"):
        graph_decode(toy, 8)


def test_what_a_timing_says_goes_into_a_record(toy):
    values = decode(toy, PROMPT, 4).to_dict()
    assert values["new_tokens"] == 4 and "tokens" not in values
    assert set(values["tpot"]) == {"p10", "p50", "p90", "p99", "n", "unit"}


def test_measure_offers_what_it_promises():
    assert all(hasattr(measure, name) for name in measure.__all__)
