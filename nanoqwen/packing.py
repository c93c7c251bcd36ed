"""INT4 in memory: eight values a 32-bit word, in an order that a kernel is compiled for.

A value −8…7 is a two's-complement nibble. Which value lies in which nibble is the *layout*; words of one layout mean
nothing to a kernel of another, so a layout has a number, which files and kernels carry. The numbers that device code
shares with Python stand here, and nowhere else; `python -m nanoqwen.packing` writes their header,
`csrc/include/format.cuh`.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoqwen.paths import CSRC

GROUP_SIZE = 128
"""Neighbours of one row that share a scale, unless said otherwise."""
GROUP_SIZES = (32, 64, 128, 256)
ALIGNMENT = 128
"""Bytes: a line of the L2 cache. Each payload of a file starts at a multiple of it."""
PAGE_SIZE = 16
"""Tokens of one page of the KV cache."""
SEQUENTIAL = 0
VALUE_SHUFFLE = 1
FRAGMENT = 2

HEADER = CSRC / "include" / "format.cuh"


@dataclass(frozen=True)
class Layout:
    """An order of the values of a matrix in 32-bit words. It repeats from tile to tile, row-major.

    Attributes:
        id: what files and kernels carry.
        tile: rows and columns that one turn of the order covers.
        order: for each nibble of a tile, from the lowest of its first word on, the value that lies there: row within
            the tile × columns of the tile + column.
        why: what the order is good for.

    Raises:
        ValueError: `order` does not name each value of the tile once.
    """

    id: int
    name: str
    tile: tuple[int, int]
    order: tuple[int, ...]
    why: str

    def __post_init__(self):
        rows, cols = self.tile
        if cols % 8 or sorted(self.order) != list(range(rows * cols)):
            raise ValueError(f"layout {self.name}: the order must name each value of a tile {self.tile} once, in words")

    def picture(self) -> str:
        """The first word as text, the highest bits on the left: bits above, values below."""
        rows = self.tile[0]
        names = [f"w{i % self.tile[1]}" if rows == 1 else divmod(i, self.tile[1]) for i in self.order[:8]]
        names = [name if isinstance(name, str) else f"w{name[0]},{name[1]}" for name in names]
        highest = [4 * i + 3 for i in range(8)]
        cells = [(f"{high}–{high - 3}", name) for high, name in sorted(zip(highest, names, strict=True))[::-1]]
        width = max(len(text) for cell in cells for text in cell)
        bits, values = (" │ ".join(text.center(width) for text in line) for line in zip(*cells, strict=True))
        return f"bits   │ {bits} │\nvalues │ {values} │"


def _fragment_order():
    """Of 16 rows × 64 columns, what lane (g, t) of a warp holds: in four words, rows g and g + 8 of columns 8t … 8t + 7
    of the first 32 columns, then of the last 32. Within a word as ValueShuffle."""
    for lane in range(32):
        for block in (0, 32):
            for row in (lane // 4, lane // 4 + 8):
                yield from (row * 64 + block + lane % 4 * 8 + k for k in (0, 2, 4, 6, 1, 3, 5, 7))


LAYOUTS: dict[int, Layout] = {
    layout.id: layout
    for layout in (
        Layout(SEQUENTIAL, "sequential", (1, 8), (0, 1, 2, 3, 4, 5, 6, 7), "the order a reader expects"),
        # Masking a word with 0x000f000f leaves values 0 and 1 in the two halves, the pair that half2 arithmetic wants;
        # shifted by 4, 8 and 12 bits the same mask gives 2 and 3, 4 and 5, 6 and 7.
        Layout(
            VALUE_SHUFFLE,
            "ValueShuffle",
            (1, 8),
            (0, 2, 4, 6, 1, 3, 5, 7),
            "one mask leaves two neighbours in the two halves of a register",
        ),
        # csrc/int4_gemm.cu has the picture.
        Layout(
            FRAGMENT,
            "fragment",
            (16, 64),
            tuple(_fragment_order()),
            "a warp loads the fragments of `mma`, 16 bytes a lane, ready to be unpacked",
        ),
    )
}
"""Every layout, by its id."""


def layout_of(id: int) -> Layout:
    """The layout with this id.

    Raises:
        ValueError: there is none.
    """
    if id not in LAYOUTS:
        known = ", ".join(f"{layout.id} ({layout.name})" for layout in LAYOUTS.values())
        raise ValueError(f"layout id is {id!r}; nanoqwen knows {known}")
    return LAYOUTS[id]


def group_of(cols: int, groups: int) -> int:
    """Columns that share a scale, where a row of `cols` has `groups` of them.

    Raises:
        ValueError: that is no group size.
    """
    group = cols // groups if cols % groups == 0 else None
    if group not in GROUP_SIZES:
        raise ValueError(
            f"scales have {groups} groups for K = {cols} columns; a group must be one of "
            f"{', '.join(map(str, GROUP_SIZES))} and divide K"
        )
    return group


def words_shape(rows: int, cols: int, layout: int) -> tuple[int, int]:
    """The shape of a matrix of `rows` × `cols` values in words.

    Raises:
        ValueError: columns that do not fill the layout's tiles, an unknown layout.
    """
    form = layout_of(layout)
    _check_cols(cols, form)
    return rows + -rows % form.tile[0], cols // 8


def pack(values: Tensor, layout: int = VALUE_SHUFFLE) -> Tensor:
    """int8 values −8…7 (rows, cols) → int32 words (rows, cols / 8).

    Where a layout's tile is more than one row high, rows of zeros fill the last tile, and the words have as many rows.

    Raises:
        TypeError: not int8.
        ValueError: not a matrix, columns that do not fill the layout's tiles, a value outside −8…7, an unknown layout.
    """
    form = layout_of(layout)
    tall, wide = form.tile
    if values.dtype != torch.int8:
        raise TypeError(f"values are {values.dtype}; they must be torch.int8")
    if values.dim() != 2 or not values.numel():
        raise ValueError(f"values have shape {tuple(values.shape)}; they must be a matrix (rows, cols)")
    rows, cols = values.shape
    shape = words_shape(rows, cols, layout)
    low, high = values.aminmax()
    if low < -8 or high > 7:
        raise ValueError(f"values span {low.item()}…{high.item()}; four bits hold −8…7")
    if pad := shape[0] - rows:
        values = torch.cat((values, values.new_zeros(pad, cols)))
    tiles = values.unflatten(0, (-1, tall)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)  # (R, C, tall · wide)
    nibbles = tiles.index_select(2, _order(layout, values.device)).unflatten(2, (-1, 8))
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=values.device)
    for i in range(8):
        words |= (nibbles[..., i].int() & 15) << 4 * i
    return words.reshape(shape)


def unpack(words: Tensor, layout: int = VALUE_SHUFFLE, rows: int | None = None) -> Tensor:
    """int32 words (rows, cols / 8) → int8 values (rows, cols); `rows` leaves out those that only fill the last tile.

    Raises:
        TypeError: not int32.
        ValueError: not a matrix, rows or columns that do not fill the layout's tiles, an unknown layout.
    """
    form = layout_of(layout)
    tall, wide = form.tile
    if words.dtype != torch.int32:
        raise TypeError(f"words are {words.dtype}; they must be torch.int32")
    if words.dim() != 2 or not words.numel():
        raise ValueError(f"words have shape {tuple(words.shape)}; they must be a matrix (rows, cols / 8)")
    have, cols = words.shape[0], 8 * words.shape[1]
    _check_cols(cols, form)
    rows = have if rows is None else rows
    if have % tall or not have - tall < rows <= have:
        raise ValueError(f"words have {have} rows for {rows}; layout {form.name} packs {tall} at a time")
    one_word = form.tile == (1, 8)  # then each nibble goes straight to its place
    nibbles = torch.empty(*words.shape, 8, dtype=torch.int8, device=words.device)
    for i, place in enumerate(form.order if one_word else range(8)):
        # Up to the top, then down again: the shift to the right brings the sign along.
        nibbles[..., place] = (words << 28 - 4 * i) >> 28
    if one_word:
        return nibbles.flatten(1)
    tiles = nibbles.reshape(have // tall, cols // wide, tall * wide)
    values = tiles.index_select(2, _order(layout, words.device).argsort())
    return values.unflatten(2, (tall, wide)).transpose(1, 2).reshape(have, cols)[:rows]


def convert(words: Tensor, source: int, target: int, rows: int | None = None) -> Tensor:
    """The words of a matrix of `rows` rows, from one layout to another.

    Raises:
        TypeError, ValueError: as `unpack` and `pack`.
    """
    layout_of(target)
    return words if source == target else pack(unpack(words, source, rows), target)


def tile_scales(scales: Tensor) -> Tensor:
    """Scales (rows, groups) as the layout "fragment" wants them: (tiles of 16 rows, groups, 16).

    Place 2g + h of a tile is row g + 8h, so that one 4-byte load gives a lane of `mma` both its rows. Rows that fill
    the last tile have scale 0.

    Raises:
        ValueError: not a matrix.
    """
    if scales.dim() != 2 or not scales.numel():
        raise ValueError(f"scales have shape {tuple(scales.shape)}; they must be a matrix (rows, groups)")
    if pad := -scales.shape[0] % 16:
        scales = torch.cat((scales, scales.new_zeros(pad, scales.shape[1])))
    return scales.unflatten(0, (-1, 2, 8)).permute(0, 3, 2, 1).flatten(2).contiguous()


def device_header() -> str:
    """The text of `csrc/include/format.cuh`: the numbers above as device code sees them."""
    sizes = " || ".join(f"size == {size}" for size in GROUP_SIZES)
    lines = [
        "// Numbers that device code shares with Python. Written by `python -m nanoqwen.packing`: change them there.",
        "#pragma once",
        "",
        f"constexpr int GROUP_SIZE = {GROUP_SIZE};  // neighbours of a row that share a scale, unless said otherwise",
        f"constexpr int ALIGNMENT = {ALIGNMENT};   // bytes: each payload of a file starts at a multiple of it",
        f"constexpr int PAGE_SIZE = {PAGE_SIZE};    // tokens of one page of the KV cache",
        "",
        "// Layouts: which value lies in which nibble of a word.",
        *(f"constexpr int LAYOUT_{_constant(layout.name)} = {layout.id};" for layout in LAYOUTS.values()),
        "",
        "template <int size>  // a variable: device code cannot call a function of the host",
        f"constexpr bool is_group_size = {sizes};",
    ]
    return "\n".join(lines) + "\n"


@functools.lru_cache
def _order(layout: int, device: torch.device) -> Tensor:
    return torch.tensor(LAYOUTS[layout].order, device=device)


def _check_cols(cols: int, layout: Layout) -> None:
    if cols % layout.tile[1]:
        raise ValueError(f"there are {cols} columns; layout {layout.name} packs {layout.tile[1]} at a time")


def _constant(name: str) -> str:
    return "".join("_" + c if c.isupper() and i else c for i, c in enumerate(name)).upper()


if __name__ == "__main__":
    HEADER.write_text(device_header(), encoding="utf-8")
