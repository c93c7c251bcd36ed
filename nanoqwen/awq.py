"""AWQ checkpoints: read with the same care as any other, and made into weights that the reference decoder runs:
dequantised, or packed for our kernels.

AWQ (Lin et al., 2023, arXiv 2306.00978) stores a projection y = W x + b as

    qweight (in, out / 8) int32          eight neighbouring outputs a word, 4 bits each
    qzeros  (in / group, out / 8) int32  zero-points, packed alike
    scales  (in / group, out) fp16

and means W[n, k] = (q[k, n] − z[k / group, n]) · s[k / group, n]. Embedding, norms, biases and head stay in 16 bits.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen.checkpoint import Header, find_shards, match, read_headers, read_tensors
from nanoqwen.config import ModelConfig, read_object
from nanoqwen.packing import FRAGMENT, VALUE_SHUFFLE, layout_of, pack
from nanoqwen.quantize import QuantizedLinear
from nanoqwen.reference import Qwen2

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column j of a word's eight stands in nibble ORDER[j]
GROUPS = (32, 64, 128)
_PACKED = ("qweight", "qzeros", "scales")
_SIXTEEN_BIT_ANYWAY = {"lm_head", "embed_tokens", "model.embed_tokens"}


@dataclass(frozen=True)
class AwqLinear:
    """One projection as it is stored: `group` rows of `qweight` share a row of `qzeros` and of `scales`."""

    qweight: Tensor  # (in, out / 8) int32
    qzeros: Tensor  # (in / group, out / 8) int32
    scales: Tensor  # (in / group, out) fp16
    bias: Tensor | None  # (out)
    group: int

    def dequantize(self, dtype: torch.dtype = torch.float16) -> Tensor:
        """The weight (out, in) that `nn.Linear` holds, by `dequantize_reference`."""
        return dequantize_reference(self.qweight, self.qzeros, self.scales, dtype)

    def repack(self, layout: int = FRAGMENT) -> tuple[Tensor, Tensor, Tensor]:
        """The same numbers as our kernels take them: words of `layout`, scales and zero-points (out, in / group).

        Values and zero-points, here −8…7 (int8), are AWQ's 0…15 less 8: their differences are the same.

        Raises:
            ValueError: inputs that do not fill the tiles of the layout.
        """
        values, zeros = ((unpack(words) - 8).to(torch.int8).T.contiguous() for words in (self.qweight, self.qzeros))
        return pack(values, layout), self.scales.T.contiguous(), zeros


@dataclass(frozen=True)
class AwqCheckpoint:
    """A checked AWQ checkpoint.

    Attributes:
        path: the Hugging Face folder.
        config: agrees with the files, as in `Checkpoint`.
        group: rows that share a zero-point and a scale.
        files: stored tensor's name → the safetensors file that holds it.
    """

    path: Path
    config: ModelConfig
    group: int
    files: dict[str, Path]

    @property
    def tokenizer_path(self) -> Path:
        """The folder with `tokenizer.json` and `tokenizer_config.json`."""
        return self.path

    def linears(self, device: str | torch.device = "cpu") -> dict[str, AwqLinear]:
        """Every projection, packed, by its name without `.weight`. On the CPU the tensors are views of the file.

        Raises:
            ValueError: scales that are NaN or infinite; the message names the tensors.
        """
        bases = projections(self.config)
        wanted = (f"{base}.{part}" for base in bases for part in (*_PACKED, "bias"))
        tensors = read_tensors({name: self.files[name] for name in wanted if name in self.files})
        if broken := [name for name in tensors if name.endswith("scales") and not tensors[name].isfinite().all()]:
            raise ValueError(f"{self.path}: NaN or infinity in {', '.join(broken[:8])}; fetch the checkpoint again")
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        return {
            base: AwqLinear(
                *(tensors[f"{base}.{part}"] for part in _PACKED), bias=tensors.get(f"{base}.bias"), group=self.group
            )
            for base in bases
        }

    def rest(self, dtype: torch.dtype = torch.float16, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """What is not quantised and belongs to no projection: embedding, norms, and a head of its own."""
        bases = projections(self.config)
        names = [name for name in self.config.weight_shapes() if name.rpartition(".")[0] not in bases]
        tensors = read_tensors({name: self.files[name] for name in names})
        return {name: tensors[name].to(device).to(dtype) for name in names}

    def weights(self, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Every weight dequantised, under the names and with the shapes of `config.weight_shapes()`.

        Raises:
            ValueError: a `dtype` other than float32, bfloat16, float16; scales that are NaN or infinite.
        """
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {dtype}; it must be torch.float32, torch.bfloat16 or torch.float16")
        linears, weights = self.linears(), self.rest(dtype, device)
        for base, linear in linears.items():
            packed = (tensor.to(device) for tensor in (linear.qweight, linear.qzeros, linear.scales))
            weights[f"{base}.weight"] = dequantize_reference(*packed, dtype)
            if linear.bias is not None:
                weights[f"{base}.bias"] = linear.bias.to(device, dtype)
        return {name: weights[name] for name in self.config.weight_shapes()}

    def model(self, dtype: torch.dtype = torch.float16, device: str | torch.device = "cpu") -> Qwen2:
        """The decoder with its projections packed, in the layout of our kernels (`QuantizedLinear`).

        Args:
            dtype: of the other weights and of the arithmetic.

        Raises:
            ValueError: as `linears`.
        """
        state = self.rest(dtype, device)
        with torch.device("meta"):
            model = Qwen2(self.config)
        for base, packed in self.linears(device).items():
            old = model.get_submodule(base)
            cols, rows, bias = old.in_features, old.out_features, packed.bias is not None
            layout = FRAGMENT if cols % layout_of(FRAGMENT).tile[1] == 0 else VALUE_SHUFFLE
            layer = QuantizedLinear(cols, rows, bias, self.group, 4, layout, dtype, "meta", zeros=True)
            model.set_submodule(base, layer)
            parts = dict(zip(("words", "scales", "zeros"), packed.repack(layout), strict=True))
            parts |= {"bias": packed.bias.to(dtype)} if bias else {}
            state |= {f"{base}.{part}": tensor for part, tensor in parts.items()}
        tied = self.config.tie_word_embeddings
        if tied:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state, assign=True)
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model.requires_grad_(False).eval()


