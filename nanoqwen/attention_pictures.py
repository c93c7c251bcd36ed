"""The figures of lesson 05: memory in slabs and in pages, the walk along a table, cache against weights, time against
context, and the pipeline of a producer and its consumers."""

from collections.abc import Mapping, Sequence

import torch
from matplotlib import rc_context
from matplotlib.patches import Rectangle
from torch import Tensor

from nanoqwen.lesson import FIGURE_STYLE
from nanoqwen.paged_kv import PagedKV
from nanoqwen.records import Record
from nanoqwen.roofline import OKABE_ITO, Plot, check_label

_BLUE, _ORANGE, _GREEN, _RED = OKABE_ITO[:4]
_INK, _PALE, _GREY = "#222222", "#EEEEEE", "#999999"
_BAR = {"edgecolor": "#FFFFFF", "lw": 0.5}


def _figure(width: float, height: float, title: str, label: str, columns: int = 1):
    check_label(label)
    figure = Plot(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}   ({label})", x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def plot_slabs_and_pages(lengths: Sequence[int], longest: int, page_size: int = 16, label: str = "counted") -> Plot:
    """What sequences of these lengths hold of a cache: a slab of `longest` tokens each, or the pages that they need."""
    paged = [-(-n // page_size) * page_size for n in lengths]
    with rc_context(FIGURE_STYLE):
        figure, axes = _figure(7.6, 1.3 + 0.3 * len(lengths), "Who holds the memory?", label, columns=2)
        for axis, room, name in ((axes[0], [longest] * len(lengths), "slabs"), (axes[1], paged, "pages")):
            rows = range(len(lengths))
            axis.barh(rows, lengths, color=_BLUE, label="tokens", **_BAR)
            idle = [r - n for r, n in zip(room, lengths, strict=True)]
            axis.barh(rows, idle, left=lengths, color=_ORANGE, hatch="///", label="held, and empty", **_BAR)
            share = sum(lengths) / sum(room)
            axis.set_title(f"{name}: {100 * share:.0f} % of what is held is used")
            axis.set(xlim=(0, 1.02 * longest), xlabel="tokens' room", yticks=rows)
            axis.set_yticklabels([f"sequence {i}" for i in rows] if axis is axes[0] else [])
            axis.invert_yaxis()
            axis.grid(False, axis="y")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def plot_walk(cache: PagedKV, sequences: Mapping[str, int], label: str = "counted") -> Plot:
    """The tables of up to three sequences, and where in the pool their entries point; shared pages have two arrows."""
    colours = dict(zip(sequences, (_BLUE, _RED, _GREEN), strict=False))
    users = [[n for n, s in sequences.items() if page in cache.pages(s)] for page in range(cache.pool.shape[1])]
    # One table above the pool, one below, one above again: no arrow crosses a box.
    aside = 2.6 + len(cache.pages(next(iter(sequences.values()))))
    places = dict(zip(sequences, ((0.0, 2.1), (0.0, -2.1), (aside, 2.1)), strict=False))
    with rc_context(FIGURE_STYLE):
        figure, (axis,) = _figure(7.6, 3.4 if len(sequences) > 1 else 2.2, "From a token to its page", label)
        for page, names in enumerate(users):
            colour = _PALE if not names else _GREY if len(names) > 1 else colours[names[0]]
            words = f"{page}\n{'free' if not names else '+'.join(names)}"
            _box(axis, page, 0, colour, words, 0.35 if names else 1)
        for name, sequence in sequences.items():
            x, y = places[name]
            for i, page in enumerate(pages := cache.pages(sequence)):
                _box(axis, x + i, y, colours[name], str(page))
                start, end = (y, 0.95) if y > 0 else (y + 0.9, -0.05)
                style = {"arrowstyle": "->", "color": colours[name], "lw": 1.5, "shrinkA": 0, "shrinkB": 0}
                axis.annotate("", (page + 0.47, end), (x + i + 0.47, start), arrowprops=style)
            words = f"table of {name}: {cache.length(sequence)} tokens"
            axis.text(x, y + 1.0 if y > 0 else y - 0.1, words, va="bottom" if y > 0 else "top", fontsize=10)
            right = x + len(pages)
        axis.text(-0.15, 0.45, "pool", ha="right", va="center", fontsize=10)
        low = -2.8 if len(sequences) > 1 else -0.2
        axis.set(xlim=(-0.8, max(len(users), right)), ylim=(low, 3.6), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        axis.grid(False)
    return figure


def _box(axis, x: float, y: float, colour: str, words: str, alpha: float = 0.35) -> None:
    axis.add_patch(Rectangle((x, y), 0.94, 0.9, facecolor=colour, alpha=alpha, edgecolor=_INK, lw=0.6))
    axis.text(x + 0.47, y + 0.45, words, ha="center", va="center", fontsize=9, color=_INK)


def plot_crossing(models: Mapping[str, tuple[float, float]], limit: int, label: str = "counted") -> Plot:
    """Bytes of cache that a token reads against the context, and where they pass the bytes of weights.

    Args:
        models: bytes of weights, and bytes of cache for each token of context, by name.
        limit: tokens of context that the models were trained for.
    """
    tokens = [2**i for i in range(7, 19)]
    with rc_context(FIGURE_STYLE):
        figure, (axis,) = _figure(7.4, 4.0, "Bytes that one new token reads", label)
        for (name, (weights, each)), colour in zip(models.items(), OKABE_ITO, strict=False):
            axis.plot(tokens, [n * each / 1e9 for n in tokens], color=colour, label=f"{name}: cache")
            axis.axhline(weights / 1e9, color=colour, ls="--", lw=1.4, label=f"{name}: weights")
            axis.plot(weights / each, weights / 1e9, "o", color=colour, ms=9, mec=_INK, zorder=3)
        axis.axvline(limit, color=_INK, lw=1, ls=":")
        words = {"transform": axis.get_xaxis_transform(), "ha": "right", "va": "bottom", "fontsize": 9}
        axis.text(0.95 * limit, 0.02, f"trained for {limit:,} tokens", **words)
        axis.set(xscale="log", yscale="log", xlabel="tokens in the cache, one sequence", ylabel="GB a token")
        axis.set_xticks(tokens[::2], [f"{n:,}" for n in tokens[::2]])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        figure.legend(loc="outside lower center", ncols=len(models), fontsize=9)
    return figure


def plot_contexts(record: Record, size: str, kernels: Sequence[str], label: str = "recorded") -> Plot:
    """Microseconds of each kernel against the context, above the time that the read probe needs for the bytes."""
    contexts = record.results["sizes"][size]["contexts"]
    tokens = [int(n) for n in contexts]
    rate = record.results["ceilings"]["read_probe"]["bytes_per_s"]
    with rc_context(FIGURE_STYLE):
        figure, (axis,) = _figure(7.6, 4.6, f"{size} heads, one query, {record.device}", label)
        for i, kernel in enumerate(kernels):
            times = [1e6 * at["cold"][kernel]["seconds"]["p50"] for at in contexts.values()]
            how = (
                {"color": _INK, "ls": "--"}
                if kernel == "torch"
                else {"color": (*OKABE_ITO[:6], _GREY, OKABE_ITO[9])[i % 8]}
            )
            axis.plot(tokens, times, marker="osD^vPX*"[i % 8], ms=6, label=kernel, **how)
        floor = [1e6 * at["bytes"] / rate for at in contexts.values()]
        axis.fill_between(tokens, floor, min(floor) / 2, color=_PALE, label="less than the read probe needs")
        axis.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel="µs", ylim=(min(floor) / 2, None))
        axis.set_xticks(tokens, [f"{n:,}" for n in tokens])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    return figure


def plot_pipeline(timestamps: Tensor, on_gpu: bool) -> Plot:
    """The warps of one block along the clock: when each waited for a fill of the ring, and when it worked on one.

    Args:
        timestamps: of `paged_attention_ring`; fills that did not happen hold -1.
        on_gpu: the clock is a multiprocessor's. Otherwise only the order of the events says anything, and is drawn.
    """
    times = timestamps[(timestamps >= 0).all(-1).all(-1)].cpu()
    if not len(times):
        raise ValueError("no fill was stamped: timestamps hold what they held before the launch")
    if on_gpu:
        times, label, unit = times - times.min(), "measured", "cycles of the multiprocessor's clock"
    else:
        order = torch.unique(times, return_inverse=True)
        times, label, unit = order[1], "simulated, order only: no times", "events, in their order"
    fills, warps, _ = times.shape
    with rc_context(FIGURE_STYLE):
        figure, (axis,) = _figure(7.6, 3.9, "One block of the ring", label)
        for warp in range(warps):
            for fill in range(fills):
                began, had, done = times[fill, warp].tolist()
                row = 0 if warp == warps - 1 else warp + 1  # the producer first
                axis.barh(row, had - began, left=began, color=_PALE, edgecolor=_GREY, lw=0.5, height=0.75)
                colour = _ORANGE if fill % 2 else _BLUE
                axis.barh(row, max(done - had, 1), left=had, color=colour, edgecolor=_INK, lw=0.4, height=0.75)
        axis.set_yticks(range(warps), ["producer", *(f"consumer {i}" for i in range(warps - 1))])
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.grid(False, axis="y")
        for colour, words in ((_PALE, "waits"), (_BLUE, "a fill of keys"), (_ORANGE, "a fill of values")):
            axis.barh(0, 0, color=colour, edgecolor=_GREY, label=words)
        figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure
