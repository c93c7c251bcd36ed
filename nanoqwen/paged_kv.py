"""The KV cache in pages: one pool for all layers, and for each sequence a table of the pages that are its own.

A page holds 16 tokens; its part for one KV head of one layer is one run of memory, keys before values. Sequences grow
by a page at a time, so that at most 15 tokens' room lies idle, and sequences with a common beginning share its pages.
Pages: Kwon et al., 2023 (arXiv 2309.06180); lesson 05.

    cache = PagedKV(layers=28, pages=256, kv_heads=4, head_dim=128)
    a = cache.new()
    cache.reserve(a, 100)                               # room for 100 tokens
    for layer in range(28): cache.write(a, layer, k, v)     # a prompt; a kernel writes into pool[layer] by itself
    cache.advance(a, 100)                               # all layers have them: they count
    b = cache.fork(a)                                   # the same 100 tokens, at no cost
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoqwen.packing import ALIGNMENT, PAGE_SIZE


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    room: int = 0  # tokens that may be written without another `reserve`


class PagedKV:
    """Pages, tables and lengths of up to `sequences` sequences, laid out in device memory once.

    Which page is whose is decided on the host, which keeps its own account; the device has a copy of what kernels read.

    Args:
        pages: in the pool, for each layer alike.
        max_pages: of one sequence; by default all of them.
        dtype: float16 or bfloat16.

    Attributes:
        pool: (layers, pages, kv_heads, 2, page_size, head_dim); `pool[layer]` is what kernels take.
        tables: (sequences, max_pages) int32, -1 where there is no page.
        lengths: (sequences) int32.

    Raises:
        TypeError: another dtype.
        ValueError: a size below 1, or a page of a KV head that is no multiple of 128 bytes.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        *,
        sequences: int = 1,
        max_pages: int | None = None,
        page_size: int = PAGE_SIZE,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ):
        max_pages = pages if max_pages is None else max_pages
        sizes = {"layers": layers, "pages": pages, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in (sizes | {"sequences": sequences, "max_pages": max_pages, "page_size": page_size}).items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        if dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"dtype is {dtype}; it must be torch.float16 or torch.bfloat16")
        if (size := 2 * page_size * head_dim * dtype.itemsize) % ALIGNMENT:
            fits = ALIGNMENT // math.gcd(ALIGNMENT, size // page_size)
            raise ValueError(
                f"a page of {page_size} tokens with head_dim {head_dim} is {size} bytes for a KV head; it must be a "
                f"multiple of {ALIGNMENT}: use a page_size that is a multiple of {fits}"
            )
        self.page_size, self.max_pages = page_size, max_pages
        self.pool = torch.empty(layers, pages, kv_heads, 2, page_size, head_dim, dtype=dtype, device=device)
        self.tables = torch.full((sequences, max_pages), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._users = [0] * pages  # sequences that hold the page
        self._free = list(range(pages - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}
        self._placed: tuple[tuple, tuple[Tensor, ...]] = (), ()  # what `_places` made last

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def new(self) -> int:
        """A new, empty sequence: its row of `tables` and `lengths`.

        Raises:
            RuntimeError: there are as many as the cache was made for.
        """
        free = (row for row in range(len(self.tables)) if row not in self._sequences)
        if (row := next(free, None)) is None:
            raise RuntimeError(f"all {len(self.tables)} sequences are in use; free one, or make a cache for more")
        self._sequences[row] = _Sequence()
        return row

    def length(self, sequence: int) -> int:
        """Tokens that count."""
        return self._get(sequence).length

    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence, in the order of its tokens."""
        return list(self._get(sequence).pages)

    def view(self, sequence: int) -> tuple[Tensor, Tensor]:
        """table (max_pages) and length (1) of a sequence, as kernels take them; both change as the sequence grows."""
        self._get(sequence)
        return self.tables[sequence], self.lengths[sequence : sequence + 1]

    def reserve(self, sequence: int, tokens: int) -> None:
        """Make room for `tokens` more: new pages, and a copy of the last one if it is partial and shared.

        Raises:
            ValueError: no such sequence, a negative number, or more pages than a table holds.
            RuntimeError: the pool has too few free pages. Nothing has changed in either case.
        """
        mine = self._get(sequence)
        if tokens < 0:
            raise ValueError(f"sequence {sequence} cannot grow by {tokens} tokens")
        total, last = self._pages_for(mine.length + tokens), mine.length // self.page_size
        if total > self.max_pages:
            raise ValueError(
                f"sequence {sequence} would need {total} pages for {mine.length} + {tokens} tokens; "
                f"its table holds {self.max_pages}"
            )
        copy = tokens > 0 and last < len(mine.pages) and self._users[mine.pages[last]] > 1
        wanted = max(0, total - len(mine.pages)) + copy
        if wanted > len(self._free):
            raise RuntimeError(
                f"sequence {sequence} wants {wanted} more pages for {mine.length} + {tokens} tokens; "
                f"{len(self._free)} of {len(self._users)} are free: free a sequence, or make a larger pool"
            )
        if copy:
            shared = mine.pages[last]
            mine.pages[last] = page = self._take()
            self.pool[:, page] = self.pool[:, shared]
            self._release(sequence, shared)
        mine.pages += [self._take() for _ in range(total - len(mine.pages))]
        mine.room = max(mine.room, mine.length + tokens)
        self._show(sequence)

    def write(self, sequence: int, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of a prompt's tokens behind those that count.

        Args:
            k, v: (tokens, kv_heads, head_dim), of any floating dtype.

        Raises:
            ValueError: no such sequence, another shape, or no room: `reserve` comes first.
        """
        mine = self._get(sequence)
        shape = (len(k), self.pool.shape[2], self.pool.shape[5])
        for name, tensor in (("k", k), ("v", v)):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be (tokens, {shape[1]}, {shape[2]})")
        self._check_room(sequence, mine, len(k))
        pages, slots = self._places(mine, mine.length, mine.length + len(k))
        for i, tensor in enumerate((k, v)):
            self.pool[layer, pages, :, i, slots] = tensor.to(self.pool.dtype)

    def read(self, sequence: int, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values that count: two tensors (tokens, kv_heads, head_dim)."""
        mine = self._get(sequence)
        pages, slots = self._places(mine, 0, mine.length)
        return self.pool[layer, pages, :, 0, slots], self.pool[layer, pages, :, 1, slots]

    def advance(self, sequence: int, tokens: int, on_device: bool = True) -> None:
        """Count `tokens` more, which all layers have now.

        Args:
            on_device: False where a kernel has already added them to `lengths`.

        Raises:
            ValueError: no such sequence, or more than there is room for.
        """
        mine = self._get(sequence)
        self._check_room(sequence, mine, tokens)
        mine.length += tokens
        if on_device:
            self.lengths[sequence] = mine.length

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, in the same pages. Either must `reserve` before it grows.

        Raises:
            ValueError: no such sequence. RuntimeError: there are as many as the cache was made for.
        """
        mine, row = self._get(sequence), self.new()
        pages = mine.pages[: self._pages_for(mine.length)]
        for page in pages:
            self._users[page] += 1
        mine.room = mine.length  # what was reserved in the last page is in a shared page now
        self._sequences[row] = _Sequence(pages, mine.length, mine.length)
        self._show(row)
        self.lengths[row] = mine.length
        return row

    def free(self, sequence: int) -> None:
        """Give a sequence back; pages that no other shares are free.

        Raises:
            ValueError: no such sequence: it has been freed already, or never was.
        """
        mine = self._get(sequence)
        for page in mine.pages:
            if self._users[page] < 1:
                raise ValueError(f"page {page} of sequence {sequence} is free already; the cache's account is broken")
        del self._sequences[sequence]
        for page in reversed(mine.pages):
            self._release(sequence, page)
        self.tables[sequence] = -1
        self.lengths[sequence] = 0

    def check(self) -> None:
        """Compare what the device holds with the host's account; waits for the device.

        Raises:
            ValueError: a table that points outside the pool, to a free page or to another's, or a length over the
                table; the message names the sequence and the page.
        """
        tables, lengths, count = self.tables.tolist(), self.lengths.tolist(), len(self._users)
        for sequence, mine in self._sequences.items():
            if not 0 <= lengths[sequence] <= len(mine.pages) * self.page_size:
                raise ValueError(
                    f"sequence {sequence} has length {lengths[sequence]}; its {len(mine.pages)} pages hold "
                    f"{len(mine.pages) * self.page_size} tokens"
                )
            for i, page in enumerate(mine.pages):
                seen = tables[sequence][i]
                if not 0 <= seen < count:
                    raise ValueError(f"sequence {sequence} has page {seen} at {i}; the pool has 0 to {count - 1}")
                if seen != page or self._users[page] < 1:
                    whose = "free" if self._users[seen] < 1 else "not its own"
                    raise ValueError(f"sequence {sequence} has page {seen} at {i}, which is {whose}; it was {page}")

    def _get(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise ValueError(f"there is no sequence {sequence}: it has been freed already, or new() never gave it out")
        return self._sequences[sequence]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _check_room(self, sequence: int, mine: _Sequence, tokens: int) -> None:
        if not 0 <= tokens <= mine.room - mine.length:
            raise ValueError(
                f"sequence {sequence} has room for {mine.room - mine.length} tokens behind its {mine.length}, "
                f"not for {tokens}: reserve({sequence}, {tokens}) first"
            )

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, sequence: int, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free.append(page)

    def _show(self, sequence: int) -> None:
        pages = self._sequences[sequence].pages
        self.tables[sequence, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=self.tables.device)

    def _places(self, mine: _Sequence, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Page and slot of each token from `start` to `end`."""
        key = start, end, *mine.pages
        if self._placed[0] != key:  # all layers ask for the same, and a copy to the device makes the host wait
            tokens = torch.arange(start, end, device=self.pool.device)
            pages = torch.tensor(mine.pages, dtype=torch.long, device=self.pool.device)
            self._placed = key, (pages[tokens // self.page_size], tokens % self.page_size)
        return self._placed[1]


def stored_in_8_bits(x: Tensor, form: str = "int8") -> Tensor:
    """Keys or values as they would come back from a cache of half the bytes: what it would cost, before any kernel.

    Each token of each KV head has a scale of its own, in fp32: (head_dim + 4) bytes for 2 head_dim.

    Args:
        x: (..., head_dim), of any floating dtype.
        form: "int8", or "fp8" for float8_e4m3fn.

    Returns:
        x rounded to the form, in float32; zeros stay zeros.

    Raises:
        ValueError: another form.
    """
    largest = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}
    if form not in largest:
        raise ValueError(f"form is {form!r}; it must be one of {', '.join(largest)}")
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / largest[form]).clamp(min=torch.finfo(torch.float32).tiny)
    steps = x / scale
    return (steps.round() if form == "int8" else steps.to(torch.float8_e4m3fn).float()) * scale
