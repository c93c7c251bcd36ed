"""How fast a decoder decodes: time to first token, time per output token, memory, and the share of the ceiling.

Protocol: design.md section 7, in short: a warm-up is thrown away, the sampling counts, the time to the first token
(TTFT) and per output token (TPOT) stay apart, and what was timed is checked after the timing.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch

from nanoqwen import hardware
from nanoqwen.generation import Sampler, generate, prefill
from nanoqwen.hardware import Probe
from nanoqwen.ledger import CeilingError, below_ceiling, ledger, mbu
from nanoqwen.quantize import bytes_saved
from nanoqwen.reference import KVCache, Qwen2
from nanoqwen.timing import Paired, Percentiles, paired, percentiles, synchronize, time_calls

__all__ = [
    "CeilingError",
    "DecodeTiming",
    "Paired",
    "Percentiles",
    "arrivals",
    "below_ceiling",
    "decode",
    "graph_decode",
    "paired",
    "percentiles",
    "step_bytes",
    "summarise",
    "time_calls",
]

NOISE = 0.03
"""A read probe is itself a measurement: a decode step may pass it by 3 % and then counts as 100 %, never as more."""


@dataclass(frozen=True)
class DecodeTiming:
    """One decoder's speed at batch 1. MBU are fractions of 1; None where there is nothing to compare with (`note`)."""

    ttft: Percentiles | None  # seconds from the call to the first token on the host; None for a replayed graph
    tpot: Percentiles | None  # seconds between tokens; None when only one token was made
    prompt_tokens: int
    tokens: tuple[int, ...]
    mean_depth: float  # tokens in the KV cache, averaged over the timed steps
    bytes_per_token: int
    peak_memory: int | None  # bytes
    peak_memory_is: str
    mbu_datasheet: float | None
    mbu_probe: float | None
    note: str

    @property
    def tokens_per_s(self) -> float | None:
        """1 / median TPOT."""
        return self.tpot and 1 / self.tpot.p50

    def to_dict(self) -> dict:
        """The JSON form that records hold: all but the tokens."""
        values = asdict(self)
        values["new_tokens"] = len(values.pop("tokens"))
        values["tokens_per_s"] = self.tokens_per_s
        return values

    def __str__(self) -> str:
        lines = [f"TTFT  {self.ttft} for {self.prompt_tokens} prompt tokens"] if self.ttft else []
        if self.tpot:
            lines.append(f"TPOT  {self.tpot}: {self.tokens_per_s:.4g} tokens/s")
        lines.append(f"bytes {self.bytes_per_token / 1e9:.4g} GB a token at depth {self.mean_depth:.0f}")
        shares = (("datasheet", self.mbu_datasheet), ("read probe", self.mbu_probe))
        known = [f"{100 * share:.1f} % of the {name}" for name, share in shares if share is not None]
        lines.append("MBU   " + (", ".join(known) or self.note))
        if self.peak_memory:
            lines.append(f"peak  {self.peak_memory / (1 << 30):.2f} GiB, {self.peak_memory_is}")
        return "\n".join(lines)


def summarise(
    model: Qwen2,
    prompt_tokens: int,
    tokens: Sequence[int],
    ttft: Sequence[float],
    gaps: Sequence[float],
    mean_depth: float | None = None,
    probe: Probe | None = None,
) -> DecodeTiming:
    """Turn what was timed into figures: percentiles, bytes of a step, MBU against the ceilings.

    Args:
        tokens: the ids made. ttft: seconds of each first token. gaps: seconds between the tokens.
        mean_depth: by default that of eager decoding, where step i reads prompt_tokens + i − 1 places.
        probe: a read probe; by default the process's own, measured on first use.

    Raises:
        CeilingError: more bytes a second than the datasheet, or than the probe by more than `NOISE`.
    """
    device = model.model.embed_tokens.weight.device
    if mean_depth is None:
        mean_depth = prompt_tokens + max(0, len(gaps) - 1) / 2
    moved = step_bytes(model, round(mean_depth))
    tpot = percentiles(gaps) if len(gaps) else None
    peak, peak_is = _peak_memory(device)  # before the probe, which takes some gigabytes itself
    shares = _shares(moved, tpot, device, probe)
    first = percentiles(ttft) if len(ttft) else None
    return DecodeTiming(first, tpot, prompt_tokens, tuple(tokens), mean_depth, moved, peak, peak_is, *shares)


