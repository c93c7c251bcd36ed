"""On a GPU: quantised layers and models against float64 on the dequantised weights, fused and in full."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from test_awq import save_awq
from torch import nn
from toys import TOY, random_weights, save_tokenizer, save_toy, toy_tokenizer

from nanoqwen import kernels, models, packfile, reference
from nanoqwen import quantize as q
from nanoqwen.awq import open_awq
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.generation import generate
from nanoqwen.kernels.int4 import SHAPES
from nanoqwen.packing import FRAGMENT, GROUP_SIZES, VALUE_SHUFFLE, pack, tile_scales
from nanoqwen.paths import TINY
from nanoqwen.quantize import QuantizedLinear, compare, quantize_model, use_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("cupy")

WIDE = replace(TOY, hidden_size=128, intermediate_size=256, head_dim=32)
STEP = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 5e-4}  # of x or y: what its rounding may cost
SHAPES_0_5B = [(896, 896), (128, 896), (4864, 896), (896, 4864)]
by_dtype = pytest.mark.parametrize("dtype", STEP, ids=lambda dtype: str(dtype).removeprefix("torch."))


def layer_of(rows, cols, group=128, zeros=False, dtype=torch.bfloat16, layout=FRAGMENT):
    """Values, scales and zero-points of all kinds."""
    make = torch.Generator("cuda").manual_seed(rows * 7919 + cols + group)
    layer = QuantizedLinear(cols, rows, True, group, 4, layout, dtype, "cuda", zeros)
    layer.words = pack(torch.randint(-8, 8, (rows, cols), generator=make, device="cuda").to(torch.int8), layout)
    layer.scales = (torch.rand(layer.scales.shape, generator=make, device="cuda") * 0.03 + 1e-3).half()
    if zeros:
        layer.zeros = torch.randint(-8, 8, layer.scales.shape, generator=make, device="cuda").to(torch.int8)
    layer.bias = torch.randn(rows, generator=make, device="cuda").to(dtype) * 5
    return layer


def parted(y, x, layer):
    """‖y − x Wᵀ − b‖ against the size of y, in float64 with PyTorch's own unpacking."""
    weight = q.packing.unpack(layer.words, layer.layout, layer.out_features).double().unflatten(1, (-1, layer.group))
    zeros = 0 if layer.zeros is None else layer.zeros[..., None]
    weight = ((weight - zeros) * layer.scales.double()[..., None]).flatten(1)
    want = x.double() @ weight.T + layer.bias.double()
    size = (x.double().square() @ weight.square().T).sqrt().maximum(want.abs())
    value = ((y.double() - want).norm() / size.norm()).item()
    return value if math.isfinite(value) else math.inf


@pytest.fixture
def called(monkeypatch):
    """The kernels' names, in the order of their calls."""
    names = []
    for name in ("int4_gemm_mma", "int4_gemm_ring", "int4_dequantize"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, kernel=kernel, name=name, **how: names.append(name) or kernel(*args, **how)
        )
    q._product.cache_clear()
    yield names
    q._product.cache_clear()


# Kernels


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zero_points_are_taken_off_in_every_instance(shape, group):
    for tokens in (1, 5, 8):
        for rows, cols in ((1, 1536), (35, 2304), (130, 18944)):
            layer = layer_of(rows, cols, group, zeros=True)
            x = torch.randn(tokens, cols, device="cuda").half()
            y = torch.full((tokens, rows), math.nan, device="cuda")
            scales, zeros = tile_scales(layer.scales), tile_scales(layer.zeros.half())
            how = {"rows": rows, "zeros": zeros, "bias": layer.bias.float(), "shape": shape}
            kernels.int4_gemm_mma(layer.words, scales, x, out=y, **how)
            assert parted(y, x, layer) < 1e-4, (tokens, rows, cols)


@pytest.mark.parametrize("layout", [VALUE_SHUFFLE, FRAGMENT])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_dequantiser_gives_pytorch_s_bits(layout, dtype, zeros):
    for rows, cols, group in ((1, 64, 32), (35, 896, 64), (4608, 3584, 128), (130, 18944, 256)):
        layer = layer_of(rows, cols, group, zeros, layout=layout)
        layer.kernels = False
        want = layer.dequantize(dtype)
        layer.kernels = None
        assert torch.equal(layer.dequantize(dtype), want), (rows, cols)


