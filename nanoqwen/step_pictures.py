"""The figures of lesson 06: slots of pages, a token's time rung by rung, a step along the clock, bytes against time.

All but the first are drawn from the record `engine`: whatever rungs and regions it holds, in its order.
"""

from collections.abc import Collection, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from nanoqwen.ledger import Ledger, Row
from nanoqwen.lesson import FIGURE_STYLE
from nanoqwen.records import Record
from nanoqwen.roofline import OKABE_ITO, Plot, check_label

_BLUE, _ORANGE = OKABE_ITO[:2]
_INK, _PALE, _GREY = "#222222", "#EEEEEE", "#999999"
_COLOURS = (*OKABE_ITO[:6], OKABE_ITO[9], OKABE_ITO[8], OKABE_ITO[6])
_REGIONS = {
    "embed": "embed",
    "qkv": "qkv_proj",
    "bias": "qkv_proj",
    "o": "o_proj",
    "gate_up": "gate_up_proj",
    "down": "down_proj",
    "lm_head": "lm_head",
    "kv_read": "attention",
}


def region_bytes(of: Ledger, regions: Collection[str]) -> dict[str, int]:
    """A step's bytes, each where the launch that moves it stands; what moves none of the ledger's has 0.

    The norm before a matrix is that matrix's; the new keys and values are those of `rope_append`, or of `attention`
    where that one stores them too.

    Raises:
        ValueError: a tensor of a region that is not among `regions`.
    """
    found = dict.fromkeys(regions, 0)
    for row in of.rows:
        if (region := _region(row, regions)) not in found:
            raise ValueError(f"{row.name} is moved by {region!r}, which is none of the regions {', '.join(regions)}")
        found[region] += row.bytes
    return found


def _region(row: Row, regions: Collection[str]) -> str:
    if row.kind == "kv_write":
        return "rope_append" if "rope_append" in regions else "attention"
    if row.kind == "norm":
        if "input_layernorm" in row.name:
            return "qkv_proj"
        return "gate_up_proj" if "post_attention_layernorm" in row.name else "lm_head"
    return _REGIONS[row.kind]


def plot_slots(marks: Tensor, words: Sequence[str], label: str) -> Plot:
    """The pages of a pool, a row each, and what stands in each of their slots.

    Args:
        marks: (pages, slots) whole numbers, 0 free. words: what each number says, at most five.

    Raises:
        ValueError: a mark that has no word.
    """
    if not 0 <= int(marks.min()) <= int(marks.max()) < len(words):
        raise ValueError(f"marks go from {int(marks.min())} to {int(marks.max())}; there are {len(words)} words")
    pages, slots = marks.shape
    colours = ListedColormap(["#FFFFFF", "#BBBBBB", OKABE_ITO[4], _ORANGE, OKABE_ITO[3]][: len(words)])
    with rc_context(FIGURE_STYLE):
        figure, axis = _figure(7.4, 1.4 + 0.22 * pages, "The pool, page by page", label)
        axis.pcolormesh(marks.cpu(), cmap=colours, vmin=-0.5, vmax=len(words) - 0.5, edgecolors=_INK, lw=0.5)
        axis.set(xlabel="slot", ylabel="page")
        axis.set_xticks([i + 0.5 for i in range(slots)], range(slots))
        axis.set_yticks([i + 0.5 for i in range(pages)], range(pages))
        axis.set(xlim=(-0.03, slots + 0.03), ylim=(pages + 0.03, -0.03))  # the first page on top, and its edge
        axis.grid(False)
        handles = [Rectangle((0, 0), 1, 1, facecolor=colours(i), edgecolor=_INK) for i in range(len(words))]
        figure.legend(handles, words, loc="outside lower center", ncols=len(words), fontsize=9)
    return figure


