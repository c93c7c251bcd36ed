"""`nanoqwen bench e2e` and the record `scoreboard`: our engine, and what you would use instead, in turn on one machine.

Protocol of llama-bench: a prompt of 512 tokens to the first token (pp512), 128 tokens decoded (tg128), at several
depths of the cache.
"""

import importlib.metadata
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from nanoqwen import bench_engine, hardware, models, records
from nanoqwen.bench_engine import PROMPT, WARM, figures, first_tokens, random_prompt
from nanoqwen.bench_gemv import without_garbage
from nanoqwen.config import SHAPES
from nanoqwen.engine import Engine
from nanoqwen.fetch import TINY_NAME, find_model
from nanoqwen.graphs import CHAIN, MODES
from nanoqwen.hardware import Probe
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.peers import (
    SPLIT,
    LlamaCpp,
    TorchDecoder,
    TorchPeer,
    Transformers,
    Unavailable,
    allocated,
    checkpoint_folder,
    find_gguf_of,
    random_weights,
    weights_of,
)
from nanoqwen.records import Record
from nanoqwen.reference import Qwen2
from nanoqwen.timing import Paired, percentiles

SOURCES = (*bench_engine.SOURCES, "nanoqwen/bench_e2e.py", "nanoqwen/peers.py")
OURS = "nanoqwen"
PEERS = {
    "torch-bf16-eager": "PyTorch, bf16, joined matrices, static cache, launched one by one",
    "torch-bf16-graph": "the same as a CUDA graph",
    "torch-bf16": "the same with torch.compile and a CUDA graph",
    "torch-int4": "the same with aten._weight_int4pack_mm, groups of 128, torch.compile and a CUDA graph",
    "transformers": "transformers' generate, bf16, as it comes",
    "llama.cpp": "llama-cpp-python on the GGUF file",
}
DEPTHS = (128, 1024, 4096, 16384)
STEPS, ROUNDS, FIRSTS = 128, 3, 5
MODEL, TEXT, TEXT_TOKENS = "qwen2.5-coder-0.5b", "def quicksort(a):", 64
BEST = ("torch-bf16", "torch-int4")  # what PyTorch can do
PLAN = {
    "qwen2.5-coder-7b": (
        True,
        DEPTHS,
        dict.fromkeys(("torch-bf16-eager", "torch-bf16-graph", "torch-bf16"), (128,)) | {"torch-int4": (128, 4096)},
    ),
    "qwen2.5-coder-1.5b": (True, (128,), dict.fromkeys(BEST, (128,))),
    MODEL: (False, (128,), dict.fromkeys((*BEST, "transformers", "llama.cpp"), (128,))),
}
"""Of the record, by model: whether its weights are random, our depths, and the peers with theirs. A model whose weights
are not random is left out where it has not been fetched. Each depth of a compiled peer is a compilation, so there are
few."""


