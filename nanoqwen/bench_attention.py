"""The record `attention`: how long one query takes at each step of lesson 05's ladder, beside torch, by context."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoqwen import hardware, kernels, records
from nanoqwen.bench_gemv import calls_per_replay, captured, time_replays, without_garbage
from nanoqwen.ledger import below_ceiling
from nanoqwen.packing import PAGE_SIZE
from nanoqwen.paged_kv import PagedKV
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.records import Record
from nanoqwen.timing import percentiles, time_calls

SOURCES = (
    "csrc/attention.cu",
    "csrc/paged_attention.cu",
    "csrc/paged_attention_ring.cu",
    "csrc/paged_attention_mma.cu",
    "csrc/include/async_copy.cuh",
    "csrc/include/bits.cuh",
    "csrc/include/format.cuh",
    "csrc/include/kv_page.cuh",
    "csrc/include/mbarrier.cuh",
    "csrc/include/mma.cuh",
    "csrc/include/online_softmax.cuh",
    "csrc/include/pack.cuh",
    "csrc/include/sync.cuh",
    "csrc/include/types.cuh",
    "csrc/include/warp.cuh",
    "csrc/read_probe.cu",
    "nanoqwen/kernels/attention.py",
    "nanoqwen/kernels/launch.py",
    "nanoqwen/kernels/arguments.py",
    "nanoqwen/bench_attention.py",
    "nanoqwen/bench_gemv.py",
    "nanoqwen/timing.py",
)
Contenders = Mapping[str, Mapping]  # by name: the kernel's name, or "torch", and how it is called
STEPS: Contenders = {
    "online": {"kernel": "attention_online"},
    "paged": {"kernel": "paged_attention"},
    "split": {"kernel": "paged_attention_split"},
    "prefetch": {"kernel": "paged_attention_prefetch"},
    "ring": {"kernel": "paged_attention_ring"},
    "cp_async": {"kernel": "paged_attention_cp_async"},
    "mma": {"kernel": "paged_attention_mma"},
    "pdl": {"kernel": "paged_attention_mma", "appended": 1, "pdl": True},
    "torch": {"kernel": "torch"},
}
SIZES = {"7B": (28, 4, 128), "0.5B": (14, 2, 64)}  # query heads, KV heads, head_dim
CONTEXTS = (128, 512, 1024, 4096, 8192, 16384, 32768)
ROUNDS = 24
REPLAY_S = 2e-3  # a replay lasts about so long, so that the gap between two replays does not show
TOLERANCE = 3e-3  # of bf16 answers
TORCH_TOLERANCE = 4  # times as much


def record_attention(folder: Path = FOLDER) -> Record:
    """Measure and save the record `attention`: every step of the ladder and torch, cold, at each context.

    Raises:
        RuntimeError: no CUDA GPU, or a wrong result. CeilingError: a figure above the datasheet's bandwidth.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the record 'attention' needs a CUDA GPU: the SIMT machine has no clock")
    device = hardware.default_device()
    machine = hardware.machine(device)
    with without_garbage():
        results = measure(device, SIZES, CONTEXTS, rotate_bytes=3 * machine.cache)
    protocol = (
        "bf16, one query token, normal data, one process. Cold: caches rotated over at least 3 x L2, so that each call "
        "reads keys and values that the L2 no longer holds. Pages in random order, a table for "
        f"{max(CONTEXTS):,} tokens at every context, and splits chosen for it, as a captured graph must. Calls are "
        f"captured in a CUDA graph that lasts about {1e3 * REPLAY_S:g} ms (at least one round of the caches); {ROUNDS} "
        "rounds, in each every kernel replays its graph once, in turn, and every other round in the opposite order; a "
        "sample is the time between CUDA events around a replay over its calls. versus_torch: torch's time over the "
        "kernel's, round by round. torch is scaled_dot_product_attention with enable_gqa on a contiguous cache; online "
        "reads that cache too. pdl is mma with programmatic dependent launch: earlier tokens' pages are fetched while "
        "the call before still runs, as in a decode step. Bytes: keys, values, q and the answer, once each. Every "
        "output is checked against float64 after the timing. Clocks left alone."
    )
    record = records.make("attention", results, protocol, SOURCES, device)
    path = records.save(record, folder)
    print(attention_table(record), flush=True)
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


