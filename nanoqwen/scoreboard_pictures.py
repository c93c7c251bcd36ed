"""The figures of lesson 07: the rungs since lesson 01, contenders by bytes and time, depth, and the parts of a step.

All are drawn from records, with whatever contenders, depths and launches these hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.ticker import FuncFormatter, LogLocator

from nanoqwen.hardware import spec_for
from nanoqwen.ledger import below_ceiling
from nanoqwen.lesson import FIGURE_STYLE
from nanoqwen.records import Record
from nanoqwen.roofline import OKABE_ITO, Plot, check_label

_BLUE, _ORANGE = OKABE_ITO[:2]
_INK, _PALE, _GREY = "#222222", "#EEEEEE", "#999999"
_MARKS = "osD^vPX*"
PARTS = {
    "gate_up, down": ("gate_up_proj", "down_proj"),
    "qkv, o": ("qkv_proj", "o_proj"),
    "attention": ("rope_append", "attention"),
    "lm_head": ("lm_head",),
    "embed, choose": ("embed", "choose"),
}
"""Launches of a step that are drawn together; any other is drawn by its own name."""


@dataclass(frozen=True)
class Rung:
    """A token's time as some lesson left it; `whole` is false where only its products were timed, and added up."""

    lesson: str
    name: str
    weights: str
    nbytes: int
    seconds: float
    whole: bool = True


def rungs(size: str, records: Mapping[str, Record], depth: int = 128) -> list[Rung]:
    """The ladder of one size, `7B` or so, from those of the records that are there.

    Lesson 01's whole step, eager and as a graph; the products of a token by the kernels of lessons 02 to 04, one
    after another; lesson 06's step; and the engine as it stands beside its peers.

    Args:
        records: by name, of `reference`, `gemv`, `int4`, `engine` and `scoreboard`.
    """
    model, found = f"qwen2.5-coder-{size.lower()}", []
    if record := records.get("reference"):
        for run in record.results["models"].get(model, {}).get("runs", ()):
            if run["depth"] == depth:
                how = f"PyTorch, {run['how']}"
                found.append(Rung("01", how, "bf16", run["bytes_per_token"], run["tpot"]["p50"]))
    if (record := records.get("engine")) and size in record.results["sizes"]:
        layers = record.results["sizes"][size]["layers"]
        gemv, int4 = (records[name].results["shapes"] if name in records else {} for name in ("gemv", "int4"))
        of_layer, head = [f"{size} {name}" for name in ("qkv", "o", "gate_up", "down")], gemv.get(f"{size} lm_head")
        steps = [("02", gemv, "naive"), ("03", gemv, "gemv"), ("04", int4, "naive"), ("04", int4, "pdl")]
        for lesson, shapes, kernel in steps:
            if head and all(kernel in shapes.get(name, {}).get("cold", ()) for name in of_layer):
                last = head["cold"][kernel if shapes is gemv else "gemv"]["seconds"]["p50"]
                times = [shapes[name]["cold"][kernel]["seconds"]["p50"] for name in of_layer]
                nbytes = layers * sum(shapes[name]["bytes"] for name in of_layer) + head["bytes"]
                weights, best = "bf16" if shapes is gemv else "INT4", "naive" if kernel == "naive" else "best"
                found.append(Rung(lesson, f"{best} kernels", weights, nbytes, layers * sum(times) + last, False))
        entry = record.results["sizes"][size]["depths"].get(str(depth), {})
        for name in ("eager", "one graph", "in flight", "pdl"):
            if rung := entry.get("rungs", {}).get(name):
                found.append(Rung("06", f"engine, {name}", "INT4", entry["bytes"], rung["seconds"]["p50"]))
    if record := records.get("scoreboard"):
        ours = record.results["models"].get(model, {}).get("contenders", {}).get("nanoqwen", {"depths": {}})
        if entry := ours["depths"].get(str(depth)):
            found.append(Rung("07", "engine, beside its peers", "INT4", entry["bytes"], entry["seconds"]["p50"]))
    return found


