"""What the notebooks use: a set-up cell, predictions, checks, source listings, tables, folded hints.

Everything shows as HTML in a notebook, light or dark, and as plain text elsewhere.
"""

import html
import inspect
import math
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch

from nanoqwen.paths import REPO
from nanoqwen.roofline import LABELS, OKABE_ITO

# Progress bars work without Jupyter's widgets; the line that says so is no part of a lesson.
warnings.filterwarnings("ignore", message="IProgress not found")

# Mid-tones of the Okabe-Ito hues, each at least 4:1 on white and on JupyterLab's dark grey (tests/test_lesson.py).
BLUE, GREEN, VERMILLION, PURPLE, GREY = "#2079b4", "#1a8562", "#c25708", "#b0568a", "#757575"
LISTING = "font-family:var(--jp-code-font-family,monospace);font-size:90%;line-height:1.35;overflow-x:auto"

# A white card with dark text reads on both themes; a transparent figure reads well on neither.
FIGURE_STYLE = {
    "figure.figsize": (7.2, 3.8),
    "figure.dpi": 110,
    "savefig.dpi": 110,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#FFFFFF"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#222222"),
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "axes.prop_cycle": matplotlib.cycler(color=OKABE_ITO),
    "legend.frameon": False,
    "lines.linewidth": 2,
}


