"""The reference decoder against `transformers`' Qwen2ForCausalLM, on random models of many shapes."""

from dataclasses import replace

import pytest
import torch
from toys import TOY, random_weights, transformers_twin

from nanoqwen import reference
from nanoqwen.config import ModelConfig
from nanoqwen.generation import generate
from nanoqwen.reference import KVCache, Qwen2, build


def random_tokens(config: ModelConfig, count: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, count), generator=torch.Generator().manual_seed(1))


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference; NaN if there is one."""
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


def assert_logits_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert 1 < theirs.std() < 10, "logits of order 1 to 10, where 1e-5 means something"
    assert gap(ours, theirs) <= 1e-5


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(14, 2), (12, 2), (28, 4), (8, 8)])
def test_logits_equal_transformers(heads, kv_heads, head_dim, tied):
    config = ModelConfig(257, 128, 192, 2, heads, kv_heads, head_dim, tie_word_embeddings=tied)
    weights = random_weights(config)
    tokens = random_tokens(config, 33, batch=2)
    assert_logits_equal(build(config, weights)(tokens), transformers_twin(config, weights)(tokens).logits)


def test_head_dim_may_be_hidden_size_over_heads_or_not():
    for head_dim, size in ((0, 64), (32, 128), (6, 24)):
        config = replace(TOY, head_dim=head_dim)
        assert config.q_size == size
        weights = random_weights(config)
        tokens = random_tokens(config, 20)
        assert_logits_equal(build(config, weights)(tokens), transformers_twin(config, weights)(tokens).logits)


# --- W3: biases -------------------------------------------------------------------------------------------------------


def test_large_biases_are_added_as_transformers_adds_them():
    weights = random_weights(TOY, bias=5.0)
    tokens = random_tokens(TOY, 40)
    expected = transformers_twin(TOY, weights)(tokens).logits
    assert_logits_equal(build(TOY, weights)(tokens), expected)
    for kind in "qkv":
        dropped = {n: torch.zeros_like(w) if n.endswith(f"{kind}_proj.bias") else w for n, w in weights.items()}
        assert gap(build(TOY, dropped)(tokens), expected) > 0.1, f"dropping the {kind} bias must show"


# --- W6: rotary positions ---------------------------------------------------------------------------------------------

LONG = ModelConfig(257, 64, 128, 2, 2, 1, head_dim=64)


def interleaved(x, cos, sin):
    """The other convention: pairs (x[2i], x[2i + 1])."""
    cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_positions_up_to_4095_equal_transformers_and_no_other_rotation_does(theta, monkeypatch):
    config = replace(LONG, rope_theta=theta)
    weights = random_weights(config)
    tokens = random_tokens(config, 4096)
    expected = transformers_twin(config, weights)(tokens).logits
    assert_logits_equal(build(config, weights)(tokens), expected)

    other_theta = build(replace(config, rope_theta=1e10 / theta), weights)(tokens)
    monkeypatch.setattr(reference, "rotate", interleaved)
    other_pairs = build(config, weights)(tokens)
    for wrong in (other_theta, other_pairs):
        assert gap(wrong[:, 0], expected[:, 0]) <= 1e-5, "position 0 is not turned: it cannot tell"
        for position in (1, 17, 4095):
            assert gap(wrong[:, position], expected[:, position]) > 1e-2


# --- Order, batch, and which logits ----------------------------------------------------------------------------------


def test_a_token_never_sees_what_comes_after_it():
    model = build(TOY, random_weights(TOY))
    tokens = random_tokens(TOY, 24)
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % TOY.vocab_size
    before, after = model(tokens), model(changed)
    assert gap(before[:, :12], after[:, :12]) <= 1e-6
    assert (before[:, 12:] - after[:, 12:]).abs().amax(-1).min() > 1e-3, "and every later one does see it"


def test_sequences_of_a_batch_do_not_mix():
    model = build(TOY, random_weights(TOY))
    tokens = random_tokens(TOY, 16, batch=3)
    together = model(tokens)
    for i in range(3):
        assert gap(together[i], model(tokens[i : i + 1])[0]) <= 1e-5


def test_last_gives_the_last_position_only():
    model = build(TOY, random_weights(TOY))
    tokens = random_tokens(TOY, 16)
    assert gap(model(tokens, last=True), model(tokens)[:, -1:]) <= 1e-5


def test_bf16_stays_near_fp32():
    weights = random_weights(TOY)
    tokens = random_tokens(TOY, 32)
    exact = build(TOY, weights)(tokens)
    rounded = build(TOY, {name: w.bfloat16() for name, w in weights.items()})(tokens)
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() - exact).norm() / exact.norm()) < 0.05


# --- N2: decoding, cached and uncached --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_64_greedy_tokens_equal_transformers_cached_and_uncached(tied):
    config = replace(TOY, tie_word_embeddings=tied)
    weights = random_weights(config, seed=1, bias=0.3, logits=0.5)  # loud layers: the text does not just repeat
    model, twin = build(config, weights), transformers_twin(config, weights)
    prompt = random_tokens(config, 7)
    cached = list(generate(model, prompt[0].tolist(), 64))
    uncached = prompt
    for _ in range(64):
        uncached = torch.cat((uncached, model(uncached, last=True)[0].argmax(-1, keepdim=True)), -1)
    theirs = twin.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert len(set(cached)) > 8, "a run that repeats one token proves little"
    assert cached == uncached[0, 7:].tolist() == theirs[0, 7:].tolist()


def test_cached_logits_equal_uncached_ones_at_every_step():
    model = build(TOY, random_weights(TOY, bias=5.0))
    tokens = random_tokens(TOY, 64, batch=2)
    cache = KVCache(TOY, 64, batch=2)
    steps = []
    for position in range(64):
        cache.extent = position + 1
        steps.append(model(tokens[:, position : position + 1], torch.tensor([position]), cache))
    assert_logits_equal(torch.cat(steps, 1), model(tokens))


# --- build ------------------------------------------------------------------------------------------------------------


def test_a_built_model_holds_the_given_tensors_and_no_copies():
    for tied in (True, False):
        config = replace(TOY, tie_word_embeddings=tied)
        weights = random_weights(config)
        model = build(config, weights)
        held = {name: p.data_ptr() for name, p in model.named_parameters()}
        assert held == {name: w.data_ptr() for name, w in weights.items()}
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert not any(p.requires_grad for p in model.parameters())


def test_a_fresh_tied_model_has_one_weight_for_embedding_and_head():
    for tied in (True, False):
        model = Qwen2(replace(TOY, tie_word_embeddings=tied))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_missing_or_misshapen_weight_is_named():
    weights = random_weights(TOY)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(RuntimeError, match=name):
        build(TOY, {n: w for n, w in weights.items() if n != name})
    with pytest.raises(RuntimeError, match=name):
        build(TOY, {**weights, name: weights[name].T})
