"""Every kernel is right on every tail, refuses what it cannot take before anything runs, and follows its source."""

import ctypes
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoqwen import kernels, simt
from nanoqwen.kernels import launch
from nanoqwen.kernels.gemv import C_NAMES, LANES, LOADS, choose
from nanoqwen.kernels.launch import Program

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LADDER = [getattr(kernels, name) for name in kernels.__all__ if name.startswith("gemv")]
WIDE = [kernel for kernel in LADDER if kernel not in (kernels.gemv_naive, kernels.gemv_coalesced)]
# ‖y − ref‖ / ‖ref‖ against float64: fp32 sums, one rounding at the end.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 4e-4}
MODEL_COLUMNS = (896, 1536, 3584, 4864, 8960, 18944)

by_name = pytest.mark.parametrize("kernel", LADDER, ids=lambda kernel: kernel.__name__)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def problem(rows, cols, dtype):
    """w, x, an output full of NaN, and the product in float64."""
    make = torch.Generator().manual_seed(rows * 7919 + cols)
    w, x = (torch.randn(size, generator=make).to(dtype) for size in ((rows, cols), (cols,)))
    return w, x, torch.full((rows,), float("nan"), dtype=dtype), w.double() @ x.double()


def error(y, reference):
    value = ((y.double() - reference).norm() / reference.norm()).item()
    return value if math.isfinite(value) else math.inf


# Results


@by_dtype
@by_name
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_every_row_of_every_tail_is_right(kernel, dtype, rows):
    for cols in (8, 120, 264, 1048):  # fewer packs than lanes, and last rounds that are partly idle
        w, x, y, reference = problem(rows, cols, dtype)
        assert kernel(w, x, out=y) is y
        assert error(y, reference) < TOLERANCE[dtype], cols


@by_dtype
@by_name
def test_the_columns_of_every_model_are_right(kernel, dtype):
    for cols in MODEL_COLUMNS:
        w, x, y, reference = problem(9, cols, dtype)
        kernel(w, x, out=y)
        assert error(y, reference) < TOLERANCE[dtype], cols


@pytest.mark.parametrize("kernel", [kernels.gemv_naive, kernels.gemv_coalesced], ids=lambda kernel: kernel.__name__)
def test_kernels_that_load_single_elements_take_any_columns(kernel):
    for rows, cols in ((1, 1), (5, 3), (33, 97)):
        w, x, y, reference = problem(rows, cols, torch.float32)
        assert error(kernel(w, x, out=y), reference) < TOLERANCE[torch.float32]
        odd = torch.cat([torch.randn(1), w.flatten()])[1:].view(rows, cols)  # starts 4 bytes into its storage
        assert torch.equal(kernel(odd, x), y)


