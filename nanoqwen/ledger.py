"""Bytes and FLOPs of a decode step, counted from the shapes, and the ceilings they are held against.

Lessons: notebooks 00 (the ceilings) and 01 (the ledger).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from nanoqwen.config import ModelConfig

KINDS = ("embed", "norm", "qkv", "bias", "o", "gate_up", "down", "lm_head", "kv_read", "kv_write")


class CeilingError(ValueError):
    """A figure above what the machine can do: the measurement is wrong, not the machine fast."""


def below_ceiling(value: float, ceiling: float, what: str, noise: float = 0.0) -> float:
    """`value` / `ceiling`, at most 1.

    `noise` is the share by which a ceiling that was itself measured may be passed; such a figure counts as 1. It is 0
    for a datasheet.

    Raises:
        CeilingError: value above ceiling · (1 + noise).
        ValueError: either is not positive and finite.
    """
    for name, number in (("value", value), ("ceiling", ceiling)):
        if not 0 < number < math.inf:
            raise ValueError(f"{what}: the {name} is {number}; it must be positive and finite")
    if value > ceiling * (1 + noise):
        raise CeilingError(
            f"{what} is {value:.4g}, {100 * value / ceiling:.1f} % of the ceiling {ceiling:.4g}: no machine does that. "
            "Look for work skipped, data served from cache, or a clock that stopped early"
        )
    return min(value / ceiling, 1.0)


def mbu(nbytes: float, seconds: float, bandwidth: float, noise: float = 0.0) -> float:
    """Memory-bandwidth utilisation: nbytes / seconds as a fraction of `bandwidth` (bytes/s).

    Raises:
        CeilingError: above 1 by more than `noise`; see `below_ceiling`.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"mbu: seconds is {seconds}; it must be positive and finite")
    return below_ceiling(nbytes / seconds, bandwidth, "memory bandwidth (bytes/s)", noise)


@dataclass(frozen=True)
class Grouped:
    """Weights in groups of `group_size` along the input, `bits` each, with one scale per group (lesson 04)."""

    bits: int = 4
    group_size: int = 128
    scale: torch.dtype = torch.float16


