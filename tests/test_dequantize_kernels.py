"""Around the products: words back to a matrix, bit for bit, activations of any range to fp16 and back, and SwiGLU."""

import math

import pytest
import torch

from nanoqwen import kernels, simt
from nanoqwen.kernels.launch import Program
from nanoqwen.packing import FRAGMENT, GROUP_SIZES, SEQUENTIAL, VALUE_SHUFFLE, pack, tile_scales

LAYOUTS = (VALUE_SHUFFLE, FRAGMENT)
SHAPES = [(1, 64, 32), (7, 448, 64), (33, 896, 128), (129, 1536, 256), (16, 4864, 128), (5, 18944, 32)]

by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
ends = torch.tensor([65504.0, -65504.0, 6e-8, -6e-8, 3e-5, 0.0, 1.0009765625, 4094.0]).half()


class Problem:
    """Values, scales of both signs, zero-points, as tensors and as the kernel's arguments."""

    def __init__(self, rows, cols, group, zeros=True):
        make = torch.Generator().manual_seed(rows * 7919 + cols + group)
        self.values = torch.randint(-8, 8, (rows, cols), generator=make, dtype=torch.int8)
        self.scales = torch.randn(rows, cols // group, generator=make).half()
        self.zeros = torch.randint(-8, 8, self.scales.shape, generator=make) if zeros else torch.zeros_like(self.scales)
        self.asymmetric = zeros

    def arguments(self, layout):
        scales, zeros = self.scales, self.zeros.half()
        if layout == FRAGMENT:
            scales, zeros = tile_scales(scales), tile_scales(zeros)
        form = {"words": pack(self.values, layout), "scales": scales, "rows": len(self.values), "layout": layout}
        return form | ({"zeros": zeros} if self.asymmetric else {})

    def weight(self, dtype):
        grouped = self.values.double().unflatten(1, (self.scales.shape[1], -1)) - self.zeros.double()[..., None]
        return (grouped * self.scales.double()[..., None]).flatten(1).to(dtype)  # exact, then rounded once


def nothing(shape, dtype):
    return torch.full(shape, math.nan, dtype=dtype)


@by_dtype
@by_layout
@pytest.mark.parametrize("zeros", [False, True])
def test_every_weight_is_the_exact_product_rounded_once(layout, dtype, zeros):
    for shape in SHAPES:
        problem, out = Problem(*shape, zeros), nothing(shape[:2], dtype)
        assert kernels.int4_dequantize(**problem.arguments(layout), out=out) is out
        assert torch.equal(out, problem.weight(dtype)), shape


@by_dtype
@by_layout
def test_every_difference_and_the_ends_of_fp16_are_rounded_like_the_reference(layout, dtype):
    problem = Problem(128, 512, 32)
    problem.values = (torch.arange(512) % 16 - 8).to(torch.int8).repeat(128, 1)
    problem.scales = ends.repeat(16)[:, None].expand(128, 16).contiguous()
    problem.zeros = (torch.arange(16) - 8).repeat(128, 1)
    got = kernels.int4_dequantize(**problem.arguments(layout), dtype=dtype)
    assert torch.equal(got, problem.weight(dtype))


@by_layout
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_observed_the_dequantiser_is_clean_and_loads_each_word_once(layout, group):
    problem, out = Problem(35, 512, group), nothing((35, 512), torch.bfloat16)
    given = problem.arguments(layout)
    report = simt.observe(kernels.int4_dequantize, **given, out=out)
    assert report.clean, str(report)
    assert torch.equal(out, problem.weight(torch.bfloat16))
    loads = [line for line in report.lines if line.how == "load" and line.buffers == ("words",)]
    assert sum(line.sectors for line in loads) == given["words"].nbytes // 32
    assert report.totals.global_store_sectors == out.nbytes // 32


@by_layout
def test_a_new_tensor_has_the_dtype_asked_for(layout):
    given = Problem(3, 128, 64).arguments(layout)
    assert kernels.int4_dequantize(**given).dtype == torch.float16
    assert kernels.int4_dequantize(**given, dtype=torch.bfloat16).shape == (3, 128)


@pytest.fixture
def no_launch(monkeypatch):
    def launched(*args, **kwargs):
        raise AssertionError("a wrong call reached the launch")

    monkeypatch.setattr(Program, "launch", launched)


WRONG = {
    "sequential": ({"layout": SEQUENTIAL}, ValueError, r"layouts 1 \(ValueShuffle\) and 2 \(fragment\); .*layout 0"),
    "an unknown layout": ({"layout": 9}, ValueError, "layout id is 9"),
    "dtype of words": ({"words": torch.zeros(16, 16)}, TypeError, "words is float32; it must be int32"),
    "rows": ({"rows": 17}, ValueError, "words have 16 rows for 17"),
    "scales of another layout": ({"scales": torch.ones(16, 2).half()}, ValueError, r"scales has shape \(16, 2\)"),
    "groups": ({"scales": torch.ones(1, 3, 16).half()}, ValueError, "3 groups for K = 128 columns; a group must be"),
    "zeros": ({"zeros": torch.ones(1, 1, 16).half()}, ValueError, r"zeros has shape \(1, 1, 16\); it must be \(1, 2,"),
    "dtype of zeros": ({"zeros": torch.ones(1, 2, 16).char()}, TypeError, "zeros is int8; it must be float16"),
    "dtype": ({"dtype": torch.float32}, TypeError, "dtype is torch.float32; it must be torch.float16 or torch.bf"),
    "shape of out": ({"out": torch.ones(16, 64).half()}, ValueError, r"out has shape \(16, 64\); it must be \(16, 128"),
    "device": ({"scales": torch.ones(1, 2, 16).half().to("meta")}, ValueError, "scales is on meta; it must be on cpu"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named_before_the_launch(wrong, no_launch):
    right = {"words": torch.zeros(16, 16, dtype=torch.int32), "scales": torch.ones(1, 2, 16).half()}
    spoiled, kind, words = WRONG[wrong]
    with pytest.raises(kind, match=words):
        kernels.int4_dequantize(**right | spoiled)


def test_an_output_over_an_input_is_refused(no_launch):
    memory = torch.zeros(16 * 128 * 2, dtype=torch.uint8)
    words = memory[:1024].view(torch.int32).view(16, 16)
    with pytest.raises(ValueError, match="out overlaps words"):
        kernels.int4_dequantize(words, torch.ones(1, 2, 16).half(), memory.view(torch.float16).view(16, 128))


# Activations


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 6e4, 1e30])
def test_each_token_is_scaled_by_a_power_of_two_of_its_own(dtype, size):
    if dtype == torch.float16 and not 1e-6 < size < 1e4:
        size = 3e-3
    x = torch.randn(5, 901, generator=torch.Generator().manual_seed(1)).clamp(-3.9, 3.9).double() * size
    x[1] /= 1000
    x[2] = 0
    x = x.to(dtype)
    report = simt.observe(kernels.half_x, x)
    assert report.clean, str(report)
    half, back = report.result
    largest = half[[0, 1, 3, 4]].abs().amax(1)
    assert (largest >= 2**14).all() and (largest <= 2**15).all() and not half[2].any()
    assert torch.equal(torch.frexp(back)[0], torch.full((5,), 0.5))  # powers of two
    given = half.double() * back.double()[:, None]
    if dtype == torch.float32:
        torch.testing.assert_close(given, x.double(), rtol=2**-11, atol=size * 2**-36)
    else:
        torch.testing.assert_close(given, x.double(), rtol=0, atol=size * 2**-36)
    fp32 = torch.randn(5, 33)
    widened = simt.observe(kernels.widen_y, fp32, back, torch.ones(33), dtype)
    assert widened.clean and torch.equal(widened.result, (fp32.double() * back.double()[:, None] + 1).to(dtype))


def test_large_and_small_values_of_a_token_keep_the_bits_of_bfloat16():
    x = torch.tensor([[2.0**100 * 1.9921875, 2.0**72 * 1.9921875, -(2.0**80) * 1.0078125]]).bfloat16()
    half, back = kernels.half_x(x)
    assert torch.equal(half.double() * back.double()[:, None], x.double())


def test_what_is_not_finite_stays_so():
    x = torch.ones(3, 40)
    x[0, 5], x[1, 6] = math.inf, math.nan
    half, _ = kernels.half_x(x)
    assert half[0, 5] == math.inf and half[1].isnan().nonzero().flatten().tolist() == [6] and half[2].isfinite().all()


def test_activations_that_do_not_fit_are_refused(no_launch):
    with pytest.raises(TypeError, match="x is float64"):
        kernels.half_x(torch.ones(2, 64).double())
    with pytest.raises(ValueError, match=r"x has shape \(64,\); it must be \(tokens, cols\)"):
        kernels.half_x(torch.ones(64))
    y, back = torch.ones(2, 5), torch.ones(2)
    with pytest.raises(TypeError, match=r"dtype is torch.int8"):
        kernels.widen_y(y, back, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"back has shape \(3,\); it must be \(2,\)"):
        kernels.widen_y(y, torch.ones(3))
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); it must be \(5,\)"):
        kernels.widen_y(y, back, torch.ones(4))


