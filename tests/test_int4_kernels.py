"""Every INT4 kernel equals float64 on the dequantised weights, gives out each weight in its place, stays finite where
fp16 would not, and refuses what it cannot take before anything runs."""

import math
import re
from pathlib import Path

import pytest
import torch

from nanoqwen import kernels, simt
from nanoqwen.kernels import int4_ring
from nanoqwen.kernels.int4 import SHAPES, choose
from nanoqwen.kernels.launch import INCLUDE, Program
from nanoqwen.packing import FRAGMENT, GROUP_SIZES, SEQUENTIAL, VALUE_SHUFFLE, device_header, pack, tile_scales

MODEL_COLUMNS = (896, 1536, 3584, 4864, 8960, 18944)
GEMV = [getattr(kernels, name) for name in kernels.__all__ if name.startswith("int4_gemv")]
TILED = [kernels.int4_gemm_mma, kernels.int4_gemm_ring]
KERNELS = [*GEMV, *TILED]
# Of Problem.error. mma: what the offsets, a thousand times x, leave behind when they are taken off. ring: x rounded to
# a 32,640th of its group's largest.
# dp4a: x rounded to 8 bits (its own rounding is tested apart). magic: fp16 products.
TOLERANCE = (
    dict.fromkeys(GEMV, 5e-6)
    | dict.fromkeys(TILED, 6e-5)
    | {kernels.int4_gemv_dp4a: 2e-2, kernels.int4_gemv_magic: 1.5e-3}
)

by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
tiled_by_name = pytest.mark.parametrize("kernel", TILED, ids=lambda kernel: kernel.__name__)
gemv_by_name = pytest.mark.parametrize("kernel", GEMV, ids=lambda kernel: kernel.__name__)


