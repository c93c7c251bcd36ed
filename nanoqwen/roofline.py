"""Bytes and FLOPs of a decode step, counted from the shapes; the roofline they are held against; the plots.

Roofline: Williams, Waterman & Patterson, 2009. Lessons: notebooks 00 and 01.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from nanoqwen.config import ModelConfig
from nanoqwen.hardware import Probe, Spec

KINDS = ("embed", "norm", "qkv", "bias", "o", "gate_up", "down", "lm_head", "kv_read", "kv_write")
LABELS = ("measured", "recorded", "simulated", "counted")


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


# Figures. Okabe and Ito's colours (2008) stay apart for colour-blind readers; the light card under every figure is
# its own, so that it reads the same on a light and on a dark page.
OKABE_ITO = tuple("#0072B2 #E69F00 #009E73 #D55E00 #56B4E9 #CC79A7 #F0E442 #000000 #999999 #6A4C93".split())
_STYLE = {
    "figure.facecolor": "#FFFFFF",
    "axes.facecolor": "#FFFFFF",
    "savefig.facecolor": "#FFFFFF",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor"), "#222222"
    ),
    "grid.color": "#DDDDDD",
    "legend.facecolor": "#FFFFFF",
    "legend.edgecolor": "#CCCCCC",
    "legend.labelcolor": "#222222",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


class Plot(Figure):
    """A figure that a notebook shows once, as the value of its cell, whatever the backend."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
        return buffer.getvalue()


def _axes(width: float, height: float, title: str, label: str):
    if label.split(":")[0].split(",")[0].strip() not in LABELS:
        raise ValueError(f"label is {label!r}; it must begin with one of {', '.join(LABELS)}")
    figure = Plot(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_title(label, loc="right", fontsize=9, style="italic")
    return figure, axes


@dataclass(frozen=True)
class Point:
    """A dot on the roofline: FLOP/byte, FLOP/s, and what it is (`label`, by default the name)."""

    name: str
    intensity: float
    flops_per_s: float
    label: str = ""


def plot_roofline(
    points: Sequence[Point],
    spec: Spec | None = None,
    probe: Probe | None = None,
    matmul: Probe | None = None,
    label: str = "measured",
    title: str = "Roofline",
) -> Plot:
    """FLOP/s against FLOP/byte, log-log, under the ceilings: datasheet solid, probes dashed.

    Args:
        points: what was run. spec: a datasheet. probe, matmul: measured ceilings of reading and of computing.
        label: where the points come from: measured, recorded, simulated or counted (may go on: "recorded: H200").

    Raises:
        CeilingError: a point above the roof of the datasheet, or more than 3 % above the probes' where there is none.
        ValueError: neither a datasheet nor both probes.
    """
    roofs = []
    if spec is not None:
        roofs.append((spec.bandwidth, spec.bf16 or spec.fp32, "-", f"{spec.name} datasheet"))
    if probe is not None and matmul is not None:
        roofs.append((probe.rate, matmul.rate, "--", "probes"))
    if not roofs:
        raise ValueError("a roofline needs a ceiling: give spec, or probe and matmul")
    bandwidth, compute, noise = *roofs[0][:2], 0.0 if spec is not None else 0.03
    for point in points:
        below_ceiling(point.flops_per_s, min(compute, point.intensity * bandwidth), point.name, noise)
    ridges = [roof / slope for slope, roof, *_ in roofs]
    low = min([0.25, *(p.intensity / 2 for p in points)])
    high = max([4 * max(ridges), *(p.intensity * 4 for p in points)])
    with rc_context(_STYLE):
        figure, axes = _axes(7.4, 4.4, title, label)
        for (slope, roof, style, name), ridge in zip(roofs, ridges, strict=True):
            axes.plot([low, ridge, high], [low * slope, roof, roof], style, color="#222222", lw=1.6, label=name)
            text = f"{name}: {_si(slope)}B/s, {_si(roof)}FLOP/s, ridge {ridge:.0f} FLOP/B"
            axes.lines[-1].set_label(text)
        axes.axvline(ridges[0], color="#999999", lw=0.8, ls=":")
        marks = "osD^vPX*"
        for i, p in enumerate(points):
            axes.plot(
                p.intensity,
                p.flops_per_s,
                marks[i % len(marks)],
                color=OKABE_ITO[i % len(OKABE_ITO)],
                ms=8,
                mec="#222222",
                mew=0.6,
                label=p.label or p.name,
                zorder=3,
            )
        axes.set(xscale="log", yscale="log", xlim=(low, high))
        axes.set_xlabel("arithmetic intensity (FLOP per byte moved)")
        axes.set_ylabel("FLOP/s")
        axes.grid(True, which="major", lw=0.6)
        axes.legend(fontsize=8, loc="lower right")
    return figure


def _si(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.4g} "


def plot_ledger(
    *ledgers: Ledger, names: Sequence[str] | None = None, label: str = "counted", title: str = "Bytes of one token"
) -> Plot:
    """One bar a ledger, stacked by kind, in GB; by default named after what comes first in its title."""
    if not ledgers:
        raise ValueError("plot_ledger needs at least one ledger")
    names = list(names) if names else [ledger.title.split(",")[0] for ledger in ledgers]
    if len(names) != len(ledgers):
        raise ValueError(f"{len(names)} names for {len(ledgers)} ledgers")
    present = [kind for kind in KINDS if any(kind in ledger.by_kind() for ledger in ledgers)]
    with rc_context(_STYLE):
        figure, axes = _axes(7.4, 1.5 + 0.55 * len(ledgers), title, label)
        left = [0.0] * len(ledgers)
        for kind in present:
            sizes = [ledger.by_kind().get(kind, 0) / 1e9 for ledger in ledgers]
            hatch = "////" if kind.startswith("kv") else None
            axes.barh(
                range(len(ledgers)),
                sizes,
                left=left,
                label=kind,
                color=OKABE_ITO[KINDS.index(kind)],
                hatch=hatch,
                edgecolor="#FFFFFF",
                lw=0.4,
            )
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        for i, total in enumerate(left):
            axes.annotate(f"{total:.3g} GB", (total, i), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(ledgers)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(left))
        axes.set_xlabel("GB moved per token")
        axes.grid(True, axis="x", lw=0.6)
        axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.45, -0.32 if len(ledgers) < 3 else -0.2))
    return figure


