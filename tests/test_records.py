"""A record is whole, plausible, free of this machine's paths, and known to be stale when its sources move on."""

import json
import math
import re
from dataclasses import asdict, replace

import pytest
import torch

from nanoqwen import records
from nanoqwen.bench import BENCHES, MACHINE_SOURCES, RECORDS, REFERENCE_SOURCES
from nanoqwen.config import ModelConfig
from nanoqwen.hardware import spec_for
from nanoqwen.ledger import ledger
from nanoqwen.measure import CeilingError, percentiles
from nanoqwen.paths import REPO
from nanoqwen.records import Record, RecordError, check, hash_sources, load, read, save, slug, validate


@pytest.fixture
def record() -> Record:
    return Record(
        name="machine",
        device="NVIDIA H200",
        driver="580.95.05",
        cuda="13.0",
        torch="2.13.0",
        state={"sm_clock_mhz": 1980.0, "power_w": 400.5, "temperature_c": None},
        commit="0" * 40,
        dirty=False,
        date="2025-06-01T12:00:00Z",
        sources={"nanoqwen/hardware.py": "a" * 64},
        protocol="read + write, B/s, n/a; 100 calls",
        results={"read": {"bytes_per_s": 4.4e12, "seconds": percentiles([1e-3, 2e-3]).to_dict()}, "mbu_probe": 0.5},
    )


def with_results(record: Record, **results) -> dict:
    return asdict(replace(record, results=results))


def test_a_record_comes_back_as_it_was_saved(record, tmp_path):
    path = save(record, tmp_path)
    assert path == tmp_path / "nvidia-h200" / "machine.json"
    assert read(path) == record == load("machine", "NVIDIA H200", tmp_path) == load("machine", folder=tmp_path)
    assert [p.name for p in path.parent.iterdir()] == ["machine.json"]  # no part left behind


def test_slug_is_a_folder_name():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


@pytest.mark.parametrize("field", list(records._TYPES))
def test_every_field_is_needed_and_missed_by_name(record, field):
    values = asdict(record)
    del values[field]
    with pytest.raises(RecordError, match=f"here: {field} is missing"):
        validate(values, "here")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", "Machine one", "lower-case"),
        ("name", "../machine", "lower-case"),
        ("device", 7, "must be str"),
        ("device", "", "empty"),
        ("driver", 580, "must be str or null"),
        ("dirty", "no", "must be bool or null"),
        ("commit", "HEAD", "40 hex digits"),
        ("date", "yesterday", "must be like"),
        ("sources", {}, "empty"),
        ("sources", {"/etc/hosts": "a" * 64}, "inside the repository"),
        ("sources", {"../plan": "a" * 64}, "inside the repository"),
        ("sources", {"a.py": "short"}, "64 hex digits"),
        ("protocol", "", "empty"),
        ("results", {}, "empty"),
        ("format", 2, "this version reads 1"),
        ("format", True, "must be int"),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_name(record, field, value, said):
    with pytest.raises(RecordError, match=f"here: {field}.*{said}"):
        validate({**asdict(record), field: value}, "here")


def test_a_field_nobody_knows_is_refused(record):
    with pytest.raises(RecordError, match="hostname is not a field"):
        validate({**asdict(record), "hostname": "box"}, "here")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_where_they_stand(record, bad, tmp_path):
    broken = replace(record, results={"runs": [{"seconds": 1.0}, {"seconds": bad}]})
    with pytest.raises(RecordError, match=r"results\.runs\[1\]\.seconds is .*finite"):
        save(broken, tmp_path)
    assert not list(tmp_path.iterdir())
    path = tmp_path / "nvidia-h200" / "machine.json"
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(broken)))
    with pytest.raises(RecordError, match="finite"):
        read(path)


@pytest.mark.parametrize(
    "results",
    [
        {"mbu_probe": 1.001},
        {"runs": [{"mbu_datasheet": 1.2}]},
        {"read": {"bytes_per_s": 4.81e12}},
        {"matmul": {"flops_per_s": [6e14, 1.1e15]}},
    ],
)
def test_a_figure_above_the_ceiling_is_refused(record, results, tmp_path):
    with pytest.raises(CeilingError):
        save(replace(record, results=results), tmp_path)
    assert not list(tmp_path.iterdir())


def test_percentiles_out_of_order_or_incomplete_are_refused(record):
    good = percentiles([1.0, 2.0, 3.0]).to_dict()
    with pytest.raises(RecordError, match=r"results\.tpot has percentiles out of order"):
        validate(with_results(record, tpot={**good, "p90": 0.5}), "here")
    del good["n"]
    with pytest.raises(RecordError, match=r"results\.tpot has percentiles without n"):
        validate(with_results(record, tpot=good), "here")


