import base64
import io
import json

import nbformat
import numpy
import PIL.Image
import pytest
from matplotlib import pyplot
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from nanoqwen import notebooks
from nanoqwen.notebooks import HEADINGS
from nanoqwen.roofline import OKABE_ITO

SETUP = "import time\n\ntime.sleep(0.4)\nprint('ready')"


def lesson(folder, name="90_a_lesson.ipynb", code=(SETUP,)):
    """A lesson with every section and these code cells, as someone would first save it."""
    cells = [new_markdown_cell(f"# {name[:2]} · A lesson\n\nIt proves that notebooks run.")]
    for heading, _ in HEADINGS:
        cells.append(new_markdown_cell(f"## {heading}"))
        if heading == "Set up":
            cells += [new_code_cell(source) for source in code]
    facts = {"minutes_cpu": 2, "minutes_gpu": 0.5, "weights": "none"}
    path = folder / name
    nbformat.write(new_notebook(cells=cells, metadata={"nanoqwen": facts}), path)
    return path


def recorded(folder, **options):
    """A lesson in form, with outputs as a GPU run would leave them, but without running it."""
    path = lesson(folder, **options)
    notebook = notebooks.read(path)
    for i, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.execution_count = i
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="ready\n")]
    notebooks.write(path, notebooks.stamped(notebooks.canonical(notebook), gpu="NVIDIA H200"))
    return path


def spoilt(path, spoil, stamp=True):
    notebook = notebooks.read(path)
    spoil(notebook)
    if stamp:
        notebook = notebooks.stamped(notebooks.canonical(notebook), gpu="NVIDIA H200")
    notebooks.write(path, notebook)
    return notebooks.check([path])


def code(notebook):
    return next(cell for cell in notebook.cells if cell.cell_type == "code")


def test_the_committed_notebooks_are_in_form():
    assert notebooks.check(notebooks.all_notebooks()) == []


def test_a_recorded_lesson_is_in_form(tmp_path):
    assert notebooks.check([recorded(tmp_path)]) == []


# Running


def test_run_writes_copies_and_pages_and_leaves_the_lesson_alone(tmp_path, capsys):
    path = lesson(tmp_path)
    before = path.read_bytes()
    assert notebooks.main(["run", str(path), "--out", str(tmp_path / "build")]) == 0
    assert path.read_bytes() == before
    assert code(notebooks.read(tmp_path / "build" / path.name)).outputs[0].text == "ready\n"
    assert "ready" in (tmp_path / "build" / "90_a_lesson.html").read_text()
    out = capsys.readouterr().out
    assert "[1/1] 90_a_lesson" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" ok")][-1] == "90_a_lesson"


def test_a_failing_lesson_fails_the_run_and_the_others_still_run(tmp_path, capsys):
    bad = lesson(tmp_path, "90_bad.ipynb", ("x = 1", "x / 0"))
    good = lesson(tmp_path, "91_good.ipynb")
    assert notebooks.main(["run", str(bad), str(good), "--out", str(tmp_path / "build")]) == 1
    out = capsys.readouterr().out
    assert "('x / 0'): ZeroDivisionError: division by zero" in out
    table = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line and line[0] == "9"}
    assert table == {"90_bad": "FAILED", "91_good": "ok"}
    assert "ZeroDivisionError" in (tmp_path / "build" / "90_bad.html").read_text()


def test_a_lesson_that_does_nothing_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "LEAST_SECONDS", 60)  # a busy machine takes its time over nothing
    _, result = notebooks.execute(lesson(tmp_path, code=("x = 1",)))
    assert "so it did nothing" in result.error


def test_in_place_records_outputs_and_who_made_them(tmp_path):
    path = lesson(tmp_path)
    assert notebooks.main(["run", "--in-place", str(path)]) == 0
    notebook = notebooks.read(path)
    assert code(notebook).execution_count == 1 and code(notebook).outputs[0].text == "ready\n"
    assert notebook.metadata.nanoqwen.outputs.code_sha256 == notebooks.code_sha256(notebook)
    assert not list(tmp_path.glob("*.tmp")) and not (tmp_path / "build").exists()


def test_what_was_printed_bit_by_bit_is_one_output(tmp_path):
    source = SETUP + "\nfor word in ('a ', 'b ', 'c'):\n    print(word, end='', flush=True)\n    time.sleep(0.1)"
    notebook, _ = notebooks.execute(lesson(tmp_path, code=(source,)))
    assert [output.text for output in code(notebook).outputs] == ["ready\na b c"]


def test_in_place_leaves_a_failing_lesson_as_it_was(tmp_path):
    path = lesson(tmp_path, code=(SETUP, "raise SystemError('no')"))
    before = path.read_bytes()
    assert notebooks.main(["run", "--in-place", str(path)]) == 1
    assert path.read_bytes() == before


