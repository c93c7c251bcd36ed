"""The record `gemv`: how long each step of the ladder takes on this GPU, beside torch, on the shapes of the models."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen import hardware, kernels, records
from nanoqwen.counters import GEMV_SOURCES
from nanoqwen.kernels.gemv import C_NAMES
from nanoqwen.kernels.launch import Program
from nanoqwen.ledger import below_ceiling
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.records import Record
from nanoqwen.timing import percentiles, synchronize, time_calls

SOURCES = (
    *GEMV_SOURCES,
    "csrc/read_probe.cu",
    "nanoqwen/kernels/launch.py",
    "nanoqwen/kernels/arguments.py",
    "nanoqwen/bench_gemv.py",
    "nanoqwen/timing.py",
)
STEPS: dict[str, Callable] = {
    "naive": kernels.gemv_naive,
    "coalesced": kernels.gemv_coalesced,
    "vectorized": kernels.gemv_vectorized,
    "unrolled": kernels.gemv_unrolled,
    "rows": kernels.gemv_rows,
    "gemv": kernels.gemv,
}
# (rows, columns) of the matrices that one decode step multiplies.
SHAPES = {
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
    "7B lm_head": (152064, 3584),
    "1.5B qkv": (2048, 1536),
    "1.5B o": (1536, 1536),
    "1.5B gate_up": (17920, 1536),
    "1.5B down": (1536, 8960),
    "1.5B lm_head": (151936, 1536),
    "0.5B qkv": (1152, 896),
    "0.5B o": (896, 896),
    "0.5B gate_up": (9728, 896),
    "0.5B down": (896, 4864),
    "0.5B lm_head": (151936, 896),
}
ROUNDS = 24
REPLAY_S = 2e-3  # a replay lasts about so long, so that the gap between two replays does not show
SLOW_REPLAY_S = 20e-3  # a kernel whose replay would last longer makes fewer calls in it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 4e-4}
TORCH_TOLERANCE = 4  # times as much: torch may round partial sums to 16 bits


def record_gemv(folder: Path = FOLDER) -> Record:
    """Measure and save the record `gemv`: every step of the ladder and torch, cold and hot, and what a launch costs.

    Raises:
        RuntimeError: no CUDA GPU, or a wrong result. CeilingError: a cold figure above the datasheet's bandwidth.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the record 'gemv' needs a CUDA GPU: the SIMT machine has no clock")
    device = hardware.default_device()
    machine = hardware.machine(device)
    with without_garbage():
        results = {"launch": launch_cost(device), **measure(device, SHAPES, rotate_bytes=3 * machine.cache)}
    protocol = (
        "bf16, one vector, normal data, one process. Cold: weights rotated over at least 3 x L2, so that each call "
        "reads a matrix that the L2 no longer holds. Hot: the same matrix at every call; what fits the L2 comes from "
        "it, so apparent_rate (matrix bytes over time) is no traffic of the memory and may exceed its bandwidth. Calls "
        f"are captured in a CUDA graph that lasts about {1e3 * REPLAY_S:g} ms; {ROUNDS} rounds, in each every kernel "
        "replays its graph once, in turn, and every other round in the opposite order; a sample is the time between "
        "CUDA events around a replay over its calls. versus_torch: torch's time over the kernel's, round by round. "
        "torch is torch.mm(x, w.t()), cuBLAS. Bytes: matrix, x and y, once each. Every output is checked against "
        "float64 after the timing. launch: host time per call over 500 queued calls on a small matrix. Clocks left "
        "alone."
    )
    record = records.make("gemv", results, protocol, SOURCES, device)
    path = records.save(record, folder)
    print(gemv_table(record), flush=True)
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


def measure(
    device: torch.device,
    shapes: Mapping[str, tuple[int, int]],
    rotate_bytes: int,
    rounds: int = ROUNDS,
    dtype: torch.dtype = torch.bfloat16,
    replay_s: float = REPLAY_S,
) -> dict:
    """The record's results for these shapes. On a CPU it runs too, for the tests; such times mean nothing."""
    probe = hardware.read_ceiling(device)
    spec = hardware.machine(device).spec
    bandwidth = spec and spec.bandwidth
    print(probe, flush=True)
    results: dict = {
        "dtype": str(dtype).removeprefix("torch."),
        "ceilings": {"read_probe": probe.to_dict(), "datasheet_bytes_per_s": bandwidth},
        "shapes": {},
    }
    for name, (rows, cols) in shapes.items():
        started = time.perf_counter()
        rotation = Rotation(rows, cols, dtype, device, rotate_bytes)
        entry: dict = {"rows": rows, "cols": cols, "bytes": rotation.bytes_per_call, "copies": rotation.copies}
        for heat in ("cold", "hot"):
            entry[heat] = _summary(rotation.samples(heat == "hot", rounds, replay_s), rotation.bytes_per_call, heat)
        for kernel, figures in entry["cold"].items():
            figures["of_probe"] = figures["bytes_per_s"] / probe.rate
            if bandwidth:
                below_ceiling(figures["bytes_per_s"], bandwidth, f"{kernel} on {name}, cold, bytes/s")
        results["shapes"][name] = entry
        best = entry["cold"]["gemv"]
        print(
            f"{name}: gemv {1e6 * best['seconds']['p50']:.1f} µs, {100 * best['of_probe']:.1f} % of the probe, "
            f"{best['versus_torch']['p50']:.3f} x torch ({time.perf_counter() - started:.1f} s)",
            flush=True,
        )
        del rotation
    return results


