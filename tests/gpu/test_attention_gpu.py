"""On a GPU: attention against float64 and the SIMT machine up to 32,768 tokens, inside graphs whose context grows, and
the same bits each time."""

import math

import pytest
import torch

from nanoqwen import kernels
from nanoqwen.config import SHAPES
from nanoqwen.paged_kv import PagedKV
from nanoqwen.reference import rope_tables, rotate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("cupy")

PAGED = [
    kernels.paged_attention,
    kernels.paged_attention_split,
    kernels.paged_attention_prefetch,
    kernels.paged_attention_mma,
]
SIZES = [(28, 4, 128), (14, 2, 64)]
GROUPS = [(12, 2), (3, 3), (8, 1), (10, 2)]
TOLERANCE = {torch.float16: 4e-4, torch.bfloat16: 3e-3}

by_name = pytest.mark.parametrize("kernel", PAGED, ids=lambda kernel: kernel.__name__)
by_size = pytest.mark.parametrize("heads, kv_heads, head_dim", SIZES)


class Problem:
    """A query, and a sequence whose pages lie in a shuffled pool; NaN in free pages and past the length."""

    def __init__(self, length, heads=28, kv_heads=4, head_dim=128, dtype=torch.bfloat16, room=0):
        make = torch.Generator().manual_seed(length + heads)
        self.length, self.heads, self.dtype = length, heads, dtype
        self.q = torch.randn(heads, head_dim, generator=make).to("cuda", dtype)
        self.k, self.v = torch.randn(2, length, kv_heads, head_dim, generator=make).to("cuda", dtype)
        pages = -(-(length + room) // 16)
        self.cache = PagedKV(1, pages + 5, kv_heads, head_dim, dtype=dtype, device="cuda")
        self.cache.pool.fill_(math.nan)
        self.cache._free = torch.randperm(pages + 5, generator=make).tolist()
        self.sequence = self.cache.new()
        self.cache.reserve(self.sequence, length + room)
        self.cache.write(self.sequence, 0, self.k, self.v)
        self.cache.advance(self.sequence, length)
        self.pages = self.cache.pool[0]
        self.table, self.length_tensor = self.cache.view(self.sequence)

    def reference(self, length=None):
        return attend(self.q, self.k[:length], self.v[:length])

    def run(self, kernel, **how):
        out = torch.full_like(self.q, math.nan)
        kernel(self.q, self.pages, self.table, self.length_tensor, out=out, **how)
        return out


def attend(q, k, v):
    """In float64: q (heads, D), k and v (tokens, kv_heads, D)."""
    k, v = (x.double().repeat_interleave(len(q) // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * q.shape[1] ** -0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v)


def error(out, reference):
    value = ((out.double() - reference.double()).norm() / reference.double().norm()).item()
    return value if math.isfinite(value) else math.inf


@by_name
@by_size
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_length_is_right(kernel, heads, kv_heads, head_dim, dtype):
    for length in (1, 15, 16, 17, 31, 32, 33, 49, 255, 256, 257, 1000, 4096, 8191, 32768):
        problem = Problem(length, heads, kv_heads, head_dim, dtype)
        assert error(problem.run(kernel), problem.reference()) < TOLERANCE[dtype], length


@by_size
def test_the_contiguous_step_is_right(heads, kv_heads, head_dim):
    for length in (1, 33, 4096):
        problem = Problem(length, heads, kv_heads, head_dim)
        k, v = (x.transpose(0, 1).contiguous() for x in (problem.k, problem.v))
        out = kernels.attention_online(problem.q, k, v, problem.length_tensor)
        assert error(out, problem.reference()) < TOLERANCE[torch.bfloat16]


@by_name
@pytest.mark.parametrize("heads, kv_heads", GROUPS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_ratio_of_query_heads_is_right(kernel, heads, kv_heads, head_dim):
    for length in (17, 2000):
        problem = Problem(length, heads, kv_heads, head_dim)
        assert error(problem.run(kernel), problem.reference()) < TOLERANCE[torch.bfloat16], length


@by_size
def test_mma_is_right_however_many_blocks_share_the_pages(heads, kv_heads, head_dim):
    for length in (5, 700, 20000):
        problem = Problem(length, heads, kv_heads, head_dim, torch.float16)
        for splits in (1, 3, 33, 66, 512):
            for pdl in (False, True):
                out = problem.run(kernels.paged_attention_mma, splits=splits, pdl=pdl)
                assert error(out, problem.reference()) < TOLERANCE[torch.float16], (length, splits, pdl)


@by_name
@by_size
def test_the_gpu_and_the_simt_machine_agree(kernel, heads, kv_heads, head_dim):
    for length in (1, 33, 300):
        problem = Problem(length, heads, kv_heads, head_dim, torch.float16)
        inputs = (problem.q, problem.pages, problem.table, problem.length_tensor)
        simt = kernel(*(x.cpu() for x in inputs))
        assert error(problem.run(kernel).cpu(), simt) < TOLERANCE[torch.float16], length


@by_size
def test_a_thousand_launches_give_the_same_bits(heads, kv_heads, head_dim):
    problem = Problem(5000, heads, kv_heads, head_dim)
    workspace = kernels.attention_workspace(kv_heads, head_dim, 132 // kv_heads, torch.bfloat16, "cuda")
    first = problem.run(kernels.paged_attention_mma, workspace=workspace)
    assert error(first, problem.reference()) < TOLERANCE[torch.bfloat16]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        workspace.partial.fill_(math.nan)
        workspace.lse.fill_(math.nan)
        different += (problem.run(kernels.paged_attention_mma, workspace=workspace) != first).sum()
    assert different.item() == 0 and workspace.arrivals.tolist() == [0] * kv_heads


@pytest.mark.parametrize("fused", [False, True], ids=["two launches", "rope_attention"])
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-7b"])
def test_a_captured_step_is_right_while_its_context_grows(name, fused):
    config, dtype = SHAPES[name], torch.bfloat16
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    problem = Problem(500, heads, kv_heads, head_dim, dtype, room=100)
    cos, sin = rope_tables(config, torch.arange(600, device="cuda"), torch.float32)
    qkv = torch.zeros(heads + 2 * kv_heads, head_dim, device="cuda")
    q, out = torch.empty_like(problem.q), torch.full_like(problem.q, math.nan)
    workspace = kernels.attention_workspace(kv_heads, head_dim, 132 // kv_heads, torch.bfloat16, "cuda")

    def step():
        length, table, pages = problem.length_tensor, problem.table, problem.pages
        if fused:
            kernels.rope_attention(qkv, cos, sin, length, table, pages, out, workspace=workspace, pdl=True)
        else:
            kernels.rope_append(qkv, cos, sin, length, table, pages, q, pdl=True)
            kernels.paged_attention_mma(q, pages, table, length, out, appended=1, workspace=workspace, pdl=True)
        length.add_(1)

    step()  # compiles; what it stored is written over
    problem.length_tensor.fill_(500)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    k, v = problem.k, problem.v
    for n in range(100):
        qkv.normal_()
        q.fill_(math.nan), out.fill_(math.nan)
        graph.replay()
        turned = rotate(qkv, cos[500 + n], sin[500 + n]).to(dtype)
        k = torch.cat((k, turned[None, heads:-kv_heads]))
        v = torch.cat((v, qkv[None, -kv_heads:].to(dtype)))
        assert error(out, attend(turned[:heads], k, v)) < TOLERANCE[dtype], n
    problem.cache.advance(problem.sequence, 100, on_device=False)
    problem.cache.check()
    stored = problem.cache.read(problem.sequence, 0)
    torch.testing.assert_close(stored[0], k, rtol=8e-3, atol=1e-3)  # a rounding to bfloat16 apart at most
    assert torch.equal(stored[1], v)


def test_a_position_past_the_table_stores_nothing_and_shows():
    pages = torch.zeros(4, 2, 2, 16, 64, dtype=torch.float16, device="cuda")
    table = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    cos, sin = torch.ones(2, 100, 64, device="cuda")
    for position in (32, 10**6, -1):
        length = torch.tensor([position], dtype=torch.int32, device="cuda")
        qkv = torch.ones(8, 64, device="cuda")
        q = kernels.rope_append(qkv, cos, sin, length, table, pages)
        out = kernels.rope_attention(qkv, cos, sin, length, table, pages)
        assert q.isnan().all() and out.isnan().all() and not pages.any()
