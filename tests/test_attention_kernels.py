"""Every attention kernel equals float64 on the SIMT machine, at every length around a page, with NaN in all that it
must not read; and refuses what it cannot take before anything runs."""

import math
import re

import pytest
import torch

from nanoqwen import kernels, simt
from nanoqwen.config import SHAPES, ModelConfig
from nanoqwen.kernels import attention
from nanoqwen.kernels.attention import choose_splits
from nanoqwen.kernels.launch import INCLUDE, Program
from nanoqwen.paged_kv import PagedKV
from nanoqwen.reference import rope_tables, rotate

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 49, 255, 256, 257)
HEADS = {7: (14, 2), 6: (12, 2), 1: (3, 3), 8: (8, 1), 5: (10, 2)}  # query and KV heads, by their ratio
PAGED = [
    kernels.paged_attention,
    kernels.paged_attention_split,
    kernels.paged_attention_prefetch,
    kernels.paged_attention_ring,
    kernels.paged_attention_cp_async,
    kernels.paged_attention_mma,
]
SPLIT = PAGED[1:]
KERNELS = [kernels.attention_online, *PAGED]
# ‖out − reference‖ / ‖reference‖: out is rounded to 16 bits, and for the tensor cores so is exp(s − m).
TOLERANCE = {torch.float16: 4e-4, torch.bfloat16: 3e-3}

by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
paged_by_name = pytest.mark.parametrize("kernel", PAGED, ids=lambda kernel: kernel.__name__)
split_by_name = pytest.mark.parametrize("kernel", SPLIT, ids=lambda kernel: kernel.__name__)