class Ours:
    """Our engine with the verbs of the peers."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def nbytes(self, depth: int) -> int:
        return self.engine.ledger(depth).total

    def first(self, ids: Sequence[int]) -> float:
        return first_tokens(self.engine, ids, 1)[0]

    def run(self, ids: Sequence[int], steps: int) -> list[float]:
        return bench_engine.run(self.engine, ids, steps)[0]

    def check(self) -> None:
        """Each run has held its last logits against a prompt of the same tokens."""


class Entry:
    """A model that contenders are made of: real weights, or random ones of a shape, drawn on the device.

    Args:
        name: as `models.load` takes it, or one of `SHAPES` with `random`.
        context: tokens that each contender must have room for. how: goes to our engine.

    Raises:
        ValueError, FileNotFoundError: as `models.load`; there is no such shape.
    """

    def __init__(self, name: str, random: bool, device: torch.device, context: int, **how):
        self.random, self.device, self.how = random, device, how
        self.model: Qwen2 | None = None
        self.path: Path | None = None
        if random:
            if name not in SHAPES:
                raise ValueError(f"there is no shape {name!r}; there are: {', '.join(SHAPES)}")
            self.name, self.config = name, SHAPES[name]
        else:
            self.path = find_model(name)
            self.name = self.path.name
            self.model, self.tokenizer = models.load(str(self.path), torch.bfloat16)
            self.config = self.model.config
        if context > (most := self.config.max_position_embeddings):
            raise ValueError(f"{self.name} has a context of {most} tokens; these depths need {context}")
        self.context = context
        self._bf16: TorchDecoder | None = None

    def engine(self) -> Engine:
        if self.random:
            return Engine.random(self.config, self.device, max_tokens=self.context, **self.how)
        return Engine(self.model, self.device, max_tokens=self.context, **self.how)

    def peer(self, name: str):
        """One of `PEERS`.

        Raises:
            Unavailable: it cannot run here, or has no weights of this kind.
        """
        if name == "transformers":
            if self.random:
                return Transformers.random(self.config, torch.bfloat16, self.device)
            return Transformers.load(checkpoint_folder(self.path), torch.bfloat16, self.device)
        if name == "llama.cpp":
            if self.random:
                raise Unavailable("random weights have no GGUF file")
            return LlamaCpp(find_gguf_of(self.path), self.context, self.device)
        if name == "torch-int4":
            return TorchPeer(self._decoder(int4=True), graph=True, compiled=True)
        self._bf16 = self._bf16 or self._decoder()
        return TorchPeer(self._bf16, graph=name != "torch-bf16-eager", compiled=name == "torch-bf16")

    def _decoder(self, int4: bool = False) -> TorchDecoder:
        if self.random:
            return TorchDecoder(self.config, random_weights(self.config, torch.bfloat16, self.device), int4=int4)
        weight = weights_of(self.model, torch.bfloat16, self.device)
        return TorchDecoder(self.config, weight, self.model.num_tokens, int4)


def contend(
    entry: Entry,
    depths: Sequence[int],
    against: Mapping[str, Sequence[int]],
    probe: Probe,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    firsts: int = FIRSTS,
    prompt: int = PROMPT,
) -> dict:
    """One model's results: each contender's times, in turn with ours, and why a peer was left out.

    Args:
        against: peers, each with those of `depths` at which it runs.

    Raises:
        RuntimeError: our engine's logits are wrong. CeilingError: a figure above the ceiling.
    """
    left_out: dict[str, str] = {}
    contenders: dict[str, object] = {}
    results: dict = {
        "weights": "random" if entry.random else "real",
        "contenders": {},
        "left_out": left_out,
    }
    held = allocated(entry.device)
    with entry.engine() as engine:
        prompts = {depth: random_prompt(engine, depth - WARM - steps // 2) for depth in depths}
        first = random_prompt(engine, prompt)
        mode = next(name for name, each in MODES.items() if each == engine.mode)
        results |= {"group": engine.weights.group, "mode": mode, "pdl": engine.pdl, "config": entry.config.to_dict()}
        runs_at = {OURS: depths} | {name: [d for d in depths if d in at] for name, at in against.items()}
        made = {OURS: lambda: Ours(engine)} | {name: lambda name=name: entry.peer(name) for name in against}
        for name, make in made.items():
            try:
                there, before = [prompts[depth] for depth in runs_at[name]], held if name == OURS else None
                contenders[name], memory = _tried(make, first, there, steps, entry.device, before)
                results["contenders"][name] = {"peak_memory_bytes": memory, "depths": {}}
            except Exception as error:  # a peer can fail in many ways, and the others need not
                if name == OURS:
                    raise
                left_out[name] = _words(error)
            print(f"{entry.name}: {name} {'left out: ' + left_out[name] if name in left_out else 'ready'}", flush=True)

        ttft = Paired({name: [] for name in contenders})
        for _ in range(firsts):
            for name, contender in contenders.items():
                ttft.samples[name].append(contender.first(first))
        for name in contenders:
            results["contenders"][name]["ttft"] = percentiles(ttft.samples[name]).to_dict()
            if name != OURS:
                results["contenders"][name]["ttft_over_ours"] = _over(ttft, name)
        for depth in depths:
            there = {name: each for name, each in contenders.items() if depth in runs_at[name]}
            for name, found in _race(there, prompts[depth], depth, steps, rounds, probe, entry.device).items():
                if isinstance(found, str):
                    left_out[name] = found
                    contenders.pop(name)
                    results["contenders"].pop(name)
                else:
                    results["contenders"][name]["depths"][str(depth)] = found
    return results


def _tried(make: Callable, first: Sequence[int], prompts: Sequence, steps: int, device: torch.device, held: int | None):
    """A contender that has run everything once (kernels compiled, graphs captured), and its peak memory then, in bytes.

    `held`: what PyTorch had allocated before the contender, if it has been made already.
    """
    gpu = device.type == "cuda"
    before = allocated(device) if held is None else held
    contender = make()
    shared = isinstance(contender, TorchPeer) and allocated(device) - before < contender.decoder.weight_bytes
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    contender.first(first)
    for ids in prompts:
        contender.run(ids, steps)
        contender.check()
    if not gpu or isinstance(contender, LlamaCpp):  # whose memory PyTorch does not know
        return contender, None
    peak = torch.cuda.max_memory_allocated(device) - before
    return contender, peak + (contender.decoder.weight_bytes if shared else 0)  # made for the peer before


def _race(contenders: Mapping, ids, depth: int, steps: int, rounds: int, probe: Probe, device) -> dict:
    """Figures of each contender at one depth, in turn, or why it is not right in the end."""
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    states: dict[str, dict] = {}
    for turn in range(rounds):
        for name, contender in contenders.items():
            times[name].append(contender.run(ids, steps))
            if turn == rounds - 1 and device.type == "cuda":
                states[name] = hardware.gpu_state(device)
                states[name].pop("driver", None)
    medians = Paired({name: [statistics.median(each) for each in runs] for name, runs in times.items()})
    machine, found = hardware.machine(device), {}
    for name, contender in contenders.items():
        try:
            contender.check()
        except RuntimeError as error:
            found[name] = f"at depth {depth}: {_words(error)}"
            continue
        nbytes, seconds = contender.nbytes(depth), [second for run in times[name] for second in run]
        found[name] = {"bytes": nbytes, "state": states.get(name, {})}
        if nbytes < 3 * (machine.cache or 0):
            p50 = percentiles(seconds).p50
            note = "a token's bytes may come from the cache: no share of the memory's rate"
            found[name] |= {"seconds": percentiles(seconds).to_dict(), "tokens_per_s": 1 / p50, "note": note}
        else:
            found[name] |= figures(seconds, nbytes, probe, machine.spec)
        if name != OURS:
            found[name]["over_ours"] = _over(medians, name)
    return found


def _over(times: Paired, name: str) -> dict:
    """A peer's time over ours, round by round: above 1, ours is faster."""
    return percentiles(times.ratios(name, OURS), unit="×").to_dict()


