"""Judging a reader's answer: right, wrong with the reason in one line, or not there yet."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from nanoqwen import simt
from nanoqwen.kernel_magic import NotCompiled
from nanoqwen.listing import display, escape, is_numeric, short
from nanoqwen.simt_report import Report


class NotRight(simt.Told, AssertionError):
    """A check that failed."""


def check(
    name: str,
    got: object,
    want: object,
    *,
    inputs: Sequence[object] = (),
    rtol: float | None = None,
) -> bool:
    """Check a result, and say what is wrong with it in one line.

    An exercise that is not solved yet (None, `...`, or a function that raises NotImplementedError) is told so and
    returns False.

    Args:
        name: what is checked, in the reader's words.
        got: a tensor, array, number, string, list; or a function of no arguments that returns one.
        want: the right answer.
        inputs: what `got` was made from: a copy of one of these is no answer.
        rtol: allowed |got − want| / (|want| + rms(want)) of every element; None: by the coarser of the two dtypes.

    Raises:
        NotRight: it is wrong: NaN, another shape, zeros, a copy of an input, or too far from `want`.
        ValueError: `want` itself is not finite.
    """
    if callable(got) and not isinstance(got, torch.Tensor):
        try:
            got = got()
        except NotImplementedError as error:
            return _not_yet(name, error)
    if got is None or got is Ellipsis or got is NotImplemented:
        return _not_yet(name)
    if not is_numeric(want):
        if type(got) is not type(want) or got != want:
            raise NotRight(f"{name}: got {short(got)}, want {short(want)}")
        detail = "equal"
    else:
        detail = _compare(name, got, want, inputs, rtol)
    display(f"<p>✓ <b>{escape(name)}</b>: {escape(detail)}</p>", f"✓ {name}: {detail}")
    return True


def _not_yet(name: str, reason: object = None) -> bool:
    # What a stub says when it is called tells the reader nothing; a cell that did not compile does.
    words = f": {reason}" if isinstance(reason, NotCompiled) else ""
    display(f"<p>○ <b>{escape(name)}</b>: not yet{escape(words)}</p>", f"○ {name}: not yet{words}")
    return False


def _compare(name: str, got: object, want: object, inputs: Sequence[object], rtol: float | None) -> str:
    if not is_numeric(got):
        raise NotRight(f"{name}: got {short(got)}, want numbers")
    a, b = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
    if a.shape != b.shape:
        raise NotRight(f"{name}: shape {tuple(a.shape)}, want {tuple(b.shape)}")
    if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor) and a.numel() and a.data_ptr() == b.data_ptr():
        raise NotRight(f"{name}: this is the expected answer itself; compute it")
    if rtol is None:
        rtol = max(_tolerance(a.dtype), _tolerance(b.dtype))
    x, y = a.to("cpu", torch.float64), b.to("cpu", torch.float64)
    if not y.isfinite().all():
        raise ValueError(f"{name}: the expected answer is not finite; the check itself is broken")
    if bad := int((~x.isfinite()).sum()):
        raise NotRight(f"{name}: {bad} of {x.numel()} values are NaN or infinite")
    if not x.numel():
        return "equal (empty)"
    error = (x - y).abs() / (y.abs() + y.pow(2).mean().sqrt()).clamp_min(torch.finfo(torch.float64).tiny)
    if (worst := float(error.max())) <= rtol:
        norm = float(y.norm())
        return f"relative error {float((x - y).norm()) / norm if norm else 0:.1e} over {x.numel():,} values"
    for i, given in enumerate(inputs):
        if is_numeric(given) and torch.as_tensor(given).shape == a.shape:
            same = torch.as_tensor(given).detach().to("cpu", torch.float64).equal(x)
            if same:
                raise NotRight(f"{name}: this is input {i}, unchanged")
    if not x.any():
        raise NotRight(f"{name}: all zeros")
    place = tuple(int(i) for i in np.unravel_index(int(error.argmax()), x.shape))
    where = f" at {list(place)}" if place else ""
    share = int((error > rtol).sum())
    raise NotRight(
        f"{name}: {share:,} of {x.numel():,} values are off by more than {rtol:g}; "
        f"the worst{where}: got {a[place].item():.10g}, want {b[place].item():.10g} (error {worst:.2g})"
    )


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}.get(dtype, 0.0)


# A kernel is judged on shapes that its author did not choose: one row, rows and columns that no block divides.
SHAPES = ((1, 256), (7, 200), (129, 896))
OBSERVED = (33, 512)
COALESCED = 0.8  # of the bytes that its loads move, a coalesced kernel has asked for so many


def check_kernel(
    name: str,
    run: Callable[..., object],
    *,
    wanted: Callable[..., Tensor] | None = None,
    inputs: Callable[[int, int], Sequence[Tensor]] | None = None,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    observed: tuple[int, int] = OBSERVED,
    dtype: torch.dtype = torch.float32,
    coalesced: bool = True,
) -> bool:
    """Judge a kernel: first observed on the SIMT machine, then on every shape on the machine at hand.

    By default the kernel is a GEMV, and `run(w, x, y)` writes y = W x. An exercise that is not solved yet (a stub, a
    kernel in which an observer finds a fault, or a right one that reads sideways) is told so, and returns False.

    Args:
        name: what is checked, in the reader's words.
        run: launches the kernel on the inputs and the output, in this order.
        wanted: from float64 inputs, the right output; None: W x.
        inputs: makes the inputs for a shape (rows, cols); None: normal w and x.
        shapes: those to be right on. observed: the one that is counted.
        dtype: of the inputs and the output.
        coalesced: wanted too, at least 80 % of the bytes loaded; False: how the kernel reads is only told.

    Raises:
        NotRight: a result is wrong: NaN or never written, zeros, a copy of an input, an index, or too far off.
    """
    wanted = wanted or (lambda w, x: w @ x)
    inputs = inputs or (lambda rows, cols: (torch.randn(rows, cols), torch.randn(cols)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def result(shape: tuple[int, int], where: torch.device, observe: bool) -> Report | None:
        given = [t.to(dtype) for t in inputs(*shape)]
        want = wanted(*(t.double() for t in given))
        given = [t.to(where) for t in given]
        kept = [t.clone() for t in given]
        out = torch.full_like(want, float("nan"), dtype=dtype, device=where)
        report = simt.observe(run, *given, out) if observe else run(*given, out)
        if observe and (report.findings or not report.totals.launches):
            return report
        what = f"{name}, shape {' × '.join(map(str, shape))}"
        if any(not a.equal(b) for a, b in zip(given, kept, strict=True)):
            raise NotRight(f"{what}: it wrote into its inputs")
        _plausible(what, out, given)
        _compare(what, out, want, given, None)
        return report

    try:
        report = result(observed, torch.device("cpu"), observe=True)
        if report.findings:
            _tell_finding(name, report)
            return False
        if not report.totals.launches:
            display(f"<p>○ <b>{escape(name)}</b>: not yet</p>", f"○ {name}: not yet (nothing was launched)")
            return False
        for shape in shapes:
            result(shape, device, observe=False)
    except NotImplementedError as error:
        return _not_yet(name, error)
    return _tell_counts(name, report, shapes, device, coalesced)


def _plausible(what: str, out: Tensor, given: Sequence[Tensor]) -> None:
    """Refuse, by name, the answers that are no answer: they say more than 'off by so much'."""
    y = out.detach().to("cpu", torch.float64).flatten()
    if bad := int((~y.isfinite()).sum()):
        raise NotRight(f"{what}: {bad} of {y.numel()} values are NaN (never written?) or infinite")
    if not y.any():
        raise NotRight(f"{what}: all zeros")
    for start in (0, 1):
        if y.numel() > 1 and y.equal(torch.arange(start, start + y.numel(), dtype=torch.float64)):
            raise NotRight(f"{what}: each value is its own index")
    for i, tensor in enumerate(given):
        values = tensor.detach().to("cpu", torch.float64)
        starts = [values.flatten()[: y.numel()]]
        starts += [values[:, 0]] if values.dim() == 2 else []
        if any(s.numel() == y.numel() and s.equal(y) for s in starts):
            raise NotRight(f"{what}: this is a copy of input {i}")


def _tell_finding(name: str, report: Report) -> None:
    words = "\n".join(map(str, report.findings[:4]))
    if len(report.findings) > 4:
        words += f"\nand {len(report.findings) - 4} more"
    display(
        f"<p>○ <b>{escape(name)}</b>: not yet. The machine found (simulated):</p>"
        f'<pre style="border-left:4px solid #D55E00;padding-left:8px;white-space:pre-wrap;font-family:monospace">'
        f"{escape(words)}</pre>",
        f"○ {name}: not yet. The machine found (simulated):\n{words}",
    )


def _tell_counts(name: str, report: Report, shapes: Sequence, device: torch.device, coalesced: bool) -> bool:
    """The verdict on a right kernel, with its counts; whether it is solved."""
    totals = report.totals
    where = "on the GPU" if device.type == "cuda" else "on the SIMT machine"
    loads = [line for line in report.lines if line.space == "global" and line.how == "load"]
    needed, moved = sum(e.bytes_needed for e in loads), sum(32 * e.sectors for e in loads)
    share = needed / moved if moved else 1.0
    words = f"coalesced: {share:.0%}" if share >= COALESCED else f"not coalesced: only {share:.0%}"
    counts = (
        f"{totals.global_load_requests:,} load requests, {totals.global_load_sectors:,} sectors, "
        f"{totals.sectors_per_load:.1f} a request; {words} of the bytes loaded were asked for"
    )
    right = f"right on {len(shapes)} shapes {where}, no findings"
    mark, solved = "✓", True
    if coalesced and share < COALESCED:
        mark, solved, right = "○", False, f"right, but not coalesced yet: {right}"
    display(
        f"<p>{mark} <b>{escape(name)}</b>: {right}<br>simulated: {escape(counts)}</p>",
        f"{mark} {name}: {right}\nsimulated: {counts}",
    )
    return solved
