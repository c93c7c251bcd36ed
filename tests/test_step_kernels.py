"""What a decode step has besides its layers: equal to float64 on the SIMT machine, padding never chosen, draws that
have the probabilities of the `Sampler`, and a clear error before anything runs."""

import math
import re

import pytest
import torch

from nanoqwen import kernels, simt
from nanoqwen.generation import Sampler
from nanoqwen.kernels.launch import Program
from nanoqwen.kernels.step import DIGITS, MAX_BLOCKS, TokenWorkspace

DTYPES = (torch.float16, torch.bfloat16)
PAIRS = ((torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float16))
TOLERANCE = 1e-6  # ‖logits − reference‖ / ‖reference‖ of fp32 sums

by_pair = pytest.mark.parametrize("dtype, norm_dtype", PAIRS, ids=str)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def error(out, reference):
    value = ((out.double() - reference).norm() / reference.norm()).item()
    return value if math.isfinite(value) else math.inf


# Embedding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 64, 255, 257, 896, 3584])
def test_embed_gives_the_token_s_row(dtype, hidden):
    table = torch.randn(9, hidden).to(dtype)
    for token in (0, 5, 8):
        h = torch.full((hidden,), math.nan)
        with simt.observing() as report:
            assert kernels.embed(table, int32(token), out=h, pdl=True) is h
        assert torch.equal(h, table[token].float()) and not report.findings and report.lines


def test_a_token_outside_the_table_shows_and_reads_nothing():
    table = torch.zeros(9, 300).half()
    for token in (9, -1, 2**31 - 1, -(2**31)):
        with simt.observing() as report:
            h = kernels.embed(table, int32(token), out=torch.zeros(300))
        assert h.isnan().all() and not report.findings
        assert not any("table" in line.buffers for line in report.lines)


# The last norm and the vocabulary


class Head:
    """A matrix, a hidden state of a size that fp16 does not have, and the logits in float64."""

    def __init__(self, rows, cols, dtype=torch.bfloat16, norm_dtype=None, scale=1e6, eps=1e-6):
        make = torch.Generator().manual_seed(rows * 7919 + cols)
        self.w = torch.randn(rows, cols, generator=make).to(dtype)
        self.h = torch.randn(cols, generator=make) * scale
        self.norm = (1 + torch.randn(cols, generator=make) / 4).to(norm_dtype or dtype)
        self.eps = eps

    @property
    def reference(self):
        h = self.h.double()
        return self.w.double() @ (h / (h.square().mean() + self.eps).sqrt() * self.norm.double())

    def run(self, **how):
        """The logits, into an output full of NaN."""
        out = torch.full((len(self.w),), math.nan)
        assert kernels.lm_head(self.w, self.h, self.norm, self.eps, out=out, **how) is out
        return out


@by_pair
@pytest.mark.parametrize("cols", [8, 64, 896, 1000, 1536, 3584, 5128])
def test_lm_head_is_right(dtype, norm_dtype, cols):
    for rows in (1, 7, 33, 129):
        head = Head(rows, cols, dtype, norm_dtype)
        assert error(head.run(), head.reference) < TOLERANCE, rows


def test_lm_head_of_a_vocabulary_is_right_to_the_last_row():
    for rows in (4864, 151936):
        head = Head(rows, 16)
        out = head.run()
        assert error(out, head.reference) < TOLERANCE and error(out[-5:], head.reference[-5:]) < 1e-5


@pytest.mark.parametrize("cols", [896, 3584])
def test_any_number_of_blocks_gives_the_same_bits(cols):
    head = Head(100, cols)
    first = head.run(blocks=1)
    for blocks in (2, 3, 5, 12, 1000):
        assert torch.equal(head.run(blocks=blocks, pdl=True), first), blocks


@pytest.mark.parametrize("cols", [896, 1000, 3584])
def test_lm_head_observed_is_clean_and_reads_each_weight_once(cols):
    head = Head(37, cols)
    for seed in (0, 1):
        with simt.observing(seed=seed) as report:
            out = head.run(blocks=2)
        assert not report.findings and error(out, head.reference) < TOLERANCE
        read = sum(line.sectors * 32 for line in report.lines if "w" in line.buffers)
        assert read >= head.w.nbytes and (cols % 16 or read == head.w.nbytes)


