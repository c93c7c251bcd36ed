"""The end-to-end benchmark and its peers. On a CPU the times mean nothing, and are not looked at."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType
from toys import random_weights, save_tokenizer, save_toy, toy_tokenizer, write_gguf

from nanoqwen import bench, bench_e2e, cli, generation, peers, records
from nanoqwen.bench_e2e import OURS, PEERS, Entry, contend, scoreboard, scoreboard_table
from nanoqwen.bench_engine import WARM
from nanoqwen.config import ModelConfig
from nanoqwen.ledger import ledger
from nanoqwen.paths import REPO
from nanoqwen.peers import LlamaCpp, TorchDecoder, TorchPeer, Transformers, Unavailable, gguf_bytes, weights_of
from nanoqwen.reference import build

SMALL = ModelConfig(257, 128, 256, 2, 4, 2, head_dim=64, max_position_embeddings=512)
CPU = torch.device("cpu")
PROBE = SimpleNamespace(rate=1e15, to_dict=lambda: {"bytes_per_s": 1e9})
QUICK = {"steps": 2, "rounds": 2, "firsts": 1, "prompt": 5}
IDS = list(range(40, 65))


@pytest.fixture(scope="module")
def model():
    return build(SMALL, random_weights(SMALL, seed=1, bias=0.3, logits=0.5))


@pytest.fixture
def small_shape(monkeypatch):
    monkeypatch.setitem(bench_e2e.SHAPES, "small", replace(SMALL, num_hidden_layers=1, intermediate_size=128))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy"
    tokenizer = toy_tokenizer(290)
    config = ModelConfig(tokenizer.get_vocab_size(), 128, 256, 1, 4, 2, head_dim=64, max_position_embeddings=256)
    save_toy(path, config, random_weights(config, logits=0.5))
    return save_tokenizer(path, tokenizer)


# --- Peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("length", [1, 25, 250])
def test_the_torch_peer_makes_the_tokens_of_the_reference(model, graph, length):
    ids = [i % 257 for i in range(7, 7 + length)]
    peer = TorchPeer(TorchDecoder(SMALL, weights_of(model, torch.float32, CPU)), graph)
    assert len(peer.run(ids, 6)) == 6 and peer.first(ids) > 0
    peer.run(ids, 6)  # again, over what the first run left in the cache
    made = peer.last[0][length:]
    assert made == list(generation.generate(model, ids, WARM + 6, stop=())) and len(set(made)) > 2
    peer.check()


@pytest.mark.parametrize("int4", [False, True])
def test_the_compiled_layer_is_the_layer(model, int4):
    """The check's prompt goes through the layer as it is."""
    peer = TorchPeer(TorchDecoder(SMALL, weights_of(model, torch.bfloat16, CPU), int4=int4), True, compiled=True)
    peer.run(IDS, 2)
    peer.check()
    ids, extent, logits = peer.last
    peer.last = [*ids[:-1], (ids[-1] + 1) % 257], extent, logits  # as if the step had seen another token
    with pytest.raises(RuntimeError, match="off by"):
        peer.check()


def test_what_is_compiled_for_one_peer_is_neither_counted_nor_taken_for_another(model):
    decoders = [TorchDecoder(SMALL, weights_of(model, torch.bfloat16, CPU), int4=int4) for int4 in (False, True)]
    made = torch._dynamo.utils.counters["stats"]
    with torch._dynamo.config.patch(recompile_limit=1):
        peers = [TorchPeer(decoder, True, compiled=True) for decoder in decoders]
        for peer in peers:
            peer.run(IDS, 2)
        before = made["unique_graphs"]
        peers[0].run(IDS, 2)
        assert before >= 2 and made["unique_graphs"] == before


def test_int4_of_torch_is_near_16_bits(model):
    logits = []
    for int4 in (False, True):
        decoder = TorchDecoder(SMALL, weights_of(model, torch.bfloat16, CPU), int4=int4)
        decoder.prefill(IDS, 256)
        logits.append(decoder.logits.float())
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 0.01 < error < 0.5
    assert torch.corrcoef(torch.stack(logits))[0, 1] > 0.9