@by_dtype
def test_activations_are_scaled_with_the_simt_machine_s_bits(dtype):
    x = torch.randn(8, 18944, generator=torch.Generator().manual_seed(0)) * 1e3
    x[1] *= 1e30 if dtype != torch.float16 else 10
    x[2], x[3, 7] = 0, math.inf
    x = x.to(dtype)
    half, back = kernels.half_x(x.cuda())
    simt_half, simt_back = kernels.half_x(x)
    assert torch.equal(half.cpu(), simt_half) and torch.equal(back.cpu(), simt_back)
    y, bias = torch.randn(8, 301), torch.randn(301)
    wide = kernels.widen_y(y.cuda(), back, bias.cuda(), dtype)
    assert torch.equal(wide.cpu(), kernels.widen_y(y, simt_back, bias, dtype))


@by_dtype
def test_swiglu_is_that_of_float64_and_of_the_simt_machine(dtype):
    for tokens, inner in ((1, 16), (7, 48), (129, 4864), (512, 8960), (1024, 18944)):
        make = torch.Generator().manual_seed(tokens)
        gate_up = torch.randn(tokens, 2 * inner, generator=make).mul(3).to(dtype)
        gate, up = gate_up.cuda().double().unflatten(1, (-1, 2, 16)).unbind(2)
        wanted = (gate / (1 + (-gate).exp()) * up / 16).flatten(1)
        out = torch.full((tokens, inner), math.nan, dtype=torch.float16, device="cuda")
        kernels.swiglu(gate_up.cuda(), 1 / 16, out)
        torch.testing.assert_close(out.double(), wanted, rtol=2**-11 * 1.01, atol=2**-25 * 1.01)
        few = kernels.swiglu(gate_up[:2], 1 / 16)
        torch.testing.assert_close(out[:2].cpu(), few, rtol=2**-10, atol=2**-24)  # a last bit: two expf


# Layers


@by_dtype
@pytest.mark.parametrize("zeros", [False, True])
def test_a_layer_is_right_for_one_token_eight_and_sixty_four(dtype, zeros, called):
    symmetric = "int4_gemm_ring" if torch.cuda.get_device_capability() >= (9, 0) else "int4_gemm_mma"
    for rows, cols in SHAPES_0_5B:
        layer = layer_of(rows, cols, 128, zeros, dtype)
        for tokens in (1, 8, 9, 64):
            called.clear()
            x = torch.randn(1, tokens, cols, device="cuda").to(dtype)
            y = layer(x)
            assert y.shape == (1, tokens, rows) and y.dtype == dtype
            assert parted(y, x, layer) < 1.5 * STEP[dtype], (rows, cols, tokens)
            few = ["int4_gemm_mma" if zeros else symmetric]
            assert called == (few if tokens <= 8 else ["int4_dequantize"] * (dtype != torch.float32))


def test_activations_past_fp16_come_through():
    layer = layer_of(896, 4864)
    for size in (1e-20, 70000.0, 1e20):
        x = torch.randn(2, 4864, device="cuda").bfloat16() * size
        y = layer(x)
        assert y.isfinite().all() and parted(y, x, layer) < 6e-3, size