@dataclass(frozen=True)
class Bar:
    """A decode figure: tokens per second, and the share of a bandwidth that it reaches (0 to 1)."""

    name: str
    tokens_per_s: float
    mbu: float


def plot_mbu(
    bars: Sequence[Bar],
    ceiling: str = "datasheet bandwidth",
    label: str = "measured",
    title: str = "How close to the memory's speed",
    probe: float | None = None,
) -> Plot:
    """Percent of a memory bandwidth, one bar each, with tok/s beside it; the ceiling is the line at 100 %.

    `probe`, where given, is the read probe's share of the same ceiling: a dashed line.

    Raises:
        CeilingError: a bar above 100 %.
    """
    if not bars:
        raise ValueError("plot_mbu needs at least one bar")
    for bar in bars:
        below_ceiling(bar.mbu, 1.0, f"MBU of {bar.name}")
    with rc_context(_STYLE):
        figure, axes = _axes(7.4, 1.3 + 0.45 * len(bars), title, label)
        shares = [100 * bar.mbu for bar in bars]
        axes.barh(range(len(bars)), shares, color=OKABE_ITO[0], height=0.62)
        for i, bar in enumerate(bars):
            text = f"{shares[i]:.1f} %, {bar.tokens_per_s:.4g} tok/s"
            inside = shares[i] > 60
            axes.annotate(
                text,
                (shares[i], i),
                xytext=(-5 if inside else 5, 0),
                textcoords="offset points",
                va="center",
                ha="right" if inside else "left",
                color="#FFFFFF" if inside else "#222222",
                fontsize=9,
            )
        axes.axvline(100, color="#222222", lw=1.6, label=f"ceiling: {ceiling}")
        if probe is not None:
            axes.axvline(100 * probe, color="#222222", lw=1.2, ls="--", label="read probe")
        axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, 108)
        axes.set_xlabel(f"percent of {ceiling}")
        axes.grid(True, axis="x", lw=0.6)
        figure.legend(fontsize=8, loc="outside lower right", ncols=2)
    return figure