@by_dtype
def test_every_instance_of_the_last_step_is_right(dtype):
    program = Program(Path("gemv.cu"), {n: "pppii" for n in instances(dtype)})
    for name, lanes in instances(dtype).items():
        w, x, y, reference = problem(13, 1048, dtype)
        program.launch(name, w.device, -(-13 // (128 // lanes)), 128, (w, x, y, 13, 1048))
        assert error(y, reference) < TOLERANCE[dtype], name


def instances(dtype):
    return {f"gemv<{C_NAMES[dtype]}, {lanes}, {loads}>": lanes for lanes in LANES for loads in LOADS}


def test_a_sum_beyond_half_s_range_on_the_way_is_finite():
    w, x = torch.full((4, 256), 200.0, dtype=torch.float16), torch.full((256,), 200.0, dtype=torch.float16)
    w[:, 128:] *= -1
    for kernel in LADDER:
        assert torch.equal(kernel(w, x), torch.zeros(4, dtype=torch.float16)), kernel.__name__


def test_without_out_a_new_tensor_comes_back():
    w, x, _, reference = problem(7, 64, torch.bfloat16)
    y = kernels.gemv(w, x)
    assert y.shape == (7,) and y.dtype == torch.bfloat16 and error(y, reference) < TOLERANCE[torch.bfloat16]


def test_a_slice_that_is_contiguous_and_aligned_is_taken_as_it_lies():
    w, x, _, reference = problem(32, 64, torch.float32)
    for kernel in LADDER:
        y = torch.full((40,), float("nan"))
        kernel(w[8:24], x, out=y[4:20])
        assert error(y[4:20], reference[8:24]) < TOLERANCE[torch.float32]
        assert y[:4].isnan().all() and y[20:].isnan().all()


@pytest.mark.parametrize("block", [1, 32, 96, 1024])
def test_the_naive_kernel_takes_any_block(block):
    w, x, y, reference = problem(70, 33, torch.float32)
    assert error(kernels.gemv_naive(w, x, out=y, block=block), reference) < TOLERANCE[torch.float32]


# Observed


@by_dtype
@by_name
def test_observed_every_kernel_is_clean_and_gives_the_same_bits(kernel, dtype):
    for rows, cols in ((7, 264), (33, 896)):
        w, x, y, _ = problem(rows, cols, dtype)
        fast = kernel(w, x)
        report = simt.observe(kernel, w, x, out=y)
        assert report.clean, str(report)
        assert torch.equal(fast, y)


def test_each_step_of_the_ladder_asks_for_less_or_the_same():
    w, x, _, _ = problem(64, 1024, torch.bfloat16)
    totals = {kernel.__name__: simt.observe(kernel, w, x).totals for kernel in LADDER}
    naive, coalesced, vectorized = (totals[f"gemv_{n}"] for n in ("naive", "coalesced", "vectorized"))
    assert naive.sectors_per_load > 16 and coalesced.sectors_per_load == 2 and vectorized.sectors_per_load == 16
    assert vectorized.global_load_requests * 8 == coalesced.global_load_requests
    assert totals["gemv_unrolled"].global_load_requests == vectorized.global_load_requests
    # Two rows share each pack of x: three loads where there were four.
    assert totals["gemv_rows"].global_load_requests * 4 == vectorized.global_load_requests * 3


# Wrong calls


WRONG = {
    "a list": (lambda w, x: ([1.0], x, None), TypeError, "w must be a tensor, got list"),
    "dtype of w": (lambda w, x: (w.double(), x, None), TypeError, "w is float64; it must be float32 or"),
    "dtype of x": (lambda w, x: (w, x.half(), None), TypeError, "x is float16; it must be float32"),
    "dtype of out": (lambda w, x: (w, x, torch.empty(6).half()), TypeError, "out is float16; it must be float32"),
    "device of w": (lambda w, x: (w.to("meta"), x, None), ValueError, "w is on meta; kernels run on cuda and cpu"),
    "device of x": (lambda w, x: (w, x.to("meta"), None), ValueError, r"x is on meta; it must be on cpu: use x.to\('"),
    "device of out": (lambda w, x: (w, x, torch.empty(6, device="meta")), ValueError, "out is on meta; it must be on"),
    "dimensions of w": (lambda w, x: (w[0], x, None), ValueError, r"w has shape \(64,\); it must be \(rows, cols\)"),
    "no rows": (lambda w, x: (w[:0], x, None), ValueError, r"w has shape \(0, 64\); it must be \(rows, cols\)"),
    "no columns": (lambda w, x: (w[:, :0], x[:0], None), ValueError, r"w has shape \(6, 0\)"),
    "length of x": (lambda w, x: (w, x[:60], None), ValueError, r"x has shape \(60,\); it must be \(64,\)"),
    "shape of x": (lambda w, x: (w, x[:, None], None), ValueError, r"x has shape \(64, 1\); it must be \(64,\)"),
    "length of out": (lambda w, x: (w, x, torch.empty(7)), ValueError, r"out has shape \(7,\); it must be \(6,\)"),
    "strides of w": (lambda w, x: (w.repeat(1, 2)[:, ::2], x, None), ValueError, r"w is not contiguous .*contiguous\("),
    "strides of x": (lambda w, x: (w, x.repeat(2)[::2], None), ValueError, r"x is not contiguous \(strides \(2,\)\)"),
    "strides of out": (lambda w, x: (w, x, torch.empty(12)[::2]), ValueError, "out is not contiguous"),
    "out in w": (lambda w, x: (w, x, w.flatten()[60:66]), ValueError, "out overlaps w"),
    "out in x": (lambda w, x: (w, x, x[58:]), ValueError, "out overlaps x"),
}
ONLY_WIDE = {
    "alignment of w": (lambda w, x: (w.flatten()[1:129].view(2, 64), x, None), ValueError, "w starts at .*16 bytes"),
    "alignment of x": (lambda w, x: (w, torch.cat([x, x])[1:65], None), ValueError, r"x starts at .*pass x.clone\(\)"),
    "columns": (
        lambda w, x: (w[:, :62].contiguous(), x[:62], None),
        ValueError,
        r"62 columns of 4 bytes.*16 bytes \(4",
    ),
}


@pytest.fixture
def no_launch(monkeypatch):
    def launched(*args, **kwargs):
        raise AssertionError("a wrong call reached the launch")

    monkeypatch.setattr(Program, "launch", launched)


@by_name
@pytest.mark.parametrize("wrong", [*WRONG, *ONLY_WIDE])
def test_a_wrong_argument_is_named_before_the_launch(kernel, wrong, no_launch):
    if wrong in ONLY_WIDE and kernel not in WIDE:
        pytest.skip("this kernel loads single elements")
    spoil, kind, words = (WRONG | ONLY_WIDE)[wrong]
    w, x = torch.randn(6, 64), torch.randn(64)
    arguments = spoil(w, x)
    with pytest.raises(kind, match=words):
        kernel(*arguments)


def test_a_right_call_reaches_the_launch(no_launch):
    with pytest.raises(AssertionError, match="reached the launch"):
        kernels.gemv(torch.randn(6, 64), torch.randn(64))


# Launches

TWICE = """extern "C" __global__ void twice(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2.0f;
}
"""


@pytest.fixture(scope="module")
def twice():
    return Program(TWICE, {"twice": "pi"}, filename="<cell 7>", first_line=2)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "words"),
    [
        (0, 32, 0, "grid.x is 0; it must be at least 1"),
        (1, 0, 0, "block.x is 0; it must be at least 1"),
        (1, 1025, 0, "block.x is 1025; the limit is 1024"),
        (1, (32, 33), 0, "1056 threads; the limit is 1024"),
        ((1, 70000), 32, 0, "grid.y is 70000; the limit is 65535"),
        (2**31, 32, 0, "grid.x is 2147483648"),
        (1, 32, 300_000, "shared_bytes is 300000; it must be 0 to"),
        (1, 32, -1, "shared_bytes is -1"),
    ],
)
def test_a_launch_that_no_gpu_would_take_is_refused(twice, grid, block, shared, words):
    x = torch.ones(4)
    with pytest.raises(ValueError, match=words):
        twice.launch("twice", x.device, grid, block, (x, 4), shared_bytes=shared)
    assert x.tolist() == [1.0] * 4


