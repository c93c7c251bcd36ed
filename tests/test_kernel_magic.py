"""`%%kernel`: what a reader writes in a cell is parsed, compiled and called; what is wrong is said in a line."""

import pytest
import torch

from nanoqwen import kernel_magic, lesson, simt
from nanoqwen.kernel_magic import KernelError, make, signatures

SCALE = """
#include "warp.cuh"
__global__ void scale(const float* x, float* y, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;  // a thread an element
    if (i < n) y[i] = by * x[i];
}
"""
TEMPLATE = """
#include "types.cuh"
template <typename T, int STEP>
__global__ void __launch_bounds__(128) shift(const T* __restrict__ x, T* y, unsigned int n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = from_float<T>(to_float(x[i]) + STEP);
}
"""


@pytest.fixture(scope="module")
def scale():
    return make(SCALE)[0]


def shown(caught):
    """What a notebook shows of an error."""
    return caught.value._render_traceback_()


def letters(text):
    return [p.letter for p in signatures(text)[0].parameters]


def test_names_and_parameters_are_read_from_the_source():
    (found,) = signatures(SCALE)
    assert (found.name, [p.name for p in found.parameters]) == ("scale", ["x", "y", "by", "n"])
    assert letters(SCALE) == ["p", "p", "f", "i"]
    assert [p.writable for p in found.parameters][:2] == [False, True]
    (found,) = signatures(TEMPLATE)
    assert found.template == ("T", "STEP") and letters(TEMPLATE) == ["p", "p", "u"]


def test_every_spelling_of_a_parameter_is_read():
    head = "__global__ void f({}) {{ }}"
    assert letters(head.format("long long n, int64_t m, unsigned u, uint32_t v, const int c")) == list("lluui")
    assert letters(head.format("float const *a, const uint4* __restrict__ b, void*c")) == list("ppp")
    assert signatures('extern "C" __global__ void f(void) { }')[0].parameters == ()
    assert signatures("/* __global__ void g(int n) { } */ __global__ void f(/* no */ int n) { }")[0].name == "f"


@pytest.mark.parametrize(
    ("parameter", "complaint"),
    [
        ("double by", "parameter by is 'double'.*use float"),
        ("size_t n", "parameter n is 'size_t'.*use long long"),
        ("long n", "parameter n is 'long'.*use long long"),
        ("float4 v", "parameter v is 'float4', which cannot be passed"),
        ("const float& v", "parameter v is 'const float&'"),
        ("float** rows", r"parameter rows is 'float \* \*'"),
        ("float v[4]", r"parameter v is 'float'.*write 'float\* v'"),
        ("int", "the parameter 'int' has no name or no type"),
    ],
)
def test_a_parameter_that_cannot_be_passed_is_named(parameter, complaint):
    with pytest.raises(KernelError, match=complaint):
        signatures(f"__global__ void f(const float* x, {parameter}) {{ }}")


def test_a_kernel_runs_is_observed_and_can_be_timed(scale):
    x, y = torch.randn(300), torch.full((300,), torch.nan)
    scale[3, 128](x, y, 2.0, 300)
    assert torch.equal(y, 2 * x)
    report = simt.observe(scale[3, 128], x, y, 2.0, 300)
    assert report.clean and report.totals.global_load_requests == 10
    assert next(line for line in report.lines if line.how == "load").line == 6  # of the cell, whose first is %%kernel


def test_outputs_left_unwritten_are_reported(scale):
    x, y = torch.randn(300), torch.zeros(300)
    report = simt.observe(scale.launch, 2, 128, (x, y, 2.0, 300), outputs=("y",))
    assert {f.kind for f in report.findings} == {"initcheck"}


def test_a_template_is_compiled_for_the_instance_that_is_named():
    (shift,) = make(TEMPLATE, "shift<__nv_bfloat16, 3>")
    x = torch.randn(100).bfloat16()
    y = torch.empty_like(x)
    shift[1, 128](x, y, 100)
    torch.testing.assert_close(y, x + 3)
    with pytest.raises(TypeError, match=r"x points to __nv_bfloat16.*bfloat16; it is float32"):
        shift[1, 128](x.float(), y, 100)
    with pytest.raises(KernelError, match=r"shift is a template.*%%kernel shift<float"):
        make(TEMPLATE)
    with pytest.raises(KernelError, match="no kernel 'shft'; it has shift"):
        make(TEMPLATE, "shft<float, 1>")