class NotRight(AssertionError):
    """A check that failed. A notebook shows its message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"✗ {self}"]


@dataclass(frozen=True)
class Setup:
    """What `start` found: where tensors go, how times are to be read, and which model the lesson runs on."""

    device: str
    mode: str
    model: Path | None
    dtype: torch.dtype = torch.bfloat16

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def model_name(self) -> str:
        return self.model.name if self.model else "none"


@dataclass(frozen=True)
class _Prediction:
    question: str
    unit: str
    options: tuple[str, ...]
    guess: float | str | None


_predictions: dict[str, _Prediction] = {}


def mode() -> str:
    """`GPU` where a CUDA device can be used, else `CPU + recorded`: times then come from recorded GPUs."""
    return "GPU" if torch.cuda.is_available() else "CPU + recorded"


def start(seed: int = 0, model: str | None = None) -> Setup:
    """Set a notebook up: seeds, figure style; prints the machine with its versions, the mode, the model.

    Args:
        seed: for Python, NumPy and PyTorch.
        model: a name or path as `nanoqwen generate --model` takes; None: the 0.5B where it has been fetched, else the
            tiny model that comes with the repository.

    Raises:
        FileNotFoundError: a model that was asked for is not on this machine.
    """
    from nanoqwen.fetch import find_model
    from nanoqwen.hardware import machine

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _predictions.clear()
    _style_figures()
    path = find_model(model)
    setup = Setup("cuda" if torch.cuda.is_available() else "cpu", mode(), path)
    how = "timed on this GPU" if setup.on_gpu else "counts are made here, GPU times are recorded ones and say so"
    rows = [
        ("machine", machine()),
        ("mode", f"{setup.mode}: {how}"),
        ("model", setup.model_name),
        ("seed", seed),
    ]
    _display(
        "<table>" + "".join(f"<tr><th>{_escape(k)}</th>{_left(v)}</tr>" for k, v in rows) + "</table>",
        "\n".join(f"{name:<8} {value}" for name, value in rows),
    )
    return setup


def predict(
    key: str, question: str, unit: str = "", guess: float | str | None = None, options: Sequence[str] = ()
) -> None:
    """Ask before measuring. The reader types a number, or one of `options`, as `guess` and runs the cell again.

    Raises:
        ValueError: a guess that is neither a finite number nor one of the options.
    """
    if guess is not None and options and guess not in options:
        raise ValueError(f"guess is {guess!r}; choose one of {', '.join(map(repr, options))}")
    if guess is not None and not options and not (_is_number(guess) and math.isfinite(guess)):
        raise ValueError(f"guess is {guess!r}; give a number{f' in {unit}' if unit else ''}, such as guess=10")
    _predictions[key] = _Prediction(question, unit, tuple(options), guess)
    if guess is None:
        want = f"one of {', '.join(map(repr, options))}" if options else f"a number{f' in {unit}' if unit else ''}"
        answer = f"Write guess=… in this cell ({want}) and run it before you read on."
    else:
        answer = f"Your guess: {_quantity(guess, unit)}"
    _display(f"<p><b>Predict.</b> {_prose(question)}<br><i>{_escape(answer)}</i></p>", f"Predict. {question}\n{answer}")


def reveal(key: str, measured: float | str, bound: float | None = None, label: str = "measured") -> None:
    """Show the reader's guess of `predict(key, …)` beside what the arithmetic allows and what was seen.

    Args:
        measured: the answer, in the unit of the question.
        bound: what bytes over bandwidth, or the like, allows; None: no such bound.
        label: begins with measured, recorded, simulated or counted, such as `recorded: H200`.

    Raises:
        LookupError: no prediction of this name was made.
        ValueError: a label that begins with none of the four, or an answer that is not finite.
    """
    if key not in _predictions:
        raise LookupError(f"nothing was predicted as {key!r}; run its lesson.predict cell first")
    _check_label(label)
    asked = _predictions[key]
    if asked.options and measured not in asked.options:
        raise ValueError(f"measured is {measured!r}, which is none of the options {asked.options}")
    if not asked.options and not (_is_number(measured) and math.isfinite(measured)):
        raise ValueError(f"measured is {measured!r}; it must be a finite number")
    rows = [("your guess", "none made" if asked.guess is None else _quantity(asked.guess, asked.unit))]
    if bound is not None:
        rows.append(("bound", _quantity(bound, asked.unit)))
    rows.append((label, _quantity(measured, asked.unit)))
    if asked.guess is not None:
        rows.append(("verdict", verdict(asked.guess, measured)))
    _display(
        f"<p><b>Reveal.</b> {_prose(asked.question)}</p><table>"
        + "".join(f"<tr><th>{_escape(name)}</th>{_left(value)}</tr>" for name, value in rows)
        + "</table>",
        f"Reveal. {asked.question}\n" + "\n".join(f"{name:<10} {value}" for name, value in rows),
    )


def verdict(guess: float | str, answer: float | str) -> str:
    """How near a guess is, in words."""
    if isinstance(answer, str):
        return "right" if guess == answer else f"it is {answer!r}"
    if guess == answer:
        return "exactly right"
    if guess * answer <= 0:
        return "another sign, or zero: the ratio says nothing"
    ratio = guess / answer
    side = "high" if abs(ratio) > 1 else "low"
    factor = max(ratio, 1 / ratio)
    if factor <= 1.1:
        return f"within 10 % ({side})"
    if factor <= 2:
        return f"within 2× ({factor:.2f}× too {side})"
    return f"{factor:.3g}× too {side}"


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
        except NotImplementedError:
            got = None
    if got is None or got is Ellipsis or got is NotImplemented:
        _display(f"<p>○ <b>{_escape(name)}</b>: not yet</p>", f"○ {name}: not yet")
        return False
    if not _is_numeric(want):
        if type(got) is not type(want) or got != want:
            raise NotRight(f"{name}: got {_short(got)}, want {_short(want)}")
        detail = "equal"
    else:
        detail = _compare(name, got, want, inputs, rtol)
    _display(f"<p>✓ <b>{_escape(name)}</b>: {_escape(detail)}</p>", f"✓ {name}: {detail}")
    return True


def _compare(name: str, got: object, want: object, inputs: Sequence[object], rtol: float | None) -> str:
    if not _is_numeric(got):
        raise NotRight(f"{name}: got {_short(got)}, want numbers")
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
        if _is_numeric(given) and torch.as_tensor(given).shape == a.shape:
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
    _display(
        f'<div style="font-size:85%;opacity:0.75"><code>{_escape(caption)}</code></div>{_highlight(text, path.name)}',
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


def hint(text: str) -> None:
    """A folded hint."""
    _folded("Hint", f"<p>{_prose(text)}</p>", text)


def solution(code: str, why: str = "") -> None:
    """A folded solution: the explanation first, then the code."""
    code = inspect.cleandoc(code)
    before = f"<p>{_prose(why)}</p>" if why else ""
    _folded("Solution", before + _highlight(code, "solution.py"), f"{why}\n{code}" if why else code)


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
        _check_label(label)
    columns = list(rows[0])
    if odd := [row for row in rows if list(row) != columns]:
        raise ValueError(f"a row has columns {list(odd[0])}, the first has {columns}")
    caption = f"{caption} ({label})" if label and caption else caption or (label or "")
    cells = [[_cell(row[c]) for c in columns] for row in rows]
    numeric = [all(_is_number(row[c]) or row[c] is None for row in rows) for c in columns]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]

    def plain(line: Sequence[str]) -> str:
        return "  ".join(
            v.rjust(w) if n else v.ljust(w) for v, w, n in zip(line, widths, numeric, strict=True)
        ).rstrip()

    def marked(line: Sequence[str], tag: str, strong: bool = False) -> str:
        out = ""
        for value, right in zip(line, numeric, strict=True):
            text = f"<b>{_escape(value)}</b>" if strong else _escape(value)
            out += f'<{tag} style="text-align:{"right" if right else "left"}">{text}</{tag}>'
        return f"<tr>{out}</tr>"

    body = "".join(marked(line, "td", bool(bold and bold(row))) for line, row in zip(cells, rows, strict=True))
    head = f'<caption style="text-align:left">{_escape(caption)}</caption>' if caption else ""
    _display(
        f"<table>{head}<thead>{marked(columns, 'th')}</thead><tbody>{body}</tbody></table>",
        "\n".join([*([caption] if caption else []), plain(columns), *map(plain, cells)]),
    )


def _display(markup: str, text: str) -> None:
    """Show both forms in IPython, which picks one; print the text anywhere else."""
    if _ipython() is None:
        print(text)
    else:
        from IPython.display import display

        display({"text/html": markup, "text/plain": text}, raw=True)


def _ipython():
    """The running IPython shell, or None: in plain Python, or without the `lab` extra."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _style_figures() -> None:
    shell = _ipython()
    if shell is not None and "IPKernelApp" in shell.config:
        # Figures belong under their cell, whatever MPLBACKEND says (Agg would swallow them).
        shell.run_line_magic("matplotlib", "inline")
    matplotlib.rcParams.update(FIGURE_STYLE)


