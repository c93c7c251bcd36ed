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
)

SMALL = ModelConfig(257, 128, 192, 2, 4, 2, head_dim=64, max_position_embeddings=256)
LAUNCHES = {"embed": 1, "qkv_proj": 3, "attention": 3, "o_proj": 3, "gate_up_proj": 3, "down_proj": 3, "lm_head": 1}


def seconds(p50):
    return {"seconds": {"p50": p50}}


def regions(each):
    """Of microseconds that one launch takes."""
    return {name: seconds(1e-6 * count * each[name]) | {"launches": count} for name, count in LAUNCHES.items()}


@pytest.fixture
def record():
    """Three layers, 100 µs on the slow rung.

    With PDL launches end 1 to 7 µs one behind the other, the first hardly seen, and begin 1.5 µs before their turn,
    where the first cannot. One by one they take 1 µs more each, and 0.5 µs lie before each.
    """
    overlapped = {name: float(i) for i, name in enumerate(LAUNCHES, 1)} | {"embed": 0.01}
    alone = {name: each + 1 for name, each in overlapped.items()}
    step, one_by_one, ended, now = [], [], 2.0, 0.0
    for name in ["embed", *list(LAUNCHES)[1:-1] * 3, "lm_head"]:
        step.append([name, ended - 1.5 * bool(step), ended + overlapped[name]])
        one_by_one.append([name, now + 0.5, now + 0.5 + alone[name]])
        ended, now = step[-1][2], one_by_one[-1][2]
    rungs = {n: seconds(t) | {"tokens_per_s": 1 / t} for n, t in (("slow", 1e-4), ("quick", 8e-5), ("new", 7e-5))}
    entry = {"bytes": 2e8, "rungs": rungs, "regions": regions(overlapped), "step": step}
    entry["one_by_one"] = {"regions": regions(alone), "step": one_by_one}
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
    assert found["attention"] == kinds["kv_read"] + kinds["kv_write"]


def test_a_tensor_that_no_region_moves_is_named():
    with pytest.raises(ValueError, match=r"model.norm.weight is moved by 'lm_head', .* none of the regions embed, q"):
        region_bytes(step_ledger(SMALL, 9, 64), [name for name in LAUNCHES if name != "lm_head"])


def test_the_recorded_bytes_are_those_of_the_regions():
    of = records.load("engine", gpu="nvidia-h200")
    for size, results in of.results["sizes"].items():
        for depth, entry in results["depths"].items():
            found = region_bytes(step_ledger(SIZES[size][0], int(depth), results["group"]), entry["regions"])
            assert sum(found.values()) == entry["bytes"]


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


def test_a_step_is_drawn_by_its_own_clock(record):
    figure = plot_step(record, "7B", "128", dict.fromkeys(LAUNCHES, 1))
    entry, (above, _) = entry_of(record), figure.axes
    overlapped, alone = bars(above, 0), bars(above, 1)
    assert len(overlapped) == len(alone) == sum(LAUNCHES.values())
    assert [start for start, _ in alone] == pytest.approx([start / 1e3 for _, start, _ in entry["one_by_one"]["step"]])
    assert all(a + length == pytest.approx(b) for (a, length), (b, _) in pairwise(overlapped)), "exposed time only"
    for found, step in ((overlapped, entry["step"]), (alone, entry["one_by_one"]["step"])):
        assert sum(found[-1]) == pytest.approx(step[-1][2] / 1e3)
    for text in ("with PDL", "one by one", "embed", "one layer of it"):
        assert text in words(figure), text


def test_one_layer_is_exposed_time_behind_what_overlaps_and_above_its_bytes(record):
    nbytes = dict.fromkeys(LAUNCHES, 0) | {"qkv_proj": 3 * 4_000_000, "down_proj": 3 * 8_000_000}
    _, below = plot_step(record, "7B", "128", nbytes).axes
    pale = {(b.get_x(), b.get_width()) for b in below.patches if b.get_alpha() and b.get_width()}
    strong = sorted({*bars(below, 0), *bars(below, 1)} - pale)
    # µs from the end of the layer before: that one's last launch, then the layer's
    assert strong[0] == pytest.approx((-7.5, 7.5)), "what the clock starts at"
    assert strong[1:] == [pytest.approx(each) for each in ((0, 2), (2, 3), (5, 4), (9, 5), (14, 6))]
    assert sorted(pale) == [pytest.approx((at - 1.5, 1.5)) for at in (0, 2, 5, 9, 14)]
    assert bars(below, 2)[1:] == [pytest.approx(each) for each in ((0.5, 3), (4, 4), (8.5, 5), (14, 6), (20.5, 7))]
    assert bars(below, 3) == [pytest.approx((0, 1)), pytest.approx((1, 2))]


def test_launches_that_run_at_once_have_a_row_each(record):
    """A launch that begins two before its turn needs a third row."""
    step = entry_of(record)["step"]
    for launch in step:
        if launch[0] == "gate_up_proj":
            launch[1] -= 4.0
    _, below = plot_step(record, "7B", "128", dict.fromkeys(LAUNCHES, 1)).axes
    assert [text.get_text() for text in below.get_yticklabels()][:2] == ["with PDL", "one by one"]
    assert list(below.get_yticks()) == [1.0, 3.0, 4.0]
    for row in range(4):
        found = bars(below, row)
        assert found and all(a + length < b + 1e-9 for (a, length), (b, _) in pairwise(found))


def test_a_launch_stands_at_its_bytes_and_its_time(record):
    nbytes = {"7B": dict.fromkeys(LAUNCHES, 3e6) | {"embed": 0}}
    figure = plot_bytes_and_time(record, {"7B": "128"}, nbytes)
    (axis,) = figure.axes
    points = [tuple(map(float, line.get_xydata()[0])) for line in axis.lines if len(line.get_xydata()) == 1]
    assert len(points) == len(LAUNCHES) - 1, "what moves nothing has no place"
    assert points[0] == pytest.approx((1e6, 2.0)) and points[-1] == pytest.approx((3e6, 7.0))
    tails = [lines.get_segments()[0].tolist() for lines in axis.collections]
    assert tails == [[pytest.approx((x, y)), pytest.approx((x, y + 1))] for x, y in points], "to the time without PDL"
    floor = next(line for line in axis.lines if len(line.get_xydata()) == 2).get_xydata()
    assert [y / x for x, y in floor] == pytest.approx([1e6 / 4e12] * 2)
    assert "embed" not in words(figure) and "the read probe's speed" in words(figure)


def test_a_label_says_where_figures_are_from(record):
    for draw in (plot_ladder, lambda *a, **k: plot_step(*a, dict.fromkeys(LAUNCHES, 1), **k)):
        with pytest.raises(ValueError, match="it must begin with one of"):
            draw(record, "7B", "128", label="seen")
