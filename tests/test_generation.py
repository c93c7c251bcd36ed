"""Sampling, prefill and the decode loop: what they yield, where they stop, and what they refuse."""

from dataclasses import replace

import pytest
import torch
import transformers
from toys import TOY, random_weights, transformers_twin

from nanoqwen.config import ModelConfig
from nanoqwen.generation import Sampler, generate, prefill
from nanoqwen.reference import KVCache, Qwen2, build

PROMPT = [5, 17, 200, 3, 99]
VARIED = {"seed": 1, "bias": 0.3, "logits": 0.5}  # random weights whose greedy text does not just repeat one token


@pytest.fixture(scope="module")
def model() -> Qwen2:
    return build(TOY, random_weights(TOY, **VARIED))


@pytest.fixture(scope="module")
def greedy(model) -> list[int]:
    return list(generate(model, PROMPT, 20))


# --- W8: where it stops -----------------------------------------------------------------------------------------------


def first_new(tokens: list[int], after: int) -> int:
    """The place, from `after` on, of the first token that did not come before."""
    return next(i for i in range(after, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("form", ["an int", "a list"])
def test_it_stops_after_the_configured_end(form, greedy):
    at = first_new(greedy, 2)
    eos = greedy[at] if form == "an int" else [256, greedy[at]]
    assert 256 not in greedy
    config = ModelConfig.from_dict({**TOY.to_dict(), "eos_token_id": eos})
    model = build(config, random_weights(config, **VARIED))
    assert list(generate(model, PROMPT, 20)) == greedy[: at + 1], "the end itself is yielded, nothing after it"


def test_without_an_end_it_runs_to_the_limit(model, greedy):
    assert model.config.eos_token_id == ()
    assert len(greedy) == 20


def test_the_callers_stop_replaces_the_configured_one(greedy):
    config = replace(TOY, eos_token_id=(greedy[0],))
    model = build(config, random_weights(config, **VARIED))
    at = first_new(greedy, 2)
    assert list(generate(model, PROMPT, 20)) == greedy[:1]
    assert list(generate(model, PROMPT, 20, stop=[greedy[at]])) == greedy[: at + 1]
    assert list(generate(model, PROMPT, 20, stop=[])) == greedy


@pytest.mark.parametrize("count", [0, 1, 2])
def test_max_new_tokens_is_exact(model, greedy, count):
    assert list(generate(model, PROMPT, count)) == greedy[:count]


def test_a_prompt_of_one_token_is_enough(model):
    assert len(list(generate(model, [7], 3))) == 3


def test_a_prompt_may_be_a_tensor(model, greedy):
    assert list(generate(model, torch.tensor(PROMPT), 20)) == greedy


# --- Bad input: refused at the call, before the model runs ------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 5, "prompt is empty"),
        ([3, 257], 5, "257"),
        ([-1], 5, "-1"),
        (PROMPT, -1, "max_new_tokens is -1"),
        (PROMPT, 508, r"5 prompt tokens \+ 508 new ones exceed the context of 512"),
        ([1] * 600, 0, "600 prompt tokens"),
    ],
)
def test_bad_requests_are_refused_at_the_call(model, prompt, count, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, count)  # not iterated: the error does not wait for the first token


def test_the_whole_context_can_be_used(model):
    assert len(list(generate(model, [1] * 500, 12))) == 12


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-30},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("inf")},
    ],
    ids=str,
)
def test_a_bad_setting_is_named(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} is .*must be"):
        Sampler(**setting)


# --- Sampling, against transformers' own logits processors ------------------------------------------------------------


def our_probabilities(monkeypatch, logits: torch.Tensor, seen: torch.Tensor, **settings) -> torch.Tensor:
    """The distribution that the sampler draws from."""
    drawn_from = []

    def multinomial(p, count, generator):
        drawn_from.append(p)
        return p.argmax(-1, keepdim=True)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        Sampler(**settings)(logits, seen)
    return drawn_from[0]


