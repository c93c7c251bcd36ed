"""AWQ: the packing bit by bit, checkpoints that run in the reference decoder, and those that are refused by name."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import TOY, random_weights, save_tokenizer, save_toy, toy_tokenizer, transformers_twin

from nanoqwen import awq, models, packing, reference
from nanoqwen.awq import dequantize_reference, is_awq, open_awq, unpack
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.kernels import int4_gemm_mma
from nanoqwen.packing import FRAGMENT, LAYOUTS, tile_scales
from nanoqwen.quantize import QuantizedLinear, use_kernels

PROMPT = torch.tensor([[5, 200, 31, 7, 256]])
QUANTISED = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
WIDE = replace(TOY, hidden_size=128, head_dim=32)  # columns in multiples of 128
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


def pack(values):
    """(rows, cols) of 0 to 15 → int32 words as AutoAWQ packs them: nibble i of a word holds column order[i]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for i, column in enumerate(order):
            words[:, word] |= values[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32))


def quantise(weight, group):
    """(out, in) → q (in, out), z and s (in / group, out) by the range of each group, and the fp16 weight (out, in)."""
    w = weight.numpy().T  # (in, out)
    groups = w.reshape(-1, group, w.shape[1])
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    s = np.ascontiguousarray((high - low) / 15, dtype=np.float16)
    z = np.clip(np.round(-low / s.astype(np.float32)), 0, 15).astype(np.int32)
    s_rows, z_rows = s.repeat(group, 0), z.repeat(group, 0)
    q = np.clip(np.round(w / s_rows.astype(np.float32)) + z_rows, 0, 15).astype(np.int32)
    # numpy's own fp16 product, rounded by IEEE's rules
    held = torch.from_numpy(((q - z_rows).astype(np.float16) * s_rows).T.copy())
    return pack(q), pack(z), torch.from_numpy(s), held


def save_awq(folder, config=TOY, group=32, weights=None, **settings):
    """An AWQ folder; returns what it holds in fp16, under plain names."""
    weights = weights or random_weights(config)
    stored, held = {}, {}
    for name, weight in weights.items():
        base = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            *parts, held[name] = quantise(weight, group)
            stored |= {f"{base}.{part}": t for part, t in zip(("qweight", "qzeros", "scales"), parts, strict=True)}
        else:
            stored[name] = held[name] = weight.half()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    values = {**config.to_dict(), "quantization_config": {**QUANTISED, "group_size": group, **settings}}
    (folder / "config.json").write_text(json.dumps(values))
    return held


def change(folder, tensors):
    """Rewrite the weights with some tensors replaced; None leaves one out."""
    held = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({n: t for n, t in held.items() if t is not None}, folder / "model.safetensors", metadata={"format": "pt"})


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


# The packing


def test_golden_words_of_the_interleaved_order():
    # Column j holds j: 0 2 4 6 1 3 5 7 from the lowest nibble up. The second word has its sign bit set.
    words = torch.tensor([[0x75316420, 0xFDB9ECA8 - 2**32]], dtype=torch.int32)
    assert unpack(words).tolist() == [list(range(16))]
    assert torch.equal(pack(np.arange(16)[None]), words)


