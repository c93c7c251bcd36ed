"""What an observed run of a kernel tells: totals, a table by source line, findings, and two figures.

Everything here is *simulated*: counts that the SIMT machine made, never times.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

SECTOR = 32  # bytes: what a GPU moves at least
_HOW = ("load", "store", "atomic", "async copy")
# A barrier that some threads miss is a cause, what is then read too early its effect: causes come first.
_CAUSES = ("fault", "deadlock", "synccheck", "memcheck", "racecheck", "initcheck")


@dataclass
class Finding:
    """One fault that an observer saw.

    `kind` is the observer: memcheck, initcheck, racecheck, synccheck, deadlock, or fault (a crash).
    """

    kind: str
    what: str
    message: str
    file: str | None = None
    line: int | None = None
    source: str | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    lane: int | None = None
    warp: int | None = None
    buffer: str | None = None
    offset: int | None = None
    other: str | None = None  # the other party of a race or of a divergent barrier: who, and where
    other_line: int | None = None
    waits: list[str] = field(default_factory=list)  # in a deadlock: who waits where
    kernel: str | None = None

    @classmethod
    def read(
        cls,
        item: dict,
        where: Callable[[dict], tuple[str | None, int | None]],
        source_line: Callable[[str | None, int | None], str | None],
        buffers: Sequence[str],
        shared: Sequence[str],
        kernel: str,
    ) -> Finding:
        """From the machine's own record."""
        file, line = where(item)
        index = item.get("buffer", -1)
        buffer = f"`{buffers[index]}`" if 0 <= index < len(buffers) else None
        in_shared = None
        if index == -1 and "offset" in item:
            in_shared = f"shared `{shared[item['shared']]}`" if "shared" in item else "shared memory"
        other = other_line = None
        if "other" in item:
            other_file, other_line = where(item["other"])
            who = item["other"].get("who") or _who(item["other"])
            other = f"{who} at {_short(other_file)}:{other_line}" if other_line else who
        waits = []
        for wait in item.get("waits", ()):
            wait_file, wait_line = where(wait)
            threads = f"{wait['count']} threads, the first {_who(wait)}" if wait["count"] > 1 else _who(wait)
            waits.append(f"{_short(wait_file)}:{wait_line}: {threads}: {wait['text']}")
        return cls(
            kind=item["kind"],
            what=item["what"],
            message=item["text"].replace("{buffer}", buffer or "a buffer"),
            file=file,
            line=line,
            source=source_line(file, line),
            block=tuple(item["block"]) if "block" in item else None,
            thread=tuple(item["thread"]) if "thread" in item else None,
            lane=item.get("lane"),
            warp=item.get("warp"),
            buffer=buffer.strip("`") if buffer else in_shared,
            offset=item.get("offset"),
            other=other,
            other_line=other_line,
            waits=waits,
            kernel=kernel,
        )

    def __str__(self) -> str:
        place = f"{_short(self.file)}:{self.line}" if self.line else (self.kernel or "?")
        rows = [f"[{self.kind}] {place}: {self.what}"]
        if self.source:
            rows.append(f"    {self.line} | {self.source.strip()}")
        who = f" (thread {_point(self.thread)} of block {_point(self.block)})" if self.thread else ""
        rows.append(f"    {self.message}{who}")
        if self.offset is not None and self.buffer:
            rows.append(f"    at byte {self.offset} of {self.buffer}")
        if self.other:
            rows.append(f"    the other: {self.other}")
        rows += [f"    waits at {wait}" for wait in self.waits]
        return "\n".join(rows)


def _point(triple: Sequence[int] | None) -> str:
    if triple is None:
        return "?"
    x, y, z = triple
    return str(x) if y == z == 0 else f"({x},{y},{z})"


def _who(item: dict) -> str:
    return f"thread {_point(item['thread'])} of block {_point(item['block'])}"


def _short(file: str | None) -> str:
    return Path(file).name if file else "?"


@dataclass
class Totals:
    """Sums over all launches. A *request* is one memory instruction of one warp; a *sector* is 32 bytes."""

    launches: int = 0
    global_load_requests: int = 0
    global_load_sectors: int = 0
    global_store_requests: int = 0
    global_store_sectors: int = 0
    global_atomic_requests: int = 0
    global_atomic_sectors: int = 0
    async_copies: int = 0  # requests of cp.async, and bulk copies
    async_sectors: int = 0
    bytes_needed: int = 0  # distinct bytes that requests asked for
    bytes_moved: int = 0  # sectors × 32
    shared_load_requests: int = 0
    shared_load_wavefronts: int = 0
    shared_store_requests: int = 0
    shared_store_wavefronts: int = 0
    bank_conflicts: int = 0  # wavefronts beyond the fewest that the bytes need

    @property
    def efficiency(self) -> float:
        """Bytes needed over bytes moved: 1.0 when every byte of every sector was asked for."""
        return self.bytes_needed / self.bytes_moved if self.bytes_moved else 1.0

    @property
    def sectors_per_load(self) -> float:
        return self.global_load_sectors / self.global_load_requests if self.global_load_requests else 0.0