def unpack(words: Tensor) -> Tensor:
    """The numbers 0 to 15 of AWQ's words: (rows, cols / 8) int32 → (rows, cols) int32."""
    shifts = 4 * torch.tensor(ORDER, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & 15).flatten(1)  # the mask drops the sign that >> drags along


def dequantize_reference(qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """The weight (out, in) of a packed projection in plain PyTorch: what the kernels are checked against.

    q − z is whole and at most 15, s has eleven bits: their product is exact in fp32, and is rounded once, to `dtype`
    (to nearest, ties to even). For float16 that is what AWQ's own kernels give, which multiply in fp16; float32 is
    the exact weight.

    Args:
        qweight, qzeros, scales: as in `AwqLinear`.
        dtype: float16, bfloat16 or float32.
    """
    group = len(qweight) // len(qzeros)
    zeros, steps = (part.repeat_interleave(group, dim=0) for part in (unpack(qzeros), scales.float()))  # (in, out)
    return ((unpack(qweight) - zeros) * steps).to(dtype).T.contiguous()


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The quantised projections by name, with their (out, in): the matrices of every layer."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in config.weight_shapes().items()
        if name.endswith("_proj.weight")
    }


def is_awq(path: str | Path) -> bool:
    """Whether a folder's `config.json` says that its weights are AWQ's."""
    try:
        values = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        return values["quantization_config"]["quant_method"] == "awq"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_awq(path: str | Path) -> AwqCheckpoint:
    """Open a Hugging Face folder of AWQ weights.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the weights are quantised in a way that is not run here (the message names it), or the files are
            not one whole checkpoint. The message lists all that is wrong, before any tensor is handed out.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise ValueError(f"{path}: give the folder that holds config.json and *.safetensors")
    shards = find_shards(path)
    config, group = _read_config(path / "config.json")
    headers = read_headers(path, shards)
    packed, plain, problems = _split(config, group, headers)
    checkpoint = match(path, config, plain, problems)
    sixteen_bit = {name: file for name, file in checkpoint.files.items() if not name.endswith("_proj.weight")}
    return AwqCheckpoint(path, checkpoint.config, group, sixteen_bit | packed)


def _read_config(path: Path) -> tuple[ModelConfig, int]:
    """The model's shape, and the group size, once the quantisation is known to be one that is run here."""
    values = read_object(path)
    how = values.pop("quantization_config", None)
    if not isinstance(how, dict):
        raise ValueError(f"{path}: has no quantization_config, so these are no AWQ weights; use open_checkpoint")
    if (method := how.get("quant_method")) != "awq":
        raise ValueError(
            f"{path}: the weights are quantised with quant_method {method!r}; nanoqwen runs 'awq': "
            "use the checkpoint's AWQ, bf16 or fp16 release"
        )
    group = how.get("group_size", how.get("q_group_size"))
    bits, version = how.get("bits", how.get("w_bit")), how.get("version", how.get("format"))
    apart = how.get("modules_to_not_convert") or []
    wrong = []
    if bits != 4 or isinstance(bits, bool):
        wrong.append(f"bits is {bits!r}; it must be 4")
    if group not in GROUPS or not isinstance(group, int):
        wrong.append(f"group_size is {group!r}; it must be 32, 64 or 128")
    if how.get("zero_point") is not True:
        wrong.append(f"zero_point is {how.get('zero_point')!r}; it must be true")
    if not isinstance(version, str) or version.lower() != "gemm":
        wrong.append(f"version is {version!r}; it must be 'gemm', the packing that AutoAWQ writes by default")
    if how.get("backend") == "llm-awq":
        wrong.append("backend is 'llm-awq', which packs in another way; it must be 'autoawq' or left out")
    if how.get("desc_act"):
        wrong.append(f"desc_act is {how['desc_act']!r} (act-order, columns sorted by activation); it must be false")
    if not isinstance(apart, list) or not set(map(str, apart)) <= _SIXTEEN_BIT_ANYWAY:
        wrong.append(f"modules_to_not_convert is {apart!r}; every projection of a layer must be quantised")
    if wrong:
        raise ValueError(f"{path}: AWQ weights of a kind that is not run here:\n  " + "\n  ".join(wrong))
    config = ModelConfig.from_dict(values, where=str(path))
    return config.with_stops_of(path.with_name("generation_config.json")), group


