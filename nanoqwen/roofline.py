"""Pictures of bytes and FLOPs under the machine's ceilings: roofline, ledger, bandwidth utilisation.

Roofline: Williams, Waterman & Patterson, 2009. Lessons: notebooks 00 and 01. The counting is in `ledger.py`.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.figure import Figure

from nanoqwen.hardware import Probe, Spec
from nanoqwen.ledger import KINDS, CeilingError, Grouped, Ledger, Row, below_ceiling, ledger, mbu

__all__ = [
    "Bar",
    "CeilingError",
    "Grouped",
    "Ledger",
    "Plot",
    "Point",
    "Row",
    "below_ceiling",
    "ledger",
    "mbu",
    "plot_ledger",
    "plot_mbu",
    "plot_roofline",
]

LABELS = ("measured", "recorded", "simulated", "counted")

# Figures. Okabe and Ito's colours (2008) stay apart for colour-blind readers; the light card under every figure is
# its own, so that it reads the same on a light and on a dark page.
_COLOURS = "#0072B2 #E69F00 #009E73 #D55E00 #56B4E9 #CC79A7 #F0E442 #000000 #999999 #6A4C93"
OKABE_ITO = tuple(_COLOURS.split())
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


def check_label(label: str) -> None:
    """Refuse a label that does not begin with one of `LABELS`, alone or before a colon or a comma."""
    if label.split(":")[0].split(",")[0].strip() not in LABELS:
        raise ValueError(f"label is {label!r}; it must begin with one of {', '.join(LABELS)}")


def _axes(width: float, height: float, title: str, label: str):
    check_label(label)
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
            text = f"{name}: {_si(slope)}B/s, {_si(roof)}FLOP/s, ridge {ridge:.0f} FLOP/B"
            axes.plot([low, ridge, high], [low * slope, roof, roof], style, color="#222222", lw=1.6, label=text)
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
        figure, axes = _axes(7.4, 1.8 + 0.45 * len(ledgers), title, label)
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
        figure.legend(fontsize=8, ncols=5, loc="outside lower center")
    return figure


@dataclass(frozen=True)
class Bar:
    """A rate, by default in tokens per second, and the share of a bandwidth that it reaches (0 to 1)."""

    name: str
    rate: float
    mbu: float
    unit: str = "tok/s"


def plot_mbu(
    bars: Sequence[Bar],
    ceiling: str = "datasheet bandwidth",
    label: str = "measured",
    title: str = "How close to the memory's speed",
    probe: float | None = None,
) -> Plot:
    """Percent of a memory bandwidth, one bar each, with its rate beside it; the ceiling is the line at 100 %.

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
            text = f"{shares[i]:.1f} %, {bar.rate:.4g} {bar.unit}"
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
