"""Weights on disk: everything checked on opening, before any tensor is handed out.

A checkpoint is data. Only safetensors are read; pickled files (`.bin`, `.pt`) can run code and are never opened.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoqwen.config import ModelConfig
from nanoqwen.gguf_convert import convert

INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

Header = dict[str, tuple[tuple[int, ...], str]]  # tensor's name → shape and dtype, as the file says


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint: its configuration, and where each weight is.

    Attributes:
        path: the Hugging Face folder (for a GGUF, the one made from it).
        config: agrees with the files: a tied configuration whose file carries another head reads as untied.
        files: weight's name → the safetensors file that holds it; names as in `config.weight_shapes()`.
    """

    path: Path
    config: ModelConfig
    files: dict[str, Path]

    @property
    def tokenizer_path(self) -> Path:
        """The folder with `tokenizer.json` and `tokenizer_config.json`."""
        return self.path

    def weights(self, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Every weight, under the names and with the shapes of `config.weight_shapes()`.

        On the CPU, and where `dtype` is the file's, the tensors are views of the mapped file: nothing is copied.

        Raises:
            ValueError: a `dtype` other than float32, bfloat16, float16.
        """
        if dtype not in _DTYPES.values():
            raise ValueError(f"dtype is {dtype}; it must be torch.float32, torch.bfloat16 or torch.float16")
        tensors = read_tensors(self.files)
        return {name: tensors.pop(name).to(device, dtype) for name in self.files}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder of safetensors, a GGUF file, or a folder that holds one GGUF file.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the files are not one whole Qwen2 checkpoint. The message lists all that is wrong: shards and
            tensors that are missing, truncated, of another shape or dtype.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path}: give the folder that holds config.json and *.safetensors, or a .gguf file")
    if gguf := find_gguf(path):
        path = convert(gguf)
    shards = find_shards(path)
    return match(path, ModelConfig.read(path / "config.json"), read_headers(path, shards))


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that a folder without `config.json` holds; None for anything else."""
    if path.is_dir() and not (path / "config.json").exists() and len(ggufs := list(path.glob("*.gguf"))) == 1:
        path = ggufs[0]
    return path if path.suffix == ".gguf" and path.is_file() else None


def find_shards(folder: Path) -> list[Path]:
    """The weight files of a folder: those that its index names, or the single file."""
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        raise ValueError(f"{folder}: the folder is empty; a checkpoint has config.json and *.safetensors")
    if "config.json" not in names:
        raise ValueError(f"{folder}: has no config.json, only {', '.join(names[:8])}; a checkpoint needs it")
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if INDEX in names:
        return _indexed(folder)
    if len(safetensors) == 1:
        return [folder / safetensors[0]]
    if safetensors:
        raise ValueError(f"{folder}: {len(safetensors)} safetensors files and no {INDEX} that says which belong")
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise ValueError(
            f"{folder}: its weights are pickled ({', '.join(pickles[:4])}), and opening a pickle can run code; "
            "use the checkpoint's safetensors release, or convert it where you trust it: "
            "model.save_pretrained(folder, safe_serialization=True)"
        )
    raise ValueError(f"{folder}: has config.json but no *.safetensors; fetch the weights")


def _indexed(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({str(where[name]) for name in where})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not an index of shards ({type(error).__name__}: {error})") from None
    for shard in shards:
        # An index is data from elsewhere: it may name files of its own folder only.
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{index}: names the shard {shard!r}; it must be a *.safetensors file of that folder")
    if not shards:
        raise ValueError(f"{index}: names no shards")
    return [folder / shard for shard in shards]


def read_headers(folder: Path, shards: list[Path]) -> dict[Path, Header]:
    """The header of each safetensors file; one error lists all files that are missing or not whole."""
    headers, problems = {}, []
    for shard in shards:
        try:
            headers[shard] = _header(shard)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(_listed(folder, "damaged or missing weight files", problems))
    return headers


def _header(shard: Path) -> Header:
    """Name → (shape, dtype) of a safetensors file, once it is known to be whole."""
    if not shard.exists():
        raise ValueError(f"{shard.name} is missing")
    if not shard.is_file():
        raise ValueError(f"{shard.name} is a folder, not a file")
    size = shard.stat().st_size
    with shard.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{shard.name} is a git-lfs pointer ({size} bytes of text) in place of the weights; "
            "run `git lfs pull`, or `nanoqwen fetch`"
        )
    try:
        # The library checks that header and file fit exactly: a truncated or overlong file does not pass.
        with safe_open(shard, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{shard.name} is truncated or damaged ({size} bytes; {error}); fetch it again") from None


def match(path: Path, config: ModelConfig, headers: dict[Path, Header], problems: Sequence[str] = ()) -> Checkpoint:
    """Fit what the files hold to what the configuration wants, one to one.

    Raises:
        ValueError: they do not fit; the message lists `problems` seen before, and then its own.
    """
    files: dict[str, Path] = {}
    problems = list(problems)
    for shard, header in headers.items():
        for name in header:
            if name in files:
                problems.append(f"{name} is in {files[name].name} and in {shard.name}")
            files[name] = shard
    found = {name: form for header in headers.values() for name, form in header.items()}
    if config.tie_word_embeddings and _HEAD in files:
        # Files may carry the tied head twice. One that differs is a head of its own: like `transformers` (5 and
        # later) and llama.cpp, believe the file, not the flag.
        both = {name: files[name] for name in (_EMBEDDING, _HEAD) if name in files}
        tied = len(both) == 2 and found[_HEAD] == found[_EMBEDDING] and torch.equal(*read_tensors(both).values())
        if tied:
            del files[_HEAD], found[_HEAD]
        else:
            config = replace(config, tie_word_embeddings=False)
    if config.num_hidden_layers > len(found):  # every layer has tensors
        raise ValueError(
            f"{path}: config.json says num_hidden_layers {config.num_hidden_layers}, but there are only "
            f"{len(found)} tensors"
        )
    wanted = config.weight_shapes()
    for name, shape in wanted.items():
        if name not in found:
            why = "; config.json says tie_word_embeddings false, so a head must be there" if name == _HEAD else ""
            problems.append(f"{name} {list(shape)} is missing{why}")
            continue
        have, dtype = found[name]
        if have != shape:
            problems.append(f"{name} has shape {list(have)}; the configuration wants {list(shape)}")
        if dtype not in _DTYPES:
            problems.append(f"{name} has dtype {dtype}; nanoqwen reads {', '.join(_DTYPES)}")
    # Old files carry the rotary frequencies, which follow from the configuration.
    problems += [
        f"{name} is no weight of a Qwen2 model"
        for name in found
        if name not in wanted and not name.endswith("rotary_emb.inv_freq")
    ]
    if problems:
        raise ValueError(_listed(path, "weights and configuration do not fit", problems))
    return Checkpoint(path, config, {name: files[name] for name in wanted})


def read_tensors(files: dict[str, Path]) -> dict[str, Tensor]:
    """The named tensors, mapped from their files."""
    tensors = {}
    for shard in dict.fromkeys(files.values()):
        with safe_open(shard, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in files if files[name] == shard})
    return {name: tensors[name] for name in files}


def _listed(path: Path, what: str, problems: list[str]) -> str:
    more = [f"… and {len(problems) - 20} more"] if len(problems) > 20 else []
    return f"{path}: {what}:\n  " + "\n  ".join(problems[:20] + more)