def test_logits_are_finite_however_large_the_hidden_state():
    for scale in (1e-6, 1.0, 65504.0, 1e9, 1e15):
        head = Head(20, 64, torch.float16, scale=scale)
        assert error(head.run(), head.reference) < TOLERANCE, scale


def test_a_weight_that_is_no_number_stays_in_its_row():
    head = Head(40, 136)
    head.w[7, 100], head.w[39, 0] = math.nan, math.inf
    out, reference = head.run(blocks=1), head.reference
    rows = torch.arange(40) % 32 != 7
    assert out[7].isnan() and not out[39].isfinite()
    assert error(out[rows], reference[rows]) < TOLERANCE


def test_the_measure_of_error_rejects_what_is_wrong():
    head = Head(40, 64)
    reference = head.reference
    for wrong in (torch.zeros(40), torch.full((40,), math.nan), torch.arange(40.0), head.w.float()[:, 0]):
        assert error(wrong, reference) > 0.1
    wrong = head.run()
    wrong[-1] = math.nan
    assert error(wrong, reference) == math.inf


# The choice


class Step:
    """Where a choice is written, full of what must not stay."""

    def __init__(self, length=3, room=6):
        self.token, self.length, self.workspace = int32(-7), int32(length), kernels.token_workspace("cpu")
        self.history = torch.full((room,), -9, dtype=torch.int32)
        self.workspace.best.fill_(-1), self.workspace.search.fill_(-1)  # as a larger run may have left them

    def run(self, kernel, logits, vocab=None, **how):
        vocab = len(logits) if vocab is None else vocab
        written = self.token, self.length, self.history, self.workspace
        assert kernel(logits, vocab, *written, **how) is self.token
        assert not self.workspace.arrivals.any() and not self.workspace.bins.any()
        return self.token.item()


@pytest.mark.parametrize("vocab, rows", [(1, 1), (5, 9), (33, 33), (1024, 1024), (1025, 1100), (5000, 5010)])
def test_greedy_takes_the_largest_and_never_a_pad_row(vocab, rows):
    for seed in range(3):
        logits = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
        logits[vocab:] = 1e9 if seed else math.nan
        step = Step()
        with simt.observing(seed=seed) as report:
            chosen = step.run(kernels.greedy, logits, vocab, pdl=True)
        assert not report.findings and chosen == logits[:vocab].argmax()
        assert step.length.item() == 4 and step.history.tolist() == [-9, -9, -9, chosen, -9, -9]


def test_greedy_finds_the_largest_wherever_it_is():
    step = Step()
    for at in (0, 31, 32, 1023, 1024, 2100, 2999):
        logits = torch.randn(3000)
        logits[at] = 100
        assert step.run(kernels.greedy, logits) == at


def test_of_equal_logits_the_first_wins():
    step = Step()
    for at in ((7, 8), (31, 32), (5, 2500), (1023, 1024, 2047)):
        logits = torch.randn(3000) - 50
        logits[list(at)] = -1.5
        assert step.run(kernels.greedy, logits) == at[0]
    assert step.run(kernels.greedy, torch.zeros(3000)) == 0
    assert step.run(kernels.greedy, torch.tensor([-1.0, -0.0, 0.0])) == 1
    assert step.run(kernels.greedy, torch.tensor([-1.0, 0.0, -0.0])) == 1


def test_infinities_are_logits_like_others():
    step, inf = Step(), math.inf
    for kernel in (kernels.greedy, kernels.sample):
        assert step.run(kernel, torch.tensor([-inf, -1e38, -inf])) == 1
        assert step.run(kernel, torch.tensor([1.0, inf, 3e38])) == 1
        assert step.run(kernel, torch.tensor([-inf, -inf])) == 0
    assert step.run(kernels.sample, torch.tensor([1.0, inf, -inf, 2.0]), top_k=3, top_p=0.9) == 1
    assert step.run(kernels.sample, torch.tensor([-inf, -inf, 1.0]), top_k=2, top_p=0.9) == 2


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_among_the_logits_shows(sign):
    nan = torch.tensor(math.nan).copysign(torch.tensor(sign))
    for at in (0, 1500, 2999):
        logits = torch.randn(3000)
        logits[at] = nan
        for kernel, how in (
            (kernels.greedy, {}),
            (kernels.sample, {}),
            (kernels.sample, {"top_k": 3}),
            (kernels.sample, {"top_k": 3, "top_p": 0.5}),
        ):
            step = Step()
            assert step.run(kernel, logits, **how) == -1
            assert step.history[3] == -1 and step.length.item() == 4
    assert kernels.embed(torch.zeros(3000, 8).half(), step.token).isnan().all()


