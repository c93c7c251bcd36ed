"""Judging a reader's kernel (K3), and showing what changed between two: what the kernel lessons are made of."""

import ast
import re

import pytest
import torch
from lessons import cell

from nanoqwen import kernels, lesson, simt
from nanoqwen.kernel_magic import make
from nanoqwen.kernel_source import find_kernel
from nanoqwen.packing import SEQUENTIAL, pack
from nanoqwen.paths import CSRC, NOTEBOOKS

HEAD = "__global__ void gemv(const float* w, const float* x, float* y, int rows, int cols) "


def judged(body, block=128, threads_a_row=1, **options):
    """Judge a GEMV with this body, a thread (or a warp) a row."""
    (kernel,) = make(f'#include "warp.cuh"\n{HEAD}{{\n{body}\n}}')

    def run(w, x, y):
        rows, cols = w.shape
        kernel[-(-rows * threads_a_row // block), block](w, x, y, rows, cols)

    return lesson.check_kernel("my GEMV", run, **options)


ROW = "int row = blockIdx.x * blockDim.x + threadIdx.x;\nif (row >= rows) return;\n"
SUM = "float sum = 0;\nfor (int k = 0; k < cols; ++k) sum += w[row * cols + k] * x[k];\n"
WARP_SUM = """int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
if (row >= rows) return;
float sum = 0;
for (int k = lane; k < cols; k += 32) sum += w[row * cols + k] * x[k];
sum = warp_sum(sum);
if (lane == 0) y[row] = sum;"""


def test_a_right_kernel_passes_and_is_told_its_counts(capsys):
    assert judged(WARP_SUM, threads_a_row=32)
    out = capsys.readouterr().out
    assert "✓ my GEMV: right on 3 shapes" in out and "no findings" in out
    requests, sectors = 33 * 512 // 32 * 2, 33 * 512 // 32 * 2 * 4
    assert f"simulated: {requests:,} load requests, {sectors:,} sectors, 4.0 a request; coalesced: 100%" in out


def test_a_right_kernel_that_reads_sideways_is_not_there_yet(capsys):
    assert judged(ROW + SUM + "y[row] = sum;") is False
    out = capsys.readouterr().out
    assert out.startswith("○ my GEMV: right, but not coalesced yet: right on 3 shapes") and "✓" not in out
    assert "not coalesced: only 12%" in out


def test_where_coalescing_is_not_asked_for_it_is_only_told(capsys):
    assert judged(ROW + SUM + "y[row] = sum;", coalesced=False) is True
    out = capsys.readouterr().out
    assert out.startswith("✓ my GEMV: right on 3 shapes") and "not coalesced: only 12%" in out


def test_a_kernel_that_loads_nothing_is_judged_too(capsys):
    (kernel,) = make("__global__ void fill(float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = 7; }")
    sevens = {"inputs": lambda rows, cols: [], "wanted": lambda: torch.full((9,), 7.0)}
    assert lesson.check_kernel("fill", lambda y: kernel[1, 32](y, len(y)), shapes=((1, 1),), **sevens)
    assert "0 load requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('y[row] = nanf("");', "33 of 33 values are NaN"),
        ("if (row != 4) y[row] = sum;", r"1 of 33 values are NaN \(never written\?\)"),
        ("y[row] = 1.0f / (row - row);", "infinite"),
        ("y[row] = 0.0f;", "all zeros"),
        ("y[row] = x[row];", "a copy of input 1"),
        ("y[row] = w[row];", "a copy of input 0"),
        ("y[row] = w[row * cols];", "a copy of input 0"),
        ("y[row] = row;", "each value is its own index"),
        ("y[row] = row + 1;", "each value is its own index"),
        ("y[row] = sum * 1.001f;", "off by more than 0.0001"),
        ("y[row] = row == 7 ? sum + 0.1f : sum;", r"the worst at \[7\]"),
        ("y[row] = sum - w[row * cols + cols - 1] * x[cols - 1];", "off by more"),
    ],
)
def test_answers_that_are_no_answers_are_refused(body, complaint):
    with pytest.raises(lesson.NotRight, match=complaint):
        judged(ROW + SUM + body)


def test_a_kernel_that_is_right_only_on_the_shape_that_is_observed_is_refused():
    with pytest.raises(lesson.NotRight, match="shape 7 × 200"):
        judged(WARP_SUM.replace("k < cols", "k < cols / 64 * 64"), threads_a_row=32)


def test_a_kernel_that_reads_out_of_bounds_is_caught_though_its_numbers_are_right(capsys):
    # The last row looks at what stands behind the matrix, and makes nothing of it.
    sly = "float more = w[row * cols + cols];\ny[row] = more > 1e30f ? 0.0f : sum;"
    assert judged(ROW + SUM + sly) is False
    out = capsys.readouterr().out
    assert out.startswith("○ my GEMV: not yet. The machine found") and "[memcheck] gemv:" in out


