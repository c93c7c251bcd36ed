"""What a decode step has besides its layers: the embedding, the product with the vocabulary, the choice of a token."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nanoqwen.generation import Sampler
from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.launch import Program, sms

HEAD_THREADS, HEAD_LOADS, HEAD_BLOCKS_PER_SM = 256, 7, 4  # as in csrc/lm_head.cu
SHARED_BYTES = 226 * 1024  # of the 227 KB that a block of sm_90 may have; the kernel needs some of the last
THREADS, DIGITS = 1024, 2048  # as in csrc/choose_token.cu
MAX_BLOCKS, MAX_VOCAB = 1024, 2**20 - 1  # a thread of the last block for each; sums of 2^44 stay below 2^64
_SHIFTS = (21, 10, 0)  # of the digits of a key

_C_NAMES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_DTYPES = tuple(_C_NAMES)
_INT32, _FLOAT = (torch.int32,), (torch.float32,)
_EMBED = {d: Program(Path("embed.cu"), {f"embed<{t}>": "pppii"}) for d, t in _C_NAMES.items()}
_CHOOSE = Program(
    Path("choose_token.cu"), {f"choose_token<{c}>": "p" * 7 + "iiifl" for c in ("LARGEST", "GREEDY", "DRAWN")}
)
_FIND = Program(Path("choose_token.cu"), {f"find_digit<{mass}>": "ppppiiifif" for mass in ("false", "true")})


class TokenWorkspace(NamedTuple):
    """What the blocks of `greedy` and `sample` leave for the last of them. Launches that may overlap need one each."""

    best: Tensor  # (1024) int64: the best token of each block
    bins: Tensor  # (2048) int64: sums for each digit; zero before and after each launch
    search: Tensor  # (4) int64: how far the search for the smallest logit that is kept has come
    arrivals: Tensor  # (1) int32, zero before and after each launch


def token_workspace(device: torch.device | str) -> TokenWorkspace:
    """A workspace for `greedy` and `sample`, of any vocabulary."""
    best, bins, search = (torch.zeros(n, dtype=torch.int64, device=device) for n in (MAX_BLOCKS, DIGITS, 4))
    return TokenWorkspace(best, bins, search, torch.zeros(1, dtype=torch.int32, device=device))


def embed(table: Tensor, token: Tensor, out: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """h = table[token], in float32.

    Args:
        table: (vocab, hidden) float16 or bfloat16.
        token: (1) int32, on the same device; the host does not look at it.
        out: (hidden) float32; a new tensor by default.
        pdl: let the launch overlap the end of the kernel before it (programmatic dependent launch). Kernels after this
            one that start early find the token, and the length that `greedy` or `sample` wrote with it.

    Returns:
        h (hidden) float32. A token outside the table fills it with NaN.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    check_tensor("table", table, ("vocab", "hidden"), _DTYPES)
    (vocab, hidden), device = table.shape, table.device
    check_tensor("token", token, (1,), _INT32, device)
    out = _output(out, hidden, device, {"table": table, "token": token})
    args = (table, token, out, vocab, hidden)
    name = f"embed<{_C_NAMES[table.dtype]}>"
    _EMBED[table.dtype].launch(name, device, -(-hidden // 256), 256, args, pdl=pdl, outputs=("h",))
    return out


def lm_head(
    w: Tensor,
    h: Tensor,
    norm: Tensor,
    eps: float,
    out: Tensor | None = None,
    *,
    blocks: int | None = None,
    pdl: bool = False,
) -> Tensor:
    """Logits of the last hidden state: W · (h / √(mean of h² + eps) · norm).

    Args:
        w: (rows, cols) float16 or bfloat16, row-major; cols is a multiple of 8.
        h: (cols) float32, of any size that float32 can square and add up.
        norm: (cols) of the dtype of w, or float16.
        out: (rows) float32; a new tensor by default.
        blocks: how many share the rows; by default what the GPU holds at once.
        pdl: let the kernel ask for its first weights while the kernel before it still runs (programmatic dependent
            launch). w and norm must have been written earlier than by that kernel.

    Returns:
        Logits (rows) float32. Products and sums are taken in fp32; neither h nor the normalised h is rounded.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    if blocks is not None and not (isinstance(blocks, int) and blocks >= 1):
        raise ValueError(f"blocks is {blocks!r}; it must be at least 1")
    check_tensor("w", w, ("rows", "cols"), _DTYPES, alignment=ALIGNMENT)
    (rows, cols), device = w.shape, w.device
    if cols % 8:
        raise ValueError(f"w has {cols} columns; 16-byte loads need a multiple of 8: pad the columns with zeros")
    if rows >= 2**31:
        raise ValueError(f"w has {rows} rows; they must be below 2**31")
    check_tensor("h", h, (cols,), _FLOAT, device, ALIGNMENT)
    norm_dtypes = _DTYPES[: _DTYPES.index(w.dtype) + 1]  # float16 always
    check_tensor("norm", norm, (cols,), norm_dtypes, device, ALIGNMENT)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps!r}; it must be 0 or more")
    lanes, shared = _head_plan(cols)
    if shared > SHARED_BYTES:
        raise ValueError(f"w has {cols} columns; h must fit into {SHARED_BYTES} bytes of shared memory as float32")
    out = _output(out, rows, device, {"w": w, "h": h, "norm": norm})
    grid = min(-(-rows * lanes // HEAD_THREADS), blocks or HEAD_BLOCKS_PER_SM * sms(device))
    program, name = _head_program(w.dtype, norm.dtype, lanes)
    args = (w, h, norm, out, rows, cols, eps)
    program.launch(name, device, grid, HEAD_THREADS, args, shared_bytes=shared, pdl=pdl, outputs=("logits",))
    return out


@functools.lru_cache
def _head_plan(cols: int) -> tuple[int, int]:
    """The lanes that share a row, those that have more loads in flight; and the bytes of shared memory for h."""
    octets = cols // 8

    def rounds(lanes: int) -> int:
        return -(-octets // (lanes * HEAD_LOADS))

    lanes = min((32, 16), key=lambda lanes: lanes * rounds(lanes))
    return lanes, rounds(lanes) * lanes * HEAD_LOADS * 32


@functools.cache
def _head_program(dtype: torch.dtype, norm: torch.dtype, lanes: int) -> tuple[Program, str]:
    name = f"lm_head<{_C_NAMES[dtype]}, {_C_NAMES[norm]}, {lanes}>"
    return Program(Path("lm_head.cu"), {name: "ppppiif"}), name


def greedy(
    logits: Tensor,
    vocab: int,
    token: Tensor,
    length: Tensor,
    history: Tensor | None = None,
    workspace: TokenWorkspace | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """The most likely token, the end of a decode step: token = argmax of logits[:vocab], in one launch.

    Of equal logits the first wins. If one of them is NaN, the token is −1, which no tokenizer has and of which `embed`
    makes NaN.

    Args:
        logits: (at least vocab) float32; what lies past vocab is not looked at.
        vocab: tokens to choose from, fewer than 2²⁰: without the rows that pad the matrix.
        token: (1) int32, written.
        length: (1) int32: tokens that the cache held before this step, which is the position of the token that the step
            was fed. The launch adds one.
        history: (positions) int32: history[length], with the old length, becomes the token: what follows position n
            stands at n. Where length is outside of it nothing is written. After a prompt of P tokens, the first new
            token is history[P − 1].
        workspace: of `token_workspace`; a new one by default, which costs launches that fill it with zeros.
        pdl: let the launch overlap the end of the kernel before it (programmatic dependent launch). The kernel after
            this one must not read token or length before its turn, as `embed` takes care.

    Returns:
        token.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    workspace = _check_choice(logits, vocab, token, length, history, workspace)
    _choose("GREEDY", logits, vocab, (token, length, history), workspace, pdl)
    return token


def sample(
    logits: Tensor,
    vocab: int,
    token: Tensor,
    length: Tensor,
    history: Tensor | None = None,
    workspace: TokenWorkspace | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    pdl: bool = False,
) -> Tensor:
    """As `greedy`, a seeded draw: temperature, then top-k, then top-p, as `nanoqwen.generation.Sampler`.

    The randomness is a function of seed, length and token (Philox), so a captured graph draws anew at each replay, and
    a second run repeats the first. It keeps the settings with which it was captured. One launch, three more with top_k,
    four more with top_p.

    Args:
        temperature: 0 (greedy), or 1e-6 up. top_k: 0 is off. top_p: above 0; 1 is off.
        seed: a whole number of 64 bits, with a sign.

    Returns:
        token. Logits that equal the last one kept are all kept, by top_p too (the `Sampler` keeps some of them there).
        Tokens less likely than 2⁻⁴⁴ of the first count nothing in top_p's sum.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    Sampler(temperature, top_k, top_p)  # refuses what is out of range
    if not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed is {seed!r}; it must be a whole number of 64 bits, with a sign")
    workspace = _check_choice(logits, vocab, token, length, history, workspace)
    written = token, length, history
    if temperature == 0:
        _choose("GREEDY", logits, vocab, written, workspace, pdl)
        return token
    temperature = min(temperature, torch.finfo(torch.float32).max)
    by_k, by_p = 0 < top_k < vocab, top_p < 1
    rules = temperature, min(top_k, vocab), top_p
    if by_k:
        _find("false", logits, vocab, workspace, False, rules, pdl)
    if by_p:
        _choose("LARGEST", logits, vocab, written, workspace, pdl)
        _find("true", logits, vocab, workspace, by_k, rules, pdl)
    _choose("DRAWN", logits, vocab, written, workspace, pdl, by_k or by_p, temperature, seed)
    return token


def _choose(choice, logits, vocab, written, workspace, pdl, floored=False, temperature=1.0, seed=0) -> None:
    best, _, search, arrivals = workspace
    history = written[2]
    tail = (vocab, 0 if history is None else len(history), floored, temperature, seed)
    args = (logits, best, arrivals, search, *written, *tail)
    name, outputs = f"choose_token<{choice}>", () if choice == "LARGEST" else ("token",)
    _CHOOSE.launch(name, logits.device, _blocks(vocab, logits), THREADS, args, pdl=pdl, outputs=outputs)


def _find(mass, logits, vocab, workspace, floored, rules, pdl) -> None:
    _, bins, search, arrivals = workspace
    for shift in _SHIFTS:
        args = (logits, bins, arrivals, search, vocab, shift, floored, *rules)
        _FIND.launch(f"find_digit<{mass}>", logits.device, _blocks(vocab, logits), THREADS, args, pdl=pdl)


def _blocks(vocab: int, logits: Tensor) -> int:
    return min(-(-vocab // THREADS), sms(logits.device), MAX_BLOCKS)


def _check_choice(logits, vocab, token, length, history, workspace) -> TokenWorkspace:
    check_tensor("logits", logits, ("rows",), _FLOAT)
    device = logits.device
    if not isinstance(vocab, int) or not 1 <= vocab <= min(len(logits), MAX_VOCAB):
        raise ValueError(f"vocab is {vocab!r}; it must be 1 to {min(len(logits), MAX_VOCAB)}, at most the logits")
    written = {"token": token, "length": length}
    check_tensor("token", token, (1,), _INT32, device)
    check_tensor("length", length, (1,), _INT32, device)
    if history is not None:
        check_tensor("history", history, ("positions",), _INT32, device)
        written["history"] = history
    names = list(written)
    for i, name in enumerate(names):
        for other in names[:i]:
            if overlap(written[name], written[other]):
                raise ValueError(f"{name} overlaps {other}; both are written")
        if overlap(written[name], logits):
            raise ValueError(f"{name} overlaps logits; blocks would read what others have already written")
    if workspace is None:
        return token_workspace(device)
    for name, tensor, like in zip(
        TokenWorkspace._fields, workspace, ((MAX_BLOCKS,), (DIGITS,), (4,), (1,)), strict=True
    ):
        dtype = torch.int32 if name == "arrivals" else torch.int64
        check_tensor(f"workspace.{name}", tensor, like, (dtype,), device)
    return workspace


def _output(out: Tensor | None, size: int, device: torch.device, inputs: dict[str, Tensor]) -> Tensor:
    if out is None:
        return torch.empty(size, device=device)
    check_tensor("out", out, (size,), _FLOAT, device)
    for name, tensor in inputs.items():
        if overlap(out, tensor):
            raise ValueError(f"out overlaps {name}; blocks would read what others have already written")
    return out