@pytest.mark.parametrize("kernel", [kernels.greedy, kernels.sample], ids=lambda kernel: kernel.__name__)
def test_nothing_is_written_past_the_history(kernel):
    logits = torch.randn(50)
    for length in (-1, 6, 7, 2**31 - 2):
        step = Step(length)
        around = torch.full((20,), -9, dtype=torch.int32)
        step.history = around[7:13]
        step.run(kernel, logits)
        assert (around == -9).all() and step.length.item() == length + 1
    token, length = int32(0), int32(5)
    assert kernel(logits, 50, token, length) is token and length.item() == 6  # without a history


def test_a_step_after_the_other_is_the_decode_loop():
    torch.manual_seed(3)
    table, head = torch.randn(40, 64).half(), Head(48, 64, torch.float16)
    step = Step(length=2, room=12)
    step.token.fill_(11)
    expected, token = [], 11
    for _ in range(9):
        kernels.embed(table, step.token, out=head.h)
        step.run(kernels.greedy, head.run(), 40)
        head.h = table[token].float()
        token = head.reference[:40].argmax().item()
        expected.append(token)
    assert step.history.tolist() == [-9, -9, *expected, -9] and len(set(expected)) > 2


# Draws


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """In float64, of each token; of equal logits all are kept or none."""
    scaled = logits.double() / temperature
    if 0 < top_k < len(scaled):
        scaled = torch.where(scaled >= scaled.sort(descending=True).values[top_k - 1], scaled, -math.inf)
    shares = scaled.softmax(-1)
    if top_p < 1:
        above = torch.tensor([shares[scaled > own].sum() for own in scaled])
        shares = torch.where(above < torch.tensor(top_p).double(), shares, 0.0)
    return shares / shares.sum()


def kept(step, logits):
    """The tokens of at least the floor that the search found."""
    bits = logits.view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return keys >= step.workspace.search[1]


RULES = (
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1999, "temperature": 0.7},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 2.0},
    {"top_p": 0.9999},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 300, "top_p": 0.99},
    {"top_k": 2, "top_p": 0.1},
)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_top_k_and_top_p_keep_what_the_sampler_keeps(rules, monkeypatch):
    for scale in (1.0, 5.0, 1e-3):
        logits = torch.randn(2000, generator=torch.Generator().manual_seed(int(scale))) * scale
        drawn_from = []
        monkeypatch.setattr(torch, "multinomial", lambda p, n, generator, to=drawn_from: to.append(p) or p[:1].long())
        Sampler(**{"temperature": 1.0, **rules})(logits, int32())
        step = Step()
        with simt.observing() as report:
            chosen = step.run(kernels.sample, logits, pdl=True, **rules)
        assert not report.findings and kept(step, logits)[chosen]
        expected = probabilities(logits, **rules) > 0
        assert torch.equal(kept(step, logits), expected)
        assert (expected != (drawn_from[0] > 0)).sum() <= (1 if rules.get("top_p", 1) > 0.9 else 0)  # its sums are fp32


def test_equal_logits_are_kept_together():
    step = Step()
    logits = torch.tensor([1.0, 2.0, 0.0, 2.0, -0.0, 1.0, 0.5])
    for rules, expected in (
        ({"top_k": 1}, [1, 3]),
        ({"top_k": 3}, [0, 1, 3, 5]),
        ({"top_p": 1e-9}, [1, 3]),
        ({"top_k": 5, "top_p": 0.7}, [0, 1, 3, 5]),
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5, 6]),
    ):
        step.run(kernels.sample, logits, **rules)
        # −0 and 0 are equal, and have different bits
        assert kept(step, logits + 0.0).nonzero().flatten().tolist() == expected, rules
    assert step.run(kernels.sample, torch.zeros(3000), top_p=0.5) < 3000
    assert kept(step, torch.zeros(3000)).all()


