"""The engine on a GPU: graphs replay what eager launches do, with the tokens of the same INT4 model in PyTorch.

The real 0.5B, where it has been fetched, and a random 7B run too.
"""

import warnings

import pytest
import torch
from toys import random_weights

from nanoqwen import engine as engine_module
from nanoqwen import generation, models, quantize
from nanoqwen.bench_ladder import OFF, margins, one_by_one
from nanoqwen.config import SHAPES, ModelConfig
from nanoqwen.engine import Engine
from nanoqwen.generation import Sampler
from nanoqwen.graphs import CHAIN, MODES, capture
from nanoqwen.reference import build

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90"
)

SMALL = ModelConfig(257, 128, 192, 2, 4, 2, head_dim=64, max_position_embeddings=512)
CUDA = torch.device("cuda:0")
TOLERANCE = 5e-3
"""Of the logits, relative. As tests/test_engine.py, and a prompt's products are rounded to 11 bits here."""
GRAPHS = [name for name, mode in MODES.items() if mode.graph]


@pytest.fixture(scope="module")
def twin():
    """A toy whose greedy text does not just repeat one token, in INT4, on the GPU; PyTorch multiplies."""
    model = build(SMALL, random_weights(SMALL, seed=1, bias=0.3, logits=0.5))
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight")):
            parameter.data = parameter.data.half().float()
    return quantize.use_kernels(quantize.quantize_model(model.cuda(), 64), False)


@pytest.fixture
def engine(twin):
    with Engine(twin, CUDA) as made:
        yield made


