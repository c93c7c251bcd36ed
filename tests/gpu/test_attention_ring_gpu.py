"""On a GPU: the attention pipelines against float64 up to 32,768 tokens, the same bits each time, inside a graph."""

import math

import pytest
import torch

from nanoqwen import kernels
from nanoqwen.kernels.attention import CONSUMERS
from nanoqwen.packing import PAGE_SIZE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("cupy")

before_sm_90 = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
KERNELS = [kernels.paged_attention_cp_async] + ([] if before_sm_90 else [kernels.paged_attention_ring])
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}

kernel_by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)


def problem(heads, kv_heads, head_dim, tokens, dtype=torch.float16):
    """q, pages, table and length, and the result in float64; NaN wherever the pages hold no token."""
    make = torch.Generator("cuda").manual_seed(heads * 7919 + head_dim + tokens)
    max_pages = -(-tokens // PAGE_SIZE) + 2
    q = torch.randn(heads, head_dim, generator=make, device="cuda").to(dtype)
    kv = torch.randn(max_pages * PAGE_SIZE, 2, kv_heads, head_dim, generator=make, device="cuda").to(dtype)
    kv[tokens:] = math.nan
    table = torch.randperm(max_pages + 3, generator=make, device="cuda")[:max_pages]
    pages = torch.full((max_pages + 3, kv_heads, 2, PAGE_SIZE, head_dim), math.nan, dtype=dtype, device="cuda")
    pages[table] = kv.view(max_pages, PAGE_SIZE, 2, kv_heads, head_dim).permute(0, 3, 2, 1, 4)
    k, v = kv[:tokens].double().permute(1, 2, 0, 3)
    scores = torch.einsum("kgd,ktd->kgt", q.double().view(kv_heads, -1, head_dim), k) / math.sqrt(head_dim)
    reference = torch.einsum("kgt,ktd->kgd", scores.softmax(-1), v).reshape(heads, head_dim)
    return (q, pages, table.int(), torch.tensor([tokens], dtype=torch.int32, device="cuda")), reference


def error(out, reference):
    value = ((out.double() - reference).norm() / reference.norm()).item()
    return value if math.isfinite(value) else math.inf


@kernel_by_name
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "heads", [(28, 4, 128), (14, 2, 64), (12, 2, 128), (3, 3, 64), (8, 1, 128), (10, 2, 64)], ids=str
)
def test_every_length_is_right(kernel, heads, dtype):
    for tokens in (1, 15, 16, 17, 31, 32, 33, 49, 255, 256, 257, 4096, 32768):
        arguments, reference = problem(*heads, tokens, dtype)
        out = kernel(*arguments, out=torch.full_like(arguments[0], math.nan))
        assert error(out, reference) < TOLERANCE[dtype], tokens


@kernel_by_name
@pytest.mark.parametrize("tokens", [49, 1000, 32768])
def test_a_thousand_runs_give_the_same_bits(kernel, tokens):
    arguments, reference = problem(28, 4, 128, tokens)
    first = kernel(*arguments)
    assert error(first, reference) < 1e-3
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(1000):  # a race would not give the same bits each time
        same &= (kernel(*arguments, out=torch.full_like(first, math.nan)) == first).all()
    assert same


@pytest.mark.skipif(before_sm_90, reason="needs sm_90")
def test_both_ways_to_copy_give_the_same_bits():
    for tokens in (49, 4096):
        arguments, _ = problem(28, 4, 128, tokens)
        assert torch.equal(kernels.paged_attention_ring(*arguments), kernels.paged_attention_cp_async(*arguments))


@pytest.mark.skipif(not before_sm_90, reason="needs a GPU before sm_90")
def test_a_gpu_without_bulk_copies_is_told_what_to_use():
    arguments, _ = problem(14, 2, 64, 49)
    with pytest.raises(RuntimeError, match=r"needs sm_90, .*: use paged_attention_cp_async"):
        kernels.paged_attention_ring(*arguments)


@kernel_by_name
def test_the_simt_machine_gives_the_same_to_the_last_places(kernel):
    arguments, _ = problem(28, 4, 128, 257)
    there, here = kernel(*arguments, splits=3), kernel(*(a.cpu() for a in arguments), splits=3)
    assert error(there.cpu(), here.double()) < 5e-4


@kernel_by_name
def test_a_captured_launch_sees_the_length_grow(kernel):
    arguments, _ = problem(28, 4, 128, 1000)
    q, pages, table, length = arguments
    out = torch.empty_like(q)
    kernel(*arguments, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(*arguments, out=out)
    for tokens in (1, 16, 49, 999):
        length.fill_(tokens)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert out.isfinite().all() and torch.equal(out, kernel(q, pages, table, length)), tokens


@kernel_by_name
def test_timestamps_are_in_order(kernel):
    arguments, reference = problem(28, 4, 128, 32768)
    times = torch.full((12, CONSUMERS + 1, 3), -1, dtype=torch.int64, device="cuda")
    assert error(kernel(*arguments, splits=4, timestamps=times), reference) < 1e-3
    began, had, done = times[:10].unbind(-1)
    assert (began > 0).all() and (began <= had).all() and (had <= done).all() and (done[:-1] <= began[1:]).all()