def measure(
    device: torch.device,
    sizes: Mapping[str, tuple[int, int, int]],
    contexts: Sequence[int],
    rotate_bytes: int,
    contenders: Contenders = STEPS,
    rounds: int = ROUNDS,
    replay_s: float = REPLAY_S,
) -> dict:
    """The record's results. On a CPU it runs too, for the tests; such times mean nothing.

    Args:
        sizes: by name, query heads, KV heads and head_dim.
        contexts: tokens in the cache.
        contenders: other kernels or launches than the ladder's; "torch" must be among them.

    Raises:
        RuntimeError: a wrong result. CeilingError: a figure above the datasheet's bandwidth.
    """
    probe = hardware.read_ceiling(device)
    spec = hardware.machine(device).spec
    bandwidth = spec and spec.bandwidth
    print(probe, flush=True)
    results: dict = {
        "dtype": "bfloat16",
        "ceilings": {"read_probe": probe.to_dict(), "datasheet_bytes_per_s": bandwidth},
        "sizes": {},
    }
    for name, (heads, kv_heads, head_dim) in sizes.items():
        entry: dict = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "contexts": {}}
        for context in contexts:
            started = time.perf_counter()
            rotation = Rotation(context, max(contexts), heads, kv_heads, head_dim, device, rotate_bytes)
            samples = rotation.samples(contenders, rounds, replay_s)
            figures = {}
            for kernel, ours in samples.items():
                seconds = percentiles(ours)
                rate = rotation.bytes_per_call / seconds.p50
                if bandwidth:
                    below_ceiling(rate, bandwidth, f"{kernel}, {name}, {context} tokens, cold, bytes/s")
                ratios = [theirs / mine for mine, theirs in zip(ours, samples["torch"], strict=True)]
                figures[kernel] = {
                    "seconds": seconds.to_dict(),
                    "bytes_per_s": rate,
                    "of_probe": rate / probe.rate,
                    "versus_torch": percentiles(ratios, unit="x").to_dict(),
                }
            entry["contexts"][str(context)] = {
                "bytes": rotation.bytes_per_call,
                "copies": rotation.copies,
                "cold": figures,
            }
            best = min(figures, key=lambda kernel: figures[kernel]["seconds"]["p50"])
            print(
                f"{name}, {context} tokens: {best} {1e6 * figures[best]['seconds']['p50']:.2f} µs, "
                f"{100 * figures[best]['of_probe']:.1f} % of the probe, "
                f"{figures[best]['versus_torch']['p50']:.2f} x torch ({time.perf_counter() - started:.1f} s)",
                flush=True,
            )
            del rotation
        results["sizes"][name] = entry
    return results


