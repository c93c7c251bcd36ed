"""The figures of lesson 06 draw what the record holds, whatever its rungs and regions are, and say where it is from."""

from itertools import pairwise

import pytest
import torch
from test_attention_pictures import words

from nanoqwen import records
from nanoqwen.bench_engine import SIZES
from nanoqwen.config import ModelConfig
from nanoqwen.engine import Engine
from nanoqwen.engine_weights import step_ledger
from nanoqwen.records import Record
from nanoqwen.step_pictures import (
    plot_bytes_and_time,
    plot_ladder,
    plot_slots,
    plot_step,
    region_bytes,
    step_order,
)

SMALL = ModelConfig(257, 128, 192, 2, 4, 2, head_dim=64, max_position_embeddings=256)
LAUNCHES = {"embed": 1, "qkv_proj": 3, "attention": 3, "o_proj": 3, "gate_up_proj": 3, "down_proj": 3, "lm_head": 1}


def seconds(p50):
    return {"seconds": {"p50": p50}}


@pytest.fixture
def record():
    """Three layers; launches of 1 to 7 µs, the first hardly seen; 100 µs on the slow rung, and a gap."""
    regions = {n: seconds(count * i * 1e-6) | {"launches": count} for i, (n, count) in enumerate(LAUNCHES.items(), 1)}
    regions["embed"] = seconds(1e-8) | {"launches": 1}
    rungs = {n: seconds(t) | {"tokens_per_s": 1 / t} for n, t in (("slow", 1e-4), ("quick", 8e-5), ("new", 7e-5))}
    entry = {"bytes": 2e8, "rungs": rungs, "regions": regions, "gap_s": 1e-5}
    results = {"ceilings": {"read_probe": {"bytes_per_s": 4e12}}, "sizes": {"7B": {"depths": {"128": entry}}}}
    state = dict.fromkeys(("driver", "cuda", "commit", "dirty"))
    return Record(
        "engine", "NVIDIA H200", torch="2", state={}, date="", sources={}, protocol="", results=results, **state
    )


def entry_of(record):
    return record.results["sizes"]["7B"]["depths"]["128"]


def bars(axis, row):
    """(start, length) of the bars that stand in a row, from left to right."""
    found = [b for b in axis.patches if b.get_width() and round(b.get_y() + b.get_height() / 2) == row]
    return sorted((b.get_x(), b.get_width()) for b in found)


@pytest.mark.parametrize("depth", [0, 17])
def test_the_ledger_of_a_shape_is_that_of_its_engine(depth):
    with Engine.random(SMALL, "cpu", 64, max_tokens=32, blocks=2) as engine:
        assert step_ledger(SMALL, depth, 64).rows == engine.ledger(depth).rows


def test_every_byte_has_a_region_and_a_norm_goes_to_the_matrix_behind_it():
    of = step_ledger(SMALL, 9, 64)
    with Engine.random(SMALL, "cpu", 64, max_tokens=32, blocks=2) as engine:
        regions = [name.split()[-1] for name, *_ in engine.launches(engine.chooser())]
    found, kinds = region_bytes(of, regions), of.by_kind()
    assert sum(found.values()) == of.total and list(found) == list(dict.fromkeys(regions))
    norm = 2 * SMALL.hidden_size  # bytes
    assert found["qkv_proj"] == kinds["qkv"] + kinds["bias"] + 2 * norm
    assert found["gate_up_proj"] == kinds["gate_up"] + 2 * norm
    assert found["lm_head"] == kinds["lm_head"] + norm and found["choose"] == 0


def test_the_new_keys_belong_to_who_stores_them():
    of, kinds = step_ledger(SMALL, 9, 64), step_ledger(SMALL, 9, 64).by_kind()
    apart, joined = region_bytes(of, [*LAUNCHES, "rope_append"]), region_bytes(of, LAUNCHES)
    assert apart["rope_append"] == kinds["kv_write"] and apart["attention"] == kinds["kv_read"]
    assert joined["attention"] == kinds["kv_read"] + kinds["kv_write"]


def test_a_tensor_that_no_region_moves_is_named():
    with pytest.raises(ValueError, match=r"model.norm.weight is moved by 'lm_head', .* none of the regions embed, q"):
        region_bytes(step_ledger(SMALL, 9, 64), [name for name in LAUNCHES if name != "lm_head"])


