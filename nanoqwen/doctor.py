"""`nanoqwen doctor`: one line for each thing that the lessons need, [ok], or [fix] with the command that mends it.

Each check is a function of plain facts; `diagnose` gathers the facts. A part that cannot even be imported is a line of
the report, never a traceback.
"""

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON = (3, 11)
TORCH = (2, 6)
DRIVERS = {13: 580, 12: 525}  # the oldest Linux driver that runs programs of a CUDA major version
PROGRAM = "#include <optional>\nint main() { std::optional<int> x{0}; return *x; }\n"  # C++17


@dataclass(frozen=True)
class Check:
    """One line of the report. `fix`: the command that mends it; None: nothing to mend.

    `blocks`: without it tests or lessons fail; otherwise they still run, with less.
    """

    name: str
    text: str
    fix: str | None = None
    blocks: bool = True

    def __str__(self) -> str:
        if self.fix is None:
            return f"[ok]  {self.name:<9} {self.text}"
        return f"[fix] {self.name:<9} {self.text} → {self.fix}"


def check_python(version: Sequence[int]) -> Check:
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < PYTHON:
        return Check("python", f"{text} is older than 3.11", "make PYTHON=python3.12 test (after installing it)")
    return Check("python", text)


def check_torch(version: str | None, error: str | None = None) -> Check:
    install = "pip install -c constraints.txt -e ."
    if version is None:
        return Check("torch", f"cannot be imported ({error})", install)
    if _numbers(version)[:2] < TORCH:
        return Check("torch", f"{version} is older than {TORCH[0]}.{TORCH[1]}", install)
    return Check("torch", version)


def check_driver(driver: str | None, toolkit: str | None = None, error: str | None = None) -> Check:
    """The NVIDIA driver against the CUDA version that torch was built for.

    Args:
        driver: its version; None: no GPU that answers.
        toolkit: the CUDA version that torch was built for; None: a CPU build, or no torch.
        error: what nvidia-smi said instead; None: there is no nvidia-smi.
    """
    if driver is None:
        found = f"no NVIDIA GPU answers (nvidia-smi: {error})" if error else "no NVIDIA GPU"
        return Check("driver", f"{found}: kernels run on the CPU, times come from recorded GPUs")
    major, newest = _numbers(driver)[0], _newest_cuda(driver)
    if newest is None:
        return Check("driver", f"{driver} is older than any CUDA 12 runs on", "install NVIDIA driver 580 or newer")
    wanted = _numbers(toolkit)[0] if toolkit else newest
    if wanted > newest:
        need = DRIVERS.get(wanted, max(DRIVERS.values()))
        return Check(
            "driver",
            f"{major} is older than torch's CUDA {toolkit} needs ({need})",
            f"install NVIDIA driver {need} or newer, or a torch built for CUDA {newest}",
        )
    return Check("driver", f"{driver}, runs CUDA {newest}")


def check_cuda(driver: str | None, toolkit: str | None, available: bool, visible: str | None = None) -> Check:
    """Whether torch can use the GPU that the driver shows.

    Args:
        driver: its version; None: no GPU.
        toolkit: the CUDA version that torch was built for; None: a CPU build, or no torch.
        available: what `torch.cuda.is_available()` says.
        visible: CUDA_VISIBLE_DEVICES, where it is set.
    """
    if driver is None:
        return Check("cuda", "not needed without an NVIDIA GPU")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return Check("cuda", f"the GPU is hidden by CUDA_VISIBLE_DEVICES={visible!r}; lessons run as without one")
    if toolkit is None:
        return Check(
            "cuda",
            "there is a GPU, but torch is a build without CUDA",
            "pip install --force-reinstall torch (from an index that has CUDA builds)",
        )
    if not available:
        return Check("cuda", f"torch (CUDA {toolkit}) finds no usable GPU", "nvidia-smi (see whether the GPU answers)")
    return Check("cuda", f"torch was built for {toolkit} and sees the GPU")


def check_cupy(driver: str | None, installed: Mapping[str, str], error: str | None = None) -> Check:
    """CuPy against the driver: with a GPU exactly one CuPy, of the CUDA version that the driver runs.

    Args:
        installed: distributions named `cupy…` and their versions.
        error: why it cannot be imported or cannot compile a kernel; None: it can, or it is not there.
    """
    if driver is None:
        return Check("cupy", "not needed without an NVIDIA GPU")
    cuda = _newest_cuda(driver)
    if cuda is None:
        return Check("cupy", "waits for a newer driver", "install NVIDIA driver 580 or newer")
    right, install = f"cupy-cuda{cuda}x", f"pip install -c constraints.txt -e '.[cuda{cuda}]'"
    if not installed:
        return Check("cupy", "is not installed, and this machine has a GPU", install)
    others = sorted(name for name in installed if name != right)
    if others:
        return Check(
            "cupy",
            f"{' and '.join(sorted(installed))} installed; driver {driver} wants {right} alone",
            f"pip uninstall -y {' '.join(sorted(installed))} && {install}",
        )
    if error is not None:
        return Check("cupy", f"{right} does not work ({error})", f"pip uninstall -y {right} && {install}")
    return Check("cupy", f"{right} {installed[right]}")