def test_a_step_that_does_something_else_is_refused(model):
    decoder = TorchDecoder(SMALL, weights_of(model, torch.bfloat16, CPU))
    peer, right = TorchPeer(decoder, False), decoder._attend
    decoder._attend = lambda q, keys, values, ahead: right(
        q, keys, values, torch.zeros_like(ahead)
    )  # sees what is ahead
    peer.run(IDS, 2)
    decoder._attend = right
    with pytest.raises(RuntimeError, match="after 43 tokens the logits are off by"):
        peer.check()


def test_bytes_of_the_peers(model):
    bf16, int4 = (TorchPeer(TorchDecoder(SMALL, weights_of(model, torch.bfloat16, CPU), int4=i), False) for i in (0, 1))
    assert bf16.nbytes(9) == ledger(SMALL, torch.bfloat16, 9).total
    matrices = sum(a * b for name, (a, *b) in SMALL.weight_shapes().items() if name.endswith("_proj.weight") for b in b)
    assert bf16.nbytes(9) - int4.nbytes(9) == 2 * matrices - matrices // 2 - matrices // 128 * 4
    held = sum(each.nbytes for layer in int4.decoder.layers for part in layer for each in peers._parts(part))
    assert int4.decoder.weight_bytes == held + 2 * (2 * 257 * 128 + 128)


def test_transformers_runs_on_random_weights_and_on_a_folder(folder):
    random = Transformers.random(SMALL, torch.bfloat16, CPU)
    assert len(random.run(IDS, 3)) == 3 and random.first(IDS) > 0
    assert random.nbytes(5) == ledger(SMALL, torch.bfloat16, 5).total
    assert random.model.dtype == torch.bfloat16 and random.model.lm_head.weight.std() > 0
    real = Transformers.load(peers.checkpoint_folder(folder), torch.float32, CPU)
    assert len(real.run([1, 2, 3], 2)) == 2


def test_a_peer_that_is_not_installed_says_how_to_get_it(monkeypatch, tmp_path):
    for name, make, words in (
        ("transformers", lambda: Transformers.random(SMALL, torch.bfloat16, CPU), "pip install"),
        ("llama_cpp", lambda: LlamaCpp(tmp_path / "x.gguf", 64, CPU), "CMAKE_ARGS=.* pip install llama-cpp-python"),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(Unavailable, match=f"not installed.*{words}"):
            make()


def test_a_llama_cpp_without_cuda_is_left_out_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_supports_gpu_offload=lambda: False))
    with pytest.raises(Unavailable, match="built without CUDA"):
        LlamaCpp(tmp_path / "x.gguf", 64, torch.device("cuda"))


class Llama:
    """What `llama_cpp.Llama` offers of what we use: a prompt that is still in the cache is not run again."""

    def __init__(self, path, **how):
        self.how, self.cached, self.prompts = how, 0, []

    def reset(self):
        self.cached = 0

    def generate(self, tokens, temp):
        assert temp == 0.0 and self.cached == 0
        self.prompts.append(tokens)
        while True:
            self.cached += 1
            yield 5


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    tokenizer = toy_tokenizer(290)
    config = replace(SMALL, vocab_size=tokenizer.get_vocab_size())
    path = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    write_gguf(path, config, random_weights(config), tokenizer, GGMLQuantizationType.F16)
    return path, config


def test_llama_cpp_runs_every_prompt_whole(monkeypatch, gguf_file):
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    peer = LlamaCpp(gguf_file[0], 64, CPU)
    assert peer.llama.how["n_ctx"] == 64 and peer.llama.how["n_gpu_layers"] == 0
    assert peer.first(IDS) > 0 and len(peer.run(IDS, 3)) == 3
    assert peer.llama.prompts == [IDS, IDS]
    assert peer.nbytes(9) - peer.nbytes(8) == 2 * 2 * SMALL.num_hidden_layers * SMALL.kv_size


