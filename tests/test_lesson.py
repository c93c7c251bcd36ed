import math
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch

from nanoqwen import lesson, listing, reference
from nanoqwen.paths import REPO


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def no_predictions():
    lesson._predictions.clear()


# Checks


def test_a_right_answer_passes_and_says_how_near_it_is(capsys):
    want = normal(5, 7)
    assert lesson.check("scores", want * (1 + 1e-6), want)
    assert re.search(r"✓ scores: relative error \d\.\de-0[67] over 35 values", capsys.readouterr().out)


@pytest.mark.parametrize("unsolved", [None, ..., NotImplemented])
def test_an_unsolved_exercise_is_told_not_yet_and_does_not_raise(unsolved, capsys):
    assert not lesson.check("rope", unsolved, normal(3))
    assert capsys.readouterr().out == "○ rope: not yet\n"


def test_an_exercise_that_raises_not_implemented_is_unsolved():
    def stub():
        raise NotImplementedError

    assert not lesson.check("rope", stub, normal(3))
    assert lesson.check("rope", lambda: normal(3), normal(3))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda x: torch.where(torch.arange(24).view(4, 6) == 13, math.nan, x), "1 of 24 values are NaN or infinite"),
        (lambda x: x / 0, "24 of 24 values are NaN or infinite"),
        (lambda x: x[:3], r"shape \(3, 6\), want \(4, 6\)"),
        (lambda x: x.T, r"shape \(6, 4\), want \(4, 6\)"),
        (lambda x: x[None], r"shape \(1, 4, 6\)"),
        (torch.zeros_like, "all zeros"),
        (lambda x: x + 0.01 * (x == x[2, 4]), r"1 of 24 values .* the worst at \[2, 4\]"),
        (lambda x: 1.001 * x, "2[0-4] of 24 values are off by more than 0.0001"),
        (lambda x: x.mean().expand(4, 6), "off by more than"),
        (lambda x: "an answer", "want numbers"),
        (lambda x: x.tolist(), "want numbers"),
    ],
)
def test_a_wrong_answer_is_refused_with_the_reason(spoil, complaint):
    want = normal(4, 6)
    with pytest.raises(lesson.NotRight, match=complaint):
        lesson.check("scores", spoil(want), want)


def test_one_wrong_element_among_a_million_is_seen():
    want = normal(1000, 1000)
    got = want.clone()
    got[123, 456] += 0.05
    with pytest.raises(lesson.NotRight, match=r"1 of 1,000,000 values .* the worst at \[123, 456\]"):
        lesson.check("matrix", got, want)


def test_tiny_values_are_not_forgiven_for_being_tiny():
    want = 1e-5 * normal(50)
    with pytest.raises(lesson.NotRight):
        lesson.check("small", want * 1.01, want)


def test_a_copy_of_an_input_is_no_answer():
    x = normal(4, 6)
    with pytest.raises(lesson.NotRight, match="input 1, unchanged"):
        lesson.check("rotated", x.clone(), 2 * x, inputs=(normal(4, 6, seed=1), x))


def test_the_expected_answer_itself_is_no_answer():
    want = normal(4)
    with pytest.raises(lesson.NotRight, match="the expected answer itself"):
        lesson.check("rotated", want, want)


def test_zeros_are_right_where_zeros_are_wanted():
    assert lesson.check("residual", torch.zeros(3), torch.zeros(3))


def test_a_bfloat16_answer_is_held_to_bfloat16_accuracy():
    want = normal(1000)
    assert lesson.check("half", want.bfloat16(), want)
    with pytest.raises(lesson.NotRight):
        lesson.check("half", (1.1 * want).bfloat16(), want)


def test_whole_numbers_must_be_equal():
    assert lesson.check("bytes", 988_065_536, 988_065_536)
    with pytest.raises(lesson.NotRight, match="got 988065537, want 988065536"):
        lesson.check("bytes", 988_065_537, 988_065_536)


@pytest.mark.parametrize(("got", "want"), [([1, 2], [1, 3]), ("ab", "abc"), (1, "1"), (True, [1])])
def test_other_values_must_be_equal(got, want):
    assert lesson.check("ids", want, want)
    with pytest.raises(lesson.NotRight):
        lesson.check("ids", got, want)


def test_arrays_and_numbers_are_checked_too():
    assert lesson.check("mean", np.float64(0.5), 0.5)
    assert lesson.check("means", np.array([0.5, 2.0]), torch.tensor([0.5, 2.0]))
    with pytest.raises(lesson.NotRight):
        lesson.check("mean", math.nan, 0.5)


