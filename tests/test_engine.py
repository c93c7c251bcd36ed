"""The decode step made of our kernels, on the SIMT machine: the tokens of the same INT4 model in PyTorch."""

import re
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from toys import random_weights

from nanoqwen import engine as engine_module
from nanoqwen import generation, kernels, models, packfile, quantize, simt
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.config import SHAPES, ModelConfig
from nanoqwen.engine import Engine, PoolExhausted, check_memory
from nanoqwen.engine_weights import Weights, check_shapes, weight_bytes
from nanoqwen.fetch import find_model
from nanoqwen.generation import Sampler
from nanoqwen.graphs import MODES, Mode, NothingNew, capture
from nanoqwen.ledger import ledger
from nanoqwen.reference import build

SMALL = ModelConfig(257, 128, 192, 2, 4, 2, head_dim=64, max_position_embeddings=256)
VARIED = {"seed": 1, "bias": 0.3, "logits": 0.5}  # random weights whose greedy text does not just repeat one token
TOLERANCE = 2e-3
"""Of the logits, ‖ours − theirs‖ / ‖theirs‖. Keys, values, q, the answers of attention and the MLP's activation are
rounded to 11 bits, x of each product to 15 of the largest in its group."""


def small(**changes):
    config = replace(SMALL, **changes)
    return build(config, random_weights(config, **VARIED))


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def simulation(model):
    """The same INT4 model in PyTorch, dequantised, in fp32; what stays in 16 bits in the engine is rounded alike."""
    twin = quantize.quantize_model(model, 64)
    for name, parameter in twin.named_parameters():
        if name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight")):
            parameter.data = parameter.data.half().float()
    return twin


@pytest.fixture
def engine(model):
    with Engine(model, "cpu", group=64, max_tokens=96, blocks=3) as made:
        yield made


