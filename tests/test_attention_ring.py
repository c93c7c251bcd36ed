"""The pipeline of a producer and six consumers equals attention in float64 at every length and for every kind of heads,
never uses what lies past the length, and is clean under observation."""

import math

import pytest
import torch

from nanoqwen import kernels, simt
from nanoqwen.kernels.attention import CONSUMERS, RING_BLOCKS_PER_SM, choose_splits
from nanoqwen.packing import PAGE_SIZE

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 49, 255, 256, 257)
HEADS = {  # query heads, KV heads, head_dim
    "7B": (28, 4, 128),
    "0.5B": (14, 2, 64),
    "1.5B": (12, 2, 128),
    "one to one": (3, 3, 64),
    "eight to one": (8, 1, 128),
    "five to one": (10, 2, 64),
}
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of ‖out − reference‖/‖reference‖: out is rounded to its dtype

kernel_by_name = pytest.mark.parametrize(
    "kernel", [kernels.paged_attention_ring, kernels.paged_attention_cp_async], ids=lambda kernel: kernel.__name__
)


class Problem:
    """A sequence in pages out of order, with NaN wherever the pool holds none of its tokens."""

    def __init__(self, heads, kv_heads, head_dim, tokens, dtype=torch.float16, spare_pages=2):
        make = torch.Generator().manual_seed(heads * 7919 + head_dim + tokens)
        self.q, self.k, self.v = (
            torch.randn(*shape, head_dim, generator=make).to(dtype)
            for shape in ((heads,), (kv_heads, tokens), (kv_heads, tokens))
        )
        self.tokens, self.max_pages = tokens, -(-tokens // PAGE_SIZE) + spare_pages
        self.table = torch.randperm(self.max_pages + 3, generator=make)[: self.max_pages].int()

    @property
    def pages(self):
        kv_heads, _, head_dim = self.k.shape
        pages = torch.full((self.max_pages + 3, kv_heads, 2, PAGE_SIZE, head_dim), math.nan, dtype=self.q.dtype)
        for t in range(self.tokens):
            page, slot = int(self.table[t // PAGE_SIZE]), t % PAGE_SIZE
            pages[page, :, 0, slot], pages[page, :, 1, slot] = self.k[:, t], self.v[:, t]
        return pages

    @property
    def reference(self):
        kv_heads, _, head_dim = self.k.shape
        q = self.q.double().view(kv_heads, -1, head_dim)
        scores = torch.einsum("kgd,ktd->kgt", q, self.k.double()) / math.sqrt(head_dim)
        return torch.einsum("kgt,ktd->kgd", scores.softmax(-1), self.v.double()).reshape(-1, head_dim)

    def run(self, kernel, **how):
        """Of a kernel, into an output full of NaN."""
        out, length = torch.full_like(self.q, math.nan), torch.tensor([self.tokens], dtype=torch.int32)
        assert kernel(self.q, self.pages, self.table, length, out=out, **how) is out
        return out

    def error(self, out):
        value = ((out.double() - self.reference).norm() / self.reference.norm()).item()
        return value if math.isfinite(value) else math.inf


@kernel_by_name
@pytest.mark.parametrize("heads", HEADS)
def test_every_length_is_right_and_clean(kernel, heads):
    for tokens in LENGTHS:
        problem = Problem(*HEADS[heads], tokens)
        report = simt.observe(problem.run, kernel)
        assert report.clean, f"{tokens} tokens:\n{report}"
        assert problem.error(report.result) < TOLERANCE[torch.float16], tokens


@kernel_by_name
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_any_number_of_splits_gives_the_same(kernel, dtype):
    for tokens in (1, 49, 257):
        problem = Problem(14, 2, 64, tokens, dtype)
        for splits in (1, 2, 3, 40):  # the last: more than there are pages
            assert problem.error(problem.run(kernel, splits=splits)) < TOLERANCE[dtype], (tokens, splits)


@kernel_by_name
def test_the_ring_goes_round_many_times_in_any_order_of_the_threads(kernel):
    problem = Problem(7, 1, 64, 1501)
    outs = []
    for seed in range(3):
        with simt.observing(seed=seed) as report:
            outs.append(problem.run(kernel, splits=1))
        assert report.clean, str(report)
    assert problem.error(outs[0]) < 1e-3 and all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("heads", HEADS)
def test_both_ways_to_copy_give_the_same_bits(heads):
    problem = Problem(*HEADS[heads], 257)
    assert torch.equal(problem.run(kernels.paged_attention_ring), problem.run(kernels.paged_attention_cp_async))


@kernel_by_name
def test_a_query_of_zeros_gives_the_mean(kernel):
    problem = Problem(14, 2, 64, 49)
    problem.q.zero_()
    mean = problem.v.double().mean(1).repeat_interleave(7, 0)
    torch.testing.assert_close(problem.run(kernel).double(), mean, rtol=1e-3, atol=1e-3)


@kernel_by_name
@pytest.mark.parametrize("place", [0, 47, 48, 256])
def test_one_dominant_key_is_found_wherever_it_is(kernel, place):
    problem = Problem(14, 2, 64, 257)
    problem.q[:] = problem.q[0]
    problem.k[:, place] = problem.q[0].sign() * 20
    wanted = problem.v[:, place].double().repeat_interleave(7, 0)
    for splits in (1, None):
        torch.testing.assert_close(problem.run(kernel, splits=splits).double(), wanted, rtol=1e-3, atol=1e-3)


@kernel_by_name
def test_scores_that_rise_from_page_to_page_keep_the_exponentials_in_range(kernel):
    problem = Problem(7, 1, 128, 600)
    problem.k[:] = problem.q[3] * torch.linspace(-15, 15, 600)[:, None].half()  # head 3: scores of some hundred
    assert problem.error(problem.run(kernel, splits=1)) < 1e-3


@kernel_by_name
def test_appended_tokens_count_though_the_length_has_not_grown(kernel):
    problem = Problem(14, 2, 64, 33)
    wanted = problem.run(kernel)
    out, length = torch.full_like(problem.q, math.nan), torch.tensor([32], dtype=torch.int32)
    kernel(problem.q, problem.pages, problem.table, length, out=out, appended=1)
    assert torch.equal(out, wanted)


@kernel_by_name
def test_timestamps_tell_when_each_warp_waited_and_change_nothing(kernel):
    problem = Problem(7, 1, 64, 13 * PAGE_SIZE)
    fills = 2 * 3  # K and V of 6, 6 and 1 pages
    times = torch.full((fills + 1, CONSUMERS + 1, 3), -1, dtype=torch.int64)
    assert torch.equal(problem.run(kernel, splits=1, timestamps=times), problem.run(kernel, splits=1))
    began, had, done = times[:fills].unbind(-1)
    assert (began >= 0).all() and (began <= had).all() and (had <= done).all()
    assert (times[fills] == -1).all()
    assert (done[:-1] <= began[1:]).all(), "a warp takes fills in turn"
    # The producer may fill a stage again only once everyone is done with what was there.
    assert (had[3:, CONSUMERS] >= had[:-3, :CONSUMERS].amax(1)).all()
    too_few = torch.full((2, CONSUMERS + 1, 3), -1, dtype=torch.int64)
    problem.run(kernel, splits=1, timestamps=too_few)
    assert (too_few >= 0).all()


def test_splits_fill_the_gpu_but_leave_a_page_for_each_warp():
    for pages, kv_heads, splits in ((2048, 4, 66), (1, 4, 1), (13, 2, 3)):  # the first: two blocks a multiprocessor
        assert choose_splits(16 * pages, kv_heads, 132, RING_BLOCKS_PER_SM, least_pages=CONSUMERS) == splits


@kernel_by_name
def test_timestamps_of_another_shape_are_refused(kernel):
    with pytest.raises(ValueError, match=r"timestamps has shape .*; it must be \(fills, 7, 3\)"):
        Problem(14, 2, 64, 49).run(kernel, timestamps=torch.zeros(6, 7, dtype=torch.int64))
