"""The record `gemv`: what is timed is checked, nothing is served warm by mistake, and pages show what it holds."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nanoqwen import bench_gemv, readme, records
from nanoqwen.bench_gemv import (
    SHAPES,
    STEPS,
    Rotation,
    calls_per_replay,
    captured,
    gemv_table,
    ladder,
    launch_cost,
    measure,
    time_replays,
)
from nanoqwen.config import SHAPES as MODELS
from nanoqwen.hardware import Probe
from nanoqwen.ledger import CeilingError
from nanoqwen.paths import REPO
from nanoqwen.timing import percentiles

CPU = torch.device("cpu")


@pytest.fixture
def probe(monkeypatch):
    """A ceiling that nobody had to measure."""
    probe = Probe("read", 1e10, "B", percentiles([1.0, 1.0]), 1.0, "none", "cpu")
    monkeypatch.setattr(bench_gemv.hardware, "read_ceiling", lambda device: probe)
    return probe


@pytest.fixture
def record(probe):
    """A record as a GPU would make it, of small matrices on this CPU."""
    small = {"7B gate_up": (33, 64), "0.5B o": (16, 64)}
    results = {
        "launch": launch_cost(CPU, calls=2, blocks=2),
        **measure(CPU, small, rotate_bytes=3 * 33 * 64 * 2, rounds=3, replay_s=1e-5),
    }
    return replace(records.make("gemv", results, "words", ["csrc/gemv.cu"]), device="NVIDIA H200")


def test_the_shapes_are_those_of_the_models():
    for name, config in MODELS.items():
        size = name.split("-")[-1].upper()
        if f"{size} qkv" not in SHAPES:
            continue
        hidden, heads = config.hidden_size, config.num_attention_heads + 2 * config.num_key_value_heads
        assert SHAPES[f"{size} qkv"] == (heads * config.head_dim, hidden)
        assert SHAPES[f"{size} o"] == (hidden, config.num_attention_heads * config.head_dim)
        assert SHAPES[f"{size} gate_up"] == (2 * config.intermediate_size, hidden)
        assert SHAPES[f"{size} down"] == (hidden, config.intermediate_size)
        assert SHAPES[f"{size} lm_head"] == (config.vocab_size, hidden)
    assert len(SHAPES) == 15


def test_a_record_has_every_kernel_cold_and_hot_and_comes_back(record, tmp_path):
    records.save(record, tmp_path)
    entry = records.load("gemv", "NVIDIA H200", tmp_path).results["shapes"]["7B gate_up"]
    for heat in ("cold", "hot"):
        assert list(entry[heat]) == [*STEPS, "torch"]
        for figures in entry[heat].values():
            assert figures["seconds"]["n"] == 3 and figures["versus_torch"]["p50"] > 0
    assert entry["bytes"] == (33 * 64 + 33 + 64) * 2
    naive = entry["cold"]["naive"]
    assert naive["bytes_per_s"] == entry["bytes"] / naive["seconds"]["p50"]
    assert naive["of_probe"] == naive["bytes_per_s"] / 1e10
    assert "bytes_per_s" not in entry["hot"]["naive"]  # a cache's rate is no bandwidth of the memory
    assert entry["cold"]["torch"]["versus_torch"]["p50"] == 1
    assert gemv_table(record).count("\n") == 2 * 7 + 1


def test_a_cold_rate_above_the_datasheet_is_refused_and_a_hot_one_is_not(record, tmp_path):
    figures = record.results["shapes"]["0.5B o"]
    figures["hot"]["gemv"]["apparent_rate"] = 9e12
    records.save(record, tmp_path)
    figures["cold"]["gemv"]["bytes_per_s"] = 4.9e12
    with pytest.raises(CeilingError, match=r"0\.5B o\.cold\.gemv\.bytes_per_s"):
        records.save(record, tmp_path)


def test_copies_cover_what_is_asked_and_differ():
    rotation = Rotation(16, 64, torch.bfloat16, CPU, 10 * 16 * 64 * 2 - 1)
    assert rotation.copies == 10 and Rotation(16, 64, torch.bfloat16, CPU, 1).copies == 2
    assert all(not torch.equal(a, b) for a, b in pairwise(rotation.w))
    assert calls_per_replay(1e-6, 10, False, 25e-6) == 30  # whole rounds of the copies
    assert calls_per_replay(5e-3, 10, False, 2e-3) == 1  # a slow kernel makes fewer
    assert calls_per_replay(1e-6, 10, True, 25e-6) == 25


@pytest.mark.parametrize("spoil", ["nothing", "zeros", "one", "nan"])
def test_a_kernel_that_is_timed_and_wrong_is_refused(monkeypatch, spoil):
    def wrong(w, x, out):
        if spoil == "nothing":
            return
        torch.mv(w.float(), x.float(), out=(y := torch.empty(len(w))))
        out.copy_(y)
        if spoil == "zeros":
            out.zero_()
        else:
            out[-1] = 0 if spoil == "one" else float("nan")

    monkeypatch.setitem(bench_gemv.STEPS, "rows", wrong)
    with pytest.raises(RuntimeError, match="rows on 16 x 64 is off by"):
        Rotation(16, 64, torch.bfloat16, CPU, 1).samples(False, 1, 1e-6)


def test_rounds_alternate_and_the_first_is_thrown_away():
    order = []
    replays = {name: captured(lambda name=name: order.append(name), CPU) for name in "abc"}
    times = time_replays(replays, 3, CPU)
    assert "".join(order) == "cbaabccbaabc"
    assert {name: len(samples) for name, samples in times.items()} == dict.fromkeys("abc", 3)


def test_without_a_gpu_there_is_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        bench_gemv.record_gemv(tmp_path)
    assert not list(tmp_path.iterdir())


# What the committed record shows


@pytest.fixture
def recorded():
    if (record := readme._record("gemv")) is None:
        pytest.skip("the ladder has not been recorded yet")
    return record.results


def test_the_recorded_gemv_reads_at_the_memory_s_speed(recorded):
    shares = {name: entry["cold"]["gemv"]["of_probe"] for name, entry in recorded["shapes"].items()}
    assert shares["7B lm_head"] >= 0.92
    assert shares["7B gate_up"] >= 0.85 and shares["7B down"] >= 0.85


def test_the_recorded_gemv_is_no_slower_than_torch_on_any_shape(recorded):
    speeds = {name: entry["cold"]["gemv"]["versus_torch"]["p50"] for name, entry in recorded["shapes"].items()}
    assert set(speeds) == set(SHAPES)
    assert {name: speed for name, speed in speeds.items() if speed < 0.99} == {}


def test_a_recorded_launch_is_cheap_enough_to_teach_with(recorded):
    assert recorded["launch"]["program_launch"]["p50"] <= 6e-6


# Pages


@pytest.mark.parametrize("name", readme.SECTIONS)
def test_what_a_page_shows_of_a_record_is_up_to_date(name):
    assert readme.page_as_it_should_be(name) == readme.SECTIONS[name][0].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", readme.FIGURES)
def test_a_figure_shows_its_record_and_nothing_is_shown_without_one(name):
    file, record_name, *_ = readme.FIGURES[name]
    record = readme._record(record_name)
    assert readme.shown_source(file) == (readme.figure_source(name, record) if record else None)


def test_a_section_is_the_record_s(record):
    text = readme.ladder_section(record)
    rungs = ladder(record, "7B gate_up")
    assert [rung.kernel for rung in rungs] == [*STEPS, "torch"]
    for rung in rungs:
        assert f"| {1e6 * rung.seconds:,.1f} | {rung.rate / 1e9:,.0f} | {100 * rung.of_probe:.1f} |" in text
    assert "33 × 64 in bf16, weights cold. Recorded on one NVIDIA H200" in text
    start, end = readme.markers("ladder")
    page = f"before\n{start}\nold\n{end}\nafter\n"
    assert readme.with_section(page, "ladder", text) == f"before\n{start}\n{text}{end}\nafter\n"
    assert readme.with_section(page, "ladder", "") == f"before\n{start}\n{end}\nafter\n"
    with pytest.raises(ValueError, match="lacks the lines <!-- ladder"):
        readme.with_section(page.replace("end of", "end"), "ladder", text)


@pytest.fixture
def scored():
    if (record := readme._record("scoreboard")) is None:
        pytest.skip("the scoreboard has not been recorded yet")
    return record


def test_the_scoreboard_says_whose_first_token_is_sooner(scored):
    contenders = scored.results["models"][readme.SCORED]["contenders"]
    over = {name: each["ttft_over_ours"] for name, each in contenders.items() if name != readme.OURS}

    def said():
        return " ".join(readme.scoreboard_section(scored).split())

    for each in over.values():
        each["p50"] = 1.5
    assert "sooner" not in said()
    over["torch-bf16-graph"]["p50"] = 0.5
    assert "sooner from PyTorch bf16, CUDA graph: 0.50 of our time. Our" in said()
    over["torch-int4"]["p50"] = 0.25
    assert "bf16, CUDA graph; PyTorch INT4, CUDA graph: 0.25 to 0.50 of our time. Our" in said()


def test_the_scoreboard_says_what_is_missing(scored, monkeypatch):
    monkeypatch.setattr(readme, "_record", lambda name: None)
    entry = scored.results["models"][readme.SCORED]
    scored.results["left_out"] = {"qwen2.5-coder-0.5b": "is not here"}
    for each in scored.results["models"].values():
        each["contenders"].pop("torch-int4", None)
    text = " ".join(readme.scoreboard_section(scored).split())
    assert "Not in this record: " in text and "PyTorch INT4, CUDA graph" in text
    assert "but qwen2.5-coder-0.5b was not on that machine" in text and "`nanoqwen record ladder` does that" in text
    entry["left_out"]["torch-int4"] = "does not compile"
    ladder = SimpleNamespace(results={"model": "m", "equal": 97, "prompts": 100, "tokens": 64, "ties": [{}, {}, {}]})
    monkeypatch.setattr(readme, "_record", lambda name: ladder)
    text = " ".join(readme.scoreboard_section(scored).split())
    assert "Left out: PyTorch INT4, CUDA graph (does not compile)." in text
    assert "of m, 97 of 100 prompts" in text and "ties, where the two part: 3." in text and "record ladder" not in text


def test_the_losses_are_the_record_s():
    if (record := readme._record("engine")) is None:
        pytest.skip("the engine has not been recorded yet")
    text = readme.losses_section(record)
    probe = record.results["ceilings"]["read_probe"]["bytes_per_s"]
    for size, entry in record.results["sizes"].items():
        at = entry["depths"][readme.DEPTH]
        f, launches = at["rungs"]["pdl"], 3 + 5 * entry["layers"]
        rest = 1e6 * (f["seconds"]["p50"] - at["bytes"] / probe) / launches
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {size} | {launches} |"))
        assert row.endswith(f"| {f['tokens_per_s']:,.0f} | {100 * f['mbu_probe']:.1f} | {rest:.1f} |")


def test_pages_and_figure_are_written_from_the_records(record, tmp_path, monkeypatch):
    page, figure = tmp_path / "PAGE.md", tmp_path / "figures" / "ladder.png"
    page.write_text("a\n" + "\n".join(readme.markers("ladder")) + "\nb\n")
    monkeypatch.setattr(readme, "SECTIONS", {"ladder": (page, "gemv", readme.ladder_section)})
    monkeypatch.setattr(readme, "FIGURES", {"ladder": (figure, *readme.FIGURES["ladder"][1:])})
    monkeypatch.setattr(readme, "REPO", tmp_path)
    monkeypatch.setattr(readme, "_record", lambda name: record)
    readme.main()
    assert "(figures/ladder.png)" in page.read_text()
    assert readme.shown_source(figure) == readme.figure_source("ladder", record)
    before = figure.stat().st_mtime_ns
    readme.main()
    assert figure.stat().st_mtime_ns == before  # the same figures: the picture stays as it is
    monkeypatch.setattr(readme, "_record", lambda name: None)
    readme.main()
    assert not figure.exists() and page.read_text() == "a\n" + "\n".join(readme.markers("ladder")) + "\nb\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["PAGE.md", "figures"]


def test_sources_of_the_records_exist():
    from nanoqwen import counters

    assert [path for path in (*bench_gemv.SOURCES, *counters.SOURCES) if not (REPO / path).is_file()] == []