def prompt(length, seed=0):
    return torch.randint(257, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(logits, reference):
    return ((logits - reference).norm() / reference.norm()).item()


@torch.inference_mode()
def logits_after(simulation, ids):
    return simulation(torch.tensor([ids]))[0, -1]


# --- Right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_tokens_and_logits_are_those_of_the_simulation(engine, simulation, length):
    ids = prompt(length)
    want = list(generation.generate(simulation, ids, 20))
    assert len(set(want)) > 5
    assert list(engine.generate(ids, 20)) == want
    assert error(engine.logits, logits_after(simulation, ids + want[:-1])) < TOLERANCE


def test_the_first_token_comes_from_the_whole_prompt(engine, simulation, monkeypatch):
    ids = prompt(40)
    whole = engine.prefill(ids)
    assert error(engine.logits, logits_after(simulation, ids)) < TOLERANCE
    monkeypatch.setattr(engine_module, "CHUNK", 13)
    parts = engine.prefill(ids)
    assert error(engine.logits, logits_after(simulation, ids)) < TOLERANCE
    assert whole[1] == parts[1]
    for layer in range(2):
        for a, b in zip(engine.kv.read(whole[0], layer), engine.kv.read(parts[0], layer), strict=True):
            assert (a - b).abs().max() < 2e-3


def test_buffers_full_of_nan_change_nothing(engine):
    ids, want = prompt(20), list(engine.generate(prompt(20), 12))
    sequence, token = engine.prefill(ids)
    tokens = [token]
    while len(tokens) < 12:
        for buffer in (engine.h, engine.qkv, engine.attended, engine.act, engine.logits):
            buffer.fill_(float("nan"))
        engine.workspace.partial.fill_(float("nan"))
        tokens += engine.decode(sequence, 1)
    assert tokens == want


def test_a_poisoned_token_or_length_does_not_pass_for_a_right_one(engine):
    sequence, _ = engine.prefill(prompt(20))
    want = engine.decode(sequence, 4)
    other, _ = engine.prefill(prompt(20))
    engine.token.fill_(-7)
    engine.length.fill_(3)
    assert engine.decode(other, 4) == want, "the host puts them back"
    engine.mode = Mode(None, True, 16)  # now they live on the device
    engine.decode(other, 1)
    engine.token.fill_(-7)
    with pytest.raises(RuntimeError, match="logits at position 25 are NaN"):
        engine.decode(other, 1)


def test_sequences_share_the_pool_and_take_turns(engine):
    alone = [list(engine.generate(prompt(n, seed=n), 20)) for n in (3, 18)]
    turns = [engine.generate(prompt(n, seed=n), 20) for n in (3, 18)]
    both = [[], []]
    for _ in range(20):
        for tokens, turn in zip(both, turns, strict=True):
            tokens.append(next(turn))
            engine.kv.check()
    assert both == alone
    for turn in turns:
        assert list(turn) == []
    assert engine.kv.free_pages == 6


def test_many_steps_between_looks_give_the_same_tokens_and_cut_what_is_too_many(engine, simulation):
    ids = prompt(9)
    want = list(generation.generate(simulation, ids, 40))
    engine.mode = Mode(None, True, 16)
    assert list(engine.generate(ids, 40)) == want
    at = next(i for i in range(3, 40) if want[i] not in want[:i] and i % 16 != 0)
    assert list(engine.generate(ids, 40, stop=[want[at]])) == want[: at + 1]
    assert list(engine.generate(ids, 40, stop=[want[0]])) == want[:1]
    assert list(engine.generate(ids, 1)) == want[:1] and list(engine.generate(ids, 0)) == []


def test_an_interrupted_decode_may_be_asked_again(engine, monkeypatch):
    want = list(engine.generate(prompt(20), 9))
    engine.mode = Mode(None, True, 16)
    sequence, token = engine.prefill(prompt(20))
    tokens = [token, *engine.decode(sequence, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_history", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.decode(sequence, 4)  # which the device has done, and the host does not know
    assert tokens + engine.decode(sequence, 6) == want


def test_a_check_leaves_the_sequence_as_it_was(engine):
    want = list(engine.generate(prompt(16), 6))
    sequence, token = engine.prefill(prompt(16))
    engine.check_step(sequence)
    assert [token, *engine.decode(sequence, 2)] == want[:3]
    engine.check_step(sequence)
    assert engine.decode(sequence, 3) == want[3:]
    full, _ = engine.prefill(prompt(64))
    with pytest.raises(PoolExhausted, match="sequence 1 has no room for another token"):
        engine.check_step(full)


def test_the_tiny_model_s_step_is_observed_clean_and_right():
    model, tokenizer = models.load("nanoqwen-tiny", torch.float32)
    simulation = quantize.quantize_model(model)
    ids = tokenizer.encode("def main(self, path):\n    return ")
    engine = Engine(model, "cpu", max_tokens=64, blocks=2)
    want = list(generation.generate(simulation, ids, 4))
    assert list(engine.generate(ids, 4)) == want
    sequence, token = engine.prefill(ids)
    assert error(engine.logits, logits_after(simulation, ids)) < TOLERANCE
    report = simt.observe(engine.decode, sequence, 1)
    assert report.clean, str(report)
    assert error(engine.logits, logits_after(simulation, [*ids, token])) < TOLERANCE
    assert int(engine.token) == want[1]


def test_the_real_model_s_first_steps_are_right(real_model_path):
    model, tokenizer = models.load(str(real_model_path), torch.float32)
    twin = quantize.quantize_model(model, method="rtn")
    ids = tokenizer.encode("def quicksort(a):")
    engine = Engine(twin, "cpu", max_tokens=16)
    sequence, token = engine.prefill(ids)
    for _ in range(2):
        assert error(engine.logits, logits_after(twin, ids)) < TOLERANCE
        assert token == logits_after(twin, ids).argmax()
        ids.append(token)
        (token,) = engine.decode(sequence, 1)


# --- Forms of the model -----------------------------------------------------------------------------------------------


def test_joined_matrices_hold_the_weights_that_they_were_made_of(model):
    twin, fp32 = quantize.quantize_model(model, 64), torch.float32
    for weights in (Weights.of(model, "cpu", 64), Weights.of(twin, "cpu")):
        assert weights.group == 64
        for layer, block in zip(weights.layers, twin.model.layers, strict=True):
            attention, mlp = block.self_attn, block.mlp
            parts = attention.q_proj, attention.k_proj, attention.v_proj
            assert torch.equal(layer.qkv.dequantize(fp32), torch.cat([part.dequantize(fp32) for part in parts]))
            assert torch.equal(layer.bias, torch.cat([part.bias for part in parts]))
            gate, up = layer.gate_up.dequantize(fp32).unflatten(0, (-1, 2, 16)).unbind(1)
            assert torch.equal(gate.flatten(0, 1), mlp.gate_proj.dequantize(fp32))
            assert torch.equal(up.flatten(0, 1), mlp.up_proj.dequantize(fp32))
            assert torch.equal(layer.o.dequantize(fp32), attention.o_proj.dequantize(fp32))
            assert torch.equal(layer.down.dequantize(fp32), mlp.down_proj.dequantize(fp32))


def test_a_packed_file_and_its_source_decode_alike(tmp_path):
    file = tmp_path / "tiny.nanoqwen"
    packfile.write(open_checkpoint(find_model("nanoqwen-tiny")), file, head_bits=8)
    tokens = []
    for name in (file, "nanoqwen-tiny"):
        engine, tokenizer = Engine.load(name, "cpu", max_tokens=32, blocks=2)
        tokens.append(list(engine.generate(tokenizer.encode("import"), 3)))
    assert tokens[0] == tokens[1]


def test_a_tied_model_s_head_is_its_embedding():
    weights = Weights.of(small(tie_word_embeddings=True), "cpu", 64)
    assert weights.head is weights.embedding and weights.head.dtype == torch.float16


def test_random_weights_of_a_shape_decode_to_something_finite():
    engine = Engine.random(SMALL, "cpu", 64, max_tokens=32, blocks=2)
    assert all(0 <= token < 257 for token in engine.generate([1, 2, 3], 3))
    assert engine.logits.isfinite().all() and engine.logits.std() > 0
    assert 0.015 < engine.weights.layers[0].down.dequantize(torch.float32).std() < 0.03


def test_n1_values_that_a_half_does_not_hold_pass_through():
    model = small()
    model.model.layers[0].mlp.down_proj.weight *= 300
    model.model.layers[0].mlp.up_proj.weight *= 300
    simulation, ids = quantize.quantize_model(model, 64), prompt(18)
    engine = Engine(model, "cpu", group=64, max_tokens=64, blocks=2)
    seen = {}
    sequence, token = engine.prefill(ids)
    assert error(engine.logits, logits_after(simulation, ids)) < TOLERANCE
    engine.decode(sequence, 1)
    assert error(engine.logits, logits_after(simulation, [*ids, token])) < TOLERANCE
    engine.show(sequence, 1)
    engine.step(look=lambda name, out: seen.update({name: out.abs().max().item()}))
    assert seen["layer 0 down_proj"] > 65504
    assert len(seen) == 5 * 2 + 3


def test_n1_a_finite_check_names_the_launch(engine):
    sequence, _ = engine.prefill(prompt(5))
    engine.decode(sequence, 1)
    engine.check_step(sequence)
    engine.weights.layers[1].bias[7] = float("inf")
    with pytest.raises(ValueError, match=r"layer 1 qkv_proj gave an infinity in torch.float32, at position 6"):
        engine.check_step(sequence)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=5.0, seed=4)])