@pytest.mark.parametrize(
    ("args", "error", "complaint"),
    [
        (lambda x: (x, x, 2.0), TypeError, r"scale takes 4 arguments \(x, y, by, n\), got 3"),
        (lambda x: (3, x, 2.0, 4), TypeError, "x must be a tensor, got int"),
        (lambda x: (x.half(), x, 2.0, 4), TypeError, "x points to float.*it is float16"),
        (lambda x: (x.view(2, 2).T, x, 2.0, 4), ValueError, "x is not contiguous"),
        (lambda x: (x, x, "two", 4), TypeError, "by must be a number"),
        (lambda x: (x, x, 2.0, 4.0), TypeError, "n must be an int, got float"),
        (lambda x: (x, x, 2.0, 2**31), ValueError, "n is 2147483648"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_runs(scale, args, error, complaint):
    with pytest.raises(error, match=complaint) as caught:
        scale[1, 32](*args(torch.zeros(4)))
    assert shown(caught) == [f"✗ {caught.value}"]


def test_a_launch_needs_its_shape(scale):
    args = torch.zeros(4), torch.zeros(4), 1.0, 4
    for wrong, error, complaint in (
        (lambda: scale(1, 2), TypeError, r"scale\[grid, block\]"),
        (lambda: scale[1], TypeError, "takes grid and block"),
        (lambda: scale[0, 32](*args), ValueError, r"grid.x is 0"),
        (lambda: scale[1, 2.5](*args), TypeError, r"block must be an integer"),
    ):
        with pytest.raises(error, match=complaint) as caught:
            wrong()
        assert shown(caught) == [f"✗ {caught.value}"]


def test_a_syntax_error_points_at_the_line_of_the_cell():
    with pytest.raises(KernelError) as caught:
        make(SCALE.replace("by * x[i]", "bye * x[i]"))
    text = str(caught.value)
    assert text.startswith("scale:6: ") and "bye" in text and "(line 6 of this cell)" in text
    assert "6 |     if (i < n)" in text
    assert caught.value._render_traceback_() == [f"✗ {text}"]


def test_a_cell_without_a_kernel_says_so():
    with pytest.raises(KernelError, match=r"no kernel in this cell.*__global__ void"):
        make("int f() { return 1; }")


def test_a_semicolon_may_be_missing_at_the_end_of_the_line_before():
    for text in (SCALE.replace("by * x[i];", "by * x[i]"), SCALE.replace("threadIdx.x;", "threadIdx.x")):
        with pytest.raises(KernelError, match=r"expected .*;.*\(line \d of this cell, or the end of the line before\)"):
            make(text)
    with pytest.raises(KernelError, match=r"\(line 6 of this cell\)"):  # nothing is missing
        make(SCALE.replace("by * x[i]", "bye * x[i]"))


@pytest.mark.parametrize("gone", ["y[i] = by * x[i];\n}", "{ y[i] = by * x[i]; }\n}"])
def test_a_brace_that_is_never_closed_is_named_with_its_kernel(gone):
    text = SCALE.replace("y[i] = by * x[i];\n}", gone)
    first, second = text.replace("scale", "first"), text.replace("scale", "second")
    assert [k.__name__ for k in make(first + second)] == ["first", "second"]
    for broken, name in (
        (first[: first.rindex("}")] + second, "first"),
        (first + second[: second.rindex("}")], "second"),
    ):
        with pytest.raises(KernelError) as caught:
            make(broken)
        assert str(caught.value) == f"{name}: a '{{' of this kernel is never closed"


def test_a_brace_outside_the_kernels_is_the_cells():
    with pytest.raises(KernelError, match=r"a '\{' of this cell is never closed"):
        make(SCALE + "__device__ int more() { return 1;")


def test_a_brace_in_quotes_or_in_a_branch_not_taken_is_no_mistake():
    quoted = "__global__ void f(int* y) { const char* s = \"{\"; y[0] = s[0] == '{'; }"
    branches = "__global__ void f(int* y) {\n#if 1\nif (y) {\n#else\nif (!y) {\n#endif\ny[0] = 1; } }"
    for text in (quoted, branches):
        y = torch.zeros(1, dtype=torch.int32)
        make(text)[0][1, 1](y)
        assert y.item() == 1


@pytest.mark.parametrize("wrong", [("int n)", "int n"), ("__global__ void", "__global__ int")])
def test_a_kernel_whose_head_is_wrong_is_told_so(wrong):
    with pytest.raises(KernelError, match=r"a `__global__` is here.*is a '\)' missing, or is it not void\?"):
        make(SCALE.replace(*wrong))


@pytest.mark.parametrize("header", ["iostream", "cmath", "cstdint", "type_traits", "stdio.h"])
def test_a_header_of_the_standard_library_is_refused_on_every_machine(header):
    complaint = rf"line 2 of this cell includes {header}: a kernel includes no header of the standard library.*warp.cuh"
    with pytest.raises(KernelError, match=complaint):
        make(f"#include <{header}>\n{SCALE}")


def test_headers_of_cuda_and_of_the_repository_are_allowed():
    make(f'#include <cuda_fp16.h>\n#include "pack.cuh"\n// #include <iostream>\n{SCALE}')


def test_observing_a_call_that_is_already_made_is_told(scale):
    x, y = torch.zeros(4), torch.zeros(4)
    with pytest.raises(TypeError, match=r"takes the function and its arguments apart: simt.observe\(k\[") as caught:
        simt.observe(scale[1, 32](x, y, 2.0, 4))
    assert shown(caught) == [f"✗ {caught.value}"]


def test_a_stub_is_unsolved_until_it_has_a_body():
    (stub,) = make("__global__ void f(float* y, int n) {\n    // TODO: write it\n}")
    with pytest.raises(NotImplementedError, match="f: its body is still to be written"):
        stub[1, 32](torch.zeros(3), 3)
    (empty,) = make("__global__ void f(float* y, int n) { }")
    empty[1, 32](torch.zeros(3), 3)


@pytest.fixture
def shell():
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    kernel_magic.register(shell)
    return shell


@pytest.mark.parametrize(
    "spoil",
    [("by * x[i];", "by * x[i]"), ("int n)", "int n"), ("void scale", "int scale"), ("float by", "double by")],
)
def test_a_cell_that_does_not_compile_leaves_no_earlier_kernel_behind(shell, capsys, spoil):
    shell.run_cell_magic("kernel", "", SCALE)
    with pytest.raises(KernelError):
        shell.run_cell_magic("kernel", "", SCALE.replace(*spoil))
    stale, x = shell.user_ns["scale"], torch.ones(8)
    capsys.readouterr()
    complaint = "^scale: its cell did not compile; mend that cell and run it again$"
    for use in (
        lambda: stale[1, 32],
        lambda: stale(1, 32),
        lambda: stale.launch(1, 32, (x, x, 1.0, 8)),
        lambda: simt.observe(stale[1, 32], x, x, 1.0, 8),
        lambda: simt.observe(stale, x),
        lambda: lesson.diff(stale, stale),
    ):
        with pytest.raises(KernelError, match=complaint) as caught:
            use()
        assert shown(caught) == [f"✗ {caught.value}"]
    assert "did not compile" in repr(stale)
    for run in (lambda w, x, y: stale[1, 32](x, y, 1.0, 8), stale):
        assert lesson.check_kernel("mine", run) is False
        assert lesson.check("mine", lambda: stale[1, 32](x, x, 1.0, 8), x) is False
        assert capsys.readouterr().out == f"○ mine: not yet: {complaint[1:-1]}\n" * 2
    shell.run_cell_magic("kernel", "", SCALE)
    shell.user_ns["scale"][1, 32](x, x, 3.0, 8)
    assert x.tolist() == [3.0] * 8


def test_bounds_hide_no_kernels_name():
    assert kernel_magic.names(TEMPLATE + SCALE + "// __global__ void no()") == ["shift", "scale"]


def test_the_magic_puts_kernels_into_the_notebook_and_a_second_run_replaces_them(capsys):
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = interactive()
    kernel_magic.register(shell)
    kernel_magic.register(shell)
    shell.run_cell_magic("kernel", "", SCALE)
    assert "call it as scale[grid, block](x, y, by, n)" in capsys.readouterr().out
    x, y = torch.ones(8), torch.zeros(8)
    shell.user_ns["scale"][1, 32](x, y, 3.0, 8)
    assert torch.equal(y, 3 * x)
    shell.run_cell_magic("kernel", "", SCALE.replace("by * x[i]", "by + x[i]"))
    shell.user_ns["scale"][1, 32](x, y, 3.0, 8)
    assert torch.equal(y, 3 + x)