def their_probabilities(logits, seen, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0) -> torch.Tensor:
    steps = [transformers.RepetitionPenaltyLogitsProcessor(repetition_penalty)] if repetition_penalty != 1 else []
    steps += [transformers.TemperatureLogitsWarper(temperature)]
    steps += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    steps += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    return transformers.LogitsProcessorList(steps)(seen[None], logits[None].float()).softmax(-1)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 1.7, "top_k": 1},
        {"temperature": 1.7, "top_k": 40},
        {"temperature": 1.0, "top_k": 5000},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "repetition_penalty": 0.7},
        {"temperature": 0.6, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.2},
        {"temperature": 2.5, "top_k": 7, "top_p": 0.5, "repetition_penalty": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_distribution_is_that_of_transformers(settings, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = (3 * torch.randn(400, generator=generator)).to(dtype)
        if dtype == torch.bfloat16:  # no ties: which of two equal tokens a filter keeps is nobody's promise
            logits = torch.randperm(400, generator=generator).sub(200).to(dtype) / 16
        seen = torch.randint(400, (30,), generator=generator)
        seen = torch.cat((seen, logits.topk(3).indices, seen[:5]))  # likely tokens too, and some twice
        before = logits.clone()
        ours = our_probabilities(monkeypatch, logits, seen, **settings)
        theirs = their_probabilities(before, seen, **settings)
        assert torch.equal(logits, before), "the caller's logits are left alone"
        assert torch.equal(ours > 0, theirs > 0)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_draws_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    sampler, seen = Sampler(temperature=1.0), torch.tensor([0])
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[sampler(logits, seen)] += 1
    assert (counts / 4000 - logits.softmax(-1)).abs().max() < 0.03


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_with_a_repetition_penalty_equals_transformers(model, penalty):
    twin = transformers_twin(TOY, random_weights(TOY, **VARIED))
    prompt = torch.tensor([PROMPT])
    theirs = twin.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False, eos_token_id=None,
        pad_token_id=0, repetition_penalty=penalty,
    )  # fmt: skip
    assert list(generate(model, PROMPT, 48, Sampler(repetition_penalty=penalty))) == theirs[0, len(PROMPT) :].tolist()


def test_a_seed_repeats_a_text_and_another_seed_changes_it(model):
    def text(seed: int) -> list[int]:
        return list(generate(model, PROMPT, 24, Sampler(temperature=1.0, top_p=0.95, seed=seed)))

    assert text(0) == text(0)
    assert len({tuple(text(seed)) for seed in range(4)}) == 4


def test_a_seed_does_not_touch_torchs_own_generator(model):
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    list(generate(model, PROMPT, 4, Sampler(temperature=1.0)))
    assert torch.equal(torch.rand(4), expected)


def test_temperature_0_and_top_k_1_choose_the_same_tokens(model, greedy):
    assert list(generate(model, PROMPT, 20, Sampler(temperature=1.3, top_k=1))) == greedy


# --- N3: pad rows of the vocabulary -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        {},
        {"repetition_penalty": 1.2},
        {"temperature": 1.0},
        {"temperature": 5.0, "top_k": 50, "top_p": 0.99, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_large_pad_rows_are_never_sampled(sampler):
    config = replace(TOY, tie_word_embeddings=False)
    weights = random_weights(config)
    # Both signs, so that whatever the hidden state, some pad row has the largest logit by far.
    weights["lm_head.weight"][-10:] = 100 * torch.randn(
        10, config.hidden_size, generator=torch.Generator().manual_seed(2)
    )
    model = build(config, weights)
    assert max(generate(model, PROMPT, 8, Sampler(**sampler))) >= 247, "without num_tokens the pad rows would win"
    model.num_tokens = 247
    assert max(generate(model, PROMPT, 64, Sampler(**sampler))) < 247


def test_a_pad_row_in_the_prompt_is_refused():
    model = build(TOY, random_weights(TOY))
    model.num_tokens = 247
    with pytest.raises(ValueError, match=r"prompt token 250 .* 247"):
        generate(model, [3, 250], 4, Sampler(repetition_penalty=1.2))


# --- Prefill and caches -----------------------------------------------------------------------------------------------


def test_prefill_in_chunks_equals_one_pass():
    config = replace(TOY, max_position_embeddings=2048)
    model = build(config, random_weights(config))
    prompt = torch.randint(257, (1100,), generator=torch.Generator().manual_seed(5))
    whole = model(prompt[None])[0, -1]
    for chunk in (512, 1100, 4096, 275, 100):
        cache = KVCache(config, 1100)
        assert (prefill(model, prompt, cache, chunk) - whole).abs().max() <= 1e-5
        assert cache.extent == 1100


def test_a_cache_of_fixed_extent_equals_a_growing_one(model):
    growing, fixed, used = KVCache(TOY, 40), KVCache(TOY, 64), KVCache(TOY, 64)
    used.keys.normal_(0, 100), used.values.normal_(0, 100)  # left over from an earlier, longer text
    prompt = torch.tensor(PROMPT)
    prefill(model, prompt, growing)
    for cache in (fixed, used):
        prefill(model, prompt, cache)
        cache.extent = cache.capacity  # what a captured graph does: shapes never change again
    for position in range(len(PROMPT), 40):
        token, at = torch.tensor([[position * 7 % 257]]), torch.tensor([position])
        growing.extent = position + 1
        expected = model(token, at, growing)
        for cache in (fixed, used):
            assert (model(token, at, cache) - expected).abs().max() <= 1e-5


def test_two_texts_at_once_do_not_disturb_each_other(model, greedy):
    other = list(generate(model, [8, 9], 20))
    pairs = list(zip(generate(model, PROMPT, 20), generate(model, [8, 9], 20), strict=True))
    assert pairs == list(zip(greedy, other, strict=True))


def test_suppressed_ids_are_never_chosen(model, greedy):
    for sampler in (Sampler(suppress=greedy), Sampler(temperature=2.0, suppress=greedy)):
        assert not set(greedy) & set(generate(model, PROMPT, 64, sampler, stop=()))
    with pytest.raises(ValueError, match="suppress"):
        Sampler(suppress=(-1,))
