"""The record `engine`: the decode step made of our kernels, launch mode by launch mode, and where its time goes."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nanoqwen import hardware, records
from nanoqwen.bench_gemv import without_garbage
from nanoqwen.config import SHAPES
from nanoqwen.engine import Engine
from nanoqwen.graphs import CHAIN
from nanoqwen.hardware import Probe
from nanoqwen.ledger import mbu
from nanoqwen.measure import NOISE
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.records import Record
from nanoqwen.timing import percentiles, synchronize

SOURCES = (
    *records.with_headers(
        *("embed.cu", "int4_ring.cu", "paged_attention_mma.cu", "lm_head.cu", "choose_token.cu"),  # of a step
        *("int4_dequantize.cu", "swiglu.cu"),  # of a prompt
    ),
    "csrc/read_probe.cu",
    *(f"nanoqwen/kernels/{name}.py" for name in ("launch", "arguments", "int4", "int4_ring", "attention", "step")),
    *(f"nanoqwen/kernels/{name}.py" for name in ("dequantize", "activations")),
    *(f"nanoqwen/{name}.py" for name in ("engine", "engine_weights", "graphs", "paged_kv", "ledger")),
    "nanoqwen/bench_engine.py",
    "nanoqwen/timing.py",
)
SIZES = {
    "7B": (SHAPES["qwen2.5-coder-7b"], (128, 1024, 4096)),
    "1.5B": (SHAPES["qwen2.5-coder-1.5b"], (128,)),
    "0.5B": (SHAPES["qwen2.5-coder-0.5b"], (128,)),
}
RUNGS = {
    "eager": ("eager", False),
    "two graphs": ("two graphs", False),
    "one graph": ("one graph", False),
    "fed back": ("fed back", False),
    "in flight": ("in flight", False),
    "pdl": ("in flight", True),
    "chain": ("chain", True),
}
"""What each adds to the one before: the mode of `graphs.MODES`, and whether launches overlap."""
STEPS, ROUNDS, WARM = 192, 2, CHAIN  # timed steps of a run; runs of each rung, in turn; steps before them
SEEN, SETTLING = 40, 8  # steps from the depth on that the profiler sees; the first of them are thrown away
UNSEEN = 6  # runs of the same steps between events, without the profiler
PROMPT, PROMPTS = 512, 10  # for the time to the first token
TOLERANCE = 2e-2  # of the logits after the timed steps, beside a prompt of the same tokens through PyTorch's products


def record_engine(folder: Path = FOLDER) -> Record:
    """Measure and save the record `engine`: tokens a second of each shape and rung, and the regions of a step.

    Raises:
        RuntimeError: no CUDA GPU, or rungs that differ in their tokens. CeilingError: a figure above the ceiling.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the record 'engine' needs a CUDA GPU: the SIMT machine has no clock")
    device = hardware.default_device()
    results: dict = {"sizes": {}}
    probe = hardware.read_ceiling(device)
    print(probe, flush=True)
    with without_garbage():
        for name, (config, depths) in SIZES.items():
            torch.cuda.reset_peak_memory_stats(device)
            with Engine.random(config, device, max_tokens=max(*depths, PROMPT) + 2 * STEPS) as engine:
                results["sizes"][name] = measure(engine, depths, probe)
            results["sizes"][name]["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
            print(engine_table(name, results["sizes"][name]), flush=True)
    results["ceilings"] = {"read_probe": probe.to_dict()}
    protocol = (
        "Random INT4 weights of each shape in groups of 128, fp16 scales, bf16 embedding and lm_head, fp16 KV pages; "
        "batch 1, greedy, sampling included, one process. A run: a random prompt, "
        f"{WARM} steps thrown away, {STEPS} timed ones around the depth. {ROUNDS} runs of each rung, rungs in turn. A "
        "sample is the host's time from one look at the tokens to the next, over the tokens between: one in eager, two "
        f"graphs, one graph and fed back, {CHAIN} in the others. All rungs must make the same tokens, and the last "
        "logits must be those of a prompt of the same tokens through PyTorch's products. on_device: CUDA events after "
        f"consecutive replays of one graph a step, with pdl, {SEEN} steps from the depth on, the first {SETTLING} "
        f"thrown away; {UNSEEN} runs. regions: by the profiler's clock (CUPTI) in a run of the same steps by itself; a "
        "launch's time goes from the end of the one before it, or from its own start if that is later, to its own end, "
        "and a region's is the sum over a step. gap: the time of a step in which no launch runs. explained: medians of "
        "regions and gap, added up, over that of on_device. one_by_one: regions and gap without pdl. ttft: from the "
        f"call to the first token on the host, a prompt of {PROMPT} tokens through dequantised matrices. Bytes: the "
        "ledger's, at the depth. Clocks left alone."
    )
    record = records.make("engine", results, protocol, SOURCES, device)
    path = records.save(record, folder)
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


def measure(
    engine: Engine,
    depths: Sequence[int],
    probe: Probe,
    rungs: Mapping[str, tuple[str, bool]] = RUNGS,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    prompt: int = PROMPT,
    seen: int = SEEN,
) -> dict:
    """The record's results for one engine. On a CPU eager rungs run too, for the tests; such times mean nothing.

    Args:
        steps: of a run, around each depth. seen: steps that are taken apart, from the depth on.
    """
    spec = hardware.machine(engine.device).spec
    results: dict = {"weights": "random", "group": engine.weights.group, "layers": engine.config.num_hidden_layers}
    results["ttft"] = percentiles(first_tokens(engine, random_prompt(engine, prompt))).to_dict()
    results["depths"] = {}
    for depth in depths:
        ids, nbytes = random_prompt(engine, depth - WARM - steps // 2), engine.ledger(depth).total
        times: dict[str, list[float]] = {name: [] for name in rungs}
        made: dict[str, list[int]] = {}
        for _ in range(rounds):
            for name, (mode, pdl) in rungs.items():
                engine.use(mode)
                engine.pdl = pdl
                seconds, tokens = run(engine, ids, steps)
                times[name] += seconds
                first = made.setdefault("first", tokens)
                if tokens != first:
                    at = next(i for i, (a, b) in enumerate(zip(tokens, first, strict=True)) if a != b)
                    raise RuntimeError(f"{name} made another token than the first rung at step {at} from depth {depth}")
        entry: dict = {
            "bytes": nbytes,
            "rungs": {name: figures(each, nbytes, probe, spec) for name, each in times.items()},
        }
        engine.pdl = True
        if engine.device.type == "cuda":
            engine.use("in flight")
        # What explains a step's time and that time itself are of the same positions: attention has more splits, and
        # adds them up, from some position on.
        ids = random_prompt(engine, depth - WARM)
        unseen = [each for _ in range(UNSEEN) for each in replays(engine, ids, seen)[_settling(seen) :]]
        entry["on_device"] = figures(unseen, nbytes, probe, spec)
        entry |= timeline(engine, ids, seen)
        explained = entry["gap"]["p50"] + sum(region["seconds"]["p50"] for region in entry["regions"].values())
        entry["explained"] = explained / entry["on_device"]["seconds"]["p50"]
        engine.pdl = False
        entry["one_by_one"] = timeline(engine, ids, seen)
        engine.pdl = True
        results["depths"][str(depth)] = entry
    return results


def run(engine: Engine, ids: Sequence[int], steps: int) -> tuple[list[float], list[int]]:
    """Seconds a token of each look, and all tokens; the last logits are checked after the timing."""
    sequence, token = engine.prefill(ids)
    try:
        tokens, look = [token, *engine.decode(sequence, WARM)], engine.mode.look
        seconds = []
        for _ in range(steps // look):
            started = time.perf_counter()
            tokens += engine.decode(sequence, look)
            seconds.append((time.perf_counter() - started) / look)
        logits = engine.logits.clone()
    finally:
        engine.free(sequence)
    check(engine, [*ids, *tokens[:-1]], logits)
    return seconds, tokens


def check(engine: Engine, ids: Sequence[int], logits: Tensor) -> None:
    """Hold a step's logits against those of all tokens as one prompt, whose products are PyTorch's.

    Raises:
        RuntimeError: they differ by more than `TOLERANCE` of their norm, or are not finite.
    """
    sequence, _ = engine.prefill(ids)
    engine.free(sequence)
    error = ((logits - engine.logits).norm() / engine.logits.norm()).item()
    if not error < TOLERANCE:  # NaN does not pass
        raise RuntimeError(f"after {len(ids)} tokens the logits are off by {error:.3g} of their norm, over {TOLERANCE}")


def replays(engine: Engine, ids: Sequence[int], steps: int) -> list[float]:
    """Seconds of each step after `ids` and `WARM` more, between CUDA events after consecutive replays.

    The host is far ahead. On a CPU, for the tests, it is the host's time.
    """

    def timed(launch: Callable[[int, int], None], position: int) -> list[float]:
        if engine.device.type != "cuda":
            times = [time.perf_counter()]
            for i in range(steps):
                launch(1, position + i)
                times.append(time.perf_counter())
            return [b - a for a, b in pairwise(times)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for i, mark in enumerate(marks[1:]):
            launch(1, position + i)
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    return _shown(engine, ids, steps, timed)


def timeline(engine: Engine, ids: Sequence[int], steps: int = SEEN) -> dict:
    """Where the time of a step goes, by the clock of its own launches: `steps` of them after `ids` and `WARM` more.

    Returns:
        Of each kind of launch the seconds in which nothing before it ran any more, and the launches of a step; the
        seconds in which none ran; and one step: each launch's name, start and end, in µs from the end of the step
        before.

    Raises:
        RuntimeError: the profiler saw other launches than those of the steps.
    """
    names = [name.split()[-1] for name, _, _ in engine.launches(engine.chooser())]
    spans = _shown(engine, ids, steps, partial(_spans, engine, steps))
    if len(spans) != steps * len(names):
        raise RuntimeError(f"the profiler saw {len(spans)} launches of {steps} steps of {len(names)}")
    spans = spans[_settling(steps) * len(names) :]
    by_region: dict[str, list[float]] = {name: [] for name in names}
    gaps, ended, lines = [], spans[len(names) - 1][1], []
    for first in range(len(names), len(spans), len(names)):
        parts, gap, begun, line = dict.fromkeys(names, 0.0), 0.0, ended, []
        for name, (start, end) in zip(names, spans[first : first + len(names)], strict=True):
            gap += max(0.0, start - ended)
            parts[name] += max(0.0, end - max(start, ended))
            ended = max(ended, end)
            line.append([name, round(1e6 * (start - begun), 3), round(1e6 * (end - begun), 3)])
        gaps.append(gap)
        lines.append((ended - begun, line))
        for name, seconds in parts.items():
            by_region[name].append(seconds)
    return {
        "regions": {
            name: {"seconds": percentiles(seconds).to_dict(), "launches": names.count(name)}
            for name, seconds in by_region.items()
        },
        "gap": percentiles(gaps).to_dict(),
        "step": sorted(lines)[len(lines) // 2][1],
    }


def _spans(engine: Engine, steps: int, launch: Callable[[int, int], None], position: int) -> list[tuple[float, float]]:
    """Start and end in seconds of each launch of `steps` steps, in the order of their starts."""
    if engine.device.type != "cuda":
        spans = []
        for _ in range(steps):
            for _, each, _ in engine.launches(engine.chooser()):
                started = time.perf_counter()
                each()
                spans.append((started, time.perf_counter()))
        return spans
    # Without it torch warns that events of earlier cycles are lost; there is one cycle.
    keep = {"acc_events": True} if "acc_events" in inspect.signature(profile).parameters else {}
    with profile(activities=[ProfilerActivity.CUDA], **keep) as seen:
        for i in range(steps):
            launch(1, position + i)
        torch.cuda.synchronize()
    ranges = [event.time_range for event in seen.events() if event.device_type == DeviceType.CUDA]
    return sorted((each.start / 1e6, each.end / 1e6) for each in ranges)


def first_tokens(engine: Engine, ids: Sequence[int], count: int = PROMPTS) -> list[float]:
    """Seconds to the first token, `count` times after two that are thrown away."""
    seconds = []
    for _ in range(count + 2):
        synchronize(engine.device)
        started = time.perf_counter()
        sequence, _ = engine.prefill(ids)
        seconds.append(time.perf_counter() - started)
        engine.free(sequence)
    return seconds[2:]


def figures(seconds: Sequence[float], nbytes: int, probe: Probe, spec) -> dict:
    """Percentiles, tokens and bytes a second, and the share of the ceilings."""
    found = percentiles(seconds)
    result = {"seconds": found.to_dict(), "tokens_per_s": 1 / found.p50, "bytes_per_s": nbytes / found.p50}
    result["mbu_probe"] = mbu(nbytes, found.p50, probe.rate, NOISE)
    if spec:
        result["mbu_datasheet"] = mbu(nbytes, found.p50, spec.bandwidth)
    return result


def random_prompt(engine: Engine, length: int) -> list[int]:
    """The same `length` random tokens each time."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(engine.weights.num_tokens, (length,), generator=generator).tolist()


def engine_table(name: str, results: Mapping) -> str:
    """One size of the record as text."""
    lines = [f"{name}, random weights: TTFT {1e3 * results['ttft']['p50']:.1f} ms for {PROMPT} tokens"]
    for depth, entry in results["depths"].items():
        lines.append(f"depth {depth}: {entry['bytes'] / 1e9:.3f} GB a token")
        for rung, f in (entry["rungs"] | {"on_device": entry["on_device"]}).items():
            p10, p50, p90, p99 = (1e3 * f["seconds"][p] for p in ("p10", "p50", "p90", "p99"))
            shares = " / ".join(f"{100 * f[k]:.1f}" for k in ("mbu_datasheet", "mbu_probe") if k in f)
            lines.append(
                f"  {rung:<12} {p50:>8.3f} ms (p10 {p10:.3f}, p90 {p90:.3f}, p99 {p99:.3f}) {f['tokens_per_s']:>7.1f} "
                f"tok/s {f['bytes_per_s'] / 1e9:>6.0f} GB/s, MBU {shares} %"
            )
        for region, f in entry["regions"].items():
            lines.append(f"  {region:<12} {1e6 * f['seconds']['p50']:>8.1f} µs in {f['launches']} launches")
        lines.append(f"  {'gap':<12} {1e6 * entry['gap']['p50']:>8.1f} µs")
        lines.append(f"  regions and gap are {100 * entry['explained']:.1f} % of on_device")
    return "\n".join(lines)


def _settling(steps: int) -> int:
    """How many of the first steps are thrown away."""
    return min(SETTLING, steps // 2)


def _shown(engine: Engine, ids: Sequence[int], steps: int, use: Callable):
    """What `use` makes of what launches steps and the position, a sequence with room for `steps` being shown."""
    sequence, _ = engine.prefill(ids)
    try:
        engine.decode(sequence, WARM)
        position = engine.kv.length(sequence)
        return use(engine.show(sequence, steps), position)
    finally:
        engine.free(sequence)