def check_compiler(command: str | None, error: str | None = None) -> Check:
    """A host compiler that builds C++17: it makes the CPU side of every kernel.

    Args:
        command: the compiler found; None: none.
        error: why it did not build a small program, or could not be looked for; None: it did.
    """
    install = "sudo apt install g++ (macOS: xcode-select --install; conda: conda install cxx-compiler)"
    if command is None:
        return Check("compiler", f"cannot be looked for ({error})" if error else "there is no C++ compiler", install)
    if error is not None:
        return Check("compiler", f"{command} does not build C++17 ({error})", install)
    return Check("compiler", f"{command} builds C++17")


def check_weights(model: str | None, error: str | None = None) -> Check:
    """Whether the real model is here; the lessons also run on the tiny one."""
    fetch = "nanoqwen fetch qwen2.5-coder-0.5b"
    if model is None:
        return Check("weights", f"no model at all ({error})", fetch)
    if model == "nanoqwen-tiny":
        return Check("weights", "only nanoqwen-tiny is here; lessons run on it", fetch, blocks=False)
    return Check("weights", model)


def check_cache(folder: str | None, error: str | None = None) -> Check:
    """The folder for compiled kernels and weights."""
    if folder is None:
        return Check("cache", f"cannot be written ({error})", "export NANOQWEN_CACHE=/a/folder/that/can/be/written")
    return Check("cache", folder)


def cupy_extra(driver: str | None) -> str:
    """The extra to install for this driver: `cuda13`, `cuda12`, or nothing without a GPU that can be used."""
    cuda = _newest_cuda(driver) if driver else None
    return f"cuda{cuda}" if cuda else ""


def find_driver() -> tuple[str | None, str | None]:
    """The NVIDIA driver's version as `nvidia-smi` gives it, or None and what it said instead (None: no nvidia-smi)."""
    if shutil.which("nvidia-smi") is None:
        return None, None
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    said = _first_line(done.stdout)
    if done.returncode == 0 and re.fullmatch(r"\d+(\.\d+)*", said):
        return said, None
    return None, said or _first_line(done.stderr) or f"exit status {done.returncode}"


def find_compiler() -> tuple[str | None, str | None]:
    """The C++ compiler that kernels are compiled with and, where it does not build a C++17 program, why."""
    simt, error = _try(lambda: _module("nanoqwen.simt"))
    if simt is None:
        return None, error
    try:
        words = simt.compiler().command
    except simt.CompilerNotFound:
        return None, None
    command = " ".join((Path(words[0]).name, *words[1:]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*words, "-std=c++17", "-x", "c++", "-", "-o", os.path.join(folder, "program")],
                input=PROGRAM,
                capture_output=True,
                text=True,
                timeout=120,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return command, str(error)
    return command, None if done.returncode == 0 else _first_line(done.stderr) or f"exit status {done.returncode}"


def diagnose() -> list[Check]:
    """Gather the facts of this machine and check them."""
    driver, driver_error = find_driver()
    torch, torch_error = _try(lambda: _module("torch"))
    toolkit = torch.version.cuda if torch else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an old driver; the report says it better
        available = bool(torch) and torch.cuda.is_available()
    installed = {
        name: dist.version
        for dist in importlib.metadata.distributions()
        if (name := (dist.metadata["Name"] or "").lower()).startswith("cupy")
    }
    cupy_error = _try(lambda: _compile_with_cupy(available))[1] if driver and installed else None
    model, model_error = _try(lambda: _module("nanoqwen.fetch").find_model(None).name)
    cache, cache_error = _try(lambda: _home(_module("nanoqwen.paths").cache_dir()))
    return [
        check_python(sys.version_info),
        check_torch(torch.__version__ if torch else None, torch_error),
        check_driver(driver, toolkit, driver_error),
        check_cuda(driver, toolkit, available, os.environ.get("CUDA_VISIBLE_DEVICES")),
        check_cupy(driver, installed, cupy_error),
        check_compiler(*find_compiler()),
        check_weights(model, model_error),
        check_cache(cache, cache_error),
    ]


def report(checks: Sequence[Check]) -> int:
    """Print the checks; return the exit status: 1 if one that blocks needs mending, else 0."""
    for check in checks:
        print(check)
    return int(any(check.fix is not None and check.blocks for check in checks))


def _compile_with_cupy(available: bool) -> None:
    """Import CuPy and, where the GPU can be used, compile a kernel: without NVRTC only that fails."""
    cupy = _module("cupy")
    if available:
        cupy.RawKernel('extern "C" __global__ void doctor() {}', "doctor").compile()


def _module(name: str):
    return importlib.import_module(name)


def _try(fact: Callable[[], object]) -> tuple[object | None, str | None]:
    """A fact, or why it is not to be had: a broken installation can raise anything."""
    try:
        return fact(), None
    except Exception as error:
        return None, _first_line(str(error)) or type(error).__name__


def _home(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _newest_cuda(driver: str) -> int | None:
    major = _numbers(driver)[0]
    return next((cuda for cuda, least in DRIVERS.items() if major >= least), None)


if __name__ == "__main__":
    if sys.argv[1:] == ["--cupy-extra"]:  # the Makefile asks before anything is installed
        print(cupy_extra(find_driver()[0]))
    else:
        sys.exit(report(diagnose()))
