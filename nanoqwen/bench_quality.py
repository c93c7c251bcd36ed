"""The records `quality` and `pack`: what INT4 does to the predictions of the real 0.5B, and what its file costs.

`python -m nanoqwen.bench_quality write|load MODEL FILE GROUP` does one of the two and prints JSON, in a process of its
own: its peak memory is then that of this one thing.
"""

import hashlib
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from nanoqwen import hardware, models, packfile, records
from nanoqwen.checkpoint import find_gguf, open_checkpoint
from nanoqwen.config import ModelConfig
from nanoqwen.fetch import find_model
from nanoqwen.packing import GROUP_SIZE
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.paths import REPO
from nanoqwen.quantize import HEAD, METHODS, Comparison, QuantizedLinear, compare, quantize, quantize_model
from nanoqwen.records import Record
from nanoqwen.timing import percentiles
from nanoqwen.tokenizer import Tokenizer

MODEL = "qwen2.5-coder-0.5b"
QUALITY_SOURCES = (
    "nanoqwen/quantize.py",
    "nanoqwen/packing.py",
    "nanoqwen/reference.py",
    "nanoqwen/tokenizer.py",
    "nanoqwen/bench_quality.py",
)
PACK_SOURCES = ("nanoqwen/packfile.py", *QUALITY_SOURCES)
GROUPS = (32, 64, 128)
HEADS = (16, 8)
WINDOW = 256
# Modules of Python's own library: code that is on every machine which can run this, and of many hands.
TEXT = ("argparse", "csv", "fractions", "heapq", "shutil", "statistics", "tarfile", "textwrap")
TOKENS = {"cpu": 256, "cuda": 2048}  # of each module, from its beginning
LOADS = 3


def record_quality(folder: Path = FOLDER) -> Record:
    """Measure and save the record `quality`: how far INT4 weights move the real 0.5B's predictions of code.

    Raises:
        FileNotFoundError: the 0.5B has not been fetched.
    """
    device = hardware.default_device()
    model, tokenizer = models.load(MODEL, torch.float32, device)
    results = {"model": MODEL, "weights": weights_of(MODEL), **quality(model, tokenizer, TOKENS[device.type])}
    protocol = (
        "fp32 arithmetic, so that only the weights differ. The text is the beginning of modules of Python's library, "
        f"read in windows of {WINDOW} tokens, each without what came before. kl: mean Kullback-Leibler divergence of "
        "the next token's distribution from that of the unquantised weights, in nats; agreement: share of positions "
        "with the same most likely token; perplexity: of the text. Projections in INT4 by rtn (absmax / 7, rounded to "
        "nearest) or mse (searched scales); head_bits 8: lm_head in INT8 of the same group, by rtn. The text is code "
        "that the model may have seen in training. Unquantised: what was read from `weights`; where that is a GGUF of "
        "4-bit blocks, they had been rounded once before."
    )
    return _save(records.make("quality", results, protocol, QUALITY_SOURCES, device), folder, quality_table)


def bench_quality(name: str | None = None, dtype: torch.dtype = torch.float32) -> str:
    """What INT4 in groups of 128 does to a model's predictions of code, on this machine.

    Args:
        name: a model as `models.load` takes it.
    """
    device = hardware.default_device()
    model, tokenizer = models.load(name, dtype, device)
    results = quality(model, tokenizer, TOKENS[device.type], (GROUP_SIZE,))
    words = ", ".join(results["text"]["sha256"])
    return f"unquantised: perplexity {results['perplexity']:.3f}; {results['tokens']} tokens of {words}"


def weights_of(model: str) -> str:
    """What a model's weights were read from, in words."""
    gguf = find_gguf(find_model(model))
    return f"{gguf.name}, dequantised" if gguf else "safetensors"


