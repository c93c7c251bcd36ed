"""Pages belong to whom the cache says: sequences grow, share and leave, and what cannot be done changes nothing."""

import copy
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoqwen.paged_kv import PagedKV, stored_in_8_bits


def cache(pages=8, **how):
    """Two layers, two KV heads of 64, every slot NaN until it is written."""
    made = PagedKV(2, pages, 2, 64, **({"sequences": 4, "dtype": torch.float16} | how))
    made.pool.fill_(math.nan)
    return made


def grow(c, sequence, tokens, seed=0):
    """Random keys and values in both layers; returns them, (layers, 2, tokens, kv_heads, head_dim)."""
    torch.manual_seed(seed)
    kv = torch.randn(2, 2, tokens, 2, 64).half()
    c.reserve(sequence, tokens)
    for layer in range(2):
        c.write(sequence, layer, *kv[layer])
    c.advance(sequence, tokens)
    return kv


def contents(c, sequence):
    return torch.stack([torch.stack(c.read(sequence, layer)) for layer in range(2)])


def state(c):
    """All that a failed call must leave as it was."""
    account = copy.deepcopy((c._users, c._free, c._sequences))
    return account, c.tables.clone(), c.lengths.clone(), c.pool.nan_to_num().clone()


def same(before, after):
    return before[0] == after[0] and all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33])
