"""How the launches of a decode step reach the GPU: one by one, or captured as a graph and replayed. Lesson 06.

A graph freezes every argument. What changes from token to token (the token, its position, the pages) lies in device
memory, at addresses that stay, so one graph serves every position.
"""

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoqwen.packing import PAGE_SIZE

CHAIN = 16
"""Steps of the graph that holds several."""


@dataclass(frozen=True)
class Mode:
    """One way to launch steps.

    Attributes:
        graph: what is captured: None; "pages": two graphs, one for a token that opens a page, which brings the table
            along, and one for all others; "step": one for all; "chain": `CHAIN` steps one after another.
        fed_back: token and position stay on the device. Otherwise the host reads each token, and puts it back.
        look: tokens between two looks of the host. What lies beyond a stop token was computed in vain.
    """

    graph: str | None
    fed_back: bool
    look: int


MODES = {
    "eager": Mode(None, False, 1),
    "two graphs": Mode("pages", False, 1),
    "one graph": Mode("step", False, 1),
    "fed back": Mode("step", True, 1),
    "in flight": Mode("step", True, 16),
    "chain": Mode("chain", True, CHAIN),
}
"""The ladder of lesson 06."""


def launcher(
    mode: Mode, step: Callable[[], None], bring_table: Callable[[], None], device: torch.device
) -> Callable[[int, int], None]:
    """A function of (count, position) that launches `count` steps, the first for the token at `position`.

    Args:
        step: launches the kernels of one step. It has run before, so that all kernels are compiled.
        bring_table: launches the copy of the table, for the mode that does so inside a graph.

    Raises:
        RuntimeError: as `capture`.
    """
    if mode.graph is None:

        def eager(count: int, position: int) -> None:
            for _ in range(count):
                step()

        return eager

    def opening() -> None:
        bring_table()
        step()

    def chain() -> None:
        for _ in range(CHAIN):
            step()

    one = capture(step, device)
    many = capture(chain, device) if mode.graph == "chain" else None
    opens = capture(opening, device) if mode.graph == "pages" else one

    def replay(count: int, position: int) -> None:
        in_chains = count // CHAIN * CHAIN if many else 0
        for _ in range(in_chains // CHAIN):
            many.replay()
        for at in range(position + in_chains, position + count):
            (opens if at % PAGE_SIZE == 0 else one).replay()

    return replay


def capture(body: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """What `body` launches, as a graph. Nothing runs.

    Raises:
        RuntimeError: `body` allocates, or waits for the device, which would be frozen or lost; the message says where.
            The stream is as before, and eager launches go on.
    """
    with torch.cuda.device(device), warnings.catch_warnings():
        # A body that fails before its first launch leaves an empty graph; what failed is told below.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty", category=UserWarning)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph), NothingNew():
                body()
        except Exception as error:
            torch.cuda.set_stream(stream)  # torch leaves its own current where a capture has been broken
            first = _first(error)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):  # no random numbers until a capture has ended well
                pass
            raise RuntimeError(f"the step cannot be captured: {first}") from error
    graph.body = body  # and with it the tensors whose addresses the graph has frozen
    return graph


class NothingNew(TorchDispatchMode):
    """Inside, a torch operation that allocates memory or waits for the device is an error that names it.

    PyTorch itself lets a captured graph allocate; then each replay writes where the capture did, whatever lies there.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if func in _WAITS:
            raise RuntimeError(f"{name} waits for the device: int(tensor), .item() or .tolist(){_caller()}")
        old = {_memory(part) for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for part in tree_leaves(made):
            if isinstance(part, torch.Tensor) and _memory(part) not in old:
                raise RuntimeError(
                    f"{name} allocates a tensor of shape {tuple(part.shape)}{_caller()}: lay it out before the capture"
                )
        return made


_WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)  # the latter in inference mode


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _caller() -> str:
    """Where the operation stands, in the innermost file that is not PyTorch's or this one."""
    torch_files = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_stack() if f.filename != __file__ and not f.filename.startswith(torch_files)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _first(error: BaseException) -> str:
    """The error that broke the capture, not those that follow it, with the line that raised it."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not isinstance(error, RuntimeError) or " (" in words:
        return words
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    ours = [f for f in frames if not f.filename.startswith(str(Path(torch.__file__).parent))]
    return f"{words} ({Path(ours[-1].filename).name}, line {ours[-1].lineno}: {ours[-1].line})" if ours else words
