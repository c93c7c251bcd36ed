"""The real 0.5B makes the tokens that `transformers` makes from the same weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from nanoqwen import models
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.generation import generate


@pytest.fixture(scope="module")
def pair(real_model_path):
    ours, tokenizer = models.load(real_model_path, torch.float32)
    folder = open_checkpoint(real_model_path).path
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return ours, theirs, tokenizer


@pytest.mark.parametrize("prompt", ["def quicksort(a):", "// Rust\nfn main() {"])
def test_greedy_tokens_equal_transformers(pair, prompt):
    ours, theirs, tokenizer = pair
    ids = tokenizer.encode(prompt)
    count = 24
    theirs.generation_config = GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0)  # no stop
    x = torch.tensor([ids])
    want = theirs.generate(x, attention_mask=torch.ones_like(x))[0, len(ids) :].tolist()
    assert list(generate(ours, ids, count, stop=())) == want


def test_quicksort_is_continued_with_a_quicksort(pair):
    ours, _, tokenizer = pair
    text = tokenizer.decode(list(generate(ours, tokenizer.encode("def quicksort(a):"), 40)))
    assert "pivot" in text and "if len(a) <= 1" in text
