"""The record `awq`: how fast AWQ's weights become 16-bit ones, whether that holds in any order of calls, and what the
autotuner costs."""

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen import hardware, kernels, records
from nanoqwen.autotune import Tuner
from nanoqwen.awq import dequantize_reference
from nanoqwen.bench_gemv import SHAPES as GEMV_SHAPES
from nanoqwen.bench_gemv import race, without_garbage
from nanoqwen.counters import AWQ_SOURCES
from nanoqwen.kernels import awq
from nanoqwen.kernels.awq import BLOCKS, ROWS
from nanoqwen.ledger import below_ceiling
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.records import Record
from nanoqwen.timing import percentiles, synchronize

SOURCES = (
    *AWQ_SOURCES,
    "nanoqwen/kernels/launch.py",
    "nanoqwen/kernels/arguments.py",
    "nanoqwen/autotune.py",
    "nanoqwen/hardware.py",
    "nanoqwen/bench_gemv.py",
    "nanoqwen/bench_awq.py",
    "nanoqwen/timing.py",
)
# (in, out), as AWQ stores them.
SHAPES = {name: GEMV_SHAPES[name][::-1] for name in ("7B gate_up", "7B down", "7B qkv", "7B o", "0.5B gate_up")}
LARGE = ("7B gate_up", "7B down")
GROUP = 128
DTYPE = torch.bfloat16
ROUNDS = 40
REPLAY_S = 5e-4
SEEDS, TRIALS = 5, 15
PARTED = 0.15  # of the median: where the mean is further away, single calls were far from the others


def launches() -> dict[str, Callable]:
    """Every kernel and launch by name, called as `awq_dequantize`."""

    def v3(block: int, rows: int) -> Callable:
        return lambda *packed, out: kernels.awq_dequantize_v3(*packed, out=out, block=block, rows=rows)

    found: dict[str, Callable] = {"v1": kernels.awq_dequantize_v1, "v2": kernels.awq_dequantize_v2}
    for block in BLOCKS:
        for rows in ROWS:
            found[f"v3 block {block} rows {rows}"] = v3(block, rows)
    return found