def quality(
    model: nn.Module,
    tokenizer: Tokenizer,
    tokens_each: int,
    groups: Sequence[int] = GROUPS,
    text: Sequence[str] = TEXT,
) -> dict:
    """The results of the record `quality`, for {rtn, mse} × groups × heads."""
    ids, hashes = code_tokens(tokenizer, tokens_each, text)
    runs, plain = [], Remembering(model)
    for method in METHODS:
        for group in groups:
            twin = written_out(quantize_model(model, group, method))
            for head_bits in HEADS:
                if head_bits == 8:
                    head = quantize(model.lm_head.weight, group, "rtn", 8, HEAD)
                    twin.set_submodule(HEAD, _linear(head.dequantize(), None))
                found = compare(plain, twin, ids, WINDOW)
                runs.append({"method": method, "group": group, "head_bits": head_bits, **_figures(found)})
                print(f"{method}, group {group}, head {head_bits}: {_words(runs[-1])}", flush=True)
    return {
        "window": WINDOW,
        "tokens": found.tokens,
        "text": {"python": platform.python_version(), "tokens_each": tokens_each, "sha256": hashes},
        "perplexity": found.reference_perplexity,
        "runs": runs,
    }


def code_tokens(
    tokenizer: Tokenizer, tokens_each: int, names: Sequence[str] = TEXT
) -> tuple[list[int], dict[str, str]]:
    """The first tokens of each module of Python's library, and the SHA-256 of each file.

    Raises:
        ValueError: a module that is shorter.
    """
    ids, hashes = [], {}
    for name in names:
        text = (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text(encoding="utf-8")
        # A token is at least a byte, and code has about four: no need to encode all of a long file.
        found = tokenizer.encode(text[: 16 * tokens_each])[:tokens_each]
        if len(found) < tokens_each:
            raise ValueError(f"the module {name} has {len(found)} tokens; {tokens_each} are wanted")
        ids += found
        hashes[f"{name}.py"] = hashlib.sha256(text.encode()).hexdigest()
    return ids, hashes


def written_out(model: nn.Module) -> nn.Module:
    """The model with the weights of each `QuantizedLinear` in full, which gives the same and saves making them anew."""
    for name, part in list(model.named_modules()):
        if isinstance(part, QuantizedLinear):
            model.set_submodule(name, _linear(part.weight, part.bias))
    return model


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return linear


class Remembering(nn.Module):
    """A decoder that computes the logits of a text once."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.known = model, {}
        self.num_tokens = getattr(model, "num_tokens", None)

    def forward(self, ids: Tensor) -> Tensor:
        key = tuple(ids.flatten().tolist())
        if key not in self.known:
            self.known[key] = self.model(ids)
        return self.known[key]


def _figures(found: Comparison) -> dict:
    return {"kl": found.kl, "agreement": found.agreement, "perplexity": found.perplexity}


def _words(run: dict) -> str:
    return f"KL {run['kl']:.4f}, top-1 {100 * run['agreement']:.1f} %, perplexity {run['perplexity']:.3f}"


def quality_table(record: Record) -> str:
    """The record `quality` as a table of text."""
    results = record.results
    lines = [f"{results['model']}, {results['tokens']} tokens, unquantised perplexity {results['perplexity']:.3f}"]
    lines += [f"{r['method']:<4} group {r['group']:>3} head {r['head_bits']:>2}: {_words(r)}" for r in results["runs"]]
    return "\n".join(lines)


# The file


def record_pack(folder: Path = FOLDER) -> Record:
    """Measure and save the record `pack`: writing the 0.5B into a `.nanoqwen` file, loading it, and what it gives.

    Raises:
        FileNotFoundError: the 0.5B has not been fetched.
        RuntimeError: the mapped file gives other outputs than the model quantised in memory.
    """
    with tempfile.TemporaryDirectory() as work:
        results = pack(MODEL, Path(work) / "model.nanoqwen")
    protocol = (
        "On the CPU, each of write and load in a process of its own, which ends with it. write: nanoqwen pack with its "
        f"defaults, once; load: {LOADS} processes, the file in the page cache, open_s until every byte is checked, "
        "seconds until the decoder is built. peak_bytes: largest resident set of the process, imports_bytes of it "
        "before it began; pages of mapped files count. layer_and_embedding_bytes: of the 16-bit checkpoint, one layer "
        "and the embedding. bit_equal: logits of the mapped file and of the model quantised in memory, on the same "
        "tokens, in bf16."
    )
    return _save(records.make("pack", results, protocol, PACK_SOURCES, "cpu"), folder, pack_table)


def pack(model: str, file: Path, group: int = GROUP_SIZE, loads: int = LOADS) -> dict:
    """The results of the record `pack`.

    Raises:
        RuntimeError: a child failed, or the outputs differ.
    """
    config = open_checkpoint(find_model(model)).config
    write = _child("write", model, file, group)
    opened = [_child("load", model, file, group) for _ in range(loads)]
    tokens = _check_outputs(model, file, group)
    return {
        "model": model,
        "weights": weights_of(model),
        "threads": torch.get_num_threads(),
        "group": group,
        "method": "mse",
        "head_bits": 16,
        "file_bytes": file.stat().st_size,
        "layer_and_embedding_bytes": _layer_and_embedding(config),
        "write": write,
        "load": {
            "seconds": percentiles([each["seconds"] for each in opened]).to_dict(),
            "open_s": percentiles([each["open_s"] for each in opened]).to_dict(),
            "peak_bytes": max(each["peak_bytes"] for each in opened),
            "imports_bytes": max(each["imports_bytes"] for each in opened),
        },
        "bit_equal": True,
        "logits_tokens": tokens,
    }


def _layer_and_embedding(config: ModelConfig) -> int:
    counted = ("model.embed_tokens.", "model.layers.0.")
    sizes = (torch.Size(shape).numel() for name, shape in config.weight_shapes().items() if name.startswith(counted))
    return 2 * sum(sizes)


def _check_outputs(model: str, file: Path, group: int, count: int = 64) -> int:
    plain, _ = models.load(model)
    ids = torch.randint(plain.num_tokens, (1, count), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = quantize_model(plain, group)(ids)
        mapped = packfile.load(file)[0](ids)
    if not torch.equal(wanted, mapped):  # NaN equals nothing
        raise RuntimeError(f"{file.name} gives other logits than the model that was quantised in memory")
    return count


def _child(what: str, model: str, file: Path, group: int) -> dict:
    command = [sys.executable, "-m", "nanoqwen.bench_quality", what, model, str(file), str(group)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process that should {what} {model} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(what: str, model: str, file: str, group: str) -> None:
    before, started = _peak(), time.perf_counter()
    found: dict = {}
    if what == "write":
        found["file_bytes"] = packfile.write(open_checkpoint(find_model(model)), file, int(group)).nbytes
    else:
        mapped = packfile.open_packfile(file)
        found["open_s"] = time.perf_counter() - started
        mapped.model()
    seconds = time.perf_counter() - started
    print(json.dumps({**found, "seconds": seconds, "peak_bytes": _peak(), "imports_bytes": before}))


def _peak() -> int:
    """The largest resident set that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux hands the peak of the process that started this one down to getrusage
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])
    import resource  # here: Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def pack_table(record: Record) -> str:
    """The record `pack` as text."""
    r = record.results
    write, load = r["write"], r["load"]
    return (
        f"{r['model']}, group {r['group']}, {r['method']}: {r['file_bytes'] / 1e6:,.0f} MB\n"
        f"write {write['seconds']:.1f} s, peak {write['peak_bytes'] / 1e6:,.0f} MB, of it imports "
        f"{write['imports_bytes'] / 1e6:,.0f}; a layer and the embedding: {r['layer_and_embedding_bytes'] / 1e6:,.0f}\n"
        f"load {load['seconds']['p50']:.2f} s ({load['open_s']['p50']:.2f} to check it), peak "
        f"{load['peak_bytes'] / 1e6:,.0f} MB; logits equal bit for bit"
    )


def _save(record: Record, folder: Path, table) -> Record:
    path = records.save(record, folder)
    print(table(record), flush=True)
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


if __name__ == "__main__":
    main(*sys.argv[1:])