@dataclass
class Line:
    """What one source line did: one kind of access to one tensor or `__shared__` array."""

    file: str | None
    line: int | None
    source: str | None
    space: str  # "global" or "shared"
    how: str  # "load", "store", "atomic" or "async copy"
    buffers: tuple[str, ...] = ()
    bytes_per_lane: int = 0
    requests: int = 0
    lanes: int = 0  # accesses of single threads
    sectors: int = 0
    bytes_needed: int = 0
    wavefronts: int = 0
    least_wavefronts: int = 0
    pictures: list[Picture] = field(default_factory=list)

    @property
    def per_request(self) -> float:
        """Sectors (global) or wavefronts (shared) for one request."""
        amount = self.sectors if self.space == "global" else self.wavefronts
        return amount / self.requests if self.requests else 0.0

    @property
    def efficiency(self) -> float:
        if self.space == "shared":
            return self.least_wavefronts / self.wavefronts if self.wavefronts else 1.0
        return self.bytes_needed / (self.sectors * SECTOR) if self.sectors else 1.0


@dataclass
class Picture:
    """One request in full: the byte offset that each lane touched."""

    block: tuple[int, int, int]
    warp: int
    repetition: int
    buffer: str
    bytes_per_lane: int
    offsets: dict[int, int]  # lane -> byte offset in the buffer

    @property
    def sectors(self) -> list[int]:
        """Numbers of the sectors touched, counted from the buffer's start."""
        size = self.bytes_per_lane
        return sorted({s for o in self.offsets.values() for s in range(o // SECTOR, (o + size - 1) // SECTOR + 1)})


@dataclass
class Launch:
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    buffers: list[tuple[str, int]]


class Report:
    """What `simt.observe` gives: `totals`, `lines`, `findings`, `launches`, and the function's `result`."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.findings: list[Finding] = []
        self.launches: list[Launch] = []
        self.result: Any = None
        self.stopped = False
        self._lines: dict[tuple, Line] = {}
        self._sources: dict[str, tuple[int, str]] = {}

    @property
    def lines(self) -> list[Line]:
        """One entry for each source line and kind of access, in the order of the source."""
        return sorted(self._lines.values(), key=lambda e: (e.file or "", e.line or 0, e.space, e.how, e.buffers))

    @property
    def clean(self) -> bool:
        """No observer found anything."""
        return not self.findings

    def add_launch(self, kernel, grid, block, sites, places, findings, buffers, shared, source) -> None:
        """Adds what one observed launch counted (called by `Kernel.launch`)."""
        filename, first_line, text = source
        self._sources[filename] = (first_line, text)
        self.launches.append(Launch(kernel, grid, block, buffers))
        self.findings.extend(sorted(findings, key=lambda f: _CAUSES.index(f.kind) if f.kind in _CAUSES else -1))
        totals = self.totals
        totals.launches += 1
        for site in sites:
            file, line = places.get(site["pc"], (None, None))
            space, how = ("global", "shared")[site["space"]], _HOW[site["how"]]
            known = [name for name, _ in buffers] if space == "global" else shared
            names = tuple(name for i, name in enumerate(known) if site["buffers"] >> i & 1)
            if space == "shared" and how == "async copy":
                continue  # the landing of a copy, which is counted where it reads
            # Two tensors read on one line are two entries: they are what a reader wants to compare.
            key = (file, line, space, how, names, site["bytes"])
            entry = self._lines.get(key)
            if entry is None:
                entry = Line(file, line, self._source(file, line), space, how, names, site["bytes"])
                self._lines[key] = entry
            entry.requests += site["requests"]
            entry.lanes += site["lanes"]
            entry.sectors += site["sectors"]
            entry.bytes_needed += site["needed"]
            entry.wavefronts += site["wavefronts"]
            entry.least_wavefronts += site["least_wavefronts"]
            for p in site["pictures"]:
                name = known[p["buffer"]] if 0 <= p["buffer"] < len(known) else "shared memory"
                offsets = {int(lane): at for lane, at in p["lanes"].items()}
                picture = Picture(tuple(p["block"]), p["warp"], p["repetition"], name, site["bytes"], offsets)
                entry.pictures.append(picture)
            self._add_totals(space, how, site)

    def _add_totals(self, space: str, how: str, site: dict) -> None:
        totals = self.totals
        if space == "global":
            prefix = {"load": "global_load", "store": "global_store", "atomic": "global_atomic"}.get(how)
            if prefix:
                _add(totals, f"{prefix}_requests", site["requests"])
                _add(totals, f"{prefix}_sectors", site["sectors"])
            else:
                totals.async_copies += site["requests"]
                totals.async_sectors += site["sectors"]
            totals.bytes_needed += site["needed"]
            totals.bytes_moved += site["sectors"] * SECTOR
            return
        prefix = "shared_load" if how == "load" else "shared_store"
        _add(totals, f"{prefix}_requests", site["requests"])
        _add(totals, f"{prefix}_wavefronts", site["wavefronts"])
        totals.bank_conflicts += site["wavefronts"] - site["least_wavefronts"]

    def _source(self, file: str | None, line: int | None) -> str | None:
        if file not in self._sources or not line:
            return None
        first, text = self._sources[file]
        rows = text.splitlines()
        return rows[line - first] if 0 <= line - first < len(rows) else None

    # ---- words ----

    def __repr__(self) -> str:
        return f"<Report: {self.totals.launches} launches, {len(self.findings)} findings>"

    def _heading(self) -> str:
        names = defaultdict(int)
        for launch in self.launches:
            grid, block = (_shape(launch.grid), _shape(launch.block))
            names[f"{launch.kernel} <<<{grid}, {block}>>>"] += 1
        return "; ".join(f"{name} × {n}" if n > 1 else name for name, n in names.items()) or "no launch"

    def _summary(self) -> list[tuple[str, str]]:
        t = self.totals
        rows = []

        def access(label: str, requests: int, amount: int, unit: str) -> None:
            if requests:
                rows.append((label, f"{requests:,} requests, {amount:,} {unit} ({amount / requests:.1f} a request)"))

        access("global loads", t.global_load_requests, t.global_load_sectors, "sectors")
        access("global stores", t.global_store_requests, t.global_store_sectors, "sectors")
        access("global atomics", t.global_atomic_requests, t.global_atomic_sectors, "sectors")
        access("asynchronous copies", t.async_copies, t.async_sectors, "sectors")
        if t.bytes_moved:
            words = f"{t.bytes_needed:,} needed, {t.bytes_moved:,} moved: {t.efficiency:.0%} efficient"
            rows.append(("bytes", words))
        access("shared loads", t.shared_load_requests, t.shared_load_wavefronts, "wavefronts")
        access("shared stores", t.shared_store_requests, t.shared_store_wavefronts, "wavefronts")
        if t.shared_load_requests or t.shared_store_requests:
            rows.append(("bank conflicts", f"{t.bank_conflicts:,} wavefronts too many"))
        return rows

    def _table(self) -> list[tuple[str, ...]]:
        rows = []
        for entry in self.lines:
            unit = "sectors" if entry.space == "global" else "wavefronts"
            rows.append(
                (
                    f"{_short(entry.file)}:{entry.line or '?'}",
                    f"{entry.space} {entry.how}" + (f" {'/'.join(entry.buffers)}" if entry.buffers else ""),
                    f"{entry.requests:,}",
                    f"{entry.sectors if entry.space == 'global' else entry.wavefronts:,} {unit}",
                    f"{entry.per_request:.1f}",
                    f"{entry.efficiency:.0%}",
                    (entry.source or "").strip(),
                )
            )
        return rows

    _COLUMNS = ("line", "access", "requests", "moved", "a request", "efficiency", "source")

    def __str__(self) -> str:
        out = [f"simulated: {self._heading()}"]
        out += [f"  {label:<20} {words}" for label, words in self._summary()]
        table = [self._COLUMNS, *self._table()]
        if len(table) > 1:
            widths = [max(len(row[i]) for row in table) for i in range(6)]
            for row in table:
                cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
                out.append(("  " + "  ".join(cells) + "  " + row[6]).rstrip())
        out.append(f"  {len(self.findings) or 'no'} finding{'s' * (len(self.findings) != 1)}")
        out += [str(f) for f in self.findings]
        return "\n".join(out)

    def _repr_html_(self) -> str:
        def cell(text: str, tag: str = "td", style: str = "") -> str:
            return f"<{tag} style='padding:2px 10px;white-space:nowrap;{style}'>{html.escape(text)}</{tag}>"

        left, right = "text-align:left;", "text-align:right;"
        parts = [f"<div><b>simulated</b> · <code>{html.escape(self._heading())}</code></div><table>"]
        parts += [f"<tr>{cell(a, 'th', left)}{cell(b, 'td', left)}</tr>" for a, b in self._summary()]
        parts.append("</table>")
        rows = self._table()
        if rows:
            heads = "".join(cell(c, "th", left if i in (0, 1, 6) else right) for i, c in enumerate(self._COLUMNS))
            parts.append(f"<table><tr>{heads}</tr>")
            most = max((e.sectors or e.wavefronts for e in self.lines), default=1) or 1
            for entry, row in zip(self.lines, rows, strict=True):
                # The bar says how much of all traffic a line makes; its colour is readable on light and dark.
                share = 100 * (entry.sectors or entry.wavefronts) / most
                colours = f"rgba(230,159,0,.35) {share:.0f}%,transparent {share:.0f}%"
                bar = f"background:linear-gradient(90deg,{colours});"
                cells = "".join(cell(c, "td", left if i in (0, 1) else right) for i, c in enumerate(row[:6]))
                source = f"<td style='text-align:left;white-space:pre;font-family:monospace;{bar}'>"
                parts.append(f"<tr>{cells}{source}{html.escape(row[6])}</td></tr>")
            parts.append("</table>")
        if self.findings:
            parts.append(f"<div><b>{len(self.findings)} finding{'s' * (len(self.findings) != 1)}</b></div>")
            style = "border-left:4px solid #D55E00;padding-left:8px;white-space:pre-wrap;font-family:monospace"
            parts += [f"<pre style='{style}'>{html.escape(str(finding))}</pre>" for finding in self.findings]
        else:
            parts.append("<div>no findings</div>")
        return "".join(parts)

    # ---- figures ----

    def plot(self, line: int | None = None, pictures: int = 1, source: bool = True):
        """Draws which lane touches which sector, and the source with a heat column; returns the figure.

        Args:
            line: show requests of this source line only; by default of each that touches global memory.
            pictures: how many requests of each line to draw.
            source: draw the source beside them.
        """
        return plot(self, line, pictures, source)


def _add(totals: Totals, name: str, amount: int) -> None:
    assert name in {f.name for f in fields(totals)}
    setattr(totals, name, getattr(totals, name) + amount)


def _shape(triple: Sequence[int]) -> str:
    sizes = list(triple)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return str(sizes[0]) if len(sizes) == 1 else "(" + ",".join(map(str, sizes)) + ")"


# Colours of Okabe and Ito, told apart by everyone. A figure stands on a white card of its own, as all figures of the
# lessons do: it reads the same on a light and on a dark page.
_BLUE, _ORANGE, _PALE, _INK, _GREY = "#0072B2", "#E69F00", "#F3F3F3", "#222222", "#666666"
_LANES = 32


def plot(report: Report, line: int | None = None, pictures: int = 1, source: bool = True):
    import matplotlib.pyplot as plt

    shown = [e for e in report.lines if e.space == "global" and e.pictures and line in (None, e.line)]
    if not shown and line is not None:
        raise ValueError(f"line {line} makes no global access; lines that do: {[e.line for e in report.lines]}")
    requests = [(e, p) for e in shown for p in e.pictures[:pictures]][:6]
    heat = _heat(report) if source else []
    panels = len(requests) + bool(heat)
    if not panels:
        raise ValueError("there is nothing to draw: the kernel made no global access")
    heights = [1.45] * len(requests) + ([0.4 + 0.17 * len(heat)] if heat else [])
    with plt.rc_context({"figure.constrained_layout.use": False, "axes.grid": False, "font.size": 9}):
        figure, axes = plt.subplots(
            panels,
            1,
            figsize=(7.6, sum(heights) + 0.6),
            gridspec_kw={"height_ratios": heights},
            squeeze=False,
            layout="constrained",
            facecolor="white",
        )
        for axis, (entry, picture) in zip(axes[:, 0], requests, strict=False):
            _draw_request(axis, entry, picture)
        if heat:
            _draw_heat(axes[-1, 0], heat)
        figure.suptitle(f"simulated · {report._heading()}", color=_INK, fontsize=10, x=0.01, ha="left")
    plt.close(figure)  # a notebook shows the figure that the cell returns; it need not show it twice
    return figure


def _bare(axis, title: str) -> None:
    axis.set(xticks=[], yticks=[], facecolor="white")
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_title(title, fontsize=9, color=_INK, loc="left")


def _places(sectors: Sequence[int]) -> tuple[dict[int, float], float]:
    """Where each sector's box begins on an axis as wide as the lanes, and how wide a box is.

    Neighbours in memory touch; others stand apart.
    """
    at, starts = 0.0, {}
    for before, sector in zip([sectors[0] - 1, *sectors], sectors, strict=False):
        at += 0.0 if sector == before + 1 else 0.45
        starts[sector] = at
        at += 1.0
    width = min(_LANES / at, 5.0)
    margin = (_LANES - at * width) / 2
    return {sector: margin + start * width for sector, start in starts.items()}, width


def _draw_request(axis, entry: Line, picture: Picture) -> None:
    """Lanes above; below, the sectors that move: the bytes that lanes ask for are filled, the rest of a box is pale."""
    sectors, size = picture.sectors, picture.bytes_per_lane
    place, width = _places(sectors)
    for lane, offset in picture.offsets.items():
        for sector in range(offset // SECTOR, (offset + size - 1) // SECTOR + 1):
            low = max(offset, sector * SECTOR) - sector * SECTOR
            high = min(offset + size, (sector + 1) * SECTOR) - sector * SECTOR
            left, right = (place[sector] + width * b / SECTOR for b in (low, high))
            seen = max(right, left + 0.13)  # two bytes of a narrow box must still be seen
            axis.fill_between([left, seen], 0.01, 0.23, color=_ORANGE, linewidth=0, zorder=2)
            axis.plot([lane + 0.5, (left + right) / 2], [0.92, 0.25], color=_BLUE, linewidth=0.7, alpha=0.75)
    for start in place.values():
        axis.fill_between([start, start + width], 0, 0.24, facecolor=_PALE, edgecolor="none", zorder=1)
        axis.plot(
            [start, start + width, start + width, start, start], [0, 0, 0.24, 0.24, 0], color=_INK, lw=0.6, zorder=3
        )
    axis.scatter([lane + 0.5 for lane in picture.offsets], [1] * len(picture.offsets), color=_BLUE, s=16, zorder=3)
    for lane in (0, 8, 16, 24, 31):
        axis.text(lane + 0.5, 1.13, str(lane), ha="center", va="bottom", fontsize=7, color=_GREY)
    labels = list(place.items())[:: max(1, -(-len(sectors) // 7))]
    for sector, start in labels:
        axis.text(start, -0.07, f"{sector * SECTOR:,}", ha="left", va="top", fontsize=7, color=_GREY)
    for y, text in ((1, "lane"), (0.12, "sectors"), (-0.19, "at byte")):
        axis.text(-0.5, y, text, ha="right", va="center", fontsize=8, color=_GREY)
    axis.set_xlim(-3, _LANES + 0.2)
    axis.set_ylim(-0.3, 1.3)
    moved, needed = len(sectors) * SECTOR, len(set(picture.offsets.values())) * size
    count = f"{len(sectors)} sector{'s' * (len(sectors) != 1)}"
    what = f"line {entry.line}: one {entry.how} of {picture.buffer} by a warp"
    _bare(axis, f"{what}: {needed:,} bytes asked for, {count} = {moved:,} bytes moved")


def _heat(report: Report) -> list[tuple[int, str, int]]:
    """(line number, text, sectors) of the stretch of source where accesses are."""
    touched = defaultdict(int)
    for entry in report.lines:
        if entry.line and entry.space == "global" and entry.source is not None:
            touched[entry.file, entry.line] += entry.sectors
    if not touched:
        return []
    file = max(touched, key=touched.get)[0]
    lines = [n for f, n in touched if f == file]
    first, text = report._sources[file]
    rows = text.splitlines()
    low, high = max(first, min(lines) - 6), min(first + len(rows) - 1, max(lines) + 2)
    return [(n, rows[n - first], touched.get((file, n), 0)) for n in range(low, high + 1)][:60]


def _draw_heat(axis, heat: list[tuple[int, str, int]]) -> None:
    most = max(amount for *_, amount in heat) or 1
    for i, (number, text, amount) in enumerate(heat):
        if amount:
            axis.barh(i, 0.12 * amount / most, left=0.0, height=0.8, color=_ORANGE)
            axis.text(0.205, i, f"{amount:,}", fontsize=7, va="center", ha="right", color=_INK)
        axis.text(0.25, i, f"{number}", fontsize=7, va="center", ha="right", color=_GREY, family="monospace")
        shown = text.expandtabs(4)
        shown = shown if len(shown) <= 88 else shown[:87] + "…"
        colour = _INK if amount else _GREY
        axis.text(0.26, i, shown, fontsize=7, va="center", color=colour, family="monospace")
    axis.set_xlim(0, 1)
    axis.set_ylim(len(heat) - 0.4, -0.6)
    _bare(axis, "sectors moved by each line, all requests together")