def test_bytes_of_a_gguf_file_are_its_blocks_but_of_the_embedding_a_row(gguf_file):
    path, config = gguf_file
    vectors = sum(shape[0] for shape in config.weight_shapes().values() if len(shape) == 1)
    # what the ledger says of fp16, with vectors in fp32
    assert gguf_bytes(path)[0] == ledger(config, torch.float16, 0).total - 512 * config.num_hidden_layers + 2 * vectors


# --- In turn ----------------------------------------------------------------------------------------------------------


def test_each_torch_peer_is_what_its_name_says(small_shape):
    entry = Entry("small", True, CPU, 60, group=64, blocks=2)
    made = {name: entry.peer(name) for name in PEERS if name.startswith("torch")}
    assert {name: (peer.graph, peer.compiled, peer.decoder.int4) for name, peer in made.items()} == {
        "torch-bf16-eager": (False, False, False),
        "torch-bf16-graph": (True, False, False),
        "torch-bf16": (True, True, False),
        "torch-int4": (True, True, True),
    }
    assert len({id(peer.decoder) for peer in made.values()}) == 2  # 16 bits are there once


def test_the_plan_of_the_record_has_room_and_peers_that_are_there():
    for name, (_, depths, against) in bench_e2e.PLAN.items():
        config = bench_e2e.SHAPES[name]
        assert bench_e2e._context(depths, bench_e2e.PROMPT, bench_e2e.STEPS) <= config.max_position_embeddings
        assert set(against) <= set(PEERS) and all(set(at) <= set(depths) and at for at in against.values())
        assert set(bench_e2e.BEST) <= set(against) and all(depth > WARM + bench_e2e.STEPS // 2 for depth in depths)


def test_contenders_run_in_turn_and_what_is_absent_is_said(small_shape, monkeypatch):
    order = []
    for kind in (bench_e2e.Ours, TorchPeer, Transformers):
        run = kind.run
        monkeypatch.setattr(
            kind, "run", lambda self, ids, steps, run=run: order.append(type(self).__name__) or run(self, ids, steps)
        )
    entry = Entry("small", True, CPU, 60, group=64, blocks=2)
    names = ("torch-bf16-eager", "transformers", "llama.cpp")
    results = contend(entry, [24, 26], {name: (24,) for name in names}, PROBE, **QUICK)
    assert order[-6 - 2 :] == ["Ours", "TorchPeer", "Transformers"] * 2 + ["Ours"] * 2
    assert results["left_out"] == {"llama.cpp": "random weights have no GGUF file"}
    assert results["weights"] == "random" and results["mode"] == "eager" and results["group"] == 64
    for name, each in results["contenders"].items():
        assert set(each["depths"]) == ({"24", "26"} if name == OURS else {"24"})
        assert each["ttft"]["n"] == 1 and each["depths"]["24"]["seconds"]["n"] == 4
        assert ("over_ours" in each["depths"]["24"]) == ("ttft_over_ours" in each) == (name != OURS)
    json.dumps(results, allow_nan=False)
    table = scoreboard_table({"small": results})
    assert "llama.cpp: left out, random" in table and "transformers" in table and "torch-bf16-graph" not in table


def test_a_peer_that_fails_is_left_out_and_ours_is_not(small_shape, monkeypatch):
    def fails(self, ids, steps):
        raise RuntimeError("no /some/where/file.so here\nmore")

    monkeypatch.setattr(Transformers, "run", fails)
    monkeypatch.setattr(TorchPeer, "check", lambda self: fails(self, 0, 0))
    entry = Entry("small", True, CPU, 60, group=64, blocks=2)
    results = contend(entry, [24], {"transformers": (24,), "torch-bf16-graph": (24,)}, PROBE, **QUICK)
    assert results["left_out"] == dict.fromkeys(("transformers", "torch-bf16-graph"), "RuntimeError: no file.so here")
    assert list(results["contenders"]) == [OURS]
    monkeypatch.setattr(bench_e2e.Ours, "run", fails)
    with pytest.raises(RuntimeError, match="no /some"):
        contend(entry, [24], {}, PROBE, **QUICK)


def test_a_peer_that_is_wrong_after_the_timing_loses_its_figures(small_shape, monkeypatch):
    calls = []

    def check(self):
        calls.append(self)
        if len(calls) > 1:
            raise RuntimeError("off")

    monkeypatch.setattr(TorchPeer, "check", check)
    results = contend(
        Entry("small", True, CPU, 60, group=64, blocks=2), [24], {"torch-bf16-eager": (24,)}, PROBE, **QUICK
    )
    assert results["left_out"] == {"torch-bf16-eager": "at depth 24: RuntimeError: off"}
    assert list(results["contenders"]) == [OURS]


def test_the_scoreboard_holds_every_model_and_a_completion(small_shape, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Entry, "__init__", _with_group(Entry.__init__))
    plan = {
        "small": (True, (24,), {"torch-bf16-graph": (24,)}),
        str(folder): (False, (24,), {"transformers": (24,), "llama.cpp": (24,)}),
        "qwen2.5-coder-1.5b": (False, (24,), {}),
    }
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path / "cache"))
    kept = []
    results = scoreboard(CPU, PROBE, plan, lambda so_far: kept.append(list(so_far["models"])), **QUICK)
    assert kept == [["small"], ["small", str(folder)]], "what is done is kept before the next model"
    real = results["models"][str(folder)]
    assert real["weights"] == "real" and set(real["contenders"]) == {OURS, "transformers"}
    assert "has none" in real["left_out"]["llama.cpp"] or "not installed" in real["left_out"]["llama.cpp"]
    assert "nanoqwen fetch" in results["left_out"]["qwen2.5-coder-1.5b"]
    assert results["completion"]["prompt"] == "def quicksort(a):" and results["completion"]["tokens"] > 0
    assert results["versions"]["torch"] and set(results["peers"]) == set(PEERS)
    results["models"]["toy"] = results["models"].pop(str(folder))
    record = records.make("scoreboard", results, "none", ["README.md"], CPU)
    assert records.read(records.save(record, tmp_path)).results["models"].keys() == {"small", "toy"}