@pytest.mark.parametrize("text", ["/home/someone/models/x", "see /opt/cuda-13.0/bin", r"C:\models"])
def test_a_path_of_the_machine_is_refused(record, text):
    with pytest.raises(RecordError, match="records travel"):
        validate(with_results(record, note=text), "here")


def test_what_json_cannot_hold_is_refused(record):
    with pytest.raises(RecordError, match="is a set"):
        validate(with_results(record, note={1, 2}), "here")


def test_a_failed_save_leaves_the_old_record(record, tmp_path, monkeypatch):
    path = save(record, tmp_path)

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(records.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        save(replace(record, protocol="another"), tmp_path)
    assert read(path) == record
    assert [p.name for p in path.parent.iterdir()] == ["machine.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "machine"}', "\x00\x01"])
def test_a_file_that_is_no_record_is_named(text, tmp_path):
    path = tmp_path / "nvidia-h200" / "machine.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RecordError, match=r"nvidia-h200/machine\.json"):
        read(path)


def test_a_record_in_another_device_s_folder_is_refused(record, tmp_path):
    path = save(record, tmp_path)
    moved = tmp_path / "tesla-t4" / "machine.json"
    moved.parent.mkdir()
    path.rename(moved)
    with pytest.raises(RecordError, match="wrong place"):
        read(moved)


def test_a_missing_record_says_which_there_are_and_how_to_make_it(record, tmp_path):
    save(record, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nvidia-h200/machine.*nanoqwen record reference"):
        load("reference", folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="Tesla T4"):
        load("machine", "Tesla T4", folder=tmp_path)


def test_another_gpu_s_record_stands_in_where_this_one_has_none(record, tmp_path):
    save(replace(record, device="Tesla T4", results={"n": 1}), tmp_path)
    assert load("machine", folder=tmp_path).device == "Tesla T4"
    save(record, tmp_path)
    assert load("machine", folder=tmp_path).device == "NVIDIA H200"


def test_a_record_is_stale_when_a_source_changes_or_goes(record, tmp_path):
    repo, folder = tmp_path / "repo", tmp_path / "records"
    repo.mkdir()
    for name in ("a.py", "b.cu"):
        (repo / name).write_text(name)
    save(replace(record, sources=hash_sources(["a.py", "b.cu"], repo)), folder)
    assert check(folder, repo) == []
    (repo / "b.cu").write_text("faster")
    (stale,) = check(folder, repo)
    assert (stale.record, stale.source, stale.reason) == ("nvidia-h200/machine", "b.cu", "changed")
    (repo / "b.cu").unlink()
    (stale,) = check(folder, repo)
    assert stale.reason == "gone" and "nanoqwen record machine" in str(stale)


def test_the_environment_fills_a_record_that_passes(monkeypatch):
    made = records.make("machine", {"n": 1}, "one call", MACHINE_SOURCES, "cpu")
    assert made.device and set(made.sources) == set(MACHINE_SOURCES)
    assert made.commit is None or len(made.commit) == 40


def test_sources_of_every_record_are_in_the_repository():
    for source in (*MACHINE_SOURCES, *REFERENCE_SOURCES):
        assert (REPO / source).is_file(), source
    assert set(RECORDS) >= {"machine", "reference"} and "reference" in BENCHES


COMMITTED = sorted(records.RECORDS.glob("*/*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_record_in_the_repository_was_measured(path):
    record = read(path)
    assert record.commit is None or int(record.commit, 16), "a commit of zeros: a stand-in, not a measurement"


@pytest.mark.parametrize(
    "path", [p for p in COMMITTED if p.stem == "reference"], ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_reference_record_agrees_with_the_ledger_and_with_itself(path):
    record = read(path)
    spec = spec_for(record.device)
    for model in record.results["models"].values():
        shape = ModelConfig(**model["config"])
        for run in model["runs"]:
            counted = ledger(shape, getattr(torch, model["dtype"]), depth=round(run["mean_depth"])).total
            seconds = run["tpot"]["p50"]
            assert run["bytes_per_token"] == counted
            assert run["tokens_per_s"] == pytest.approx(1 / seconds)
            if spec and run["mbu_datasheet"] is not None:
                assert run["mbu_datasheet"] == pytest.approx(counted / seconds / spec.bandwidth)


def test_the_cpu_figure_in_lesson_01_is_the_record_s():
    text = (REPO / "notebooks" / "01_the_reference_decoder.ipynb").read_text(encoding="utf-8")
    said = re.search(r"the real 0.5B takes (\d+) ms a token there, (\d+) % of what those cores can read", text)
    run = records.load("cpu", "AMD EPYC").results["decode"]
    assert (int(said[1]), int(said[2])) == (round(1e3 * run["tpot"]["p50"]), round(100 * run["mbu_probe"]))
