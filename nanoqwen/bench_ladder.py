"""The record `ladder`: the engine's text on 100 prompts of code, held against the same INT4 model in PyTorch.

The simulation need not generate: the engine's tokens go through it at once, behind their prompt, and at each position
its best token is compared with the engine's. Until the two part, that is what its own greedy text would be.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from nanoqwen import bench_engine, hardware, models, quantize, records
from nanoqwen.bench_quality import weights_of, written_out
from nanoqwen.engine import Engine
from nanoqwen.graphs import MODES
from nanoqwen.paths import DATA
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.records import Record
from nanoqwen.reference import Qwen2

PROMPTS = DATA / "prompts" / "code.jsonl"
SOURCES = tuple(
    dict.fromkeys(
        (
            *(path for path in bench_engine.SOURCES if path not in ("csrc/read_probe.cu", "nanoqwen/timing.py")),
            *(f"nanoqwen/{name}.py" for name in ("quantize", "packing", "reference", "tokenizer", "bench_ladder")),
            "data/prompts/code.jsonl",
        )
    )
)
MODEL, TOKENS = "qwen2.5-coder-0.5b", 64
TIE = 0.02
"""Where the two part, the engine's token is this near to the simulation's best, in deviations of the logits: a tie."""
OFF = 0.02
"""So far the logits may be off at any position, in norm. Equal texts alone say little: most tokens lead by more than
what a wrong sum now and then does to them."""


@dataclass(frozen=True)
class Prompt:
    """A beginning of code, and its language."""

    language: str
    text: str


def load_prompts(path: Path = PROMPTS) -> list[Prompt]:
    """The prompts of a file with a JSON object in each line.

    Raises:
        FileNotFoundError: there is no such file. ValueError: a line that is no prompt; the message gives its number.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; the prompts come with the repository")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: cannot be read as JSON ({error})") from None
        wanted = {"language", "text"}
        if not isinstance(values, dict) or set(values) != wanted or not all(isinstance(values[k], str) for k in wanted):
            raise ValueError(f"{path}, line {number}: {line[:80]}; it must be an object with language and text")
        if not values["text"].strip():
            raise ValueError(f"{path}, line {number}: the text is empty")
        prompts.append(Prompt(**values))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def simulation(model: Qwen2, group: int = quantize.GROUP_SIZE) -> Qwen2:
    """The INT4 model in PyTorch and fp32, with what the engine holds in 16 bits rounded alike.

    Its quantised layers hold the words that the engine lays out.
    """
    twin = quantize.use_kernels(quantize.quantize_model(model.float(), group), False)
    for name, parameter in twin.named_parameters():
        if name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight")):
            parameter.data = parameter.data.half().float()
    return twin