def step_bytes(model: Qwen2, depth: int) -> int:
    """Bytes that a decode step must move, `depth` tokens deep: the ledger's, but of a quantised layer its own."""
    dtype = model.model.embed_tokens.weight.dtype
    return ledger(model.config, dtype, depth).total - bytes_saved(model, dtype)


def _shares(
    moved: int, tpot: Percentiles | None, device: torch.device, probe: Probe | None
) -> tuple[float | None, float | None, str]:
    """MBU of the median step against the datasheet and the probe, and why where there is none."""
    if tpot is None:
        return None, None, "one token only: no time between tokens"
    machine = hardware.machine(device)
    if moved < 3 * (machine.cache or 0):
        size, cache = moved / 1e6, machine.cache / 1e6
        return None, None, f"none: {size:.0f} MB a token may be served from the {cache:.0f} MB cache, not from memory"
    datasheet = mbu(moved, tpot.p50, machine.spec.bandwidth) if machine.spec else None
    given, probe = probe, probe or hardware.read_ceiling(device)
    try:
        return datasheet, mbu(moved, tpot.p50, probe.rate, NOISE), ""
    except CeilingError:
        # A probe that ran in a bad moment is too low a ceiling: measure it once more before calling the figure wrong.
        if given is not None:
            raise
        return datasheet, mbu(moved, tpot.p50, hardware.read_ceiling(device, again=True).rate, NOISE), ""


def _peak_memory(device: torch.device) -> tuple[int | None, str]:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocated on the GPU"
    try:
        import resource  # not on Windows
    except ImportError:
        return None, "unknown on this system"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), "resident set of the whole process"


def arrivals(
    model: Qwen2, prompt: Sequence[int], count: int, sampler: Sampler | None = None
) -> tuple[list[int], float, list[float]]:
    """Decode `count` tokens, whatever they are: the tokens, the seconds to the first, and those between the others."""
    device = model.model.embed_tokens.weight.device
    sampler = replace(sampler or Sampler())  # a fresh generator: every run draws the same tokens
    synchronize(device)
    tokens, times = [], [time.perf_counter()]
    for token in generate(model, prompt, count, sampler, stop=()):  # int(token) waits for the device
        times.append(time.perf_counter())
        tokens.append(token)
    gaps = [b - a for a, b in pairwise(times)]
    return tokens, gaps[0], gaps[1:]


def decode(
    model: Qwen2,
    prompt_ids: Sequence[int],
    new_tokens: int,
    sampler: Sampler | None = None,
    warmup: int = 1,
    first_tokens: int = 0,
    probe: Probe | None = None,
) -> DecodeTiming:
    """Time eager decoding of `new_tokens` tokens after `prompt_ids`, on the model's device, at batch 1.

    The stop tokens are ignored, so that exactly `new_tokens` are made.

    Args:
        sampler: greedy by default.
        warmup: runs thrown away first, of at most 16 tokens each.
        first_tokens: further runs of one token each, for more samples of TTFT.
        probe: as in `summarise`.

    Raises:
        ValueError: new_tokens below 1, or what `generate` refuses.
        CeilingError: a figure above the machine's ceiling.
        RuntimeError: the last token is not what the model says, or its logits are not finite.
    """
    if new_tokens < 1:
        raise ValueError(f"new_tokens is {new_tokens}; it must be at least 1")
    sampler = sampler or Sampler()
    for _ in range(warmup):
        arrivals(model, prompt_ids, min(new_tokens, 16), sampler)
    device = model.model.embed_tokens.weight.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    tokens, first, gaps = arrivals(model, prompt_ids, new_tokens, sampler)
    ttft = [first, *(arrivals(model, prompt_ids, 1, sampler)[1] for _ in range(first_tokens))]
    timing = summarise(model, len(prompt_ids), tokens, ttft, gaps, probe=probe)
    check_last(model, prompt_ids, tokens, greedy=sampler.temperature == 0 and sampler.repetition_penalty == 1)
    return timing


