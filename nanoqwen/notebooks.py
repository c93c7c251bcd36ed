"""Run the notebooks, and keep them in one form: `python -m nanoqwen.notebooks run | check | format | stamp`.

`run` executes copies and leaves the notebooks alone; `run --in-place` executes the notebooks themselves and stamps
them, which is how their outputs are recorded on a GPU. `check` says where a notebook departs from the form, `format`
mends what needs no thought.
"""

import argparse
import ast
import base64
import datetime
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
import numpy
import PIL.Image
from nbformat import NotebookNode

from nanoqwen.lesson import mode
from nanoqwen.paths import NOTEBOOKS, REPO

BUILD = REPO / "build"
TIMEOUT = 3600  # seconds a cell may take
LEAST_SECONDS = 0.3  # a lesson that takes less did nothing: importing torch alone takes longer
MOST_LINES = 20  # of a code cell, unless it is tagged `solution`
MOST_BYTES = 500_000

# The sections of a lesson, in their order. The second value says whether every lesson has it.
HEADINGS = (
    ("What you will learn", True),
    ("What you need", True),
    ("Set up", True),
    ("Where we are", True),
    ("The equation", True),
    ("Bytes by hand", True),
    ("Predict", True),
    ("The code", False),
    ("The kernel", False),
    ("Run and check", True),
    ("Observe", False),
    ("Measure", True),
    ("Reveal", True),
    ("Your turn", True),
    ("What you learned", True),
    ("Next", True),
)
# Lessons to come, for the README: each gives way to its notebook.
PLANNED = (
    ("02", "Naive GEMV", "one thread per row: right, and slow for a reason that can be counted"),
    ("03", "Coalesced GEMV", "warp per row, 16-byte loads, shuffles: the ladder to the bandwidth limit"),
    ("04", "INT4 fused GEMV", "a quarter of the bytes: packing, and four ways to unpack"),
    ("05", "Paged attention", "pages, online softmax, split-KV, and a barrier bug"),
    ("06", "Graph capture", "hundreds of launches a token, then one"),
    ("07", "The honest scoreboard", "the whole ladder beside what you would pick instead"),
    ("08", "Dequantise or fuse?", "the batch size where compute takes over"),
)
SYLLABUS = ("<!-- syllabus: written by `make format` -->", "<!-- end of syllabus -->")
WEIGHTS = ("none", "nanoqwen-tiny", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "qwen2.5-coder-7b")

_ABSOLUTE = re.compile(r"(?<![\w.~])(?:/home/|/root/|/work/|/tmp/|/Users/|[A-Z]:\\)")
_WARNING = re.compile(r"\b\w*Warning\b:|\bWARNING\b")


@dataclass(frozen=True)
class Result:
    """One executed notebook. `error`: None, or what went wrong in a line or two."""

    name: str
    seconds: float
    mode: str
    error: str | None = None


def all_notebooks(folder: Path = NOTEBOOKS) -> list[Path]:
    """The lessons, in order."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def code_sha256(notebook: NotebookNode) -> str:
    """A hash of the code cells: outputs that carry it were made by this code."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def title(notebook: NotebookNode) -> tuple[str, str]:
    """The title and the one-line claim, from the first cell; empty where it has none."""
    lines = [line.strip() for line in notebook.cells[0].source.splitlines() if line.strip()] if notebook.cells else []
    if not lines or notebook.cells[0].cell_type != "markdown" or not lines[0].startswith("# "):
        return "", ""
    return lines[0].removeprefix("# "), lines[1] if len(lines) > 1 else ""


def read(path: Path) -> NotebookNode:
    """Read a notebook; cells without an id of their own get one, the same every time.

    Raises:
        ValueError: it is not a notebook.
    """
    try:
        raw, seen = json.loads(path.read_text(encoding="utf-8")), set()
        for i, cell in enumerate(raw["cells"]):
            if not cell.get("id") or cell["id"] in seen:
                cell["id"] = hashlib.sha256(f"{i} {cell['source']}".encode()).hexdigest()[:8]
            seen.add(cell["id"])
        raw["nbformat_minor"] = max(raw["nbformat_minor"], 5)  # the first version whose cells have ids
        return nbformat.reads(json.dumps(raw), as_version=4)
    except Exception as error:  # nbformat raises a different type for every defect
        raise ValueError(f"{path}: not a readable notebook ({error})") from None