@pytest.mark.parametrize("tokens", [9, 64])
def test_many_tokens_make_one_matrix_and_no_more(tokens):
    layer = layer_of(18944, 3584)
    x = torch.randn(tokens, 3584, device="cuda").bfloat16()
    layer(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    matrix = layer.in_features * layer.out_features * 2
    assert torch.cuda.max_memory_allocated() - before < 1.5 * matrix + y.nbytes  # the library's own workspace


def test_a_captured_layer_reads_what_x_holds_at_each_replay():
    for zeros in (False, True):
        layer, x = layer_of(896, 896, zeros=zeros), torch.zeros(1, 896, device="cuda", dtype=torch.bfloat16)
        layer(x)  # compiled, scales in tiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for seed in range(3):
            x.copy_(torch.randn(1, 896, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, layer(x)) and parted(y, x, layer) < 6e-3


def test_a_moved_and_a_cast_layer_goes_on():
    layer = q.QuantizedLinear.from_linear(nn.Linear(256, 33), 64)
    x = torch.randn(2, 256)
    want = layer(x)
    moved = use_kernels(copy.deepcopy(layer).cuda())
    torch.testing.assert_close(moved(x.cuda()).cpu(), want, rtol=0, atol=5e-3)
    assert moved.to(torch.bfloat16)(x.cuda().bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(moved.float().cpu()(x), use_kernels(layer)(x), rtol=0, atol=2e-2)  # the bias was bf16


# Models


@pytest.mark.parametrize("bias", [1.0, 5.0])
def test_decode_logits_are_those_of_the_dequantised_weights(bias, called):
    model = reference.build(WIDE, random_weights(WIDE, bias=bias)).cuda()
    twin = quantize_model(model, 64)
    assert all(part.layout == FRAGMENT for part in twin.modules() if isinstance(part, QuantizedLinear))
    plain = use_kernels(copy.deepcopy(twin), False)
    ids = torch.arange(5, 13, device="cuda")[None]
    for tokens in (1, 8):
        called.clear()
        got, want = twin(ids[:, :tokens]), plain(ids[:, :tokens])
        assert len(called) == 14
        assert (got - want).norm() / want.norm() < 3e-3
    long = torch.arange(100, device="cuda")[None]
    torch.testing.assert_close(twin.bfloat16()(long), plain.bfloat16()(long), rtol=0, atol=0)


@pytest.mark.skipif(not TINY.is_dir(), reason="needs the tiny model")
def test_the_tiny_model_predicts_what_its_dequantised_weights_do(called):
    model, tokenizer = models.load("nanoqwen-tiny", torch.float16, "cuda")
    twin = quantize_model(model, 32)
    plain = use_kernels(copy.deepcopy(twin), False)
    ids = tokenizer.encode("def read(path):\n    with open(path) as file:\n        return file.read()\n")
    steps = compare(plain, twin, ids, window=8)  # eight tokens at a time: all of them fused
    assert called and "int4_dequantize" not in called
    assert steps.kl < 1e-3 and steps.agreement > 0.9
    fused, whole = (list(generate(each, ids, 24)) for each in (twin, plain))
    assert fused[:8] == whole[:8]


def test_a_packed_file_goes_to_the_gpu_and_runs_there(tmp_path):
    folder = save_toy(tmp_path / "toy", replace(TOY, vocab_size=448), random_weights(replace(TOY, vocab_size=448)))
    save_tokenizer(folder, toy_tokenizer(400))
    packfile.write(open_checkpoint(folder), file := tmp_path / "toy.nanoqwen", 64)
    ids = torch.arange(8)[None]
    here, _ = models.load(str(file), torch.float16, "cpu")
    there, _ = models.load(str(file), torch.float16, "cuda")
    layers = [part for part in there.modules() if isinstance(part, QuantizedLinear)]
    assert all(part.layout == FRAGMENT and part.words.is_cuda for part in layers)
    want = here.float()(ids)
    for tokens in (1, 8):
        got = there(ids[:, :tokens].cuda()).float().cpu()
        assert (got - want[:, :tokens]).norm() / want[:, :tokens].norm() < 5e-3


@pytest.mark.parametrize("config, group", [(TOY, 32), (WIDE, 128)], ids=["32", "128"])
def test_an_awq_checkpoint_runs_through_the_fused_kernel(tmp_path, config, group, called):
    save_awq(tmp_path, config, group, random_weights(config, bias=5.0))
    checkpoint = open_awq(tmp_path)
    model = checkpoint.model(torch.float16, "cuda")
    want = reference.build(config, checkpoint.weights(torch.float32))
    ids = torch.arange(8)[None]
    for tokens in (1, 8):
        called.clear()
        got, exact = model(ids[:, :tokens].cuda()).float().cpu(), want(ids[:, :tokens])
        assert called == ["int4_gemm_mma"] * 14
        assert (got - exact).norm() / exact.norm() < 5e-3
    long = torch.arange(60)[None]
    assert (model(long.cuda()).float().cpu() - want(long)).norm() / want(long).norm() < 5e-3