def test_degenerate_draws_are_greedy():
    for seed in range(5):
        logits = torch.randn(1500, generator=torch.Generator().manual_seed(seed))
        greedy = logits.argmax().item()
        for rules in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}, {"top_p": 5e-324}):
            how = {"seed": seed, **rules}
            assert Step().run(kernels.sample, logits, **how) == greedy, rules


def test_settings_may_be_as_large_as_the_sampler_takes_them():
    logits = torch.tensor([1.0, 50.0, 30.0])
    drawn = draw(logits, 60, temperature=1e300, top_k=2**40, top_p=0.999999)
    assert drawn.bincount().min() > 5  # of one probability


def draw(logits, count, vocab=None, seed=0, start=0, **rules):
    step = Step(start, start + count)
    for _ in range(count):
        step.run(kernels.sample, logits, vocab, seed=seed, **rules)
    return step.history[start:]


def chi_square(counts, expected):
    """(statistic, what it passes in one of ten thousand runs: Wilson and Hilferty, 1931)."""
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return statistic, freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "rules, count",
    [({"temperature": 1.0}, 2000), ({"temperature": 0.6, "top_k": 9}, 1000), ({"top_k": 12, "top_p": 0.9}, 1000)],
    ids=str,
)
def test_draws_have_the_probabilities_of_float64(rules, count):
    logits = torch.randn(16, generator=torch.Generator().manual_seed(5))
    logits[13:] = 1e9  # padding
    shares = probabilities(logits[:13], **rules)
    counts = draw(logits, count, 13, seed=1, **rules).bincount(minlength=13).double()
    assert not counts[shares == 0].any()
    statistic, limit = chi_square(counts[shares > 0], shares[shares > 0] * count)
    assert statistic < limit
    flat = torch.ones(int((shares > 0).sum())).double() / (shares > 0).sum() * count
    assert chi_square(counts[shares > 0], flat)[0] > limit  # other probabilities would show


def test_a_run_repeats_and_neither_positions_nor_seeds_do():
    logits = torch.zeros(1000)
    first = draw(logits, 30, seed=7)
    assert torch.equal(draw(logits, 30, seed=7), first)
    assert torch.equal(draw(logits, 10, seed=7, start=20), first[20:])  # of seed and length alone
    assert len(first.unique()) > 25
    for seed in (8, -7, 7 + 2**32, 2**63 - 1, -(2**63)):
        assert (draw(logits, 30, seed=seed) == first).sum() < 3, seed


M, W, WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF


def philox(counter, key):
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = M[0] * x0, M[1] * x2
        x0, x1, x2, x3 = b >> 32 ^ x1 ^ k0, b & WORD, a >> 32 ^ x3 ^ k1, a & WORD
        k0, k1 = k0 + W[0] & WORD, k1 + W[1] & WORD
    return x0, x1, x2, x3


