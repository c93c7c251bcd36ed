"""A GGUF file, turned once into the Hugging Face folder that everything else reads.

llama.cpp's formats are read by its own `gguf` library; the result is bf16 safetensors, so the second load is a memory
map and `transformers` can open the same folder. Formats: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

import hashlib
import json
import os
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from nanoqwen.config import ModelConfig
from nanoqwen.paths import cache_dir

VERSION = 1
"""Part of a converted folder's name: raise it when the conversion changes, and files are converted anew."""

_CHUNK = 1 << 22  # weights dequantised at a time: bounds the fp32 copies, and keeps both cores busy

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Qwen2's own pre-tokenizer: contractions, words, single digits, punctuation, newlines, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# A GGUF calls these control tokens; the official tokenizer adds them without the `special` mark.
_UNMARKED = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types of the GGUF specification


def convert(path: str | Path) -> Path:
    """The Hugging Face folder made from this GGUF: config, bf16 safetensors, tokenizer with chat template.

    Made on the first call and kept in the cache under the file's SHA-256. Safe between processes; a killed conversion
    leaves nothing under the final name.

    Raises:
        ValueError: not a whole Qwen2 GGUF: truncated, another architecture, a tensor missing, of another shape or
            of a type that the `gguf` library cannot dequantise; the message names it.
        OSError: the cache cannot hold the result.
    """
    path = Path(path)
    root = cache_dir() / "converted"
    folder = root / f"{file_sha256(path)[:16]}-v{VERSION}"
    if (folder / "config.json").is_file():
        return folder
    gguf = open_gguf(path)
    config, sources = plan(gguf, path)
    # Only now does anything touch the disk.
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if (folder / "config.json").is_file():  # another process made it meanwhile
                return folder
            shutil.rmtree(temporary, ignore_errors=True)  # a killed conversion's
            temporary.mkdir()
            try:
                write_tokenizer(gguf, path, temporary)
                write_config(gguf, path, config, temporary)
                save_file(weights(config, sources), temporary / "model.safetensors", metadata={"format": "pt"})
                os.replace(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # a full disk surfaces as either
        size = 2 * sum(int(np.prod(shape)) for shape in config.weight_shapes().values())
        raise OSError(
            f"{path.name} could not be converted into {root} ({error}); it needs {size / 1e9:.1f} GB there: "
            "free some space, or set NANOQWEN_CACHE to another folder"
        ) from None
    return folder


def open_gguf(path: Path) -> GGUFReader:
    """Read a GGUF's metadata and tensor table; the tensors stay on disk until they are touched.

    Raises:
        ValueError: not a GGUF, or not all of one.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise ValueError(f"{path}: starts with {start!r}, not with b'GGUF': not a GGUF file (fetch it again?)")
    try:
        return _Reader(path)
    except Exception as error:  # damaged bytes surface in the library as anything from IndexError to OverflowError
        raise ValueError(f"{path}: truncated or damaged ({error or type(error).__name__}); fetch it again") from None


class _Reader(GGUFReader):
    """The library's reader, with two of its steps replaced.

    It makes several numpy arrays for each of the 300,000 strings of a vocabulary (7 s for Qwen's); here arrays are read
    in one pass. And a tensor that lies outside the file, or has a type the library does not know, is named.
    """

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if item is GGUFValueType.STRING and self.byte_order == "I":
            data, end, parts = memoryview(self.data), start, []
            read = struct.Struct("=Q").unpack_from
            for _ in range(count):
                begin = end + 8
                end = begin + read(data, end)[0]
                if end > len(data):
                    raise ValueError(f"a string ends at byte {end}, the file at byte {len(data)}")
                parts.append(data[begin:end])
            return end - orig_offs, parts, list(range(count)), [GGUFValueType.ARRAY, item]
        if item in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[item], count)
            if len(values) < count:
                raise ValueError(f"an array of {count} values goes past the end of the file")
            return 12 + values.nbytes, [values], [0], [GGUFValueType.ARRAY, item]
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs, fields):
        for field in fields:
            _, name, _, dims, raw_type, offset = field.parts
            name = bytes(name).decode()
            try:
                block, size = GGML_QUANT_SIZES[GGMLQuantizationType(int(raw_type[0]))]
            except (ValueError, KeyError):
                raise ValueError(f"tensor {name} has type {raw_type[0]}, which is not known here") from None
            end = start_offs + int(offset[0]) + int(np.prod(dims.astype(object))) * size // block
            if end > len(self.data):
                raise ValueError(f"tensor {name} ends at byte {end}, the file at byte {len(self.data)}")
        super()._build_tensors(start_offs, fields)


def plan(gguf: GGUFReader, path: Path) -> tuple[ModelConfig, dict[str, object]]:
    """The configuration a GGUF describes, and for each Hugging Face weight its tensor: all checked, none read.

    Raises:
        ValueError: the architecture is not qwen2, or tensors are missing, unknown, misshapen or of a type that
            cannot be dequantised; the message lists them.
    """
    if (kind := _value(gguf, path, "general.architecture", str)) != "qwen2":
        raise ValueError(f"{path}: general.architecture is {kind!r}; nanoqwen reads 'qwen2' (Qwen2 and Qwen2.5)")
    found = {_huggingface_name(tensor.name): tensor for tensor in gguf.tensors}
    if "model.embed_tokens.weight" not in found:
        raise ValueError(f"{path}: tensor token_embd.weight is missing")
    # Every layer has tensors: a damaged count must not make a list of a billion names.
    if (layers := _value(gguf, path, "qwen2.block_count", int)) > len(found):
        raise ValueError(f"{path}: its qwen2.block_count is {layers}, but it holds only {len(found)} tensors")
    heads = _value(gguf, path, "qwen2.attention.head_count", int)
    tokens = _value(gguf, path, "tokenizer.ggml.tokens", list)
    stops = [_token(gguf, path, "eos", len(tokens)), *(i for i, t in enumerate(tokens) if t == "<|endoftext|>")]
    config = ModelConfig.from_dict(
        {
            "model_type": "qwen2",
            "vocab_size": int(found["model.embed_tokens.weight"].shape[-1]),
            "hidden_size": _value(gguf, path, "qwen2.embedding_length", int),
            "intermediate_size": _value(gguf, path, "qwen2.feed_forward_length", int),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": _value(gguf, path, "qwen2.attention.head_count_kv", int, heads),
            "head_dim": _value(gguf, path, "qwen2.attention.key_length", int, 0),
            "rms_norm_eps": float(
                f"{_value(gguf, path, 'qwen2.attention.layer_norm_rms_epsilon', float):.6g}"
            ),  # an fp32
            "rope_theta": _value(gguf, path, "qwen2.rope.freq_base", float, 10000.0),
            "rope_scaling": _rope_scaling(gguf, path),
            "max_position_embeddings": _value(gguf, path, "qwen2.context_length", int),
            # llama.cpp ties by leaving output.weight out. The official 0.5B is a tied model whose file carries a
            # head of its own, quantised more finely than the embedding: that head is what llama.cpp runs.
            "tie_word_embeddings": "lm_head.weight" not in found,
            "eos_token_id": list(dict.fromkeys(i for i in stops if i is not None)) or None,
        },
        where=str(path),
    )
    shapes, problems = config.weight_shapes(), []
    for name in shapes.keys() - found.keys():
        problems.append(f"{name} is missing")
    for name, tensor in found.items():
        # GGUF lists the fastest dimension first. Qwen2 rotates halves, so unlike Llama's its q and k rows are not
        # permuted in GGUF.
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if name not in shapes:
            problems.append(f"{tensor.name} is no tensor of a Qwen2 model")
        elif shape != shapes[name]:
            problems.append(f"{tensor.name} has shape {shape}; the configuration wants {shapes[name]}")
    for kind in {tensor.tensor_type for tensor in found.values()}:
        sample = next(tensor for tensor in found.values() if tensor.tensor_type == kind)
        try:
            dequantize(sample.data.reshape(-1, sample.data.shape[-1])[:1], kind)
        except NotImplementedError:
            problems.append(f"{sample.name} has type {kind.name}, which the gguf library cannot dequantise")
    if problems:
        raise ValueError(f"{path}: not a readable Qwen2 model:\n  " + "\n  ".join(sorted(problems)))
    return config, {name: found[name] for name in shapes}


def weights(config: ModelConfig, sources: dict) -> dict[str, Tensor]:
    """Dequantise every tensor to bf16 (rounded to nearest), on all cores."""
    result = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in config.weight_shapes().items()}

    def fill(name: str, start: int, rows: int) -> None:
        source, target = sources[name], result[name].view(-1, result[name].shape[-1])
        data = source.data.reshape(len(target), -1)[start : start + rows]
        values = np.require(dequantize(data, source.tensor_type), requirements="W")  # F32 comes as the file itself
        target[start : start + rows] = torch.from_numpy(values.reshape(len(data), -1))

    jobs = []
    for name, target in result.items():
        count, rows = target.numel() // target.shape[-1], max(1, _CHUNK // target.shape[-1])
        jobs += [(name, start, rows) for start in range(0, count, rows)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy lets go of the interpreter's lock while it computes
        for _ in pool.map(fill, *zip(*jobs, strict=True)):
            pass
    return result


def write_config(gguf: GGUFReader, path: Path, config: ModelConfig, folder: Path) -> None:
    """`config.json` and `generation_config.json`, as `transformers` writes them."""
    stops = list(config.eos_token_id)
    values = {**config.to_dict(), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    generation = {"eos_token_id": stops or None, "do_sample": False}
    for ours, theirs in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token := _token(gguf, path, theirs, config.vocab_size)) is not None:
            generation[ours] = token
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(gguf: GGUFReader, path: Path, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json` from the GGUF's vocabulary, merges, token types and template.

    Raises:
        ValueError: the vocabulary is not Qwen2's kind of byte-level BPE, or its parts do not fit together.
    """
    kind = _value(gguf, path, "tokenizer.ggml.model", str), _value(gguf, path, "tokenizer.ggml.pre", str, "qwen2")
    if kind != ("gpt2", "qwen2"):
        raise ValueError(f"{path}: tokenizer.ggml.model and .pre are {kind}; nanoqwen reads ('gpt2', 'qwen2')")
    tokens = _value(gguf, path, "tokenizer.ggml.tokens", list)
    types = _value(gguf, path, "tokenizer.ggml.token_type", list, [1] * len(tokens))
    merges = _value(gguf, path, "tokenizer.ggml.merges", list)
    if len(types) != len(tokens):
        raise ValueError(f"{path}: {len(tokens)} tokens but {len(types)} token types")
    real = {text: i for i, (text, type_) in enumerate(zip(tokens, types, strict=True)) if type_ != _UNUSED}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=real, merges=[tuple(merge.split(" ")) for merge in merges]))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: its vocabulary and merges do not fit together ({error})") from None
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    added = {i: text for text, i in real.items() if types[i] in (_CONTROL, _USER_DEFINED)}
    special = {i: types[i] == _CONTROL and text not in _UNMARKED for i, text in added.items()}
    tokenizer.add_tokens([AddedToken(text, special=special[i], normalized=False) for i, text in added.items()])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)

    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": _value(gguf, path, "qwen2.context_length", int),
        "split_special_tokens": False,
        "bos_token": None,
        "unk_token": None,
        "added_tokens_decoder": {str(i): {"content": t, "special": special[i], **flags} for i, t in added.items()},
    }
    for ours, theirs in (("eos_token", "eos"), ("pad_token", "padding")):
        if (token := _token(gguf, path, theirs, len(tokens))) is not None:
            settings[ours] = tokens[token]
    if template := _value(gguf, path, "tokenizer.chat_template", str, ""):
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def file_sha256(path: Path) -> str:
    """The file's SHA-256, remembered while its size, time and inode stay the same."""
    stat = path.stat()
    key = f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"
    memory = cache_dir() / "converted" / "hashes" / key
    if memory.is_file() and len(known := memory.read_text()) == 64:
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_name(f"{key}.{os.getpid()}.tmp")
        temporary.write_text(digest)
        os.replace(temporary, memory)
    except OSError:
        pass  # only a shortcut is lost
    return digest


