"""The SIMT machine runs CUDA source as a GPU does: same results, same counts, a clear word where it stops."""

import ctypes
import re
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoqwen import simt

HERE = Path(__file__).parent
GEMV = (HERE / "simt_gemv.cu").read_text()
NAIVE = {
    torch.float32: "gemv_naive<float>",
    torch.float16: "gemv_naive<half>",
    torch.bfloat16: "gemv_naive<nv_bfloat16>",
}


@pytest.fixture(scope="module")
def gemv():
    return simt.compile(HERE / "simt_gemv.cu", [*NAIVE.values(), "gemv_warp"])


def problem(rows, cols, dtype=torch.float32):
    make = torch.Generator().manual_seed(rows * 7919 + cols)
    w, x = (torch.randn(s, generator=make).to(dtype) for s in ((rows, cols), (cols,)))
    return w, x, torch.full((rows,), float("nan")), w.double() @ x.double()


@pytest.mark.parametrize("rows,cols", [(1, 128), (7, 384), (129, 256)])
@pytest.mark.parametrize("dtype", NAIVE)
def test_a_gemv_is_right_and_both_builds_agree_bit_for_bit(gemv, dtype, rows, cols):
    w, x, y, expected = problem(rows, cols, dtype)
    launches = [(NAIVE[dtype], (rows + 31) // 32, 32)]
    if dtype == torch.float32:
        launches.append(("gemv_warp", (rows + 3) // 4, 128))
    for kernel, grid, block in launches:
        gemv[kernel].launch(grid, block, (w, x, y, rows, cols))
        assert (y - expected).norm() <= 1e-5 * expected.norm()
        observed = torch.full_like(y, float("nan"))
        report = simt.observe(gemv[kernel].launch, grid, block, (w, x, observed, rows, cols), outputs=["y"])
        assert report.clean, str(report)
        assert torch.equal(y, observed)


def test_counts_equal_those_that_ncu_measured_on_an_h200(gemv):
    w, x, y, _ = problem(256, 256)
    naive = simt.observe(gemv["gemv_naive<float>"].launch, 2, 128, (w, x, y, 256, 256)).totals
    assert (naive.global_load_requests, naive.global_load_sectors) == (4096, 67584)
    warp = simt.observe(gemv["gemv_warp"].launch, 32, 256, (w, x, y, 256, 256)).totals
    assert (warp.global_load_requests, warp.global_load_sectors) == (1024, 16384)


def test_lines_tell_the_tensors_apart_and_pictures_keep_the_lanes(gemv):
    w, x, y, _ = problem(256, 256)
    report = simt.observe(gemv["gemv_naive<float>"].launch, 2, 128, (w, x, y, 256, 256))
    loads = {entry.buffers: entry for entry in report.lines if entry.how == "load"}
    assert loads["w",].per_request == 32 and loads["x",].per_request == 1
    line = next(i for i, row in enumerate(GEMV.splitlines(), 1) if "to_float(w[row" in row)
    assert loads["w",].line == line and "to_float(w[row" in loads["w",].source
    picture = loads["w",].pictures[0]
    assert picture.offsets[5] - picture.offsets[4] == 1024 and len(picture.sectors) == 32
    assert "simulated" in report._repr_html_() and "simulated" in str(report)


def test_the_plot_is_drawn_and_says_that_it_is_simulated(gemv):
    pytest.importorskip("matplotlib").use("Agg")
    w, x, y, _ = problem(64, 128)
    report = simt.observe(gemv["gemv_warp"].launch, 8, 256, (w, x, y, 64, 128))
    figure = report.plot()
    assert figure.get_suptitle().startswith("simulated")
    with pytest.raises(ValueError, match="line 1"):
        report.plot(line=1)


def test_observe_runs_any_function_that_launches(gemv):
    def product(w, x):
        y = torch.empty(w.shape[0])
        gemv["gemv_warp"].launch(w.shape[0], 32, (w, x, y, *w.shape), outputs=["y"])
        return y

    w, x, _, expected = problem(8, 128)
    report = simt.observe(product, w, x)
    torch.testing.assert_close(report.result.double(), expected, rtol=1e-5, atol=1e-5)
    assert report.totals.launches == 1 and report.clean
    with simt.observing(seed=5) as both:
        product(w, x)
        product(w, x)
    assert both.totals.launches == 2 and both.totals.global_load_requests == 2 * report.totals.global_load_requests


WORDS = (HERE / "simt_words.cu").read_text()
PLAIN_NAMES = re.findall(r'^extern "C" __global__ void (\w+)', WORDS, re.M)
NAMES = [
    *PLAIN_NAMES,
    *("multiply<half>", "multiply<nv_bfloat16>", "ring<true>", "ring<false>"),
    *(f"pipeline<{fault}>" for fault in range(4)),
    *("last_block_sums<true>", "last_block_sums<false>", "banks<float>", "banks<float2>", "banks<float4>"),
]


@pytest.fixture(scope="module")
def words():
    return simt.compile(HERE / "simt_words.cu", NAMES)


def line_of(text: str) -> int:
    return next(i for i, row in enumerate(WORDS.splitlines(), 1) if text in row)


def both(kernel, grid, block, args, **options):
    """Runs the fast build, then the observed one, on the same arguments; the observed one must be clean."""
    kernel.launch(grid, block, args, **options)
    fast = [a.clone() for a in args if isinstance(a, torch.Tensor)]
    report = simt.observe(kernel.launch, grid, block, args, **options)
    assert report.clean, str(report)
    for a, b in zip(fast, (a for a in args if isinstance(a, torch.Tensor)), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_shuffles_and_votes(words):
    v = np.random.default_rng(0).integers(-1000, 1000, 32, dtype=np.int32)
    out = np.zeros((32, 16), np.uint32)
    words["warp_words"].launch(1, 32, (v, out))
    u, lane = v.astype(np.uint32), np.arange(32)
    ballot = sum(1 << i for i in range(32) if v[i] > 0)
    match = [sum(1 << j for j in range(32) if v[i] & 3 == v[j] & 3) for i in range(32)]
    assert (out[:, 0] == u[(lane & ~7) + 3]).all()
    assert (out[:, 1] == u[np.where(lane % 16 < 2, lane, lane - 2)]).all()
    assert (out[:, 2] == u[np.where(lane + 5 > 31, lane, (lane + 5) % 32)]).all()
    assert (out[:, 3] == u[lane ^ 9]).all()
    assert (out[:, 4] == ballot).all()
    assert (out[:, 5] == 1).all()
    assert (out[:, 6] == np.array(match, np.uint32)).all()
    assert (out[:, 7] == np.uint32(v.sum() & 0xFFFFFFFF)).all()
    assert (out[:, 8] == np.uint32(int(v.min()) & 0xFFFFFFFF)).all()
    assert (out[:, 9] == u.max()).all()
    assert (out[:, 10] == 0xFFFFFFFF).all()
    assert (out[:, 11] == u[np.where(lane < 16, lane ^ 1, lane ^ 2)]).all()
    assert (out[:, 12] == u[lane ^ 1]).all()
    positive = v[lane ^ 1] >= 0
    assert (out[positive, 13] == u[lane ^ 1][positive]).all()
    assert (out[:, 14] == out[:, 7]).all()
    assert (out[:, 15] == (v > 0).sum()).all()


def test_bit_operations(words):
    data = np.random.default_rng(1).integers(0, 2**32, (64, 3), dtype=np.uint32)
    out = np.zeros((64, 12), np.uint32)
    words["bit_words"].launch(1, 64, (data, out))
    mask = 0xFFFFFFFF
    for (a, b, c), got in zip(data.tolist(), out.tolist(), strict=True):
        pair = b << 32 | a
        signed = [x - (x >> 31 << 32) for x in (a, b, c)]
        nibbles = [(c >> 4 * i) & 7 for i in range(4)]
        dot = sum(
            np.int8(np.uint8(a >> 8 * i & 255)).item() * np.int8(np.uint8(b >> 8 * i & 255)).item() for i in range(4)
        )
        assert got[0] == sum((pair >> 8 * n & 255) << 8 * i for i, n in enumerate(nibbles))
        assert got[1] == (pair << (c & 31)) >> 32 & mask
        assert got[2] == pair >> (c & 31) & mask
        assert got[3] == (signed[2] + dot) & mask
        assert got[4] == (c + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4))) & mask
        assert got[7] == int(f"{a:032b}"[::-1], 2)
        assert got[8] == a * b >> 32
        assert got[9] == min(a, b) ^ (max(signed[0], signed[1]) & mask)
        assert got[10] == (b & 0xFFFF) << 16 | a & 0xFFFF
        assert got[11] == a
        want = 0
        for bit in range(32):  # the truth table itself
            index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
            want |= (0xE2 >> index & 1) << bit
        assert got[5] == want


@pytest.fixture(scope="module", params=["instruction", "portable"])
def conversions(request):
    defines = {"SIMT_PORTABLE_HALF": "1"} if request.param == "portable" else {}
    return simt.compile(HERE / "simt_words.cu", ["halves", "rounded"], defines=defines)


def test_every_half_and_bfloat16_converts_as_in_torch(conversions):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    as_half, as_bf16 = torch.empty(65536), torch.empty(65536)
    back = torch.zeros(65536, 2, dtype=torch.int16)
    conversions["halves"].launch(256, 256, (bits, as_half, as_bf16, back))
    for kind, got, column in ((torch.float16, as_half, 0), (torch.bfloat16, as_bf16, 1)):
        exact = bits.view(kind).float()
        assert torch.equal(torch.isnan(exact), torch.isnan(got))
        assert torch.equal(exact[~exact.isnan()], got[~exact.isnan()])
        assert torch.equal(back[~exact.isnan(), column], bits[~exact.isnan()])
        assert back[exact.isnan(), column].view(kind).isnan().all()


def test_rounding_to_short_floats_is_to_nearest_even(conversions):
    make = torch.Generator().manual_seed(2)
    pattern = (
        torch.randint(-(2**31), 2**31, (40000,), generator=make, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    # Numbers at and beside the middle between two halves, subnormal ones included.
    middle = torch.arange(0, 65536, 7, dtype=torch.int32).to(torch.int16).view(torch.float16).float() * (1 + 2**-11)
    x = torch.cat([pattern, middle, torch.nextafter(middle, torch.zeros(1)), torch.linspace(0, 2**-23, 4001)])
    halves, bf16s = (torch.zeros(len(x), dtype=torch.int16) for _ in range(2))
    conversions["rounded"].launch((len(x) + 255) // 256, 256, (x, halves, bf16s, len(x)))
    ok = ~x.isnan()
    assert torch.equal(halves[ok], x[ok].half().view(torch.int16))
    assert torch.equal(bf16s[ok], x[ok].bfloat16().view(torch.int16))
    assert halves[~ok].view(torch.float16).isnan().all() and bf16s[~ok].view(torch.bfloat16).isnan().all()


def test_a_fused_multiply_add_of_halves_rounds_once(words):
    make = np.random.default_rng(3)
    a, b, c = (make.integers(0, 65536, 6000, dtype=np.uint16).view(np.float16) for _ in range(3))
    # And sums whose exact value lies a hair off the middle of two halves: rounding twice would go wrong.
    a[:3], b[:3], c[:3] = [1 + 2**-10, 2049 / 2048, 3], [1 + 2**-10, 1, 2**-11], [2**-24, 2**-24, 1]
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    out = np.zeros_like(a)
    words["half_fma"].launch(12, 256, (a, b, c, out, 3000))
    for x, y, z, got in zip(a[finite], b[finite], c[finite], out[finite], strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert nearest_half(exact) == abs(float(got)) * (-1 if exact < 0 else 1), (x, y, z)


def nearest_half(exact: Fraction) -> float:
    magnitude = abs(exact)
    if not magnitude:
        return 0.0
    power = max(-14, magnitude.numerator.bit_length() - magnitude.denominator.bit_length())
    if power > -14 and Fraction(2) ** power > magnitude:
        power -= 1
    step = Fraction(2) ** (max(power, -14) - 10)
    value = round(magnitude / step) * step  # Python rounds a tie to even
    return (-1 if exact < 0 else 1) * (float(value) if value < 65520 else float("inf"))


def test_atomics_add_up_over_all_blocks(words):
    i, f = torch.tensor([0, 0, -5000], dtype=torch.int32), torch.zeros(1)
    u, h = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.float16)
    words["atomics"].launch(5, 64, (i, u, f, h))
    assert i.tolist() == [-320, -63, -937]
    assert u.tolist() == [320, -1, 7, 9]
    assert f.item() == 160 and h.tolist() == [320, 640]


@pytest.mark.parametrize("dtype,name", [(torch.float16, "half"), (torch.bfloat16, "nv_bfloat16")])
def test_mma_and_ldmatrix_follow_the_fragment_layout(words, dtype, name):
    make = torch.Generator().manual_seed(4)
    a, b = (torch.randn(s, generator=make).to(dtype) for s in ((16, 16), (16, 8)))
    d = torch.full((16, 8), float("nan"))
    both(words[f"multiply<{name}>"], 1, 32, (a, b, d))
    torch.testing.assert_close(d.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)


def test_transposed_ldmatrix(words):
    data, out = torch.arange(256, dtype=torch.int16), torch.zeros(256, dtype=torch.int16)
    both(words["transposed"], 1, 32, (data, out))
    assert torch.equal(out.view(4, 8, 8), data.view(4, 8, 8).transpose(1, 2))


def test_cp_async_lands_at_its_wait_and_not_before(words):
    data, out = torch.randn(5, 128), torch.full((128,), float("nan"))
    both(words["ring<true>"], 1, 32, (data, out, 5))
    swapped = data.sum(0).view(16, 2, 4).flip(1).reshape(-1)
    torch.testing.assert_close(out, swapped)
    words["ring<false>"].launch(1, 32, (data, out, 5))
    assert out.isnan().all()  # wrong every time, not once in a thousand
    report = simt.observe(words["ring<false>"].launch, 1, 32, (data, out, 5))
    assert any(f.what == "asynchronous copy still in flight" for f in report.findings)


def test_bulk_copies_complete_an_mbarrier_by_bytes(words):
    data, out = torch.randn(7, 64), torch.full((64,), float("nan"))
    both(words["pipeline<0>"], 1, 96, (data, out, 7), shared_bytes=512)
    torch.testing.assert_close(out, data.sum(0).roll(-1), rtol=1e-5, atol=1e-5)
    report = simt.observe(words["pipeline<0>"].launch, 1, 96, (data, out, 7), shared_bytes=512)
    assert report.totals.async_copies == 7 and report.totals.async_sectors == 7 * 64 * 4 // 32


def test_a_pipeline_that_does_not_wait_for_its_data_is_wrong_every_time(words):
    data, out = torch.randn(2, 64), torch.zeros(64)
    words["pipeline<1>"].launch(1, 96, (data, out, 2), shared_bytes=512)
    assert out.isnan().all()
    report = simt.observe(words["pipeline<1>"].launch, 1, 96, (data, out, 2), shared_bytes=512)
    assert any(f.kind == "racecheck" and f.line == line_of("sum += stages[s") for f in report.findings)


def test_a_pipeline_that_overruns_its_consumers_is_caught(words):
    data, out = torch.randn(7, 64), torch.zeros(64)
    report = simt.observe(words["pipeline<2>"].launch, 1, 96, (data, out, 7), shared_bytes=512)
    assert [(f.kind, f.what) for f in report.findings] == [("synccheck", "too many arrivals")]
    assert report.findings[0].line == line_of("mbarrier_arrive_expect_bytes(&full")


def test_an_mbarrier_that_is_told_too_few_bytes_is_a_deadlock_with_the_numbers(words):
    data, out = torch.randn(7, 64), torch.zeros(64)
    with pytest.raises(simt.LaunchError, match=r"lacks 0 arrivals and -\d+ bytes") as caught:
        words["pipeline<3>"].launch(1, 96, (data, out, 7), shared_bytes=512)
    assert any(
        f"simt_words.cu:{line_of('mbarrier_wait(&full')}" in wait for f in caught.value.findings for wait in f.waits
    )


def test_volatile_silences_racecheck_and_not_initcheck(tmp_path):
    text = """__global__ void k(const float* x, float* y, int* n) {{
        __shared__ {} float s[64];
        s[threadIdx.x] = x[threadIdx.x];
        y[threadIdx.x] = s[63 - threadIdx.x];
    }}"""
    for word, kinds in (("", {"racecheck", "initcheck"}), ("volatile", {"initcheck"})):
        module = simt.compile(text.format(word), ["k"])
        report = simt.observe(module["k"].launch, 1, 64, (torch.rand(64), torch.zeros(64), None))
        assert {finding.kind for finding in report.findings} == kinds


def test_named_barriers_order_memory(words):
    out = torch.full((64,), float("nan"))
    both(words["handover"], 1, 128, (out,))
    assert torch.equal(out, torch.arange(63, -1, -1.0))


def test_fences_and_atomics_order_blocks_and_without_them_it_is_a_race(words):
    data, total = torch.randn(4, 32), torch.zeros(1)

    def args():
        return data, torch.zeros(4), torch.zeros(1, dtype=torch.int32), total

    report = simt.observe(words["last_block_sums<true>"].launch, 4, 32, args())
    torch.testing.assert_close(total[0], data.sum())
    assert report.clean, str(report)
    report = simt.observe(words["last_block_sums<false>"].launch, 4, 32, args())
    assert {f.kind for f in report.findings} == {"racecheck"}


@pytest.mark.parametrize("observed", [False, True])
def test_a_cooperative_launch_lets_blocks_wait_for_each_other(words, observed):
    data, out, count = torch.zeros(12), torch.zeros(12), torch.zeros(1, dtype=torch.int32)
    with simt.observing() if observed else pytest.MonkeyPatch.context() as report:
        words["grid_barrier"].launch(12, 64, (data, out, count), cooperative=True)
    expected = torch.arange(2, 14.0)
    expected[-1] = 1
    assert torch.equal(out, expected + 100 * torch.arange(1, 13.0))
    assert not observed or report.clean, str(report)


def test_a_grid_barrier_without_a_cooperative_launch_is_reported_and_does_not_hang(words):
    data, out, count = torch.zeros(12), torch.zeros(12), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(simt.LaunchError, match="cooperative"):
        words["grid_barrier"].launch(12, 64, (data, out, count), workers=1)


@pytest.mark.parametrize(
    "kind,stride,wavefronts",
    [
        ("float", 1, 1), ("float", 2, 2), ("float", 32, 32), ("float", 33, 1), ("float", 0, 1),
        ("float2", 1, 2), ("float2", 2, 4), ("float4", 1, 4), ("float4", 2, 8), ("float4", 8, 32),
    ],
)  # fmt: skip
def test_bank_conflicts_are_counted_in_wavefronts(words, kind, stride, wavefronts):
    out = torch.zeros(32)
    report = simt.observe(words[f"banks<{kind}>"].launch, 1, 32, (out, stride), shared_bytes=8192)
    load = next(e for e in report.lines if e.space == "shared" and e.how == "load")
    assert (load.requests, load.wavefronts) == (1, wavefronts)


class Sizes(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_int), ("cols", ctypes.c_int), ("scale", ctypes.c_float)]


def test_structs_halves_and_bools_are_passed_by_value(words):
    out = torch.zeros(4)
    both(words["by_value"], 1, 1, (Sizes(3, 5, 0.5), out, np.float16(1.5), True, -(2**40)))
    assert out.tolist() == [7.5, 1.5, 1.0, float(-(2**40))]


def test_lanes_that_leave_a_loop_early_share_the_requests_of_those_that_stay(words):
    lengths = np.random.default_rng(5).integers(0, 9, (2, 32), dtype=np.int32)
    data, out = np.random.default_rng(6).random((9, 32), dtype=np.float32), np.zeros(32, np.float32)
    report = simt.observe(words["ragged"].launch, 1, 32, (lengths, data, out))
    load = next(e for e in report.lines if e.buffers == ("in",))
    # In each pass the warp goes on as long as its longest lane; a request holds the lanes still there.
    assert load.requests == lengths.max(axis=1).sum() and load.lanes == lengths.sum()
    assert report.clean, str(report)


# ---- what the observers say ----


def test_an_output_that_is_not_wholly_written_is_reported(words):
    report = simt.observe(words["half_written"].launch, 1, 32, (torch.zeros(32),), outputs=["out"])
    assert [f.what for f in report.findings] == ["output not written"]
    assert "64 of the 128 bytes of `out`" in report.findings[0].message


def test_reading_an_output_before_it_is_written_is_reported(words):
    report = simt.observe(words["reads_output"].launch, 1, 32, (torch.zeros(32),), outputs=[0])
    assert [(f.kind, f.line) for f in report.findings] == [("initcheck", line_of("void reads_output"))]


def test_a_barrier_reached_from_two_places_is_reported(words):
    report = simt.observe(words["two_places"].launch, 1, 64, (torch.zeros(64),))
    (finding,) = report.findings
    assert finding.kind == "synccheck" and {finding.line, finding.other_line} == {
        line_of("// here"),
        line_of("// or there"),
    }


def test_a_lane_outside_its_own_mask_is_refused_in_both_builds(words):
    with pytest.raises(simt.LaunchError, match=r"lane 16 .* does not name it"):
        words["not_in_mask"].launch(1, 32, (torch.zeros(32),))
    report = simt.observe(words["not_in_mask"].launch, 1, 32, (torch.zeros(32),))
    assert report.stopped and report.findings[0].kind == "synccheck"


def test_a_deadlock_says_who_waits_where(words):
    with pytest.raises(simt.LaunchError) as caught:
        words["divergent_deadlock"].launch(1, 64, (torch.zeros(64),))
    (finding,) = caught.value.findings
    assert finding.kind == "deadlock" and len(finding.waits) == 2
    line = line_of("void divergent_deadlock")
    assert f"simt_words.cu:{line + 1}: 32 threads" in finding.waits[0] and "32 of 64" in finding.waits[0]
    assert f"simt_words.cu:{line + 2}: 32 threads" in finding.waits[1] and "named barrier 3" in finding.waits[1]


@pytest.mark.parametrize("observed", [False, True])
def test_a_loop_without_end_is_stopped(words, monkeypatch, observed):
    monkeypatch.setenv("NANOQWEN_SIMT_TIME_LIMIT", "0.5")
    out = torch.zeros(1)
    if observed:
        report = simt.observe(words["endless"].launch, 1, 1, (out,))
        assert report.stopped and report.findings[0].line == line_of("while (v[0]")
    else:
        with pytest.raises(simt.LaunchError, match="loop that never ends") as caught:
            words["endless"].launch(1, 1, (out,))
        assert caught.value.findings[0].line in (line_of("while (v[0]"), line_of("while (v[0]") + 1)


def test_a_null_pointer_is_an_error_and_not_the_end_of_python(words):
    with pytest.raises(simt.LaunchError, match="memory that is not there") as caught:
        words["writes_through"].launch(1, 1, (None,))
    assert caught.value.findings[0].line == line_of("void writes_through")
    report = simt.observe(words["writes_through"].launch, 1, 1, (None,))
    assert report.findings[0].kind == "memcheck" and "null pointer" in report.findings[0].message


def test_a_failed_assertion_is_an_error_and_not_the_end_of_python(words):
    with pytest.raises(simt.LaunchError, match="assertion failed: in") as caught:
        words["asserts"].launch(1, 32, (torch.ones(32),))
    assert caught.value.findings[0].line == line_of("assert(in[")


def test_too_much_local_memory_is_an_error_and_not_the_end_of_python(words):
    with pytest.raises(simt.LaunchError, match="local memory"):
        words["deep"].launch(1, 1, (torch.zeros(1), 65536))


def test_shared_memory_past_the_launch_size_is_reported(words):
    for index, clean in ((15, True), (16, False)):
        report = simt.observe(words["past_shared"].launch, 1, 1, (torch.zeros(1), index), shared_bytes=64)
        assert report.clean == clean, str(report)


def test_memory_next_to_a_view_is_out_of_bounds(words):
    whole = torch.zeros(64)
    report = simt.observe(words["writes_through"].launch, 1, 32, (whole[16:40],))
    assert report.findings[0].kind == "memcheck" and "`out` (96 bytes)" in report.findings[0].message
    assert whole.sum() == 24 and whole[40:].sum() == 0


def test_the_order_of_turns_does_not_change_a_correct_kernel(words):
    data = torch.randn(7, 64)
    for seed in (1, 2, 3):
        out = torch.full((64,), float("nan"))
        with simt.observing(seed=seed) as report:
            words["pipeline<0>"].launch(1, 96, (data, out, 7), shared_bytes=512)
        assert report.clean, str(report)
        torch.testing.assert_close(out, data.sum(0).roll(-1), rtol=1e-5, atol=1e-5)


# ---- launches that a GPU would refuse ----

Y = torch.zeros(32)


@pytest.mark.parametrize(
    "grid,block,args,options,error,words_in_it",
    [
        (0, 32, (Y,), {}, ValueError, "grid.x is 0"),
        (1, 0, (Y,), {}, ValueError, "block.x is 0"),
        (1, 1025, (Y,), {}, ValueError, "1025.*1024"),
        (1, (32, 33), (Y,), {}, ValueError, "1056 threads.*1024"),
        (1, (1, 1, 65), (Y,), {}, ValueError, "block.z is 65.*64"),
        ((1, 65536), 32, (Y,), {}, ValueError, "grid.y is 65536.*65535"),
        ((1, 1, 65536), 32, (Y,), {}, ValueError, "grid.z is 65536.*65535"),
        (1, 32, (Y,), {"shared_bytes": 227 * 1024 + 1}, ValueError, "232449.*232448"),
        (1, 32, (Y,), {"shared_bytes": 65537, "shared_limit": 65536}, ValueError, "65537.*65536"),
        (1, 32, (Y,), {"shared_bytes": -1}, ValueError, "-1"),
        (1, 32, (), {}, TypeError, r"takes 1 arguments \(out\), got 0"),
        (1, 32, (Y, 1), {}, TypeError, "takes 1 arguments"),
        (1, 32, (3.0,), {}, TypeError, r"argument 0 \(out\) .* must be a tensor"),
        (1, 32, (torch.zeros(4, 4).T[:, :2],), {}, ValueError, "not contiguous"),
        (1.5, 32, (Y,), {}, TypeError, "grid"),
        (1, (1, 1, 1, 1), (Y,), {}, TypeError, "block"),
    ],
)
def test_a_launch_that_a_gpu_would_refuse_is_refused(words, grid, block, args, options, error, words_in_it):
    with pytest.raises(error, match=words_in_it):
        words["writes_through"].launch(grid, block, args, **options)


@pytest.mark.parametrize(
    "value,error",
    [
        (2**31, ValueError),
        *((v, TypeError) for v in (2.5, True, "3", None, np.int64(3), np.uint32(3))),
        *((v, TypeError) for v in (ctypes.c_longlong(3), ctypes.c_uint(3))),
    ],
)
def test_a_scalar_must_have_the_kernels_type(words, value, error):
    with pytest.raises(error, match=r"argument 1 \(n\) of deep .*32-bit signed integer"):
        words["deep"].launch(1, 1, (Y, value))


def test_an_unknown_kernel_name_is_a_key_error(words):
    with pytest.raises(KeyError, match="no kernel 'gemm'"):
        words["gemm"]


def test_threads_of_python_may_launch_at_the_same_time(gemv):
    w, x, _, expected = problem(64, 512)
    wrong = []

    def work(observed):
        for _ in range(5):
            y = torch.full((64,), float("nan"))
            if observed:
                assert simt.observe(gemv["gemv_warp"].launch, 8, 256, (w, x, y, 64, 512)).clean
            else:
                gemv["gemv_warp"].launch(8, 256, (w, x, y, 64, 512))
            if not torch.allclose(y.double(), expected, atol=1e-3):
                wrong.append(y)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_empty_tensors_and_numpy_arrays_are_arguments_too(gemv):
    y = np.full(1, np.nan, np.float32)
    empty = torch.empty(0)
    for launch in (gemv["gemv_warp"].launch, lambda *a: simt.observe(gemv["gemv_warp"].launch, *a)):
        launch(1, 32, (empty, empty, y, 1, 0))
        assert y[0] == 0
