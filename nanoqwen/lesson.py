"""What the notebooks use: a set-up cell, predictions, checks, source listings, tables, folded hints.

Everything shows as HTML in a notebook, light or dark, and as plain text elsewhere.
"""

import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch

from nanoqwen import kernel_magic
from nanoqwen.judge import NotRight, check, check_kernel
from nanoqwen.kernel_source import diff, show_kernel
from nanoqwen.listing import (
    display,
    escape,
    highlight,
    ipython,
    is_number,
    left,
    prose,
    quantity,
    show,
    table,
)
from nanoqwen.paths import NOTEBOOKS
from nanoqwen.roofline import OKABE_ITO, check_label

__all__ = [
    "NotRight",
    "Setup",
    "check",
    "check_kernel",
    "diff",
    "hint",
    "mode",
    "predict",
    "reveal",
    "show",
    "show_kernel",
    "solution",
    "start",
    "table",
    "verdict",
]

# Progress bars work without Jupyter's widgets; the line that says so is no part of a lesson.
warnings.filterwarnings("ignore", message="IProgress not found")

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
    if (shell := ipython()) is not None and hasattr(shell, "register_magic_function"):
        kernel_magic.register(shell)
    path = find_model(model)
    setup = Setup("cuda" if torch.cuda.is_available() else "cpu", mode(), path)
    how = "timed on this GPU" if setup.on_gpu else "counts are made here, GPU times are recorded ones and say so"
    rows = [
        ("machine", machine()),
        ("mode", f"{setup.mode}: {how}"),
        ("model", setup.model_name),
        ("seed", seed),
    ]
    display(
        "<table>" + "".join(f"<tr><th>{escape(k)}</th>{left(v)}</tr>" for k, v in rows) + "</table>",
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
    if guess is not None and not options and not (is_number(guess) and math.isfinite(guess)):
        raise ValueError(f"guess is {guess!r}; give a number{f' in {unit}' if unit else ''}, such as guess=10")
    _predictions[key] = _Prediction(question, unit, tuple(options), guess)
    if guess is None:
        want = f"one of {', '.join(map(repr, options))}" if options else f"a number{f' in {unit}' if unit else ''}"
        answer = f"Write guess=… in this cell ({want}) and run it before you read on."
    else:
        answer = f"Your guess: {quantity(guess, unit)}"
    display(f"<p><b>Predict.</b> {prose(question)}<br><i>{escape(answer)}</i></p>", f"Predict. {question}\n{answer}")


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
    check_label(label)
    asked = _predictions[key]
    if asked.options and measured not in asked.options:
        raise ValueError(f"measured is {measured!r}, which is none of the options {asked.options}")
    if not asked.options and not (is_number(measured) and math.isfinite(measured)):
        raise ValueError(f"measured is {measured!r}; it must be a finite number")
    rows = [("your guess", "none made" if asked.guess is None else quantity(asked.guess, asked.unit))]
    if bound is not None:
        rows.append(("bound", quantity(bound, asked.unit)))
    rows.append((label, quantity(measured, asked.unit)))
    if asked.guess is not None:
        rows.append(("verdict", verdict(asked.guess, measured)))
    display(
        f"<p><b>Reveal.</b> {prose(asked.question)}</p><table>"
        + "".join(f"<tr><th>{escape(name)}</th>{left(value)}</tr>" for name, value in rows)
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


def hint(text: str) -> None:
    """A folded hint."""
    _folded("Hint", f"<p>{prose(text)}</p>", text)


def solution(name: str) -> None:
    """A folded solution: the file of this name in `notebooks/solutions`, whose first words are the explanation.

    Raises:
        FileNotFoundError: there is none.
    """
    path = NOTEBOOKS / "solutions" / name
    if not path.is_file():
        raise FileNotFoundError(f"there is no solution {name!r} in notebooks/solutions")
    text = path.read_text(encoding="utf-8")
    _folded("Solution", highlight(text, name), text)


def _style_figures() -> None:
    shell = ipython()
    if shell is not None and "IPKernelApp" in shell.config:
        # Figures belong under their cell, whatever MPLBACKEND says (Agg would swallow them).
        shell.run_line_magic("matplotlib", "inline")
    matplotlib.rcParams.update(FIGURE_STYLE)


def _folded(title: str, markup: str, text: str) -> None:
    display(f"<details><summary>{title}</summary>{markup}</details>", f"[{title}] {text}")