def test_a_kernel_that_spoils_its_inputs_is_refused():
    (kernel,) = make(
        "__global__ void f(float* w, float* x, float* y, int rows, int cols) { if (!threadIdx.x) w[0] = 1; }"
    )
    with pytest.raises(lesson.NotRight, match="it wrote into its inputs"):
        lesson.check_kernel("sly", lambda w, x, y: kernel[1, 32](w, x, y, *w.shape))


@pytest.mark.parametrize("body", ["// TODO: a warp for each row", "/* TODO */"])
def test_a_stub_is_not_yet(body, capsys):
    assert judged(body) is False
    assert capsys.readouterr().out == "○ my GEMV: not yet\n"


def test_a_function_that_launches_nothing_is_not_yet(capsys):
    def stub(w, x, y):
        raise NotImplementedError

    assert lesson.check_kernel("my GEMV", stub) is False
    assert lesson.check_kernel("my GEMV", lambda w, x, y: None) is False
    assert capsys.readouterr().out.count("not yet") == 2


def test_a_barrier_that_not_all_threads_reach_is_not_yet(capsys):
    broken, mended = make((CSRC / "museum" / "barrier_in_branch.cu").read_text())
    share = {"inputs": lambda rows, cols: [torch.rand(cols) + 0.5], "wanted": lambda x: x / x.sum()}
    shapes = ((1, 1), (1, 300))
    assert not lesson.check_kernel("share", lambda x, y: broken[1, 256](x, y, len(x)), shapes=shapes, **share)
    assert "found (simulated):\n[synccheck] broken:" in capsys.readouterr().out
    assert lesson.check_kernel("share", lambda x, y: mended[1, 256](x, y, len(x)), shapes=shapes, **share)


def test_our_own_kernels_pass_in_every_type():
    for dtype in (torch.float32, torch.bfloat16):
        assert lesson.check_kernel("ours", lambda w, x, y: kernels.gemv_vectorized(w, x, y), dtype=dtype)


# What changed


def test_a_kernel_is_found_by_its_name_with_the_comment_above_it():
    file, first, last = find_kernel("gemv_vectorized")
    lines = (CSRC / file).read_text().splitlines()[first - 1 : last]
    assert file == "gemv.cu" and lines[0].startswith("// Step 2.") and lines[-1] == "}"
    assert sum("__global__" in line for line in lines) == 1
    assert find_kernel("gemv")[0] == "gemv.cu" and find_kernel("gemv_naive")[0] == "gemv_naive.cu"
    with pytest.raises(LookupError, match="no kernel 'gemv_fast'"):
        find_kernel("gemv_fast")


def test_a_kernel_is_shown_from_its_file(capsys):
    lesson.show_kernel("museum/barrier_in_branch.cu:mended")
    caption, _, text = capsys.readouterr().out.partition("\n")
    first, last = map(int, re.search(r":(\d+)–(\d+)", caption).groups())
    assert text.splitlines() == (CSRC / "museum/barrier_in_branch.cu").read_text().splitlines()[first - 1 : last]
    assert "mended(" in text and "broken(" not in text


def test_a_diff_has_the_lines_that_changed_and_the_counts_that_changed(capsys):
    w, x = torch.randn(32, 512), torch.randn(512)
    counts = tuple(simt.observe(f, w, x) for f in (kernels.gemv_naive, kernels.gemv_coalesced))
    lesson.diff("gemv_naive", "gemv_coalesced", counts)
    out = capsys.readouterr().out
    assert "-     for (int k = 0; k < cols; ++k) {" in out
    assert "+     for (int k = lane; k < cols; k += 32) {" in out
    assert not re.search(r"^[-+].*__global__", out, re.M)  # another name is no change
    naive, coalesced = (report.totals.global_load_sectors for report in counts)
    assert re.search(rf"sectors loaded +{naive:,} +{coalesced:,} +÷", out) and "simulated" in out


def test_the_readers_own_kernel_can_be_compared(capsys):
    (mine,) = make(f"{HEAD}{{\n    y[0] = w[0];\n}}")
    lesson.diff(mine, mine)
    assert capsys.readouterr().out == "# gemv → gemv\n"


# The exercises of notebooks 02, 03 and 04


def solution(notebook):
    name = re.search(r'lesson.solution\("([^"]+)"\)', cell(notebook, "lesson.hint"))[1]
    return (NOTEBOOKS / "solutions" / name).read_text(encoding="utf-8")