def test_the_random_numbers_are_philox():
    # Known answers of Random123, the authors' library.
    assert philox((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((WORD,) * 4, (WORD,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)

    text = """#include "../choose_token.cu"
    extern "C" __global__ void numbers(unsigned* out, float* noise, long long seed, unsigned position) {
        out[threadIdx.x] = philox(seed, threadIdx.x, position);
        noise[threadIdx.x] = gumbel(out[threadIdx.x]);
    }"""
    program = Program(text, {"numbers": "pplu"})
    for seed, position in ((0, 0), (12345678901234, 99), (-3, 2**32 - 1)):
        out, noise = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
        program.launch("numbers", out.device, 1, 64, (out, noise, seed, position))
        key = seed & WORD, seed >> 32 & WORD
        words = [philox((i, position, 0, 0), key)[0] for i in range(64)]
        assert (out.long() & WORD).tolist() == words
        exact = -(-((torch.tensor(words).double() + 0.5) / 2**32).mul(-1).log1p()).log()
        torch.testing.assert_close(noise.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_noise_is_finite_at_both_ends():
    text = """#include "../choose_token.cu"
    extern "C" __global__ void noise(const unsigned* bits, float* out) { out[threadIdx.x] = gumbel(bits[threadIdx.x]); }
    """
    bits, out = torch.tensor([0, 1, -1, -2, -(2**31)], dtype=torch.int32), torch.zeros(5)
    Program(text, {"noise": "pp"}).launch("noise", out.device, 1, 5, (bits, out))
    assert out.isfinite().all() and out[0] > out[1] > 21 and out[2] < -2.7


# Refused


def misaligned(*shape, dtype=torch.float32):
    size = math.prod(shape)
    return torch.zeros(size + 1, dtype=dtype)[1:].view(shape)


@pytest.mark.parametrize(
    "other, error, words",
    [
        ({"table": torch.zeros(9, 64)}, TypeError, "table is float32; it must be float16 or bfloat16"),
        ({"table": torch.zeros(9, 64).half()[:, ::2]}, ValueError, "table is not contiguous"),
        ({"table": torch.zeros(64).half()}, ValueError, "table has shape (64,); it must be (vocab, hidden)"),
        ({"table": torch.zeros(9, 64).half().to("meta")}, ValueError, "table is on meta"),
        ({"token": torch.tensor([1])}, TypeError, "token is int64; it must be int32"),
        ({"token": 3}, TypeError, "token must be a tensor, got int"),
        ({"token": int32(1, 2)}, ValueError, "token has shape (2,); it must be (1,)"),
        ({"token": int32(1).to("meta")}, ValueError, "token is on meta; it must be on cpu"),
        ({"out": torch.zeros(64).half()}, TypeError, "out is float16; it must be float32"),
        ({"out": torch.zeros(63)}, ValueError, "out has shape (63,); it must be (64,)"),
    ],
)
def test_embed_refuses_what_does_not_fit(other, error, words):
    out = other.get("out", torch.full((64,), 7.0))
    before = out.clone()
    with pytest.raises(error, match=re.escape(words)):
        kernels.embed(**({"table": torch.zeros(9, 64).half(), "token": int32(1), "out": out} | other))
    assert torch.equal(out, before)


@pytest.mark.parametrize(
    "other, error, words",
    [
        ({"w": torch.zeros(9, 64)}, TypeError, "w is float32; it must be float16 or bfloat16"),
        ({"w": torch.zeros(9, 68).half()}, ValueError, "w has 68 columns; 16-byte loads need a multiple of 8"),
        ({"w": torch.zeros(9, 128).half()[:, ::2]}, ValueError, "w is not contiguous"),
        ({"w": misaligned(9, 64, dtype=torch.float16)}, ValueError, "w starts at an address"),
        ({"w": torch.zeros(1, 60000).half()}, ValueError, "h has shape"),
        ({"h": torch.zeros(64).half()}, TypeError, "h is float16; it must be float32"),
        ({"h": torch.zeros(72)}, ValueError, "h has shape (72,); it must be (64,)"),
        ({"h": misaligned(64)}, ValueError, "h starts at an address"),
        ({"norm": torch.zeros(64)}, TypeError, "norm is float32"),
        ({"norm": torch.zeros(64).bfloat16()}, TypeError, "norm is bfloat16; it must be float16"),
        ({"norm": torch.zeros(8).half()}, ValueError, "norm has shape (8,); it must be (64,)"),
        ({"eps": -1.0}, ValueError, "eps is -1.0; it must be 0 or more"),
        ({"eps": math.nan}, ValueError, "eps is nan"),
        ({"blocks": 0}, ValueError, "blocks is 0; it must be at least 1"),
        ({"out": torch.zeros(9).half()}, TypeError, "out is float16; it must be float32"),
        ({"out": torch.zeros(8)}, ValueError, "out has shape (8,); it must be (9,)"),
    ],
)
def test_lm_head_refuses_what_does_not_fit(other, error, words):
    out = other.get("out", torch.full((9,), 7.0))
    before = out.clone()
    given = {"w": torch.zeros(9, 64).half(), "h": torch.ones(64), "norm": torch.ones(64).half(), "eps": 1e-6}
    with pytest.raises(error, match=re.escape(words)):
        kernels.lm_head(**(given | {"out": out} | other))
    assert torch.equal(out, before)


def test_outputs_that_are_inputs_are_refused():
    h = torch.ones(64)
    with pytest.raises(ValueError, match="out overlaps h; blocks would read"):
        kernels.lm_head(torch.zeros(64, 64).half(), h, torch.ones(64).half(), 1e-6, out=h)
    with pytest.raises(ValueError, match="w has 60000 columns; h must fit into"):
        kernels.lm_head(torch.zeros(1, 60000).half(), torch.ones(60000), torch.ones(60000).half(), 1e-6)
    both = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="length overlaps token; both are written"):
        kernels.greedy(torch.zeros(5), 5, both[:1], both[:1])
    with pytest.raises(ValueError, match="history overlaps length"):
        kernels.greedy(torch.zeros(5), 5, int32(0), both[:1], both)
    logits = torch.zeros(5)
    with pytest.raises(ValueError, match="token overlaps logits"):
        kernels.greedy(logits, 5, logits.view(torch.int32)[:1], both[:1])


@pytest.mark.parametrize("kernel", [kernels.greedy, kernels.sample], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize(
    "other, error, words",
    [
        ({"logits": torch.zeros(9).half()}, TypeError, "logits is float16; it must be float32"),
        ({"logits": torch.zeros(18)[::2]}, ValueError, "logits is not contiguous"),
        ({"logits": torch.zeros(1, 9)}, ValueError, "logits has shape (1, 9); it must be (rows,)"),
        ({"vocab": 10}, ValueError, "vocab is 10; it must be 1 to 9, at most the logits"),
        ({"vocab": 0}, ValueError, "vocab is 0; it must be 1 to 9"),
        ({"vocab": 2.0}, ValueError, "vocab is 2.0"),
        ({"token": torch.tensor([1])}, TypeError, "token is int64"),
        ({"length": int32(1, 2)}, ValueError, "length has shape (2,); it must be (1,)"),
        ({"length": int32(1).to("meta")}, ValueError, "length is on meta; it must be on cpu"),
        ({"history": torch.zeros(5)}, TypeError, "history is float32; it must be int32"),
        (
            {"workspace": kernels.token_workspace("cpu")._replace(bins=torch.zeros(5, dtype=torch.int64))},
            ValueError,
            f"workspace.bins has shape (5,); it must be ({DIGITS},)",
        ),
        (
            {"workspace": TokenWorkspace(*(torch.zeros(MAX_BLOCKS, dtype=torch.int32) for _ in range(4)))},
            TypeError,
            "workspace.best is int32; it must be int64",
        ),
    ],
)
def test_a_choice_refuses_what_does_not_fit(kernel, other, error, words):
    given = {"logits": torch.zeros(9), "vocab": 9, "token": int32(-7), "length": int32(3)}
    given |= {"history": int32(-9, -9)} | other
    before = [tensor.clone() for tensor in given.values() if isinstance(tensor, torch.Tensor) and tensor.is_cpu]
    with pytest.raises(error, match=re.escape(words)):
        kernel(**given)
    after = [tensor for tensor in given.values() if isinstance(tensor, torch.Tensor) and tensor.is_cpu]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "rules, words",
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0 (greedy), or 1e-6 up"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must be a whole number of 64 bits"),
        ({"seed": 1.0}, "seed is 1.0"),
    ],
)
def test_a_draw_refuses_what_is_out_of_range(rules, words):
    token, length = int32(-7), int32(3)
    with pytest.raises(ValueError, match=re.escape(words)):
        kernels.sample(torch.zeros(9), 9, token, length, **rules)
    assert token.item() == -7 and length.item() == 3


def test_a_vocabulary_whose_sums_would_not_fit_is_refused():
    logits = torch.zeros(2**20)
    with pytest.raises(ValueError, match="vocab is 1048576; it must be 1 to 1048575"):
        kernels.sample(logits, 2**20, int32(0), int32(0), top_p=0.5)
    step = Step()
    assert step.run(kernels.sample, logits, 2**20 - 1, top_p=0.5) >= 0  # all of one probability: the largest sum
    assert kept(step, logits).all()
