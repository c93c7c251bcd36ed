"""On a GPU: the same kernels, the same bits as on the SIMT machine; streams, graphs, refused launches."""

from pathlib import Path

import pytest
import torch

from nanoqwen import kernels, simt
from nanoqwen.kernels.launch import Program

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("cupy")

LADDER = [getattr(kernels, name) for name in kernels.__all__ if name.startswith("gemv")]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 4e-4}
SHAPES = [(1, 896), (7, 264), (129, 1536), (33, 4864), (20, 18944), (300, 8)]

by_name = pytest.mark.parametrize("kernel", LADDER, ids=lambda kernel: kernel.__name__)
by_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))

TWICE = """extern "C" __global__ void twice(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2.0f;
}
"""


def problem(rows, cols, dtype):
    make = torch.Generator().manual_seed(rows * 7919 + cols)
    w, x = (torch.randn(size, generator=make).to(dtype) for size in ((rows, cols), (cols,)))
    return w, x, w.double() @ x.double()


def nothing(rows, dtype):
    return torch.full((rows,), float("nan"), dtype=dtype, device="cuda")


def error(y, reference):
    return ((y.double().cpu() - reference).norm() / reference.norm()).item()


@by_dtype
@by_name
def test_results_are_right_and_the_simt_machine_s_bit_for_bit(kernel, dtype):
    for rows, cols in SHAPES:
        w, x, reference = problem(rows, cols, dtype)
        y = nothing(rows, dtype)
        kernel(w.cuda(), x.cuda(), out=y)
        assert error(y, reference) < TOLERANCE[dtype], (rows, cols)
        # The order of additions depends on the launch, which gemv chooses for the number of multiprocessors.
        same = {"sms": torch.cuda.get_device_properties(0).multi_processor_count} if kernel is kernels.gemv else {}
        assert torch.equal(y.cpu(), kernel(w, x, **same)), (rows, cols)


@by_name
def test_launches_go_to_torch_s_current_stream(kernel):
    w, x, reference = problem(64, 1024, torch.float32)
    w, late, y = w.cuda(), torch.zeros(1024, device="cuda"), nothing(64, torch.float32)
    kernel(w, late, out=y)  # compiled and loaded
    side, x = torch.cuda.Stream(), x.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)  # on the side stream, late: a launch elsewhere would still read zeros
        kernel(w, late, out=y)
    side.synchronize()
    assert error(y, reference) < 1e-5


@by_name
def test_a_captured_launch_reads_what_its_inputs_hold_at_each_replay(kernel):
    dtype = torch.bfloat16
    w, x, _ = problem(129, 896, dtype)
    w, x, y = w.cuda(), x.cuda(), nothing(129, dtype)
    kernel(w, x, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(w, x, out=y)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(896))
        w.copy_(torch.randn(129, 896))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert error(y, w.double().cpu() @ x.double().cpu()) < TOLERANCE[dtype]


def test_an_output_made_inside_a_capture_is_the_graph_s():
    w, x, reference = problem(64, 896, torch.float32)
    w, x = w.cuda(), x.cuda()
    kernels.gemv(w, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.gemv(w, x)
    graph.replay()
    torch.cuda.synchronize()
    assert error(y, reference) < 1e-5


def test_tensors_that_start_inside_their_storage_are_read_where_they_start():
    w, x, reference = problem(32, 64, torch.bfloat16)
    w, x = w.cuda(), torch.cat([torch.randn(64).bfloat16(), x]).cuda()[64:]
    for kernel in LADDER:
        y = nothing(40, torch.bfloat16)
        kernel(w[8:24], x, out=y[5:21])
        assert error(y[5:21], reference[8:24]) < TOLERANCE[torch.bfloat16], kernel.__name__
        assert y[:5].isnan().all() and y[21:].isnan().all()


def test_tensors_of_two_machines_are_refused():
    w, x = torch.randn(8, 64), torch.randn(64)
    with pytest.raises(ValueError, match="x is on cpu; it must be on cuda:0"):
        kernels.gemv(w.cuda(), x)
    with pytest.raises(ValueError, match="out is on cpu; it must be on cuda:0"):
        kernels.gemv(w.cuda(), x.cuda(), out=torch.empty(8))
    twice = Program(TWICE, {"twice": "pi"})
    with pytest.raises(ValueError, match="argument 0 of twice is on cpu; the kernel runs on cuda"):
        twice.launch("twice", torch.device("cuda", 0), 1, 32, (x, 64))


def test_a_launch_that_the_gpu_cannot_take_is_refused_and_the_next_one_works():
    twice, x = Program(TWICE, {"twice": "pi"}), torch.ones(64, device="cuda")
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for grid, block, shared, words in (
        (1, 1025, 0, "block.x is 1025; the limit is 1024"),
        (0, 32, 0, "grid.x is 0"),
        (1, 32, limit + 1, f"shared_bytes is {limit + 1}; it must be 0 to {limit}"),
    ):
        with pytest.raises(ValueError, match=words):
            twice.launch("twice", x.device, grid, block, (x, 64), shared_bytes=shared)
    twice.launch("twice", x.device, 2, 32, (x, 64), shared_bytes=limit)
    twice.launch("twice", torch.device("cuda"), (2, 1), [32], (x, 64))
    assert x.eq(4).all()


def test_a_thread_that_has_not_used_the_gpu_may_launch():
    import threading

    twice, x = Program(TWICE, {"twice": "pi"}), torch.ones(64, device="cuda")
    twice.launch("twice", x.device, 2, 32, (x, 64))
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: twice.launch("twice", x.device, 2, 32, (x, 64)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert x.eq(4).all()


def test_nvrtc_s_errors_have_the_file_and_the_line():
    wrong = Program(TWICE.replace("2.0f", "undeclared"), {"twice": "pi"}, filename="<cell 7>", first_line=2)
    with pytest.raises(simt.CompileError, match=r"<cell 7>:4: .*undeclared") as caught:
        wrong.launch("twice", torch.device("cuda", 0), 1, 32, (torch.ones(1, device="cuda"), 1))
    assert (caught.value.file, caught.value.line) == ("<cell 7>", 4)
    assert "x[i] *= undeclared;" in str(caught.value)


def test_an_edited_file_is_compiled_again(tmp_path, monkeypatch):
    from nanoqwen.kernels import launch

    (tmp_path / "include").mkdir()
    (tmp_path / "twice.cu").write_text(TWICE)
    monkeypatch.setattr(launch, "CSRC", tmp_path)
    monkeypatch.setattr(launch, "INCLUDE", tmp_path / "include")
    monkeypatch.setattr(launch, "_LOOK_AGAIN_S", -1)
    twice, x = Program(Path("twice.cu"), {"twice": "pi"}), torch.ones(64, device="cuda")
    twice.launch("twice", x.device, 2, 32, (x, 64))
    (tmp_path / "twice.cu").write_text(TWICE.replace("2.0f", "50.0f"))
    twice.launch("twice", x.device, 2, 32, (x, 64))
    assert x.eq(100).all()
