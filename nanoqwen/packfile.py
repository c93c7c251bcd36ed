"""The `.nanoqwen` file: a quantised model as a GPU wants it, mapped into memory, checked before it is used.

A header of 256 bytes, a table with an entry for each payload, then the payloads, each at a multiple of 128 bytes and in
the order in which a decode step reads them. Configuration and tokenizer are payloads too: one file is a whole model.
docs/packfile.md gives every byte.
"""

import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from nanoqwen import packing, quantize
from nanoqwen.checkpoint import Checkpoint
from nanoqwen.config import ModelConfig
from nanoqwen.packing import ALIGNMENT, GROUP_SIZE, VALUE_SHUFFLE
from nanoqwen.quantize import HEAD, PROJECTIONS, QuantizedLinear
from nanoqwen.reference import Qwen2
from nanoqwen.tokenizer import Tokenizer

SUFFIX = ".nanoqwen"
MAGIC = b"NANOQWEN"
VERSION = 1
HEADER_BYTES = 256
ENTRY_BYTES = 192

# magic, version, alignment, entry bytes, entries, first payload, file bytes, SHA-256 of the table
_HEADER = struct.Struct("<8s4I2Q32s")
# name, kind, dtype, layout, group, dimensions, 0, shape, offset, bytes, SHA-256 of the payload, 0
_ENTRY = struct.Struct("<96s6I2Q2Q32sQ")
_CRC = struct.Struct("<I")  # the header's last four bytes: CRC-32 of those before

TENSOR, INT4, INT8, SCALES, FILE = range(5)
KINDS = ("tensor", "INT4 words", "INT8 values", "scales", "file")
DTYPES = (torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16)
CONFIG = "config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_EMBEDDING, _HEAD_WEIGHT = "model.embed_tokens.weight", f"{HEAD}.weight"
_PIECE = 1 << 23  # elements of a tensor that are read, worked on and written at a time
_TILE = math.lcm(*(layout.tile[0] for layout in packing.LAYOUTS.values()))


