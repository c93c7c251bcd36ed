"""Train `data/nanoqwen-tiny`, the small model that ships with the course: `python -m nanoqwen.tiny`.

The reference decoder learns from the Python standard library's own source. Read it top to bottom: files → tokenizer →
token streams → baselines → training → the folder that `nanoqwen` and `transformers` load, with its model card.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import random
import sysconfig
import tempfile
import time
import unicodedata
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from nanoqwen import reference
from nanoqwen.config import ModelConfig
from nanoqwen.generation import Sampler, generate
from nanoqwen.paths import TINY

VOCAB = 4096
SPECIAL = ["endoftext", "im_start", "im_end", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad"]
END, IM_START, IM_END, PREFIX, MIDDLE, SUFFIX, PAD = SPECIAL = [f"<|{name}|>" for name in SPECIAL]

# --- The corpus: files of the standard library, split by file ---------------------------------------------------------

LEFT_OUT = {
    "*-packages/*": "installed packages are not the standard library",
    "lib2to3/tests/data/*": "deliberately broken or ancient code",
    "pydoc_data/*": "help pages, not code",
    "encodings/*": "character tables, nearly alike",
    "*_sysconfigdata*": "paths of one machine",
    "config-*": "paths of one machine",
}
"""Patterns of relative paths that are not read, and why."""


def read_corpus(stdlib: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The training and validation files below `stdlib`, as {relative path: text}.

    Sorted, each text once, about one file in 25 for validation by the hash of its path: no file is in both.

    Raises:
        ValueError: `stdlib` is no folder, or has too few Python files to fill both parts.
    """
    if not stdlib.is_dir():
        raise ValueError(f"--stdlib {stdlib} is not a folder; give one like {sysconfig.get_path('stdlib')}")
    train, valid, seen = {}, {}, set()
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if any(fnmatch(name, pattern) for pattern in LEFT_OUT):
            continue
        try:
            text = unicodedata.normalize("NFC", path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:  # some of the library's tests are about other encodings
            continue
        if not text or text in seen:
            continue
        seen.add(text)
        held_out = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 25 == 0
        (valid if held_out else train)[name] = text
    if not train or not valid:
        raise ValueError(f"--stdlib {stdlib} gives {len(train)} training and {len(valid)} validation files; need both")
    return train, valid


def repeated_lines(train: dict[str, str], valid: dict[str, str]) -> float:
    """The share of validation lines (20 characters or more) that also stand, letter by letter, in a training file."""
    known = {line.strip() for text in train.values() for line in text.splitlines()}
    lines = [line.strip() for text in valid.values() for line in text.splitlines() if len(line.strip()) >= 20]
    return sum(line in known for line in lines) / max(len(lines), 1)


# --- The tokenizer: byte-level BPE of Qwen2's family ------------------------------------------------------------------

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Learn a vocabulary of at most 4,096 entries, of which the last seven are Qwen2.5-Coder's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer


def encode_plain(tokenizer: Tokenizer, texts: list[str], rng: random.Random | None = None) -> list[int]:
    """Each text after an <|endoftext|>, end to end. Text never turns into a special token.

    With `rng`, a text is encoded in pieces of about 60 characters, cut anywhere: so the model also meets the tokens
    at which a prompt may end, such as the lone space of "def ", which whole texts hardly hold.
    """
    end, ids = tokenizer.token_to_id(END), []
    for text in texts:
        parts = [text] if rng is None else pieces(text, 10, 110, rng)
        ids += [end, *(token for part in encode_texts(tokenizer, parts) for token in part)]
    return [*ids, end]


def encode_fim(tokenizer: Tokenizer, texts: list[str], rng: random.Random) -> list[int]:
    """Texts cut into pieces, each piece cut in three and told as prefix, suffix, middle (Bavarian et al., 2022).

    The cuts fall between any two characters, as a cursor in an editor does.
    """
    prefix, suffix, middle, end = (tokenizer.token_to_id(token) for token in (PREFIX, SUFFIX, MIDDLE, END))
    ids = []
    for text in texts:
        parts = []
        for piece in pieces(text, 200, 1600, rng):  # short enough to lie in one training window
            a, b = sorted(rng.randint(0, len(piece)) for _ in range(2))
            parts += [piece[:a], piece[b:], piece[a:b]]
        encoded = encode_texts(tokenizer, parts)
        for before, after, between in zip(encoded[0::3], encoded[1::3], encoded[2::3], strict=True):
            ids += [prefix, *before, suffix, *after, middle, *between, end]
    return ids


def pieces(text: str, least: int, most: int, rng: random.Random) -> list[str]:
    """The text cut into pieces of `least` to `most` characters (the last may be shorter)."""
    parts, start = [], 0
    while start < len(text):
        parts.append(text[start : start + rng.randint(least, most)])
        start += len(parts[-1])
    return parts


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a source file is text
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    tokenizer.encode_special_tokens = False
    return [each.ids for each in encoded]


# --- Baselines: what counting bytes achieves --------------------------------------------------------------------------


def ngram_bits(train: bytes, valid: bytes, order: int) -> list[float]:
    """Bits per byte of `valid` under byte n-grams of orders 1 … `order` (at most 7), counted on `train`.

    Interpolated as Witten & Bell (1991): a context seen N times with T different successors gives its own counts
    the weight N / (N + T), and the next shorter context the rest.
    """

    def grams(text: bytes, n: int) -> np.ndarray:  # each run of n bytes as one integer, the newest byte lowest
        codes = np.frombuffer(text, np.uint8).astype(np.int64)
        return sum(codes[i : len(codes) - n + 1 + i] << (8 * (n - 1 - i)) for i in range(n))

    p, bits = np.full(len(valid), 1 / 256), []
    for n in range(1, order + 1):
        keys, counts = np.unique(grams(train, n), return_counts=True)
        contexts, first = np.unique(keys >> 8, return_index=True)
        total, kinds = np.add.reduceat(counts, first), np.diff(np.append(first, len(keys)))
        wanted = grams(valid, n)
        at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        count = np.where(keys[at] == wanted, counts[at], 0)
        at = np.searchsorted(contexts, wanted >> 8).clip(max=len(contexts) - 1)
        known = contexts[at] == wanted >> 8  # an unseen context leaves the shorter one's estimate
        mixed = (count + kinds[at] * p[n - 1 :]) / (total[at] + kinds[at])
        p[n - 1 :] = np.where(known, mixed, p[n - 1 :])
        bits.append(float(-np.log2(p).mean()))
    return bits


# --- The model and its training ---------------------------------------------------------------------------------------


def tiny_config(tokenizer: Tokenizer) -> ModelConfig:
    """Qwen2 in small: GQA, head_dim 64, every K a multiple of 128."""
    eos = tuple(tokenizer.token_to_id(token) for token in (END, IM_END))
    return ModelConfig(
        VOCAB, 256, 768, 6, 4, 2, rope_theta=1e4, tie_word_embeddings=True, max_position_embeddings=2048,
        eos_token_id=eos,
    )  # fmt: skip


def fresh_model(config: ModelConfig) -> reference.Qwen2:
    """Normal weights of deviation 0.02; those that add to the residual stream smaller, by the number that do."""
    model = reference.Qwen2(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(weight, 0, 0.02 / math.sqrt(2 * config.num_hidden_layers) if adds else 0.02)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    return model


def loss_of(model: reference.Qwen2, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of `targets` (B, T) after `tokens` (B, T); a target of −100 is not counted."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def draw(stream: Tensor, starts: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """`rows` windows (rows, length + 1) of a stream of tokens, from places drawn out of `starts` (ascending)."""
    fitting = int(torch.searchsorted(starts, len(stream) - length))  # a start at len − length − 1 still fits
    chosen = starts[torch.randint(fitting, (rows, 1), generator=generator).to(stream.device)]
    return stream[chosen + torch.arange(length + 1, device=stream.device)]


def add_dropout(model: reference.Qwen2, p: float) -> None:
    """Zero a share `p` of what the embedding and each sub-layer give, while training (Srivastava et al., 2014).

    As hooks: the reference decoder itself never needs it.
    """
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "self_attn", "mlp")):
            module.register_forward_hook(lambda module, _, output: F.dropout(output, p, module.training))


@torch.no_grad()
def validation_nats(model: reference.Qwen2, stream: Tensor, length: int, rows: int) -> float:
    """Total nats of a stream, read in windows of `length` side by side: each token but the first counts once."""
    short = -(len(stream) - 1) % length
    tokens = F.pad(stream[:-1], (0, short)).view(-1, length)
    targets = F.pad(stream[1:], (0, short), value=-100).view(-1, length)
    pairs = zip(tokens.split(rows), targets.split(rows), strict=True)
    return sum(loss_of(model, x, y, "sum").double().item() for x, y in pairs)


def train(
    model: reference.Qwen2, plain: Tensor, fim: Tensor, fim_prefix: int, valid: Tensor, args: argparse.Namespace
) -> list[dict]:
    """Train in place and leave the weights with the lowest validation loss; return the curve.

    Three quarters of a batch are plain source, one quarter fill-in-the-middle. Every eighth step sees windows four
    times as long, so that the model keeps its head over its whole context.
    """
    device = plain.device
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    loss_fn = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]  # norms and biases are not decayed
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    warmup = max(1, args.steps // 20)
    generator = torch.Generator().manual_seed(args.seed)
    anywhere = torch.arange(len(plain), device=device)
    # A window that began inside an example would show its marks without <|fim_prefix|>, as if plain code had them.
    examples = (fim == fim_prefix).nonzero().flatten()
    if args.dropout:
        add_dropout(model, args.dropout)
    curve, best, weights, since, seen = [], float("inf"), {}, 0.0, 0
    begin = time.perf_counter()
    try:
        for step in range(1, args.steps + 1):
            done = max(0, step - warmup) / max(1, args.steps - warmup)
            for group in optimizer.param_groups:  # linear warm-up, then a cosine down to a twentieth
                group["lr"] = args.lr * min(step / warmup, 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
            length, rows = (args.length, args.batch) if step % 8 else (args.length * 4, max(2, args.batch // 4))
            quarter = max(1, rows // 4)
            source = draw(plain, anywhere, rows - quarter, length, generator)
            batch = torch.cat((source, draw(fim, examples, quarter, length, generator)))
            model.train()
            with autocast:
                loss = loss_fn(model, batch[:, :-1], batch[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            since, seen = since + loss.detach(), seen + rows * length
            if step % args.every and step != args.steps:
                continue
            model.eval()
            with autocast:
                nats = validation_nats(model, valid, args.length, args.batch) / (len(valid) - 1)
            row = {
                "step": step,
                "tokens": seen,
                "train_loss": float(since) / ((step - 1) % args.every + 1),
                "validation_loss": nats,
                "seconds": time.perf_counter() - begin,
            }
            curve, since = [*curve, row], 0.0
            print("step {step:6,} · train {train_loss:.4f} · validation {validation_loss:.4f} nats a token · "
                  "{seconds:.0f} s".format(**row), flush=True)  # fmt: skip
            if nats < best:
                best, weights = nats, {name: value.clone() for name, value in model.state_dict().items()}
    except KeyboardInterrupt:
        if not weights:
            raise
        print("stopped by hand; keeping the best weights so far")
    model.load_state_dict(weights)
    return curve


# --- What is shipped --------------------------------------------------------------------------------------------------

PROMPTS = ["def ", "import os\nimport ", "class Stack:\n    def __init__(self", "for i in range("]
FIM_PROMPT = ("def area(width, height):\n    ", "\n\n\nprint(area(2, 3))\n")


def complete(model: reference.Qwen2, tokenizer: Tokenizer, prompt: list[int], sampler: Sampler | None = None) -> str:
    ids = list(generate(model, prompt, 64, sampler))
    return tokenizer.decode([t for t in ids if t not in model.config.eos_token_id], skip_special_tokens=False)


def sample_completions(model: reference.Qwen2, tokenizer: Tokenizer) -> list[dict]:
    """64 tokens after each of `PROMPTS`, greedy and drawn, and one fill-in-the-middle."""
    marks = {"suppress": [tokenizer.token_to_id(token) for token in (PREFIX, MIDDLE, SUFFIX, PAD, IM_START)]}
    warm = {"temperature": 0.8, "top_p": 0.95, "seed": 0, **marks}
    samples = []
    for text in PROMPTS:
        prompt = [tokenizer.token_to_id(END), *tokenizer.encode(text).ids]
        greedy = complete(model, tokenizer, prompt, Sampler(**marks))
        samples.append({"prompt": text, "how": "greedy", "completion": greedy})
        drawn = complete(model, tokenizer, prompt, Sampler(**warm))
        samples.append({"prompt": text, "how": "temperature 0.8, top-p 0.95, seed 0", "completion": drawn})
    before, after = FIM_PROMPT
    prompt = tokenizer.encode(PREFIX + before + SUFFIX + after + MIDDLE).ids
    filled = complete(model, tokenizer, prompt)
    return [*samples, {"prompt": before, "suffix": after, "how": "fill in the middle, greedy", "completion": filled}]


def model_card(facts: dict) -> str:
    """The README of the shipped folder, written from the measured numbers."""
    rows = "\n".join(f"| {row['model']} | {row['bits_per_byte']:.3f} |" for row in facts["table"])
    left_out = "\n".join(f"- `{pattern}`: {why}" for pattern, why in LEFT_OUT.items())
    samples = []
    for each in facts["samples"]:
        text = each["prompt"] + "⟦" + each["completion"] + "⟧" + each.get("suffix", "")
        samples.append(f"{each['how'].capitalize()}:\n\n````python\n{text}\n````\n")
    f = facts
    names = ("steps", "batch", "length", "lr", "weight_decay", "dropout", "seed")
    options = " ".join(f"--{name.replace('_', '-')} {f[name]}" for name in names)
    return f"""---
license: mit
library_name: transformers
pipeline_tag: text-generation
tags: [qwen2, python, code, tiny]
---

# nanoqwen-tiny

A Qwen2-architecture model of {f["parameters"]:,} parameters, trained from scratch on the source of the Python standard
library. It is the model that nanoqwen's notebooks run on where no other is at hand: small enough to ship in the
repository, real enough to write something like Python. It is for teaching; it is not for use as a coding assistant.

## Architecture

Hidden size 256, 6 layers, 4 query heads and 2 KV heads of 64, intermediate size 768, vocabulary {VOCAB:,}, tied head,
context 2,048, RoPE base 10,000, bf16 weights ({f["weight_bytes"]:,} bytes). `transformers` loads it as
`Qwen2ForCausalLM`. The tokenizer is byte-level BPE with Qwen2's pre-tokenizer, its own merges, and Qwen2.5-Coder's
chat and fill-in-the-middle tokens as its last seven entries.

## Data

The `.py` files of the standard library of {f["stdlib"]}, its own tests included where they are installed:
{f["train_files"]:,} files for training ({f["train_bytes"]:,} bytes, {f["train_tokens"]:,} tokens) and
{f["validation_files"]:,} for validation ({f["validation_bytes"]:,} bytes, {f["validation_tokens"]:,} tokens), split by
a hash of the path. SHA-256 of the corpus: `{f["corpus_sha256"]}`. Exact copies of a file count once.
{f["repeated_lines"]:.1%} of the validation lines of 20 characters or more also stand in some training file.

Left out:

{left_out}
- files that are empty or not UTF-8

The standard library is under the [PSF License Agreement](https://docs.python.org/3/license.html); a few of its modules
carry further notices. The weights, like nanoqwen, are under the MIT licence.

## Training

    python -m nanoqwen.tiny {options}

AdamW, cosine schedule with warm-up, gradient clipping, dropout,
{"bf16 autocast over fp32 weights" if f["bf16"] else "fp32"};
{f["length"]} tokens a window ({f["length"] * 4:,} in every eighth step); a quarter of each batch is
fill-in-the-middle. On {f["device"]}, torch {f["torch"]}: {f["train_seconds"]:.0f} seconds, {f["seen_tokens"]:,} tokens
seen. The weights are those with the lowest validation loss, at step {f["best_step"]:,} of {f["steps"]:,}. The seed
fixes the data order and the initial weights; on a GPU the last bits may still differ from run to run.

## Result

Validation loss of the shipped bf16 weights, in windows of {f["length"]} tokens: **{f["validation_loss"]:.3f} nats a
token**; in windows of {f["length"] * 4:,}: {f["validation_loss_long"]:.3f}. On the same bytes, next to n-grams of bytes
(Witten-Bell interpolation, counted on the same training files):

| model | bits per byte |
|---|---|
{rows}

## Samples

Between ⟦ and ⟧ stands what the model wrote, 64 tokens at most, not chosen. Marks
that only prompts hold are suppressed, as `nanoqwen generate` does.

{chr(10).join(samples)}
## Limits

It knows the look of Python, not its meaning: names, imports and indentation are plausible, programs are rarely right.
It has seen no chat and no language but Python and the English of its comments; the chat template is there so that
tools work. It can repeat passages of its training files word by word.
"""


def write_folder(out: Path, model: reference.Qwen2, tokenizer: Tokenizer, facts: dict) -> None:
    """Write every file beside its final place first, then put all of them there."""
    config = model.config
    eos = list(config.eos_token_id)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "bos_token": None,
        "model_max_length": config.max_position_embeddings, "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=out, prefix=".partial-") as folder:
        partial = Path(folder)

        def write_json(name: str, values: dict) -> None:
            (partial / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

        state = model.state_dict()
        weights = {name: state[name].bfloat16().cpu().contiguous() for name in config.weight_shapes()}
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        write_json("config.json", {**config.to_dict(), "torch_dtype": "bfloat16"})
        write_json("generation_config.json", {"eos_token_id": eos, "pad_token_id": eos[0]})
        write_json("tokenizer_config.json", settings)
        write_json("training.json", facts)
        tokenizer.save(str(partial / "tokenizer.json"), pretty=False)
        (partial / "README.md").write_text(model_card(facts), encoding="utf-8")
        for file in sorted(partial.iterdir()):
            os.chmod(file, 0o644)
            os.replace(file, out / file.name)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nanoqwen.tiny", description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--stdlib", type=Path, default=None, help="folder of the library (default: this Python's own)")
    parser.add_argument("--out", type=Path, default=TINY, help="folder to write")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=256, help="windows a step")
    parser.add_argument("--length", type=int, default=512, help="tokens a window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=100, help="steps between validations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="torch.compile")
    args = parser.parse_args(argv)
    for name, least in (("steps", 1), ("batch", 2), ("length", 8), ("every", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}; it must be {least} or more")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout is {args.dropout}; it must be 0 or more and below 1")
    if args.length * 4 > 2048:
        parser.error(f"--length is {args.length}; four times that must fit the context of 2048")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    stdlib = args.stdlib or Path(sysconfig.get_path("stdlib"))
    train_files, valid_files = read_corpus(stdlib)
    args.out.mkdir(parents=True, exist_ok=True)  # before the minutes of training, not after
    train_texts, valid_texts = list(train_files.values()), list(valid_files.values())
    train_bytes, valid_bytes = "".join(train_texts).encode(), "".join(valid_texts).encode()
    print(f"corpus: {len(train_files):,} files, {len(train_bytes):,} bytes; "
          f"validation: {len(valid_files):,} files, {len(valid_bytes):,} bytes", flush=True)  # fmt: skip

    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(train_texts)
    rng = random.Random(args.seed)
    plain = torch.tensor(encode_plain(tokenizer, train_texts, rng), device=args.device)
    fim = torch.tensor(encode_fim(tokenizer, train_texts, rng), device=args.device)
    valid = torch.tensor(encode_plain(tokenizer, valid_texts), device=args.device)
    if min(len(plain), len(fim)) <= args.length * 4:
        raise ValueError(f"--stdlib {stdlib}: {len(plain):,} tokens do not fill a window of {args.length * 4:,}")
    print(f"tokens: {len(plain):,} plain, {len(fim):,} fill-in-the-middle, {len(valid):,} validation", flush=True)
    ngrams = ngram_bits(train_bytes, valid_bytes, 5)

    model = fresh_model(tiny_config(tokenizer)).to(args.device)
    model.num_tokens = tokenizer.get_vocab_size()
    begin = time.perf_counter()
    curve = train(model, plain, fim, tokenizer.token_to_id(PREFIX), valid, args)
    seconds = time.perf_counter() - begin

    # From here on the weights are what the file holds: rounded to bf16.
    model.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    model.eval()
    nats = validation_nats(model, valid, args.length, args.batch)
    nats_long = validation_nats(model, valid, args.length * 4, max(1, args.batch // 4))
    bits = nats / math.log(2) / len(valid_bytes)
    table = [
        {"model": f"byte {n}-gram" if n > 1 else "byte unigram", "bits_per_byte": ngrams[n - 1]} for n in (1, 3, 5)
    ]
    table.append({"model": "nanoqwen-tiny", "bits_per_byte": bits})
    corpus = hashlib.sha256()
    for name, text in sorted({**train_files, **valid_files}.items()):
        corpus.update(f"{name}\0{text}\0".encode())
    facts = {
        "stdlib": f"Python {platform.python_version()}" if args.stdlib is None else stdlib.resolve().name,
        "corpus_sha256": corpus.hexdigest(),
        "train_files": len(train_files), "train_bytes": len(train_bytes), "train_tokens": len(plain),
        "validation_files": len(valid_files), "validation_bytes": len(valid_bytes), "validation_tokens": len(valid),
        "repeated_lines": repeated_lines(train_files, valid_files),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": 2 * sum(p.numel() for p in model.parameters()),
        "steps": args.steps, "batch": args.batch, "length": args.length, "lr": args.lr,
        "weight_decay": args.weight_decay, "dropout": args.dropout, "seed": args.seed,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "a CPU",
        "bf16": args.device.startswith("cuda"), "torch": torch.__version__,
        "train_seconds": seconds,
        "seen_tokens": curve[-1]["tokens"],
        "best_step": min(curve, key=lambda row: row["validation_loss"])["step"],
        "validation_loss": nats / (len(valid) - 1), "validation_loss_long": nats_long / (len(valid) - 1),
        "table": table, "curve": curve, "samples": sample_completions(model, tokenizer),
    }  # fmt: skip
    write_folder(args.out, model, tokenizer, facts)
    for row in table:
        print(f"{row['model']:>14}  {row['bits_per_byte']:.3f} bits per byte")
    print(f"validation loss {facts['validation_loss']:.4f} nats a token · {seconds:.0f} s · wrote {args.out}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