WRONG_LISTS = {
    "too few": (lambda x: (x,), TypeError, "takes 2 arguments, got 1"),
    "a number for a tensor": (lambda x: (5, 4), TypeError, "argument 0 of twice must be a tensor or None, got int 5"),
    "a fraction for an int": (lambda x: (x, 4.5), TypeError, "argument 1 of twice is 4.5; .* fits C's int"),
    "an int too large": (lambda x: (x, 2**40), ValueError, "argument 1 of twice is 1099511627776"),
    "a tensor elsewhere": (lambda x: (x.to("meta"), 4), ValueError, "argument 0 of twice is on meta; the kernel runs"),
}


@pytest.mark.parametrize("wrong", WRONG_LISTS)
def test_arguments_that_the_parameters_cannot_take_are_named(twice, wrong):
    spoil, kind, words = WRONG_LISTS[wrong]
    x = torch.ones(4)
    with pytest.raises(kind, match=words):
        twice.launch("twice", x.device, 1, 32, spoil(x))
    assert x.tolist() == [1.0] * 4


def test_a_kernel_that_the_program_lacks_is_named(twice):
    with pytest.raises(KeyError, match=r"<cell 7> has no kernel 'thrice'; it has twice"):
        twice.launch("thrice", torch.device("cpu"), 1, 1, ())
    with pytest.raises(ValueError, match="parameter letter 'z' is none of p, i, u, l, f"):
        Program("", {"k": "pz"})


