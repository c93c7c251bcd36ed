"""How lessons show things: source from the repository, tables, labelled numbers; HTML in a notebook, text elsewhere."""

import html
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from nanoqwen.paths import REPO
from nanoqwen.roofline import check_label

# Mid-tones of the Okabe-Ito hues, each at least 4:1 on white and on JupyterLab's dark grey (tests/test_lesson.py).
BLUE, GREEN, VERMILLION, PURPLE, GREY = "#2079b4", "#1a8562", "#c25708", "#b0568a", "#757575"
LISTING = "font-family:var(--jp-code-font-family,monospace);font-size:90%;line-height:1.35;overflow-x:auto"


def show(thing: object, start: int | str | None = None, end: int | str | None = None) -> None:
    """Show source, highlighted, from the file itself, under a caption that says which lines.

    Args:
        thing: a function, class or module; or a path, relative to the repository.
        start, end: the first and last line to show: line numbers of the file, or a text that the line holds (`end`
            is looked for from `start` on).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is not there, or a path outside the repository.
    """
    if isinstance(thing, str | Path):
        path, first, last = (REPO / thing).resolve(), 1, None
    else:
        path = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "").resolve()
        lines, first = inspect.getsourcelines(thing)
        first = max(first, 1)  # a module's is 0
        last = first + len(lines) - 1
    if not path.is_file():
        raise FileNotFoundError(f"{thing}: there is no such file in the repository")
    if not path.is_relative_to(REPO):
        raise ValueError(f"{thing}: its source is not part of this repository")
    lines = path.read_text(encoding="utf-8").splitlines()
    last = len(lines) if last is None else last
    name = path.relative_to(REPO).as_posix()
    first = _line(name, lines, start, first, last, first)
    last = _line(name, lines, end, first, last, last)
    text = inspect.cleandoc("\n" + "\n".join(lines[first - 1 : last]))
    caption = f"{name}:{first}–{last}" if last > first else f"{name}:{first}"
    display(
        f'<div style="font-size:85%;opacity:0.75"><code>{escape(caption)}</code></div>{highlight(text, path.name)}',
        f"# {caption}\n{text}",
    )


def _line(name: str, lines: list[str], mark: int | str | None, first: int, last: int, default: int) -> int:
    if mark is None:
        return default
    if isinstance(mark, int):
        if first <= mark <= last:
            return mark
        raise ValueError(f"{name}: line {mark} is not among lines {first} to {last}")
    for i in range(first, last + 1):
        if mark in lines[i - 1]:
            return i
    raise ValueError(f"{name}: no line from {first} to {last} holds {mark!r}")


def table(
    rows: Sequence[Mapping[str, object]], label: str | None = None, caption: str = "", bold: Callable | None = None
) -> None:
    """A table of rows, one column per key; numbers to four significant digits.

    Args:
        rows: dicts with the same keys; write the unit into the key, such as `GB/s`.
        label: begins with measured, recorded, simulated or counted; shown in the caption.
        bold: says of a row whether it stands out.

    Raises:
        ValueError: no rows, rows with different keys, or a label that begins with none of the four.
    """
    if not rows:
        raise ValueError("the table has no rows")
    if label is not None:
        check_label(label)
    columns = list(rows[0])
    if odd := [row for row in rows if list(row) != columns]:
        raise ValueError(f"a row has columns {list(odd[0])}, the first has {columns}")
    caption = f"{caption} ({label})" if label and caption else caption or (label or "")
    cells = [[cell(row[c]) for c in columns] for row in rows]
    numeric = [all(is_number(row[c]) or row[c] is None for row in rows) for c in columns]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]

    def plain(line: Sequence[str]) -> str:
        return "  ".join(
            v.rjust(w) if n else v.ljust(w) for v, w, n in zip(line, widths, numeric, strict=True)
        ).rstrip()

    def marked(line: Sequence[str], tag: str, strong: bool = False) -> str:
        out = ""
        for value, right in zip(line, numeric, strict=True):
            text = f"<b>{escape(value)}</b>" if strong else escape(value)
            out += f'<{tag} style="text-align:{"right" if right else "left"}">{text}</{tag}>'
        return f"<tr>{out}</tr>"

    body = "".join(marked(line, "td", bool(bold and bold(row))) for line, row in zip(cells, rows, strict=True))
    head = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    display(
        f"<table>{head}<thead>{marked(columns, 'th')}</thead><tbody>{body}</tbody></table>",
        "\n".join([*([caption] if caption else []), plain(columns), *map(plain, cells)]),
    )


def display(markup: str, text: str) -> None:
    """Show both forms in IPython, which picks one; print the text anywhere else."""
    if ipython() is None:
        print(text)
    else:
        from IPython.display import display

        display({"text/html": markup, "text/plain": text}, raw=True)


def ipython():
    """The running IPython shell, or None: in plain Python, or without the `lab` extra."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def highlight(text: str, filename: str) -> str:
    try:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import CudaLexer, get_lexer_for_filename
        from pygments.style import Style
        from pygments.token import Comment, Keyword, Name, Number, Operator, String
    except ImportError:  # only the `lab` extra needs it
        return f'<pre style="{LISTING}">{escape(text)}</pre>'

    class Neutral(Style):
        styles = {  # noqa: RUF012
            Comment: f"italic {GREY}",
            Keyword: f"bold {BLUE}",
            Operator.Word: f"bold {BLUE}",
            String: GREEN,
            Number: VERMILLION,
            Name.Function: PURPLE,
            Name.Class: PURPLE,
            Name.Decorator: PURPLE,
            Comment.Preproc: f"noitalic {VERMILLION}",
        }

    cuda = Path(filename).suffix in {".cu", ".cuh", ".h", ".hpp"}
    lexer = CudaLexer() if cuda else get_lexer_for_filename(filename)
    # No background and no colour for plain text: both are the theme's.
    body = highlight(text, lexer, HtmlFormatter(style=Neutral, noclasses=True, nowrap=True))
    return f'<pre style="{LISTING}">{body}</pre>'


def escape(value: object) -> str:
    return html.escape(str(value))


def prose(text: str) -> str:
    """Escaped text in which `code` stays code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(inspect.cleandoc(text)))


def left(value: object) -> str:
    return f'<td style="text-align:left">{escape(value)}</td>'


def is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_numeric(value: object) -> bool:
    return is_number(value) or isinstance(value, torch.Tensor | np.ndarray)


def cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    return figure(float(value)) if is_number(value) else str(value)


def figure(value: float) -> str:
    """Four significant digits, without an exponent where it is easily read."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3e}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def quantity(value: object, unit: str) -> str:
    return f"{cell(value)} {unit}".strip()


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