def test_each_column_stands_in_its_own_nibble():
    for column in range(8):
        values = np.zeros((1, 8), dtype=np.int64)
        values[0, column] = 15
        nibble = awq.ORDER[column]
        assert pack(values).item() & 0xFFFFFFFF == 0xF << 4 * nibble
        assert unpack(pack(values))[0].tolist() == values[0].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_repacked_words_mean_the_same_weights(group, layout):
    rng = np.random.default_rng(group)
    q, z = rng.integers(0, 16, (256, 40)), rng.integers(0, 16, (256 // group, 40))
    s = torch.from_numpy(rng.normal(size=z.shape).astype(np.float16))
    linear = awq.AwqLinear(pack(q), pack(z), s, None, group)
    words, scales, zeros = linear.repack(layout)
    assert scales.shape == zeros.shape == (40, 256 // group) and zeros.dtype == torch.int8
    assert torch.equal(zeros, torch.from_numpy(z.T - 8).to(torch.int8))
    values = packing.unpack(words, layout, 40).double()
    grouped = values.unflatten(1, (-1, group)) - zeros[..., None]
    assert torch.equal((grouped * scales.double()[..., None]).flatten(1), linear.dequantize(torch.float32).double())


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_zero_point_of_one_column_moves_that_column_only(group):
    rng = np.random.default_rng(group)
    q, s = rng.integers(0, 16, (2 * group, 24)), rng.normal(size=(2, 24)).astype(np.float16)
    z = np.full((2, 24), 8)
    z[1, 13] = 3
    got = dequantize_reference(pack(q), pack(z), torch.from_numpy(s))  # (out, in)
    assert got.shape == (24, 2 * group) and got.dtype == torch.float16 and got.is_contiguous()
    for n in range(24):
        for k in range(2 * group):
            zero = 3 if n == 13 and k >= group else 8
            want = np.float16(q[k, n] - zero) * s[k // group, n]
            assert got[n, k].numpy().tobytes() == want.tobytes(), (n, k)


def test_the_wrong_order_of_columns_would_show(monkeypatch):
    q = np.random.default_rng(0).integers(0, 16, (4, 16))
    for wrong in (tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)):  # as it is read left to right; the inverse order
        monkeypatch.setattr(awq, "ORDER", wrong)
        assert not np.array_equal(unpack(pack(q)).numpy(), q)


def test_every_product_is_rounded_once():
    # All scales of fp16 that are finite, against all differences, in exact arithmetic of float64.
    scales = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    scales = scales[scales.isfinite()][None]
    scales = scales[:, : scales.shape[1] // 8 * 8]
    cols = scales.shape[1]
    for q, z in ((15, 0), (0, 15), (11, 4), (3, 14), (8, 8)):
        packed = pack(np.full((32, cols), q)), pack(np.full((1, cols), z))
        exact = (q - z) * scales.double()[0]
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            got = dequantize_reference(*packed, scales, dtype)
            assert torch.equal(got[:, 0], exact.to(dtype)) and torch.equal(got[:, 31], got[:, 0])


# Checkpoints that run


@pytest.mark.parametrize("config, group", [(TOY, 32), (TOY, 64), (WIDE, 128)], ids=["32", "64", "128"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_awq_checkpoint_runs_in_the_reference_decoder(tmp_path, config, group, tied):
    config = replace(config, tie_word_embeddings=tied)
    held = save_awq(tmp_path, config, group, random_weights(config, bias=5.0))
    checkpoint = open_awq(tmp_path)
    weights = checkpoint.weights(torch.float16)
    assert checkpoint.config == config and checkpoint.group == group
    assert list(weights) == list(config.weight_shapes())
    for name, weight in weights.items():
        assert weight.shape == config.weight_shapes()[name]
        assert torch.equal(bits(weight), bits(held[name])), name
    ours = reference.build(config, {name: weight.float() for name, weight in weights.items()})(PROMPT)
    twin = transformers_twin(config, {name: weight.float() for name, weight in held.items()})
    torch.testing.assert_close(ours, twin(PROMPT).logits, rtol=0, atol=1e-5)
    dropped = {name: weight.float() * (not name.endswith("bias")) for name, weight in weights.items()}
    assert (reference.build(config, dropped)(PROMPT) - ours).abs().max() > 0.1


def test_packed_parts_and_the_rest_are_handed_out_as_stored(tmp_path):
    save_awq(tmp_path, group=64)
    stored = load_file(tmp_path / "model.safetensors")
    checkpoint = open_awq(tmp_path)
    linears, rest = checkpoint.linears(), checkpoint.rest(torch.float16)
    assert len(linears) == 7 * TOY.num_hidden_layers
    for base, linear in linears.items():
        for part in ("qweight", "qzeros", "scales"):
            assert torch.equal(getattr(linear, part), stored[f"{base}.{part}"])
        assert linear.group == 64
        assert (linear.bias is None) == (f"{base}.bias" not in stored)
        assert torch.equal(linear.dequantize(), checkpoint.weights(torch.float16)[f"{base}.weight"])
    assert torch.equal(linears[K].bias, stored[f"{K}.bias"])
    assert set(rest) == {name for name in stored if "_proj." not in name}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in rest.items())


def test_weights_in_fp32_are_exact_and_in_bf16_are_those_rounded(tmp_path):
    save_awq(tmp_path)
    checkpoint = open_awq(tmp_path)
    exact, short = checkpoint.weights(torch.float32), checkpoint.weights(torch.bfloat16)
    linear = checkpoint.linears()[Q]
    z, s = (t.repeat_interleave(32, 0) for t in (unpack(linear.qzeros), linear.scales.double()))
    assert torch.equal(exact[f"{Q}.weight"].double(), ((unpack(linear.qweight) - z) * s).T)
    assert all(torch.equal(short[name], exact[name].bfloat16()) for name in exact)
    with pytest.raises(ValueError, match=r"torch\.int8.*torch\.bfloat16"):
        checkpoint.weights(torch.int8)


def test_models_load_dequantises_it(tmp_path):
    config = replace(TOY, vocab_size=408)
    held = save_awq(tmp_path, config)
    save_tokenizer(tmp_path, toy_tokenizer())
    assert is_awq(tmp_path)
    model, tokenizer = models.load(str(tmp_path), torch.float16)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, held[f"{Q}.weight"])
    assert tokenizer.decode(tokenizer.encode("def f():")) == "def f():"


@pytest.mark.parametrize("config, group", [(TOY, 32), (WIDE, 128)], ids=["32", "128"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_projections_run_as_the_dequantised_ones_do(tmp_path, config, group, tied):
    config = replace(config, tie_word_embeddings=tied)
    held = save_awq(tmp_path, config, group, random_weights(config, bias=5.0))
    checkpoint = open_awq(tmp_path)
    model = checkpoint.model(torch.float32)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, QuantizedLinear)}
    assert list(layers) == list(awq.projections(config)) and all(part.layout == FRAGMENT for part in layers.values())
    for name, layer in layers.items():
        assert torch.equal(bits(layer.dequantize(torch.float16)), bits(held[f"{name}.weight"])), name
    want = reference.build(config, checkpoint.weights(torch.float32))(PROMPT)
    assert torch.equal(model(PROMPT), want)  # five tokens: W in full, and the library's product
    fused = use_kernels(model)(PROMPT)
    assert 0 < (fused - want).norm() / want.norm() < 3e-3  # fp32 activations in fp16
    for layer in layers.values():
        layer.zeros = torch.zeros_like(layer.zeros)
    assert (model(PROMPT) - want).norm() / want.norm() > 0.1
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_one_zero_point_that_is_not_eight_moves_one_row_of_the_fused_product():
    rng = np.random.default_rng(1)
    q, s = rng.integers(0, 16, (128, 24)), torch.from_numpy(rng.normal(size=(2, 24)).astype(np.float16))
    z, x = np.full((2, 24), 8), torch.randn(2, 128).half()
    outs = []
    for zero in (8, 3):
        z[1, 13] = zero
        linear = awq.AwqLinear(pack(q), pack(z), s, None, 64)
        words, scales, zeros = linear.repack()
        tiled = tile_scales(scales), tile_scales(zeros.half())
        y = int4_gemm_mma(words, tiled[0], x, rows=24, zeros=tiled[1])
        torch.testing.assert_close(
            y.double(), x.double() @ linear.dequantize(torch.float32).double().T, rtol=0, atol=1e-3
        )
        outs.append(y)
    assert (outs[0] != outs[1]).any(0).nonzero().flatten().tolist() == [13]


def test_a_gpu_gets_packed_weights_and_a_cpu_dequantised_ones(tmp_path, monkeypatch):
    save_awq(tmp_path, replace(TOY, vocab_size=408))
    save_tokenizer(tmp_path, toy_tokenizer())
    assert not any(isinstance(part, QuantizedLinear) for part in models.load(str(tmp_path))[0].modules())
    packed = awq.AwqCheckpoint.model
    asked = []
    monkeypatch.setattr(awq.AwqCheckpoint, "model", lambda self, *how: asked.append(how) or packed(self, how[0], "cpu"))
    model, _ = models.load(str(tmp_path), torch.bfloat16, "cuda:1")
    assert asked == [(torch.bfloat16, "cuda:1")] and model.num_tokens == 408


def test_the_checkpoint_of_plain_weights_says_who_runs_these(tmp_path):
    save_awq(tmp_path)
    with pytest.raises(ValueError, match=r"quant_method 'awq'.*nanoqwen\.models\.load runs them"):
        open_checkpoint(tmp_path)


def test_shards_and_stop_tokens_are_read_as_in_other_checkpoints(tmp_path):
    held = save_awq(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names, where = sorted(stored), {}
    for i in range(3):
        part = {name: stored[name] for name in names[i::3]}  # scales here, their qweight there
        save_file(part, tmp_path / f"model-{i}.safetensors")
        where |= dict.fromkeys(part, f"model-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    checkpoint = open_awq(tmp_path)
    assert checkpoint.config.eos_token_id == (7, 3)
    assert all(torch.equal(weight, held[name]) for name, weight in checkpoint.weights(torch.float16).items())
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1\.safetensors is missing"):
        open_awq(tmp_path)


def test_keys_that_say_the_same_in_other_words_are_read(tmp_path):
    save_awq(tmp_path, version="GEMM", modules_to_not_convert=["lm_head"], backend="autoawq", desc_act=False)
    assert open_awq(tmp_path).group == 32
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {
        "quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "format": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert open_awq(tmp_path).group == 32


# Checkpoints that are refused


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"bits": 8}, "bits is 8; it must be 4"),
        ({"bits": None}, "bits is None"),
        ({"group_size": -1}, "group_size is -1; it must be 32, 64 or 128"),
        ({"group_size": "32"}, "group_size is '32'"),
        ({"zero_point": False}, "zero_point is False; it must be true"),
        ({"version": "gemv"}, "version is 'gemv'; it must be 'gemm'"),
        ({"version": "gemv_fast"}, "version is 'gemv_fast'"),
        ({"backend": "llm-awq"}, "backend is 'llm-awq'"),
        ({"desc_act": True}, r"desc_act is True \(act-order"),
        ({"modules_to_not_convert": ["down_proj"]}, r"modules_to_not_convert is \['down_proj'\]"),
        ({"quant_method": "gptq"}, "quant_method 'gptq'; nanoqwen runs 'awq'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": None}, "quant_method None"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path, settings, words):
    save_awq(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"].update(settings)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"config\.json: [\s\S]*{words}"):
        open_awq(tmp_path)


def test_everything_that_is_wrong_with_the_quantisation_is_listed(tmp_path):
    save_awq(tmp_path, bits=3, version="gemv", zero_point=False)
    with pytest.raises(ValueError, match=r"bits is 3[\s\S]*zero_point is False[\s\S]*version is 'gemv'"):
        open_awq(tmp_path)


def test_plain_weights_are_refused(tmp_path):
    save_toy(tmp_path)
    assert not is_awq(tmp_path)
    with pytest.raises(
        ValueError, match="has no quantization_config, so these are no AWQ weights; use open_checkpoint"
    ):
        open_awq(tmp_path)


BAD_TENSORS = {
    "missing qzeros": ({f"{Q}.qzeros": None}, rf"{Q}\.qzeros \[2, 8\] is missing"),
    "missing scales": ({f"{K}.scales": None}, rf"{K}\.scales \[2, 32\] is missing"),
    "missing bias": ({f"{K}.bias": None}, rf"{K}\.bias \[32\] is missing"),
    "missing norm": ({"model.norm.weight": None}, r"model\.norm\.weight \[64\] is missing"),
    "missing head": ({"lm_head.weight": None}, "lm_head.weight .* tie_word_embeddings false"),
    "shape of qweight": (
        {f"{Q}.qweight": torch.zeros(8, 64, dtype=torch.int32)},
        rf"{Q}\.qweight has shape \[8, 64\]; the configuration wants \[64, 8\]",
    ),
    "scales of another group": ({f"{Q}.scales": torch.ones(1, 64).half()}, rf"{Q}\.scales has shape \[1, 64\]"),
    "dtype of scales": ({f"{Q}.scales": torch.ones(2, 64)}, rf"{Q}\.scales has dtype F32; AWQ's is F16"),
    "dtype of qweight": ({f"{Q}.qweight": torch.zeros(64, 8).int().char()}, rf"{Q}\.qweight has dtype I8"),
    "dtype of a norm": ({"model.norm.weight": torch.ones(64).double()}, r"model\.norm\.weight has dtype F64"),
    "act-order": ({f"{Q}.g_idx": torch.zeros(64, dtype=torch.int32)}, rf"{Q}\.g_idx sorts the columns \(act-order"),
    "a plain projection": ({f"{K}.weight": torch.ones(32, 64).half()}, rf"{K}\.weight is not quantised"),
    "an unknown tensor": ({f"{Q}.lora": torch.ones(1)}, rf"{Q}\.lora is no weight of a Qwen2 model"),
    "a bias too many": ({"model.layers.0.mlp.up_proj.bias": torch.ones(128)}, "up_proj.bias is no weight"),
}


@pytest.mark.parametrize("wrong", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_named_on_opening(tmp_path, wrong):
    save_awq(tmp_path)
    tensors, words = BAD_TENSORS[wrong]
    change(tmp_path, tensors)
    with pytest.raises(ValueError, match=words):
        open_awq(tmp_path)


def test_all_that_is_wrong_is_listed_at_once(tmp_path):
    save_awq(tmp_path)
    change(tmp_path, {f"{Q}.qweight": None, f"{K}.scales": torch.ones(2, 32), "model.norm.weight": None})
    with pytest.raises(ValueError) as error:
        open_awq(tmp_path)
    text = str(error.value)
    assert all(name in text for name in (f"{Q}.qweight", f"{K}.scales", "model.norm.weight"))
    assert len(text.splitlines()) == 4


def test_a_shape_that_awq_cannot_pack_is_named(tmp_path):
    save_awq(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"]["group_size"] = 128
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"{Q} has 64 inputs and 64 outputs; they must be multiples of 128 and 8"):
        open_awq(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    save_awq(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({f"{Q}.qweight": stored[f"{Q}.qweight"]}, tmp_path / "b.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "a.safetensors") | {f"{Q}.qweight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{Q}\.qweight is in a\.safetensors and in b\.safetensors"):
        open_awq(tmp_path)


def test_scales_that_are_no_numbers_are_named_before_anything_is_handed_out(tmp_path):
    save_awq(tmp_path)
    scales = load_file(tmp_path / "model.safetensors")[f"{K}.scales"]
    scales[1, 5] = float("nan")
    change(tmp_path, {f"{K}.scales": scales})
    checkpoint = open_awq(tmp_path)
    for read in (checkpoint.linears, checkpoint.weights):
        with pytest.raises(ValueError, match=rf"NaN or infinity in {K}\.scales"):
            read()


def test_files_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_awq(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is empty"):
        open_awq(tmp_path)
    save_awq(tmp_path)
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="give the folder that holds"):
        open_awq(file)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match="truncated or damaged"):
        open_awq(tmp_path)
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a1' * 32}\nsize 988097824\n")
    with pytest.raises(ValueError, match="git-lfs pointer"):
        open_awq(tmp_path)
    file.unlink()
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        open_awq(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "\x00", '{"quantization_config": 3}', '{"quantization_config": {}}'])
def test_a_broken_configuration_is_refused(tmp_path, text):
    save_awq(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert not is_awq(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        open_awq(tmp_path)


def test_a_billion_layers_are_refused_at_once(tmp_path):
    save_awq(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match=r"num_hidden_layers 1000000000, but there are only \d+ tensors"):
        open_awq(tmp_path)
