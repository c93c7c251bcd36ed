"""Kernels as text: find one by its name, show it, and show what changed from one to the next."""

import difflib
import re
from pathlib import Path

from nanoqwen.kernel_magic import CudaKernel
from nanoqwen.listing import cell, display, escape, highlight, show
from nanoqwen.paths import CSRC
from nanoqwen.simt_report import Report

_ADDED, _REMOVED = "rgba(0,114,178,.20)", "rgba(213,94,0,.20)"  # blue and vermillion: told apart by everyone
_CONTEXT = 2  # unchanged lines kept around a change


def show_kernel(kernel: str) -> None:
    """Show a kernel of `csrc/`, with the comment above it, under its file and lines.

    Args:
        kernel: its name, such as `gemv_naive`; or file and name, such as `museum/barrier_in_branch.cu:broken`.

    Raises:
        LookupError: no file of `csrc/` has such a kernel.
    """
    path, first, last = find_kernel(kernel)
    show(f"csrc/{path}", first, last)


def find_kernel(kernel: str) -> tuple[str, int, int]:
    """The file below `csrc/` that defines a kernel, its first line (of the comment above it) and its last.

    Raises:
        LookupError: no such kernel.
    """
    file, _, name = kernel.rpartition(":")
    files = [CSRC / file] if file else sorted(CSRC.glob("*.cu"))
    for path in files:
        if path.is_file() and (lines := _extent(path.read_text(encoding="utf-8").splitlines(), name)):
            return path.relative_to(CSRC).as_posix(), *lines
    there = sorted(path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.cu"))
    raise LookupError(f"no kernel {name!r} in {file or 'the .cu files of csrc/'}; the files are {', '.join(there)}")


def _extent(lines: list[str], name: str) -> tuple[int, int] | None:
    """First and last line, counted from 1, of a kernel and the comment above it."""
    for i, text in enumerate(lines):
        if not re.search(rf"\b{re.escape(name)}\s*\(", text) or text.lstrip().startswith("//"):
            continue
        first = i
        while first and re.match(r"template|extern|__global__", lines[first - 1].lstrip()):
            first -= 1
        if not any("__global__" in line for line in lines[first : i + 1]):
            continue
        while first and lines[first - 1].startswith("//"):
            first -= 1
        last = next((j for j in range(i, len(lines)) if lines[j].startswith("}")), None)
        return (first + 1, last + 1) if last is not None else None
    return None


def diff(before: str | CudaKernel, after: str | CudaKernel, counts: tuple[Report, Report] | None = None) -> None:
    """Show which lines changed from one kernel to another, beside which counts changed.

    Args:
        before, after: kernels of `csrc/` as `show_kernel` takes them, or kernels of a cell.
        counts: an observed run of each, on the same problem.
    """
    names = [k.__name__ if isinstance(k, CudaKernel) else k.rpartition(":")[2] for k in (before, after)]
    changes = _changes(_code(before), _code(after, rename=(names[1], names[0])))
    marks = {" ": "transparent", "-": _REMOVED, "+": _ADDED, "…": "transparent"}
    rows = "".join(
        f'<div style="background:{marks[mark]}">{"&nbsp;" if mark == " " else escape(mark).replace("-", "−")} '
        f"{_inline(line)}</div>"
        for mark, line in changes
    )
    title = f"{names[0]} → {names[1]}"
    code = (
        f'<div><div style="font-size:85%;opacity:0.75"><code>{escape(title)}</code></div>'
        f'<div style="font-family:var(--jp-code-font-family,monospace);font-size:85%;line-height:1.4;'
        f'white-space:pre;overflow-x:auto">{rows}</div></div>'
    )
    text = "\n".join([f"# {title}", *(f"{mark} {line}" for mark, line in changes)])
    if counts:
        markup, words = _counts(names, counts)
        code = f'<div style="display:flex;flex-wrap:wrap;gap:24px;align-items:flex-start">{code}{markup}</div>'
        text += f"\n{words}"
    display(code, text)


def _code(kernel: str | CudaKernel, rename: tuple[str, str] | None = None) -> list[str]:
    """The kernel's lines without blank ones and comments, which say in words what the lines show."""
    if isinstance(kernel, CudaKernel):
        lines = kernel.program.source.splitlines()
        first, last = _extent(lines, kernel.__name__) or (1, len(lines))
    else:
        path, first, last = find_kernel(kernel)
        lines = (CSRC / Path(path)).read_text(encoding="utf-8").splitlines()
    if rename:
        lines = [re.sub(rf"\b{re.escape(rename[0])}\b", rename[1], line) for line in lines]
    plain = [re.sub(r"\s*//.*$", "", line) for line in lines[first - 1 : last]]
    return [line for line in plain if line.strip()]


def _changes(before: list[str], after: list[str]) -> list[tuple[str, str]]:
    """Lines marked '-', '+' or ' ', and '…' where unchanged ones are left out."""
    out = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        if group[0][1] > 0:
            out.append(("…", ""))
        for tag, a, b, c, d in group:
            if tag == "equal":
                out += [(" ", line) for line in before[a:b]]
            else:
                out += [("-", line) for line in before[a:b]] + [("+", line) for line in after[c:d]]
    return out


def _inline(line: str) -> str:
    """One line highlighted, without the block around it."""
    body = re.search(r"<pre[^>]*>(.*)</pre>", highlight(line, "kernel.cu"), re.S)[1].rstrip("\n")
    return " " * (len(line) - len(line.lstrip())) + body.lstrip() if line.strip() else ""


def _counts(names: list[str], reports: tuple[Report, Report]) -> tuple[str, str]:
    rows = []
    for label, value in (
        ("load requests", lambda t: t.global_load_requests),
        ("sectors loaded", lambda t: t.global_load_sectors),
        ("sectors a request", lambda t: t.sectors_per_load),
        ("bytes needed", lambda t: t.bytes_needed),
        ("bytes moved", lambda t: t.bytes_moved),
    ):
        a, b = (value(report.totals) for report in reports)
        ratio = "" if not a or not b else "same" if a == b else f"÷ {a / b:.3g}" if a > b else f"× {b / a:.3g}"
        rows.append((label, cell(a), cell(b), ratio))
    heads = ("simulated", *names, "")
    body = "".join(
        "<tr>"
        + "".join(f'<td style="text-align:{"right" if i else "left"}">{escape(v)}</td>' for i, v in enumerate(row))
        + "</tr>"
        for row in rows
    )
    head = "".join(f'<th style="text-align:{"right" if i else "left"}">{escape(h)}</th>' for i, h in enumerate(heads))
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(4)]
    plain = [
        "  ".join(v.rjust(w) if i else v.ljust(w) for i, (v, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in (heads, *rows)
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", "\n".join(plain)