class Rotation:
    """A matrix in so many copies, each with other numbers, that going round them leaves no cache warm."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device, rotate_bytes: int):
        nbytes = rows * cols * dtype.itemsize
        self.copies = max(2, -(-rotate_bytes // nbytes))
        self.bytes_per_call = nbytes + (rows + cols) * dtype.itemsize
        self.device, self.dtype, self.rows = device, dtype, rows
        make = torch.Generator(device).manual_seed(rows + cols)
        self.w = torch.empty(self.copies, rows, cols, dtype=dtype, device=device)
        for w in self.w:
            w.normal_(generator=make)
        self.x = torch.empty(cols, dtype=dtype, device=device).normal_(generator=make)

    def samples(self, hot: bool, rounds: int, replay_s: float) -> dict[str, list[float]]:
        """Seconds per call of each kernel and of torch, one sample a round; outputs checked after the timing."""
        outputs = {
            name: torch.empty(self.copies, self.rows, dtype=self.dtype, device=self.device)
            for name in (*STEPS, "torch")
        }

        def clear() -> None:
            for y in outputs.values():
                y.fill_(float("nan"))

        contenders = {name: self._contender(name, y) for name, y in outputs.items()}
        times, written = race(contenders, self.copies, rounds, replay_s, self.device, clear, hot)
        self._check(outputs, written)
        return times

    def _contender(self, name: str, y: Tensor) -> Callable[[int], object]:
        if name == "torch":
            x = self.x[None]
            return lambda i: torch.mm(x, self.w[i].t(), out=y[i][None])
        kernel = STEPS[name]
        return lambda i: kernel(self.w[i], self.x, out=y[i])

    def _check(self, outputs: Mapping[str, Tensor], written: Mapping[str, int]) -> None:
        for i in range(max(written.values())):
            x = self.x.double()
            reference = torch.cat([part.double() @ x for part in self.w[i].split(16384)])
            for name, y in outputs.items():
                if i < written[name]:
                    error = ((y[i].double() - reference).norm() / reference.norm()).item()
                    limit = TOLERANCE[self.dtype] * (TORCH_TOLERANCE if name == "torch" else 1)
                    if not error < limit:  # NaN does not pass
                        raise RuntimeError(
                            f"{name} on {self.rows} x {len(x)} is off by {error:.3g} of the result's norm; "
                            f"it must be below {limit}"
                        )


def race(
    contenders: Mapping[str, Callable[[int], object]],
    copies: int,
    rounds: int,
    replay_s: float,
    device: torch.device,
    clear: Callable[[], None],
    hot: bool = False,
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds per call of each contender, one sample a round, taken in turn; and of how many copies each made outputs.

    Args:
        contenders: by name, what is called with the number of a copy of the data.
        replay_s: what one sample should last; a GPU's calls are captured in a graph.
        clear: fills the outputs with NaN. Called when all are warmed up and captured, before anything is timed.
        hot: each call takes the first copy.
    """
    replays, calls = {}, {}
    for name, call in contenders.items():
        seconds = min(time_calls(lambda call=call: call(0), device, 3, 1))
        calls[name] = calls_per_replay(seconds, copies, hot, replay_s)
        order = [0 if hot else i % copies for i in range(calls[name])]
        replays[name] = captured(lambda call=call, order=order: [call(i) for i in order], device)
    clear()
    times = time_replays(replays, rounds, device)
    written = {name: 1 if hot else min(n, copies) for name, n in calls.items()}
    return {name: [t / calls[name] for t in times[name]] for name in times}, written


