"""The SIMT machine: run a CUDA kernel file on the CPU, unchanged, and count what the hardware would count.

    module = simt.compile(CSRC / "gemv.cu", ["gemv_naive<float>"])
    module["gemv_naive<float>"].launch(grid=2, block=128, args=(w, x, y, rows, cols))
    report = simt.observe(kernels.gemv_naive, w, x)      # any function that launches kernels
    print(report)

The kernel is compiled by this computer's own C++ compiler after the headers of `csrc/simt`, which teach it
CUDA's words. There are two builds of one source: the *fast* one spreads blocks over the cores, the *observed*
one reports every load and store to the observers (`csrc/simt/observer.cpp`).
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanoqwen.paths import CSRC, cache_dir
from nanoqwen.simt_report import Finding, Line, Report, Totals

__all__ = [
    "CompileError",
    "CompilerNotFound",
    "Finding",
    "Kernel",
    "LaunchError",
    "Line",
    "Module",
    "Report",
    "Told",
    "Totals",
    "compile",
    "compiler",
    "launch_shape",
    "observe",
    "observing",
]

SHARED_LIMIT = 227 * 1024  # bytes of shared memory that one block may have on an H100 or H200
THREADS_LIMIT = 1024
GRID_LIMIT = (2**31 - 1, 65535, 65535)
BLOCK_LIMIT = (1024, 1024, 64)


class Told:
    """Mixed into an error that is the reader's to mend: a notebook shows its message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"✗ {self}"]


class NothingToObserve(Told, TypeError):
    """`observe` was given something that is no function; mostly the answer of a call that has already been made."""


class CompileError(RuntimeError):
    """The compiler refused a kernel. `file` and `line` say where, `output` is all that the compiler said."""

    def __init__(self, message: str, file: str | None = None, line: int | None = None, output: str = ""):
        super().__init__(message)
        self.file, self.line, self.output = file, line, output


class CompilerNotFound(CompileError):
    """There is no C++ compiler on this machine."""


class LaunchError(RuntimeError):
    """A kernel could not go on: a deadlock, a bad mask, a crash. `findings` says what and where."""

    def __init__(self, message: str, findings: Sequence[Finding] = ()):
        super().__init__(message)
        self.findings = list(findings)


# ---- the compiler ----


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version.lower()


def compiler() -> Compiler:
    """The C++ compiler to use: `CXX` if set, else g++, else clang++.

    Raises:
        CompilerNotFound: there is none; the message says which were looked for and what to install.
    """
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache
def _find_compiler(cxx: str, path: str) -> Compiler:
    tried = []
    for candidate in filter(None, (cxx, "g++", "clang++")):
        words = shlex.split(candidate)
        found = shutil.which(words[0], path=path)
        tried.append(f"CXX={candidate}" if candidate == cxx else candidate)
        if found:
            try:
                said = subprocess.run([found, *words[1:], "--version"], capture_output=True, text=True, timeout=60)
            except OSError:
                continue
            if said.returncode == 0:
                return Compiler((found, *words[1:]), said.stdout.strip())
    how = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++ (or conda install gxx)"
    raise CompilerNotFound(
        f"no C++ compiler: looked for {', '.join(tried)}. Kernels run on the CPU through one; install it: {how}"
    )


@functools.lru_cache
def _cpu() -> str:
    # Binaries use this CPU's instructions, and a cache may be shared by several machines.
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


def _native() -> list[str]:
    return ["-march=native"] if platform.machine().lower() in ("x86_64", "amd64") else ["-mcpu=native"]


COMMON_FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-w",
    "-g1",  # lines only
    "-gdwarf-4",  # some assemblers mix up the file names of version 5
    # A fused multiply-add rounds once, as on the GPU, where the kernel writes fmaf, and nowhere else.
    "-ffp-contract=off",
    "-fno-math-errno",
    # Kernels look at memory through several types, as nvcc lets them.
    "-fno-strict-aliasing",
    "-fno-exceptions",
    # A call that ends a function must come back to it, so that a report can name its line.
    "-fno-optimize-sibling-calls",
]
# An observed build must make the loads and stores that are written, each at one place in the machine code: no
# vectoriser, no copying of a block into both arms of a branch, no merging of equal calls.
OBSERVED_FLAGS = ["-fsanitize=thread", "-fno-unroll-loops"]
OBSERVED_GCC = [
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
    "-fno-thread-jumps",
    "-fno-crossjumping",
    "-fno-tree-tail-merge",
    "-fno-tree-loop-if-convert",
    "-fno-tree-loop-distribute-patterns",
    "-fno-unswitch-loops",
    "-fno-peel-loops",
    "-fno-split-loops",
    "-fno-ipa-icf",
    "-fno-ipa-sra",  # it has the caller load what a pointer points to, where nobody observes
    "-fno-store-merging",
    "-fno-hoist-adjacent-loads",
    "-fno-code-hoisting",
    "-fno-tree-pre",
    "--param=tsan-distinguish-volatile=1",
    "--param=tsan-instrument-func-entry-exit=0",
]
OBSERVED_CLANG = [
    "-fno-vectorize",
    "-fno-slp-vectorize",
    *(
        word
        for flag in (
            "-tsan-distinguish-volatile=1",
            "-tsan-instrument-func-entry-exit=0",
            "-tsan-instrument-read-before-write=1",
        )
        for word in ("-mllvm", flag)
    ),
]