def _words(error: Exception) -> str:
    """An error in one line that names no path of this machine."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    line = re.sub(r"(?:/[\w.+-]+)+/", "", line)[:200]
    return line if isinstance(error, Unavailable) else f"{type(error).__name__}: {line}"


def bench_e2e(
    name: str | None = None,
    shape: str | None = None,
    depths: Sequence[int] | None = None,
    against: Sequence[str] | None = None,
    steps: int | None = None,
    rounds: int | None = None,
) -> str:
    """Our engine's time to the first token and per token, beside PyTorch, transformers and llama.cpp, in turn.

    Args:
        name: a model as `models.load` takes it; by default the 0.5B where it has been fetched, on a CPU the tiny one.
        shape: random weights of this shape instead: 7b, 1.5b or 0.5b.
        depths: tokens in the cache in the middle of the timed steps; by default 128, 1024, 4096 and 16384.
        against: names of `PEERS`, or "all"; by default none.
        steps, rounds: timed steps of a run; runs of each contender. On a CPU few: our kernels run on the SIMT machine.

    Raises:
        ValueError: an unknown shape or peer, a depth that is too small, or a model and a shape.
    """
    device = hardware.default_device()
    gpu = device.type == "cuda"
    if name and shape:
        raise ValueError("a model and a shape are given; use one of them")
    full = shape and (shape if shape in SHAPES else f"qwen2.5-coder-{shape.lower()}")
    steps = (STEPS if gpu else 2) if steps is None else steps
    rounds = (ROUNDS if gpu else 1) if rounds is None else rounds
    look = CHAIN if gpu else 1
    if steps < 1 or steps % look or rounds < 1:
        raise ValueError(f"steps is {steps} and rounds {rounds}; they must be whole multiples of {look} and 1, above 0")
    depths = list(depths or (DEPTHS if gpu else (32,)))
    if small := [depth for depth in depths if depth <= WARM + steps // 2]:
        raise ValueError(f"depth {small[0]} is too small: {WARM} steps and half of {steps} come before it")
    if bad := sorted(set(against or ()) - {*PEERS, "all"}):
        raise ValueError(f"there is no peer {bad[0]!r}; there are: {', '.join(PEERS)}, all")
    peers = [each for each in PEERS if against and (each in against or "all" in against)]
    prompt, firsts = (PROMPT, FIRSTS) if gpu else (16, 1)
    context = _context(depths, prompt, steps)
    with without_garbage():
        entry = Entry(full or name or (None if gpu else TINY_NAME), bool(shape), device, context)
        probe = hardware.read_ceiling(device)
        print(f"{hardware.machine(device)}\n{probe}", flush=True)
        results = contend(entry, depths, dict.fromkeys(peers, depths), probe, steps, rounds, firsts, prompt)
    return scoreboard_table({entry.name: results}, prompt)


def record_scoreboard(folder: Path = FOLDER) -> Record:
    """Measure and save the record `scoreboard`: our engine and its peers, as `PLAN` says.

    Raises:
        RuntimeError: no CUDA GPU, or our engine's logits are wrong. CeilingError: a figure above the ceiling.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the record 'scoreboard' needs a CUDA GPU; `nanoqwen bench e2e` runs on a CPU")
    device = hardware.default_device()
    probe = hardware.read_ceiling(device)
    print(f"{hardware.machine(device)}\n{probe}", flush=True)
    protocol = (
        "pp512/tg128, batch 1, greedy, sampling included, one process, all contenders of a model loaded together, in "
        f"turn. ttft: from the call to the first token on the host, a random prompt of {PROMPT} tokens, {FIRSTS} "
        f"rounds. A run: a random prompt, {WARM} steps thrown away, {STEPS} timed ones around the depth; {ROUNDS} "
        "rounds after one thrown away. A sample is the host's time from one look at the tokens to the next, over the "
        "tokens between: 16 for ours and for CUDA graphs, else one. over_ours: the peer's median over ours, round by "
        "round: above 1, ours is faster. nanoqwen: INT4 in groups of 128, fp16 scales, 16-bit head, fp16 KV pages. "
        f"torch: {PEERS['torch-bf16-eager']} (its length rounded up to {SPLIT}), attention as one product for each KV "
        "head; torch-bf16 and torch-int4: the step's layer compiled, prompts eager; torch-int4: matrices rounded to "
        "nearest, 16-bit head. transformers: generate with its streamer. llama.cpp: the model's own GGUF file. Bytes: "
        "the ledger's, of llama.cpp the file's blocks. peak_memory_bytes: what PyTorch allocated for this contender. "
        "state: right after its last run. A peer whose last logits are not those of a prompt of the same tokens is "
        "left out. Clocks left alone."
    )

    def save(results: dict) -> Record:
        record = records.make("scoreboard", results, protocol, SOURCES, device)
        path = records.save(record, folder)
        print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
        return record

    return save(scoreboard(device, probe, keep=save))