@dataclass(frozen=True)
class Entry:
    """One payload.

    Attributes:
        name: a tensor's name in the quantised model's state, or a file's.
        kind: TENSOR, INT4, INT8, SCALES or FILE.
        layout: id of the order of INT4 words; 0 otherwise.
        group: of INT4, INT8 and SCALES; 0 otherwise.
        shape: one or two sizes, of what is stored.
        offset, sha256: known once it is written.
    """

    name: str
    kind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: int = 0
    group: int = 0
    offset: int = 0
    sha256: bytes = bytes(32)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """How a model lies in a file: what the reader expects is what the writer wrote."""

    config: ModelConfig
    group: int = GROUP_SIZE
    head_bits: int = 16
    layout: int = VALUE_SHUFFLE
    dtype: torch.dtype = torch.bfloat16

    def matrices(self) -> dict[str, tuple[str, int]]:
        """Of each quantised layer: the weight that it is made from, and its bits."""
        weights = [name for name in self.config.weight_shapes() if name.endswith("_proj.weight")]
        layers = {name.removesuffix(".weight"): (name, 4) for name in weights}
        assert {name.rpartition(".")[2] for name in layers} == set(PROJECTIONS)
        if self.head_bits == 8:
            layers[HEAD] = (_EMBEDDING if self.config.tie_word_embeddings else _HEAD_WEIGHT, 8)
        return layers

    def tensors(self) -> list[Entry]:
        """Every tensor, in the order in which a decode step reads them.

        Raises:
            ValueError: a matrix with columns that are no multiple of the group.
        """
        shapes, matrices, entries = self.config.weight_shapes(), self.matrices(), []
        for name in [*shapes, *([_HEAD_WEIGHT] if HEAD in matrices and _HEAD_WEIGHT not in shapes else [])]:
            layer = name.removesuffix(".weight")
            if layer not in matrices:
                entries.append(Entry(name, TENSOR, self.dtype, shapes[name]))
                continue
            source, bits = matrices[layer]
            rows, cols = shapes[source]
            quantize.check_columns(cols, self.group, source)
            if bits == 4:
                shape = packing.words_shape(rows, cols, self.layout)
                entries.append(Entry(f"{layer}.words", INT4, torch.int32, shape, self.layout, self.group))
            else:
                entries.append(Entry(f"{layer}.words", INT8, torch.int8, (rows, cols), 0, self.group))
            scales = (rows, cols // self.group)
            entries.append(Entry(f"{layer}.scales", SCALES, torch.float16, scales, 0, self.group))
        return entries


# Writing


@dataclass(frozen=True)
class Written:
    """What `write` made: the file, its bytes, and the seconds it took."""

    path: Path
    nbytes: int
    seconds: float


def write(
    checkpoint: Checkpoint,
    path: str | Path,
    group: int = GROUP_SIZE,
    method: str = "mse",
    head_bits: int = 16,
    layout: int = VALUE_SHUFFLE,
    progress: bool = False,
) -> Written:
    """Quantise a checkpoint into a `.nanoqwen` file, one tensor after another.

    Tensors pass through memory in pieces, so a model needs no more of it than a small one. The file gets its name once
    it is whole and on the disk; before, it is `PATH.partial`, which the next run starts afresh.

    Args:
        group, method, head_bits, layout: as `quantize.quantize_model` takes them.

    Raises:
        ValueError: settings that do not fit the model, or weights that cannot be quantised; the message names them.
        OSError: the file cannot be written, another run is writing it, or the disk has too little room.
    """
    started, path = time.perf_counter(), Path(path)
    quantize.check_settings(group, method)
    if head_bits not in (16, 8):
        raise ValueError(f"head_bits is {head_bits!r}; it must be 16 or 8")
    if path.is_dir() or not path.parent.is_dir():
        raise OSError(f"{path}: " + ("is a folder" if path.is_dir() else f"there is no folder {path.parent}"))
    Tokenizer.load(checkpoint.tokenizer_path)  # one that cannot be read must not get into a file
    plan = Plan(checkpoint.config, group, head_bits, layout, _sixteen_bits(checkpoint))
    files = {CONFIG: json.dumps(checkpoint.config.to_dict()).encode()}
    folder = checkpoint.tokenizer_path
    files |= {name: (folder / name).read_bytes() for name in TOKENIZER if (folder / name).is_file()}
    entries = [Entry(name, FILE, torch.uint8, (len(text),)) for name, text in files.items() if text]
    entries = _placed([*entries, *plan.tensors()])
    size = _aligned(entries[-1].offset + entries[-1].nbytes)
    if (free := shutil.disk_usage(path.parent).free) < size:
        raise OSError(f"{path.parent} has room for {free / 1e9:.2f} GB, and {size / 1e9:.2f} GB are needed")
    partial = path.with_name(path.name + ".partial")
    lock = FileLock(path.with_name(path.name + ".lock"), timeout=0)
    try:
        with lock:
            try:
                payloads = _payloads(checkpoint, plan, files, method)
                _write(partial, entries, payloads, size, progress)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
                Path(lock.lock_file).unlink(missing_ok=True)
    except TimeoutError:
        raise OSError(f"{path} is being written by another process; wait for it, or give another name") from None
    _sync_folder(path.parent)
    return Written(path, size, time.perf_counter() - started)


def _write(file: Path, entries: list[Entry], payloads, size: int, progress: bool) -> None:
    done = []
    with (
        file.open("wb") as out,
        tqdm(total=size, desc=file.stem, unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        for entry, pieces in zip(entries, payloads, strict=True):
            out.write(bytes(entry.offset - out.tell()))
            digest, written = hashlib.sha256(), 0
            for piece in pieces:
                written += out.write(piece)
                digest.update(piece)
                bar.update(entry.offset + written - bar.n)
            if written != entry.nbytes:
                raise RuntimeError(f"{entry.name} came out as {written} bytes; the table says {entry.nbytes}")
            done.append(replace(entry, sha256=digest.digest()))
        out.write(bytes(size - out.tell()))
        out.seek(0)
        out.write(_front(done, size))
        out.flush()
        os.fsync(out.fileno())
        bar.update(size - bar.n)


def _payloads(checkpoint: Checkpoint, plan: Plan, files: dict[str, bytes], method: str) -> Iterator[Iterator]:
    """The bytes of each entry, in pieces, in the plan's order."""
    yield from ([text] for text in files.values() if text)
    matrices = plan.matrices()
    for entry in plan.tensors():
        layer, _, leaf = entry.name.rpartition(".")
        if entry.kind == TENSOR:
            yield _kept(checkpoint, entry.name, plan.dtype)
        elif leaf == "words":
            scales: list[Tensor] = []
            yield _quantised(checkpoint, plan, *matrices[layer], method, scales)
        else:  # the writer has been through the words by now
            yield map(_raw, scales)


def _kept(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
    for piece in _pieces(checkpoint, name):
        piece = piece.to(dtype)
        if not piece.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity, or a number that {dtype} cannot hold")
        yield _raw(piece)


def _quantised(
    checkpoint: Checkpoint, plan: Plan, name: str, bits: int, method: str, scales: list[Tensor]
) -> Iterator[memoryview]:
    """The words of a matrix; its scales are put into `scales`."""
    for piece in _pieces(checkpoint, name):
        made = quantize.quantize(piece, plan.group, method if bits == 4 else "rtn", bits, name)
        scales.append(made.scales)
        yield _raw(packing.pack(made.values, plan.layout) if bits == 4 else made.values)


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """A weight, some rows at a time: as many as fill the tiles of every layout."""
    rows, *cols = checkpoint.config.weight_shapes()[name]
    some = max(1, _PIECE // math.prod(cols) // _TILE) * _TILE
    for start in range(0, rows, some):
        # Each time opened anew: what was read of a mapped file counts as ours until the mapping goes.
        with safe_open(checkpoint.files[name], framework="pt") as file:
            piece = file.get_slice(name)[start : start + some]
        yield piece


def _sixteen_bits(checkpoint: Checkpoint) -> torch.dtype:
    """What the weights that stay are stored in: their own dtype, bf16 where that is fp32."""
    with safe_open(checkpoint.files[_EMBEDDING], framework="pt") as file:
        return torch.float16 if file.get_slice(_EMBEDDING).get_dtype() == "F16" else torch.bfloat16


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")


def _aligned(offset: int) -> int:
    return offset + -offset % ALIGNMENT


def _placed(entries: list[Entry]) -> list[Entry]:
    placed, offset = [], _aligned(HEADER_BYTES + ENTRY_BYTES * len(entries))
    for entry in entries:
        placed.append(replace(entry, offset=offset))
        offset = _aligned(offset + entry.nbytes)
    return placed


def _front(entries: list[Entry], size: int) -> bytes:
    """Header and table."""
    table = b"".join(
        _ENTRY.pack(
            entry.name.encode(),
            entry.kind,
            DTYPES.index(entry.dtype),
            entry.layout,
            entry.group,
            len(entry.shape),
            0,
            *(*entry.shape, 0)[:2],
            entry.offset,
            entry.nbytes,
            entry.sha256,
            0,
        )
        for entry in entries
    )
    digest = hashlib.sha256(table).digest()
    header = _HEADER.pack(MAGIC, VERSION, ALIGNMENT, ENTRY_BYTES, len(entries), entries[0].offset, size, digest)
    header += bytes(HEADER_BYTES - len(header) - _CRC.size)
    return header + _CRC.pack(zlib.crc32(header)) + table


def _sync_folder(folder: Path) -> None:
    """Bring a new name to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Reading


@dataclass(frozen=True)
class PackFile:
    """An open `.nanoqwen` file, wholly checked. Its tensors are views of the mapped file.

    Attributes:
        plan: configuration, group, head_bits, layout, and the dtype of what is not quantised.
        entries: by name.
        data: the file's bytes (uint8). The mapping is private: what is written to a tensor never reaches the file.
    """

    path: Path
    plan: Plan
    entries: dict[str, Entry]
    data: Tensor

    @property
    def config(self) -> ModelConfig:
        return self.plan.config

    def tensor(self, name: str) -> Tensor:
        """The tensor or file of this name; nothing is copied.

        Raises:
            KeyError: there is none.
        """
        if name not in self.entries:
            raise KeyError(f"{self.path} has no tensor {name!r}")
        entry = self.entries[name]
        return self.data[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file carries.

        Raises:
            ValueError: it cannot be read as one.
        """
        with tempfile.TemporaryDirectory() as folder:
            for name in TOKENIZER:
                if name in self.entries:
                    Path(folder, name).write_bytes(self.tensor(name).numpy().tobytes())
            try:
                return Tokenizer.load(folder)
            except ValueError as error:
                raise ValueError(f"{self.path}: {str(error).replace(folder + os.sep, '')}") from None

    def model(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Qwen2:
        """The decoder with quantised layers. `dtype` is that of the other weights and of the arithmetic.

        A GPU gets the payloads straight from the mapped file; there its words are brought into its kernels' layout.
        """
        plan, dtype = self.plan, dtype or self.plan.dtype
        with torch.device("meta"):
            model = Qwen2(plan.config)
            for name, (_, bits) in plan.matrices().items():
                old = model.get_submodule(name)
                form = (old.in_features, old.out_features, old.bias is not None, plan.group, bits, plan.layout, dtype)
                model.set_submodule(name, QuantizedLinear(*form))
        state = {}
        for entry in self.entries.values():
            if entry.kind != FILE:
                tensor = self.tensor(entry.name).to(device)  # first, so that nothing is copied on the host
                state[entry.name] = tensor.to(dtype) if entry.kind == TENSOR else tensor
        tied = plan.config.tie_word_embeddings and plan.head_bits == 16
        if tied:
            state[_HEAD_WEIGHT] = state[_EMBEDDING]
        model.load_state_dict(state, assign=True)
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        for layer in model.modules():
            if isinstance(layer, QuantizedLinear) and layer.bits == 4 and layer.words.is_cuda:
                layer.relayout(quantize.best_layout(layer.in_features, layer.words.device))
        return model.requires_grad_(False).eval()


def load(
    path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[Qwen2, Tokenizer]:
    """The quantised decoder and tokenizer of a `.nanoqwen` file.

    Raises:
        FileNotFoundError, ValueError: as `open_packfile`.
    """
    file = open_packfile(path)
    tokenizer = file.tokenizer()
    model = file.model(dtype, device)
    model.num_tokens = min(tokenizer.num_tokens, file.config.vocab_size)
    return model, tokenizer


def open_packfile(path: str | Path) -> PackFile:
    """Open a `.nanoqwen` file; every byte is checked before any is handed out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, of another version, damaged, or not one whole model; the message says what is wrong
            with which part. Sizes are compared with the file's own before anything of that size is read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: is a folder, not a .nanoqwen file")
    try:
        entries, data = _checked(path)
        return PackFile(path, _plan_of(entries, data), entries, data)
    except _Refused as error:
        raise ValueError(f"{path}: {error}") from None


class _Refused(ValueError):
    """What is wrong with a file, without the file's name."""


def _checked(path: Path) -> tuple[dict[str, Entry], Tensor]:
    """The table and the mapped bytes of a file whose every byte is as its writer left it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        front = file.read(HEADER_BYTES)
        if front[:8] != MAGIC:
            raise _Refused(f"is no .nanoqwen file: it starts with {front[:8]!r}, not {MAGIC!r}")
        if len(front) < HEADER_BYTES:
            raise _Refused(f"is truncated: {size} bytes, less than the header's {HEADER_BYTES}")
        _, version, alignment, entry_bytes, count, first, nbytes, digest = _HEADER.unpack_from(front)
        if version != VERSION:
            raise _Refused(f"has version {version}; this nanoqwen reads {VERSION}: pack the model again")
        if zlib.crc32(front[: -_CRC.size]) != _CRC.unpack_from(front, HEADER_BYTES - _CRC.size)[0]:
            raise _Refused("its header is damaged (wrong CRC-32); pack the model again")
        if (alignment, entry_bytes) != (ALIGNMENT, ENTRY_BYTES) or any(front[_HEADER.size : -_CRC.size]):
            raise _Refused(
                f"its header says alignment {alignment}, entries of {entry_bytes} bytes; not version {VERSION}"
            )
        if nbytes != size:
            raise _Refused(f"is truncated or overlong: the header says {nbytes} bytes, the file has {size}")
        end = HEADER_BYTES + ENTRY_BYTES * count
        if not count or end > size or first != _aligned(end):
            raise _Refused(f"its table of {count} entries, up to byte {end}, does not fit the file of {size} bytes")
        table = file.read(end - HEADER_BYTES)
        if hashlib.sha256(table).digest() != digest:
            raise _Refused("its table is damaged (wrong SHA-256); pack the model again")
        entries = _entries(table, size)
        data = np.memmap(file, np.uint8, mode="c", shape=(size,))
    at = end
    for entry in entries.values():
        if data[at : entry.offset].any():
            raise _Refused(f"bytes before {entry.name} are not zero")
        at = entry.offset + entry.nbytes
        if hashlib.sha256(data[entry.offset : at]).digest() != entry.sha256:
            raise _Refused(f"{entry.name} is damaged (wrong SHA-256); pack the model again")
    if data[at:].any() or _aligned(at) != size:
        raise _Refused(f"bytes follow the last tensor, which ends at byte {at}")
    return entries, torch.from_numpy(data)


def _entries(table: bytes, size: int) -> dict[str, Entry]:
    """The table, each entry possible by itself and behind the one before."""
    entries: dict[str, Entry] = {}
    end = _aligned(HEADER_BYTES + len(table))
    for fields in _ENTRY.iter_unpack(table):
        raw, kind, dtype, layout, group, dims, zero, *shape, offset, nbytes, sha256, zero2 = fields
        try:
            name = raw.rstrip(b"\0").decode()
        except UnicodeDecodeError:
            raise _Refused(f"a tensor's name is not UTF-8: {raw[:40]!r}") from None
        if not name.isprintable() or not name or name in entries:
            raise _Refused(f"a tensor's name is {name!r}; names are printable, and no two the same")
        if kind >= len(KINDS) or dtype >= len(DTYPES) or zero or zero2:
            raise _Refused(f"{name} has kind {kind} and dtype {dtype}; this nanoqwen does not know them")
        if kind == INT4 and layout not in packing.LAYOUTS:
            known = ", ".join(map(str, packing.LAYOUTS))
            raise _Refused(f"{name} has layout id {layout}; this nanoqwen knows {known}")
        if dims not in (1, 2) or 0 in shape[:dims] or any(shape[dims:]):
            raise _Refused(
                f"{name} has shape {shape} in {dims} dimensions; it must have one or two sizes of at least 1"
            )
        entry = Entry(name, kind, DTYPES[dtype], tuple(shape[:dims]), layout, group, offset, sha256)
        if nbytes != entry.nbytes:  # Python's whole numbers do not overflow
            raise _Refused(f"{name} of shape {list(entry.shape)} takes {entry.nbytes} bytes; the table says {nbytes}")
        if offset % ALIGNMENT:
            raise _Refused(f"{name} starts at byte {offset}, no multiple of {ALIGNMENT}")
        if offset + nbytes > size:
            raise _Refused(f"{name} ends at byte {offset + nbytes}, past the end of the file at {size}")
        if offset != end:
            what = "overlaps what is before it" if offset < end else "leaves a gap before it"
            raise _Refused(f"{name} starts at byte {offset}, not {end}: it {what}")
        end = _aligned(offset + nbytes)
        entries[name] = entry
    return entries


def _plan_of(entries: dict[str, Entry], data: Tensor) -> Plan:
    """The plan that the table follows: its configuration's tensors, all of them and no others."""
    files = [name for name, entry in entries.items() if entry.kind == FILE]
    if unknown := [name for name in files if name not in (CONFIG, *TOKENIZER)]:
        raise _Refused(f"carries a file {unknown[0]!r}; it may carry {CONFIG}, {', '.join(TOKENIZER)}")
    if missing := [name for name in (CONFIG, TOKENIZER[0]) if name not in files]:
        raise _Refused(f"has no {missing[0]}")
    if list(entries)[: len(files)] != files:
        raise _Refused("its files do not come before its tensors")
    for entry in (entries[name] for name in files):
        plain = Entry(entry.name, FILE, torch.uint8, (entry.nbytes,), 0, 0, entry.offset, entry.sha256)
        if entry != plain:
            raise _Refused(f"holds {_words(entry)}, not plain bytes")
    entry = entries[CONFIG]
    try:
        values = json.loads(bytes(data[entry.offset : entry.offset + entry.nbytes].numpy()))
        if not isinstance(values, dict):
            raise ValueError(f"holds a {type(values).__name__}, not an object")
        config = ModelConfig.from_dict(values, where=CONFIG)
    except (ValueError, TypeError, RecursionError) as error:
        raise _Refused(f"its configuration cannot be read ({error})") from None
    tensors = [entry for entry in entries.values() if entry.kind != FILE]
    if config.num_hidden_layers > len(tensors):
        raise _Refused(f"its configuration has {config.num_hidden_layers} layers, and there are {len(tensors)} tensors")
    embedding, packed = entries.get(_EMBEDDING), next((entry for entry in tensors if entry.kind == INT4), None)
    if embedding is None or packed is None:
        raise _Refused("has no embedding, or no INT4 matrix")
    head_bits = 8 if f"{HEAD}.words" in entries else 16
    try:
        quantize.check_settings(packed.group)
        plan = Plan(config, packed.group, head_bits, packed.layout, embedding.dtype)
        wanted = plan.tensors()
    except _Refused:
        raise
    except ValueError as error:
        raise _Refused(str(error)) from None
    if plan.dtype not in (torch.float16, torch.bfloat16):
        raise _Refused(f"{_EMBEDDING} has dtype {plan.dtype}; it must have 16 bits")
    have = [replace(entry, offset=0, sha256=bytes(32)) for entry in tensors]
    for found, want in zip(have, wanted, strict=False):
        if found != want:
            raise _Refused(f"holds {_words(found)} where its configuration wants {_words(want)}")
    if len(have) != len(wanted):
        raise _Refused(f"holds {len(have)} tensors; its configuration wants {len(wanted)}")
    return plan


def _words(entry: Entry) -> str:
    form = f"{KINDS[entry.kind]} of {entry.dtype}, layout {entry.layout}, group {entry.group}"
    return f"{entry.name} {list(entry.shape)} ({form})"