def test_a_cell_that_never_ends_is_stopped(tmp_path):
    _, result = notebooks.execute(lesson(tmp_path, code=("while True:\n    pass",)), timeout=2)
    assert result.error == "a cell took longer than 2 s"


def test_a_missing_notebook_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        notebooks.main(["run", str(tmp_path / "none.ipynb")])
    assert "none.ipynb: no such notebook" in capsys.readouterr().err


# Form


def test_format_mends_the_form_and_keeps_ids_and_outputs(tmp_path):
    path = lesson(tmp_path, code=("x=1;y = [1,2]\n\n",))
    ids = [cell.id for cell in notebooks.read(path).cells]
    raw = json.loads(path.read_text())
    raw["metadata"]["language_info"] = {"name": "python", "version": "3.12.1"}
    raw["cells"][0]["metadata"] = {"collapsed": True}
    path.write_text(json.dumps(raw))
    assert any("not in canonical form" in problem for problem in notebooks.check([path]))
    assert notebooks.main(["format", str(path)]) == 0
    notebook, text = notebooks.read(path), path.read_text()
    assert [cell.id for cell in notebook.cells] == ids
    assert code(notebook).source == "x = 1\ny = [1, 2]"
    assert "3.12.1" not in text and "collapsed" not in text
    assert not any("canonical" in problem for problem in notebooks.check([path]))
    notebooks.main(["format", str(path)])
    assert path.read_text() == text


def test_cells_without_an_id_get_the_same_one_every_time(tmp_path):
    path = lesson(tmp_path)
    raw = json.loads(path.read_text())
    for cell in raw["cells"]:
        cell["id"] = "same"
    path.write_text(json.dumps(raw))
    notebooks.main(["format", str(path)])
    once = [cell.id for cell in notebooks.read(path).cells]
    path.write_text(json.dumps(raw))
    notebooks.main(["format", str(path)])
    assert [cell.id for cell in notebooks.read(path).cells] == once
    assert len(set(once)) == len(once)


def test_code_that_changed_after_its_outputs_is_told(tmp_path):
    def edit(notebook):
        code(notebook).source += '\nprint("more")'

    assert spoilt(recorded(tmp_path), edit, stamp=False) == [
        "90_a_lesson.ipynb: its code has changed since its outputs were made; run it on a GPU with --in-place"
    ]


def test_prose_may_change_without_a_new_run(tmp_path):
    def edit(notebook):
        notebook.cells[0].source += "\n\nOne more sentence."

    assert spoilt(recorded(tmp_path), edit, stamp=False) == []


def stream(text):
    return lambda nb: code(nb).outputs.append(nbformat.v4.new_output("stream", name="stderr", text=text))


def html(text):
    return lambda nb: code(nb).outputs.append(nbformat.v4.new_output("display_data", data={"text/html": text}))


def set_count(notebook):
    code(notebook).execution_count = 4


def set_fact(key, value):
    return lambda nb: nb.metadata.nanoqwen.update({key: value})


def set_source(source):
    return lambda nb: code(nb).update(source=source)


def drop(heading):
    def spoil(notebook):
        notebook.cells = [cell for cell in notebook.cells if cell.source != f"## {heading}"]

    return spoil


def swap(notebook):
    notebook.cells[1], notebook.cells[2] = notebook.cells[2], notebook.cells[1]


def fail(notebook):
    code(notebook).outputs = [nbformat.v4.new_output("error", ename="KeyError", evalue="x", traceback=[])]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (set_count, "execution counts are [4], not 1 to 1"),
        (fail, "cell 4 ended in KeyError"),
        (stream("/home/ada/x.py:3: something"), "the output of cell 4 names a path of one machine: /home/"),
        (stream("C:\\Users\\ada"), "names a path of one machine: C:\\"),
        (html("<code>/tmp/x</code>"), "names a path of one machine: /tmp/"),
        (stream("x.py:3: UserWarning: careful"), "holds a warning: UserWarning:"),
        (stream("[kernel] WARNING | careful"), "holds a warning: WARNING"),
        (set_source("open('/root/x')"), "cell 4 names a path of one machine: /root/"),
        (set_source("\n".join(f"x{i} = {i}" for i in range(21))), "cell 4 has 21 lines; at most 20"),
        (drop("Bytes by hand"), "lacks the section '## Bytes by hand'"),
        (swap, "its sections are out of order or double: What you need, What you will learn"),
        (set_fact("minutes_cpu", None), "metadata nanoqwen.minutes_cpu is None"),
        (set_fact("minutes_gpu", 0), "metadata nanoqwen.minutes_gpu is 0"),
        (set_fact("weights", "gpt-2"), "metadata nanoqwen.weights is 'gpt-2'"),
        (lambda nb: nb.cells[0].update(source="# A lesson"), "the first cell must be '# 90 · Title'"),
        (lambda nb: nb.cells[0].update(source="x" * 600_000), "at most 500,000"),
    ],
)
def test_a_departure_from_the_form_is_named(tmp_path, spoil, problem):
    assert any(problem in text for text in spoilt(recorded(tmp_path), spoil))