def test_kernels_run_on_cuda_and_cpu_only(twice):
    with pytest.raises(RuntimeError, match="not on meta"):
        twice.launch("twice", torch.device("meta"), 1, 1, (None, 0))


def test_a_compile_error_has_the_cell_and_its_line():
    wrong = Program(TWICE.replace("2.0f", "undeclared"), {"twice": "pi"}, filename="<cell 7>", first_line=2)
    with pytest.raises(simt.CompileError, match=r"<cell 7>:4: .*undeclared") as caught:
        wrong.launch("twice", torch.device("cpu"), 1, 1, (torch.ones(1), 1))
    assert (caught.value.file, caught.value.line) == ("<cell 7>", 4)
    assert "x[i] *= undeclared;" in str(caught.value)


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    fresh = Program(TWICE, {"twice": "pi"})
    with pytest.raises(simt.CompilerNotFound, match=r"no C\+\+ compiler: looked for g\+\+, clang\+\+.*install"):
        fresh.launch("twice", torch.device("cpu"), 1, 1, (torch.ones(1), 1))


# Sources that change


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """A copy of csrc/ that programs compile from, looked at before every launch."""
    copy = tmp_path / "csrc"
    (copy / "include").mkdir(parents=True)
    (copy / "include" / "factor.cuh").write_text("#define FACTOR 2.0f\n")
    (copy / "twice.cu").write_text('#include "factor.cuh"\n' + TWICE.replace("2.0f", "FACTOR"))
    monkeypatch.setattr(launch, "CSRC", copy)
    monkeypatch.setattr(launch, "INCLUDE", copy / "include")
    monkeypatch.setattr(launch, "_LOOK_AGAIN_S", -1)
    return copy


def run(program):
    x = torch.ones(4)
    program.launch("twice", x.device, 1, 32, (x, 4))
    return x.tolist()


def test_an_edited_kernel_or_header_is_compiled_again(csrc):
    program = Program(Path("twice.cu"), {"twice": "pi"})
    assert run(program) == [2.0] * 4
    source = csrc / "twice.cu"
    source.write_text(source.read_text().replace("*= FACTOR", "= FACTOR + 5.0f"))
    assert run(program) == [7.0] * 4
    (csrc / "include" / "factor.cuh").write_text("#define FACTOR 30.0f\n")
    assert run(program) == [35.0] * 4


def test_a_mistake_in_a_file_is_mended_by_editing_it(csrc):
    program, source = Program(Path("twice.cu"), {"twice": "pi"}), csrc / "twice.cu"
    right = source.read_text()
    source.write_text(right.replace("FACTOR;", "FACTOR"))
    with pytest.raises(simt.CompileError, match=r"csrc/twice.cu:[45]: "):
        run(program)
    source.write_text(right)
    assert run(program) == [2.0] * 4


# What a launch hands to the driver

DRIVER = """
#include <cstring>
struct Config {  // CUlaunchConfig of cuda.h
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void* hStream; void* attrs; unsigned numAttrs;
};
static long long seen[20];
extern "C" long long* seen_by_driver() { return seen; }
extern "C" int cuLaunchKernelEx(const Config* c, void* function, void** p, void** extra) {
    float f; int i; memcpy(&f, p[4], 4); memcpy(&i, p[2], 4);
    long long values[] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
        c->sharedMemBytes, (long long)c->hStream, (long long)c->attrs, c->numAttrs, (long long)function,
        *(long long*)p[0], *(long long*)p[1], i, *(long long*)p[3], (long long)(f * 4), extra != nullptr,
        *(unsigned*)p[5]};
    memcpy(seen, values, sizeof values);
    return (int)c->gridDimY == 7 ? 700 : 0;
}
extern "C" int cuGetErrorString(int status, const char** words) { *words = "illegal address"; return 0; }
"""