def test_what_is_written_is_read_and_lies_where_kernels_look(tokens):
    c = cache()
    a = c.new()
    kv = grow(c, a, tokens)
    assert torch.equal(contents(c, a), kv)
    table, length = c.view(a)
    assert length.tolist() == [tokens] and c.length(a) == tokens and c.free_pages == 8 - -(-tokens // 16)
    for i in range(tokens):
        page = c.pool[:, table[i // 16]]  # (layers, kv_heads, 2, 16, 64)
        assert torch.equal(page[:, :, :, i % 16], kv[:, :, i].transpose(1, 2))
    assert c.pool.isfinite().sum() == kv.numel()  # and nowhere else
    c.check()


def test_a_page_of_a_head_is_one_run_of_memory():
    c = PagedKV(3, 5, 4, 128, dtype=torch.bfloat16)
    assert c.pool.is_contiguous() and c.pool.stride(2) * c.pool.element_size() == 8192
    assert PagedKV(1, 1, 1, 64).pool[0, 0, 0].nbytes == 4096


def test_a_sequence_grows_token_by_token_over_a_page_boundary():
    c = cache()
    a = c.new()
    pieces = [grow(c, a, n, seed=n) for n in (14, 1, 1, 1, 20)]
    assert torch.equal(contents(c, a), torch.cat(pieces, dim=2)) and len(c.pages(a)) == 3


def test_pages_may_lie_in_any_order_and_are_used_again():
    c = cache(pages=4)
    a, b = c.new(), c.new()
    for n in range(2):
        grow(c, a, 16, seed=n), grow(c, b, 16, seed=n + 2)
    freed = c.pages(a)
    c.free(a)
    assert c.tables[a].tolist() == [-1] * 4 and c.lengths[a] == 0 and c.free_pages == 2
    again = c.new()
    kv = grow(c, again, 32, seed=9)
    assert set(c.pages(again)) == set(freed) and torch.equal(contents(c, again), kv)
    c.check()


def test_a_fork_shares_full_pages_and_copies_the_partial_one_when_it_is_written():
    c = cache()
    a = c.new()
    kv = grow(c, a, 40)
    b = c.fork(a)
    assert c.pages(a) == c.pages(b) and c.free_pages == 5 and torch.equal(contents(c, b), kv)
    more = grow(c, b, 3, seed=1)
    assert c.pages(a)[:2] == c.pages(b)[:2] and c.pages(a)[2] != c.pages(b)[2] and c.free_pages == 4
    other = grow(c, a, 2, seed=2)  # now the only user of its last page: no copy
    assert c.free_pages == 4
    assert torch.equal(contents(c, b), torch.cat((kv, more), 2))
    assert torch.equal(contents(c, a), torch.cat((kv, other), 2))
    c.free(a)
    assert torch.equal(contents(c, b), torch.cat((kv, more), 2)) and c.free_pages == 5
    c.check()
    c.free(b)
    assert c.free_pages == 8


def test_a_fork_of_full_pages_copies_nothing():
    c = cache()
    a = c.new()
    grow(c, a, 32)
    b = c.fork(a)
    grow(c, b, 1)
    assert c.pages(a) == c.pages(b)[:2] and c.free_pages == 5


def test_what_was_reserved_before_a_fork_must_be_reserved_again():
    c = cache()
    a = c.new()
    grow(c, a, 5)
    c.reserve(a, 30)
    b = c.fork(a)
    assert len(c.pages(b)) == 1  # the pages that hold no token yet are not shared
    with pytest.raises(ValueError, match=rf"sequence {a} has room for 0 tokens behind its 5, not for 1"):
        c.advance(a, 1)
    grow(c, a, 30, seed=1)
    assert c.pages(a)[0] != c.pages(b)[0]
    c.check()


def test_a_double_free_names_the_sequence_and_changes_nothing():
    c = cache()
    a, b = c.new(), c.new()
    grow(c, a, 20), grow(c, b, 20)
    c.free(a)
    before = state(c)
    with pytest.raises(ValueError, match=f"no sequence {a}: it has been freed already"):
        c.free(a)
    assert same(before, state(c)) and c.free_pages == 6


def test_a_page_freed_behind_the_cache_s_back_is_named():
    c = cache()
    a = c.new()
    grow(c, a, 20)
    page = c.pages(a)[1]
    c._users[page] = 0
    before = state(c)
    with pytest.raises(ValueError, match=f"page {page} of sequence {a} is free already"):
        c.free(a)
    assert same(before, state(c))


def test_a_full_pool_says_what_is_wanted_and_free_and_changes_nothing():
    c = cache(pages=4)
    a, b = c.new(), c.new()
    grow(c, a, 33)
    before = state(c)
    with pytest.raises(RuntimeError, match=f"sequence {b} wants 2 more pages for 0 \\+ 17 tokens; 1 of 4 are free"):
        c.reserve(b, 17)
    assert same(before, state(c))
    grow(c, b, 16)
    shared = c.fork(a)
    before = state(c)
    with pytest.raises(RuntimeError, match=f"sequence {shared} wants 1 more pages .* 0 of 4 are free"):
        c.reserve(shared, 1)  # the copy of the partial page has no place either
    assert same(before, state(c))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda c: c.reserve(3, 1), ValueError, "there is no sequence 3"),
        (lambda c: c.fork(2), ValueError, "there is no sequence 2"),
        (lambda c: c.view(7), ValueError, "there is no sequence 7"),
        (lambda c: c.reserve(0, -1), ValueError, "sequence 0 cannot grow by -1 tokens"),
        (lambda c: c.reserve(0, 41), ValueError, "sequence 0 would need 4 pages for 20 + 41 tokens; its table holds 3"),
        (lambda c: c.advance(0, 1), ValueError, "sequence 0 has room for 0 tokens behind its 20, not for 1: reserve"),
        (lambda c: c.write(0, 0, *torch.zeros(2, 1, 2, 64)), ValueError, "sequence 0 has room for 0 tokens"),
        (lambda c: c.write(0, 0, *torch.zeros(2, 1, 3, 64)), ValueError, "k has shape (1, 3, 64)"),
        (lambda c: [c.new() for _ in range(4)], RuntimeError, "all 4 sequences are in use"),
    ],
)
def test_a_wrong_call_is_told(call, error, words):
    c = cache(max_pages=3)
    grow(c, c.new(), 20)
    with pytest.raises(error, match=re.escape(words)):
        call(c)


