"""From logits to tokens: sampling, prefill, and the decode loop around the reference decoder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoqwen.reference import KVCache, Qwen2


@dataclass
class Sampler:
    """Chooses the next token: greedy at temperature 0, else a seeded draw.

    In this order, as `transformers` does: `suppress` (ids that are never chosen), repetition penalty (divides positive
    and multiplies negative logits of tokens already seen; Keskar et al., 2019), temperature, top-k (0: off), top-p
    (1: off; Holtzman et al., 2020).

    Raises:
        ValueError: a setting outside its range; the message names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    suppress: Sequence[int] = ()

    def __post_init__(self):
        for name, ok, want in (
            # Logits divided by less would overflow to inf, and inf - inf is NaN.
            ("temperature", self.temperature == 0 or 1e-6 <= self.temperature < float("inf"), "0 (greedy), or 1e-6 up"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number: 0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("suppress", all(isinstance(t, int) and t >= 0 for t in self.suppress), "token ids"),
        ):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {want}")
        self.generator: torch.Generator | None = None
        self.never: Tensor | None = None

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        """logits (tokens) and the token ids `seen` so far → the chosen id (1)."""
        if self.suppress:
            if self.never is None:
                self.never = torch.tensor(list(self.suppress), device=logits.device)
            logits = logits.index_fill(0, self.never, float("-inf"))
        if self.repetition_penalty != 1:
            logits = logits.to(torch.float32, copy=True)  # in bf16 a penalty of 1.01 would often round away
            old = logits[seen]
            logits[seen] = torch.where(old > 0, old / self.repetition_penalty, old * self.repetition_penalty)
        if self.temperature == 0:
            return logits.float().argmax(-1, keepdim=True)  # on a CPU four times as fast as in bf16
        logits = logits.float() / self.temperature
        if self.top_k:
            logits = logits.masked_fill(logits < logits.topk(min(self.top_k, len(logits))).values[-1], float("-inf"))
        if self.top_p < 1:
            values, order = logits.softmax(-1).sort(descending=True)
            drop = values.cumsum(-1) - values >= self.top_p  # the token that crosses top_p stays
            logits = logits.index_fill(0, order[drop], float("-inf"))
        if self.generator is None:
            self.generator = torch.Generator(logits.device).manual_seed(self.seed)
        return torch.multinomial(logits.softmax(-1), 1, generator=self.generator)


def prefill(model: Qwen2, prompt: Tensor, cache: KVCache, chunk: int = 512) -> Tensor:
    """Run the prompt (T ids) through the model, `chunk` tokens at a time; return the last token's logits."""
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        cache.extent = start + len(part)
        positions = torch.arange(start, cache.extent, device=prompt.device)
        logits = model(part[None], positions, cache, last=True)
    return logits[0, -1]


def generate(
    model: Qwen2,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop: Sequence[int] | None = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that continue `prompt`, ending after the first id in `stop`.

    `stop` is by default the configuration's `eos_token_id`. Pad rows of the vocabulary are never chosen.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, or more tokens than the context holds.
    """
    config, sampler = model.config, sampler or Sampler()
    stop = set(config.eos_token_id if stop is None else stop)
    if not len(prompt):
        raise ValueError("the prompt is empty; give at least one token")
    if bad := [int(t) for t in prompt if not 0 <= t < model.num_tokens]:
        raise ValueError(f"prompt token {bad[0]} is outside the vocabulary of {model.num_tokens}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
    if len(prompt) + max_new_tokens > config.max_position_embeddings:
        raise ValueError(
            f"{len(prompt)} prompt tokens + {max_new_tokens} new ones exceed the context of "
            f"{config.max_position_embeddings}; shorten the prompt or lower max_new_tokens"
        )
    return _decode(model, prompt, max_new_tokens, sampler, stop)


@torch.inference_mode()
def _decode(model: Qwen2, prompt: Sequence[int], count: int, sampler: Sampler, stop: set[int]) -> Iterator[int]:
    if not count:
        return
    weight = model.lm_head.weight
    cache = KVCache(model.config, len(prompt) + count, dtype=weight.dtype, device=weight.device)
    seen = torch.as_tensor(prompt, device=weight.device)
    logits = prefill(model, seen, cache)
    for step in range(count):
        token = sampler(logits[: model.num_tokens], seen)  # (1)
        yield (chosen := int(token))
        if chosen in stop or step == count - 1:
            return
        seen = torch.cat((seen, token))
        cache.extent = len(seen)
        logits = model(token[None], torch.tensor([len(seen) - 1], device=seen.device), cache)[0, -1]
