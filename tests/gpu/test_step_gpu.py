"""On a GPU: the ends of a decode step at the sizes of models, against float64 and the SIMT machine, the same bits each
time, and inside a graph whose replays are steps."""

import math

import pytest
import torch

from nanoqwen import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("cupy")

# rows, cols: 0.5B, 1.5B, 7B, and shapes with a tail
HEADS = ((151936, 896), (151936, 1536), (152064, 3584), (1, 8), (4865, 1000), (129, 5128))
PAIRS = ((torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float16))
TOLERANCE = 1e-6
RULES = ({}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}, {"temperature": 0.0})
VOCAB, ROWS = 151665, 152064

by_rules = pytest.mark.parametrize("rules", RULES, ids=str)


def error(out, reference):
    value = ((out.double() - reference.double()).norm() / reference.double().norm()).item()
    return value if math.isfinite(value) else math.inf


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Head:
    def __init__(self, rows, cols, dtype=torch.bfloat16, norm_dtype=None, scale=1e6):
        make = torch.Generator("cuda").manual_seed(rows + cols)
        self.w = torch.randn(rows, cols, generator=make, device="cuda", dtype=dtype)
        self.h = torch.randn(cols, generator=make, device="cuda") * scale
        self.norm = (1 + torch.randn(cols, generator=make, device="cuda") / 4).to(norm_dtype or dtype)

    @property
    def reference(self):
        h = self.h.double()
        x = h / (h.square().mean() + 1e-6).sqrt() * self.norm.double()
        return torch.cat([part.double() @ x for part in self.w.split(16384)])

    def run(self, out=None, **how):
        out = torch.full((len(self.w),), math.nan, device="cuda") if out is None else out
        return kernels.lm_head(self.w, self.h, self.norm, 1e-6, out=out, **how)


@pytest.mark.parametrize("rows, cols", HEADS)
@pytest.mark.parametrize("dtype, norm_dtype", PAIRS, ids=str)
def test_lm_head_is_right(rows, cols, dtype, norm_dtype):
    head = Head(rows, cols, dtype, norm_dtype)
    reference = head.reference
    for pdl in (False, True):
        out = head.run(pdl=pdl)
        assert error(out, reference) < TOLERANCE and error(out[-7:], reference[-7:]) < 1e-5


@pytest.mark.parametrize("rows, cols", [(151936, 896), (152064, 3584)])
def test_lm_head_gives_the_same_bits_each_time_and_with_any_number_of_blocks(rows, cols):
    head = Head(rows, cols)
    first = head.run()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for n in range(200):
        different += (head.run(pdl=n % 2 == 1) != first).sum()
    for blocks in (1, 132, 264, 1000, 5000):
        different += (head.run(blocks=blocks) != first).sum()
    assert different.item() == 0


@pytest.mark.parametrize("cols", [8, 896, 1000, 3584])
def test_lm_head_and_the_simt_machine_agree(cols):
    head = Head(133, cols)
    simt = kernels.lm_head(head.w.cpu(), head.h.cpu(), head.norm.cpu(), 1e-6)
    assert error(head.run().cpu(), simt) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_embed_gives_the_token_s_row(dtype):
    table = torch.randn(ROWS, 3584, device="cuda", dtype=dtype)
    for token in (0, 1, 77777, ROWS - 1):
        h = torch.full((3584,), math.nan, device="cuda")
        kernels.embed(table, int32(token), out=h, pdl=True)
        assert torch.equal(h, table[token].float())
    for token in (-1, ROWS, 2**31 - 1):
        assert kernels.embed(table, int32(token)).isnan().all()


class Step:
    def __init__(self, length=3, room=4096):
        self.token, self.length = int32(-7), int32(length)
        self.history = torch.full((room,), -9, dtype=torch.int32, device="cuda")
        self.workspace = kernels.token_workspace("cuda")

    def run(self, kernel, logits, vocab=VOCAB, **how):
        return kernel(logits, vocab, self.token, self.length, self.history, self.workspace, **how)

    @property
    def is_clean(self):
        return not self.workspace.arrivals.any() and not self.workspace.bins.any()