def scoreboard(
    device: torch.device,
    probe: Probe,
    plan: Mapping[str, tuple[bool, Sequence[int], Mapping[str, Sequence[int]]]] | None = None,
    keep: Callable[[dict], object] | None = None,
    **how,
) -> dict:
    """The results of the record.

    Args:
        plan: name of each model → random, depths, and the peers with their depths.
        keep: called with the results so far before each model but the first: a run takes minutes, and may be cut short.
    """
    plan = PLAN if plan is None else plan
    results: dict = {"ceilings": {"read_probe": probe.to_dict()}, "versions": versions(), "peers": PEERS, "models": {}}
    results["left_out"], results["completion"] = {}, None
    steps, prompt = how.get("steps", STEPS), how.get("prompt", PROMPT)
    for name, (random, depths, against) in plan.items():
        if keep and results["models"]:
            keep(results)
        with without_garbage():
            try:
                entry = Entry(name, random, device, _context(depths, prompt, steps))
            except FileNotFoundError as missing:
                results["left_out"][name] = _words(Unavailable(missing))
                print(f"{name} left out: {missing}", flush=True)
                continue
            results["models"][name] = contend(entry, depths, against, probe, **how)
            if not random:
                results["completion"] = completion(entry)
            print(scoreboard_table({name: results["models"][name]}, prompt), flush=True)
            del entry
        torch.compiler.reset()  # what was compiled for this model's peers holds memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def completion(entry: Entry, text: str = TEXT, count: int = TEXT_TOKENS) -> dict:
    """What our engine makes of `text`, greedily."""
    ids = entry.tokenizer.encode(text)
    with Engine(entry.model, entry.device, max_tokens=len(ids) + count, **entry.how) as engine:
        stop = {*entry.config.eos_token_id, *entry.tokenizer.eos_ids}
        tokens = list(engine.generate(ids, count, stop=sorted(stop)))
    return {"model": entry.name, "prompt": text, "text": entry.tokenizer.decode(tokens), "tokens": len(tokens)}