def test_n3_rows_that_pad_the_vocabulary_are_never_chosen(sampler):
    model = small()
    model.lm_head.weight[200:] *= 100
    model.num_tokens = 200
    engine = Engine(model, "cpu", group=64, max_tokens=64, blocks=2)
    assert engine.logits.shape == (257,)
    assert max(engine.generate([1, 2, 3], 12, sampler)) < 200
    assert engine.logits[200:].abs().max() > engine.logits[:200].abs().max()


def test_a_seeded_draw_repeats_itself_and_what_is_suppressed_never_comes(engine):
    ids, hot = prompt(5), {"temperature": 1.5, "top_k": 40, "top_p": 0.9}
    first = list(engine.generate(ids, 12, Sampler(**hot, seed=1)))
    assert list(engine.generate(ids, 12, Sampler(**hot, seed=1))) == first
    assert list(engine.generate(ids, 12, Sampler(**hot, seed=2))) != first
    greedy = list(engine.generate(ids, 12))
    without = list(engine.generate(ids, 12, Sampler(suppress=(greedy[0], greedy[1]))))
    assert not {greedy[0], greedy[1]} & set(without)


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "group", "words"),
    [
        ({"hidden_size": 96}, 32, r"model.layers.0.self_attn.q_proj.weight has K = 96 .* multiples of 64"),
        ({"intermediate_size": 192}, 128, r"layers.0.mlp.down_proj.weight has K = 192 .* group 128; use group 32"),
        ({"head_dim": 96, "hidden_size": 384}, 64, r"head_dim is 96; .* 64 and 128"),
        ({"num_attention_heads": 18, "num_key_value_heads": 2}, 64, r"9 query heads share a KV head; .* at most 8"),
        ({}, 100, r"group is 100; it must be one of 32, 64, 128, 256"),
    ],
)  # fmt: skip
def test_shapes_that_the_kernels_do_not_take_are_named(changes, group, words):
    config = replace(SMALL, **changes)
    with pytest.raises(ValueError, match=words):
        check_shapes(config, group)
    with pytest.raises(ValueError, match=words):
        Engine.random(config, "cpu", group)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_course_s_models_are_taken(shape):
    check_shapes(SHAPES[shape], 128)