def plot_ladder(record: Record, size: str, depth: str, label: str = "recorded") -> Plot:
    """Milliseconds of a token on each rung: those that its bytes need at the read probe's speed, and all others."""
    entry = record.results["sizes"][size]["depths"][depth]
    floor = 1e3 * entry["bytes"] / record.results["ceilings"]["read_probe"]["bytes_per_s"]
    times = {name: 1e3 * rung["seconds"]["p50"] for name, rung in entry["rungs"].items()}
    rows = range(len(times))
    with rc_context(FIGURE_STYLE):
        title = f"{size}, {int(depth):,} tokens deep, {record.device}"
        figure, axis = _figure(7.6, 1.5 + 0.33 * len(times), title, label)
        axis.barh(rows, [min(floor, t) for t in times.values()], color=_BLUE, height=0.7, label="reading the bytes")
        rest = [max(0.0, t - floor) for t in times.values()]
        axis.barh(rows, rest, left=floor, color=_ORANGE, hatch="///", edgecolor="#FFFFFF", height=0.7, label="the rest")
        for row, (name, time) in enumerate(times.items()):
            words = f" {time:.3g} ms, {entry['rungs'][name]['tokens_per_s']:,.0f} tok/s"
            axis.text(time, row, words, va="center", fontsize=9)
        axis.axvline(floor, color=_INK, lw=1.6, label=f"{entry['bytes'] / 1e9:.3g} GB at the read probe's speed")
        axis.set_yticks(rows, list(times))
        axis.invert_yaxis()
        axis.set(xlabel="ms a token", xlim=(0, 1.3 * max(times.values())))
        axis.grid(False, axis="y")
        figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def plot_step(record: Record, size: str, depth: str, nbytes: Mapping[str, int], label: str = "recorded") -> Plot:
    """A step along the clock: all its launches, then one layer of them above the times that their bytes need.

    Launches of one region have the same length, that of their mean. What the regions do not explain, the gap, stands
    at the end: where in the step it lies is not known.

    Args:
        nbytes: of `region_bytes`.
    """
    entry = record.results["sizes"][size]["depths"][depth]
    rate = record.results["ceilings"]["read_probe"]["bytes_per_s"]
    each = {n: 1e6 * r["seconds"]["p50"] / r["launches"] for n, r in entry["regions"].items()}  # µs
    whole = sum(region["seconds"]["p50"] for region in entry["regions"].values())
    thin = [n for n, region in entry["regions"].items() if region["seconds"]["p50"] < 0.01 * whole]  # to be seen
    colours = dict(zip((n for n in each if n not in thin), _COLOURS, strict=False)) | dict.fromkeys(thin, _INK)
    order = step_order({name: region["launches"] for name, region in entry["regions"].items()})
    layer = [name for name in each if entry["regions"][name]["launches"] > 1]
    with rc_context(FIGURE_STYLE):
        figure, (above, below) = _figure(7.6, 4.3, f"{size}, {int(depth):,} tokens deep, {record.device}", label, 2)
        end = _row(above, 0, order, {n: t / 1e3 for n, t in each.items()}, colours)
        if (gap := 1e3 * entry.get("gap_s", 0)) > 0:
            above.barh(0, gap, left=end, color=_PALE, hatch="xxx", edgecolor=_GREY, lw=0.4, height=0.7)
        above.set(xlabel="ms", yticks=[0], yticklabels=["a step"], title="all launches of a token")
        end = _row(below, 0, layer, each, colours, named=True)
        _row(below, 1, layer, {n: 1e6 * nbytes[n] / entry["regions"][n]["launches"] / rate for n in layer}, colours)
        below.set(xlabel="µs", yticks=[0, 1], xlim=(0, 1.02 * end), title="one layer of it")
        below.set_yticklabels([label.split(":")[0].split(",")[0], "its bytes at the\nprobe's speed"])
        below.invert_yaxis()
        for axis in (above, below):
            axis.grid(False, axis="y")
        handles = [above.barh(0, 0, color=colours[name], label=name) for name in each if name not in thin]
        handles += [above.barh(0, 0, color=_INK, label=", ".join(thin))] * bool(thin)
        handles += [above.barh(0, 0, color=_PALE, hatch="xxx", edgecolor=_GREY, lw=0.4, label="gap")] * (gap > 0)
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    return figure