def exercise(notebook, text):
    """The check of the exercise, run on the kernel of this text."""
    (kernel,) = make(text)
    check = cell(
        notebook, {"02": "lesson.check_kernel", "03": "def launch_mine", "04": "def launch_int4"}[notebook[:2]]
    )
    body = ast.parse(check).body
    names = {"lesson": lesson, "torch": torch, "pack": pack, "SEQUENTIAL": SEQUENTIAL, kernel.__name__: kernel}
    exec(compile(ast.Module(body[:-1], []), notebook, "exec"), names)
    return eval(compile(ast.Expression(body[-1].value), notebook, "eval"), names)


def test_the_barrier_exercise_is_not_yet_until_its_solution_is_in():
    notebook, start = "02_naive_gemv.ipynb", cell("02_naive_gemv.ipynb", "%%kernel").partition("\n")[2]
    assert exercise(notebook, start) is False
    first, last = start.index("    if (warp == 0) {"), start.index("    for (int i = threadIdx.x; i < n", 500)
    assert exercise(notebook, start[:first] + solution(notebook) + "\n" + start[last:]) is True


def test_the_coalesced_exercise_is_not_yet_until_its_solution_is_in(capsys):
    notebook, start = "03_coalesced_gemv.ipynb", cell("03_coalesced_gemv.ipynb", "%%kernel").partition("\n")[2]
    assert exercise(notebook, start) is False
    assert exercise(notebook, '#include "warp.cuh"\n' + solution(notebook)) is True
    assert "4.0 a request; coalesced" in capsys.readouterr().out


def test_a_naive_kernel_does_not_solve_the_coalesced_exercise(capsys):
    head = HEAD.replace("gemv", "my_gemv")
    lane = "int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;\n"
    naive = f"{head}{{\n{lane}if (row >= rows || lane) return;\n{SUM}y[row] = sum;\n}}"
    assert exercise("03_coalesced_gemv.ipynb", naive) is False
    assert capsys.readouterr().out.startswith("○ my coalesced GEMV: right, but not coalesced yet")


def test_the_int4_exercise_is_not_yet_until_its_solution_is_in():
    notebook, start = "04_int4_fused_gemv.ipynb", cell("04_int4_fused_gemv.ipynb", "%%kernel").partition("\n")[2]
    assert exercise(notebook, start) is False
    assert exercise(notebook, '#include "warp.cuh"\n' + solution(notebook)) is True


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(static_cast<int>(word << (28 - 4 * k)) >> 28)", "static_cast<int>(word >> 4 * k & 15)"),
        ("[row * (cols / group) + 8 * i / group]", "[row * (cols / group) + 8 * i / group % 2]"),
        ("x[8 * i + k]", "x[(8 * i + k) ^ 8]"),
    ],
)
def test_wrong_values_do_not_solve_the_int4_exercise(right, wrong):
    text = solution("04_int4_fused_gemv.ipynb")
    assert right in text
    with pytest.raises(lesson.NotRight, match="off by more"):
        exercise("04_int4_fused_gemv.ipynb", '#include "warp.cuh"\n' + text.replace(right, wrong))


# Lesson 05


def checked(kernel, start):
    """The check of lesson 05 whose cell begins so, run on the kernel of this text."""
    (made,) = make(kernel)
    body = ast.parse(cell("05_paged_attention.ipynb", start)).body
    names = {"lesson": lesson, "torch": torch, made.__name__: made}
    exec(compile(ast.Module(body[:-1], []), "lesson 05", "exec"), names)
    return eval(compile(ast.Expression(body[-1].value), "lesson 05", "eval"), names)


def test_the_barrier_at_the_tail_is_found_and_its_solution_mends_it(capsys):
    notebook, check = "05_paged_attention.ipynb", "lesson.check_kernel("
    start = cell(notebook, '%%kernel\n#include "warp.cuh"\n__global__ void tail').partition("\n")[2]
    assert checked(start, check) is False
    assert "one barrier reached from different places" in capsys.readouterr().out
    first, last = (
        start.index("        if (warp == 0 && tokens < 16)"),
        start.index("        __syncthreads();\n        if"),
    )
    mended = (NOTEBOOKS / "solutions" / "05_barrier.cu").read_text(encoding="utf-8")
    assert checked(f"{start[:first]}{mended}{start[last:]}", check) is True


def test_splits_are_combined_by_the_solution_and_not_without_rescaling():
    notebook, check = "05_paged_attention.ipynb", "def splits_of"
    start = cell(notebook, "%%kernel\n__global__ void my_combine").partition("\n")[2]
    assert checked(start, check) is False
    solved = (NOTEBOOKS / "solutions" / "05_combine.cu").read_text(encoding="utf-8")
    assert checked(solved, check) is True
    with pytest.raises(lesson.NotRight):
        checked(solved.replace("expf(lse[s] - top)", "(lse[s] > -1e30f ? 1.0f : 0.0f)"), check)
