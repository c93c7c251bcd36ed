"""Compiling kernels: errors in the reader's words, a cache that nothing can break."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from nanoqwen import simt

DOUBLE = 'extern "C" __global__ void twice(float* x) {\n    x[threadIdx.x] *= 2.0f;\n}\n'


def unique(source: str = DOUBLE) -> str:
    """A source that no cache has seen."""
    return source + f"// {uuid.uuid4()}\n"


def works(module) -> bool:
    x = np.arange(4, dtype=np.float32)
    module["twice"].launch(1, 4, (x,))
    return x.tolist() == [0, 2, 4, 6]


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """A compiler that answers --version and does something else when it should compile."""

    def make(instead: str) -> Path:
        script = tmp_path / f"c++-{uuid.uuid4().hex[:6]}"
        version = "echo 'g++ (fake) 12'"
        script.write_text(f'#!/bin/sh\ncase "$*" in *--version*) {version};; *) {instead};; esac\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return make


@pytest.fixture
def machine_is_there(monkeypatch):
    """The machine's own library, as the real compiler made it: these tests are about kernels."""
    path = simt._machine_path()
    monkeypatch.setattr(simt, "_machine_path", lambda: path)


def test_an_error_names_the_file_the_line_and_the_compilers_words(tmp_path):
    file = tmp_path / "wrong kernel.cu"
    file.write_text('extern "C" __global__ void k(float* y) {\n    int row = 1;\n    y[row] = undeclared;\n}\n')
    with pytest.raises(simt.CompileError, match=r"undeclared.*was not declared|undeclared identifier") as caught:
        simt.compile(file, ["k"])
    assert (caught.value.file, caught.value.line) == (str(file), 3)
    assert str(caught.value).startswith(f"{file}:3:") and "y[row] = undeclared;" in str(caught.value)


def test_an_error_in_a_notebook_cell_points_at_the_cells_line():
    with pytest.raises(simt.CompileError) as caught:
        simt.compile("\n\nint x = ;\n", ["k"], filename="<cell 4>", first_line=2)
    assert (caught.value.file, caught.value.line) == ("<cell 4>", 4)


def test_a_kernel_that_is_not_in_the_source_is_named():
    with pytest.raises(simt.CompileError, match="no kernel 'thrice' could be made"):
        simt.compile(DOUBLE, ["twice", "thrice"])


def test_names_must_be_a_sequence():
    with pytest.raises(TypeError, match=r"\['twice'\]"):
        simt.compile(DOUBLE, "twice")


def test_two_names_for_the_launch_sized_array_are_refused():
    source = "\n".join(
        f'extern "C" __global__ void k{i}() {{ extern __shared__ float s{i}[]; s{i}[0] = 1; }}' for i in range(2)
    )
    with pytest.raises(simt.CompileError, match="one name"):
        simt.compile(source, ["k0", "k1"])


def test_defines_and_edits_make_another_module():
    source = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }'
    for factor in ("2.0f", "3.0f"):
        x = np.ones(2, np.float32)
        simt.compile(source, ["twice"], defines={"FACTOR": factor})["twice"].launch(1, 2, (x,))
        assert x.tolist() == [float(factor[:-1])] * 2


def test_no_compiler_is_an_error_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(simt.CompilerNotFound, match=r"CXX=no-such-compiler, g\+\+, clang\+\+.*install"):
        simt.compile(unique(), ["twice"])


def test_a_compiler_that_is_killed_breaks_nothing(fake_compiler, machine_is_there, monkeypatch):
    source = unique()
    fake_compiler("kill -9 $$")
    with pytest.raises(simt.CompileError, match="SIGKILL"):
        simt.compile(source, ["twice"])
    monkeypatch.delenv("CXX")
    assert works(simt.compile(source, ["twice"]))


def test_a_compiler_that_vanishes_is_an_error(fake_compiler, machine_is_there):
    script = fake_compiler("true")
    simt.compiler()
    script.unlink()
    with pytest.raises(simt.CompilerNotFound, match="gone"):
        simt.compile(unique(), ["twice"])


CHILD = """
import sys, numpy as np
from nanoqwen import simt
x = np.arange(4, dtype=np.float32)
simt.compile(sys.stdin.read(), ["twice"])["twice"].launch(1, 4, (x,))
assert x.tolist() == [0, 2, 4, 6]
"""


def child(source: str, **environment: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(simt.__file__).parent.parent), **environment},
    )
    process.stdin.write(source)
    process.stdin.close()
    return process


def test_two_processes_may_compile_the_same_kernel_at_once(machine_is_there):
    source = unique()
    for process in [child(source), child(source)]:
        assert process.wait(120) == 0, process.stderr.read()


def test_a_build_that_is_killed_does_not_block_the_next(machine_is_there, tmp_path):
    source = unique()
    slow = tmp_path / "slow-c++"
    slow.write_text("#!/bin/sh\ncase \"$*\" in *--version*) echo 'slow 1';; *) touch started; sleep 60;; esac\n")
    slow.chmod(0o755)
    process = child(source, CXX=str(slow))
    kernels = simt._kernel_cache()
    deadline = time.time() + 60
    while not list(kernels.glob("build-*/started")) and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert works(simt.compile(source, ["twice"]))


def test_a_damaged_binary_is_built_again(machine_is_there):
    module = simt.compile(unique(), ["twice"])
    module.build(False).write_bytes(b"not a library")
    assert works(module)


def test_a_path_with_a_space_works(tmp_path, monkeypatch):
    headers = tmp_path / "my headers"
    headers.mkdir()
    (headers / "factor.cuh").write_text("#define FACTOR 2.0f\n")
    file = tmp_path / "a kernel.cu"
    file.write_text('#include "factor.cuh"\n' + DOUBLE.replace("2.0f", "FACTOR"))
    assert works(simt.compile(file, ["twice"], include_dirs=[headers]))


def test_a_template_may_declare_the_launch_sized_array_itself():
    source = """
    template <int step> __global__ void reversed(float* y, int n) {
        extern __shared__ float staged[];
        staged[threadIdx.x] = step * threadIdx.x;
        __syncthreads();
        if (threadIdx.x < n) y[threadIdx.x] = staged[n - 1 - threadIdx.x];
    }"""
    kernel = simt.compile(source, ["reversed<3>"])["reversed<3>"]
    y = np.full(32, np.nan, np.float32)
    kernel.launch(1, 32, (y, 32), shared_bytes=128)
    assert y.tolist() == [3.0 * (31 - i) for i in range(32)]
    assert simt.observe(kernel.launch, 1, 32, (y, 32), shared_bytes=128).clean