def test_weights_that_do_not_fit_their_form_are_named():
    model = small()
    model.model.layers[1].input_layernorm.weight[3] = 1e5
    with pytest.raises(ValueError, match=r"model.layers.1.input_layernorm.weight holds 1e\+05; .* 65504"):
        Weights.of(model, "cpu", 64)
    twin = quantize.quantize_model(small(), 64)
    layer = twin.model.layers[0].mlp.up_proj
    layer.zeros = torch.zeros_like(layer.scales, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj has 4 bits, group 64, zero-points; .* symmetric"):
        Weights.of(twin, "cpu")


def test_too_little_memory_is_told_before_any_is_taken(monkeypatch):
    config, gpu = SHAPES["qwen2.5-coder-7b"], torch.device("cuda:0")
    weights = weight_bytes(config, 128)
    forms = ledger(config, torch.float16).by_kind()
    matrices = sum(forms[kind] for kind in ("qkv", "o", "gate_up", "down")) // 2
    assert weights == {
        "INT4 weights": matrices // 2 + matrices // 128 * 2,
        "embedding and head": 4 * config.vocab_size * config.hidden_size,
    }
    monkeypatch.setattr(engine_module, "free_memory", lambda device: int(8e9))
    words = r"needs [\d.]+ GB on cuda:0 \(INT4.*\), and 8.00 GB are free: max_tokens=(\d+) would fit"
    with pytest.raises(MemoryError, match=words) as told:
        check_memory(config, gpu, 4096, weights)
    fit = int(re.search(words, str(told.value))[1])
    check_memory(config, gpu, fit // 16, weights)
    with pytest.raises(MemoryError):
        check_memory(config, gpu, fit // 16 + 1, weights)
    monkeypatch.setattr(engine_module, "free_memory", lambda device: int(1e9))
    with pytest.raises(MemoryError, match="not even a few tokens would fit: take a smaller model"):
        Engine.random(config, "cpu", max_tokens=16)


def test_a_long_context_leaves_memory_for_a_prompt_s_attention(monkeypatch):
    """Its keys and values, repeated for each query head, outgrow the MLP's activations."""
    config, gpu = SHAPES["qwen2.5-coder-7b"], torch.device("cuda:0")
    monkeypatch.setattr(engine_module, "free_memory", lambda device: 0)
    passing = {}
    for tokens in (1024, 4096, 32768, 65536):
        with pytest.raises(MemoryError, match=rf"pages for {tokens:,} tokens .*a prompt's passing ([\d.]+)\)") as told:
            check_memory(config, gpu, tokens // 16, {})
        passing[tokens] = float(re.search(r"passing ([\d.]+)\)", str(told.value))[1])
    repeated = 32768 * 2 * 2 * config.num_attention_heads * config.head_dim
    assert passing[1024] == passing[4096] and passing[65536] == passing[32768] > passing[4096] + 0.5 * repeated / 1e9


def test_a_prompt_s_swiglu_is_the_kernel_s():
    gate_up = (torch.randn(3, 96, generator=torch.Generator().manual_seed(0)) * 4).half()
    made = engine_module._swiglu(gate_up.float())
    torch.testing.assert_close(kernels.swiglu(gate_up, 1 / engine_module.SHRINK).float(), made, rtol=1e-3, atol=1e-7)
    assert made.abs().max() > 0.3


def test_a_gpu_without_bulk_copies_is_told_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(RuntimeError, match=r"need bulk copies \(sm_90\), this GPU is sm_86: use --engine torch"):
        Engine.random(SMALL, "cuda:0", 64)


def test_a_prompt_that_does_not_fit_is_refused_and_nothing_is_taken(engine):
    for ids, words in (
        ([], "the prompt is empty"),
        ([1, 257], "prompt token 257 is outside the vocabulary of 257"),
        ([1] * 97, r"the prompt has 97 tokens; the engine's context is 96: .* max_tokens \(the model's limit is 256\)"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.generate(ids, 4)
        with pytest.raises(ValueError, match=words):
            engine.prefill(ids)
    with pytest.raises(ValueError, match=r"5 prompt tokens \+ 252 new ones exceed the context of 256"):
        engine.generate([1] * 5, 252)
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        engine.generate([1], -1)
    with pytest.raises(ValueError, match=r"repetition_penalty is 1.1; .* none"):
        engine.generate([1], 1, Sampler(repetition_penalty=1.1))
    assert engine.kv.free_pages == 6


def test_when_the_pool_is_full_what_was_generated_stands(engine, simulation):
    ids = prompt(40)
    want = list(generation.generate(simulation, ids, 60))
    held, _ = engine.prefill(prompt(30))
    for mode in (MODES["eager"], Mode(None, True, 16)):
        engine.mode, tokens = mode, []
        with pytest.raises(
            PoolExhausted, match=r"after 40 prompt tokens and 25 new ones, which stand: free a sequence"
        ):
            for token in engine.generate(ids, 60):
                tokens.append(token)
        assert tokens == want[:25]  # 4 of 6 pages: 64 places, and the last token needs none
        assert engine.kv.free_pages == 4
    with pytest.raises(PoolExhausted, match="the prompt has 70 tokens; the pool has free pages for 64"):
        engine.prefill(prompt(70))
    engine.free(held)
    with pytest.raises(ValueError, match="no sequence 0"):
        engine.free(held)
    assert list(engine.generate(ids, 30)) == want[:30]


def test_an_engine_may_be_closed_twice_and_two_may_live_together(model, engine):
    want = list(engine.generate([5, 6, 7], 6))
    other = Engine(model, "cpu", group=64, max_tokens=32, blocks=2)
    running = other.generate([5, 6, 7], 6)
    assert [next(running), next(running)] == want[:2]
    other.close()
    other.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        next(running)
    for use in (lambda: other.generate([1], 1), lambda: other.prefill([1]), lambda: other.decode(0, 1)):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            use()
    assert list(engine.generate([5, 6, 7], 6)) == want


def test_modes_are_named_and_graphs_are_the_gpus(engine):
    with pytest.raises(ValueError, match="mode is 'fast'; it must be one of eager, two graphs"):
        engine.use("fast")
    with pytest.raises(ValueError, match="mode 'chain' captures a graph, which needs a GPU"):
        engine.use("chain")
    with pytest.raises(ValueError, match="count is 0"):
        engine.decode(engine.prefill([1])[0], 0)


@pytest.mark.parametrize("inference", [True, False])
def test_what_may_not_stand_in_a_capture_is_named(inference):
    a = torch.ones(4)
    with torch.inference_mode(inference), NothingNew():
        a.add_(1)
        a.view(2, 2)[0].fill_(3)
        torch.add(a, a, out=a)
        with pytest.raises(RuntimeError, match=r"add.Tensor allocates a tensor of shape \(4,\) \(test_engine.py, line"):
            a + a
        with pytest.raises(RuntimeError, match=r"empty.* allocates a tensor of shape \(3,\).*: lay it out before"):
            torch.empty(3)
        with pytest.raises(RuntimeError, match=r"waits for the device: .* \(test_engine.py, line \d+: int\(a\[0\]\)"):
            int(a[0])
    assert int(a[0]) == 6


def test_an_empty_graph_is_no_warning_and_any_other_stays(monkeypatch):
    """Torch's words where a body fails before it has launched anything; here without a GPU."""
    empty = "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device"

    @contextmanager
    def captured(graph):
        try:
            yield
        finally:
            warnings.warn(empty, UserWarning, stacklevel=1)
            warnings.warn("Another graph is full", UserWarning, stacklevel=1)

    for name, fake in {
        "device": lambda _: nullcontext(),
        "CUDAGraph": SimpleNamespace,
        "current_stream": lambda: None,
        "set_stream": lambda stream: None,
        "graph": captured,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with warnings.catch_warnings(record=True, action="always") as seen:
        assert capture(list, torch.device("cuda:0")).body is list
        with pytest.raises(RuntimeError, match=r"the step cannot be captured: empty.* allocates a tensor"):
            capture(lambda: torch.empty(3), torch.device("cuda:0"))
        warnings.warn(empty, UserWarning, stacklevel=1)
    assert [str(each.message) for each in seen] == ["Another graph is full"] * 3 + [empty]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, top_k=5, top_p=0.5, suppress=(1, 2))])
def test_a_step_allocates_nothing(engine, sampler, monkeypatch):
    sequence, _ = engine.prefill(prompt(5))
    choose = engine.chooser(sampler)
    engine.show(sequence, 1)
    # Only on a CPU do the kernels' functions look at what the length is.
    on_cpu = torch.Tensor.is_cpu
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda t: t is not engine.length and on_cpu.__get__(t)))
    with torch.inference_mode(), NothingNew():
        engine.step(choose)
    monkeypatch.undo()
    assert int(engine.length) == 6