def write(path: Path, notebook: NotebookNode) -> None:
    """Write a notebook whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(to_text(notebook))
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def to_text(notebook: NotebookNode) -> str:
    """The notebook as its file holds it."""
    return nbformat.writes(notebook).rstrip("\n") + "\n"


# Execution


def execute(path: Path, timeout: int = TIMEOUT) -> tuple[NotebookNode, Result]:
    """Run a notebook top to bottom in a fresh kernel, from an empty folder; return the executed copy."""
    from jupyter_client.kernelspec import NATIVE_KERNEL_NAME
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = read(path)
    started: list[float] = []
    error = None
    # An empty folder whose name has a space: a lesson that leans on where it stands fails here, not at a reader's.
    with tempfile.TemporaryDirectory(prefix="a reader's folder ") as folder:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name=NATIVE_KERNEL_NAME,  # this interpreter's, whatever the notebook's metadata says
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,  # tokens printed one by one are one output
            extra_arguments=["--log-level=ERROR"],  # its warnings are about the machinery, not the lesson
            on_cell_execute=lambda cell, cell_index: started or started.append(time.perf_counter()),
        )
        try:
            client.execute()
        except CellExecutionError as failure:
            error = f"{_failed_cell(notebook)}: {failure.ename}: {failure.evalue}"
        except CellTimeoutError:
            error = f"a cell took longer than {timeout} s"
        except DeadKernelError:
            error = "the kernel died (out of memory?)"
    seconds = time.perf_counter() - started[0] if started else 0.0
    if error is None and seconds < LEAST_SECONDS:
        error = f"it ran in {seconds:.2f} s, so it did nothing"
    return notebook, Result(path.stem, seconds, mode(), error)


def _failed_cell(notebook: NotebookNode) -> str:
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and any(out.output_type == "error" for out in cell.outputs):
            return f"cell {i} ({cell.source.splitlines()[0]!r})"
    return "a cell"


def run(paths: Sequence[Path], out: Path = BUILD, in_place: bool = False, timeout: int = TIMEOUT) -> list[Result]:
    """Run notebooks one after the other, with a line of progress each and a table at the end.

    Args:
        out: where the executed copies and their HTML pages go.
        in_place: write the outputs into the notebooks themselves, stamped, instead; a notebook that fails is left
            as it was.
    """
    results = []
    for i, path in enumerate(paths, 1):
        print(f"[{i}/{len(paths)}] {path.stem} …", end=" ", flush=True)
        notebook, result = execute(path, timeout)
        if in_place:
            if result.error is None:
                write(path, stamped(with_small_figures(canonical(notebook))))
        else:
            out.mkdir(parents=True, exist_ok=True)
            write(out / path.name, notebook)
            (out / f"{path.stem}.html").write_text(_html(notebook, path.stem), encoding="utf-8")
        print(f"{result.seconds:.1f} s, {result.error or 'ok'}", flush=True)
        results.append(result)
    print(f"\n{summary(results)}")
    if not in_place and results:
        shown = out.relative_to(REPO) if out.is_relative_to(REPO) else out
        print(f"\nexecuted copies and HTML pages: {shown}{os.sep}")
    return results


def with_small_figures(notebook: NotebookNode) -> NotebookNode:
    """The notebook with its PNG figures in a palette of 64 colours, a third of the bytes; text keeps its edges."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    for data in (output.data for output in outputs if "image/png" in output.get("data", {})):
        data["image/png"] = _smaller(data["image/png"])
    return notebook


def _smaller(png: str) -> str:
    given, small = base64.b64decode(png), io.BytesIO()
    picture = PIL.Image.open(io.BytesIO(given))
    if picture.mode == "P":
        return png
    _in_palette(picture.convert("RGB")).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode() if small.tell() < len(given) else png


def _in_palette(picture: PIL.Image.Image, size: int = 64) -> PIL.Image.Image:
    """Half of the palette are the colours of most pixels, so that areas keep theirs; of the others each is the farthest
    from all before it, so that small marks keep theirs."""
    pixels = numpy.asarray(picture).reshape(-1, 3)
    colours, which, counts = numpy.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    colours, often, palette = colours.astype(int), numpy.argsort(-counts, kind="stable")[: size // 2], []
    nearest, distance = numpy.zeros(len(colours), numpy.uint8), numpy.full(len(colours), 1 << 20)
    for i in range(size):
        new = often[i] if i < len(often) else distance.argmax()
        palette.append(colours[new])
        away = ((colours - colours[new]) ** 2).sum(1)
        nearest[away < distance] = i
        distance = numpy.minimum(distance, away)
    made = PIL.Image.fromarray(nearest[which.ravel()].reshape(picture.height, picture.width))
    made.putpalette(numpy.concatenate(palette).astype(numpy.uint8).tobytes())
    return made


def summary(results: Sequence[Result]) -> str:
    """The final table: notebook, seconds, mode, result."""
    rows = [("notebook", "seconds", "mode", "result")]
    rows += [(r.name, f"{r.seconds:.1f}", r.mode, "FAILED" if r.error else "ok") for r in results]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}" for a, b, c, d in rows)