@pytest.mark.parametrize(
    "how, error, words",
    [
        ({"page_size": 0}, ValueError, "page_size is 0; it must be at least 1"),
        ({"pages": 0}, ValueError, "pages is 0"),
        (
            {"head_dim": 20, "page_size": 1},
            ValueError,
            "is 80 bytes for a KV head; it must be a multiple of 128: use a page_size that is a multiple of 8",
        ),
        ({"dtype": torch.float32}, TypeError, "dtype is torch.float32; it must be torch.float16 or torch.bfloat16"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(how, error, words):
    with pytest.raises(error, match=re.escape(words)):
        PagedKV(**({"layers": 1, "pages": 2, "kv_heads": 1, "head_dim": 64} | how))


def test_check_finds_a_table_that_points_elsewhere_and_a_length_over_the_table():
    c = cache()
    a, b = c.new(), c.new()
    grow(c, a, 20), grow(c, b, 20)
    right = c.tables.clone()
    for wrong, words in (
        (8, "page 8 at 1; the pool has 0 to 7"),
        (-1, "page -1 at 1"),
        (7, "page 7 at 1, which is free"),
    ):
        c.tables[a, 1] = wrong
        with pytest.raises(ValueError, match=f"sequence {a} has {words}"):
            c.check()
    c.tables[a, 1] = c.tables[b, 0]
    with pytest.raises(ValueError, match="which is not its own"):
        c.check()
    c.tables.copy_(right)
    c.lengths[b] = 33
    with pytest.raises(ValueError, match=f"sequence {b} has length 33; its 2 pages hold 32 tokens"):
        c.check()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 40)), max_size=30))
def test_whatever_is_done_every_sequence_keeps_its_own_tokens(actions):
    c, expected = cache(pages=10), {}
    for n, (what, sequence, tokens) in enumerate(actions):
        try:
            if what == 0:
                expected[c.new()] = torch.empty(2, 2, 0, 2, 64).half()
            elif what == 1:
                expected[sequence] = torch.cat((contents(c, sequence), grow(c, sequence, tokens, seed=n)), dim=2)
            elif what == 2:
                forked = c.fork(sequence)
                expected[forked] = expected[sequence]
            else:
                c.free(sequence)
                del expected[sequence]
        except (ValueError, RuntimeError):
            pass
        c.check()
        for known, kv in expected.items():
            assert torch.equal(contents(c, known), kv)
    users = sum(len(c.pages(known)) for known in expected)
    assert sum(c._users) == users and c.free_pages == c._users.count(0)


@pytest.mark.parametrize("form, rounding, answer", [("int8", 0.02, 0.02), ("fp8", 0.05, 0.05)])
def test_eight_bits_cost_what_their_rounding_says(form, rounding, answer):
    """Normal data: int8 rounds to 1/254 of a row's largest value, fp8 to 1/16 of each value at worst."""
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 128), torch.randn(1000, 128).half(), torch.randn(1000, 128).half()

    def attend(k, v):
        return (q.double() @ k.double().T * 128**-0.5).softmax(-1) @ v.double()

    def error(a, b):
        return ((a.double() - b.double()).norm() / b.double().norm()).item()

    short_k, short_v = stored_in_8_bits(k, form), stored_in_8_bits(v, form)
    assert rounding / 4 < error(short_k, k) < rounding and rounding / 4 < error(short_v, v) < rounding
    assert 1e-3 < error(attend(short_k, short_v), attend(k, v)) < answer
    if form == "int8":
        assert ((short_k - k.float()).abs() <= k.float().abs().amax(-1, keepdim=True) / 254 * 1.001).all()


def test_eight_bits_hold_large_keys_and_zeros():
    x = torch.tensor([[400.0, -1.0, 0.0], [0.0, 0.0, 0.0], [6e4, 5e4, -6e4]])
    for form in ("int8", "fp8"):
        short = stored_in_8_bits(x, form)
        assert short.isfinite().all() and not short[1].any() and short[2, 0] == pytest.approx(6e4)
    with pytest.raises(ValueError, match="form is 'int4'; it must be one of int8, fp8"):
        stored_in_8_bits(x, "int4")