def test_a_check_whose_own_answer_is_not_finite_is_broken():
    with pytest.raises(ValueError, match="the check itself is broken"):
        lesson.check("scores", normal(2), torch.tensor([1.0, math.inf]))


def test_a_failed_check_shows_one_line_in_a_notebook():
    assert lesson.NotRight("rope: all zeros")._render_traceback_() == ["✗ rope: all zeros"]


# Predictions


def test_no_reveal_without_a_prediction():
    with pytest.raises(LookupError, match=r"run its lesson.predict cell"):
        lesson.reveal("mbu", 40)


def test_a_reveal_shows_guess_bound_answer_and_verdict(capsys):
    lesson.predict("mbu", "What share?", "%", guess=80)
    lesson.reveal("mbu", 40.0, bound=100, label="recorded: H200")
    out = capsys.readouterr().out
    for line in ("your guess +80 %", "bound +100 %", "recorded: H200 +40.00 %", "verdict +within 2× .*too high"):
        assert re.search(line, out), line


def test_without_a_guess_a_reveal_is_neutral(capsys):
    lesson.predict("mbu", "What share?", "%")
    lesson.reveal("mbu", 40.0)
    out = capsys.readouterr().out
    assert "none made" in out and "verdict" not in out


def test_a_second_guess_replaces_the_first(capsys):
    lesson.predict("mbu", "What share?", guess=1)
    lesson.predict("mbu", "What share?", guess=40)
    lesson.reveal("mbu", 40.0)
    assert "exactly right" in capsys.readouterr().out


@pytest.mark.parametrize("guess", ["many", math.nan, math.inf, True, [3]])
def test_a_guess_must_be_a_finite_number(guess):
    with pytest.raises(ValueError, match="give a number in ms"):
        lesson.predict("time", "How long?", "ms", guess=guess)
    with pytest.raises(LookupError):
        lesson.reveal("time", 3)


def test_a_guess_may_be_one_of_the_options(capsys):
    lesson.predict("bound", "Which?", options=("memory", "compute"), guess="compute")
    lesson.reveal("bound", "memory")
    assert "it is 'memory'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="choose one of 'memory', 'compute'"):
        lesson.predict("bound", "Which?", options=("memory", "compute"), guess="disk")
    with pytest.raises(ValueError, match="none of the options"):
        lesson.reveal("bound", "disk")


def test_an_unlabelled_number_cannot_be_shown():
    lesson.predict("mbu", "What share?")
    with pytest.raises(ValueError, match="must begin with one of measured, recorded, simulated"):
        lesson.reveal("mbu", 40.0, label="estimated")
    with pytest.raises(ValueError, match="must begin with"):
        lesson.table([{"GB/s": 1.0}], label="guessed")
    with pytest.raises(ValueError, match="finite"):
        lesson.reveal("mbu", math.nan)


@pytest.mark.parametrize(
    ("guess", "answer", "words"),
    [
        (10, 10, "exactly right"),
        (10.5, 10, "within 10 % (high)"),
        (9.5, 10, "within 10 % (low)"),
        (6, 10, "within 2× (1.67× too low)"),
        (100, 10, "10× too high"),
        (1, 25, "25× too low"),
        (-5, -50, "10× too low"),
        (0, 3, "another sign, or zero: the ratio says nothing"),
        (-3, 3, "another sign, or zero: the ratio says nothing"),
    ],
)
def test_verdict(guess, answer, words):
    assert lesson.verdict(guess, answer) == words


# Source


def shown(capsys):
    caption, _, text = capsys.readouterr().out.partition("\n")
    return caption.removeprefix("# "), text.rstrip("\n")


def test_a_listing_is_the_file_itself_and_says_which_lines(capsys):
    lesson.show(reference.rotate)
    caption, text = shown(capsys)
    name, first, last = re.fullmatch(r"(.*):(\d+)–(\d+)", caption).groups()
    assert name == "nanoqwen/reference.py"
    assert text.splitlines() == (REPO / name).read_text().splitlines()[int(first) - 1 : int(last)]
    assert text.startswith("def rotate(")


def test_a_listing_can_be_cut_by_text_or_by_line(capsys):
    lesson.show("nanoqwen/reference.py", "class MLP", "bias=False")
    caption, text = shown(capsys)
    assert text.startswith("class MLP") and text.endswith("bias=False)")
    first = int(re.search(r":(\d+)–", caption)[1])
    lesson.show("nanoqwen/reference.py", first, first)
    assert shown(capsys) == (f"nanoqwen/reference.py:{first}", text.splitlines()[0])


def test_a_method_is_listed_without_its_indent(capsys):
    lesson.show(reference.MLP.forward)
    assert shown(capsys)[1].startswith("def forward(")