# SwiGLU

by_input = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["float16", "bfloat16", "float32"]
)
TOKENS = [(1, 16), (7, 48), (129, 896), (5, 4864), (3, 8960), (2, 18944)]


def mlp(tokens, inner, dtype, size=3.0):
    """gate_up, and in float64 what SwiGLU makes of it, from gate and up that lie side by side."""
    make = torch.Generator().manual_seed(tokens * 7919 + inner)
    gate, up = (torch.randn(tokens, inner, generator=make).mul(size).to(dtype) for _ in range(2))
    joined = torch.empty(tokens, 2 * inner, dtype=dtype)
    for first in range(0, inner, 16):
        joined[:, 2 * first : 2 * first + 16] = gate[:, first : first + 16]
        joined[:, 2 * first + 16 : 2 * first + 32] = up[:, first : first + 16]
    gate = gate.double()
    return joined, gate / (1 + (-gate).exp()) * up.double()


@by_input
@pytest.mark.parametrize("factor", [1.0, 1 / 16])
def test_swiglu_is_that_of_float64_rounded_to_fp16(dtype, factor):
    for tokens, inner in TOKENS:
        gate_up, wanted = mlp(tokens, inner, dtype)
        out = nothing((tokens, inner), torch.float16)
        assert kernels.swiglu(gate_up, factor, out) is out
        torch.testing.assert_close(out.double(), wanted * factor, rtol=2**-11 * 1.01, atol=2**-25 * 1.01)
        assert torch.equal(kernels.swiglu(gate_up, factor), out)