def plot_rungs(rungs: Sequence[Rung], bandwidth: float, probe: float, title: str, label: str = "recorded") -> Plot:
    """Tokens a second and the share of `bandwidth` (bytes/s), a row for each rung.

    Raises:
        CeilingError: a rung above `bandwidth`. ValueError: no rungs.
    """
    if not rungs:
        raise ValueError("plot_rungs needs at least one rung")
    shares = [100 * below_ceiling(r.nbytes / r.seconds, bandwidth, r.name) for r in rungs]
    rates, rows = [1 / r.seconds for r in rungs], range(len(rungs))
    with rc_context(FIGURE_STYLE):
        figure, (left, right) = _figure(8.6, 1.6 + 0.34 * len(rungs), title, label, 2)
        for row, rung in enumerate(rungs):
            how = {"color": _BLUE if rung.weights == "bf16" else _ORANGE, "height": 0.7}
            how |= {} if rung.whole else {"alpha": 0.55, "hatch": "///", "edgecolor": "#FFFFFF"}
            left.barh(row, rates[row], **how)
            right.barh(row, shares[row], **how)
            left.text(rates[row] + 0.015 * max(rates), row, f"{rates[row]:,.0f}", va="center", fontsize=9)
            right.text(shares[row] + 1, row, f"{shares[row]:.0f}", va="center", fontsize=9)
        left.set(xlabel="tok/s", xlim=(0, 1.15 * max(rates)))
        right.set(xlabel="MBU, % of the datasheet's bandwidth", xlim=(0, 104))
        right.axvline(100, color=_INK, lw=1.6, label="datasheet")
        right.axvline(100 * probe / bandwidth, color=_INK, lw=1.2, ls="--", label="read probe")
        left.set_yticks(rows, [f"{r.lesson} · {r.name}" for r in rungs], fontsize=9)
        right.set_yticks(rows, [])
        for axis in (left, right):
            axis.invert_yaxis()
            axis.grid(False, axis="y")
        for words, how in (
            ("bf16", {"color": _BLUE}),
            ("INT4", {"color": _ORANGE}),
            ("products only, added up", {"color": _GREY, "hatch": "///", "edgecolor": "#FFFFFF"}),
        ):
            right.barh(0, 0, label=words, **how)
        figure.legend(loc="outside lower center", ncols=5, fontsize=9)
    return figure


def plot_field(models: Mapping[str, Mapping], depth: str, bandwidth: float, probe: float, label="recorded") -> Plot:
    """Each contender's bytes and milliseconds a token, of every model that was timed at `depth`.

    Args:
        models: as the record `scoreboard` has them. bandwidth, probe: bytes/s of the datasheet and of the read probe.
    """
    names = list(dict.fromkeys(name for model in models.values() for name in model["contenders"]))
    points = [
        (model, name, at["bytes"] / 1e9, 1e3 * at["seconds"]["p50"])
        for model, entry in models.items()
        for name, each in entry["contenders"].items()
        if (at := each["depths"].get(depth))
    ]
    if not points:
        raise ValueError(f"no contender was timed at depth {depth}")
    sizes, times = ([point[i] for point in points] for i in (2, 3))
    ends = [min(sizes) / 2, 2 * max(sizes)]
    with rc_context(FIGURE_STYLE):
        figure, (axis,) = _figure(7.6, 5.2, f"Bytes and time of a token, {int(depth):,} tokens deep", label)
        for share in (0.5, 0.25, 0.1, 0.05, 0.02):
            line = [1e12 * gb / bandwidth / share for gb in ends]
            axis.plot(ends, line, color=_GREY, lw=0.8, ls=":", zorder=1)
            words = {"fontsize": 8, "color": "#666666", "ha": "right", "va": "bottom", "clip_on": True}
            axis.text(ends[0] * 1.28, line[0] * 1.28, f"{100 * share:.0f} %", **words)
        axis.plot(ends, [1e12 * gb / probe for gb in ends], color=_INK, lw=1.2, ls="--", label="read probe")
        axis.plot(ends, [1e12 * gb / bandwidth for gb in ends], color=_INK, lw=1.6, label="datasheet: 100 %")
        for i, name in enumerate(names):
            at = [(x, y) for _, who, x, y in points if who == name]
            how = {"marker": _MARKS[i % len(_MARKS)], "color": OKABE_ITO[i % 6], "ms": 9 if name == "nanoqwen" else 7}
            axis.plot(*zip(*at, strict=True), ls="", mec=_INK, mew=0.6, label=name, zorder=3, **how)
        paper = {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.5}
        for model, name, x, y in points:
            if name == "nanoqwen":
                how = {"textcoords": "offset points", "ha": "right", "fontsize": 9, "bbox": paper}
                axis.annotate(_size(model), (x, y), (-8, -4), **how)
        axis.set(xscale="log", yscale="log", xlim=ends)
        axis.set(ylim=(1e12 * ends[0] / bandwidth, 2 * max(times)), xlabel="GB a token", ylabel="ms a token")
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter("{x:g}")
            each.set_minor_formatter(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "235" else ""))
        axis.tick_params(which="minor", labelsize=8)
        axis.text(0.98, 0.97, "dotted: MBU", transform=axis.transAxes, fontsize=8, va="top", ha="right", bbox=paper)
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    return figure