def test_outputs_of_a_cpu_or_of_nobody_are_refused(tmp_path):
    path = recorded(tmp_path)
    notebooks.write(path, notebooks.stamped(notebooks.read(path), gpu="none"))
    assert "made without a GPU" in notebooks.check([path])[0]
    assert (
        "outputs lacks gpu, code_sha256, when" in spoilt(path, lambda nb: nb.metadata.nanoqwen.pop("outputs"), False)[0]
    )


def test_an_optional_section_may_be_missing_and_a_solution_may_be_long(tmp_path):
    def spoil(notebook):
        drop("Observe")(notebook)
        code(notebook).update(source="\n".join(f"x{i} = {i}" for i in range(30)), metadata={"tags": ["solution"]})

    assert spoilt(recorded(tmp_path), spoil) == []


def test_a_picture_is_not_read_as_text(tmp_path):
    def spoil(notebook):
        data = {"image/png": "AAAA/tmp/AAAA/home/AAAA", "text/plain": "<Figure>"}
        code(notebook).outputs.append(nbformat.v4.new_output("display_data", data=data))

    assert spoilt(recorded(tmp_path), spoil) == []


def test_a_helper_in_two_lessons_belongs_in_the_package(tmp_path):
    paths = [recorded(tmp_path, name=f"9{i}_x.ipynb", code=("def helper():\n    return 1",)) for i in range(2)]
    assert notebooks.check(paths) == ["helper is defined in 90_x.ipynb and 91_x.ipynb; move it into the package"]
    assert notebooks.check(paths[:1]) == []


def test_what_is_not_a_notebook_is_named(tmp_path):
    path = tmp_path / "90_x.ipynb"
    path.write_text("{")
    assert f"{path}: not a readable notebook" in notebooks.check([path])[0]
    assert notebooks.main(["format", str(path)]) == 2
    assert path.read_text() == "{"


def test_the_syllabus_lists_what_is_there_and_what_is_planned(tmp_path):
    table = notebooks.syllabus([recorded(tmp_path, name="02_naive.ipynb")]).splitlines()
    assert table[2] == "| 02 | [A lesson](notebooks/02_naive.ipynb) | It proves that notebooks run | 2 | 0.5 |"
    assert len(table) == 2 + len(notebooks.PLANNED) and all("planned" in row for row in table[3:])
    with pytest.raises(ValueError, match=r"README\.md lacks the lines"):
        notebooks.with_syllabus("no markers", [])


def test_small_marks_of_a_figure_keep_their_colours():
    figure, axis = pyplot.subplots(figsize=(7, 5))
    for i, color in enumerate(OKABE_ITO[:6]):
        axis.plot([i], [i], "osDX^v"[i], color=color, markeredgecolor="black", label=color)
    axis.legend()
    axis.grid()
    given = io.BytesIO()
    figure.savefig(given, format="png")
    pyplot.close(figure)
    small = base64.b64decode(notebooks._smaller(base64.b64encode(given.getvalue()).decode()))
    before, after = (
        numpy.asarray(PIL.Image.open(io.BytesIO(png)).convert("RGB")).astype(int) for png in (given.getvalue(), small)
    )
    assert len(small) < len(given.getvalue()) / 2 and abs(after - before).max() < 24


def test_figures_take_fewer_bytes_look_the_same_and_are_left_alone_the_second_time():
    ramp = numpy.linspace(0, 255, 300).astype(numpy.uint8)
    pixels = numpy.dstack(
        [numpy.tile(ramp, (200, 1)), numpy.tile(ramp[:200, None], (1, 300)), numpy.full((200, 300), 40)]
    )
    given = io.BytesIO()
    PIL.Image.fromarray(pixels.astype(numpy.uint8)).save(given, "PNG", compress_level=0)
    figure = new_output("display_data", {"image/png": base64.b64encode(given.getvalue()).decode(), "text/plain": "a"})
    notebook = new_notebook(cells=[new_markdown_cell("x"), new_code_cell("y", outputs=[figure])])

    def picture():
        return notebooks.with_small_figures(notebook).cells[1].outputs[0].data["image/png"]

    first = picture()
    small = base64.b64decode(first)
    assert len(small) < len(given.getvalue()) / 2 and picture() == first
    made = numpy.asarray(PIL.Image.open(io.BytesIO(small)).convert("RGB")).astype(int)
    assert made.shape == pixels.shape and abs(made - pixels).mean() < 16