def some_logits(seed=0, scale=3.0):
    logits = torch.randn(ROWS, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * scale
    logits[VOCAB:] = math.nan
    return logits


def test_greedy_takes_the_first_of_the_largest_and_never_a_pad_row():
    step = Step()
    for seed in range(50):
        logits = some_logits(seed)
        if seed % 2:
            logits[[150000 - seed, 70000 + seed, 151664]] = 100.0
        expected = 70000 + seed if seed % 2 else logits[:VOCAB].argmax().item()
        assert step.run(kernels.greedy, logits, pdl=True).item() == expected
        assert step.history[3 + seed] == expected and step.length.item() == 4 + seed
    assert step.is_clean and (step.history == -9).sum() == 4096 - 50
    logits[100000] = math.nan
    assert step.run(kernels.greedy, logits).item() == -1


@by_rules
def test_draws_and_the_simt_machine_agree(rules):
    logits = some_logits(1)
    gpu = Step()
    cpu = [t.cpu() for t in (gpu.token, gpu.length, gpu.history)]
    workspace = kernels.token_workspace("cpu")
    for _ in range(5):
        gpu.run(kernels.sample, logits, seed=11, **rules)
        kernels.sample(logits.cpu(), VOCAB, *cpu, workspace, seed=11, **rules)
    assert torch.equal(gpu.history.cpu(), cpu[2]) and gpu.length.item() == 8 and gpu.is_clean


def test_draws_have_the_probabilities_of_float64():
    logits = some_logits(2, scale=1.0)
    logits[:VOCAB] -= 30
    logits[1000 : 1000 + 120 * 12 : 120] = torch.linspace(0, 2, 12, device="cuda")
    shares = logits[1000 : 1000 + 120 * 12 : 120].double().softmax(-1)
    step = Step(0)
    for _ in range(4000):
        step.run(kernels.sample, logits, seed=3, pdl=True)
    counts = ((step.history[:4000] - 1000) // 120).long().bincount(minlength=12)
    assert step.history[:4000].min() >= 1000 and counts.sum() == 4000
    statistic = ((counts - shares * 4000) ** 2 / (shares * 4000)).sum().item()
    assert statistic < 37.4  # one run of ten thousand passes it, with 11 degrees of freedom


@by_rules
def test_a_captured_step_is_a_step_at_every_replay(rules):
    torch.manual_seed(1)
    table = torch.randn(ROWS, 896, device="cuda", dtype=torch.bfloat16)
    head = Head(ROWS, 896, scale=1.0)
    head.norm /= 4  # so that more than one token is likely
    logits = torch.full((ROWS,), math.nan, device="cuda")

    def run(step, pdl):
        kernels.embed(table, step.token, out=head.h, pdl=pdl)
        head.run(logits, pdl=pdl)
        step.run(kernels.sample, logits, seed=5, pdl=pdl, **rules)

    eager, captured = Step(0), Step(0)
    eager.token.fill_(7)
    for _ in range(200):
        run(eager, pdl=False)
    run(captured, pdl=True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured, pdl=True)
    for _ in range(2):  # a second run repeats the first
        captured.token.fill_(7), captured.length.zero_(), captured.history.fill_(-9)
        for _ in range(200):
            graph.replay()
        assert torch.equal(captured.history, eager.history) and captured.length.item() == 200 and captured.is_clean
    assert len(captured.history[:200].unique()) > 2


def test_the_search_gives_the_same_floor_each_time():
    step, logits = Step(), some_logits(4)
    rules = {"top_k": 5000, "top_p": 0.97}
    step.run(kernels.sample, logits, **rules)
    floor = step.workspace.search[1].clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        step.run(kernels.sample, logits, pdl=True, **rules)
        different += step.workspace.search[1] != floor
    values = logits[:VOCAB].sort(descending=True).values[:5000].double()
    shares = values.softmax(-1)
    last = values[(shares.cumsum(-1) - shares < 0.97).sum() - 1].float()
    assert different.item() == 0 and floor.item() == last.view(torch.int32).item() + 2**31