def _huggingface_name(name: str) -> str:
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in fixed:
        return fixed[name]
    parts = name.split(".")  # blk.<layer>.<name>.<weight or bias>
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return name


def _value(gguf: GGUFReader, path: Path, key: str, kind: type, default=None):
    """The metadata under `key`, once it is known to be a `kind` (for a list: of strings or of numbers)."""
    if (field := gguf.fields.get(key)) is None:
        if default is None:
            raise ValueError(f"{path}: its metadata has no {key}")
        return default
    try:
        value = field.contents()
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: its {key} is damaged ({error}); fetch it again") from None
    if not isinstance(value, (float, int) if kind is float else kind):
        raise ValueError(f"{path}: its {key} is {value!r:.80}, but it must be of type {kind.__name__}")
    return value


def _token(gguf: GGUFReader, path: Path, name: str, count: int) -> int | None:
    """The id that the metadata gives for the `name` (eos, padding, bos) token, if any."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in gguf.fields:
        return None
    if not 0 <= (token := _value(gguf, path, key, int)) < count:
        raise ValueError(f"{path}: its {key} is {token}, outside its {count} tokens")
    return token


def _rope_scaling(gguf: GGUFReader, path: Path) -> dict | None:
    kind = _value(gguf, path, "qwen2.rope.scaling.type", str, "none")
    return None if kind == "none" else {"rope_type": kind}