@torch.inference_mode()
def margins(twin: Qwen2, ids: Sequence[int], tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """How far each token's logit in the simulation lies below the best there, and the logits there.

    In deviations of the logits: 0 where the simulation chooses the same token. `tokens` follow `ids`.
    """
    device = twin.lm_head.weight.device
    sequence = torch.tensor([[*ids, *tokens[:-1]]], device=device)
    logits = twin(sequence)[0, len(ids) - 1 :, : twin.num_tokens].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
    return (logits.amax(1) - chosen) / logits.std(1), logits


def one_by_one(engine: Engine, ids: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
    """`count` greedy tokens behind a prompt, and the logits (count, vocabulary) that each was chosen from."""
    sequence, token = engine.prefill(ids)
    tokens, logits = [token], [engine.logits.clone()]
    while len(tokens) < count:
        tokens += engine.decode(sequence, 1)
        logits.append(engine.logits.clone())
    engine.free(sequence)
    return tokens, torch.stack(logits)


def climb(engine: Engine, twin: Qwen2, prompts: Sequence[Sequence[int]], count: int = TOKENS) -> dict:
    """The record's results: how many prompts have equal tokens, where the others part, and how far the logits are off.

    Args:
        engine: made of `twin`, which is of `simulation`.
        prompts: token ids. count: greedy tokens of each.

    Raises:
        RuntimeError: logits that are not finite, or a prompt that gets another text when it is asked again.
    """
    partings, errors, farthest = [], [], 0.0
    for number, ids in enumerate(tqdm(prompts, desc="ladder", unit="prompt", disable=None)):
        tokens = list(engine.generate(ids, count, stop=()))
        again, ours = one_by_one(engine, ids, count)
        below, theirs = margins(twin, ids, tokens)
        error = (ours[:, : twin.num_tokens] - theirs).norm(dim=1) / theirs.norm(dim=1)
        if not below.isfinite().all() or not error.isfinite().all():
            raise RuntimeError(f"prompt {number}: the logits are not finite")
        if again != tokens:  # rounding repeats itself, a race does not
            at = next(i for i, pair in enumerate(zip(again, tokens, strict=True)) if pair[0] != pair[1])
            raise RuntimeError(f"prompt {number}: asked again, the text is another one from token {at} on")
        errors += error.tolist()
        farthest = max(farthest, below.max().item())
        if (below > 0).any():
            at = int((below > 0).nonzero()[0])
            partings.append({"prompt": number, "position": at, "margin": below[at].item()})
    ties = [parting for parting in partings if parting["margin"] <= TIE]
    return {
        "prompts": len(prompts),
        "tokens": count,
        "equal": len(prompts) - len(partings),
        "ties": ties,
        "parted": [parting for parting in partings if parting["margin"] > TIE],
        "largest_margin": farthest,
        "logit_error": {"largest": max(errors), "median": statistics.median(errors)},
    }


def record_ladder(folder: Path = FOLDER) -> Record:
    """Measure and save the record `ladder`: 100 prompts, 64 greedy tokens each, beside the simulation in PyTorch.

    Raises:
        RuntimeError: no CUDA GPU, texts that part where there is no tie, or logits that are off by more than `OFF`.
        FileNotFoundError: the 0.5B is not here.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the record 'ladder' needs a CUDA GPU: the SIMT machine would take days")
    device = hardware.default_device()
    prompts = load_prompts()
    model, tokenizer = models.load(MODEL, torch.bfloat16, device)
    results = validate(model, tokenizer, prompts, device)
    results = {"model": MODEL, "weights": weights_of(MODEL), **results}
    print(ladder_words(results), flush=True)
    protocol = (
        "Greedy, no stop token. The engine generates, and once more one token at a time; the simulation, the same INT4 "
        "words dequantised in PyTorch and fp32, reads prompt and text at once, and its best token at each position is "
        "compared, which until the first difference is its own greedy text. equal: prompts without a difference. ties: "
        "prompts whose first difference has a margin of at most tie: the engine's token's logit in the simulation "
        "below the best one, over the deviation of the logits. parted: a larger margin; a record holds none. "
        "largest_margin: of all positions, those behind a difference included. logit_error: of the logits at every "
        "position, relative, in norm."
    )
    if results["parted"] or results["logit_error"]["largest"] > OFF:
        raise RuntimeError(f"the engine is not its simulation: {ladder_words(results)}; nothing was saved")
    record = records.make("ladder", results, protocol, SOURCES, device)
    path = records.save(record, folder)
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


def validate(model: Qwen2, tokenizer, prompts: Sequence[Prompt], device, count: int = TOKENS, **how) -> dict:
    """The results of `climb` for a model in 16 or 32 bits. `how`: of the engine."""
    ids = [tokenizer.encode(prompt.text) for prompt in prompts]
    twin = simulation(model, how.pop("group", quantize.GROUP_SIZE))
    with Engine(twin, device, max_tokens=max(map(len, ids)) + count, **how) as engine:
        written_out(twin)  # which gives the same, and need not be dequantised for every prompt
        results = climb(engine, twin, ids, count)
        mode = next(name for name, each in MODES.items() if each == engine.mode)
    return {"mode": mode, "pdl": engine.pdl, "tie": TIE, **results}


def ladder_words(results: Mapping) -> str:
    """The results in words."""
    lines = [
        f"{results['equal']} of {results['prompts']} prompts: the same {results['tokens']} tokens; "
        f"{len(results['ties'])} part at a tie, {len(results['parted'])} elsewhere; largest margin "
        f"{results['largest_margin']:.2g} deviations; logits off by {results['logit_error']['largest']:.2g} at most"
    ]
    for parting in (*results["ties"], *results["parted"]):
        lines.append(f"  prompt {parting['prompt']} at token {parting['position']}: margin {parting['margin']:.2g}")
    return "\n".join(lines)
