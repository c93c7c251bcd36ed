"""From 16-bit weights to INT4: symmetric groups, a scale for each, and a linear layer that holds them.

w ≈ value · scale, with value a whole number −8…7 and one fp16 scale for each `group` neighbours of a row: 4.125 bits a
weight at group 128. Symmetric means that zero is always exact and that no zero-point is stored. Lesson: notebook 04.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from nanoqwen import kernels, packing
from nanoqwen.kernels.arguments import ALIGNMENT
from nanoqwen.kernels.dequantize import LAYOUTS
from nanoqwen.kernels.int4 import MAX_TOKENS
from nanoqwen.packing import FRAGMENT, GROUP_SIZE, GROUP_SIZES, VALUE_SHUFFLE

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


def _scaled(values: Tensor, scales: Tensor, dtype: torch.dtype, zeros: Tensor | None = None) -> Tensor:
    grouped = values.unflatten(1, (scales.shape[1], -1)).to(torch.float32)
    if zeros is not None:
        grouped.sub_(zeros.unsqueeze(-1))
    return grouped.mul_(scales.float().unsqueeze(-1)).to(dtype).flatten(1)


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b with W in groups: stands in for `nn.Linear` in any model, for one token or many.

    On a GPU up to eight tokens go through a kernel that reads the words themselves, if they are 4 bits in the layout
    "fragment"; for more, W is made in x's dtype, and the library multiplies. On a CPU PyTorch does both. The kernels
    take x in fp16, scaled so that no bf16 is too large or, beside the largest, too small; an fp32 x keeps eleven bits.

    Attributes:
        words: 4 bits: int32, packed in `layout`; 8 bits: int8 (out_features, in_features).
        scales: fp16 (out_features, in_features / group); they stay fp16 when the model is cast.
        zeros: int8 of the same shape, −8…7, which is taken off each value of a group; None: all are 0.
        bias: (out_features) or None, of the model's dtype.
        dtype: what `weight` is given in.
        kernels: whether our kernels run: None on a GPU only, True on a CPU too (the SIMT machine), False never.

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
        zeros: bool = False,
    ):
        super().__init__()
        check_settings(group)
        check_columns(in_features, group, "in_features")
        self.in_features, self.out_features = in_features, out_features
        self.group, self.bits, self.layout, self.dtype = group, bits, layout, dtype
        self.kernels: bool | None = None
        shape = packing.words_shape(out_features, in_features, layout) if bits == 4 else (out_features, in_features)
        kind, groups = torch.int32 if bits == 4 else torch.int8, (out_features, in_features // group)
        self.register_buffer("words", torch.zeros(shape, dtype=kind, device=device))
        self.register_buffer("scales", torch.zeros(groups, dtype=torch.float16, device=device))
        self.register_buffer("zeros", torch.zeros(groups, dtype=torch.int8, device=device) if zeros else None)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)
        self._form: tuple | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: int = GROUP_SIZE,
        method: str = "mse",
        bits: int = 4,
        layout: int | None = None,
        name: str = "weight",
    ) -> "QuantizedLinear":
        """The quantised twin of a layer, with the same bias. `layout`: by default the best where the layer is.

        Raises:
            ValueError: as `quantize`.
        """
        made = quantize(linear.weight, group, method, bits, name)
        rows, cols = linear.weight.shape
        layout = best_layout(cols, linear.weight.device) if layout is None else layout
        twin = cls(cols, rows, False, group, bits, layout, linear.weight.dtype, "meta")
        twin.words = packing.pack(made.values, layout) if bits == 4 else made.values
        twin.scales = made.scales
        twin.bias = None if linear.bias is None else linear.bias.detach()
        return twin

    @property
    def read_bytes(self) -> int:
        """What a decode step reads of W: the words, and 16 bits for each scale and each zero-point."""
        return self.words.nbytes + self.scales.nbytes * (1 if self.zeros is None else 2)

    def relayout(self, layout: int) -> "QuantizedLinear":
        """Bring words of 4 bits into another layout, in place.

        Raises:
            ValueError: there is no such layout, or in_features do not fill its tiles.
        """
        if self.bits == 4:
            self.words = packing.convert(self.words, self.layout, layout, self.out_features)
        self.layout = layout
        return self

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """W (out_features, in_features)."""
        if self._wants_kernels and dtype in (torch.float16, torch.bfloat16) and self.layout in LAYOUTS:
            scales, zeros, _ = self._kernel_form()
            form = {"rows": self.out_features, "zeros": zeros, "layout": self.layout, "dtype": dtype}
            return kernels.int4_dequantize(self.words, scales, **form)
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.words.device)
        tall = packing.layout_of(self.layout).tile[0] if self.bits == 4 else 1
        # In pieces: what is made on the way is several times the size of W.
        step = max(1, _CHUNK.get(out.device.type, 1 << 18) // self.in_features // tall) * tall
        for first in range(0, self.out_features, step):
            rows = slice(first, first + step)
            values, zeros = self.words[rows], None if self.zeros is None else self.zeros[rows]
            if self.bits == 4:
                values = packing.unpack(values, self.layout, min(step, self.out_features - first))
            out[rows] = _scaled(values, self.scales[rows], dtype, zeros)
        return out

    @property
    def weight(self) -> Tensor:
        """W in the model's dtype, made anew each time: for code that asks an `nn.Linear` for it."""
        return self.dequantize(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in_features) → (…, out_features), of x's dtype."""
        if self._wants_kernels and self._fuses(x) and (product := _product(x.device, self.zeros is None)):
            return self._fused(x, product)
        # W in full, then the library's product: for many tokens the product outweighs it.
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.dequantize(x.dtype), bias)

    @property
    def _wants_kernels(self) -> bool:
        return self.bits == 4 and (self.words.is_cuda if self.kernels is None else self.kernels)

    def _fuses(self, x: Tensor) -> bool:
        return (
            self.layout == FRAGMENT
            and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and 0 < x.numel() <= MAX_TOKENS * self.in_features
            and x.shape[-1] == self.in_features
            and x.device == self.words.device
            and not (x.requires_grad and torch.is_grad_enabled())
        )

    def _fused(self, x: Tensor, product: Callable) -> Tensor:
        scales, zeros, bias = self._kernel_form()
        form = {"rows": self.out_features} | ({} if zeros is None else {"zeros": zeros})
        tokens = x.reshape(-1, self.in_features).contiguous()
        if x.dtype == torch.float16:
            if tokens.data_ptr() % ALIGNMENT:  # a slice, which the library would take
                tokens = tokens.clone()
            y = product(self.words, scales, tokens, bias=bias, **form).half()
        else:
            # What the kernels take ends at 65,504; x of another dtype does not.
            half, back = kernels.half_x(tokens)
            y = kernels.widen_y(product(self.words, scales, half, **form), back, bias, x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def _kernel_form(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scales and zero-points in the layout's order, the bias in fp32: kept until one of them changes."""
        sources = (self.scales, self.zeros, self.bias)
        # A tensor of inference mode counts no changes.
        state = [self.layout, *(part._version for part in sources if part is not None and not part.is_inference())]
        kept = self._form
        if kept and kept[1] == state and all(now is then for now, then in zip(sources, kept[0], strict=True)):
            return kept[2]
        scales, zeros, bias = self.scales, self.zeros, self.bias
        zeros = None if zeros is None else zeros.half()
        if self.layout == FRAGMENT:
            scales, zeros = packing.tile_scales(scales), None if zeros is None else packing.tile_scales(zeros)
        form = scales, zeros, None if bias is None else bias.float()
        self._form = sources, state, form
        return form

    def extra_repr(self) -> str:
        form = f"bits={self.bits}, group={self.group}" + ("" if self.zeros is None else ", zeros=True")
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {form}"

    def _apply(self, fn, recurse=True):
        # `model.to(dtype)` casts every floating buffer; a scale in bf16 would have lost three of its bits.
        exact, self._form = self.scales, None
        super()._apply(fn, recurse)
        if self.scales.dtype != torch.float16:
            self.scales = exact.to(self.scales.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=exact.device)).dtype
        return self

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_form": None}  # a copy's tensors are others


def best_layout(cols: int, device: torch.device) -> int:
    """The layout that a layer of `cols` columns is best kept in: on a GPU that of the tensor cores, where it fits."""
    fits = device.type == "cuda" and cols % packing.layout_of(FRAGMENT).tile[1] == 0
    return FRAGMENT if fits else VALUE_SHUFFLE


@functools.cache
def _product(device: torch.device, symmetric: bool) -> Callable | None:
    """The kernel that multiplies few tokens on this device; None where there is none."""
    if device.type == "cuda" and (have := torch.cuda.get_device_capability(device)) < (9, 0):
        return kernels.int4_gemm_mma if have >= (8, 0) else None
    return kernels.int4_gemm_ring if device.type == "cuda" and symmetric else kernels.int4_gemm_mma


def use_kernels(model: nn.Module, wanted: bool | None = True) -> nn.Module:
    """Let the quantised layers of a model run through our kernels, or not; on a CPU they run on the SIMT machine.

    Args:
        wanted: True also brings 4-bit words into the layout of the tensor cores, in place, where their columns fit.
            False: PyTorch does everything. None: as a new layer, kernels on a GPU only.

    Returns:
        The model.
    """
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.kernels = wanted
            if wanted and layer.in_features % packing.layout_of(FRAGMENT).tile[1] == 0:
                layer.relayout(FRAGMENT)
    return model


def bytes_saved(model: nn.Module, dtype: torch.dtype) -> int:
    """How much less a decode step reads of the quantised layers than of the same matrices in `dtype`."""
    layers = [part for part in model.modules() if isinstance(part, QuantizedLinear)]
    return sum(layer.in_features * layer.out_features * dtype.itemsize - layer.read_bytes for layer in layers)


@contextmanager
def check_finite(model: nn.Module) -> Iterator[None]:
    """Inside, a linear layer whose output is not finite raises and is named. The host waits for every layer.

    Raises:
        ValueError: which layer, what it gave, the largest input it had, and the way out.
    """

    def look(name: str, x: Tensor, y: Tensor) -> None:
        if not y.isfinite().all():
            kind = "NaN" if y.isnan().any() else "an infinity"
            way = "use bfloat16, which reaches further" if x.isfinite().all() else "look at the layers before it"
            raise ValueError(f"{name} gave {kind} in {y.dtype}; its largest input was {x.abs().amax():.4g}: {way}")

    hooks = [
        part.register_forward_hook(
            lambda _, args, named, y, name=name: look(name, *args, *named.values(), y), with_kwargs=True
        )
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear | QuantizedLinear)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def quantize_model(
    model: nn.Module,
    group: int = GROUP_SIZE,
    method: str = "mse",
    head_bits: int = 16,
    layout: int | None = None,
    progress: bool = False,
) -> nn.Module:
    """A copy of a decoder with its projections in INT4, and its head in INT8 if `head_bits` is 8.

    Every `nn.Linear` that is called as one of `PROJECTIONS` is replaced: in the reference decoder and in `transformers`
    models of the Llama family alike. The copy shares all other tensors with `model`, which stays as it was.
    `layout` is by default the best where the model is; see `use_kernels` for one that goes to a GPU afterwards.

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