def step_order(launches: Mapping[str, int]) -> list[str]:
    """A step's launches one after another, by name: what is launched once stands before or behind all layers.

    Args:
        launches: of each name in a whole step, in the order in which names come first.
    """
    names = list(launches)
    in_layers = [name for name in names if launches[name] > 1]
    if not in_layers:
        return names
    first, last = names.index(in_layers[0]), names.index(in_layers[-1])
    return [*names[:first], *in_layers * launches[in_layers[0]], *names[last + 1 :]]


def plot_bytes_and_time(
    record: Record,
    depths: Mapping[str, str],
    nbytes: Mapping[str, Mapping[str, int]],
    label: str = "recorded",
) -> Plot:
    """Microseconds of a launch against the bytes that it moves, above what the read probe needs for them.

    Args:
        depths: by size, which of its depths.
        nbytes: by size, of `region_bytes`. A region without bytes is left out.
    """
    rate = record.results["ceilings"]["read_probe"]["bytes_per_s"]
    regions = list(dict.fromkeys(n for of in nbytes.values() for n, b in of.items() if b))
    marks = dict(zip(regions, "osD^vPX*<>", strict=False))
    with rc_context(FIGURE_STYLE):
        figure, axis = _figure(7.6, 4.9, f"One launch of a step, {record.device}", label)
        lowest, most = 1e9, 0.0
        for colour, (size, of) in zip(OKABE_ITO, nbytes.items(), strict=False):
            found = record.results["sizes"][size]["depths"][depths[size]]["regions"]
            for name in (n for n in found if of[n]):
                x, y = (v / found[name]["launches"] for v in (of[name], 1e6 * found[name]["seconds"]["p50"]))
                axis.plot(x, y, marks[name], color=colour, ms=8, mec=_INK, mew=0.6, zorder=3)
                lowest, most = min(lowest, y), max(most, x)
        x = [rate * lowest / 4e6, 2 * most]  # from a quarter of the shortest time on
        floor = [1e6 * v / rate for v in x]
        axis.plot(x, floor, color=_INK, lw=1.6)
        axis.fill_between(x, floor, floor[0], color=_PALE)
        axis.set(xscale="log", yscale="log", xlabel="bytes of one launch", ylabel="µs", ylim=(floor[0], None))
        axis.xaxis.set_major_formatter(FuncFormatter(_with_unit))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        handles = [axis.plot([], [], marks[n], color="#FFFFFF", mec=_INK, label=n)[0] for n in regions]
        sizes = zip(nbytes, OKABE_ITO, strict=False)
        handles += [axis.plot([], [], "o", color=colour, label=size)[0] for size, colour in sizes]
        handles += axis.plot([], [], color=_INK, lw=1.6, label="the read probe's speed")
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _with_unit(nbytes: float, _) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes:g} B"


def _row(axis, y: float, names: Sequence[str], lengths: Mapping[str, float], colours: Mapping, named: bool = False):
    """Bars one behind the other; where the last one ends."""
    at, whole = 0.0, sum(lengths[name] for name in names)
    for name in names:
        edge = {"edgecolor": "#FFFFFF", "lw": 0.5 if named else 0.1}
        axis.barh(y, lengths[name], left=at, color=colours[name], height=0.7, **edge)
        if named and lengths[name] > 0.06 * whole:
            ink = "#FFFFFF" if sum(to_rgb(colours[name])) < 1.3 else _INK
            axis.text(
                at + lengths[name] / 2, y, f"{lengths[name]:.3g}", ha="center", va="center", fontsize=9, color=ink
            )
        at += lengths[name]
    return at


def _figure(width: float, height: float, title: str, label: str, rows: int = 1):
    check_label(label)
    figure = Plot(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}   ({label})", x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = figure.subplots(rows, 1, height_ratios=range(1, rows + 1))
    return figure, axes
