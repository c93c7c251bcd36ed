"""What `nanoqwen record NAME` measures into data/records, and what `nanoqwen bench NAME` compares on this machine."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nanoqwen import hardware, models, records
from nanoqwen.bench_attention import record_attention
from nanoqwen.bench_awq import record_awq
from nanoqwen.bench_e2e import bench_e2e, record_scoreboard
from nanoqwen.bench_engine import record_engine
from nanoqwen.bench_gemv import record_gemv
from nanoqwen.bench_int4 import record_crossover, record_int4
from nanoqwen.bench_ladder import record_ladder
from nanoqwen.bench_quality import bench_quality, record_pack, record_quality
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.config import SHAPES, ModelConfig
from nanoqwen.counters import record_counters
from nanoqwen.fetch import find_model
from nanoqwen.measure import DecodeTiming, arrivals, decode, graph_decode
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.peers import transformers_arrivals
from nanoqwen.records import Record
from nanoqwen.reference import Qwen2
from nanoqwen.timing import Paired, paired, percentiles

MACHINE_SOURCES = ("nanoqwen/hardware.py", "nanoqwen/timing.py", "csrc/read_probe.cu")
REFERENCE_SOURCES = (
    "nanoqwen/reference.py",
    "nanoqwen/generation.py",
    "nanoqwen/measure.py",
    "nanoqwen/ledger.py",
    "nanoqwen/timing.py",
    "csrc/read_probe.cu",
)


def record_machine(folder: Path = FOLDER) -> Record:
    """Measure and save the record `machine`: what this GPU reads, copies and computes in a second.

    Raises:
        RuntimeError: no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the record 'machine' is of a GPU, and there is no CUDA device here")
    device = hardware.default_device()
    machine = hardware.machine(device)
    probes = [hardware.read_probe(device), hardware.copy_probe(device), hardware.matmul_probe(device)]
    for probe in probes:
        print(probe)
    spec = machine.spec
    results = {
        "kind": machine.kind,
        "sms" if machine.kind == "gpu" else "cores": machine.units,
        "cache_bytes": machine.cache,
        "memory_bytes": machine.memory,
        "read": probes[0].to_dict(),
        "copy": probes[1].to_dict(),
        "matmul_bf16": probes[2].to_dict(),
        "datasheet": spec
        and {"name": spec.name, "bytes_per_s": spec.bandwidth, "flops_per_s": spec.bf16, "source": spec.source},
    }
    protocol = (
        "One process. Each call timed by itself (CUDA events on a GPU, wall clock on a CPU), warm-up discarded; the "
        "rate is that of the fastest call, the percentiles are of the seconds per call. Buffers far larger than the "
        "caches. Results checked after the timing. Clocks left alone."
    )
    return _saved(records.make("machine", results, protocol, MACHINE_SOURCES, device), folder)