def record_awq(folder: Path = FOLDER) -> Record:
    """Measure and save the record `awq`.

    Raises:
        RuntimeError: no CUDA GPU, or a result that differs from the reference.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the record 'awq' needs a CUDA GPU: the SIMT machine has no clock")
    device = hardware.default_device()
    cache = hardware.machine(device).cache
    with without_garbage():
        results = {
            **measure(device, SHAPES, rotate_bytes=3 * cache),
            "stress": stress(device, SHAPES, flush_bytes=3 * cache),
            "autotuner": autotuner(device, SHAPES["7B gate_up"]),
        }
    protocol = (
        f"bf16 from AWQ words in groups of {GROUP}, random words, one process. shapes: (in, out). Calls are captured "
        f"in a CUDA graph of whole rounds over copies of input and output that together are at least 3 x L2; {ROUNDS} "
        "rounds, every contender in turn, every other round in the opposite order; a sample is the time between CUDA "
        "events around a replay over its calls. Bytes: words, zero-points and scales once, and the output; of_copy: "
        "over the rate of the copy probe, which counts what it reads and writes. Outputs were filled with NaN before "
        "the timing and are compared with the plain reference after it, and equal. stress: for each seed new data; in "
        "each trial every shape and kernel once, in random order, each call between two events of its own (which it "
        "pays for) after a write of 3 x L2; checked after. v3 there is the default launch, tuned the autotuner's. "
        f"parted: mean and median are more than {PARTED:.0%} of the median apart. autotuner: first_call_s on a shape "
        "that no process has seen, file_call_s in a new tuner that finds the choice on disk; then host seconds of a "
        "queued call on a small matrix, of the tuned function and of the chosen launch called directly, in turn; "
        "overhead_s is the difference of each pair. Clocks left alone."
    )
    record = records.make("awq", results, protocol, SOURCES, device)
    path = records.save(record, folder)
    print(awq_table(record), flush=True)
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


def inputs(rows: int, cols: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """qweight, qzeros and scales of random words."""
    make = torch.Generator(device).manual_seed(seed)

    def words(height: int) -> Tensor:
        size, ends = (height, cols // 8), (-(2**31), 2**31)
        return torch.randint(*ends, size, generator=make, dtype=torch.int32, device=device)

    scales = torch.rand(rows // GROUP, cols, generator=make, device=device) * 0.03 + 1e-3
    return words(rows), words(rows // GROUP), scales.half()


def bytes_moved(rows: int, cols: int) -> int:
    """Words, zero-points, scales and the 16-bit output."""
    return rows * cols // 2 + rows // GROUP * (cols // 2 + 2 * cols) + 2 * rows * cols


def _check(what: str, out: Tensor, reference: Tensor) -> None:
    if not torch.equal(out, reference):  # NaN equals nothing
        raise RuntimeError(f"{what} gave another result than the reference")


def measure(
    device: torch.device,
    shapes: Mapping[str, tuple[int, int]],
    rotate_bytes: int,
    rounds: int = ROUNDS,
    replay_s: float = REPLAY_S,
) -> dict:
    """Every kernel and launch on each shape, against the copy probe. On a CPU such times mean nothing."""
    probe, spec = hardware.copy_probe(device), hardware.machine(device).spec
    print(probe, flush=True)
    results: dict = {"dtype": str(DTYPE).removeprefix("torch."), "group": GROUP, "copy": probe.to_dict(), "shapes": {}}
    for name, (rows, cols) in shapes.items():
        nbytes = bytes_moved(rows, cols)
        copies = max(2, -(-rotate_bytes // nbytes))
        times = _race(name, rows, cols, copies, device, rounds, replay_s)
        kinds = {}
        for label, samples in times.items():
            seconds = percentiles(samples)
            rate = nbytes / seconds.p50
            if spec:
                below_ceiling(rate, spec.bandwidth, f"{label} on {name}, bytes/s")
            kinds[label] = {"seconds": seconds.to_dict(), "bytes_per_s": rate, "of_copy": rate / probe.rate}
        best = min((label for label in kinds if label.startswith("v3")), key=lambda k: kinds[k]["seconds"]["p50"])
        entry = {"rows": rows, "cols": cols, "copies": copies, "bytes": nbytes, "kernels": kinds, "best_v3": best}
        results["shapes"][name] = entry
        print(f"{name}: {best} {100 * kinds[best]['of_copy']:.1f} % of the copy probe", flush=True)
    return results


def _race(
    name: str, rows: int, cols: int, copies: int, device: torch.device, rounds: int, replay_s: float
) -> dict[str, list[float]]:
    packed = [inputs(rows, cols, device, seed) for seed in range(copies)]
    runs = launches()
    outputs = {label: [_empty(rows, cols, device) for _ in range(copies)] for label in runs}

    def contender(label: str) -> Callable[[int], object]:
        run, outs = runs[label], outputs[label]
        return lambda i: run(*packed[i], out=outs[i])

    def clear() -> None:
        for outs in outputs.values():
            for out in outs:
                out.fill_(float("nan"))

    contenders = {label: contender(label) for label in runs}
    times, written = race(contenders, copies, rounds, replay_s, device, clear)
    for i in range(copies):
        reference = dequantize_reference(*packed[i], DTYPE).T
        for label, outs in outputs.items():
            if i < written[label]:
                _check(f"{label} on {name}", outs[i], reference)
    return times


def _empty(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.empty(rows, cols, dtype=DTYPE, device=device)


def stress(
    device: torch.device,
    shapes: Mapping[str, tuple[int, int]],
    flush_bytes: int,
    seeds: int = SEEDS,
    trials: int = TRIALS,
) -> dict:
    """Single calls in random order, each with a cold L2: median, mean, and whether they part."""
    runs = {
        "v1": kernels.awq_dequantize_v1,
        "v2": kernels.awq_dequantize_v2,
        "v3": kernels.awq_dequantize_v3,
        "tuned": kernels.awq_dequantize,
    }
    flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)
    pairs = [(shape, label) for shape in shapes for label in runs]
    samples: dict[tuple[str, str], list[list[float]]] = {pair: [] for pair in pairs}
    for seed in range(seeds):
        packed = {name: inputs(*shape, device, 1000 + seed) for name, shape in shapes.items()}
        outputs = {(name, label): _empty(*shapes[name], device) for name, label in pairs}
        for name, label in pairs:
            runs[label](*packed[name], out=outputs[name, label])  # compiled and tuned before anything counts
        for out in outputs.values():
            out.fill_(float("nan"))
        order = [pair for _ in range(trials) for pair in pairs]
        random.Random(seed).shuffle(order)
        clocks = [_clock(device) for _ in order]
        for (name, label), (start, end, _) in zip(order, clocks, strict=True):
            flush.zero_()
            start()
            runs[label](*packed[name], out=outputs[name, label])
            end()
        synchronize(device)
        for pair in pairs:
            mine = (clock for which, clock in zip(order, clocks, strict=True) if which == pair)
            samples[pair].append([seconds() for _, _, seconds in mine])
        for name in shapes:
            reference = dequantize_reference(*packed[name], DTYPE).T
            for label in runs:
                _check(f"{label} on {name}, seed {seed}", outputs[name, label], reference)
    found = {name: {label: _spread(samples[name, label]) for label in runs} for name in shapes}
    return {"seeds": seeds, "trials": trials, "shapes": found}


def _clock(device: torch.device) -> tuple[Callable[[], None], Callable[[], None], Callable[[], float]]:
    """What marks the start and the end of a call, and gives the seconds between once all is done."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        return start.record, end.record, lambda: start.elapsed_time(end) / 1e3
    marks: list[float] = []

    def mark() -> None:
        marks.append(time.perf_counter())

    return mark, mark, lambda: marks[1] - marks[0]


