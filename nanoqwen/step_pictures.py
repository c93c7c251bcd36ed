"""The figures of lesson 06: slots of pages, a token's time rung by rung, a step along the clock, bytes against time.

All but the first are drawn from the record `engine`: whatever rungs and regions it holds, in its order.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

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
_INK = "#222222"
_COLOURS = (*OKABE_ITO[:6], OKABE_ITO[9], OKABE_ITO[8], OKABE_ITO[6])
Launch = tuple[str, float, float]  # name, start, end
_REGIONS = {
    "embed": "embed",
    "qkv": "qkv_proj",
    "bias": "qkv_proj",
    "o": "o_proj",
    "gate_up": "gate_up_proj",
    "down": "down_proj",
    "lm_head": "lm_head",
    "kv_read": "attention",
    "kv_write": "attention",
}


def region_bytes(of: Ledger, regions: Collection[str]) -> dict[str, int]:
    """A step's bytes, each where the launch that moves it stands; what moves none of the ledger's has 0.

    The norm before a matrix is that matrix's; the new keys and values are attention's, which stores them.

    Raises:
        ValueError: a tensor of a region that is not among `regions`.
    """
    found = dict.fromkeys(regions, 0)
    for row in of.rows:
        if (region := _region(row)) not in found:
            raise ValueError(f"{row.name} is moved by {region!r}, which is none of the regions {', '.join(regions)}")
        found[region] += row.bytes
    return found


def _region(row: Row) -> str:
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
    """A step along the clock, with PDL and without: all its launches, and below them one layer from the middle.

    Strong colour is exposed time, from the end of the launch before; pale is what a launch does before that. Where
    nothing is drawn nothing runs. A layer's launches have as many rows as run at once, then the times that their
    bytes need.

    Args:
        nbytes: of `region_bytes`.
    """
    entry = record.results["sizes"][size]["depths"][depth]
    regions, steps = entry["regions"], {"with PDL": entry["step"], "one by one": entry["one_by_one"]["step"]}
    rate = record.results["ceilings"]["read_probe"]["bytes_per_s"]
    least = 0.01 * sum(region["seconds"]["p50"] for region in regions.values())
    thin = [name for name, region in regions.items() if region["seconds"]["p50"] < least]  # to be seen
    colours = dict(zip((n for n in regions if n not in thin), _COLOURS, strict=False)) | dict.fromkeys(thin, _INK)
    with rc_context(FIGURE_STYLE):
        figure, (above, below) = _figure(7.6, 5.4, f"{size}, {int(depth):,} tokens deep, {record.device}", label, 2)
        ticks, row, left, right = {}, 0, 0.0, 0.0
        for y, (name, step) in enumerate(steps.items()):
            _row(above, [y] * len(step), [(n, start / 1e3, end / 1e3) for n, start, end in step], colours)
            layer = _layer(step)
            rows = [row + at for at in _first_free(layer)]
            _row(below, rows, layer, colours, detail=True)
            ticks[(row + max(rows)) / 2], row = name, max(rows) + 1
            left, right = min(left, layer[1][1]), max(right, layer[-1][2])
        ends = list(accumulate((1e6 * nbytes[n] / regions[n]["launches"] / rate for n, *_ in layer[1:]), initial=0.0))
        floor = [(n, *span) for (n, *_), span in zip(layer[1:], pairwise(ends), strict=True)]
        _row(below, [row] * len(floor), floor, colours)
        ticks[row], edge = "its bytes at the\nprobe's speed", 0.02 * (right - left)
        above.set(xlabel="ms", xlim=(0, None), yticks=range(2), yticklabels=steps, title="all launches of a token")
        below.set(xlabel="µs from the end of the launch before", title="one layer of it")
        below.set(yticks=list(ticks), yticklabels=ticks.values(), xlim=(left - edge, right + edge))
        for axis in (above, below):
            axis.invert_yaxis()
            axis.grid(False, axis="y")
        handles = [Rectangle((0, 0), 1, 1, color=colours[name], label=name) for name in regions if name not in thin]
        handles += [Rectangle((0, 0), 1, 1, color=_INK, label=", ".join(thin))] * bool(thin)
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _layer(step: Sequence[Launch]) -> list[Launch]:
    """A layer from the middle of a step, and before it the launch at whose end its clock starts."""
    names = [name for name, *_ in step]
    first = next(name for name in names if names.count(name) > 1)
    starts = [i for i, name in enumerate(names) if name == first]
    at = starts[(len(starts) - 1) // 2]
    part = step[at - 1 : at + starts[1] - starts[0]]
    return [(name, start - part[0][2], end - part[0][2]) for name, start, end in part]


def _first_free(launches: Sequence[Launch]) -> list[int]:
    """A row for each launch: the first in which the one before has ended."""
    ends: list[float] = []
    rows = []
    for _, start, end in launches:
        row = next((i for i, ended in enumerate(ends) if ended <= start), len(ends))
        ends[row : row + 1] = [end]
        rows.append(row)
    return rows


def plot_bytes_and_time(
    record: Record,
    depths: Mapping[str, str],
    nbytes: Mapping[str, Mapping[str, int]],
    label: str = "recorded",
) -> Plot:
    """Exposed microseconds of a launch with PDL against its bytes; a tail leads to what it takes without.

    The read probe's speed is no bound for one launch with PDL: some of its bytes may come before its exposed time.

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
            entry = record.results["sizes"][size]["depths"][depths[size]]
            for name in (n for n in entry["regions"] if of[n]):
                both = [entry["regions"][name], entry["one_by_one"]["regions"][name]]
                x, (y, without) = of[name] / both[0]["launches"], (_each(region) for region in both)
                axis.plot(x, y, marks[name], color=colour, ms=8, mec=_INK, mew=0.6, zorder=3)
                axis.vlines(x, y, without, color=colour, lw=1.6)
                lowest, most = min(lowest, y, without), max(most, x)
        x = [rate * lowest / 4e6, 2 * most]  # from a quarter of the shortest time on
        floor = [1e6 * v / rate for v in x]
        axis.plot(x, floor, color=_INK, lw=1.6)
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


def _each(region: Mapping) -> float:
    """Microseconds of one launch."""
    return 1e6 * region["seconds"]["p50"] / region["launches"]


def _with_unit(nbytes: float, _) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes:g} B"


def _row(axis, rows: Sequence[int], launches: Sequence[Launch], colours: Mapping[str, str], detail: bool = False):
    """Launches as bars of their exposed time; with `detail` also what lies before, and all but one in figures."""
    ended, whole = launches[0][1], launches[-1][2]
    for i, (row, (name, start, end)) in enumerate(zip(rows, launches, strict=True)):
        alone = min(max(start, ended), end)
        axis.barh(row, end - alone, left=alone, color=colours[name], height=0.7)
        if detail:
            axis.barh(row, alone - start, left=start, color=colours[name], alpha=0.3, height=0.7)
        if detail and i and end - alone > 0.05 * whole:
            ink = "#FFFFFF" if sum(to_rgb(colours[name])) < 1.3 else _INK
            middle = (alone + end) / 2
            axis.text(middle, row, f"{end - alone:.3g}", ha="center", va="center", fontsize=8.5, color=ink)
        ended = max(ended, end)


def _figure(width: float, height: float, title: str, label: str, rows: int = 1):
    check_label(label)
    figure = Plot(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}   ({label})", x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = figure.subplots(rows, 1, height_ratios=range(1, rows + 1))
    return figure, axes
