import os
import sys
from types import SimpleNamespace

import pytest

from nanoqwen import doctor, simt


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An otherwise empty PATH, to put programs on."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    def put(name, script):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return put


def test_no_compiler_is_mended_by_installing_one(path):
    check = doctor.check_compiler(*doctor.find_compiler())
    assert check.blocks and "there is no C++ compiler" in check.text and "apt install g++" in check.fix


def test_a_compiler_that_cannot_build_cpp17_is_no_compiler(path):
    path(
        "g++",
        'case "$1" in --version) echo "g++ 1";; *) echo "error: unrecognized option -std=c++17" >&2; exit 1;; esac',
    )
    check = doctor.check_compiler(*doctor.find_compiler())
    assert check.fix and "g++ does not build" in check.text and "unrecognized option" in check.text


@pytest.mark.skipif(not os.path.exists("/usr/bin/g++"), reason="needs g++")
def test_the_compiler_is_tried_not_just_found():
    assert doctor.find_compiler()[1] is None


def test_cxx_chooses_the_compiler_as_it_does_for_kernels(path, monkeypatch):
    path("g++", "exit 1")
    path("my-c++", "exit 0")
    monkeypatch.setenv("CXX", "my-c++ -O1")
    assert doctor.find_compiler() == ("my-c++ -O1", None)
    monkeypatch.setenv("CXX", "gone-c++")
    assert doctor.find_compiler() == (None, None)  # g++ is there, and does not even say its version
    path("clang++", "exit 0")
    simt._find_compiler.cache_clear()
    assert doctor.find_compiler() == ("clang++", None)
    assert simt.compiler().command[0].endswith("/clang++")


def test_a_compiler_that_cannot_be_looked_for_says_why(monkeypatch):
    monkeypatch.setattr(doctor, "_module", lambda name: (_ for _ in ()).throw(ImportError("no numpy")))
    check = doctor.check_compiler(*doctor.find_compiler())
    assert check.blocks and check.text == "cannot be looked for (no numpy)"


def test_without_a_gpu_nothing_of_cuda_is_wanted():
    checks = [doctor.check_driver(None), doctor.check_cuda(None, None, False), doctor.check_cupy(None, {})]
    assert all(check.fix is None for check in checks)
    assert doctor.cupy_extra(None) == ""


@pytest.mark.parametrize(
    ("driver", "extra"),
    [("580.95.05", "cuda13"), ("595.10", "cuda13"), ("575.57.08", "cuda12"), ("525.60.13", "cuda12"), ("470.9", "")],
)
def test_the_driver_chooses_the_cupy_extra(driver, extra):
    assert doctor.cupy_extra(driver) == extra


def test_a_gpu_without_cupy_wants_the_one_for_its_driver():
    check = doctor.check_cupy("580.95.05", {})
    assert check.blocks and check.fix == "pip install -c constraints.txt -e '.[cuda13]'"
    assert ".[cuda12]" in doctor.check_cupy("550.54", {}).fix


def test_cupy_for_another_cuda_is_replaced():
    check = doctor.check_cupy("580.95.05", {"cupy-cuda12x": "13.6.0"})
    assert check.fix == "pip uninstall -y cupy-cuda12x && pip install -c constraints.txt -e '.[cuda13]'"
    assert "cuda12" in doctor.check_cupy("550.54", {"cupy-cuda13x": "14.0"}).fix


def test_two_cupys_are_one_too_many():
    check = doctor.check_cupy("580.95.05", {"cupy-cuda12x": "13.6", "cupy-cuda13x": "14.0"})
    assert check.fix.startswith("pip uninstall -y cupy-cuda12x cupy-cuda13x && ")


def test_a_cupy_that_does_not_work_is_installed_anew():
    check = doctor.check_cupy("580.95.05", {"cupy-cuda13x": "14.0"}, "libnvrtc.so.13: cannot open")
    assert check.fix and "libnvrtc" in check.text
    assert doctor.check_cupy("580.95.05", {"cupy-cuda13x": "14.0"}).fix is None