def plot_depths(model: str, entry: Mapping, probe: float, label: str = "recorded") -> Plot:
    """Milliseconds a token of each contender against the tokens in the cache, above what our bytes need."""
    ours = entry["contenders"]["nanoqwen"]["depths"]
    depths = [int(depth) for depth in ours]
    floor = [1e3 * at["bytes"] / probe for at in ours.values()]
    with rc_context(FIGURE_STYLE):
        figure, (axis,) = _figure(7.4, 4.0, f"{_size(model)}: what a longer cache costs", label)
        for i, (name, each) in enumerate(entry["contenders"].items()):
            times = [1e3 * at["seconds"]["p50"] for at in each["depths"].values()]
            how = {"marker": _MARKS[i % len(_MARKS)], "color": OKABE_ITO[i % 6], "ms": 6, "label": name}
            axis.plot([int(depth) for depth in each["depths"]], times, **how)
        axis.plot(depths, floor, color=_INK, ls="--", lw=1.2, label="our bytes at the read probe's speed")
        axis.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel="ms a token")
        axis.set_xticks(depths, [f"{depth:,}" for depth in depths])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.minorticks_off()
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    return figure


def step_parts(entry: Mapping) -> dict[str, float]:
    """Seconds of a step by `PARTS`, of one depth of the record `engine`; `between`: while no launch runs."""
    names = {kind: part for part, kinds in PARTS.items() for kind in kinds}
    parts = dict.fromkeys((part for part, kinds in PARTS.items() if set(kinds) & set(entry["regions"])), 0.0)
    for kind, region in entry["regions"].items():
        part = names.get(kind, kind)
        parts[part] = parts.get(part, 0.0) + region["seconds"]["p50"]
    gap = entry["gap"]["p50"] if "gap" in entry else entry.get("gap_s", 0.0)  # records before the launches' own clock
    return parts | {"between": max(0.0, gap)}


def launches_of(entry: Mapping) -> int:
    """Launches of a step, of one depth of the record `engine`."""
    return sum(region["launches"] for region in entry["regions"].values())


def plot_parts(steps: Mapping[str, Mapping], probe: float, label: str = "recorded") -> Plot:
    """Where a step's time goes: a bar for each model, and in it the time that its bytes need (bytes/s: `probe`).

    Args:
        steps: by the model's size, one depth of the record `engine`.
    """
    parts = {size: step_parts(entry) for size, entry in steps.items()}
    names = list(dict.fromkeys(name for each in parts.values() for name in each))
    with rc_context(FIGURE_STYLE):
        figure, (axis,) = _figure(7.6, 1.7 + 0.55 * len(steps), "A step, by the kinds of its launches", label)
        left = dict.fromkeys(steps, 0.0)
        for i, name in enumerate(names):
            for row, size in enumerate(steps):
                width = 1e6 * parts[size].get(name, 0.0)
                how = {"color": _PALE, "hatch": "///", "edgecolor": _GREY} if name == "between" else {}
                how = how or {"color": OKABE_ITO[(0, 4, 2, 1, 5, 3, 6)[i % 7]], "edgecolor": "#FFFFFF"}
                axis.barh(row, width, left=left[size], height=0.6, lw=0.5, label=name if row == 0 else None, **how)
                left[size] += width
        for row, (size, entry) in enumerate(steps.items()):
            floor = 1e6 * entry["bytes"] / probe
            words = "its bytes at the read probe's speed" if row == 0 else None
            axis.plot([floor, floor], [row - 0.42, row + 0.42], color=_INK, lw=2.4, label=words)
            axis.text(left[size], row, f" {left[size]:,.0f} µs", va="center", fontsize=9)
        axis.set_yticks(range(len(steps)), list(steps))
        axis.set(xlabel="µs of a step", xlim=(0, 1.15 * max(left.values())))
        axis.invert_yaxis()
        axis.grid(False, axis="y")
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    return figure


def ceilings(record: Record) -> tuple[float, float]:
    """Bytes/s that a record's results are held against: the datasheet's, and the read probe's.

    Where there is no datasheet, the probe stands for it.
    """
    probe, spec = record.results["ceilings"]["read_probe"]["bytes_per_s"], spec_for(record.device)
    return (spec.bandwidth if spec else probe), probe


def _size(model: str) -> str:
    """`qwen2.5-coder-7b` → `7B`; other names stay."""
    size = model.rpartition("-")[2]
    return size.upper() if size[:1].isdigit() else model


def _figure(width: float, height: float, title: str, label: str, columns: int = 1):
    check_label(label)
    figure = Plot(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}   ({label})", x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure, figure.subplots(1, columns, squeeze=False)[0]