def record_reference(folder: Path = FOLDER) -> Record:
    """Measure and save the record `reference`: the PyTorch decoder at three sizes, eager and as a CUDA graph.

    The 0.5B runs with its real weights where it has been fetched, the larger shapes with random ones.

    Raises:
        RuntimeError: no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the record 'reference' needs a CUDA GPU; `nanoqwen bench reference` runs on a CPU")
    device, dtype = hardware.default_device(), torch.bfloat16
    machine, probe = hardware.machine(device), hardware.read_ceiling(device)
    print(f"{machine}\n{probe}", flush=True)
    results: dict = {
        "ceilings": {"read_probe": probe.to_dict(), "datasheet_bytes_per_s": machine.spec and machine.spec.bandwidth},
        "models": {},
        "against_transformers": None,
    }
    plan = {
        "qwen2.5-coder-0.5b": (128, 1024, 4096),
        "qwen2.5-coder-1.5b": (128,),
        "qwen2.5-coder-7b": (128, 4096),
    }
    for name, depths in plan.items():
        model, weights = _model(name, dtype, device)
        entry = {"weights": weights, "dtype": "bfloat16", "config": _shape(model.config), "runs": []}
        if len(depths) == 3:
            timing = decode(model, _random_prompt(model, 512), 1, first_tokens=99, probe=probe)
            entry["ttft_prompt_512"] = timing.ttft.to_dict()
        for depth in depths:
            prompt = _random_prompt(model, depth)
            entry["runs"].append(_run("eager", depth, decode(model, prompt, 201, probe=probe)))
            entry["runs"].append(_run("graph", depth, graph_decode(model, prompt, 200, probe=probe)))
        results["models"][name] = entry
        if weights == "real":
            results["against_transformers"] = _against_transformers(model, name, dtype, device)
        print(f"{name}: done", flush=True)
        del model
        torch.cuda.empty_cache()
    protocol = (
        "bf16, batch 1, greedy, sampling included, random prompt tokens, one process. Eager: wall clock from token to "
        "token on the host, 200 gaps, a run of 16 tokens discarded first; TTFT from the call to the first token on the "
        "host, 100 calls. Graph: the same step captured once and replayed 200 times after 10 discarded replays, "
        "feeding its own token and position back on the device, CUDA events between replays; its cache holds just the "
        "tokens of the run. Bytes per token: the ledger at the mean depth of the run. MBU: bytes / median TPOT / "
        "bandwidth. Last token checked against one pass over the whole sequence after the timing. Clocks left alone."
    )
    record = _saved(records.make("reference", results, protocol, REFERENCE_SOURCES, device), folder)
    print(reference_table(record))
    return record


def record_cpu(folder: Path = FOLDER) -> Record:
    """Measure and save the record `cpu`: the real 0.5B on this machine's CPU, alone and beside `transformers`.

    Raises:
        FileNotFoundError: the 0.5B has not been fetched.
        RuntimeError: transformers is not installed.
    """
    name, device, dtype = "qwen2.5-coder-0.5b", torch.device("cpu"), torch.bfloat16
    model = models.load(name, dtype, device)[0]
    timing = decode(model, _random_prompt(model, 128), 65, first_tokens=4)
    print(f"{hardware.machine(device)}\n{timing}", flush=True)
    rival = _against_transformers(model, name, dtype, device)
    if rival is None:
        raise RuntimeError('the record compares with transformers; add it with: pip install "nanoqwen[test]"')
    results = {
        "model": name,
        "weights": "real",
        "dtype": "bfloat16",
        "threads": torch.get_num_threads(),
        "ttft_prompt_128": timing.ttft.to_dict(),
        "decode": _run("eager", 128, timing),
        "against_transformers": rival,
    }
    protocol = (
        "bf16, batch 1, greedy, random prompt tokens, one process on an otherwise idle machine. Wall clock from token "
        "to token, a run of 16 tokens discarded first. Against transformers: both in turn, A B A B, a round discarded, "
        "each round's median gap; the ratio is taken round by round."
    )
    return _saved(records.make("cpu", results, protocol, REFERENCE_SOURCES[:-1], device), folder)


def _model(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Qwen2, str]:
    """The model with its real weights where it is the 0.5B and has been fetched, else of its shape, and which."""
    if name == "qwen2.5-coder-0.5b":
        try:
            return models.load(name, dtype, device)[0], "real"
        except FileNotFoundError as missing:
            print(f"{missing}\nrandom weights stand in, and the record says so", flush=True)
    return models.random(SHAPES[name], dtype, device), "random"


def _shape(config: ModelConfig) -> dict:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim", "tie_word_embeddings")
    return {key: getattr(config, key) for key in keys}


def _random_prompt(model: Qwen2, length: int) -> list[int]:
    return torch.randint(model.num_tokens, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def _run(how: str, depth: int, timing: DecodeTiming) -> dict:
    values = timing.to_dict()
    kept = (
        "tpot",
        "tokens_per_s",
        "mean_depth",
        "bytes_per_token",
        "mbu_datasheet",
        "mbu_probe",
        "peak_memory",
        "note",
    )
    return {"how": how, "depth": depth, **{key: values[key] for key in kept}}


def _saved(record: Record, folder: Path) -> Record:
    path = records.save(record, folder)
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


def reference_table(record: Record) -> str:
    """The record `reference` as a table of text."""
    lines = [
        f"{'model':<20} {'weights':<7} {'how':<6} {'depth':>5}  {'p10':>7} {'p50':>7} {'p90':>7} {'p99':>7} ms  "
        f"{'tok/s':>7} {'GB/token':>8} {'MBU':>7} {'of probe':>8} {'peak':>9}"
    ]

    def percent(share: float | None) -> str:
        return "–" if share is None else f"{100 * share:.1f} %"

    for name, entry in record.results["models"].items():
        for run in entry["runs"]:
            times = " ".join(f"{1e3 * run['tpot'][p]:>7.3f}" for p in ("p10", "p50", "p90", "p99"))
            lines.append(
                f"{name:<20} {entry['weights']:<7} {run['how']:<6} {run['depth']:>5}  {times}     "
                f"{run['tokens_per_s']:>7.1f} {run['bytes_per_token'] / 1e9:>8.4f} {percent(run['mbu_datasheet']):>7} "
                f"{percent(run['mbu_probe']):>8} {run['peak_memory'] / (1 << 30):>5.1f} GiB"
            )
        if ttft := entry.get("ttft_prompt_512"):
            lines.append(f"{name:<20} TTFT at 512 prompt tokens: p50 {1e3 * ttft['p50']:.2f} ms (n {ttft['n']})")
    if rival := record.results["against_transformers"]:
        lines.append(
            f"transformers {rival['version']}, eager, {rival['prompt_tokens']} prompt tokens: "
            f"{1e3 * rival['transformers']['p50']:.3f} ms a token, ours {1e3 * rival['nanoqwen']['p50']:.3f}; "
            f"ours / theirs, pair by pair: {rival['ratio']['p50']:.3f} (n {rival['ratio']['n']})"
        )
    lines.append(f"recorded on {record.device}, driver {record.driver}, torch {record.torch}, {record.state}")
    return "\n".join(lines)


def _side_by_side(
    model: Qwen2, hf_model, prompt: Sequence[int], count: int, rounds: int
) -> tuple[Paired, dict[str, list[int]]]:
    """Both generate `count` tokens in turn, judged by the median gap between tokens; and the tokens each made."""
    made: dict[str, list[int]] = {}

    def contender(name: str, run: Callable, which) -> Callable[[], float]:
        def once() -> float:
            made[name], _, gaps = run(which, prompt, count)
            return statistics.median(gaps)

        return once

    fns = {
        "nanoqwen": contender("nanoqwen", arrivals, model),
        "transformers": contender("transformers", transformers_arrivals, hf_model),
    }
    return paired(fns, rounds), made


def _agreed(made: dict[str, list[int]]) -> int:
    """How many tokens, from the first on, both made alike."""
    a, b = made.values()
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _against_transformers(model: Qwen2, name: str, dtype: torch.dtype, device: torch.device) -> dict | None:
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: no comparison with it", flush=True)
        return None
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(open_checkpoint(find_model(name)).path, dtype=dtype)
    prompt, count, rounds = _random_prompt(model, 128), 64, 10
    pairs, made = _side_by_side(model, hf_model.to(device).eval(), prompt, count, rounds)
    return {
        "version": transformers.__version__,
        "prompt_tokens": len(prompt),
        "new_tokens": count,
        "tokens_alike": _agreed(made),
        "nanoqwen": pairs.percentiles("nanoqwen").to_dict(),
        "transformers": pairs.percentiles("transformers").to_dict(),
        "ratio": percentiles(pairs.ratios("nanoqwen", "transformers"), unit="×").to_dict(),
    }


def bench_reference(
    name: str | None = None, dtype: torch.dtype = torch.bfloat16, count: int = 32, rounds: int = 6
) -> Paired:
    """Our `generate` against `transformers`', both greedy: same weights, dtype, threads, device and prompt, in turn.

    Args:
        name: a model as `models.load` takes it. count: tokens of each run. rounds: pairs, after one thrown away.

    Raises:
        RuntimeError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise RuntimeError('transformers is not installed; add it with: pip install "nanoqwen[test]"') from None
    device = hardware.default_device()
    found = find_model(name)
    path = open_checkpoint(found).path
    model, tokenizer = models.load(path, dtype, device)
    transformers.utils.logging.disable_progress_bar()
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    prompt = tokenizer.encode("def quicksort(a):\n")
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else "eager"
    print(hardware.machine(device))
    print(f"{found.name}, {str(dtype).removeprefix('torch.')}, {where}, {len(prompt)} prompt tokens, {count} new ones")
    print(f"transformers {transformers.__version__}; {rounds} rounds, A B A B; seconds per token are the median gap")
    pairs, made = _side_by_side(model, hf_model, prompt, count, rounds)
    print(f"tokens alike: {_agreed(made)} of {count}")
    return pairs


RECORDS: dict[str, Callable[[], object]] = {
    "machine": record_machine,
    "reference": record_reference,
    "cpu": record_cpu,
    "gemv": record_gemv,
    "attention": record_attention,
    "counters": record_counters,
    "int4": record_int4,
    "crossover": record_crossover,
    "engine": record_engine,
    "ladder": record_ladder,
    "scoreboard": record_scoreboard,
    "awq": record_awq,
    "quality": record_quality,
    "pack": record_pack,
}
"""What `nanoqwen record NAME` runs: measures, saves under data/records, returns the record or why there is none."""

BENCHES: dict[str, Callable[..., object]] = {"reference": bench_reference, "quality": bench_quality, "e2e": bench_e2e}
"""What `nanoqwen bench NAME` runs: compares on this machine and prints."""
