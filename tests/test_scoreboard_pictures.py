"""The figures of lesson 07 draw what the records hold, and nothing above a ceiling."""

import pytest
from test_attention_pictures import words

from nanoqwen.ledger import CeilingError
from nanoqwen.records import Record
from nanoqwen.scoreboard_pictures import (
    Rung,
    ceilings,
    launches_of,
    plot_depths,
    plot_field,
    plot_parts,
    plot_rungs,
    rungs,
    step_parts,
)

LAYER = ("qkv", "o", "gate_up", "down")


def record(name, results, device="NVIDIA H200"):
    none = dict.fromkeys(("driver", "cuda", "commit", "dirty"))
    return Record(name, device, torch="2", state={}, date="", sources={}, protocol="", results=results, **none)


def timed(seconds, nbytes=4e9, **more):
    return {"seconds": {"p50": seconds}, "bytes": nbytes, **more}


def contender(**depths):
    return {"depths": {depth[1:]: timed(*at) for depth, at in depths.items()}}


@pytest.fixture
def found():
    runs = [
        {"how": how, "depth": depth, "bytes_per_token": 14e9, "tpot": {"p50": 0.02}}
        for how in ("eager", "graph")
        for depth in (128, 4096)
    ]
    naive = {name: {"bytes": 1e6, "cold": {"naive": timed(2e-3), "gemv": timed(1e-3)}} for name in LAYER}
    int4 = {name: {"bytes": 2e5, "cold": {"naive": timed(4e-4), "pdl": timed(1e-4)}} for name in LAYER}
    shapes = {f"7B {name}": each for name, each in (naive | {"lm_head": naive["o"]}).items()}
    at = {"bytes": 4e9, "rungs": {"eager": timed(6e-3), "pdl": timed(2e-3), "chain": timed(1e-3)}}
    ours = {"contenders": {"nanoqwen": contender(d128=(2e-3,))}}
    return {
        "reference": record("reference", {"models": {"qwen2.5-coder-7b": {"runs": runs}}}),
        "gemv": record("gemv", {"shapes": shapes}),
        "int4": record("int4", {"shapes": {f"7B {name}": each for name, each in int4.items()}}),
        "engine": record("engine", {"sizes": {"7B": {"layers": 10, "depths": {"128": at}}}}),
        "scoreboard": record("scoreboard", {"models": {"qwen2.5-coder-7b": ours}}),
    }


def test_the_rungs_are_those_of_the_records(found):
    ladder = rungs("7B", found)
    assert [rung.lesson for rung in ladder] == ["01", "01", "02", "03", "04", "04", "06", "06", "07"]
    assert [rung.whole for rung in ladder] == [True] * 2 + [False] * 4 + [True] * 3
    assert [rung.weights for rung in ladder] == ["bf16"] * 4 + ["INT4"] * 5
    seconds = [0.02, 0.02, 10 * 4 * 2e-3 + 2e-3, 10 * 4 * 1e-3 + 1e-3, 10 * 4 * 4e-4 + 1e-3, 10 * 4 * 1e-4 + 1e-3]
    assert [rung.seconds for rung in ladder] == pytest.approx([*seconds, 6e-3, 2e-3, 2e-3])
    assert [rung.nbytes for rung in ladder[2:6]] == [41e6, 41e6, 9e6, 9e6]


def test_what_is_not_recorded_is_no_rung(found):
    assert rungs("7B", {}) == []
    assert rungs("0.5B", found) == []
    del found["int4"], found["scoreboard"]
    assert [rung.lesson for rung in rungs("7B", found)] == ["01", "01", "02", "03", "06", "06"]
    del found["engine"]  # which says how many layers there are
    assert [rung.lesson for rung in rungs("7B", found)] == ["01", "01"]


def test_the_ladder_shows_rates_and_shares():
    ladder = [Rung("01", "slow", "bf16", 14e9, 0.02), Rung("04", "products", "INT4", 4e9, 2e-3, whole=False)]
    text = words(plot_rungs(ladder, 4.8e12, 4.5e12, "7B", label="recorded"))
    assert "01 · slow\n04 · products" in text and "50\n500" in text and "15\n42" in text
    assert "products only, added up" in text and "(recorded)" in text
    with pytest.raises(CeilingError, match="no machine does that"):
        plot_rungs([Rung("09", "magic", "INT4", 4e9, 1e-4)], 4.8e12, 4.5e12, "7B")
    with pytest.raises(ValueError, match="at least one rung"):
        plot_rungs([], 4.8e12, 4.5e12, "7B")


def test_each_contender_is_a_mark_at_its_bytes_and_time():
    seven = {"nanoqwen": contender(d128=(2e-3, 4e9)), "torch": contender(d128=(5e-3, 14e9), d4096=(6e-3, 15e9))}
    models = {"qwen2.5-coder-7b": {"contenders": seven}, "tiny": {"contenders": {"nanoqwen": contender(d32=(1, 1))}}}
    figure = plot_field(models, "128", 4.8e12, 4.5e12)
    marks = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_marker() in "os"}
    assert marks == {"nanoqwen": [[4.0, 2.0]], "torch": [[14.0, 5.0]]}
    assert "7B" in words(figure) and "128 tokens deep" in words(figure)
    with pytest.raises(ValueError, match="no contender was timed at depth 7"):
        plot_field(models, "7", 4.8e12, 4.5e12)


def test_depths_lie_above_what_our_bytes_need():
    entry = {"contenders": {"nanoqwen": contender(d128=(2e-3, 4e9), d4096=(3e-3, 5e9)), "x": contender(d128=(9e-3,))}}
    lines = {line.get_label(): line.get_ydata() for line in plot_depths("qwen2.5-coder-7b", entry, 4e12).axes[0].lines}
    assert list(lines["nanoqwen"]) == [2.0, 3.0] and list(lines["x"]) == [9.0]
    assert list(lines["our bytes at the read probe's speed"]) == [1.0, 1.25]


def test_a_step_is_its_launches_and_what_lies_between():
    kinds = {"embed": 1e-6, "qkv_proj": 1e-4, "attention": 5e-5, "o_proj": 5e-5, "down_proj": 3e-4, "new": 2e-6}
    regions = {kind: timed(seconds, launches=2) for kind, seconds in kinds.items()}
    entry = {"bytes": 1e9, "regions": regions, "gap": {"p50": 1e-5}}
    parts = step_parts(entry)
    assert list(parts) == ["gate_up, down", "qkv, o", "attention", "embed, choose", "new", "between"]
    assert sum(parts.values()) == pytest.approx(sum(kinds.values()) + 1e-5)
    assert parts["qkv, o"] == pytest.approx(1.5e-4) and launches_of(entry) == 12
    assert step_parts({"regions": regions, "gap_s": -1e-6})["between"] == 0
    text = words(plot_parts({"7B": entry}, 4e12))
    assert "7B" in text and "513 µs" in text and "new" in text


def test_ceilings_are_the_datasheet_and_the_probe():
    results = {"ceilings": {"read_probe": {"bytes_per_s": 3e12}}}
    assert ceilings(record("engine", results)) == (4.8e12, 3e12)
    assert ceilings(record("engine", results, "Some GPU")) == (3e12, 3e12)
