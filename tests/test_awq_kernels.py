"""The AWQ dequantisers: the reference's bits for every shape, clean under observation, and how much each step loads."""

import pytest
import torch

from nanoqwen import simt
from nanoqwen.awq import dequantize_reference
from nanoqwen.kernels import awq
from nanoqwen.kernels.awq import awq_dequantize, awq_dequantize_v1, awq_dequantize_v2, awq_dequantize_v3
from nanoqwen.kernels.launch import Program

KERNELS = [awq_dequantize_v1, awq_dequantize_v2, awq_dequantize_v3, awq_dequantize]
SHAPES = [(32, 8, 32), (64, 264, 64), (128, 136, 128), (96, 8, 32), (896, 128, 128), (256, 1032, 64)]

by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def problem(rows, cols, group):
    """Any words at all: every nibble of weights and zero-points takes every value; scales of both signs."""
    make = torch.Generator().manual_seed(rows * 7919 + cols)
    words = [
        torch.randint(-(2**31), 2**31, (height, cols // 8), generator=make, dtype=torch.int64).int()
        for height in (rows, rows // group)
    ]
    return *words, torch.randn(rows // group, cols, generator=make).half()


def nothing(rows, cols, dtype):
    return torch.full((rows, cols), float("nan"), dtype=dtype)


def same_bits(got, parts, dtype):
    return torch.equal(got.view(torch.int16), dequantize_reference(*parts, dtype).T.contiguous().view(torch.int16))


# Results


@by_dtype
@by_name
def test_every_element_has_the_bits_of_the_reference(kernel, dtype):
    for rows, cols, group in SHAPES:
        parts, out = problem(rows, cols, group), nothing(rows, cols, dtype)
        assert kernel(*parts, out=out) is out
        assert same_bits(out, parts, dtype), (rows, cols, group)


@by_dtype
@by_name
def test_every_difference_times_every_kind_of_scale_is_rounded_like_the_reference(kernel, dtype):
    # Row k of a group holds q = k / 2 in all columns; columns of 16 zero-points; scales that overflow, vanish, tie.
    q = (torch.arange(32, dtype=torch.int32)[:, None] // 2 * 0x11111111).expand(32, 32 * 2).contiguous()
    z = (torch.arange(64, dtype=torch.int32)[None] % 16 * 0x11111111).contiguous()
    ends = [65504.0, -65504.0, 6e-8, -6e-8, 3e-5, 0.0, 1.0009765625, 4094.0]
    scales = torch.tensor(ends).half().repeat(64)[None].contiguous()
    assert same_bits(kernel(q, z, scales, dtype=dtype), (q, z, scales), dtype)


@by_dtype
def test_every_launch_of_the_last_step_gives_the_same_bits(dtype):
    parts = problem(64, 72, 32)
    for rows in awq.ROWS:
        for block in (1, 96, *awq.BLOCKS, 1024):
            out = nothing(64, 72, dtype)
            assert same_bits(awq_dequantize_v3(*parts, out, block=block, rows=rows), parts, dtype), (rows, block)


@by_name
def test_without_out_a_new_tensor_of_the_dtype_comes_back(kernel):
    parts = problem(32, 16, 32)
    for dtype in (torch.float16, torch.bfloat16):
        out = kernel(*parts, dtype=dtype)
        assert out.shape == (32, 16) and out.dtype == dtype and same_bits(out, parts, dtype)
    assert kernel(*parts).dtype == torch.float16


@by_name
def test_slices_are_read_and_written_where_they_lie(kernel):
    q, z, s = problem(128, 64, 32)
    whole = nothing(160, 64, torch.float16)
    kernel(q[32:96], z[1:3], s[1:3], out=whole[32:96])
    assert same_bits(whole[32:96], (q[32:96], z[1:3], s[1:3]), torch.float16)
    assert whole[:32].isnan().all() and whole[96:].isnan().all()


def test_the_product_with_x_is_that_of_a_linear_layer():
    parts, x = problem(128, 64, 32), torch.randn(3, 128, dtype=torch.float64)
    ours = x @ awq_dequantize(*parts).double()
    theirs = torch.nn.functional.linear(x, dequantize_reference(*parts).double())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


# Observed


@by_dtype
@by_name
def test_observed_every_kernel_is_clean_and_gives_the_same_bits(kernel, dtype):
    for rows, cols, group in ((32, 8, 32), (64, 136, 64), (128, 264, 32)):
        parts = problem(rows, cols, group)
        report = simt.observe(kernel, *parts, out=nothing(rows, cols, dtype))
        assert report.clean, str(report)
        assert same_bits(report.result, parts, dtype)


def asked(report, buffer):
    """Loads of one tensor: (by threads, requests of warps, sectors)."""
    lines = [line for line in report.lines if line.how == "load" and line.buffers == (buffer,)]
    return tuple(sum(getattr(line, what) for line in lines) for what in ("lanes", "requests", "sectors"))


def test_a_thread_for_each_element_loads_every_word_eight_times():
    rows, cols, group = 64, 256, 32
    parts, words = problem(rows, cols, group), rows * cols // 8
    one, two = (simt.observe(kernel, *parts) for kernel in (awq_dequantize_v1, awq_dequantize_v2))
    assert asked(one, "qweight") == (8 * words, 8 * words // 32, 8 * words // 32)  # a warp: four words, half a sector
    assert asked(two, "qweight") == (words, words // 32, words // 8)  # a warp: 32 words, four sectors, all of them used
    assert asked(one, "qzeros")[:2] == asked(one, "qweight")[:2] and asked(two, "qzeros")[:2] == (words, words // 32)
    assert one.totals.global_load_requests == 8 * two.totals.global_load_requests
    assert one.totals.global_store_requests == 8 * two.totals.global_store_requests
    assert one.totals.global_store_sectors == two.totals.global_store_sectors == rows * cols * 2 // 32


def test_rows_of_a_group_share_one_loading_of_zero_points_and_scales():
    parts = problem(64, 256, 32)
    for rows in awq.ROWS:
        report = simt.observe(awq_dequantize_v3, *parts, rows=rows)
        threads = 64 * 256 // 8 // rows
        assert report.clean and asked(report, "qweight")[0] == 64 * 256 // 8
        assert asked(report, "qzeros")[0] == asked(report, "scales")[0] == threads


# Wrong calls


def packed(rows, words):
    return torch.zeros(rows, words, dtype=torch.int32)


WRONG = {
    "a list": (dict(qweight=[1]), TypeError, "qweight must be a tensor, got list"),
    "dtype of qweight": (dict(qweight=packed(64, 4).long()), TypeError, "qweight is int64; it must be int32"),
    "dtype of qzeros": (dict(qzeros=packed(2, 4).float()), TypeError, "qzeros is float32; it must be int32"),
    "dtype of scales": (dict(scales=torch.ones(2, 32)), TypeError, "scales is float32; it must be float16"),
    "dtype": (dict(dtype=torch.float32), TypeError, r"dtype is torch.float32; it must be torch.float16 or torch.bf"),
    "dtype of out": (dict(out=torch.ones(64, 32)), TypeError, "dtype is torch.float32; it must be"),
    "dtype and out": (
        dict(out=torch.ones(64, 32).half(), dtype=torch.bfloat16),
        TypeError,
        "out is float16; it must be bfloat16",
    ),
    "device of qweight": (dict(qweight=packed(64, 4).to("meta")), ValueError, "qweight is on meta; kernels run on"),
    "device of qzeros": (dict(qzeros=packed(2, 4).to("meta")), ValueError, "qzeros is on meta; it must be on cpu"),
    "device of scales": (dict(scales=torch.ones(2, 32).half().to("meta")), ValueError, "scales is on meta; it must"),
    "dimensions": (
        dict(qweight=packed(64, 4)[0]),
        ValueError,
        r"qweight has shape \(4,\); it must be \(rows, cols / 8",
    ),
    "no rows": (dict(qweight=packed(0, 4)), ValueError, r"qweight has shape \(0, 4\)"),
    "words of qzeros": (dict(qzeros=packed(2, 5)), ValueError, r"qzeros has shape \(2, 5\); it must be \(rows / g"),
    "a group of 16": (dict(qzeros=packed(4, 4)), ValueError, "qzeros has 4 rows of groups for qweight's 64 rows"),
    "a group that does not divide": (dict(qweight=packed(72, 4)), ValueError, "2 rows of groups for qweight's 72 rows"),
    "rows of scales": (
        dict(scales=torch.ones(1, 32).half()),
        ValueError,
        r"scales has shape \(1, 32\); it must be \(2",
    ),
    "columns of scales": (dict(scales=torch.ones(2, 4).half()), ValueError, r"scales has shape \(2, 4\); it must be"),
    "strides": (dict(qweight=packed(4, 64).T), ValueError, r"qweight is not contiguous .*qweight.contiguous\("),
    "shape of out": (
        dict(out=torch.ones(32, 64).half()),
        ValueError,
        r"out has shape \(32, 64\); it must be \(64, 32\)",
    ),
    "strides of out": (dict(out=torch.ones(32, 64).half().T), ValueError, "out is not contiguous"),
}


@pytest.fixture
def no_launch(monkeypatch):
    def launched(*args, **kwargs):
        raise AssertionError("a wrong call reached the launch")

    monkeypatch.setattr(Program, "launch", launched)


def right():
    return dict(qweight=packed(64, 4), qzeros=packed(2, 4), scales=torch.ones(2, 32).half())


@by_name
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named_before_the_launch(kernel, wrong, no_launch):
    arguments, kind, words = WRONG[wrong]
    with pytest.raises(kind, match=words):
        kernel(**right() | arguments)


@by_name
def test_an_output_over_an_input_is_refused(kernel, no_launch):
    memory = torch.zeros(64 * 32 * 2, dtype=torch.uint8)
    out = memory.view(torch.float16).view(64, 32)
    inside = {
        "qweight": memory[:1024].view(torch.int32).view(64, 4),
        "qzeros": memory[-32:].view(torch.int32).view(2, 4),
        "scales": memory[64:192].view(torch.float16).view(2, 32),
    }
    for name, tensor in inside.items():
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            kernel(**right() | {name: tensor}, out=out)


def test_sixteen_byte_loads_want_sixteen_byte_addresses(no_launch):
    scales, out = torch.ones(65).half()[1:].view(2, 32), torch.ones(64 * 32 + 1).half()[1:].view(64, 32)
    for kernel in (awq_dequantize_v2, awq_dequantize_v3, awq_dequantize):
        with pytest.raises(ValueError, match=r"scales starts at an address .* pass scales.clone\(\)"):
            kernel(**right() | {"scales": scales})
        with pytest.raises(ValueError, match=r"out starts at an address .* 16 bytes"):
            kernel(**right(), out=out)
    for arguments in (right() | {"scales": scales}, right() | {"out": out}):
        with pytest.raises(AssertionError, match="reached the launch"):
            awq_dequantize_v1(**arguments)  # loads single elements


def test_a_launch_that_has_no_instance_is_refused(no_launch):
    for rows in (0, 3, 16):
        with pytest.raises(ValueError, match=rf"rows is {rows}; it must be one of 1, 2, 4, 8"):
            awq_dequantize_v3(**right(), rows=rows)
    for block in (0, -1, 1025, 64.0):
        with pytest.raises(ValueError, match=r"block is .*; it must be 1 to 1024 threads"):
            awq_dequantize_v3(**right(), block=block)


def test_a_machine_without_a_clock_takes_the_default_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(awq.TUNER, "_path", tmp_path / "autotune.json")
    parts = problem(64, 32, 32)
    assert same_bits(awq_dequantize(*parts), parts, torch.float16)
    assert not awq.TUNER._known and list(tmp_path.iterdir()) == []
    assert awq.TUNER.default == {"block": 128, "rows": 4} and len(awq.TUNER.candidates) == len(awq.BLOCKS) * 4