def _split(
    config: ModelConfig, group: int, headers: dict[Path, Header]
) -> tuple[dict[str, Path], dict[Path, Header], list[str]]:
    """Check the packed tensors, and put in their place the plain weights that they stand for.

    Returns the files of the packed tensors, headers such as a plain checkpoint has, and what is wrong.
    """
    found = {name: (*form, shard) for shard, header in headers.items() for name, form in header.items()}
    if config.num_hidden_layers > len(found):  # said by `match`; its names would fill the memory
        return {}, headers, []
    plain = {shard: dict(header) for shard, header in headers.items()}
    packed: dict[str, Path] = {}
    problems = []
    for base, (out, into) in projections(config).items():
        if out % 8 or into % group:
            problems.append(f"{base} has {into} inputs and {out} outputs; they must be multiples of {group} and 8")
        forms = (((into, out // 8), "I32"), ((into // group, out // 8), "I32"), ((into // group, out), "F16"))
        for part, (shape, dtype) in zip(_PACKED, forms, strict=True):
            name = f"{base}.{part}"
            where = [shard for shard, header in plain.items() if header.pop(name, None)]
            if not where:
                problems.append(f"{name} {list(shape)} is missing")
                continue
            if len(where) > 1:
                problems.append(f"{name} is in {where[0].name} and in {where[1].name}")
            have, kind, packed[name] = found[name]
            if have != shape:
                problems.append(f"{name} has shape {list(have)}; the configuration wants {list(shape)}")
            if kind != dtype:
                problems.append(f"{name} has dtype {kind}; AWQ's is {dtype}")
        if any(header.pop(f"{base}.g_idx", None) for header in plain.values()):
            problems.append(f"{base}.g_idx sorts the columns (act-order, GPTQ); nanoqwen runs weights without it")
        if any(header.pop(f"{base}.weight", None) for header in plain.values()):
            problems.append(f"{base}.weight is not quantised; every projection of a layer must be")
        next(iter(plain.values()))[f"{base}.weight"] = ((out, into), "F16")
    return packed, plain, problems