def _flags(cxx: Compiler, observed: bool) -> list[str]:
    flags = [*COMMON_FLAGS, "-O2", *_native()]
    if not cxx.is_clang:
        # Shared arrays have no constructors, and a template would call one of theirs that is not there.
        flags += ["-fno-extern-tls-init"]
        flags += ["-fno-gnu-unique", "-fno-crossjumping", "-fno-tree-tail-merge"]
    if sys.platform == "linux":
        # A large local array touches each page of its stack on the way down: it cannot jump over the guard.
        flags += ["-fstack-clash-protection"]
    if observed:
        flags += [*OBSERVED_FLAGS, *(OBSERVED_CLANG if cxx.is_clang else OBSERVED_GCC)]
    return flags


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def _hash_files(folders: Sequence[Path]) -> str:
    files = sorted(f for folder in folders for f in folder.rglob("*") if f.is_file())
    return _hash(*(part for f in files for part in (f.name, f.read_bytes())))


def _kernel_cache() -> Path:
    folder = cache_dir() / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


def _run_compiler(cxx: Compiler, arguments: Sequence[str], cwd: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run([*cxx.command, *arguments], capture_output=True, text=True, cwd=cwd, errors="replace")
    except FileNotFoundError:
        _find_compiler.cache_clear()
        raise CompilerNotFound(
            f"the compiler {cxx.command[0]} was there a moment ago and is gone; install it again or set CXX"
        ) from None


def _build(name: str, key: str, sources: Mapping[str, str], steps: Sequence[Sequence[str]]) -> Path:
    """Builds `kernels/<key>/<name>` unless it is there; safe for several processes at once.

    The work happens in a folder of its own, and the finished library is moved into place in one step. A build
    that is killed leaves that folder behind and nothing else, and the next one does not look at it.
    """
    target = _kernel_cache() / key / name
    if target.exists():
        return target
    cxx = compiler()
    _sweep(target.parent.parent)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent.parent))
    try:
        for file, text in sources.items():
            (work / file).write_text(text)
        for step in steps:
            done = _run_compiler(cxx, step, str(work))
            if done.returncode < 0:
                raise CompileError(
                    f"the compiler {cxx.command[0]} was killed ({signal.Signals(-done.returncode).name}); "
                    "was there enough memory? Nothing was left in the cache, so it can simply be tried again",
                    output=done.stderr,
                )
            if done.returncode:
                raise _compile_error(cxx, done.stderr or done.stdout)
        target.parent.mkdir(exist_ok=True)
        for file in sources:  # kept beside the library, for the curious
            os.replace(work / file, target.parent / file)
        os.replace(work / name, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _sweep(folder: Path) -> None:
    """Removes what killed builds left a day ago or earlier."""
    for old in folder.glob("build-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 86400:
                shutil.rmtree(old, ignore_errors=True)


def _compile_error(cxx: Compiler, output: str) -> CompileError:
    found = re.search(r"^(?P<file>[^\n:]+):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<words>.*)$", output, re.M)
    if not found:
        return CompileError(f"{cxx.command[0]} failed:\n{output.strip()}", output=output)
    file, line = found["file"], int(found["line"])
    return CompileError(f"{file}:{line}: {found['words']}", file, line, output)


# ---- the machine itself ----


class _Arg(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_uint), ("element_size", ctypes.c_uint)]


class _Entry(ctypes.Structure):
    _fields_ = [("call", ctypes.c_void_p), ("args", ctypes.POINTER(_Arg)), ("count", ctypes.c_uint)]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("device_offset", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    ]


class _SharedVariable(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("guard", ctypes.c_uint64)]


class _LaunchRequest(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("touch_shared", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
        ("arg_buffer", ctypes.POINTER(ctypes.c_int)),
        ("arg_offset", ctypes.POINTER(ctypes.c_uint64)),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("cooperative", ctypes.c_uint32),
        ("observed", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("pictures", ctypes.c_uint32),
        ("time_limit", ctypes.c_double),
        ("spin_limit", ctypes.c_uint64),
        ("shared", ctypes.POINTER(_SharedVariable)),
        ("shared_count", ctypes.c_uint64),
    ]


_ONLY_READ, _OUTPUT, _IN_PLACE = 1, 2, 4
_lock = threading.RLock()
_loaded: dict[str, ctypes.CDLL] = {}


def _machine_path() -> Path:
    """The machine's own library, compiled once. It is never instrumented: only kernels are observed."""
    folder = CSRC / "simt"
    cxx = compiler()
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-pthread", *_native()]
    key = _hash(_hash_files([folder]), " ".join(flags), cxx.command[0], cxx.version, _cpu(), sys.platform)
    name = f"libsimt-{key}" + (".dylib" if sys.platform == "darwin" else ".so")

    here = sorted(str(file) for file in folder.glob("*.cpp"))
    naming = f"-Wl,-install_name,{name}" if sys.platform == "darwin" else f"-Wl,-soname,{name}"
    return _build(name, f"machine-{key}", {}, [[*flags, "-I", str(CSRC), *here, naming, "-o", name]])


def _load(path: Path) -> ctypes.CDLL:
    with _lock:
        if str(path) not in _loaded:
            _loaded[str(path)] = ctypes.CDLL(str(path))
        return _loaded[str(path)]


@functools.cache
def _machine(path: Path) -> ctypes.CDLL:
    library = _load(path)
    library.simt_launch.restype = ctypes.c_void_p
    library.simt_launch.argtypes = [ctypes.POINTER(_LaunchRequest)]
    library.simt_free.argtypes = [ctypes.c_void_p]
    library.simt_load_address.restype = ctypes.c_void_p
    library.simt_load_address.argtypes = [ctypes.c_void_p]
    return library


# ---- compiling a kernel file ----

_BUILT_IN = re.compile(
    r"(unsigned |signed )?(char|short|int|long|float|double|unsigned)|"
    r"(u?(char|short|int|longlong)|float|double)[1234]|u?int(8|16|32|64)_t|(__)?half2?|(__)?nv_bfloat162?"
)


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)


def _dynamic_shared(text: str, include_dirs: Sequence[Path], seen: set[Path]) -> dict[str, str]:
    """The arrays declared `extern __shared__ T name[]` in a source and the files it includes: name -> T."""
    text = _without_comments(text)
    found = {}
    aligned = r"(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?"
    pattern = rf"extern\s+{aligned}__shared__\s+([^;]*?)(\w+)\s*\[\s*\]\s*;"
    for spelled, name in re.findall(pattern, text):
        kind = re.sub(r"(__align__|alignas)\s*\([^)]*\)", "", spelled)
        found[name] = " ".join(kind.split())
    for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M):
        for folder in include_dirs:
            file = folder / included
            if file.is_file() and file not in seen:
                seen.add(file)
                found |= _dynamic_shared(file.read_text(), include_dirs, seen)
    return found


def _translation_unit(text: str, token: str, first_line: int, names: Sequence[str], shared: dict[str, str]) -> str:
    if len(shared) > 1:
        raise CompileError(
            f"the source declares several arrays sized at the launch ({', '.join(shared)}). On the GPU they "
            "are one and the same memory: give them one name"
        )
    before = after = ""
    dynamic = "nullptr"
    for name, kind in shared.items():
        # extern "C": a declaration inside an extern "C" kernel must find the linkage that it gives itself.
        size = f"{SHARED_LIMIT} / sizeof({kind})"
        define = f'extern "C" {{ __attribute__((aligned(1024))) thread_local {kind} {name}[{size}]; }}'
        dynamic = f"(void*)::{name}"
        # Declared first where its type is known by then, so that the compiler needs no detour to find it.
        if _BUILT_IN.fullmatch(kind):
            before = define
        else:
            after = define
    entries = "\n".join(f"SIMT_ENTRY(simt_entry_{i}, {name})" for i, name in enumerate(names))
    return f"""\
#define NANOQWEN_SIMT 1
#include "simt/cuda.h"
{before}
#line {first_line} "{token}"
{text}
#line 1 "the names asked for"
{entries}
{after}
static thread_local char simt_anchor;
extern "C" __attribute__((no_sanitize("thread"))) void* simt_touch_shared(void** dynamic) {{
    *dynamic = {dynamic};
    return &simt_anchor;
}}
"""


def compile(
    source: Path | str,
    names: Sequence[str],
    *,
    observed: bool = False,
    include_dirs: Sequence[Path] = (CSRC / "include",),
    defines: Mapping[str, str] | None = None,
    filename: str | None = None,
    first_line: int = 1,
) -> Module:
    """Compiles a kernel file for the SIMT machine, or finds it in the cache.

    Args:
        source: a `.cu` file (a `Path`), or CUDA C++ text (a `str`).
        names: the kernels wanted: `extern "C"` names or template instances, such as `gemv_naive<float>`.
        observed: compile the observed build at once; otherwise `observe` does it when it is first needed.
        include_dirs: where `#include "..."` looks.
        defines: preprocessor macros, name to value.
        filename, first_line: what to call the source in messages, and the number of its first line (a cell).

    Raises:
        CompileError: with `file`, `line` and the compiler's words.
        CompilerNotFound: there is no compiler.
    """
    if isinstance(names, str):
        raise TypeError(f"names must be a sequence of kernel names, not the string {names!r}: write [{names!r}]")
    if isinstance(source, Path):
        text, shown = source.read_text(), filename or str(source)
    else:
        text, shown = source, filename or "kernel.cu"
    module = Module(text, shown, first_line, tuple(names), tuple(Path(d) for d in include_dirs), dict(defines or {}))
    module.build(observed)
    return module


class Module:
    """Compiled kernels of one source. `module["gemv_naive<float>"].launch(...)` runs one."""

    def __init__(
        self,
        text: str,
        filename: str,
        first_line: int,
        names: tuple[str, ...],
        include_dirs: tuple[Path, ...],
        defines: dict[str, str],
    ):
        self.text, self.filename, self.first_line = text, filename, first_line
        self.names, self.include_dirs, self.defines = names, include_dirs, defines
        # The binary knows the source by a name without folders: moving the repository does not recompile it.
        self.token = "/kernel/" + (re.sub(r"[^\w.]+", "-", Path(filename).name) or "kernel.cu")
        self._builds: dict[bool, Path] = {}
        self._places: dict[tuple[bool, int], tuple[str, int] | None] = {}
        self._shared: list[tuple[str, int, int]] | None = None
        self._machines: dict[bool, Path] = {}
        self._parameters: dict[str, list[str]] = {}

    def __getitem__(self, name: str) -> Kernel:
        if name not in self.names:
            raise KeyError(f"no kernel {name!r} in this module; it has {', '.join(self.names)}")
        return Kernel(self, name)

    def build(self, observed: bool) -> Path:
        """The library of the fast or the observed build, compiled if need be."""
        if observed not in self._builds:
            self._builds[observed] = self._compile(observed)
        return self._builds[observed]

    def _compile(self, observed: bool) -> Path:
        cxx = compiler()
        machine = self._machines[observed] = _machine_path()
        flags = _flags(cxx, observed)
        shared = _dynamic_shared(self.text, self.include_dirs, set())
        unit = _translation_unit(self.text, self.token, self.first_line, self.names, shared)
        macros = [f"-D{k}={v}" for k, v in self.defines.items()]
        key = _hash(
            unit,
            _hash_files([CSRC / "include", CSRC / "simt", *self.include_dirs]),
            " ".join([*flags, *macros, *map(str, self.include_dirs)]),
            machine.name,
            cxx.command[0],
            cxx.version,
            _cpu(),
        )

        folders = (CSRC, CSRC / "simt" / "toolkit", *self.include_dirs)
        includes = [word for d in folders for word in ("-I", str(d))]
        # Linked apart from the compiling and without -fsanitize: the call-outs must find our observer.
        link = ["-shared", "kernel.o", str(machine), "-o", "kernel.so"]
        if sys.platform == "darwin":
            link += ["-undefined", "dynamic_lookup"]
        try:
            steps = [[*flags, *macros, *includes, "-c", "kernel.cpp", "-o", "kernel.o"], link]
            return _build("kernel.so", key, {"kernel.cpp": unit}, steps)
        except CompileError as error:
            raise self._in_readers_words(error) from None

    def _in_readers_words(self, error: CompileError) -> CompileError:
        def plain(text: str) -> str:
            return text.replace(self.token, self.filename)

        file = plain(error.file) if error.file else None
        message, line = plain(str(error)), error.line
        if file == "the names asked for":
            name = self.names[min((line or 1), len(self.names)) - 1]
            message = f"{self.filename}: no kernel {name!r} could be made from this source: {message}"
        elif file == self.filename and line:
            lines = self.text.splitlines()
            if 0 <= line - self.first_line < len(lines):
                message += f"\n    {line} | {lines[line - self.first_line]}"
        return type(error)(message, file, line, plain(error.output))

    def machine(self, observed: bool) -> ctypes.CDLL:
        """The machine that a build was linked with (another compiler makes another one)."""
        self.build(observed)
        return _machine(self._machines[observed])

    def _library(self, observed: bool) -> ctypes.CDLL:
        path = self.build(observed)
        self.machine(observed)  # first: the kernel's library needs it
        try:
            return _load(path)
        except OSError:  # a file that something has damaged since: build it again, once
            path.unlink(missing_ok=True)
            del self._builds[observed]
            return _load(self.build(observed))

    def shared_variables(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of the observed build's `__shared__` variables, from its symbol table."""
        if self._shared is None:
            self._shared = _thread_local_symbols(self.build(True))
        return self._shared

    def place(self, pc: int, observed: bool) -> tuple[str, int] | None:
        """File and line of an address in the machine code; of a helper, the kernel's line that called it."""
        return self.places([pc], observed).get(pc)

    def places(self, pcs: Sequence[int], observed: bool) -> dict[int, tuple[str, int]]:
        todo = [pc for pc in dict.fromkeys(pcs) if pc and (observed, pc) not in self._places]
        if todo:
            path = self.build(observed)
            entry = ctypes.addressof(ctypes.c_char.in_dll(_load(path), "simt_entry_0"))
            base = self.machine(observed).simt_load_address(entry) or 0
            chains = _symbolise(path, base, todo)
            for pc in todo:
                self._places[observed, pc] = self._choose(chains.get(pc, []))
        return {pc: place for pc in pcs if pc and (place := self._places.get((observed, pc)))}

    def _choose(self, chain: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
        """Of the nest of inlined calls, innermost first, the place that a reader knows."""
        mine = [(self.filename, line) for file, line in chain if file.endswith(self.token)]
        other = [(file, line) for file, line in chain if "/csrc/simt/" not in file]
        return next(iter(mine or other), None)

    def source_line(self, file: str | None, line: int | None) -> str | None:
        if file == self.filename and line:
            lines = self.text.splitlines()
            if 0 <= line - self.first_line < len(lines):
                return lines[line - self.first_line]
        return None

    def parameter_names(self, name: str) -> list[str]:
        """The names of a kernel's parameters, read from its source; empty where that does not succeed."""
        if name not in self._parameters:
            self._parameters[name] = self._read_parameters(name)
        return self._parameters[name]

    def _read_parameters(self, name: str) -> list[str]:
        bare = re.sub(r"<.*", "", name).split("::")[-1]
        found = re.search(
            rf"__global__[^;{{]*?\b{re.escape(bare)}\s*\(([^;{{]*?)\)\s*{{",
            _without_comments(self.text),
            re.S,
        )
        if not found:
            return []
        inside = re.sub(r"<[^<>]*>|\([^()]*\)", "", found[1])
        words = [re.findall(r"\w+", part) for part in inside.split(",")]
        return [w[-1] if w else "?" for w in words] if inside.strip() else []


def _symbolise(path: Path, base: int, pcs: Sequence[int]) -> dict[int, list[tuple[str, int]]]:
    """For each return address the chain of (file, line), innermost inlined call first."""
    # One byte back: a return address may already belong to the next line.
    if sys.platform == "darwin":
        return _symbolise_mac(path, base, pcs)
    tool = shutil.which("addr2line") or shutil.which("llvm-symbolizer")
    if not tool:
        return {}
    asked = [f"0x{pc - base - 1:x}" for pc in pcs]
    style = ["-a", "-i"] if tool.endswith("addr2line") else ["--output-style=GNU", "-a", "-i", "-f=none"]
    done = subprocess.run([tool, *style, "-e", str(path), *asked], capture_output=True, text=True)
    chains: dict[int, list[tuple[str, int]]] = {}
    current: list[tuple[str, int]] = []
    order = iter(pcs)
    for row in done.stdout.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", row.strip()):
            current = chains.setdefault(next(order), [])
        elif (found := re.match(r"(.*):(\d+)", row)) and found[1] != "??":
            current.append((found[1], int(found[2])))
    return chains


def _thread_local_symbols(path: Path) -> list[tuple[str, int, int]]:
    tool = shutil.which("readelf")
    if not tool or sys.platform == "darwin":
        return []
    done = subprocess.run([tool, "-sWC", str(path)], capture_output=True, text=True)
    found = {}
    for row in done.stdout.splitlines():
        if match := re.match(r"\s*\d+: ([0-9a-f]+)\s+(\S+) TLS +\S+ +\S+ +\d+ (.+)$", row):
            found[int(match[1], 16), match[3]] = int(match[2], 0)
    return [(name, offset, size) for (offset, name), size in sorted(found.items())]


def _symbolise_mac(path: Path, base: int, pcs: Sequence[int]) -> dict[int, list[tuple[str, int]]]:
    # By construction; no such machine was at hand to try it.
    tool = shutil.which("atos")
    if not tool:
        return {}
    done = subprocess.run(
        [tool, "-o", str(path), "-l", hex(base), "-fullPath", "-i", "-d", "\n", *(hex(pc - 1) for pc in pcs)],
        capture_output=True,
        text=True,
    )
    chains = {}
    for pc, block in zip(pcs, done.stdout.split("\n\n"), strict=False):
        chains[pc] = [(f, int(n)) for f, n in re.findall(r"\((\S+):(\d+)\)", block)]
    return chains


# ---- launching ----


def _cores() -> int:
    """Cores that this process may use, which a container may have made fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _triple(what: str, value: int | Sequence[int], limits: Sequence[int]) -> tuple[int, int, int]:
    given = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not 1 <= len(given) <= 3 or not all(isinstance(n, (int, np.integer)) for n in given):
        raise TypeError(f"{what} must be an integer or 1 to 3 integers, got {value!r}")
    full = tuple(int(n) for n in given) + (1,) * (3 - len(given))
    for axis, n, limit in zip("xyz", full, limits, strict=True):
        if n < 1:
            raise ValueError(f"{what}.{axis} is {n}; it must be at least 1")
        if n > limit:
            raise ValueError(f"{what}.{axis} is {n}; the limit is {limit}")
    return full


def launch_shape(
    grid: int | Sequence[int], block: int | Sequence[int], shared_bytes: int = 0, shared_limit: int = SHARED_LIMIT
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The grid and the block as triples, checked against CUDA's limits.

    Raises:
        TypeError, ValueError: a size that no GPU would launch; the message names it and its limit.
    """
    if type(grid) is int and type(block) is int and grid > 0 and 0 < block <= THREADS_LIMIT:
        grid3, block3 = (grid, 1, 1), (block, 1, 1)  # the usual launch, at little cost
        if grid > GRID_LIMIT[0]:
            raise ValueError(f"grid.x is {grid}; the limit is {GRID_LIMIT[0]}")
    else:
        grid3 = _triple("grid", grid, GRID_LIMIT)
        block3 = _triple("block", block, BLOCK_LIMIT)
    threads = block3[0] * block3[1] * block3[2]
    if threads > THREADS_LIMIT:
        raise ValueError(f"block {block3} has {threads} threads; the limit is {THREADS_LIMIT}")
    if not 0 <= shared_bytes <= shared_limit:
        raise ValueError(f"shared_bytes is {shared_bytes}; it must be 0 to {shared_limit}")
    return grid3, block3


def _memory(value: Any) -> tuple[int, int, int] | None:
    """(address, bytes, offset in its storage) of a torch CPU tensor or a numpy array, else None."""
    if isinstance(value, np.ndarray):
        if value.size and not value.flags.c_contiguous:
            raise ValueError(f"an array of shape {value.shape} is not contiguous; pass a contiguous copy")
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        return value.ctypes.data, value.nbytes, max(0, value.ctypes.data - base.ctypes.data)
    if hasattr(value, "data_ptr") and hasattr(value, "untyped_storage"):
        if value.device.type != "cpu":
            raise TypeError(f"the SIMT machine takes CPU tensors, got one on {value.device}")
        if not value.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(value.shape)} is not contiguous; call .contiguous() first")
        offset = value.storage_offset() * value.element_size()
        return value.data_ptr(), value.numel() * value.element_size(), offset
    return None


_C_KINDS = {
    **dict.fromkeys("bhilq", "i"),
    **dict.fromkeys("BHILQ", "u"),
    "f": "f",
    "d": "f",
    "?": "b",
}
_KIND_WORDS = {
    "i": "signed integer",
    "u": "unsigned integer",
    "f": "floating-point number",
    "b": "bool",
    "s": "struct",
}


def _scalar(label: str, value: Any, kind: str, size: int) -> ctypes.Array | Any:
    """A scalar argument as the bytes the kernel expects; a TypeError where they would not mean the same."""
    want = f"a {8 * size}-bit {_KIND_WORDS[kind]}"
    if kind == "s":
        data = bytes(value) if isinstance(value, (bytes, ctypes.Structure, ctypes.Union, np.void)) else None
        if data is None and isinstance(value, np.generic):
            data = value.tobytes()  # a half, for one: a class in the kernel's language
        if data is None or len(data) != size:
            raise TypeError(f"{label} must be a struct of {size} bytes, got {value!r}")
        return ctypes.create_string_buffer(data, size)
    if isinstance(value, ctypes._SimpleCData):
        code = type(value)._type_
        if _C_KINDS.get(code) != kind or ctypes.sizeof(value) != size:
            raise TypeError(f"{label} must be {want}, got {type(value).__name__}")
        return value
    if isinstance(value, np.generic):
        have = {"i": "i", "u": "u", "f": "f", "b": "b"}.get(value.dtype.kind)
        if have != kind or value.dtype.itemsize != size:
            raise TypeError(f"{label} must be {want}, got numpy.{value.dtype}")
        return ctypes.create_string_buffer(value.tobytes(), size)
    if kind in "iu" and isinstance(value, int) and not isinstance(value, bool):
        low = -(1 << (8 * size - 1)) if kind == "i" else 0
        high = (1 << (8 * size - (kind == "i"))) - 1
        if not low <= value <= high:
            raise ValueError(f"{label} is {value}; {want} holds {low} to {high}")
        return ctypes.create_string_buffer(value.to_bytes(size, sys.byteorder, signed=kind == "i"), size)
    if kind == "f" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return (ctypes.c_float if size == 4 else ctypes.c_double)(value)
    if kind == "b" and isinstance(value, (bool, int)):
        return ctypes.c_bool(bool(value))
    raise TypeError(f"{label} must be {want}, got {type(value).__name__} {value!r}")


class Kernel:
    """One kernel of a module."""

    def __init__(self, module: Module, name: str):
        self.module, self.name = module, name
        self.index = module.names.index(name)

    def __repr__(self) -> str:
        return f"<kernel {self.name} of {self.module.filename}>"

    def _entry(self, observed: bool) -> _Entry:
        return _Entry.in_dll(self.module._library(observed), f"simt_entry_{self.index}")

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        workers: int | None = None,
        *,
        outputs: Sequence[int | str] = (),
        cooperative: bool = False,
        buffers: Sequence[Any] = (),
        shared_limit: int = SHARED_LIMIT,
    ) -> None:
        """Runs the kernel to its end. Inside `observe`, runs its observed build and adds to that report.

        Args:
            grid, block: blocks in the grid and threads in a block; an integer or up to three.
            args: torch CPU tensors, numpy arrays or None for pointers; Python, numpy or ctypes numbers for
                scalars.
            shared_bytes: size of the `extern __shared__` array.
            workers: OS threads to spread blocks over; all cores by default.
            outputs: arguments, by position or name, whose contents are undefined before the launch. An
                observed launch fills them with NaN first, and reports what is read before it is written and
                what is never written.
            cooperative: all blocks are resident and may wait for each other (a grid-wide barrier).
            buffers: tensors that the kernel reaches through a pointer inside another argument.
            shared_limit: shared memory that a block may have on the device in question.

        Raises:
            ValueError, TypeError: a GPU would refuse the launch, or an argument does not fit; nothing ran.
            LaunchError: the kernel could not go on (deadlock, bad mask, crash).
        """
        grid3, block3 = launch_shape(grid, block, shared_bytes, min(shared_limit, SHARED_LIMIT))
        observation = _observation.get()
        observed = observation is not None
        entry = self._entry(observed)
        parameters = self.module.parameter_names(self.name)
        if len(parameters) != entry.count:
            parameters = [f"#{i}" for i in range(entry.count)]
        if len(args) != entry.count:
            raise TypeError(f"{self.name} takes {entry.count} arguments ({', '.join(parameters)}), got {len(args)}")
        undefined = {parameters.index(o) if isinstance(o, str) else int(o) for o in outputs}

        table = _BufferTable()
        values = (ctypes.c_void_p * (entry.count + 1))()
        arg_buffer = (ctypes.c_int * (entry.count + 1))(*[-1] * (entry.count + 1))
        arg_offset = (ctypes.c_uint64 * (entry.count + 1))()
        keep: list[Any] = [table]
        for i, value in enumerate(args):
            kind, size = chr(entry.args[i].kind), entry.args[i].size
            label = f"argument {i} ({parameters[i]}) of {self.name}"
            memory = _memory(value) if kind in "pc" else None
            if kind in "pc" and memory:
                flags = (_ONLY_READ if kind == "c" else 0) | (_OUTPUT if i in undefined else 0)
                arg_buffer[i], arg_offset[i] = table.add(parameters[i], *memory, flags)
            elif kind in "pc":
                if value is not None and not isinstance(value, ctypes.c_void_p):
                    raise TypeError(f"{label} must be a tensor or an array, got {type(value).__name__} {value!r}")
                held = value if value is not None else ctypes.c_void_p(0)
                keep.append(held)
                values[i] = ctypes.addressof(held)
            else:
                held = _scalar(label, value, kind, size)
                keep.append(held)
                values[i] = ctypes.addressof(held)
        for i, extra in enumerate(buffers):
            if (memory := _memory(extra)) is None:
                raise TypeError(f"buffers[{i}] must be a tensor or an array, got {type(extra).__name__}")
            table.add(f"buffers[{i}]", *memory, _IN_PLACE)

        request = _LaunchRequest()
        request.entry = ctypes.addressof(entry)
        request.touch_shared = ctypes.cast(self.module._library(observed).simt_touch_shared, ctypes.c_void_p)
        request.grid[:], request.block[:] = grid3, block3
        request.shared_bytes = shared_bytes
        request.args = ctypes.cast(values, ctypes.POINTER(ctypes.c_void_p))
        request.arg_buffer = ctypes.cast(arg_buffer, ctypes.POINTER(ctypes.c_int))
        request.arg_offset = ctypes.cast(arg_offset, ctypes.POINTER(ctypes.c_uint64))
        array = table.array()
        request.buffers, request.buffer_count = ctypes.cast(array, ctypes.POINTER(_Buffer)), len(table.rows)
        request.workers = workers or _cores()
        request.cooperative, request.observed = cooperative, observed
        request.seed = observation.seed if observation else 0
        request.pictures = observation.pictures if observation else 0
        request.time_limit = float(os.environ.get("NANOQWEN_SIMT_TIME_LIMIT", "60"))
        request.spin_limit = 20_000
        if observed:
            symbols = self.module.shared_variables()
            rows = [_SharedVariable(at, size, name.startswith("guard variable")) for name, at, size in symbols]
            variables = (_SharedVariable * max(1, len(rows)))(*rows)
            request.shared, request.shared_count = (
                ctypes.cast(variables, ctypes.POINTER(_SharedVariable)),
                len(rows),
            )
        machine = self.module.machine(observed)
        answer = machine.simt_launch(ctypes.byref(request))
        if not answer:
            return
        try:
            raw = json.loads(ctypes.string_at(answer).decode(errors="replace"))
        finally:
            machine.simt_free(answer)
        findings = self._findings(raw["findings"], table.names, observed)
        if observation:
            self._report(observation, raw, findings, table, grid3, block3)
        if raw["stopped"] or (findings and not observed):
            words = "\n".join(str(f) for f in findings) or "the launch was stopped"
            raise LaunchError(f"{self.name} could not go on:\n{words}", findings)

    def _findings(self, raw: list[dict], names: Sequence[str], observed: bool) -> list[Finding]:
        module = self.module

        def pcs(item: dict) -> list[int]:
            mine = [item.get("pc", 0), (item.get("other") or {}).get("pc", 0)]
            return mine + [w.get("pc", 0) for w in item.get("waits", ())]

        places = module.places([pc for item in raw for pc in pcs(item)], observed)

        def where(item: dict) -> tuple[str | None, int | None]:
            if place := places.get(item.get("pc", 0)):
                return place
            file = item.get("file")
            return (file.replace(module.token, module.filename) if file else None), item.get("line")

        shared = _plain_names(module.shared_variables()) if observed else []
        return [Finding.read(item, where, module.source_line, names, shared, self.name) for item in raw]

    def _report(self, observation, raw, findings, table, grid, block) -> None:
        places = self.module.places([site["pc"] for site in raw["sites"]], True)
        observation.report.add_launch(
            kernel=self.name,
            grid=grid,
            block=block,
            sites=raw["sites"],
            places=places,
            findings=findings,
            buffers=table.described(),
            shared=_plain_names(self.module.shared_variables()),
            source=(self.module.filename, self.module.first_line, self.module.text),
        )


def _plain_names(symbols: Sequence[tuple[str, int, int]]) -> list[str]:
    """`tile` for `gemv(float const*, ...)::tile`."""
    return [re.sub(r"\.\d+$", "", name.split("::")[-1].strip()) for name, *_ in symbols]


class _BufferTable:
    """The tensors of a launch. Two arguments that share memory are one buffer."""

    def __init__(self) -> None:
        self.rows: list[list] = []  # address, bytes, offset in storage, flags, name

    @property
    def names(self) -> list[str]:
        return [row[4] for row in self.rows]

    def add(self, name: str, address: int, size: int, offset: int, flags: int) -> tuple[int, int]:
        for i, row in enumerate(self.rows):
            if row[0] <= address and address + size <= row[0] + row[1] and size:
                row[3] &= flags | ~_ONLY_READ  # read-only only if every pointer to it is
                row[3] |= flags & _OUTPUT
                row[4] += "" if row[4] == name else f"/{name}"
                return i, address - row[0]
        self.rows.append([address, size, offset, flags, name])
        return len(self.rows) - 1, 0

    def array(self) -> ctypes.Array:
        return (_Buffer * max(1, len(self.rows)))(*[_Buffer(a, n, off, fl, 0) for a, n, off, fl, _ in self.rows])

    def described(self) -> list[tuple[str, int]]:
        return [(row[4], row[1]) for row in self.rows]


# ---- observing ----


class _Observation:
    def __init__(self, pictures: int, seed: int):
        self.report, self.pictures, self.seed = Report(), pictures, seed


_observation: contextvars.ContextVar[_Observation | None] = contextvars.ContextVar("observation", default=None)


@contextlib.contextmanager
def observing(*, pictures: int = 8, seed: int = 0):
    """Every launch inside the `with` block runs observed; the `Report` it yields is complete after it.

    Args:
        pictures: how many requests of each line keep the address of every lane.
        seed: 0 lets threads take turns in order; any other number draws the order, the same each time.
    """
    observation = _Observation(pictures, seed)
    token = _observation.set(observation)
    try:
        yield observation.report
    finally:
        _observation.reset(token)


def observe(function: Callable | Kernel, *args: Any, **kwargs: Any) -> Report:
    """Calls a function that launches kernels, and reports what they did.

    `observe(kernels.gemv_naive, w, x)` or `observe(module["k"].launch, grid, block, args)`. What the function
    returns is `report.result`. A kernel that could not go on ends the call; then `report.stopped` is true and
    the findings say why.

    Raises:
        TypeError: `function` cannot be called: it has been already.
    """
    call = function.launch if isinstance(function, Kernel) else function
    if not callable(call):
        words = "observe takes the function and its arguments apart: simt.observe(k[grid, block], w, …)"
        raise NothingToObserve(f"{words}; got {type(function).__name__}")
    with observing() as report:
        try:
            report.result = call(*args, **kwargs)
        except LaunchError as error:
            report.stopped = True
            if not report.findings:
                report.findings.extend(error.findings)
    return report