class Problem:
    """Values, scales and x, and the product in float64."""

    def __init__(self, rows, cols, group=128, tokens=None):
        make = torch.Generator().manual_seed(rows * 7919 + cols + group)
        self.values = torch.randint(-8, 8, (rows, cols), generator=make, dtype=torch.int8)
        self.scales = (torch.rand(rows, cols // group, generator=make) * 0.03 + 1e-3).half()
        self.x = torch.randn(cols if tokens is None else (tokens, cols), generator=make).half()
        self.rows, self.zeros = rows, torch.zeros(self.scales.shape)

    def zero_points(self):
        """Zero-points of all kinds from now on, as the kernel's argument."""
        make = torch.Generator().manual_seed(self.rows)
        self.zeros = torch.randint(-8, 8, self.scales.shape, generator=make)
        return {"zeros": tile_scales(self.zeros.half())}

    @property
    def weights(self):
        scales, grouped = self.scales.double(), self.values.double().unflatten(1, (self.scales.shape[1], -1))
        return ((grouped - self.zeros[..., None]) * scales[..., None]).flatten(1)

    @property
    def reference(self):
        return self.x.double() @ self.weights.T

    def error(self, y, reference=None):
        """‖y − reference‖ against the size of y, or, if that is larger, of a sum of such products with random signs:
        a single row may cancel."""
        reference = self.reference if reference is None else reference
        size = (self.x.double().square() @ self.weights.square().T).sqrt().maximum(reference.abs())
        value = ((y.double() - reference).norm() / size.norm()).item()
        return value if math.isfinite(value) else math.inf

    def run(self, kernel, out=None, **how):
        """y of a kernel, into an output full of NaN, with the weights in the kernel's layout."""
        y = torch.full(self.reference.shape, math.nan) if out is None else out
        if kernel in TILED:
            words, scales = pack(self.values, FRAGMENT), tile_scales(self.scales)
            assert kernel(words, scales, self.x, out=y, rows=self.rows, **how) is y
        else:
            assert kernel(pack(self.values), self.scales, self.x, out=y, **how) is y
        return y


# Unpacking


def every_half_word():
    """Every 16-bit half word, as the lower and as the upper half, beside another that differs in all its bits."""
    half = torch.arange(65536)
    return torch.cat([half << 16 | (half ^ 0xFFFF), (half ^ 0xFFFF) << 16 | half]).to(torch.uint32).view(torch.int32)


@pytest.fixture(scope="module")
def unpacks():
    names = ["by_shift", "by_prmt", "by_bytes", "by_magic", "by_offset"]
    return simt.compile(Path(__file__).parent / "int4_unpack.cu", names, include_dirs=(INCLUDE,))


@pytest.mark.parametrize("name", ["by_shift", "by_prmt", "by_bytes", "by_magic", "by_offset"])
def test_every_half_word_is_unpacked_exactly(unpacks, name):
    words = every_half_word()
    bits = words.long() & 0xFFFFFFFF
    nibbles = torch.stack([bits >> shift & 15 for shift in (0, 16, 4, 20, 8, 24, 12, 28)], dim=-1)
    expected = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    out = torch.full((len(words), 8), math.nan)
    unpacks[name].launch(len(words) // 256, 256, (words, out, len(words)))
    assert torch.equal(out, expected)


def test_the_lowest_nibbles_of_a_fragment_s_first_word_are_where_the_picture_says():
    values = torch.zeros(16, 64, dtype=torch.int8)
    values[9, 32 + 8 * 2 + 1] = -8  # lane (g, t) = (1, 2), word 3: row g + 8, block 1; value 1, at bit 16
    words = pack(values, FRAGMENT).flatten()
    assert words.nonzero().tolist() == [[(1 * 4 + 2) * 4 + 3]] and words[27] == 8 << 16


def test_scales_lie_in_pairs_of_rows_eight_apart():
    scales = torch.arange(1, 19).half()[:, None] * torch.tensor([1.0, 100.0]).half()  # row r, group 0: r + 1
    tiled = tile_scales(scales)
    assert tiled.shape == (2, 2, 16) and tiled[0, 0].tolist() == [v for g in range(1, 9) for v in (g, g + 8)]
    assert tiled[1, 1].tolist() == [1700.0, 0.0, 1800.0] + [0.0] * 13
    with pytest.raises(ValueError, match=r"scales have shape \(3,\); they must be a matrix"):
        tile_scales(torch.ones(3))


def test_device_code_and_python_share_their_numbers():
    assert (INCLUDE / "format.cuh").read_text(encoding="utf-8") == device_header()
    source = (INCLUDE.parent / "int4_gemm.cu").read_text()
    assert re.search(r"is_group_size<GROUP>", source)


@by_name
def test_with_one_column_picked_out_each_row_gives_exactly_its_weight(kernel):
    rows, cols = 24, 128
    ramp = ((torch.arange(cols)[None] * 5 + torch.arange(rows)[:, None] * 3) % 16 - 8).to(torch.int8)
    problem = Problem(rows, cols)
    problem.values, problem.scales = ramp, torch.full((rows, 1), 0.5).half()
    words, scales = pack(ramp), problem.scales
    if kernel in TILED:
        words, scales = pack(ramp, FRAGMENT), tile_scales(scales)
    for k in range(cols):
        x = torch.zeros(cols).half()
        x[k] = 1
        y = kernel(words, scales, x)[:rows]
        wanted = 0.5 * ramp[:, k]
        if kernel is kernels.int4_gemv_dp4a:  # 127 times the scale of x, which is 1 / 127
            torch.testing.assert_close(y, wanted, rtol=1e-6, atol=0)
        else:
            assert torch.equal(y, wanted), k


# Results


@by_name
@pytest.mark.parametrize("rows", [1, 7, 33, 129])
def test_every_row_is_right_at_the_columns_of_every_model(kernel, rows):
    for cols in MODEL_COLUMNS if rows < 33 else (896, 4864):
        problem = Problem(rows, cols)
        assert problem.error(problem.run(kernel)) < TOLERANCE[kernel], cols


@by_name
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_every_group_size_is_right(kernel, group):
    for cols in (group * 2 if group > 32 else 64, group * 7 if group > 32 else 448, 1536):
        problem = Problem(19, cols, group)
        assert problem.error(problem.run(kernel)) < TOLERANCE[kernel], cols


@pytest.mark.parametrize("cols", [192, 896, 4864, 10944])
def test_odd_columns_are_right_or_refused_by_name(cols):
    for kernel in KERNELS:
        for group in GROUP_SIZES:
            if cols % group:
                words, scales = torch.zeros(16, cols // 8, dtype=torch.int32), torch.ones(16, -(-cols // group)).half()
                if kernel in TILED:
                    scales = tile_scales(scales)
                with pytest.raises(
                    ValueError, match=rf"{-(-cols // group)} groups for K = {cols} columns; a group must"
                ):
                    kernel(words, scales, torch.zeros(cols).half())
            elif group in (32, 128) or cols < 1000:
                problem = Problem(5, cols, group)
                assert problem.error(problem.run(kernel)) < TOLERANCE[kernel], group


def test_dp4a_is_exact_but_for_the_rounding_of_x():
    for cols in (160, 896, 4864):
        problem = Problem(33, cols, 32)
        q, x_scales = kernels.quantize_x(problem.x)
        shuffled = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # where value k of an octet lies
        rounded = q.view(-1, 8)[:, shuffled].flatten().double() * x_scales.double().repeat_interleave(128)[:cols]
        groups = [problem.x[k : k + 128].float() for k in range(0, cols, 128)]
        torch.testing.assert_close(x_scales, torch.stack([g.abs().max() / 127 for g in groups]))
        steps = x_scales.double().repeat_interleave(128)[:cols]
        assert ((rounded - problem.x.double()).abs() <= steps * 0.5001).all()
        y, problem.x = problem.run(kernels.int4_gemv_dp4a), rounded
        assert problem.error(y) < 1e-6


def test_a_group_of_zeros_quantises_to_zeros():
    x = torch.cat([torch.zeros(128), torch.ones(32)]).half()
    q, scales = kernels.quantize_x(x)
    assert not q[:128].any() and scales[0] == 0 and (q[128:] == 127).all()


@tiled_by_name
@pytest.mark.parametrize("tokens", range(1, 9))
def test_tensor_cores_take_one_to_eight_tokens(kernel, tokens):
    for rows, cols in ((16, 128), (33, 896), (70, 3584)):
        problem = Problem(rows, cols, tokens=tokens)
        assert problem.error(problem.run(kernel)) < TOLERANCE[kernels.int4_gemm_mma]


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_block_of_the_ring_takes_many_rows(tokens):
    for blocks, rows, cols, group in ((1, 150, 1536, 32), (5, 129, 3584, 128), (2, 90, 768, 256), (2, 81, 18944, 64)):
        problem = Problem(rows, cols, group, tokens)
        y = problem.run(kernels.int4_gemm_ring, blocks=blocks)
        assert problem.error(y) < TOLERANCE[kernels.int4_gemm_ring], (blocks, cols)


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_ring_takes_zero_points_off_and_adds_bias_and_residual(group, tokens):
    problem = Problem(35, 2304, group, tokens)
    bias, residual, zeros = torch.randn(35), torch.randn(tokens, 35), problem.zero_points()
    y = problem.run(kernels.int4_gemm_ring, bias=bias, residual=residual, **zeros)
    assert problem.error(y, problem.reference + bias + residual) < TOLERANCE[kernels.int4_gemm_ring]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_ring_that_goes_round_several_times_is_clean(tokens):
    problem, how = Problem(150, 1536, 128, tokens), {"blocks": 2, "residual": torch.randn(tokens, 150)}
    y = problem.run(kernels.int4_gemm_ring, **how)
    report = simt.observe(problem.run, kernels.int4_gemm_ring, torch.full((tokens, 150), math.nan), **how)
    assert report.clean, str(report)
    for seed in range(3):
        with simt.observing(seed=seed):
            assert torch.equal(problem.run(kernels.int4_gemm_ring, **how), y)


@pytest.mark.parametrize("cols", [896, 3584])
def test_the_ring_takes_the_norm_along(cols):
    problem, eps = Problem(150, cols), 1e-6
    x, norm, bias = 30 * torch.randn(cols), (1 + 0.2 * torch.randn(cols)).half(), torch.randn(150)
    x[5] = 4e5  # more than a half holds
    wide = x.double()
    problem.x = wide / (wide.square().mean() + eps).sqrt() * norm.double()
    words, scales, out = pack(problem.values, FRAGMENT), tile_scales(problem.scales), torch.full((150,), math.nan)

    def run():
        return kernels.int4_gemm_ring(words, scales, x, out, rows=150, norm=norm, eps=eps, bias=bias, blocks=3)

    assert problem.error(run(), problem.reference + bias) < 2e-4  # one column is nearly all of its group
    assert simt.observe(run).clean


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("limit", [32639, 16319])
def test_the_largest_of_a_group_may_lie_between_two_whole_numbers(group, limit):
    problem, norm = Problem(16, 64 * group, group), torch.ones(64 * group).half()
    x = torch.randn(64, group).clamp(-3, 3) * limit / 4
    largest = torch.linspace(limit - 0.7, limit + 1.3, 64) * torch.tensor([1, -1]).repeat(32)
    x[range(64), torch.randint(group, (64,))] = largest[torch.randperm(64)]
    x = x.flatten()  # as a normed x is: fp32, so not made of whole numbers
    words, scales, y = pack(problem.values, FRAGMENT), tile_scales(problem.scales), torch.full((16,), math.nan)
    kernels.int4_gemm_ring(words, scales, x, y, norm=norm, eps=0.0)
    problem.x = x.double() / x.double().square().mean().sqrt()
    assert problem.error(y) < TOLERANCE[kernels.int4_gemm_ring]


@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_the_ring_multiplies_a_gate_in(tokens):
    problem = Problem(352, 896, tokens=tokens)
    words, scales = pack(problem.values, FRAGMENT), tile_scales(problem.scales)
    out = torch.full((*problem.x.shape[:-1], 176), math.nan, dtype=torch.float16)
    y = kernels.int4_gemm_ring(words, scales, problem.x, out, swiglu=True, x_factor=0.5, y_factor=0.125, blocks=3)
    gate, up = (0.5 * problem.reference).unflatten(-1, (-1, 2, 16)).unbind(-2)
    wanted = (gate * gate.sigmoid() * up).flatten(-2) / 8
    assert y is out and (y.double() - wanted).norm() < 1e-3 * wanted.norm()


def test_an_x_that_does_not_fit_into_shared_memory_is_split_by_a_kernel_of_its_own():
    names = []
    problem = Problem(19, 18944, tokens=6)
    launch = Program.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "launch", lambda self, name, *a, **k: names.append(name) or launch(self, name, *a, **k))
        y = problem.run(kernels.int4_gemm_ring, zeros=problem.zero_points()["zeros"])
    assert names == ["split_x<128>", "int4_gemm_ring<128, 8, SPLIT_X, false, true>"]
    assert problem.error(y) < TOLERANCE[kernels.int4_gemm_ring]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_x_is_not_hidden(bad):
    problem = Problem(16, 896)
    problem.x[300] = bad
    assert not problem.run(kernels.int4_gemm_ring).isfinite().any()


def test_a_group_of_zeros_and_one_of_tiny_numbers_are_right():
    problem = Problem(16, 512)
    problem.x[:128], problem.x[128:256] = 0, 6e-8
    assert problem.error(problem.run(kernels.int4_gemm_ring)) < TOLERANCE[kernels.int4_gemm_ring]
    problem.x.zero_()
    assert not problem.run(kernels.int4_gemm_ring).any()


def test_the_ring_and_its_launch_agree_on_its_size():
    source = (INCLUDE.parent / "int4_ring.cu").read_text()
    for name in ("RING_STAGES", "RING_WARPS", "RING_CHUNK", "NORM_COLS"):
        assert re.search(rf"\b{name} = (\d+)", source)[1] == str(getattr(int4_ring, name))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instance_of_mma_is_right(shape):
    for group in GROUP_SIZES:
        problem = Problem(35, 2304, group, tokens=3)
        y = problem.run(kernels.int4_gemm_mma, shape=shape)
        assert problem.error(y) < TOLERANCE[kernels.int4_gemm_mma], group


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zero_points_are_taken_off_in_every_instance(shape):
    for group in GROUP_SIZES:
        problem = Problem(35, 2304, group, tokens=3)
        assert problem.error(problem.run(kernels.int4_gemm_mma, shape=shape, **problem.zero_points())) < 2e-5, group


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_observed_zero_points_are_clean_and_the_epilogue_adds_to_them(tokens):
    problem = Problem(33, 896, 32, tokens=tokens)
    bias, residual, zeros = torch.randn(33), torch.randn(tokens, 33), problem.zero_points()
    y = torch.full((tokens, 33), math.nan)
    report = simt.observe(problem.run, kernels.int4_gemm_mma, y, bias=bias, residual=residual, **zeros)
    assert report.clean, str(report)
    assert problem.error(y, problem.reference + bias + residual) < 2e-5


def test_a_zero_point_of_one_row_and_group_moves_that_row_only():
    problem = Problem(33, 256, 128, tokens=2)
    plain = problem.run(kernels.int4_gemm_mma)
    problem.zeros = torch.zeros(33, 2)
    problem.zeros[13, 1] = -5
    y = problem.run(kernels.int4_gemm_mma, zeros=tile_scales(problem.zeros.half()))
    moved = (y != plain).any(0).nonzero().flatten()
    assert moved.tolist() == [13]
    wanted = 5 * problem.scales[13, 1].double() * problem.x[:, 128:].double().sum(1)
    torch.testing.assert_close((y - plain)[:, 13].double(), wanted, rtol=1e-3, atol=1e-4)


def test_every_difference_of_value_and_zero_point_comes_out_exactly():
    values = (torch.arange(16) - 8).to(torch.int8)[:, None].expand(16, 64).contiguous()  # row r holds r − 8
    for zero in range(-8, 8):
        zeros = torch.full((16, 1), float(zero)).half()
        x = torch.zeros(64).half()
        x[37] = 1
        tiled = [tile_scales(part) for part in (torch.full((16, 1), 0.5).half(), zeros)]
        y = kernels.int4_gemm_mma(pack(values, FRAGMENT), tiled[0], x, zeros=tiled[1])
        assert torch.equal(y, 0.5 * (values[:, 0] - zero).float()), zero


def test_without_zero_points_nothing_is_read_for_them():
    problem = Problem(32, 1024, 128)
    zeros = problem.zero_points()
    plain, asymmetric = (
        simt.observe(problem.run, kernels.int4_gemm_mma, shape=(4, 1), **how).totals.global_load_sectors
        for how in ({}, zeros)
    )
    assert asymmetric - plain == zeros["zeros"].nbytes // 32


def test_every_choice_of_mma_was_compiled():
    assert {choose(rows, sms) for rows in (1, 896, 3584, 4608, 37888, 152064) for sms in (16, 58, 132)} <= set(SHAPES)


@tiled_by_name
def test_a_bias_and_a_residual_are_added_in_the_epilogue(kernel):
    problem = Problem(37, 896, tokens=3)
    bias, residual = torch.randn(37), torch.randn(3, 37)
    wanted = problem.reference + bias + residual
    y = problem.run(kernel, bias=bias, residual=residual)
    assert problem.error(y, wanted) < TOLERANCE[kernels.int4_gemm_mma]
    in_place = residual.clone()
    report = simt.observe(problem.run, kernel, in_place, bias=bias, residual=in_place)
    assert report.clean, str(report)
    assert torch.equal(in_place, y)


@by_name
def test_activations_of_thousands_stay_finite_and_right(kernel):
    problem = Problem(9, 896)
    problem.values[:] = torch.where(problem.values < 0, -8, 7)
    problem.scales[:] = 1.0
    for size in (5000.0, 65504.0):
        problem.x = torch.full((896,), size).half()
        y = problem.run(kernel)
        assert y.isfinite().all() and problem.reference.abs().max() > 65504
        assert problem.error(y) < TOLERANCE[kernel]
        problem.values[0] = -8  # and the largest sum there can be
        assert problem.error(problem.run(kernel)) < TOLERANCE[kernel]


# Observed


@by_name
def test_observed_every_kernel_is_clean_and_gives_the_same_bits(kernel):
    for rows, cols in ((7, 256), (33, 896)):
        problem = Problem(rows, cols)
        fast, y = problem.run(kernel), torch.full((rows,), math.nan)
        report = simt.observe(problem.run, kernel, y)
        assert report.clean, str(report)
        assert torch.equal(fast, y)


def test_the_counts_are_those_of_the_hand():
    """33 rows x 1,024 columns, group 128: a row is one request of 512 bytes for a warp; x is 32 bytes a load apart."""
    rows, cols = 33, 1024
    problem = Problem(rows, cols)
    totals = {kernel: simt.observe(problem.run, kernel).totals for kernel in GEMV}
    for kernel in (kernels.int4_gemv_warp, kernels.int4_gemv_prmt):
        # A row: the words, four loads of x with two lanes to each 128 bytes, the scales (8 halves, one sector).
        assert totals[kernel].global_load_requests == rows * (1 + 4 + 1)
        assert totals[kernel].global_load_sectors == rows * (16 + 4 * 32) + sectors_of_scales(rows, cols // 128)
    # Two rows share each load of x; the row that is missing to the last pair is read again.
    pairs = 17
    assert totals[kernels.int4_gemv_magic].global_load_requests == pairs * (2 + 4 + 2)
    # x in bytes: two loads a row instead of four, each lane's two of one sector; and quantize_x reads x once.
    assert totals[kernels.int4_gemv_dp4a].global_load_requests == rows * (1 + 2 + 1 + 1) + 8


def sectors_of_scales(rows, groups):
    return rows * -(-groups * 2 // 32)


def test_mma_reads_each_weight_and_scale_once():
    rows, cols, group = 32, 1024, 128
    problem = Problem(rows, cols, group)
    totals = simt.observe(problem.run, kernels.int4_gemm_mma, shape=(4, 1)).totals
    words, scales = rows * cols // 2 // 32, rows * cols // group * 2 // 32
    x = 2 * cols * 2 // 32  # two tiles of rows, each reads all of x
    assert totals.global_load_sectors == words + scales + x
    assert totals.global_store_sectors == rows * 4 // 32


# Wrong calls


@pytest.fixture
def no_launch(monkeypatch):
    def launched(*args, **kwargs):
        raise AssertionError("a wrong call reached the launch")

    monkeypatch.setattr(Program, "launch", launched)


def arguments(kernel, rows=16, cols=256):
    words, scales, x = torch.zeros(rows, cols // 8, dtype=torch.int32), torch.ones(rows, cols // 128), torch.ones(cols)
    scales = scales.half()
    scales = tile_scales(scales) if kernel in TILED else scales
    return {"words": words, "scales": scales, "x": x.half()}


WRONG = {
    "words a list": (lambda a: {"words": [1]}, TypeError, "words must be a tensor, got list"),
    "dtype of words": (lambda a: {"words": a["words"].long()}, TypeError, "words is int64; it must be int32"),
    "dtype of scales": (lambda a: {"scales": a["scales"].float()}, TypeError, "scales is float32; it must be float16"),
    "dtype of x": (lambda a: {"x": a["x"].bfloat16()}, TypeError, "x is bfloat16; it must be float16"),
    "dtype of out": (lambda a: {"out": torch.empty(16).half()}, TypeError, "out is float16; it must be float32"),
    "device of words": (lambda a: {"words": a["words"].to("meta")}, ValueError, "words is on meta; kernels run on"),
    "device of scales": (lambda a: {"scales": a["scales"].to("meta")}, ValueError, "scales is on meta; it must be on"),
    "device of x": (lambda a: {"x": a["x"].to("meta")}, ValueError, "x is on meta; it must be on cpu"),
    "shape of words": (lambda a: {"words": a["words"][0]}, ValueError, r"words has shape \(32,\); it must be \(rows"),
    "shape of scales": (lambda a: {"scales": a["scales"][:0]}, ValueError, r"scales has shape \(0, .*; it must be \(1"),
    "length of x": (lambda a: {"x": a["x"][:128]}, ValueError, r"x has shape \(128,\); it must be \(256,\)"),
    "length of out": (lambda a: {"out": torch.empty(17)}, ValueError, r"out has shape \(17,\); it must be \(16,\)"),
    "strides of words": (
        lambda a: {"words": a["words"].repeat(1, 2)[:, ::2]},
        ValueError,
        r"words is not contiguous .*words.contiguous\(",
    ),
    "strides of x": (lambda a: {"x": a["x"].repeat(2)[::2]}, ValueError, "x is not contiguous"),
    "alignment of x": (lambda a: {"x": torch.ones(257).half()[1:]}, ValueError, "x starts at an address .*16 bytes"),
    "alignment of words": (
        lambda a: {"words": torch.zeros(16 * 32 + 1, dtype=torch.int32)[1:].view(16, 32)},
        ValueError,
        "words starts at an address that is no multiple of 16",
    ),
    "out in words": (
        lambda a: {"out": a["words"].view(torch.float32).flatten()[16:32]},
        ValueError,
        "out overlaps words",
    ),
    "the sequential layout": (
        lambda a: {"layout": SEQUENTIAL},
        ValueError,
        r"was compiled for layout \d .*\(sequential",
    ),
    "a layout that nobody knows": (lambda a: {"layout": 77}, ValueError, "layout id is 77; nanoqwen knows 0"),
}


@by_name
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named_before_the_launch(kernel, wrong, no_launch):
    right = arguments(kernel)
    spoil, kind, words = WRONG[wrong]
    with pytest.raises(kind, match=words):
        kernel(**(right | spoil(right)))


@by_name
def test_a_right_call_reaches_the_launch(kernel, no_launch):
    with pytest.raises(AssertionError, match="reached the launch"):
        kernel(**arguments(kernel))


@gemv_by_name
def test_words_for_mma_are_refused_by_the_others(kernel, no_launch):
    with pytest.raises(
        ValueError, match=rf"{kernel.__name__} was compiled for layout 1 .ValueShuffle.*layout 2 .fragm"
    ):
        kernel(**arguments(kernel), layout=FRAGMENT)
    with pytest.raises(ValueError, match=r"int4_gemm_mma was compiled for layout 2 .fragment.*layout 1 .ValueShuffle"):
        kernels.int4_gemm_mma(**arguments(kernels.int4_gemm_mma), layout=VALUE_SHUFFLE)


def test_k_and_the_group_are_named_when_they_do_not_fit(no_launch):
    right = arguments(kernels.int4_gemv_warp)
    for scales, words in ((torch.ones(16, 5).half(), "5 groups for K = 256"), (torch.ones(16, 1)[:, :1].half(), None)):
        if words:
            with pytest.raises(
                ValueError, match=f"{words} columns; a group must be one of 32, 64, 128, 256 and divide"
            ):
                kernels.int4_gemv_warp(right["words"], scales, right["x"])
    with pytest.raises(ValueError, match="K = 264 columns; 16-byte loads need a multiple of 32"):
        kernels.int4_gemv_warp(torch.zeros(4, 33, dtype=torch.int32), torch.ones(4, 1).half(), torch.ones(264).half())
    with pytest.raises(ValueError, match="K = 96 columns; tiles of layout fragment need a multiple of 64"):
        kernels.int4_gemm_mma(torch.zeros(16, 12, dtype=torch.int32), right["scales"], torch.ones(96).half())


@tiled_by_name
def test_what_only_tensor_cores_take_is_checked_too(kernel, no_launch):
    right = arguments(kernel)
    wrong = {
        "x has 9 tokens; a call takes at most 8": {"x": torch.ones(9, 256).half()},
        "rows is 17; words with 16 rows, in tiles of 16, hold 1 to 16": {"rows": 17},
        "rows is 0;": {"rows": 0},
        r"words have 15 rows; layout fragment has 16": {"words": right["words"][:15]},
        r"bias has shape \(15,\)": {"bias": torch.ones(15)},
        r"residual has shape \(16, 1\)": {"residual": torch.ones(16, 1)},
    }
    for words, spoiled in wrong.items():
        with pytest.raises(ValueError, match=words):
            kernel(**(right | spoiled))
    if kernel is kernels.int4_gemm_mma:
        with pytest.raises(ValueError, match=r"zeros has shape \(1, 2\); it must be \(1, 2, 16\)"):
            kernel(**right, zeros=torch.zeros(1, 2).half())
        with pytest.raises(TypeError, match="zeros is int8; it must be float16"):
            kernel(**right, zeros=right["scales"].to(torch.int8))
    held = torch.ones(32)
    with pytest.raises(ValueError, match="out overlaps residual"):  # shifted: neither in place nor apart
        kernel(**right, residual=held[:16], out=held[4:20])


def test_the_launch_of_tensor_cores_is_checked(no_launch):
    right = arguments(kernels.int4_gemm_mma)
    with pytest.raises(ValueError, match=r"shape is \(3, 1\); the kernel was compiled for"):
        kernels.int4_gemm_mma(**right, shape=(3, 1))
    with pytest.raises(ValueError, match="blocks is 0; it must be at least 1"):
        kernels.int4_gemm_ring(**right, blocks=0)
    with pytest.raises(ValueError, match="rows is 16; SwiGLU needs a multiple of 32"):
        kernels.int4_gemm_ring(**right, swiglu=True)
    with pytest.raises(ValueError, match="swiglu takes neither bias nor residual"):
        kernels.int4_gemm_ring(**right, swiglu=True, bias=torch.ones(16))
    norm = torch.ones(right["x"].shape[-1]).half()
    with pytest.raises(TypeError, match="x is float16; it must be float32"):
        kernels.int4_gemm_ring(**right, norm=norm)
    with pytest.raises(ValueError, match=r"with a norm it is one token"):
        kernels.int4_gemm_ring(**(right | {"x": right["x"].float()[None]}), norm=norm)
    with pytest.raises(TypeError, match="norm is float32; it must be float16"):
        kernels.int4_gemm_ring(**(right | {"x": right["x"].float()}), norm=norm.float())
    for cols, x, how, words in (
        (16512, torch.ones(16512), {"norm": torch.ones(16512).half()}, "a norm takes at most 16384"),
        (98304, torch.ones(8, 98304).half(), {}, "sums of 8 tokens for each 512 do not fit: take fewer"),
    ):
        words_of = torch.zeros(16, cols // 8, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"x has {cols} columns; {words}"):
            kernels.int4_gemm_ring(words_of, torch.ones(1, cols // 128, 16).half(), x, **how)


def test_quantize_x_refuses_what_it_cannot_take(no_launch):
    with pytest.raises(TypeError, match="x is float32; it must be float16"):
        kernels.quantize_x(torch.ones(128))
    with pytest.raises(ValueError, match="K = 40 columns; the kernel's loads need a multiple of 32"):
        kernels.quantize_x(torch.ones(40).half())


@pytest.mark.parametrize(
    ("rows", "cols", "blocks"),
    [
        (4608, 3584, 72),  # the 7B's q, k, v: 288 tiles, four of which a block's rings hold
        (3584, 3584, 56),  # its o
        (37888, 3584, 132),  # its gate and up: too large
        (3584, 18944, 132),  # its down: not one tile fits
        (1152, 896, 132),  # the 0.5B's q, k, v: five blocks would hold it, and take too long
    ],
)
def test_launches_that_overlap_leave_multiprocessors_to_the_next(rows, cols, blocks):
    assert int4_ring.overlapping_blocks(rows // 16, cols, 132) == blocks
