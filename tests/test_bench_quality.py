"""The records `quality` and `pack`: the figures are those of the quantised model, the text is named, a file that gives
other outputs is no record."""

from dataclasses import replace

import pytest
import torch

from nanoqwen import bench_quality, cli, models, records
from nanoqwen.bench_quality import Remembering, code_tokens, pack, pack_table, quality, quality_table, written_out
from nanoqwen.paths import REPO
from nanoqwen.quantize import QuantizedLinear, compare, quantize_model


@pytest.fixture(scope="module")
def tiny():
    return models.load("nanoqwen-tiny", torch.float32)


def test_quality_is_that_of_the_quantised_models(tiny, tmp_path):
    model, tokenizer = tiny
    results = {"model": "nanoqwen-tiny", **quality(model, tokenizer, 24, (128,), ("bisect", "heapq"))}
    ids, hashes = code_tokens(tokenizer, 24, ("bisect", "heapq"))
    assert results["text"]["sha256"] == hashes and len(ids) == 48 and results["tokens"] == 47
    runs = {(run["method"], run["group"], run["head_bits"]): run for run in results["runs"]}
    assert set(runs) == {(method, 128, head) for method in ("rtn", "mse") for head in (16, 8)}
    for (method, group, head), run in runs.items():
        found = compare(model, quantize_model(model, group, method, head), ids, bench_quality.WINDOW)
        assert (run["kl"], run["perplexity"]) == pytest.approx((found.kl, found.perplexity), rel=1e-5)
        assert run["agreement"] == pytest.approx(found.agreement, abs=0.03)
        assert results["perplexity"] == pytest.approx(found.reference_perplexity)
        assert found.kl > 0
    record = replace(
        records.make("quality", results, "words", bench_quality.QUALITY_SOURCES, "cpu"), device="NVIDIA H200"
    )
    records.save(record, tmp_path)
    assert quality_table(record).count("\n") == 4


def test_the_command_line_compares_the_tiny_model(monkeypatch, capsys):
    monkeypatch.setattr(bench_quality, "TOKENS", {"cpu": 8, "cuda": 8})
    monkeypatch.setattr(bench_quality, "METHODS", ("rtn",))
    assert cli.main(["bench", "quality", "--model", "nanoqwen-tiny"]) == 0
    said = capsys.readouterr().out
    assert said.count("KL ") == 2 and "rtn, group 128, head 8: KL" in said
    assert "unquantised: perplexity" in said and "heapq.py" in said


def test_the_text_is_python_s_own_and_the_same_each_time(tiny):
    tokenizer = tiny[1]
    ids, hashes = code_tokens(tokenizer, 40, ("heapq",))
    assert (ids, hashes) == code_tokens(tokenizer, 40, ("heapq",)) and set(hashes) == {"heapq.py"}
    assert tokenizer.decode(ids).startswith('"""Heap queue algorithm')
    with pytest.raises(ValueError, match=r"the module bisect has \d+ tokens; 1000000 are wanted"):
        code_tokens(tokenizer, 10**6, ("bisect",))


def test_a_model_written_out_gives_the_same(tiny):
    twin = quantize_model(tiny[0], 128)
    ids = torch.arange(30)[None]
    wanted = twin(ids)
    assert torch.equal(written_out(twin)(ids), wanted)
    assert not any(isinstance(part, QuantizedLinear) for part in twin.modules())


def test_logits_are_computed_once_for_a_text():
    calls = []

    class Counting(torch.nn.Module):
        num_tokens = 5

        def forward(self, ids):
            calls.append(ids)
            return ids.double()

    model = Remembering(Counting())
    a, b = torch.tensor([[1, 2]]), torch.tensor([[1, 3]])
    assert model.num_tokens == 5 and torch.equal(model(a), model(a)) and len(calls) == 1
    assert not torch.equal(model(a), model(b)) and len(calls) == 2


def test_a_file_is_written_loaded_and_compared(tmp_path):
    results = pack("nanoqwen-tiny", tmp_path / "tiny.nanoqwen", loads=1)
    assert results["file_bytes"] == (tmp_path / "tiny.nanoqwen").stat().st_size == results["write"]["file_bytes"]
    assert results["write"]["seconds"] > 0 and results["load"]["seconds"]["n"] == 1 and results["bit_equal"] is True
    for part in (results["write"], results["load"]):
        assert 0 < part["imports_bytes"] <= part["peak_bytes"]
    layer = 256 * (256 + 2 * 128) + 512 + 256 * 256 + 3 * 256 * 768 + 2 * 256  # q, k, v and biases, o, the MLP, norms
    assert results["layer_and_embedding_bytes"] == 2 * (4096 * 256 + layer)
    assert results["weights"] == "safetensors"
    record = replace(records.make("pack", results, "words", bench_quality.PACK_SOURCES, "cpu"), device="AMD EPYC")
    records.save(record, tmp_path)
    assert pack_table(record).count("\n") == 2
    with pytest.raises(RuntimeError, match=r"tiny\.nanoqwen gives other logits"):
        bench_quality._check_outputs("nanoqwen-tiny", tmp_path / "tiny.nanoqwen", 64)  # the file has groups of 128


def test_a_child_that_fails_is_quoted(tmp_path):
    with pytest.raises(RuntimeError, match=r"should load nanoqwen-tiny failed:\n[\s\S]*no such file"):
        bench_quality._child("load", "nanoqwen-tiny", tmp_path / "missing", 128)


def test_sources_are_there():
    assert [path for path in bench_quality.PACK_SOURCES if not (REPO / path).is_file()] == []


# What the committed records show


def recorded(name):
    try:
        return records.load(name).results
    except FileNotFoundError:
        pytest.skip(f"{name} has not been recorded yet")


def test_the_recorded_quality_is_whole_and_smaller_groups_keep_more():
    results = recorded("quality")
    kl = {(run["method"], run["group"], run["head_bits"]): run["kl"] for run in results["runs"]}
    assert set(kl) == {
        (method, group, head) for method in ("rtn", "mse") for group in (32, 64, 128) for head in (16, 8)
    }
    for group in (64, 128):
        assert kl["mse", group, 16] < kl["rtn", group, 16]
    assert kl["mse", 32, 16] < kl["mse", 128, 16]
    assert set(results["text"]["sha256"]) == {f"{name}.py" for name in bench_quality.TEXT}


def test_the_recorded_packing_needs_less_memory_than_a_layer_and_the_embedding():
    results = recorded("pack")
    write = results["write"]
    assert results["bit_equal"] is True
    assert write["peak_bytes"] - write["imports_bytes"] < results["layer_and_embedding_bytes"]