def test_a_module_is_listed_whole(capsys):
    lesson.show(reference)
    assert shown(capsys)[1] == (REPO / "nanoqwen/reference.py").read_text().rstrip("\n")


def test_what_is_not_there_cannot_be_listed(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        lesson.show("csrc/nothing.cu")
    with pytest.raises(ValueError, match=r"no line from 1 to \d+ holds 'class Mlp'"):
        lesson.show("nanoqwen/reference.py", "class Mlp")
    with pytest.raises(ValueError, match="line 99999 is not among"):
        lesson.show("nanoqwen/reference.py", 99999)
    (tmp_path / "other.py").write_text("x = 1\n")
    for elsewhere in (str(tmp_path / "other.py"), math.__loader__.__class__):
        with pytest.raises((ValueError, FileNotFoundError, TypeError)):
            lesson.show(elsewhere)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", [listing.BLUE, listing.GREEN, listing.VERMILLION, listing.PURPLE, listing.GREY])
@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_source_is_readable_on_light_and_dark(colour, background):
    lighter, darker = sorted((luminance(colour), luminance(background)), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 4


def test_source_cannot_smuggle_markup_into_a_notebook():
    assert "<script>" not in listing.highlight('x = "<script>"', "a.py")
    assert "<script>" not in listing.highlight("<script>", "kernel.cu")
    assert "<script>" not in listing.prose("`<script>` and <script>")


# Tables


def test_numbers_align_right_with_four_digits(capsys):
    lesson.table(
        [{"kernel": "naive", "GB/s": 123.456, "bytes": 15231233024}, {"kernel": "x", "GB/s": None, "bytes": 7}],
        label="measured",
        caption="Read",
    )
    assert capsys.readouterr().out.splitlines() == [
        "Read (measured)",
        "kernel   GB/s           bytes",
        "naive   123.5  15,231,233,024",
        "x           –               7",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5000"), (9.87654, "9.877"), (4800.0, "4,800"), (1e12, "1.000e+12"), (1e-6, "1.000e-06")],
)
def test_figures(value, text):
    assert listing.figure(value) == text


def test_a_table_needs_rows_of_the_same_columns():
    with pytest.raises(ValueError, match="no rows"):
        lesson.table([])
    with pytest.raises(ValueError, match=r"columns \['b'\], the first has \['a'\]"):
        lesson.table([{"a": 1}, {"b": 1}])


# In a notebook, and out of it


class Shell:
    """An IPython that keeps what is displayed."""

    config = {}  # noqa: RUF012


@pytest.fixture
def cells(monkeypatch):
    displayed = []
    monkeypatch.setattr(listing, "ipython", lambda: Shell)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: displayed.append(data))
    return displayed


def test_a_notebook_gets_html_and_plain_text(cells):
    lesson.predict("a", "How much of `x < y`?")
    lesson.reveal("a", 1.0)
    lesson.check("b", 1, 1)
    lesson.show(reference.rotate)
    lesson.hint("Look at `positions`.")
    lesson.solution("00_token_bound.py")
    lesson.table([{"a": 1}])
    assert [set(cell) for cell in cells] == [{"text/html", "text/plain"}] * 7
    assert "<code>x &lt; y</code>" in cells[0]["text/html"]
    assert all(cells[i]["text/html"].startswith("<details><summary>") for i in (4, 5))
    assert "Sum the sizes" in cells[5]["text/plain"] and "token_bound" in cells[5]["text/html"]
    with pytest.raises(FileNotFoundError, match=r"solution 'none\.py'"):
        lesson.solution("none.py")


def test_start_sets_seeds_and_says_where_it_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("nanoqwen.fetch.find_model", lambda name: tmp_path / "some-model")
    lesson.predict("left over", "from before?")
    with matplotlib.rc_context():
        setup = lesson.start(seed=7)
    assert setup.model_name == "some-model"
    first = torch.randn(3)
    with matplotlib.rc_context():
        lesson.start(seed=7)
    assert torch.equal(first, torch.randn(3))
    out = capsys.readouterr().out
    assert setup.on_gpu == torch.cuda.is_available()
    assert setup.mode in out and torch.__version__ in out and "some-model" in out
    with pytest.raises(LookupError):
        lesson.reveal("left over", 1)


def test_lessons_import_without_jupyter():
    hidden = "import sys; sys.modules.update(dict.fromkeys(('IPython', 'pygments')));"
    code = hidden + "from nanoqwen import lesson, listing, reference; lesson.show(reference.rotate); lesson.hint('h')"
    code += "; assert listing.highlight('a<b', 'x.py') .endswith('>a&lt;b</pre>')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "def rotate" in done.stdout