def test_cupy_is_tried_not_just_found(monkeypatch):
    tried = []

    class Kernel:
        def __init__(self, source, name):
            assert name in source

        def compile(self):
            tried.append(1)
            raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(doctor, "_module", lambda name: SimpleNamespace(RawKernel=Kernel))
    doctor._compile_with_cupy(available=False)
    assert not tried
    with pytest.raises(RuntimeError, match="no libnvrtc"):
        doctor._compile_with_cupy(available=True)


def test_a_driver_older_than_the_toolkit_is_named():
    check = doctor.check_driver("550.54.14", "13.0")
    assert "550 is older than torch's CUDA 13.0 needs (580)" in check.text
    assert "driver 580 or newer, or a torch built for CUDA 12" in check.fix
    assert doctor.check_driver("470.82", "12.8").fix
    assert doctor.check_driver("580.95", "13.0").fix is None
    assert doctor.check_driver("580.95", "12.8").fix is None
    assert doctor.check_driver("535.1", "12.8").fix is None


def test_torch_without_cuda_beside_a_gpu_is_mended():
    assert "without CUDA" in doctor.check_cuda("580.95", None, False).text
    assert doctor.check_cuda("580.95", None, False).fix
    assert doctor.check_cuda("580.95", "13.0", False).fix
    assert doctor.check_cuda("580.95", "13.0", True).fix is None


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_the_readers_choice(hidden):
    check = doctor.check_cuda("580.95", "13.0", False, hidden)
    assert check.fix is None and "CUDA_VISIBLE_DEVICES" in check.text
    assert doctor.check_cuda("580.95", "13.0", False, "0").fix


def test_nvidia_smi_is_asked_for_the_driver(path):
    assert doctor.find_driver() == (None, None)
    path("nvidia-smi", "echo 580.95.05; echo 580.95.05")
    assert doctor.find_driver() == ("580.95.05", None)
    path("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    driver, error = doctor.find_driver()
    assert driver is None and "mismatch" in doctor.check_driver(driver, error=error).text
    path("nvidia-smi", "echo 'No devices were found'")
    assert doctor.find_driver()[0] is None


def test_missing_weights_are_advised_but_do_not_block(capsys):
    check = doctor.check_weights("nanoqwen-tiny")
    assert check.fix == "nanoqwen fetch qwen2.5-coder-0.5b"
    assert doctor.report([check]) == 0
    assert capsys.readouterr().out.startswith("[fix] weights")
    assert doctor.check_weights("qwen2.5-coder-0.5b").fix is None
    assert doctor.report([doctor.check_weights(None, "nothing")]) == 1


def test_old_versions_are_told():
    assert doctor.check_python((3, 10, 4)).fix and doctor.check_python((3, 11, 0)).fix is None
    assert doctor.check_torch("2.5.1").fix and doctor.check_torch("2.13.0+cpu").fix is None


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path / "file" / "below"))
    check = next(check for check in doctor.diagnose() if check.name == "cache")
    assert check.blocks and "NANOQWEN_CACHE" in check.fix


def test_a_broken_import_is_a_line_not_a_traceback(monkeypatch, capsys):
    whole = doctor._module

    def broken(name):
        if name == "torch":
            raise OSError("libtorch.so: cannot open shared object file\nand more")
        if name == "nanoqwen.fetch":
            raise SystemError("broken")
        return whole(name)

    monkeypatch.setattr(doctor, "_module", broken)
    assert doctor.report(doctor.diagnose()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.startswith(("[ok]", "[fix]")) for line in lines)
    assert any(line.startswith("[fix] torch") and "libtorch.so: cannot open" in line for line in lines)
    assert any(line.startswith("[fix] weights") for line in lines)


def test_this_python_is_good_enough():
    assert doctor.check_python(sys.version_info).fix is None