def test_the_recorded_bytes_are_those_of_the_regions():
    of = records.load("engine", gpu="nvidia-h200")
    for size, results in of.results["sizes"].items():
        for depth, entry in results["depths"].items():
            found = region_bytes(step_ledger(SIZES[size][0], int(depth), results["group"]), entry["regions"])
            assert sum(found.values()) == entry["bytes"]


def test_a_step_goes_through_its_layers_between_what_it_has_once():
    assert step_order({"a": 1, "b": 2, "c": 2, "d": 1, "e": 1}) == ["a", "b", "c", "b", "c", "d", "e"]
    assert step_order({"a": 1, "b": 1}) == ["a", "b"]


def test_slots_show_what_they_hold():
    marks = torch.tensor([[1, 1, 2], [0, 0, 0]])
    figure = plot_slots(marks, ("free", "theirs", "mine"), label="simulated")
    assert "(simulated)" in words(figure) and "mine" in words(figure)
    assert figure.axes[0].collections[0].get_array().flatten().tolist() == [1, 1, 2, 0, 0, 0]
    with pytest.raises(ValueError, match="marks go from 0 to 2; there are 2 words"):
        plot_slots(marks, ("free", "theirs"), label="simulated")


def test_the_ladder_parts_each_rung_at_the_floor(record):
    figure = plot_ladder(record, "7B", "128")
    (axis,) = figure.axes
    assert sum(bars(axis, 0), ()) == pytest.approx((0, 0.05, 0.05, 0.05))  # ms: 2e8 bytes at 4e12 a second, of 100 µs
    assert sum(bars(axis, 2), ()) == pytest.approx((0, 0.05, 0.05, 0.02))
    for text in ("slow", "new", "0.1 ms, 10,000 tok/s", "0.2 GB at the read probe's speed", "NVIDIA H200   (recorded)"):
        assert text in words(figure), text


def test_a_step_is_as_long_as_its_regions_and_the_gap(record):
    nbytes = dict.fromkeys(LAUNCHES, 0) | {"down_proj": 3 * 8_000_000}
    figure = plot_step(record, "7B", "128", nbytes)
    above, below = figure.axes
    step = bars(above, 0)
    regions = sum(region["seconds"]["p50"] for region in entry_of(record)["regions"].values())
    assert len(step) == sum(LAUNCHES.values()) + 1, "and the gap"
    assert step[-1] == pytest.approx((1e3 * regions, 0.01))
    assert all(a + length == pytest.approx(b) for (a, length), (b, _) in pairwise(step))
    assert [length for _, length in bars(below, 0)] == pytest.approx([2, 3, 4, 5, 6])  # µs of one layer
    assert bars(below, 1)[0] == pytest.approx((0, 2.0)) and len(bars(below, 1)) == 1
    text = words(figure)
    assert "gap" in text and "embed" in text and "one layer of it" in text


@pytest.mark.parametrize("gap", [None, -1e-6])
def test_where_nothing_is_left_no_gap_is_drawn(record, gap):
    del entry_of(record)["gap_s"]
    if gap:
        entry_of(record)["gap_s"] = gap
    figure = plot_step(record, "7B", "128", dict.fromkeys(LAUNCHES, 1))
    assert len(bars(figure.axes[0], 0)) == sum(LAUNCHES.values())
    assert "gap" not in words(figure)


def test_a_launch_stands_at_its_bytes_and_its_time(record):
    nbytes = {"7B": dict.fromkeys(LAUNCHES, 3e6) | {"embed": 0}}
    figure = plot_bytes_and_time(record, {"7B": "128"}, nbytes)
    points = [tuple(map(float, line.get_xydata()[0])) for line in figure.axes[0].lines if len(line.get_xydata()) == 1]
    assert len(points) == len(LAUNCHES) - 1, "what moves nothing has no place"
    assert points[0] == pytest.approx((1e6, 2.0)) and points[-1] == pytest.approx((3e6, 7.0))
    floor = next(line for line in figure.axes[0].lines if len(line.get_xydata()) == 2).get_xydata()
    assert [y / x for x, y in floor] == pytest.approx([1e6 / 4e12] * 2)
    assert "embed" not in words(figure) and "the read probe's speed" in words(figure)


def test_a_label_says_where_figures_are_from(record):
    for draw in (plot_ladder, lambda *a, **k: plot_step(*a, dict.fromkeys(LAUNCHES, 1), **k)):
        with pytest.raises(ValueError, match="it must begin with one of"):
            draw(record, "7B", "128", label="seen")