class OnGpu:
    """What a launch asks of a CUDA tensor."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, address):
        self.data_ptr = lambda: address


@pytest.fixture
def gpu_kernel(tmp_path, monkeypatch):
    """A kernel for a GPU that is not there, and what its driver was handed."""
    (tmp_path / "driver.cpp").write_text(DRIVER)
    library = tmp_path / "driver.so"
    subprocess.run(
        [*simt.compiler().command, "-shared", "-fPIC", str(tmp_path / "driver.cpp"), "-o", str(library)], check=True
    )
    driver = ctypes.PyDLL(str(library))
    driver.seen_by_driver.restype = ctypes.POINTER(ctypes.c_longlong)
    raw = SimpleNamespace(kernel=SimpleNamespace(ptr=2**40 + 8), max_dynamic_shared_size_bytes=0)
    properties = SimpleNamespace(shared_memory_per_block_optin=232448, major=9)
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 2**41 + device, raising=False)
    kernel = launch._GpuKernel(SimpleNamespace(get_function=lambda name: raw), "k", "ppilfu", 0)
    return kernel, raw, lambda: driver.seen_by_driver()[:18]


def test_the_driver_gets_shape_stream_and_arguments_as_it_expects_them(gpu_kernel):
    kernel, raw, seen = gpu_kernel
    kernel.launch(5, 128, (OnGpu(2**47 + 16), None, -3, -(2**40), 0.75, 2**32 - 1), 0, False)
    assert seen() == [5, 1, 1, 128, 1, 1, 0, 2**41, 0, 0, 2**40 + 8, 2**47 + 16, 0, -3, -(2**40), 3, 0, 2**32 - 1]
    kernel.launch((3, 2), [8, 4, 2], (OnGpu(1), OnGpu(2), 1, 2, 0.25, 0), 100_000, False)
    assert seen()[:8] == [3, 2, 1, 8, 4, 2, 100_000, 2**41] and seen()[11:15] == [1, 2, 1, 2]
    assert raw.max_dynamic_shared_size_bytes == 100_000
    for grid in range(1, 2 * launch._CONFIGS_KEPT):  # more shapes than are kept
        kernel.launch(grid, 32, (OnGpu(1), OnGpu(2), 1, 2, 0.25, 0), 0, False)
        assert seen()[:4] == [grid, 1, 1, 32]


def test_the_driver_is_asked_for_a_programmatic_dependent_launch_where_there_is_one(gpu_kernel):
    kernel, raw, seen = gpu_kernel
    arguments = (OnGpu(1), OnGpu(2), 1, 2, 0.25, 0)
    for pdl in (True, False, True):  # one shape, kept apart
        kernel.launch(5, 128, arguments, 0, pdl)
        assert seen()[8:10] == ([ctypes.addressof(launch._PDL), 1] if pdl else [0, 0])
    assert raw.preferred_shared_memory_carveout == 100
    kernel.has_pdl = False
    kernel.launch(6, 128, arguments, 0, True)
    assert seen()[8:10] == [0, 0]


def test_a_program_makes_a_gpu_s_kernel_once_and_again_when_a_source_has_changed(gpu_kernel, csrc, monkeypatch):
    compiled = []

    def compile_for_gpu(program, device):
        compiled.append(device)
        raw = SimpleNamespace(kernel=SimpleNamespace(ptr=len(compiled)))
        return SimpleNamespace(get_function=lambda name: raw)

    monkeypatch.setattr(Program, "_compile_for_gpu", compile_for_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    program, seen = Program(Path("twice.cu"), {"twice": "ppilfu"}), gpu_kernel[2]
    arguments = (None, None, 1, 2, 0.25, 0)
    for device in ("cuda:0", "cuda:0", "cuda"):
        program.launch("twice", torch.device(device), 6, 64, arguments, outputs=("x",))
    assert seen()[:4] == [6, 1, 1, 64] and seen()[10] == 1 and compiled == [0]
    (csrc / "include" / "factor.cuh").write_text("#define FACTOR 4.00f\n")
    program.launch("twice", torch.device("cuda", 0), 6, 64, arguments)
    assert seen()[10] == 2 and compiled == [0, 0]
    assert len(program._retired) == 1  # a graph may hold the first one's kernels


def test_without_cupy_a_gpu_launch_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"kernels on a GPU need CuPy.*nanoqwen doctor"):
        Program(TWICE, {"twice": "pi"}).launch("twice", torch.device("cuda", 0), 1, 1, (None, 0))


def test_a_wrong_launch_never_reaches_the_driver(gpu_kernel):
    kernel, _, seen = gpu_kernel
    before, right = seen(), (OnGpu(1), OnGpu(2), 1, 2, 0.25, 0)
    for words, args in {
        "argument 0 of k must be a tensor or None, got int": (1, *right[1:]),
        "argument 1 of k is on cpu": (None, torch.ones(1), *right[2:]),
        "argument 2 of k is 2147483648": (None, None, 2**31, *right[3:]),
        "argument 3 of k is 0.5": (None, None, 1, 0.5, *right[4:]),
        "argument 4 of k is '1'": (None, None, 1, 2, "1", 0),
        "argument 4 of k is 1e\\+300": (None, None, 1, 2, 1e300, 0),
        "argument 5 of k is -1": (None, None, 1, 2, 0.25, -1),
        "takes 6 arguments, got 5": right[:5],
        "takes 6 arguments, got 7": (*right, 0),
    }.items():
        with pytest.raises((TypeError, ValueError), match=words):
            kernel.launch(1, 32, args, 0, False)
    for shape in ((0, 32, 0), (1, 1025, 0), (1, 32, 232449)):
        with pytest.raises(ValueError):
            kernel.launch(*shape[:2], right, shape[2], False)
    assert seen() == before


def test_what_the_driver_refuses_is_said_in_its_words(gpu_kernel):
    with pytest.raises(RuntimeError, match=r"k: the driver refused the launch \(illegal address\)"):
        gpu_kernel[0].launch((1, 7), 32, (None, None, 1, 2, 0.25, 0), 0, False)


# The choice of a launch


@given(
    rows=st.integers(1, 200_000),
    packs=st.integers(1, 8192),
    sms=st.integers(1, 200),
)
def test_every_choice_is_an_instance_and_wastes_little(rows, packs, sms):
    lanes, loads = choose(rows, 16 * packs, sms)
    assert lanes in LANES and loads in LOADS
    slots = math.ceil(packs / (lanes * loads)) * lanes * loads
    least = min(math.ceil(packs / (lanes * n)) * lanes * n for n in LOADS)
    assert slots <= packs / 0.75 or slots == least
    assert lanes == 32 or packs >= 1.75 * lanes  # a lane more has something to load


def test_more_lanes_share_a_row_only_where_rows_are_few():
    assert choose(152064, 7168, 132)[0] == 32 and choose(37888, 7168, 132)[0] == 32
    assert choose(896, 9728, 132)[0] > 32 and choose(3584, 37888, 132)[0] > 32


def test_the_plan_of_every_model_shape_is_a_kernel_that_is_compiled():
    from nanoqwen.kernels.gemv import _LADDER, _plan

    for cols in MODEL_COLUMNS:
        for rows in (1, 128, 896, 4608, 37888, 152064):
            for dtype in DTYPES:
                name, grid = _plan(dtype, rows, cols, 132)
                assert name in _LADDER[dtype].kernels
                assert grid * (128 // instances(dtype)[name]) >= rows > (grid - 1) * (128 // instances(dtype)[name])