def prompt(length, seed=0):
    return torch.randint(257, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(logits, reference):
    return ((logits - reference).norm() / reference.norm()).item()


def eager(engine, ids, count, sampler=None):
    engine.use("eager")
    tokens = list(engine.generate(ids, count, sampler, stop=()))
    return tokens, engine.logits.clone()


# --- G1 to G4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", GRAPHS)
def test_g1_a_replay_equals_eager_launches_bit_for_bit_then_another_prompt(engine, mode):
    for length, count in ((20, 64), (7, 40), (133, 64), (1, 1 + CHAIN + 3)):
        want, logits = eager(engine, prompt(length), count)
        assert len(set(want)) > 2
        engine.use(mode)
        assert list(engine.generate(prompt(length), count, stop=())) == want
        assert torch.equal(engine.logits, logits)
        assert engine.kv.free_pages == 32


@pytest.mark.parametrize("mode", GRAPHS)
def test_g1_a_seeded_draw_is_the_same_by_replay(engine, mode):
    sampler = Sampler(temperature=1.2, top_k=50, top_p=0.95, seed=3, suppress=(5, 6))
    want, _ = eager(engine, prompt(9), 40, sampler)
    engine.use(mode)
    assert list(engine.generate(prompt(9), 40, sampler, stop=())) == want
    assert not {5, 6} & set(want) and len(set(want)) > 5


@pytest.mark.parametrize("mode", ["two graphs", "in flight"])
def test_g1_sequences_that_take_turns_do_not_meet(engine, mode):
    want = [eager(engine, prompt(n, n), 40)[0] for n in (15, 40)]
    engine.use(mode)
    turns, both = [engine.generate(prompt(n, n), 40, stop=()) for n in (15, 40)], [[], []]
    for _ in range(40):
        for tokens, turn in zip(both, turns, strict=True):
            tokens.append(next(turn))
    assert both == want


@pytest.mark.parametrize("mode", GRAPHS)
def test_g2_buffers_that_are_poisoned_before_each_replay_change_nothing(engine, mode):
    want, _ = eager(engine, prompt(20), 36)
    engine.use(mode)
    sequence, token = engine.prefill(prompt(20))
    tokens = [token]
    while len(tokens) < 36:
        for buffer in (engine.h, engine.qkv, engine.attended, engine.act, engine.logits):
            buffer.fill_(float("nan"))
        engine.workspace.partial.fill_(float("nan"))
        if not engine.mode.fed_back:  # then the host puts these back
            engine.token.fill_(-7)
            engine.length.fill_(3)
        tokens += engine.decode(sequence, 1)
    assert tokens == want


@pytest.mark.parametrize("mode", ["fed back", "in flight"])
def test_g2_a_poisoned_token_shows(engine, mode):
    engine.use(mode)
    sequence, _ = engine.prefill(prompt(20))
    engine.decode(sequence, 2)
    engine.token.fill_(-7)
    with pytest.raises(RuntimeError, match="the logits at position 22 are NaN"):
        engine.decode(sequence, 1)


def test_g3_what_cannot_be_captured_is_named_and_the_next_step_works(engine):
    want, logits = eager(engine, prompt(20), 8)
    x = torch.ones(4, device=CUDA)

    def allocates():
        engine.step()
        x + x

    def asks():
        engine.step()
        int(engine.token)

    def synchronizes():
        engine.step()
        torch.cuda.synchronize()

    def asks_first():
        int(engine.token)

    for body, words in (
        (asks_first, r"waits for the device: .*int\(engine.token\)"),
        (allocates, r"add.Tensor allocates a tensor of shape \(4,\) .*x \+ x"),
        (asks, r"waits for the device: .*int\(engine.token\)"),
        (synchronizes, r"captur.*torch.cuda.synchronize\(\)"),
    ):
        with (
            warnings.catch_warnings(record=True, action="always") as seen,
            pytest.raises(RuntimeError, match=rf"the step cannot be captured: .*{words}"),
        ):
            capture(body, CUDA)
        assert not [each for each in seen if "empty" in str(each.message)]
        again, same = eager(engine, prompt(20), 8)
        assert again == want and torch.equal(same, logits)
        torch.randn(3, device=CUDA)
    engine.use("one graph")
    assert list(engine.generate(prompt(20), 8, stop=())) == want


def test_g4_200_runs_of_256_tokens_are_identical(engine):
    engine.use("in flight")
    first = list(engine.generate(prompt(20), 256, stop=()))
    for _ in range(199):
        assert list(engine.generate(prompt(20), 256, stop=())) == first
    assert len(set(first)) > 5


@pytest.mark.parametrize(("mode", "runs"), [("in flight", 300), ("fed back", 50)])
def test_g4_a_real_size_repeats_itself_and_takes_the_largest_logit(mode, runs):
    config = SHAPES["qwen2.5-coder-0.5b"]
    with Engine.random(config, CUDA, max_tokens=128, mode=mode) as engine:
        ids, first = prompt(11), None
        for run in range(runs):
            sequence, token = engine.prefill(ids)
            tokens = [token]
            while len(tokens) < 64:
                tokens += engine.decode(sequence, min(engine.mode.look, 64 - len(tokens)))
                largest = int(engine.logits[: engine.weights.num_tokens].argmax())
                assert tokens[-1] == largest, f"run {run}, token {len(tokens) - 1}"
            engine.free(sequence)
            first = first or (tokens, engine.logits.clone())
            assert tokens == first[0] and torch.equal(engine.logits, first[1]), f"run {run}"


def test_a_step_does_not_need_to_overlap(twin, engine):
    want, logits = eager(engine, prompt(20), 40)
    plain, same = eager(Engine(twin, CUDA, pdl=False), prompt(20), 40)
    assert plain == want and torch.equal(same, logits)


# --- Right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 17, 200])
def test_logits_and_tokens_are_those_of_the_simulation(engine, twin, length):
    ids = prompt(length)
    engine.prefill(ids)
    reference = margins(twin, ids, [0])[1][-1]
    assert error(engine.logits, reference) < TOLERANCE
    tokens, logits = one_by_one(engine, ids, 33)
    below, reference = margins(twin, ids, tokens)
    assert below.max() < 0.02, "a token that is not the simulation's must be a tie"
    assert max(map(error, logits, reference)) < TOLERANCE


def test_a_long_prompt_goes_through_in_parts(engine, twin, monkeypatch):
    monkeypatch.setattr(engine_module, "CHUNK", 100)
    ids = prompt(333)
    engine.prefill(ids)
    assert error(engine.logits, margins(twin, ids, [0])[1][-1]) < TOLERANCE


@torch.inference_mode()
def test_the_real_model_makes_the_tokens_of_its_simulation(real_model_path):
    model, tokenizer = models.load(str(real_model_path), torch.float32)
    twin = quantize.use_kernels(quantize.quantize_model(model.cuda()), False)
    ids = tokenizer.encode("def quicksort(a):")
    with Engine(twin, CUDA, max_tokens=256) as engine:
        tokens, logits = one_by_one(engine, ids, 128)
    simulated = list(generation.generate(twin, ids, 128, stop=()))
    below, reference = margins(twin, ids, tokens)
    assert max(map(error, logits[:, : twin.num_tokens], reference)) < OFF
    part = next((i for i, (a, b) in enumerate(zip(tokens, simulated, strict=True)) if a != b), None)
    print(tokenizer.decode(ids + tokens))
    print("the same tokens" if part is None else f"part at {part}, margin {below[part]:.4f} deviations")
    assert below.max() < 0.02
    assert "return" in tokenizer.decode(tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_random_weights_of_each_shape_run(name):
    config = SHAPES[name]
    with Engine.random(config, CUDA, max_tokens=1024) as engine:
        ids = torch.randint(config.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()
        want, logits = eager(engine, ids, 34)
        assert logits.isfinite().all() and logits.std() > 0
        sequence, _ = engine.prefill(ids)
        engine.decode(sequence, 1)
        engine.check_step(sequence)
        engine.use("in flight")
        assert list(engine.generate(ids, 34, stop=())) == want
        assert torch.equal(engine.logits, logits)