class Rotation:
    """A cache in so many copies, each with other numbers, that going round them leaves no cache of the GPU warm.

    The copies are the layers of one `PagedKV`, so they share a table; torch gets the same numbers without pages.
    """

    def __init__(
        self,
        context: int,
        longest: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        rotate_bytes: int,
    ):
        self.context, self.device = context, device
        kv_bytes = 2 * context * kv_heads * head_dim * torch.bfloat16.itemsize
        self.copies = max(2, -(-rotate_bytes // kv_bytes))
        self.bytes_per_call = kv_bytes + 2 * heads * head_dim * torch.bfloat16.itemsize
        pages = -(-context // PAGE_SIZE)
        make = torch.Generator(device).manual_seed(context + heads)
        cache = PagedKV(
            self.copies, pages, kv_heads, head_dim, max_pages=max(pages, -(-longest // PAGE_SIZE)), device=device
        )
        self.pool, (self.table, self.length) = cache.pool, cache.view(cache.new())
        self.table[:pages] = torch.randperm(pages, generator=make, device=device)
        self.length.fill_(context)
        self.before = self.length - 1  # for calls that come after a token was stored: the last one
        self.k, self.v = (
            torch.empty(self.copies, kv_heads, context, head_dim, dtype=torch.bfloat16, device=device) for _ in "kv"
        )
        for layer, k, v in zip(self.pool, self.k, self.v, strict=True):
            layer.normal_(generator=make)
            for i, whole in enumerate((k, v)):
                run = layer[self.table[:pages].long(), :, i].transpose(0, 1).flatten(1, 2)  # (kv_heads, tokens, D)
                whole.copy_(run[:, :context])
        self.q = torch.empty(heads, head_dim, dtype=torch.bfloat16, device=device).normal_(generator=make)

    def samples(self, contenders: Contenders, rounds: int, replay_s: float) -> dict[str, list[float]]:
        """Seconds per call of each contender, one sample a round; outputs checked after the timing."""
        outputs: dict[str, dict[int, Tensor]] = {}
        replays, calls, kept = {}, {}, []  # a graph reads the memory that its calls hold on to
        for name, how in contenders.items():
            call = self._contender(**how)
            kept.append(call)
            seconds = min(time_calls(lambda call=call: call(0), self.device, 3, 1))
            calls[name] = calls_per_replay(seconds, self.copies, False, replay_s)
            outputs[name] = {}

            def run(call=call, answers=outputs[name], count=calls[name]):
                for i in range(count):
                    answers[i % self.copies] = call(i % self.copies)

            replays[name] = captured(run, self.device)
        # Every other round runs backwards, so whoever is first follows itself. A slow kernel, which reads the same few
        # copies each time, would find them in the L2: let one be first that reads all of them.
        first = next((name for name in replays if calls[name] >= self.copies), None)
        order = sorted(replays, key=lambda name: name != first)
        times = time_replays({name: replays[name] for name in order}, rounds, self.device)
        self._check(outputs)
        return {name: [t / calls[name] for t in times[name]] for name in contenders}

    def _contender(self, kernel: str, **how):
        """A function of the copy's number that gives the answer, in memory of its own."""
        if kernel == "torch":
            q = self.q[None, :, None]
            return lambda i: F.scaled_dot_product_attention(q, self.k[i, None], self.v[i, None], enable_gqa=True)
        function = getattr(kernels, kernel)
        if kernel == "attention_online":
            return lambda i: function(self.q, self.k[i], self.v[i], self.length, **how)
        if kernel == "paged_attention_mma":
            kv_heads, head_dim = self.k.shape[1], self.k.shape[3]
            sms = hardware.machine(self.device).units if self.device.type == "cuda" else 132
            splits = how.pop("splits", None) or kernels.choose_splits(len(self.table) * PAGE_SIZE, kv_heads, sms)
            how["workspace"] = kernels.attention_workspace(kv_heads, head_dim, splits, self.q.dtype, self.device)
        length = self.before if how.get("appended") else self.length
        return lambda i: function(self.q, self.pool[i], self.table, length, **how)

    def _check(self, outputs: Mapping[str, Mapping[int, Tensor]]) -> None:
        q = self.q.double().unflatten(0, (self.k.shape[1], -1))  # (kv_heads, group, D)
        for i in range(max(map(len, outputs.values()))):
            scores = q @ self.k[i].double().transpose(-1, -2) * q.shape[-1] ** -0.5
            reference = (scores.softmax(-1) @ self.v[i].double()).flatten()
            for name, answers in outputs.items():
                if i not in answers:
                    continue
                error = ((answers[i].double().flatten() - reference).norm() / reference.norm()).item()
                limit = TOLERANCE * (TORCH_TOLERANCE if name == "torch" else 1)
                if not error < limit:  # NaN does not pass
                    raise RuntimeError(
                        f"{name} at {self.context} tokens is off by {error:.3g} of the result's norm; "
                        f"it must be below {limit}"
                    )


def attention_table(record: Record) -> str:
    """The record `attention` as a table of text."""
    titles = f"{'µs p50':>9} {'p99':>9} {'GB/s':>6} {'probe':>7} {'x torch':>8}"
    lines = [f"{'size':<6} {'tokens':>7} {'kernel':<12} {titles}"]
    for size, entry in record.results["sizes"].items():
        for context, at in entry["contexts"].items():
            for name, f in at["cold"].items():
                lines.append(
                    f"{size:<6} {context:>7} {name:<12} {1e6 * f['seconds']['p50']:>9.2f} "
                    f"{1e6 * f['seconds']['p99']:>9.2f} {f['bytes_per_s'] / 1e9:>6.0f} {100 * f['of_probe']:>5.1f} % "
                    f"{f['versus_torch']['p50']:>8.3f}"
                )
    return "\n".join(lines)