def _spread(by_seed: Sequence[Sequence[float]]) -> dict:
    every = [seconds for samples in by_seed for seconds in samples]
    mean, median = statistics.mean(every), statistics.median(every)
    return {
        "seconds": percentiles(every).to_dict(),
        "mean": mean,
        "parted": abs(mean - median) > PARTED * median,
        "by_seed": [statistics.median(samples) for samples in by_seed],
    }


def autotuner(device: torch.device, shape: tuple[int, int], calls: int = 300, rounds: int = 15) -> dict:
    """What the first call of a shape takes, and what the later ones take on the host beside the bare launch."""
    packed, out = inputs(*shape, device), _empty(*shape, device)
    kernels.awq_dequantize_v3(*packed, out=out)  # the source is compiled before

    def seconds(run: Callable[[], object], calls: int = 1) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            run()
        if calls == 1:
            synchronize(device)
        return (time.perf_counter() - started) / calls

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "autotune.json"
        with _tuner(path):
            first = seconds(lambda: kernels.awq_dequantize(*packed, out=out))
        with _tuner(path) as tuner:
            again = seconds(lambda: kernels.awq_dequantize(*packed, out=out))
            small = (GROUP, 64)
            packed, out = inputs(*small, device), _empty(*small, device)
            kernels.awq_dequantize(*packed, out=out)
            choice = tuner.choose((*small, GROUP), out, kernels.awq_dequantize_v3)
            runs = {
                "tuned": lambda: kernels.awq_dequantize(*packed, out=out),
                "direct": lambda: kernels.awq_dequantize_v3(*packed, out=out, **choice),
            }
            samples: dict[str, list[float]] = {name: [] for name in runs}
            for turn in range(1 + rounds):
                for name in list(runs)[:: 1 if turn % 2 else -1]:
                    taken = seconds(runs[name], calls)
                    if turn:
                        samples[name].append(taken)
            synchronize(device)
    overhead = [a - b for a, b in zip(samples["tuned"], samples["direct"], strict=True)]
    return {
        "rows": shape[0],
        "cols": shape[1],
        "candidates": len(awq.TUNER.candidates),
        "first_call_s": first,
        "file_call_s": again,
        "tuned": percentiles(samples["tuned"]).to_dict(),
        "direct": percentiles(samples["direct"]).to_dict(),
        "overhead_s": percentiles(overhead).to_dict(),
    }


@contextlib.contextmanager
def _tuner(path: Path) -> Iterator[Tuner]:
    """`awq_dequantize` with a tuner that has seen nothing but this file."""
    usual = awq.TUNER
    awq.TUNER = Tuner(usual.kernel, usual.source, list(usual.candidates.values()), path)
    try:
        yield awq.TUNER
    finally:
        awq.TUNER = usual


def awq_table(record: Record) -> str:
    """The record `awq` as a table of text."""
    results = record.results
    lines = [f"{'shape':<14} {'':>13} {'kernel':<20} {'µs p50':>8} {'p99':>8} {'GB/s':>6} {'of copy':>8}"]
    for name, entry in results["shapes"].items():
        for label, f in entry["kernels"].items():
            lines.append(
                f"{name:<14} {entry['rows']:>6}x{entry['cols']:<6} {label:<20} {1e6 * f['seconds']['p50']:>8.2f} "
                f"{1e6 * f['seconds']['p99']:>8.2f} {f['bytes_per_s'] / 1e9:>6.0f} {100 * f['of_copy']:>6.1f} %"
                f"{' best' if label == entry['best_v3'] else ''}"
            )
    for name, found in results["stress"]["shapes"].items():
        spreads = (
            f"{label} {1e6 * f['seconds']['p50']:.2f} / {1e6 * f['mean']:.2f}{' PARTED' if f['parted'] else ''}"
            for label, f in found.items()
        )
        lines.append(f"stress, {name}: median / mean µs: {', '.join(spreads)}")
    t = results["autotuner"]
    lines.append(
        f"autotuner: first call {1e3 * t['first_call_s']:.1f} ms, from the file {1e3 * t['file_call_s']:.2f} ms; later "
        f"calls {1e6 * t['tuned']['p50']:.2f} µs of host time, the bare launch {1e6 * t['direct']['p50']:.2f}, "
        f"overhead {1e6 * t['overhead_s']['p50']:.2f}"
    )
    return "\n".join(lines)