def _with_group(init):
    return lambda self, *args, **how: init(self, *args, **how, group=64, blocks=2)


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_runs_a_shape(small_shape, monkeypatch, capsys):
    monkeypatch.setattr(Entry, "__init__", _with_group(Entry.__init__))
    monkeypatch.setattr(bench_e2e.hardware, "read_ceiling", lambda device: PROBE)
    words = ["bench", "e2e", "--shape", "small", "--depths", "24", "--against", "torch-bf16-eager", "--steps", "2"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "small, random weights" in out and "torch-bf16-eager" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["e2e", "--shape", "70b"], "there is no shape 'qwen2.5-coder-70b'"),
        (["e2e", "--shape", "7b", "--model", "nanoqwen-tiny"], "a model and a shape"),
        (["e2e", "--depths", "16"], "depth 16 is too small: 16 steps"),
        (["e2e", "--model", "nanoqwen-tiny", "--depths", "5000"], "has a context of 2048 tokens; these depths need"),
        (["e2e", "--against", "vllm"], "there is no peer 'vllm'; there are: torch-bf16-eager"),
        (["e2e", "--steps", "0"], "steps is 0 and rounds 1; they must be"),
        (["e2e", "--dtype", "float32"], "bench e2e has no --dtype"),
        (["reference", "--shape", "7b"], "bench reference has no --shape"),
    ],
)
def test_wrong_words_are_refused(words, error, capsys):
    assert cli.main(["bench", *words]) == 2
    assert error in capsys.readouterr().err


def test_without_a_gpu_there_is_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        bench.RECORDS["scoreboard"](tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_sources_of_the_record_are_there():
    assert [path for path in bench_e2e.SOURCES if not (REPO / path).is_file()] == []