def _highlight(text: str, filename: str) -> str:
    try:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import CudaLexer, get_lexer_for_filename
        from pygments.style import Style
        from pygments.token import Comment, Keyword, Name, Number, Operator, String
    except ImportError:  # only the `lab` extra needs it
        return f'<pre style="{LISTING}">{_escape(text)}</pre>'

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


def _folded(title: str, markup: str, text: str) -> None:
    _display(f"<details><summary>{title}</summary>{markup}</details>", f"[{title}] {text}")


def _check_label(label: str) -> None:
    if re.split("[:,]", label)[0].strip() not in LABELS:
        raise ValueError(f"label is {label!r}; it must begin with one of {', '.join(LABELS)}")


def _escape(value: object) -> str:
    return html.escape(str(value))


def _prose(text: str) -> str:
    """Escaped text in which `code` stays code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _escape(inspect.cleandoc(text)))


def _left(value: object) -> str:
    return f'<td style="text-align:left">{_escape(value)}</td>'


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_numeric(value: object) -> bool:
    return _is_number(value) or isinstance(value, torch.Tensor | np.ndarray)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    return _figure(float(value)) if _is_number(value) else str(value)


def _figure(value: float) -> str:
    """Four significant digits, without an exponent where it is easily read."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3e}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _quantity(value: object, unit: str) -> str:
    return f"{_cell(value)} {unit}".strip()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
