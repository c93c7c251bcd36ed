"""The records `int4` and `crossover`: the INT4 ladder on this GPU beside torch, and when it pays to dequantise."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen import awq, hardware, kernels, records
from nanoqwen.bench_gemv import SHAPES as GEMV_SHAPES
from nanoqwen.bench_gemv import race, without_garbage
from nanoqwen.counters import AWQ_SOURCES, INT4_SOURCES
from nanoqwen.hardware import Probe
from nanoqwen.kernels.int4 import MAX_TOKENS
from nanoqwen.ledger import below_ceiling
from nanoqwen.packing import FRAGMENT, GROUP_SIZE, pack, tile_scales
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.records import Record
from nanoqwen.timing import percentiles

SOURCES = (
    *INT4_SOURCES,
    "csrc/read_probe.cu",
    "nanoqwen/kernels/launch.py",
    "nanoqwen/kernels/arguments.py",
    "nanoqwen/bench_gemv.py",
    "nanoqwen/bench_int4.py",
    "nanoqwen/timing.py",
)
CROSSOVER_SOURCES = (*SOURCES, *AWQ_SOURCES, "nanoqwen/autotune.py")
GEMV: dict[str, Callable] = {
    "naive": kernels.int4_gemv_naive,
    "warp": kernels.int4_gemv_warp,
    "prmt": kernels.int4_gemv_prmt,
    "dp4a": kernels.int4_gemv_dp4a,
    "magic": kernels.int4_gemv_magic,
}
GEMM: dict[str, Callable] = {
    "mma": kernels.int4_gemm_mma,
    "ring": kernels.int4_gemm_ring,
    "pdl": functools.partial(kernels.int4_gemm_ring, pdl=True),
}
OURS = (*GEMV, *GEMM)
THEIRS = ("torch_int4", "torch_bf16")
SHAPES = {
    name: shape for name, shape in GEMV_SHAPES.items() if "lm_head" not in name and name not in ("1.5B qkv", "1.5B o")
}
TOKENS = (1, 2, 4, 8)
CROSSOVER_SHAPES = {name: GEMV_SHAPES[name] for name in ("7B gate_up", "7B down")}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WAYS = ("mma", "ring", "dequantise", "bf16")
ROUNDS = 100
REPLAY_S = 5e-4
INNER_TILES = 8  # of torch's layout: the widest, made for the longest loads
# Of the result's norm. Tensor cores: what offsets of some hundred times x leave behind. magic: products in fp16.
# dp4a: x rounded to 8 bits. torch rounds weights and results to bf16.
TOLERANCE = (
    dict.fromkeys(GEMV, 1e-5)
    | {"magic": 3e-3, "dp4a": 2e-2}
    | dict.fromkeys(GEMM, 2e-4)
    | dict.fromkeys((*THEIRS, "bf16", "dequantise"), 2e-2)
)


def record_int4(folder: Path = FOLDER) -> Record:
    """Measure and save the record `int4`: every step of the ladder and torch, cold, and what more tokens cost.

    Raises:
        RuntimeError: no CUDA GPU, or a wrong result. CeilingError: a cold figure above the datasheet's bandwidth.
    """
    device = _gpu("int4")
    with without_garbage():
        results = measure(device, SHAPES, rotate_bytes=3 * hardware.machine(device).cache)
    protocol = (
        f"INT4 in groups of {GROUP_SIZE} with fp16 scales, one process. Weights normal and rounded, scales and x such "
        "that fp16 and bf16 hold them alike. Cold: weights rotated over at least 3 x L2, so that each call reads a "
        "matrix that the L2 no longer holds. Calls are captured in a CUDA graph, launches included: whole rounds of "
        f"the copies, about {1e3 * REPLAY_S:g} ms or more (fewer calls of a slow kernel); {ROUNDS} rounds, in each "
        "every contender replays its graph once, in turn, and every other round in the opposite order; a sample is the "
        "time between CUDA events around a replay over its calls. Ours: x fp16, y fp32; dp4a includes quantize_x. "
        f"torch_int4 is aten._weight_int4pack_mm (inner tiles {INNER_TILES}), torch_bf16 is torch.mm (cuBLAS), both "
        "with x and y in bf16. pdl is ring with programmatic dependent launch: it fetches weights while the call "
        "before it still runs, as in a decode step. versus_...: that one's time over the kernel's, round by round. "
        "Bytes: words, scales, x and y, once each. best: of ours, the lowest median. tokens: the same with 1 to 8 rows "
        "of x, in a race of their own; of_one: time over that of one token, round by round. error: largest over the "
        "copies, of the norm "
        "of the float64 product with the dequantised weights; outputs were filled with NaN before the timing and are "
        "checked after it. Clocks left alone."
    )
    return _save(records.make("int4", results, protocol, SOURCES, device), folder, int4_table)


def record_crossover(folder: Path = FOLDER) -> Record:
    """Measure and save the record `crossover`: fused, dequantised and 16-bit products for batches of 1 to 512.

    Raises:
        RuntimeError: no CUDA GPU, or a wrong result.
    """
    device = _gpu("crossover")
    with without_garbage():
        results = crossover(device, CROSSOVER_SHAPES, rotate_bytes=3 * hardware.machine(device).cache)
    protocol = (
        f"One process, timed as the record int4. mma and ring: the fused kernels, {MAX_TOKENS} tokens a call, so "
        "larger batches read the weights again. dequantise: awq_dequantize (v3, tuned) of the same weights in AWQ's "
        "layout into one bf16 matrix, then torch.mm; bf16: torch.mm with 16-bit weights. tokens_per_s: batch over "
        "median seconds, of this one product. per_doubling: tokens_per_s over that of half the batch. fused is the "
        "faster of mma and ring at each batch. dequantise_from, bf16_from: the smallest batch from which on they are "
        "faster than fused. compute_from: the smallest batch from which on every doubling gains less than 1.5. "
        "ridge: the batch at which the probes say that arithmetic takes as long as reading the weights. error as in "
        "int4, checked after the timing. Clocks left alone."
    )
    return _save(records.make("crossover", results, protocol, CROSSOVER_SOURCES, device), folder, crossover_table)


def _gpu(name: str) -> torch.device:
    if not torch.cuda.is_available():
        raise RuntimeError(f"the record {name!r} needs a CUDA GPU: the SIMT machine has no clock")
    return hardware.default_device()


def _save(record: Record, folder: Path, table: Callable[[Record], str]) -> Record:
    path = records.save(record, folder)
    print(table(record), flush=True)
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


class Weights:
    """An INT4 matrix in so many copies, each with other numbers, that going round them leaves no cache warm.

    Every layout holds the same numbers, and so does x (tokens, cols) in fp16 and in bf16.
    """

    def __init__(self, rows: int, cols: int, device: torch.device, rotate_bytes: int, tokens: int = MAX_TOKENS):
        self.rows, self.cols, self.device = rows, cols, device
        self.nbytes = rows * cols // 2 + rows * cols // GROUP_SIZE * 2
        self.copies = max(2, -(-rotate_bytes // self.nbytes))
        make = torch.Generator(device).manual_seed(rows + cols)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=make, device=device)

        self.values = [normal(rows, cols).mul_(2.5).round_().clamp_(-8, 7).to(torch.int8) for _ in range(self.copies)]
        # Eight bits of a scale and of x: neither fp16 nor bf16 rounds them.
        self.scales = [
            (normal(rows, cols // GROUP_SIZE).abs_() * 0.01 + 0.002).bfloat16().half() for _ in range(self.copies)
        ]
        self.x = normal(tokens, cols).bfloat16().half()
        self.x_bf16 = self.x.bfloat16()

    @functools.cached_property
    def shuffled(self) -> list[Tensor]:
        return [pack(values) for values in self.values]

    @functools.cached_property
    def fragments(self) -> list[tuple[Tensor, Tensor]]:
        return [(pack(v, FRAGMENT), tile_scales(s)) for v, s in zip(self.values, self.scales, strict=True)]

    @functools.cached_property
    def bf16(self) -> list[Tensor]:
        return [_scaled(v, s, torch.float32).bfloat16() for v, s in zip(self.values, self.scales, strict=True)]

    @functools.cached_property
    def torch_int4(self) -> list[tuple[Tensor, Tensor]]:
        return [for_torch(v, s) for v, s in zip(self.values, self.scales, strict=True)]

    @functools.cached_property
    def awq(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [for_awq(v, s) for v, s in zip(self.values, self.scales, strict=True)]

    def bytes_of(self, name: str, tokens: int = 1) -> int:
        """What a product must move: weights, x and y, once each."""
        weights, y = self.nbytes, 2
        if name == "torch_bf16":
            weights = 2 * self.rows * self.cols
        elif name == "torch_int4":  # a zero-point beside each scale
            weights += self.rows * self.cols // GROUP_SIZE * 2
        else:
            y = 4
        return weights + tokens * (2 * self.cols + y * self.rows)

    def products(self, tokens: int | None) -> Iterator[Tensor]:
        """x Wᵀ (tokens, rows) of each copy in float64, or (rows) of the first token."""
        x = self.x[0 if tokens is None else slice(tokens)].double()
        some = max(1, (1 << 26) // self.cols)
        for values, scales in zip(self.values, self.scales, strict=True):
            parts = zip(values.split(some), scales.split(some), strict=True)
            yield torch.cat([x @ _scaled(v, s, torch.float64).T for v, s in parts], dim=-1)


def _scaled(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    grouped = values.to(dtype).unflatten(1, (scales.shape[1], -1))
    return grouped.mul_(scales.to(dtype).unsqueeze(-1)).flatten(1)


def for_torch(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Words, and scales with zero-points, as torch's int4 product wants them: (value + 8 − 8) · scale + 0."""
    high, low = (values + 8).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)  # the even columns are the high nibbles
    if values.is_cuda:
        words = torch.ops.aten._convert_weight_to_int4pack((high << 4 | low).contiguous(), INNER_TILES)
    else:
        words = torch.ops.aten._convert_weight_to_int4pack_for_cpu((values + 8).int(), INNER_TILES)
    steps = scales.bfloat16().T
    return words, torch.stack([steps, torch.zeros_like(steps)], dim=-1).contiguous()