class Problem:
    """A query over a sequence whose pages lie among those of another and free ones, out of order; NaN elsewhere."""

    def __init__(self, length, heads=14, kv_heads=2, head_dim=64, dtype=torch.float16, scale=1.0):
        self.make = torch.Generator().manual_seed(length * 7919 + heads * 31 + head_dim)
        self.length, self.heads, self.kv_heads, self.dtype = length, heads, kv_heads, dtype
        self.q = (self.normal(heads, head_dim) * scale).to(dtype)
        self.k, self.v = self.normal(2, length, kv_heads, head_dim).to(dtype)
        pages = -(-length // 16)
        self.cache = PagedKV(2, 3 * pages + 3, kv_heads, head_dim, sequences=3, max_pages=pages + 2, dtype=dtype)
        self.cache.pool.fill_(math.nan)
        self.other, self.sequence, freed = (self.cache.new() for _ in range(3))
        for n in range(pages):  # page after page, taking turns
            self.cache.reserve(freed, min(16, length - 16 * n))
            self.cache.advance(freed, min(16, length - 16 * n))
            self.append(self.other, torch.full_like(self.k[:16], math.inf), torch.full_like(self.v[:16], math.inf))
            if n == pages // 2:
                self.cache.free(freed)
                freed = self.cache.new()
            self.append(self.sequence, self.k[16 * n : 16 * n + 16], self.v[16 * n : 16 * n + 16])
        self.pages = self.cache.pool[1]
        self.table, self.length_tensor = self.cache.view(self.sequence)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.make)

    def append(self, sequence, k, v):
        self.cache.reserve(sequence, len(k))
        self.cache.write(sequence, 1, k, v)
        self.cache.advance(sequence, len(k))

    @property
    def reference(self):
        k, v = (x.double().repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("hd,thd->ht", self.q.double(), k) * self.q.shape[1] ** -0.5
        return torch.einsum("ht,thd->hd", scores.softmax(-1), v)

    def run(self, kernel, **how):
        """The answer, into an output full of NaN."""
        out = torch.full_like(self.q, math.nan)
        if kernel is kernels.attention_online:
            room = torch.full((self.kv_heads, self.length + 5, self.q.shape[1]), math.nan, dtype=self.dtype)
            k, v = room.clone(), room
            k[:, : self.length], v[:, : self.length] = self.k.transpose(0, 1), self.v.transpose(0, 1)
            assert kernel(self.q, k, v, self.length_tensor, out=out, **how) is out
        else:
            assert kernel(self.q, self.pages, self.table, self.length_tensor, out=out, **how) is out
        return out

    def error(self, out, reference=None):
        reference = self.reference if reference is None else reference
        value = ((out.double() - reference).norm() / reference.norm()).item()
        return value if math.isfinite(value) else math.inf


# Results


@by_name
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(14, 2, 64), (28, 4, 128)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_length_is_right_and_nothing_past_it_is_read(kernel, heads, kv_heads, head_dim, dtype):
    for length in LENGTHS:
        problem = Problem(length, heads, kv_heads, head_dim, dtype)
        assert problem.error(problem.run(kernel)) < TOLERANCE[dtype], length


@by_name
@pytest.mark.parametrize("group", HEADS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_ratio_of_query_heads_is_right(kernel, group, head_dim):
    for length in (17, 100):
        problem = Problem(length, *HEADS[group], head_dim)
        assert problem.error(problem.run(kernel)) < TOLERANCE[torch.float16], length


@split_by_name
def test_any_number_of_splits_gives_the_answer(kernel):
    for length in (1, 40, 257):
        problem = Problem(length, dtype=torch.float16)
        for splits in (1, 2, 3, 7, 16, 64):
            assert problem.error(problem.run(kernel, splits=splits)) < TOLERANCE[torch.float16], (length, splits)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_mma_is_right_however_many_blocks_share_the_pages(head_dim):
    for length in (5, 49, 700, 1023):
        problem = Problem(length, 7, 1, head_dim)
        for splits in (1, 3, 20):
            for pdl in (False, True):
                out = problem.run(kernels.paged_attention_mma, splits=splits, pdl=pdl)
                assert problem.error(out) < TOLERANCE[torch.float16], (length, splits, pdl)


def test_more_splits_than_one_batch_of_answers_are_added_up():
    problem = Problem(8 * 16 * 34, 2, 1, 64)
    out = problem.run(kernels.paged_attention_mma, splits=94)
    assert problem.error(out) < TOLERANCE[torch.float16]


@by_name
def test_a_query_of_zeros_gives_the_mean_of_the_values(kernel):
    for length in LENGTHS:
        problem = Problem(length, scale=0.0)
        mean = problem.v.double().mean(0).repeat_interleave(7, dim=0)
        assert problem.error(problem.run(kernel), mean) < TOLERANCE[torch.float16], length


@by_name
def test_one_dominant_key_in_the_last_partial_page_is_found(kernel):
    for length in (18, 49, 257):
        problem = Problem(length)
        problem.k[-1] = 4 * problem.q[::7]  # of each KV head, the first query head's own direction
        page, slot = problem.table[(length - 1) // 16], (length - 1) % 16
        problem.pages[page, :, 0, slot] = problem.k[-1]
        out = problem.run(kernel)
        assert problem.error(out) < TOLERANCE[torch.float16]
        torch.testing.assert_close(out[::7].double(), problem.v[-1].double(), rtol=0, atol=2e-3)


@by_name
def test_scores_of_hundreds_neither_overflow_nor_vanish(kernel):
    problem = Problem(200, scale=60.0)
    assert problem.error(problem.run(kernel)) < TOLERANCE[torch.float16]
    problem = Problem(200, scale=60.0)
    problem.k[:, :] = -problem.q[::7].sign() * problem.k.abs()  # all of them negative for the first head
    problem.pages[problem.table[:13].long().repeat_interleave(16)[:200], :, 0, torch.arange(200) % 16] = problem.k
    assert problem.error(problem.run(kernel)) < TOLERANCE[torch.float16]


@by_name
def test_an_appended_token_counts_before_the_length_does(kernel):
    problem = Problem(33)
    problem.length_tensor.fill_(32)
    assert problem.error(problem.run(kernel, appended=1)) < TOLERANCE[torch.float16]
    assert problem.error(problem.run(kernel)) > 0.01


@by_name
def test_no_tokens_give_zeros(kernel):
    problem = Problem(1)
    problem.length_tensor.fill_(0)
    assert torch.equal(problem.run(kernel), torch.zeros_like(problem.q))


@by_name
def test_a_nan_in_a_key_is_not_swallowed(kernel):
    problem = Problem(100)
    problem.pages[problem.table[2], 1, 0, 3, 5] = math.nan
    problem.k[35, 1, 5] = math.nan
    out = problem.run(kernel)
    assert out[7:].isnan().all() and out[:7].isfinite().all()


def test_the_splits_of_a_workspace_stay_right_while_the_length_grows():
    problem = Problem(600)
    workspace = kernels.attention_workspace(2, 64, 9, torch.float16, "cpu")
    workspace.partial.fill_(math.nan)
    for length in (1, 16, 100, 257, 599, 600, 3):
        problem.length_tensor.fill_(length)
        shorter = Problem(600)
        shorter.k, shorter.v = problem.k[:length], problem.v[:length]
        out = problem.run(kernels.paged_attention_mma, workspace=workspace)
        assert problem.error(out, shorter.reference) < TOLERANCE[torch.float16], length
        assert workspace.arrivals.tolist() == [0, 0]
        for kernel in SPLIT[:2]:
            assert problem.error(problem.run(kernel, splits=9), shorter.reference) < TOLERANCE[torch.float16]


def test_splits_fill_the_gpu_and_never_outnumber_the_pages():
    assert choose_splits(32768, 4, 132) == 33 and choose_splits(32768, 2, 132) == 66
    assert choose_splits(40, 4, 132) == 3 and choose_splits(0, 4, 132) == 1 and choose_splits(4096, 200, 132) == 1
    assert choose_splits(10**6, 1, 132, blocks_per_sm=8) == attention.MAX_SPLITS


# Observed


@by_name
@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_observed_run_is_clean(kernel, head_dim):
    problem = Problem(300, 14, 2, head_dim)
    how = {"splits": 3} if kernel in SPLIT else {}
    for seed in (0, 1):
        with simt.observing(seed=seed) as report:
            out = problem.run(kernel, **how)
        assert not report.findings and report.lines
        assert problem.error(out) < TOLERANCE[torch.float16]


def test_every_page_is_read_once_by_the_tensor_cores_and_seven_times_without_pages():
    problem = Problem(512)
    kv_bytes = 512 * 2 * 2 * 64 * 2
    for kernel, times in ((kernels.attention_online, 7), (kernels.paged_attention_mma, 1)):
        with simt.observing() as report:
            problem.run(kernel)
        moved = sum(line.sectors * 32 for line in report.lines if {"k", "v", "pages"} & set(line.buffers))
        assert moved == times * kv_bytes, kernel.__name__


# RoPE


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-7b"])
def test_rope_append_gives_the_reference_s_q_k_and_v(name, dtype):
    config = SHAPES[name]
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    cos, sin = rope_tables(config, torch.arange(3000), torch.float32)
    cache = PagedKV(1, 200, kv_heads, head_dim, dtype=dtype)
    sequence = cache.new()
    cache.reserve(sequence, 3000)
    table, length = cache.view(sequence)
    for source in (torch.float32, dtype):
        for position in (0, 1, 15, 16, 17, 2999):
            cache.pool.fill_(math.nan)
            torch.manual_seed(position)
            qkv = (torch.randn(heads + 2 * kv_heads, head_dim) * 5).to(source)
            length.fill_(position)
            q = torch.full((heads, head_dim), math.nan, dtype=dtype)
            how = (qkv.flatten() if position % 2 else qkv, cos, sin, length, table, cache.pool[0])
            with simt.observing() as report:
                assert kernels.rope_append(*how, q=q) is q
            assert not report.findings and length.item() == position
            turned = rotate(qkv.float(), *rope_tables(config, torch.tensor([position]), torch.float32)).to(dtype)
            page = cache.pool[0, cache.pages(sequence)[position // 16], :, :, position % 16]
            assert torch.equal(q, turned[:heads])
            assert torch.equal(page[:, 0], turned[heads:-kv_heads])
            assert torch.equal(page[:, 1], qkv[-kv_heads:].to(dtype))
            assert cache.pool.isfinite().sum() == page.numel()  # and nothing else was written


def test_a_position_past_the_table_stores_nothing_and_shows():
    """On a GPU the check cannot look at the length; the kernel itself holds its hand."""
    cache = PagedKV(1, 4, 2, 64, max_pages=2, dtype=torch.float16)
    cache.pool.zero_()
    table = torch.tensor([0, 1], dtype=torch.int32)
    cos, sin = torch.ones(2, 100, 64)
    for position in (32, 33, 10**6, -1):
        q = torch.zeros(4, 64).half()
        args = (torch.ones(8, 64), cos, sin, torch.tensor([position], dtype=torch.int32), table, q, cache.pool[0])
        attention._ROPE[torch.float16, 64].launch(
            "rope_append<float, __half, 64>", q.device, 8, 32, (*args, 4, 2, 100, 2)
        )
        assert q.isnan().all() and not cache.pool.any()


def test_rope_append_then_attention_is_a_decode_step():
    problem = Problem(32, 14, 2, 64)
    config = SHAPES["qwen2.5-coder-0.5b"]
    cos, sin = rope_tables(config, torch.arange(64), torch.float32)
    qkv = problem.normal(18, 64)
    problem.cache.reserve(problem.sequence, 1)
    q = kernels.rope_append(qkv, cos, sin, problem.length_tensor, problem.table, problem.pages)
    out = kernels.paged_attention_mma(q, problem.pages, problem.table, problem.length_tensor, appended=1)
    turned = rotate(qkv, cos[32], sin[32]).half()
    problem.q = turned[:14]
    problem.k = torch.cat((problem.k, turned[None, 14:16]))
    problem.v = torch.cat((problem.v, qkv[None, 16:].half()))
    assert problem.error(out) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(14, 2, 64), (28, 4, 128), (3, 3, 128), (8, 1, 64)])
def test_rope_attention_is_rope_append_and_attention_in_one_launch(heads, kv_heads, head_dim, dtype):
    """The same bits in out and in the pages, whatever the splits; with NaN in all that it must not read."""
    config = ModelConfig(257, heads * head_dim, 64, 1, heads, kv_heads, head_dim=head_dim)
    cos, sin = rope_tables(config, torch.arange(320), torch.float32)
    for position in (1, 15, 16, 17, 31, 48, 143, 256, 257):
        problem = Problem(position, heads, kv_heads, head_dim, dtype)
        problem.cache.reserve(problem.sequence, 1)
        qkv = problem.normal(heads + 2 * kv_heads, head_dim) * 3
        cache = problem.length_tensor, problem.table
        want_pages = problem.pages.clone()
        for splits in (1, 2, 5, None):
            q = kernels.rope_append(qkv, cos, sin, *cache, want_pages)
            want = kernels.paged_attention_mma(
                q, want_pages, problem.table, problem.length_tensor, appended=1, splits=splits
            )
            pages, out = problem.pages.clone(), torch.full_like(want, math.nan)
            with simt.observing() as report:
                assert kernels.rope_attention(qkv, cos, sin, *cache, pages, out, splits=splits) is out
            assert not report.findings
            assert torch.equal(out, want) and want.isfinite().all(), (position, splits)
            assert torch.equal(pages.view(torch.int16), want_pages.view(torch.int16)), (position, splits)


def test_rope_attention_begins_a_sequence():
    cache = PagedKV(1, 2, 2, 64, max_pages=2, dtype=torch.float16)
    cache.pool.fill_(math.nan)
    sequence = cache.new()
    cache.reserve(sequence, 1)
    table, length = cache.view(sequence)
    qkv = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    out = kernels.rope_attention(qkv, *torch.ones(2, 9, 64), length, table, cache.pool[0])
    assert torch.equal(out, qkv[6:].half().repeat_interleave(2, dim=0))  # the only value there is


def test_rope_attention_past_the_table_stores_nothing_and_shows():
    pages = torch.zeros(4, 2, 2, 16, 64).half()
    table = torch.tensor([0, 1], dtype=torch.int32)
    workspace = kernels.attention_workspace(2, 64, 3, torch.float16, "cpu")
    for position in (32, 33, 10**6, -1, -(10**6)):
        out, length = torch.zeros(4, 64).half(), torch.tensor([position], dtype=torch.int32)
        args = (None, torch.ones(8, 64), *torch.ones(2, 100, 64), pages, table, length, out, *workspace, 1.0)
        attention._MMA[torch.float16, 64].launch(
            "paged_attention_mma<__half, 64, true>", out.device, (3, 2), 256, (*args, 1, 2, 2, 100)
        )
        assert out.isnan().all() and not pages.any(), position


# Refused


def arguments(**other):
    problem = Problem(20)
    given = {"q": problem.q, "pages": problem.pages, "table": problem.table, "length": problem.length_tensor}
    return given | other


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@paged_by_name
@pytest.mark.parametrize(
    "other, error, words",
    [
        ({"q": torch.zeros(14, 96).half()}, ValueError, "q has head_dim 96; the kernels were compiled for 64 and 128"),
        ({"q": torch.zeros(14, 128).half()}, ValueError, "pages has shape"),
        ({"q": torch.zeros(14, 64)}, TypeError, "q is float32; it must be float16 or bfloat16"),
        ({"q": torch.zeros(14, 64).bfloat16()}, TypeError, "pages is float16; it must be bfloat16"),
        ({"q": torch.zeros(13, 64).half()}, ValueError, "13 query heads do not divide among 2 KV heads"),
        ({"q": torch.zeros(18, 64).half()}, ValueError, "9 query heads share a KV head; the kernels take at most 8"),
        ({"q": torch.zeros(28, 64).half()[::2]}, ValueError, "q is not contiguous"),
        ({"q": torch.zeros(14 * 64 + 1).half()[1:].view(14, 64)}, ValueError, "no multiple of 16 bytes"),
        ({"pages": torch.zeros(4, 2, 2, 32, 64).half()}, ValueError, "pages hold 32 tokens each"),
        ({"pages": torch.zeros(4, 2, 16, 2, 64).half()}, ValueError, "pages has shape (4, 2, 16, 2, 64)"),
        ({"table": torch.zeros(3).long()}, TypeError, "table is int64; it must be int32"),
        ({"table": int32(0, 9)}, ValueError, "table[1] is page 9; the pool has pages 0 to 8"),
        ({"table": int32(0, -1)}, ValueError, "table[1] is page -1; the pool has pages 0 to 8"),
        ({"length": int32(33), "table": int32(0, 1)}, ValueError, "length is 33 tokens; table has 2 pages of 16"),
        ({"length": int32(-1)}, ValueError, "length is -1 tokens"),
        ({"length": int32(1, 2)}, ValueError, "length has shape (2,); it must be (1,)"),
        ({"length": torch.tensor([1])}, TypeError, "length is int64"),
        ({"appended": 2}, ValueError, "appended is 2"),
        (
            {"length": int32(32), "table": int32(0, 1), "appended": 1},
            ValueError,
            "length is 32 tokens and one appended; table has 2 pages of 16: reserve room first",
        ),
        ({"out": torch.zeros(14, 64)}, TypeError, "out is float32; it must be float16"),
    ],
)
def test_a_wrong_call_is_told_before_anything_runs(kernel, other, error, words):
    out = other.get("out", torch.full((14, 64), 7.0).half())
    before = out.clone()
    with pytest.raises(error, match=re.escape(words)):
        kernel(**arguments(**({"out": out} | other)))
    assert torch.equal(out, before)


@by_name
def test_an_output_that_is_the_query_is_refused(kernel):
    problem = Problem(20)
    problem.run(kernel)
    with pytest.raises(ValueError, match="out overlaps q"):
        if kernel is kernels.attention_online:
            k = problem.k.transpose(0, 1).contiguous()
            kernel(problem.q, k, k, problem.length_tensor, out=problem.q)
        else:
            kernel(**arguments(q=problem.q, out=problem.q))


def test_the_contiguous_cache_is_checked_too():
    q, k = torch.zeros(14, 64).half(), torch.zeros(2, 20, 64).half()
    with pytest.raises(ValueError, match="length is 21 tokens; k holds 20"):
        kernels.attention_online(q, k, k, int32(21))
    with pytest.raises(ValueError, match="v has shape"):
        kernels.attention_online(q, k, k[:, :19].contiguous(), int32(3))
    with pytest.raises(ValueError, match="head_dim 96"):
        kernels.attention_online(torch.zeros(14, 96).half(), torch.zeros(2, 20, 96).half(), k, int32(3))


@pytest.mark.parametrize(
    "how, error, words",
    [
        ({"splits": 0}, ValueError, "splits is 0; it must be 1 to 512"),
        ({"splits": 513}, ValueError, "splits is 513"),
        (
            {"workspace": kernels.attention_workspace(4, 64, 3, torch.float16, "cpu")},
            ValueError,
            "workspace.partial has shape",
        ),
        (
            {"workspace": kernels.attention_workspace(2, 64, 3, torch.float16, "cpu"), "splits": 4},
            ValueError,
            "workspace.partial",
        ),
        ({"workspace": kernels.attention_workspace(2, 64, 3, torch.bfloat16, "cpu")}, TypeError, "workspace.partial"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(how, error, words):
    with pytest.raises(error, match=re.escape(words)):
        kernels.paged_attention_mma(**arguments(**how))


@pytest.mark.parametrize(
    "other, error, words",
    [
        ({"qkv": torch.zeros(3, 64)}, ValueError, "qkv has 3 heads; 2 KV heads need 4 and those of the queries"),
        ({"qkv": torch.zeros(18, 64).bfloat16()}, TypeError, "qkv is bfloat16; it must be float32 or float16"),
        ({"qkv": torch.zeros(18, 65)}, ValueError, "qkv has shape (18, 65)"),
        ({"cos": torch.zeros(50, 64).half()}, TypeError, "cos is float16; it must be float32"),
        ({"sin": torch.zeros(49, 64)}, ValueError, "sin has shape (49, 64); it must be (50, 64)"),
        ({"length": int32(50)}, ValueError, "length is 50; cos and sin have 50 positions"),
        ({"length": int32(64)}, ValueError, "length is 64 tokens and one appended; table has 4 pages of 16"),
        ({"table": int32(0, 9, 1, 2)}, ValueError, "table[1] is page 9"),
        ({"pages": torch.zeros(8, 2, 2, 16, 96).half()}, ValueError, "pages has head_dim 96"),
        ({"q": torch.zeros(13, 64).half()}, ValueError, "q has shape (13, 64); it must be (14, 64)"),
    ],
)
def test_rope_append_refuses_what_does_not_fit(other, error, words):
    pages = torch.zeros(9, 2, 2, 16, 64).half()
    given = {
        "qkv": torch.ones(18, 64),
        "cos": torch.ones(50, 64),
        "sin": torch.ones(50, 64),
        "length": int32(20),
        "table": int32(0, 1, 2, 3),
        "pages": pages,
    }
    with pytest.raises(error, match=re.escape(words)):
        kernels.rope_append(**(given | other))
    if "q" not in other:
        with pytest.raises(error, match=re.escape(words.removesuffix(" or float16"))):
            kernels.rope_attention(**(given | other))
    assert not pages.any()


@pytest.mark.parametrize(
    "other, error, words",
    [
        ({"qkv": torch.zeros(18, 64).half()}, TypeError, "qkv is float16; it must be float32"),
        ({"out": torch.zeros(13, 64).half()}, ValueError, "out has shape (13, 64); it must be (14, 64)"),
        ({"splits": 0}, ValueError, "splits is 0; it must be 1 to 512"),
    ],
)
def test_rope_attention_refuses_what_does_not_fit(other, error, words):
    pages = torch.zeros(9, 2, 2, 16, 64).half()
    cache = {"length": int32(20), "table": int32(0, 1, 2, 3), "pages": pages}
    given = {"qkv": torch.ones(18, 64), "cos": torch.ones(50, 64), "sin": torch.ones(50, 64), **cache}
    with pytest.raises(error, match=re.escape(words)):
        kernels.rope_attention(**(given | other))
    assert not pages.any()


# Tiles


def test_a_tile_is_transposed_within_a_warp():
    source = (
        '#include "mma.cuh"\n'
        'extern "C" __global__ void turn(const unsigned* in, unsigned* out) {\n'
        "    out[threadIdx.x] = transpose_8x8(in[threadIdx.x]);\n"
        "}\n"
    )
    tile = torch.arange(64, dtype=torch.int16).view(8, 8)
    out = torch.zeros_like(tile)
    Program(source, {"turn": "pp"}).launch("turn", tile.device, 1, 32, (tile.view(torch.int32), out.view(torch.int32)))
    assert torch.equal(out, tile.T)
    assert "movmatrix" in (INCLUDE / "mma.cuh").read_text()
