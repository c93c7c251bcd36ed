"""How long a call takes: samples, their percentiles, and fair comparisons."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of `n` samples, linear between neighbours, in `unit`."""

    p10: float
    p50: float
    p90: float
    p99: float
    n: int
    unit: str = "s"

    def __str__(self) -> str:
        scale, unit = 1.0, self.unit
        if self.unit == "s":
            scale, unit = (1.0, "s") if self.p50 >= 1 else (1e3, "ms") if self.p50 >= 1e-3 else (1e6, "µs")
        p10, p50, p90, p99 = (f"{p * scale:.4g}" for p in (self.p10, self.p50, self.p90, self.p99))
        return f"p50 {p50} {unit} (p10 {p10}, p90 {p90}, p99 {p99}; n {self.n})"

    def to_dict(self) -> dict:
        """The JSON form that records hold."""
        return asdict(self)


def percentiles(samples: Sequence[float], unit: str = "s") -> Percentiles:
    """p10, p50, p90 and p99 of `samples`.

    Raises:
        ValueError: no samples, or one that is NaN or infinite; the message gives its place.
    """
    values = sorted(map(float, samples))
    if not values:
        raise ValueError("percentiles of no samples; give at least one")
    for i, value in enumerate(samples):
        if not math.isfinite(value):
            raise ValueError(f"sample {i} of {len(values)} is {value}; every sample must be finite")

    def at(q: float) -> float:
        place = q * (len(values) - 1)
        low = math.floor(place)
        high = min(low + 1, len(values) - 1)
        return values[low] + (place - low) * (values[high] - values[low])

    return Percentiles(at(0.10), at(0.50), at(0.90), at(0.99), len(values), unit)


def synchronize(device: str | torch.device) -> None:
    """Wait until everything queued on `device` is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(
    fn: Callable[[], object], device: str | torch.device = "cpu", repeats: int = 100, warmup: int = 3
) -> list[float]:
    """Seconds of each of `repeats` calls of `fn`, after `warmup` calls that are thrown away.

    On a GPU the seconds lie between two CUDA events around the call on torch's current stream, and all calls are
    queued before the first wait, so that the host does not show. On a CPU they are wall-clock time.

    Raises:
        ValueError: repeats below 1 or warmup below 0.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats is {repeats} and warmup {warmup}; they must be at least 1 and 0")
    for _ in range(warmup):
        fn()
    synchronize(device)
    if torch.device(device).type != "cuda":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            fn()
            seconds.append(time.perf_counter() - start)
        return seconds
    with torch.cuda.device(device):
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in marks:
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in marks]


@dataclass(frozen=True)
class Paired:
    """Seconds of several contenders, one sample each per round, taken in turn."""

    samples: dict[str, list[float]]

    def percentiles(self, name: str) -> Percentiles:
        return percentiles(self.samples[name])

    def ratios(self, name: str, against: str) -> list[float]:
        """`name` / `against` of each round: below 1, `name` is faster."""
        return [a / b for a, b in zip(self.samples[name], self.samples[against], strict=True)]

    def ratio(self, name: str, against: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios(name, against))

    def __str__(self) -> str:
        names = list(self.samples)
        lines = [f"{name:>16}: {self.percentiles(name)}" for name in names]
        for name in names[1:]:
            ratios = percentiles(self.ratios(names[0], name), unit="×")
            lines.append(f"{names[0]} / {name}, pair by pair: {ratios}")
        return "\n".join(lines)


def paired(fns: Mapping[str, Callable[[], float]], rounds: int = 10, warmup: int = 1) -> Paired:
    """Run the contenders in turn, A B A B …, so that a slow minute of the machine falls on all of them.

    Args:
        fns: by name, a function that runs once and returns the seconds it wants to be judged by.
        rounds: samples of each.
        warmup: rounds thrown away first.

    Raises:
        ValueError: fewer than two contenders, no rounds, or a time that is not positive and finite.
    """
    if len(fns) < 2 or rounds < 1:
        raise ValueError(f"{len(fns)} contenders and {rounds} rounds; a comparison needs at least 2 and 1")
    samples: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(warmup + rounds):
        for name, fn in fns.items():
            seconds = fn()
            if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
                raise ValueError(f"{name} returned {seconds!r}; it must return its time in seconds, above 0")
            if turn >= warmup:
                samples[name].append(float(seconds))
    return Paired(samples)