def for_awq(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """qweight, qzeros and scales of W (rows, cols) in AWQ's layout, with every zero-point 8."""

    def packed(numbers: Tensor) -> Tensor:  # (in, out) of 0 … 15
        octets = numbers.int().unflatten(1, (-1, 8))
        words = torch.zeros(octets.shape[:-1], dtype=torch.int32, device=numbers.device)
        for column, nibble in enumerate(awq.ORDER):
            words |= octets[..., column] << 4 * nibble
        return words

    steps = scales.T.contiguous()
    return packed((values + 8).T), packed(torch.full_like(steps, 8)), steps


def torch_int4_mm(x: Tensor, words: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """x Wᵀ by torch's INT4 kernel: x (tokens, cols) bfloat16, the rest of `for_torch`; y (tokens, rows) bfloat16."""
    cuda = x.is_cuda
    product = torch.ops.aten._weight_int4pack_mm if cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
    return product(x, words, GROUP_SIZE, scales_and_zeros)


class Race:
    """Contenders over the same weights, and their outputs."""

    def __init__(self, weights: Weights):
        self.weights = weights
        self.contenders: dict[str, Callable[[int], object]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.form: dict[str, tuple[str, int | None]] = {}  # contender: which product it is, of how many tokens

    def add(self, label: str, name: str, tokens: int | None = None) -> None:
        """Enter a contender; `tokens` None: one, as a vector, for the kernels that take no more."""
        w = self.weights
        count = tokens or 1
        x, x_bf16 = w.x[:count], w.x_bf16[:count]
        y_dtype = torch.float32 if name in OURS else torch.bfloat16
        shape = (w.rows,) if name in GEMV else (count, w.rows)
        # torch's int4 product makes its own outputs, and the last one of each copy is kept.
        outputs = [torch.empty(shape, dtype=y_dtype, device=w.device) for _ in range(w.copies)]
        self.outputs[label], self.form[label] = outputs, (name, None if name in GEMV else count)
        if name in GEMV:
            kernel, vector, words = GEMV[name], w.x[0], w.shuffled

            def call(i: int) -> None:
                kernel(words[i], w.scales[i], vector, out=outputs[i])

        elif name in GEMM:
            kernel, fragments = GEMM[name], w.fragments
            parts = [slice(start, start + MAX_TOKENS) for start in range(0, count, MAX_TOKENS)]

            def call(i: int) -> None:
                for part in parts:
                    kernel(*fragments[i], x[part], out=outputs[i][part], rows=w.rows)

        elif name == "torch_int4":
            theirs = w.torch_int4

            def call(i: int) -> None:
                outputs[i] = torch_int4_mm(x_bf16, *theirs[i])

        elif name == "dequantise":
            packed, full = w.awq, torch.empty(w.cols, w.rows, dtype=torch.bfloat16, device=w.device)

            def call(i: int) -> None:
                kernels.awq_dequantize(*packed[i], out=full)
                torch.mm(x_bf16, full, out=outputs[i])

        else:
            matrices = w.bf16

            def call(i: int) -> None:
                torch.mm(x_bf16, matrices[i].T, out=outputs[i])

        self.contenders[label] = call

    def run(self, rounds: int, replay_s: float) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Seconds per call, and the error of each contender: outputs are checked after the timing.

        Raises:
            RuntimeError: a contender whose result is wrong.
        """

        def clear() -> None:
            for outputs in self.outputs.values():
                for y in outputs:
                    y.fill_(float("nan"))

        times, written = race(self.contenders, self.weights.copies, rounds, replay_s, self.weights.device, clear)
        return times, self._errors(written)

    def _errors(self, written: Mapping[str, int]) -> dict[str, float]:
        errors = dict.fromkeys(self.contenders, 0.0)
        most = max(tokens or 1 for _, tokens in self.form.values())
        for i, reference in enumerate(self.weights.products(most)):
            for label, outputs in self.outputs.items():
                if i >= written[label]:
                    continue
                name, tokens = self.form[label]
                wanted = reference[0 if tokens is None else slice(tokens)]
                error = ((outputs[i].double() - wanted).norm() / wanted.norm()).item()
                if not error < TOLERANCE[name]:  # NaN does not pass
                    raise RuntimeError(
                        f"{label} on {self.weights.rows} x {self.weights.cols} is off by {error:.3g} of the result's "
                        f"norm; it must be below {TOLERANCE[name]:g}"
                    )
                errors[label] = max(errors[label], error)
        return errors


def measure(
    device: torch.device,
    shapes: Mapping[str, tuple[int, int]],
    rotate_bytes: int,
    rounds: int = ROUNDS,
    replay_s: float = REPLAY_S,
    tokens: Sequence[int] = TOKENS,
) -> dict:
    """The results of the record `int4`. On a CPU it runs too, for the tests; such times mean nothing."""
    probe, spec = hardware.read_ceiling(device), hardware.machine(device).spec
    bandwidth = spec and spec.bandwidth
    print(probe, flush=True)
    results: dict = {
        "group": GROUP_SIZE,
        "ceilings": {"read_probe": probe.to_dict(), "datasheet_bytes_per_s": bandwidth},
        "shapes": {},
    }
    for name, (rows, cols) in shapes.items():
        started = time.perf_counter()
        weights = Weights(rows, cols, device, rotate_bytes)
        cold = _cold(weights, name, probe, bandwidth, rounds, replay_s)
        best = min(OURS, key=lambda kernel: cold[kernel]["seconds"]["p50"])
        results["shapes"][name] = {
            "rows": rows,
            "cols": cols,
            "copies": weights.copies,
            "bytes": weights.bytes_of(best),
            "cold": cold,
            "best": best,
            "tokens": _tokens(weights, tokens, rounds, replay_s),
        }
        f = cold[best]
        print(
            f"{name}: {best} {1e6 * f['seconds']['p50']:.1f} µs, {100 * f['of_probe']:.1f} % of the probe, "
            f"{f['versus_torch_int4']['p50']:.2f} x torch's int4 ({time.perf_counter() - started:.1f} s)",
            flush=True,
        )
        del weights
    return results


def _cold(
    weights: Weights, shape: str, probe: Probe, bandwidth: float | None, rounds: int, replay_s: float
) -> dict[str, dict]:
    contest = Race(weights)
    for name in (*OURS, *THEIRS):
        contest.add(name, name)
    times, errors = contest.run(rounds, replay_s)
    cold = {}
    for name, samples in times.items():
        seconds, nbytes = percentiles(samples), weights.bytes_of(name)
        rate = nbytes / seconds.p50
        if bandwidth:
            below_ceiling(rate, bandwidth, f"{name} on {shape}, cold, bytes/s")
        cold[name] = {
            "seconds": seconds.to_dict(),
            "bytes": nbytes,
            "bytes_per_s": rate,
            "of_probe": rate / probe.rate,
            "of_datasheet": bandwidth and rate / bandwidth,
            "error": errors[name],
            **{f"versus_{rival}": _ratio(times[rival], samples) for rival in THEIRS},
        }
    return cold


def _tokens(weights: Weights, tokens: Sequence[int], rounds: int, replay_s: float) -> dict[str, dict]:
    contest = Race(weights)
    names = (*GEMM, "torch_int4")
    for name in names:
        for count in tokens:
            contest.add(f"{name} {count}", name, count)
    times, errors = contest.run(rounds, replay_s)
    return {
        name: {
            str(count): {
                "seconds": percentiles(times[f"{name} {count}"]).to_dict(),
                "of_one": _ratio(times[f"{name} {count}"], times[f"{name} {tokens[0]}"]),
                "error": errors[f"{name} {count}"],
            }
            for count in tokens
        }
        for name in names
    }


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict:
    return percentiles([a / b for a, b in zip(above, below, strict=True)], unit="x").to_dict()


def crossover(
    device: torch.device,
    shapes: Mapping[str, tuple[int, int]],
    rotate_bytes: int,
    batches: Sequence[int] = BATCHES,
    rounds: int = 30,
    replay_s: float = REPLAY_S,
) -> dict:
    """The results of the record `crossover`; `batches` double from 1."""
    read, matmul = hardware.read_ceiling(device), hardware.matmul_probe(device)
    print(f"{read}\n{matmul}", flush=True)
    balance = matmul.rate / read.rate  # FLOP a byte; a token is 2 FLOP a weight
    results: dict = {
        "group": GROUP_SIZE,
        "ceilings": {"read_probe": read.to_dict(), "matmul_bf16": matmul.to_dict()},
        "ridge": {"bf16": balance, "int4": balance * (0.5 + 2 / GROUP_SIZE) / 2},
        "shapes": {},
    }
    for name, (rows, cols) in shapes.items():
        weights = Weights(rows, cols, device, rotate_bytes, max(batches))
        found: dict[str, dict] = {}
        for batch in batches:
            contest = Race(weights)
            for way in WAYS:
                contest.add(way, way, batch)
            times, errors = contest.run(rounds, replay_s)
            found[str(batch)] = {way: _throughput(weights, batch, times[way], errors[way]) for way in WAYS}
        results["shapes"][name] = {"rows": rows, "cols": cols, "copies": weights.copies, **_turns(found, batches)}
        entry = results["shapes"][name]
        print(f"{name}: dequantise from {entry['dequantise_from']}, bf16 from {entry['bf16_from']}", flush=True)
        del weights, contest
    return results


def _throughput(weights: Weights, batch: int, samples: Sequence[float], error: float) -> dict:
    seconds = percentiles(samples)
    return {
        "seconds": seconds.to_dict(),
        "tokens_per_s": batch / seconds.p50,
        "flops_per_s": 2 * weights.rows * weights.cols * batch / seconds.p50,
        "error": error,
    }


def _turns(found: Mapping[str, dict], batches: Sequence[int]) -> dict:
    """What the figures of each batch say about where one way overtakes another, and where doubling stops paying."""
    speed = {way: [found[str(batch)][way]["tokens_per_s"] for batch in batches] for way in WAYS}
    speed["fused"] = [max(pair) for pair in zip(speed["mma"], speed["ring"], strict=True)]
    gains = {way: [b / a for a, b in pairwise(v)] for way, v in speed.items()}

    def first(holds: Sequence[bool], where: Sequence[int]) -> int | None:
        """The smallest batch from which on it holds."""
        last_not = max((i for i, yes in enumerate(holds) if not yes), default=-1)
        return where[last_not + 1] if last_not + 1 < len(where) else None

    def faster(way: str) -> list[bool]:
        return [a > b for a, b in zip(speed[way], speed["fused"], strict=True)]

    return {
        "batches": dict(found),
        "fused": ["mma" if a >= b else "ring" for a, b in zip(speed["mma"], speed["ring"], strict=True)],
        "per_doubling": {way: dict(zip(map(str, batches[1:]), gain, strict=True)) for way, gain in gains.items()},
        "dequantise_from": first(faster("dequantise"), batches),
        "bf16_from": first(faster("bf16"), batches),
        "compute_from": {way: first([g < 1.5 for g in gain], batches) for way, gain in gains.items()},
    }


# Tables


@dataclass(frozen=True)
class Rung:
    """One product on one shape, cold, one token."""

    kernel: str
    seconds: float
    rate: float  # bytes/s
    of_probe: float
    of_torch_int4: float  # torch's time over the kernel's: above 1, the kernel is faster
    of_torch_bf16: float


def ladder(record: Record, shape: str = "7B gate_up") -> list[Rung]:
    """The rungs of a shape from the record `int4`, naive first, torch's two last.

    Raises:
        KeyError: the record has no such shape.
    """
    return [
        Rung(
            name,
            f["seconds"]["p50"],
            f["bytes_per_s"],
            f["of_probe"],
            f["versus_torch_int4"]["p50"],
            f["versus_torch_bf16"]["p50"],
        )
        for name, f in record.results["shapes"][shape]["cold"].items()
    ]


def int4_table(record: Record) -> str:
    """The record `int4` as a table of text."""
    titles = f"{'µs p50':>8} {'p99':>8} {'GB/s':>6} {'probe':>7} {'x int4':>7} {'x bf16':>7} {'error':>8}"
    lines = [f"{'shape':<14} {'':>13} {'kernel':<11} {titles}   2, 4, 8 tokens of one"]
    for shape, entry in record.results["shapes"].items():
        for name, f in entry["cold"].items():
            more = [f"{v['of_one']['p50']:.3f}" for v in list(entry["tokens"].get(name, {}).values())[1:]]
            lines.append(
                f"{shape:<14} {entry['rows']:>7}x{entry['cols']:<5} {name:<11} {1e6 * f['seconds']['p50']:>8.2f} "
                f"{1e6 * f['seconds']['p99']:>8.2f} {f['bytes_per_s'] / 1e9:>6.0f} {100 * f['of_probe']:>5.1f} % "
                f"{f['versus_torch_int4']['p50']:>7.2f} {f['versus_torch_bf16']['p50']:>7.2f} {f['error']:>8.1e}   "
                f"{' '.join(more)}{' best' if name == entry['best'] else ''}"
            )
    return "\n".join(lines)


def crossover_table(record: Record) -> str:
    """The record `crossover` as a table of text: tokens/s of one product."""
    lines = [f"{'shape':<14} {'batch':>5} " + " ".join(f"{way:>12}" for way in WAYS)]
    for shape, entry in record.results["shapes"].items():
        for batch, ways in entry["batches"].items():
            speeds = " ".join(f"{ways[way]['tokens_per_s']:>12,.0f}" for way in WAYS)
            lines.append(f"{shape:<14} {batch:>5} {speeds}")
        lines.append(
            f"{shape}: faster than fused: dequantise from {entry['dequantise_from']}, bf16 from {entry['bf16_from']}; "
            f"a doubling gains less than 1.5 from {entry['compute_from']}"
        )
    return "\n".join(lines)