def versions() -> dict[str, str | None]:
    """The peers' packages; None where one is not installed."""
    found: dict[str, str | None] = {}
    for package in ("torch", "triton", "transformers", "llama-cpp-python"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def scoreboard_table(entries: Mapping[str, Mapping], prompt: int = PROMPT) -> str:
    """Models' results as text."""
    lines = []
    for model, results in entries.items():
        lines.append(f"{model}, {results['weights']} weights; TTFT for {prompt} prompt tokens")
        lines.append(
            f"  {'contender':<17} {'depth':>6} {'TTFT ms':>8} {'p10':>8} {'p50':>8} {'p90':>8} {'p99':>8} ms "
            f"{'tok/s':>8} {'GB/token':>8} {'MBU':>6} {'probe':>6} {'peak GB':>8} {'× ours':>7} {'SM MHz':>7}"
        )

        def share(found: Mapping, key: str) -> str:
            return f"{100 * found[key]:.1f}" if key in found else "–"

        for name, each in results["contenders"].items():
            memory = each["peak_memory_bytes"]
            for depth, found in each["depths"].items():
                times = " ".join(f"{1e3 * found['seconds'][p]:>8.3f}" for p in ("p10", "p50", "p90", "p99"))
                over = f"{found['over_ours']['p50']:.2f}" if "over_ours" in found else "1"
                lines.append(
                    f"  {name:<17} {depth:>6} {1e3 * each['ttft']['p50']:>8.1f} {times}    "
                    f"{found['tokens_per_s']:>8.1f} {found['bytes'] / 1e9:>8.3f} {share(found, 'mbu_datasheet'):>6} "
                    f"{share(found, 'mbu_probe'):>6} {'–' if memory is None else f'{memory / 1e9:.2f}':>8} {over:>7} "
                    f"{found['state'].get('sm_clock_mhz') or '–':>7}"
                )
        lines += [f"  {name}: left out, {why}" for name, why in results["left_out"].items()]
    return "\n".join(lines)


def _context(depths: Sequence[int], prompt: int, steps: int) -> int:
    return max(*depths, prompt) + WARM + steps + 1