@torch.inference_mode()
def check_last(model: Qwen2, prompt: Sequence[int], tokens: Sequence[int], greedy: bool = True) -> None:
    """Check a run after its timing: all tokens but the last go through the model at once, as one prompt.

    Everything a faulty step leaves in the cache ends in these logits. Greedy: the last token must be at the top, or
    so near that rounding in another order explains it (a tenth of the distance from the mean to the top).

    Raises:
        RuntimeError: NaN or infinity, a token that is not one, or one that greedy decoding would not choose.
    """
    if bad := [token for token in tokens if not 0 <= token < model.num_tokens]:
        raise RuntimeError(f"token {bad[0]} was made; the model has {model.num_tokens}")
    weight = model.model.embed_tokens.weight
    before = torch.tensor([*prompt, *tokens[:-1]], device=weight.device)
    cache = KVCache(model.config, len(before), dtype=weight.dtype, device=weight.device)
    logits = prefill(model, before, cache)[: model.num_tokens].float()
    if not logits.isfinite().all():
        raise RuntimeError("the logits after the timed run are not finite; the timing counts for nothing")
    gap, spread = (logits.max() - logits[tokens[-1]]).item(), (logits.max() - logits.mean()).item()
    if greedy and gap > 0.1 * spread:
        raise RuntimeError(
            f"the last token, {tokens[-1]}, has a logit {gap:.3g} below the best one ({int(logits.argmax())}); "
            "the timed steps computed something else"
        )


@torch.inference_mode()
def graph_decode(
    model: Qwen2,
    depth: int | Sequence[int],
    steps: int = 200,
    warmup: int = 10,
    probe: Probe | None = None,
) -> DecodeTiming:
    """Time the reference decode step as a captured CUDA graph, replayed `steps` times from `depth` on, greedily.

    The graph feeds itself: it takes the token and the position from two tensors on the device, and leaves the next
    ones there. Shapes are frozen, so attention reads the whole cache, which holds just what the run needs; the ledger
    still counts only the places in use. The time of a step lies between CUDA events after consecutive replays.

    Args:
        depth: tokens in the cache before the first step, or the prompt itself; a number stands for that many
            random tokens.
        warmup: replays thrown away first.

    Raises:
        ValueError: no GPU, no steps, or more tokens than the context holds.
        CeilingError, RuntimeError: as `decode`.
    """
    config, weight = model.config, model.model.embed_tokens.weight
    device = weight.device
    if device.type != "cuda":
        raise ValueError(f"graph_decode needs a model on a CUDA device; this one is on {device}")
    if isinstance(depth, int):
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(model.num_tokens, (depth,), generator=generator).tolist()
    else:
        prompt = list(depth)
    eager = 3  # steps on a side stream before the capture, in which libraries set themselves up
    made = 1 + eager + warmup + steps
    if not prompt or steps < 1 or warmup < 1:
        raise ValueError(f"depth {len(prompt)}, steps {steps}, warmup {warmup}: each must be at least 1")
    if len(prompt) + made > config.max_position_embeddings:
        raise ValueError(f"{len(prompt)} + {made} tokens exceed the context of {config.max_position_embeddings}")

    with torch.cuda.device(device):
        torch.cuda.reset_peak_memory_stats(device)
        cache = KVCache(config, len(prompt) + made, dtype=weight.dtype, device=device)
        logits = prefill(model, torch.tensor(prompt, device=device), cache)
        cache.extent = cache.capacity  # frozen: the mask hides what lies ahead
        token = logits[: model.num_tokens].argmax(-1, keepdim=True)
        position = torch.tensor([len(prompt)], device=device)
        history = torch.full((cache.capacity + 1,), -1, device=device)  # the token at each position
        history[position] = token

        def step() -> None:
            logits = model(token[None], position, cache)[0, -1, : model.num_tokens]
            token.copy_(logits.argmax(-1, keepdim=True))
            position.add_(1)
            history.index_copy_(0, position, token)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(eager):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(warmup):
            graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        gaps = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    tokens = history[len(prompt) : len(prompt) + made].tolist()
    if int(position) != len(prompt) + made - 1:
        raise RuntimeError(f"the graph ended at position {int(position)}, not {len(prompt) + made - 1}")
    first_depth = len(prompt) + eager + warmup
    timing = summarise(model, len(prompt), tokens, (), gaps, mean_depth=first_depth + (steps - 1) / 2, probe=probe)
    check_last(model, prompt, tokens)
    return timing