@by_input
def test_observed_swiglu_is_clean_and_moves_each_number_once(dtype):
    for tokens, inner in ((1, 16), (3, 1040)):
        gate_up, wanted = mlp(tokens, inner, dtype)
        report = simt.observe(kernels.swiglu, gate_up, 0.5, nothing((tokens, inner), torch.float16))
        assert report.clean, str(report)
        torch.testing.assert_close(report.result.double(), wanted / 2, rtol=2**-11 * 1.01, atol=2**-25 * 1.01)
        asked = 1 if dtype != torch.float32 else 2  # a thread's halves of a sector are two loads
        assert report.totals.global_load_sectors == asked * gate_up.nbytes // 32
        assert report.totals.global_store_sectors == tokens * inner * 2 // 32


def test_swiglu_s_factor_reaches_what_fp16_does_not():
    gate_up = torch.full((1, 32), 1000.0)
    assert kernels.swiglu(gate_up, 1 / 16).tolist() == [[62496.0] * 16]  # 62500, where fp16 counts in 32
    assert (kernels.swiglu(gate_up) == math.inf).all()
    gate_up[0, 3], gate_up[0, 4], gate_up[0, 16 + 5] = -1e4, math.nan, math.nan
    out = kernels.swiglu(gate_up, 1 / 16)[0]
    assert out[3] == 0 and out.isnan().nonzero().flatten().tolist() == [4, 5]


def test_what_swiglu_cannot_take_is_refused(no_launch):
    right, half = torch.ones(2, 64), torch.ones(2, 32).half()
    memory = torch.zeros(256, dtype=torch.uint8)
    for wrong, kind, words in (
        ({"gate_up": right.double()}, TypeError, "gate_up is float64; it must be float16 or bfloat16 or float32"),
        ({"gate_up": right[0]}, ValueError, r"gate_up has shape \(64,\); it must be \(tokens, 2 inner\)"),
        ({"gate_up": right[:0]}, ValueError, r"gate_up has shape \(0, 64\)"),
        ({"gate_up": torch.ones(2, 48)}, ValueError, "gate_up has 48 columns; it must have a multiple of 32"),
        ({"gate_up": torch.ones(64, 2).T}, ValueError, r"gate_up is not contiguous .* pass gate_up.contiguous\(\)"),
        ({"gate_up": torch.ones(129)[1:].view(2, 64)}, ValueError, "gate_up starts at an address .* 16 bytes"),
        ({"out": torch.ones(2, 32)}, TypeError, "out is float32; it must be float16"),
        ({"out": torch.ones(2, 64).half()}, ValueError, r"out has shape \(2, 64\); it must be \(2, 32\)"),
        ({"out": half.to("meta")}, ValueError, "out is on meta; it must be on cpu"),
        ({"out": torch.ones(65).half()[1:].view(2, 32)}, ValueError, "out starts at an address .* 16 bytes"),
        (
            {"gate_up": memory.view(torch.float16).view(2, 64), "out": memory[128:].view(torch.float16).view(2, 32)},
            ValueError,
            "out overlaps gate_up",
        ),
    ):
        with pytest.raises(kind, match=words):
            kernels.swiglu(**{"gate_up": right} | wrong)