def calls_per_replay(seconds: float, copies: int, hot: bool, replay_s: float) -> int:
    """Calls in one replay: whole rounds of the copies, or fewer of a slow kernel.

    A slow kernel always begins with the first copy. It is cold all the same: the kernels before it have read the last
    copies since.
    """
    wanted = max(1, round(replay_s / seconds))
    if hot or copies * seconds > SLOW_REPLAY_S:
        return wanted
    return copies * -(-wanted // copies)


@contextmanager
def without_garbage() -> Iterator[None]:
    """Torch collects garbage before each of many captures: let it not walk through the imports."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A replay of what `run` launches: a CUDA graph, or on a CPU `run` itself. `run` must have been warmed up."""
    if device.type != "cuda":
        return run
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def time_replays(
    replays: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each replay: `rounds` rounds after one thrown away, every other in the opposite order.

    On a GPU everything is queued before the first wait: one event lies between any two replays, and no idle time.
    """
    cuda = device.type == "cuda"

    def mark():
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    order = [name for turn in range(1 + rounds) for name in (list(replays)[:: 1 if turn % 2 else -1])]
    marks = [mark()]
    for name in order:
        replays[name]()
        marks.append(mark())
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in replays}
    for i, (start, end) in enumerate(pairwise(marks)):
        if i >= len(replays):
            times[order[i]].append(start.elapsed_time(end) / 1e3 if cuda else end - start)
    return times


def _summary(samples: Mapping[str, Sequence[float]], nbytes: int, heat: str) -> dict:
    theirs, summary = samples["torch"], {}
    for name, ours in samples.items():
        seconds = percentiles(ours)
        rate = "bytes_per_s" if heat == "cold" else "apparent_rate"
        ratio = percentiles([b / a for a, b in zip(ours, theirs, strict=True)], unit="x")
        summary[name] = {
            "seconds": seconds.to_dict(),
            rate: nbytes / seconds.p50,
            "versus_torch": ratio.to_dict(),
        }
    return summary


def launch_cost(device: torch.device, dtype: torch.dtype = torch.bfloat16, calls: int = 500, blocks: int = 15) -> dict:
    """Host seconds per call, of a bare launch, of the function with its checks, and of torch's product."""
    w, x, y = (torch.randn(size).to(device, dtype) for size in ((32, 64), (64,), (32,)))
    name = f"gemv_coalesced<{C_NAMES[dtype]}>"
    program = Program(Path("gemv.cu"), {name: "pppii"})
    arguments, row = (w, x, y, 32, 64), x[None]
    run = {
        "program_launch": lambda: program.launch(name, device, 8, 128, arguments),
        "gemv_out": lambda: kernels.gemv(w, x, y),
        "gemv": lambda: kernels.gemv(w, x),
        "torch_mm": lambda: torch.mm(row, w.t()),
    }
    costs = {}
    for what, call in run.items():
        samples = []
        for block in range(blocks + 1):
            synchronize(device)
            started = time.perf_counter()
            for _ in range(calls):
                call()
            if block:
                samples.append((time.perf_counter() - started) / calls)
        synchronize(device)
        costs[what] = percentiles(samples).to_dict()
    print("launch: " + ", ".join(f"{k} {1e6 * v['p50']:.2f} µs" for k, v in costs.items()), flush=True)
    return costs


@dataclass(frozen=True)
class Rung:
    """One kernel on one shape, cold: what tables and figures show of it."""

    kernel: str
    seconds: float
    rate: float  # bytes/s
    of_probe: float
    of_torch: float  # torch's time over the kernel's: above 1, the kernel is faster


def ladder(record: Record, shape: str = "7B gate_up") -> list[Rung]:
    """The rungs of a shape from the record `gemv`, naive first, torch last.

    Raises:
        KeyError: the record has no such shape.
    """
    cold = record.results["shapes"][shape]["cold"]
    return [
        Rung(name, f["seconds"]["p50"], f["bytes_per_s"], f["of_probe"], f["versus_torch"]["p50"])
        for name, f in cold.items()
    ]


def gemv_table(record: Record) -> str:
    """The record `gemv` as a table of text."""
    titles = f"{'µs p50':>8} {'p99':>8} {'GB/s':>6} {'probe':>7} {'x torch':>8} {'hot µs':>8}"
    lines = [f"{'shape':<14} {'':>13} {'kernel':<11} {titles}"]
    for shape, entry in record.results["shapes"].items():
        for name, f in entry["cold"].items():
            lines.append(
                f"{shape:<14} {entry['rows']:>7}x{entry['cols']:<5} {name:<11} {1e6 * f['seconds']['p50']:>8.2f} "
                f"{1e6 * f['seconds']['p99']:>8.2f} {f['bytes_per_s'] / 1e9:>6.0f} {100 * f['of_probe']:>5.1f} % "
                f"{f['versus_torch']['p50']:>8.3f} {1e6 * entry['hot'][name]['seconds']['p50']:>8.2f}"
            )
    cost = {name: f"{1e6 * f['p50']:.2f} µs" for name, f in record.results["launch"].items()}
    lines.append("host time of a call: " + ", ".join(f"{name} {text}" for name, text in cost.items()))
    return "\n".join(lines)