@dataclass(frozen=True)
class Row:
    """One tensor that a decode step moves: `bytes` of it, read or written. `shape` is what is moved of it."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    access: str = "read"


@dataclass(frozen=True)
class Ledger:
    """Every tensor that one decode step reads or writes, and the FLOPs it does; `title` says what of."""

    rows: tuple[Row, ...]
    flops: int
    title: str

    @property
    def read(self) -> int:
        """Bytes read."""
        return sum(row.bytes for row in self.rows if row.access == "read")

    @property
    def written(self) -> int:
        """Bytes written."""
        return sum(row.bytes for row in self.rows if row.access == "write")

    @property
    def total(self) -> int:
        """Bytes moved: read + written."""
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """FLOP per byte moved."""
        return self.flops / self.total

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, in the order of a decode step; kinds that move nothing are left out."""
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[row.kind] = sums.get(row.kind, 0) + row.bytes
        return {kind: sums[kind] for kind in KINDS if sums.get(kind)}

    def table(self) -> list[tuple[str, str, int, str, int, float]]:
        """(kind, access, tensors, dtypes, bytes, share of the total) of each kind."""
        lines = []
        for kind, nbytes in self.by_kind().items():
            rows = [row for row in self.rows if row.kind == kind]
            dtypes = " + ".join(dict.fromkeys(row.dtype for row in rows))
            lines.append((kind, rows[0].access, len(rows), dtypes, nbytes, nbytes / self.total))
        return lines

    def __str__(self) -> str:
        lines = [self.title, f"{'kind':<9} {'':<6} {'tensors':>7} {'bytes':>15} {'share':>7}  dtype"]
        for kind, access, count, dtypes, nbytes, share in self.table():
            lines.append(f"{kind:<9} {access:<6} {count:>7} {nbytes:>15,} {100 * share:>6.2f}%  {dtypes}")
        for name, nbytes in (("read", self.read), ("written", self.written), ("total", self.total)):
            lines.append(f"{name:<16} {'':>7} {nbytes:>15,}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        left, cell = "text-align:left", "<td style='text-align:{}'>{}</td>"
        body = "".join(
            "<tr>"
            + "".join(cell.format("left", text) for text in (kind, access, dtypes))
            + "".join(cell.format("right", text) for text in (count, f"{nbytes:,}", f"{100 * share:.2f} %"))
            + "</tr>"
            for kind, access, count, dtypes, nbytes, share in self.table()
        )
        foot = "".join(
            f"<tr><th colspan='4' style='{left}'>{name}</th><td style='text-align:right'>{nbytes:,}</td><td></td></tr>"
            for name, nbytes in (("read", self.read), ("written", self.written), ("total", self.total))
        )
        head = "".join(f"<th>{name}</th>" for name in ("kind", "access", "dtype", "tensors", "bytes", "share"))
        return f"<table><caption>{self.title}</caption><tr>{head}</tr>{body}{foot}</table>"


def _kind(name: str) -> str:
    """The ledger's kind of a weight, from its name in the checkpoint."""
    part = name.split(".")[-2]
    if name.endswith(".bias"):
        return "bias"
    if part.endswith("norm"):
        return "norm"
    return {
        "embed_tokens": "embed",
        "q_proj": "qkv",
        "k_proj": "qkv",
        "v_proj": "qkv",
        "o_proj": "o",
        "gate_proj": "gate_up",
        "up_proj": "gate_up",
        "down_proj": "down",
        "lm_head": "lm_head",
    }[part]


def _rows(kind: str, name: str, shape: tuple[int, ...], form: torch.dtype | Grouped) -> Iterator[Row]:
    access = "write" if kind == "kv_write" else "read"
    count = math.prod(shape)
    if isinstance(form, torch.dtype):
        yield Row(kind, name, shape, str(form).removeprefix("torch."), count * form.itemsize, access)
        return
    if kind in ("norm", "bias", "kv_read", "kv_write"):
        raise ValueError(f"ledger: {kind} cannot be {form}; give it a torch dtype")
    if shape[-1] % form.group_size:
        raise ValueError(f"ledger: {name} has {shape[-1]} columns, not a multiple of group_size {form.group_size}")
    scales = (*shape[:-1], shape[-1] // form.group_size)
    yield Row(kind, name, shape, f"int{form.bits}", count * form.bits // 8, access)
    scale = str(form.scale).removeprefix("torch.")
    yield Row(kind, name + " (scales)", scales, f"{scale} scales", math.prod(scales) * form.scale.itemsize, access)


def ledger(
    config: ModelConfig,
    dtype: torch.dtype | Mapping[str, torch.dtype | Grouped] = torch.bfloat16,
    depth: int = 0,
    batch: int = 1,
    name: str | None = None,
) -> Ledger:
    """The bytes that one decode step of `batch` sequences must move, tensor by tensor.

    Every weight is read once for the whole batch, but of the embedding only one row a sequence. A tied model reads
    the embedding a second time, whole, as its head: that is the row `lm_head`. `kv_read` is what `depth` earlier
    tokens left in the cache of each layer, `kv_write` the new token's keys and values. Activations are left out: they
    fit in the caches.

    Args:
        dtype: of everything, or by kind (`KINDS`), with "default" for the kinds not named; `Grouped` for a matrix
            in groups, which gives a row for the payload and a row for the scales.
        name: the model's, for the title.

    Raises:
        ValueError: a kind that does not exist, depth below 0, batch below 1, or a form that does not fit the kind.
    """
    if depth < 0 or batch < 1:
        raise ValueError(f"ledger: depth is {depth} and batch {batch}; they must be at least 0 and 1")
    forms = dict(dtype) if isinstance(dtype, Mapping) else {"default": dtype}
    if unknown := set(forms) - {*KINDS, "default"}:
        raise ValueError(f"ledger: no kind {sorted(unknown)[0]!r}; the kinds are {', '.join(KINDS)}, and 'default'")
    if "default" not in forms and (missing := [kind for kind in KINDS if kind not in forms]):
        raise ValueError(f"ledger: no dtype for {missing[0]!r}; name it, or give a 'default'")

    def rows(kind: str, tensor: str, shape: tuple[int, ...]) -> Iterator[Row]:
        return _rows(kind, tensor, shape, forms.get(kind, forms.get("default")))

    found: list[Row] = []
    matrix = 0  # elements of the matrices, each used in one multiply and one add a token
    shapes = config.weight_shapes()
    embedding = "model.embed_tokens.weight"
    if config.tie_word_embeddings:
        shapes["lm_head.weight"] = shapes[embedding]
    for tensor, shape in shapes.items():
        if tensor == embedding:
            found += rows("embed", tensor, (batch, shape[1]))
            continue
        found += rows(_kind(tensor), tensor, shape)
        matrix += math.prod(shape) if len(shape) == 2 else 0
    for layer in range(config.num_hidden_layers):
        for kind, tokens in (("kv_read", depth), ("kv_write", 1)):
            for part in ("keys", "values"):
                shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
                found += rows(kind, f"cache.{part}.{layer}", shape)
    # Scores and their product with V: each a multiply and an add per query element and token.
    attention = 4 * config.num_hidden_layers * config.q_size * (depth + 1)
    title = f"{name + ', ' if name else ''}bytes of one decode step, depth {depth}, batch {batch}"
    return Ledger(tuple(found), batch * (2 * matrix + attention), title)
