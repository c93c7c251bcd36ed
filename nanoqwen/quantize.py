"""From 16-bit weights to INT4: symmetric groups, a scale for each, and a linear layer that holds them.

w ≈ value · scale, with value a whole number −8…7 and one fp16 scale for each `group` neighbours of a row: 4.125 bits a
weight at group 128. Symmetric means that zero is always exact and that no zero-point is stored. Lesson: notebook 04.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from nanoqwen import packing
from nanoqwen.packing import GROUP_SIZE, GROUP_SIZES, VALUE_SHUFFLE

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer that become INT4. Embedding, norms, biases and, by default, the head stay as they are."""
HEAD = "lm_head"
METHODS = ("rtn", "mse")
FP16_MAX = 65504.0

_SHRINK = [1 - i / 40 for i in range(13)]  # 1 … 0.7 of the scale that just holds the largest weight
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # weights worked on at a time: what stays in a cache; what fills a GPU


@dataclass(frozen=True)
class Quantized:
    """A matrix in groups.

    Attributes:
        values: int8 (rows, cols), −8…7 of 4 bits or −127…127 of 8.
        scales: fp16 (rows, cols / group); 0 where the whole group is zero, negative where −8 then stands for its
            largest weight.
        bits: 4 or 8.
    """

    values: Tensor
    scales: Tensor
    bits: int = 4

    @property
    def group(self) -> int:
        """Neighbours of one row that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """value · scale (rows, cols), taken in fp32 and rounded once to `dtype`."""
        return _scaled(self.values, self.scales, dtype)


def quantize(
    weight: Tensor, group: int = GROUP_SIZE, method: str = "mse", bits: int = 4, name: str = "weight"
) -> Quantized:
    """Quantise a matrix (rows, cols) of any floating dtype.

    Args:
        method: `rtn` rounds to nearest under the scale absmax / 7, which holds the largest weight of the group; `mse`
            also tries smaller scales, which clip that weight and serve the others better, and negative ones, which let
            a positive weight have the −8; of each group it keeps the one with the least squared error, weighted by |w|.
        bits: 4, or 8 with the scale absmax / 127.
        name: what messages call the matrix.

    Raises:
        ValueError: a group or method that there is not, columns that are no multiple of the group, NaN or infinity, or
            weights so large that fp16 cannot hold their scale.
    """
    check_settings(group, method)
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits!r}; it must be 4 or 8")
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        raise ValueError(
            f"{name} is {tuple(weight.shape)} of {weight.dtype}; it must be a floating matrix (rows, cols)"
        )
    check_columns(weight.shape[1], group, name)
    top = 2 ** (bits - 1) - 1
    groups = weight.detach().unflatten(1, (-1, group))  # (rows, groups, group)
    chunk = max(1, _CHUNK.get(weight.device.type, 1 << 18) // weight.shape[1])
    parts = [_quantize(rows.float(), top, method, name) for rows in groups.split(chunk)]
    values, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return Quantized(values.flatten(1), scales, bits)


def check_settings(group: int, method: str = "rtn") -> None:
    """Refuse a group size or a method that there is not.

    Raises:
        ValueError: which, and what there is.
    """
    if group not in GROUP_SIZES:
        raise ValueError(f"group is {group!r}; it must be one of {', '.join(map(str, GROUP_SIZES))}")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}")


def check_columns(cols: int, group: int, name: str) -> None:
    """Refuse a matrix whose rows are not whole groups.

    Raises:
        ValueError: names the matrix, its columns, the group, and the groups that would do.
    """
    if cols % group:
        fit = [str(size) for size in GROUP_SIZES if cols % size == 0]
        way = f"use group {' or '.join(fit)}" if fit else f"no group of {', '.join(map(str, GROUP_SIZES))} fits"
        raise ValueError(f"{name} has K = {cols} columns, no multiple of group {group}; {way}")


def _quantize(w: Tensor, top: int, method: str, name: str) -> tuple[Tensor, Tensor]:
    """w (rows, groups, group) in fp32 → values (the same shape), scales (rows, groups)."""
    largest = w.abs().amax(-1)  # NaN and infinity come through
    if not largest.isfinite().all():
        kind = "NaN" if largest.isnan().any() else "an infinity"
        raise ValueError(f"{name} holds {kind}; a quantised matrix cannot: find out where the weights went wrong")
    if (worst := largest.max().item() / top) > FP16_MAX:
        raise ValueError(
            f"{name} holds a weight of {worst * top:.4g}: its scale {worst:.4g} is above fp16's {FP16_MAX:.0f}"
        )
    scales = (largest / top).half()
    # Below 6e-5 fp16 grows coarse, and a scale rounded down would clip: take the next one up.
    short = largest > (top + 0.5) * scales.float()
    scales = (scales.view(torch.int16) + short.to(torch.int16)).view(torch.float16)
    if method == "mse":
        scales = _least_error(w, largest, scales, top)
    return _rounded(w, scales, top).to(torch.int8), scales


def _rounded(w: Tensor, scales: Tensor, top: int) -> Tensor:
    scales = scales.float().unsqueeze(-1)
    return (w / scales.where(scales != 0, 1)).round_().clamp_(-top - 1, top)


def _least_error(w: Tensor, largest: Tensor, scales: Tensor, top: int) -> Tensor:
    """The scale of each group with the least squared error weighted by |w|; of equals, the first tried."""
    # The weight keeps the search from clipping the few large weights for the sake of the many small ones. It would gain
    # in mean squared error, and lose in what the model predicts.
    importance = w.abs()
    sign = torch.where(w.amax(-1) == largest, -1.0, 1.0)  # under which the largest weight is a negative multiple

    def error(scales: Tensor) -> Tensor:
        error = _rounded(w, scales, top).mul_(scales.float().unsqueeze(-1)).sub_(w)
        return error.square_().mul_(importance).sum(-1)

    best, least = scales, error(scales)
    for shrink in _SHRINK:
        # The range is not even: −8 has no +8. A scale of the right sign puts the largest weight there.
        for candidate in (largest * (shrink / top), sign * largest * (shrink / (top + 1))):
            candidate = candidate.half()
            found = error(candidate)
            better = found < least
            best, least = candidate.where(better, best), found.where(better, least)
    return best


def _scaled(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    grouped = values.unflatten(1, (scales.shape[1], -1)).to(torch.float32)
    return grouped.mul_(scales.float().unsqueeze(-1)).to(dtype).flatten(1)


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b with W in groups: stands in for `nn.Linear` in any model, for one token or many.

    Attributes:
        words: 4 bits: int32, packed in `layout`; 8 bits: int8 (out_features, in_features).
        scales: fp16 (out_features, in_features / group); they stay fp16 when the model is cast.
        bias: (out_features) or None, of the model's dtype.
        dtype: what `weight` is given in.

    Raises:
        ValueError: an unknown group or layout, or in_features that is no multiple of the group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: int = GROUP_SIZE,
        bits: int = 4,
        layout: int = VALUE_SHUFFLE,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device | None = None,
    ):
        super().__init__()
        check_settings(group)
        check_columns(in_features, group, "in_features")
        self.in_features, self.out_features = in_features, out_features
        self.group, self.bits, self.layout, self.dtype = group, bits, layout, dtype
        shape = packing.words_shape(out_features, in_features, layout) if bits == 4 else (out_features, in_features)
        kind = torch.int32 if bits == 4 else torch.int8
        self.register_buffer("words", torch.zeros(shape, dtype=kind, device=device))
        scales = torch.zeros(out_features, in_features // group, dtype=torch.float16, device=device)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: int = GROUP_SIZE,
        method: str = "mse",
        bits: int = 4,
        layout: int = VALUE_SHUFFLE,
        name: str = "weight",
    ) -> "QuantizedLinear":
        """The quantised twin of a layer, with the same bias.

        Raises:
            ValueError: as `quantize`.
        """
        made = quantize(linear.weight, group, method, bits, name)
        rows, cols = linear.weight.shape
        twin = cls(cols, rows, False, group, bits, layout, linear.weight.dtype, "meta")
        twin.words = packing.pack(made.values, layout) if bits == 4 else made.values
        twin.scales = made.scales
        twin.bias = None if linear.bias is None else linear.bias.detach()
        return twin

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """W (out_features, in_features)."""
        values = packing.unpack(self.words, self.layout, self.out_features) if self.bits == 4 else self.words
        return _scaled(values, self.scales, dtype)

    @property
    def weight(self) -> Tensor:
        """W in the model's dtype, made anew each time: for code that asks an `nn.Linear` for it."""
        return self.dequantize(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in_features) → (…, out_features)."""
        # W in full, then the library's product: for many tokens the product outweighs it.
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.dequantize(x.dtype), bias)

    def extra_repr(self) -> str:
        form = f"bits={self.bits}, group={self.group}"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {form}"

    def _apply(self, fn, recurse=True):
        # `model.to(dtype)` casts every floating buffer; a scale in bf16 would have lost three of its bits.
        exact = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != torch.float16:
            self.scales = exact.to(self.scales.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=exact.device)).dtype
        return self


def quantize_model(
    model: nn.Module,
    group: int = GROUP_SIZE,
    method: str = "mse",
    head_bits: int = 16,
    layout: int = VALUE_SHUFFLE,
    progress: bool = False,
) -> nn.Module:
    """A copy of a decoder with its projections in INT4, and its head in INT8 if `head_bits` is 8.

    Every `nn.Linear` that is called as one of `PROJECTIONS` is replaced: in the reference decoder and in `transformers`
    models of the Llama family alike. The copy shares all other tensors with `model`, which stays as it was.

    Raises:
        ValueError: no such projections, `head_bits` neither 16 nor 8, or as `quantize`.
    """
    check_settings(group, method)
    if head_bits not in (16, 8):
        raise ValueError(f"head_bits is {head_bits!r}; it must be 16 or 8")
    bits = dict.fromkeys(PROJECTIONS, 4) | ({HEAD: 8} if head_bits == 8 else {})
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    wanted = {name: part for name, part in linears.items() if name.rpartition(".")[2] in bits}
    found = {name.rpartition(".")[2] for name in wanted}
    if missing := [name for name in bits if name not in found]:
        raise ValueError(
            f"{type(model).__name__} has no linear layer called {', '.join(missing)}; nothing was quantised"
        )
    for name, part in wanted.items():
        check_columns(part.in_features, group, name)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for name, part in tqdm(wanted.items(), desc="quantise", unit="matrix", disable=not progress):
        this = bits[name.rpartition(".")[2]]
        made = QuantizedLinear.from_linear(part, group, method if this == 4 else "rtn", this, layout, name)
        twin.set_submodule(name, made)
    return twin


@dataclass(frozen=True)
class Comparison:
    """How far a model's predictions are from the reference's, over `tokens` predictions.

    Attributes:
        kl: mean Kullback–Leibler divergence of the next token's distribution from the reference's, in nats.
        agreement: share of predictions with the same most likely token.
        reference_perplexity, perplexity: exp of the mean negative log-likelihood of the text, under each.
    """

    kl: float
    agreement: float
    reference_perplexity: float
    perplexity: float
    tokens: int


@torch.inference_mode()
def compare(reference: nn.Module, model: nn.Module, ids: Sequence[int], window: int = 512) -> Comparison:
    """Predictions of two decoders on the same text.

    Args:
        reference, model: called with tokens (1, T), they return logits (1, T, vocabulary).
        ids: the text; it is read in windows of `window` tokens, each without what came before.

    Raises:
        ValueError: fewer than two tokens, or logits that are not finite.
    """
    if len(ids) < 2 or window < 2:
        raise ValueError(f"there are {len(ids)} tokens, in windows of {window}; a prediction needs 2")
    device = next(reference.parameters()).device
    real = getattr(reference, "num_tokens", None)  # the rows after these stand for no token
    sums, count = torch.zeros(4, dtype=torch.float64, device=device), 0
    for part in torch.as_tensor(ids, device=device).split(window):
        if len(part) < 2:
            continue
        p, q = (each(part[None])[0, :-1, :real] for each in (reference, model))
        for rows in torch.arange(len(p), device=device).split(64):  # in fp64 a vocabulary is large
            sums += _distance(p[rows].double(), q[rows].double(), part[1:][rows])
        count += len(p)
    if not sums.isfinite().all():
        raise ValueError("the logits are not finite; a model that overflows cannot be compared")
    kl, same, ours, theirs = (sums / count).tolist()
    return Comparison(kl, same, *torch.tensor([ours, theirs], dtype=torch.float64).exp().tolist(), count)


def _distance(p: Tensor, q: Tensor, targets: Tensor) -> Tensor:
    """Sums over tokens: KL(p‖q), same first choice, −log p(target), −log q(target)."""
    same = (p.argmax(-1) == q.argmax(-1)).sum()
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum()
    nll = [-each.gather(1, targets[:, None]).sum() for each in (p, q)]
    return torch.stack([kl, same.double(), *nll])
