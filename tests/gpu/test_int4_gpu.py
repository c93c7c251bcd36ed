"""On a GPU: the INT4 kernels against float64 and the SIMT machine, every unpack, the inputs of a captured graph."""

import math
from pathlib import Path

import pytest
import torch

from nanoqwen import kernels
from nanoqwen.kernels.int4 import SHAPES
from nanoqwen.kernels.launch import Program
from nanoqwen.packing import FRAGMENT, GROUP_SIZES, pack, tile_scales

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("cupy")

needs_bulk_copies = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90"
)
GEMV = [getattr(kernels, name) for name in kernels.__all__ if name.startswith("int4_gemv")]
EXACT = [kernel for kernel in GEMV if kernel is not kernels.int4_gemv_dp4a]
SHAPES_7B = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)]
UNPACKS = ["by_shift", "by_prmt", "by_bytes", "by_magic", "by_offset"]
TOLERANCE = dict.fromkeys(GEMV, 5e-6) | {kernels.int4_gemv_dp4a: 2e-2, kernels.int4_gemv_magic: 1.5e-3}
MMA_TOLERANCE = 1e-4  # the tensor cores round sums, offsets of some hundred times x among them, in their own way


def problem(rows, cols, group=128, tokens=1):
    """Values, scales, x (tokens, cols), the product in float64, and the size of a sum of such products."""
    make = torch.Generator().manual_seed(rows * 7919 + cols + group)
    values = torch.randint(-8, 8, (rows, cols), generator=make, dtype=torch.int8)
    scales = (torch.rand(rows, cols // group, generator=make) * 0.03 + 1e-3).half()
    x = torch.randn(tokens, cols, generator=make).half()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = (values.to(device).double().unflatten(1, (cols // group, group)) * scales.to(device)[..., None]).flatten(
        1
    )
    wide = x.to(device).double()
    return values, scales, x, (wide @ weights.T).cpu(), (wide.square() @ weights.square().T).sqrt().cpu()


def error(y, reference, size):
    value = ((y.double().cpu() - reference).norm() / size.norm()).item()
    return value if math.isfinite(value) else math.inf


def nothing(*shape):
    return torch.full(shape, math.nan, device="cuda")


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("kernel", GEMV, ids=lambda kernel: kernel.__name__)
def test_every_step_is_right_and_the_simt_machine_s_bit_for_bit(kernel, group):
    for rows, cols in ((1, 1536), (7, 256), (33, 4864), (129, 3584), (20, 18944)):
        values, scales, x, reference, size = problem(rows, cols, group)
        words, y = pack(values), nothing(rows)
        kernel(words.cuda(), scales.cuda(), x[0].cuda(), out=y)
        assert error(y, reference[0], size[0]) < TOLERANCE[kernel], (rows, cols)
        if kernel is kernels.int4_gemv_naive:  # scale times weight, then a sum: the compiler may fuse neither
            continue
        if kernel in EXACT:
            assert torch.equal(y.cpu(), kernel(words, scales, x[0])), (rows, cols)


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mma_is_right_with_one_to_eight_tokens(shape, group):
    for tokens in range(1, 9):
        for rows, cols in ((1, 1536), (35, 2304), (130, 18944)):
            values, scales, x, reference, size = problem(rows, cols, group, tokens)
            words, tiled, y = pack(values, FRAGMENT), tile_scales(scales), nothing(tokens, rows)
            kernels.int4_gemm_mma(words.cuda(), tiled.cuda(), x.cuda(), out=y, rows=rows, shape=shape)
            assert error(y, reference, size) < MMA_TOLERANCE, (tokens, rows, cols)
            simt = kernels.int4_gemm_mma(words, tiled, x, rows=rows, shape=shape)
            assert error(y, simt.double(), size) < MMA_TOLERANCE


@needs_bulk_copies
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_the_ring_is_right_with_one_to_eight_tokens_and_the_simt_machine_s_bit_for_bit(group):
    for tokens in range(1, 9):
        for rows, cols, blocks in ((1, 1536, None), (35, 2304, 1), (130, 18944, 3), (4000, 768, None)):
            values, scales, x, reference, size = problem(rows, cols, group, tokens)
            words, tiled, y = pack(values, FRAGMENT).cuda(), tile_scales(scales).cuda(), nothing(tokens, rows)
            kernels.int4_gemm_ring(words, tiled, x.cuda(), out=y, rows=rows, blocks=blocks, pdl=True)
            assert error(y, reference, size) < MMA_TOLERANCE, (tokens, rows, cols)
            if rows < 100 and tokens in (1, 5, 8):
                assert torch.equal(
                    y.cpu(), kernels.int4_gemm_ring(words.cpu(), tiled.cpu(), x, rows=rows, blocks=blocks)
                )


@pytest.mark.parametrize("rows, cols", SHAPES_7B)
def test_the_shapes_of_the_7b_are_right(rows, cols):
    values, scales, x, reference, size = problem(rows, cols, tokens=8)
    words, fragments = pack(values).cuda(), pack(values, FRAGMENT).cuda()
    x, scales, tiled = x.cuda(), scales.cuda(), tile_scales(scales).cuda()
    for kernel in GEMV:
        assert error(kernel(words, scales, x[3], out=nothing(rows)), reference[3], size[3]) < TOLERANCE[kernel]
    for shape in (None, *SHAPES):
        y = kernels.int4_gemm_mma(fragments, tiled, x, out=nothing(8, rows), shape=shape)
        assert error(y, reference, size) < MMA_TOLERANCE
        assert torch.equal(y, kernels.int4_gemm_mma(fragments, tiled, x, shape=shape))  # and the same bits again


@needs_bulk_copies
@pytest.mark.parametrize("rows, cols", SHAPES_7B)
def test_the_ring_is_right_at_the_shapes_of_the_7b(rows, cols):
    values, scales, x, reference, size = problem(rows, cols, tokens=8)
    words, tiled, x = pack(values, FRAGMENT).cuda(), tile_scales(scales).cuda(), x.cuda()
    first = kernels.int4_gemm_ring(words, tiled, x, out=nothing(8, rows))
    assert error(first, reference, size) < MMA_TOLERANCE
    for _ in range(50):  # a race would not give the same bits each time
        assert torch.equal(first, kernels.int4_gemm_ring(words, tiled, x, out=nothing(8, rows), pdl=True))


@pytest.mark.parametrize("name", UNPACKS)
def test_every_half_word_is_unpacked_exactly(name):
    half = torch.arange(65536)
    bits = torch.cat([half << 16 | (half ^ 0xFFFF), (half ^ 0xFFFF) << 16 | half])
    nibbles = torch.stack([bits >> shift & 15 for shift in (0, 16, 4, 20, 8, 24, 12, 28)], dim=-1)
    words, out = bits.to(torch.uint32).view(torch.int32).cuda(), nothing(len(bits), 8)
    source = (Path(__file__).parents[1] / "int4_unpack.cu").read_text()
    program = Program(source, {name: "ppi"}, filename="tests/int4_unpack.cu")
    program.launch(name, words.device, len(words) // 256, 256, (words, out, len(words)))
    assert torch.equal(out.cpu(), torch.where(nibbles > 7, nibbles - 16, nibbles).float())


@pytest.mark.parametrize("size", [5000.0, 65504.0])
def test_activations_of_thousands_stay_finite_and_right(size):
    values, scales = torch.full((9, 896), -8, dtype=torch.int8), torch.ones(9, 7).half()
    x, wanted = torch.full((896,), size).half(), torch.full((9,), -8.0 * 896 * size)
    words, fragments = pack(values).cuda(), pack(values, FRAGMENT).cuda()
    for kernel in GEMV:
        torch.testing.assert_close(kernel(words, scales.cuda(), x.cuda()).cpu(), wanted, rtol=2e-3, atol=0)
    y = kernels.int4_gemm_mma(fragments, tile_scales(scales).cuda(), x.cuda(), rows=9)
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-5, atol=0)


def test_a_captured_launch_reads_what_its_inputs_hold_at_each_replay():
    values, scales, x, _, _ = problem(129, 896, tokens=2)
    words, tiled, x, y = pack(values, FRAGMENT).cuda(), tile_scales(scales).cuda(), x.cuda(), nothing(2, 129)
    kernels.int4_gemm_mma(words, tiled, x, out=y, rows=129)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.int4_gemm_mma(words, tiled, x, out=y, rows=129)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(2, 896))
        y.fill_(math.nan)
        graph.replay()
        eager = kernels.int4_gemm_mma(words, tiled, x, rows=129)
        torch.cuda.synchronize()
        assert torch.equal(y, eager)