def _html(notebook: NotebookNode, name: str) -> str:
    from nbconvert import HTMLExporter

    return HTMLExporter().from_notebook_node(notebook, resources={"metadata": {"name": name}})[0]


# Form


def canonical(notebook: NotebookNode) -> NotebookNode:
    """A copy in the form in which notebooks are committed.

    nbformat 4.5, fixed metadata, code formatted by ruff where ruff is installed, no metadata on cells but tags.
    Outputs and the lesson's own metadata stay.
    """
    notebook = nbformat.from_dict(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    lesson = notebook.metadata.get("nanoqwen", {})
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "nanoqwen": lesson,
        }
    )
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        cell.source = cell.source.strip("\n") if cell.cell_type == "code" else cell.source.strip()
        cell.pop("attachments", None)
    return _formatted(notebook)


def _formatted(notebook: NotebookNode) -> NotebookNode:
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ruff is None:
        return notebook
    done = subprocess.run(
        [ruff, "format", "--config", str(REPO / "pyproject.toml"), "--stdin-filename", "lesson.ipynb", "-"],
        input=to_text(notebook),
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise ValueError(f"ruff cannot format the notebook: {done.stderr.strip()}")
    for cell, tidy in zip(notebook.cells, nbformat.reads(done.stdout, as_version=4).cells, strict=True):
        cell.source = tidy.source
    return notebook


def stamped(notebook: NotebookNode, gpu: str | None = None) -> NotebookNode:
    """The notebook with a record of what made its outputs: GPU, hash of the code cells, day.

    Args:
        gpu: its name; None: the one of this machine, or `none` where there is none.
    """
    import torch

    if gpu is None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    notebook.metadata.setdefault("nanoqwen", {})["outputs"] = {
        "gpu": gpu,
        "code_sha256": code_sha256(notebook),
        "when": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return notebook


def check(paths: Sequence[Path]) -> list[str]:
    """Where notebooks depart from the form, one line each; an empty list says that all is well."""
    problems, definitions = [], {}
    for path in paths:
        try:
            notebook = read(path)
            problems += [f"{path.name}: {text}" for text in _problems(path, notebook)]
        except ValueError as error:
            problems.append(str(error))
            continue
        for name in _defined(notebook):
            definitions.setdefault(name, []).append(path.name)
    for name, where in definitions.items():
        if len(where) > 1:
            problems.append(f"{name} is defined in {' and '.join(where)}; move it into the package")
    return problems


def syllabus(paths: Sequence[Path]) -> str:
    """The README's table of lessons, in Markdown: those that are there, then those planned."""
    lines = ["| # | lesson | what it shows | minutes, no GPU | minutes, GPU |", "|---|---|---|---|---|"]
    for path in paths:
        notebook = read(path)
        name, claim = title(notebook)
        lesson = notebook.metadata.get("nanoqwen", {})
        minutes = " | ".join(f"{lesson.get(key, 0):g}" for key in ("minutes_cpu", "minutes_gpu"))
        name = name.partition(" · ")[2]
        lines.append(f"| {path.name[:2]} | [{name}](notebooks/{path.name}) | {claim.rstrip('.')} | {minutes} |")
    there = {path.name[:2] for path in paths}
    lines += [f"| {n} | {name} | {claim} | planned | |" for n, name, claim in PLANNED if n not in there]
    return "\n".join(lines)


def with_syllabus(readme: str, paths: Sequence[Path]) -> str:
    """The README's text with its table of lessons brought up to date.

    Raises:
        ValueError: the markers between which the table stands are missing.
    """
    before, start, rest = readme.partition(SYLLABUS[0])
    _, end, after = rest.partition(SYLLABUS[1])
    if not start or not end:
        raise ValueError(f"README.md lacks the lines {SYLLABUS[0]} and {SYLLABUS[1]}")
    return f"{before}{start}\n{syllabus(paths)}\n{end}{after}"


def _problems(path: Path, notebook: NotebookNode) -> list[str]:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        *_form(path, notebook),
        *_title_and_headings(path, notebook),
        *_lesson_metadata(notebook),
        *(text for i, cell in enumerate(notebook.cells) for text in _cell_problems(i, cell)),
        *_execution(code),
    ]


def _form(path: Path, notebook: NotebookNode) -> list[str]:
    problems = []
    if path.read_text(encoding="utf-8") != to_text(canonical(notebook)):
        problems.append("is not in canonical form; run `make format`")
    if (size := path.stat().st_size) > MOST_BYTES:
        problems.append(f"is {size:,} bytes; at most {MOST_BYTES:,}: smaller figures?")
    return problems


def _title_and_headings(path: Path, notebook: NotebookNode) -> list[str]:
    problems = []
    name, claim = title(notebook)
    if not name.startswith(f"{path.name[:2]} · ") or not claim:
        problems.append(f"the first cell must be '# {path.name[:2]} · Title' and a line that says what is proved")
    found = [
        line.removeprefix("## ").strip()
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("## ")
    ]
    known = [heading for heading, _ in HEADINGS]
    problems += [f"lacks the section '## {h}'" for h, required in HEADINGS if required and h not in found]
    order = [known.index(h) for h in found if h in known]
    if order != sorted(set(order)):
        problems.append(f"its sections are out of order or double: {', '.join(h for h in found if h in known)}")
    return problems


def _lesson_metadata(notebook: NotebookNode) -> list[str]:
    lesson, problems = notebook.metadata.get("nanoqwen", {}), []
    for key in ("minutes_cpu", "minutes_gpu"):
        value = lesson.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            problems.append(f"metadata nanoqwen.{key} is {value!r}; it must be minutes, above 0")
    if lesson.get("weights") not in WEIGHTS:
        problems.append(f"metadata nanoqwen.weights is {lesson.get('weights')!r}; it must be one of {WEIGHTS}")
    outputs = lesson.get("outputs") or {}
    if missing := [key for key in ("gpu", "code_sha256", "when") if not outputs.get(key)]:
        problems.append(f"metadata nanoqwen.outputs lacks {', '.join(missing)}; run it on a GPU with --in-place")
    elif outputs["code_sha256"] != code_sha256(notebook):
        problems.append("its code has changed since its outputs were made; run it on a GPU with --in-place")
    elif outputs["gpu"] == "none":
        problems.append("its outputs were made without a GPU; run it on one with --in-place")
    return problems


def _cell_problems(i: int, cell: NotebookNode) -> list[str]:
    where, problems = f"cell {i}", []
    if _ABSOLUTE.search(cell.source):
        problems.append(f"{where} names a path of one machine: {_ABSOLUTE.search(cell.source)[0]}")
    if cell.cell_type != "code":
        return problems
    lines = len(cell.source.splitlines())
    if lines > MOST_LINES and "solution" not in cell.metadata.get("tags", ()):
        problems.append(f"{where} has {lines} lines; at most {MOST_LINES}")
    for output in cell.outputs:
        if output.output_type == "error":
            problems.append(f"{where} ended in {output.ename}")
        text = _output_text(output)
        if found := _ABSOLUTE.search(text):
            problems.append(f"the output of {where} names a path of one machine: {found[0]}")
        if found := _WARNING.search(text):
            problems.append(f"the output of {where} holds a warning: {found[0]}")
    return problems


def _execution(code: Sequence[NotebookNode]) -> list[str]:
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        return [f"execution counts are {counts}, not 1 to {len(code)}: run it top to bottom"]
    return []


def _output_text(output: NotebookNode) -> str:
    """What a reader reads of an output: not the base64 of its pictures."""
    if output.output_type == "stream":
        return output.text
    data = output.get("data", {})
    return "\n".join(str(value) for kind, value in data.items() if not kind.startswith("image/"))


def _defined(notebook: NotebookNode) -> set[str]:
    """The functions and classes that a notebook defines."""
    names = set()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            python = "\n".join("" if re.match(r"\s*[%!]", line) else line for line in cell.source.splitlines())
            try:
                tree = ast.parse(python)
            except SyntaxError:
                continue  # ruff reports it
            names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nanoqwen.notebooks", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "run top to bottom; exit status 1 if any failed"),
        ("check", "say where notebooks depart from the form; exit status 1 if any does"),
        ("format", "mend the form"),
        ("stamp", "record that the outputs were made by this code, on this machine's GPU"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/")
        if name == "run":
            command.add_argument("--out", type=Path, default=BUILD, help="folder of the executed copies and pages")
            command.add_argument("--in-place", action="store_true", help="write outputs into the notebooks instead")
            command.add_argument("--timeout", type=int, default=TIMEOUT, help="seconds that one cell may take")
        if name == "stamp":
            command.add_argument("--gpu", help="name of the GPU that made the outputs (default: this machine's)")
    args = parser.parse_args(argv)
    paths = args.notebooks or all_notebooks()
    if missing := [path for path in paths if not path.is_file()]:
        parser.error(f"{missing[0]}: no such notebook")
    try:
        if args.command == "run":
            if not paths:
                print("there are no notebooks to run")
            return int(any(r.error for r in run(paths, args.out, args.in_place, args.timeout)))
        if args.command == "check":
            problems = check(paths)
            print("\n".join(problems) or f"{len(paths)} notebooks, all in form")
            return int(bool(problems))
        for path in paths:
            notebook = canonical(read(path))
            write(path, stamped(notebook, args.gpu) if args.command == "stamp" else notebook)
        if args.command == "format" and not args.notebooks:
            readme = REPO / "README.md"
            readme.write_text(with_syllabus(readme.read_text(encoding="utf-8"), paths), encoding="utf-8")
        return 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
