"""Compile kernels of `csrc/` for the machine at hand, and launch them there.

The device chooses the machine. CUDA: NVRTC through CuPy, launched on torch's current stream. CPU: the SIMT machine
(`nanoqwen.simt`). The source is the same file, and so are the checks and the errors.
"""

import ctypes
import functools
import hashlib
import os
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nanoqwen import simt
from nanoqwen.paths import CSRC, cache_dir

INCLUDE = CSRC / "include"
H200_SMS = 132
_LOOK_AGAIN_S = 0.5  # how long compiled kernels are used before the dates of their sources are looked at again

# One letter a parameter. A kernel's pointers take tensors, or None for a null pointer.
_C_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
}
# How `struct` packs each, in 8 bytes whatever its size.
_PACKED = {"p": "Q", "i": "i4x", "u": "I4x", "l": "q", "f": "f4x"}


class Program:
    """The kernels that are wanted of one source, compiled together when the first of them is launched.

    A file is compiled again when it, or a header of `csrc/include`, has changed since.

    Args:
        source: a file under `csrc/` (a `Path`, relative to it), or CUDA C++ text (a `str`).
        kernels: by name, an `extern "C"` one or a template instance such as `gemv_naive<float>`, the parameters: one
            letter each, p pointer, i int, u unsigned, l long long, f float.
        filename, first_line: what messages call a text, and the number of its first line.

    Raises:
        ValueError: a parameter letter that is none of these.
    """

    def __init__(
        self, source: Path | str, kernels: Mapping[str, str], filename: str = "kernel.cu", first_line: int = 1
    ):
        for name, params in kernels.items():
            if unknown := set(params) - set(_C_TYPES):
                raise ValueError(f"{name}: parameter letter {sorted(unknown)[0]!r} is none of {', '.join(_C_TYPES)}")
        self.source, self.kernels = source, dict(kernels)
        self.filename = f"csrc/{source.as_posix()}" if isinstance(source, Path) else filename
        self.first_line = first_line
        self._state = -1
        self._simt: simt.Module | None = None
        self._gpu: dict[tuple[str, int], _GpuKernel] = {}
        self._modules: dict[int, object] = {}
        self._retired: list[object] = []  # a captured graph may still launch their kernels

    def launch(
        self,
        name: str,
        device: torch.device,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence,
        *,
        shared_bytes: int = 0,
        pdl: bool = False,
        outputs: Sequence[int | str] = (),
    ) -> None:
        """Run a kernel over `grid` blocks of `block` threads; on CUDA this returns before it has run.

        Args:
            args: tensors of `device` and numbers, as the kernel's parameters are.
            shared_bytes: of the `extern __shared__` array.
            pdl: programmatic dependent launch (sm_90): the kernel may start while the one before it still runs, and
                calls `wait_for_predecessor` before it touches what that one writes or reads.
            outputs: parameters, by name or place, that the kernel writes and whose old contents mean nothing: an
                observed launch fills them with NaN and reports what stays unwritten.

        Raises:
            KeyError: the program has no such kernel.
            ValueError, TypeError: an empty grid, a block over 1024 threads, too much shared memory, arguments that do
                not fit; nothing has run.
            nanoqwen.simt.CompileError: the source does not compile; file, line and the compiler's words.
            RuntimeError: no machine to run it on, or the launch failed.
        """
        if self._state != _sources_state():
            self._forget()
        if device.type == "cuda":
            kernel = self._gpu.get((name, device.index)) or self._gpu_kernel(name, _index(device))
            kernel.launch(grid, block, args, shared_bytes, pdl)
            return
        if device.type != "cpu":
            raise RuntimeError(f"kernels run on CUDA and CPU tensors, not on {device}")
        params = self._params(name)
        _check_arguments(name, params, args, "cpu")
        self.compile(device)
        typed = [arg if kind == "p" else _C_TYPES[kind](arg) for kind, arg in zip(params, args, strict=True)]
        self._simt[name].launch(grid, block, typed, shared_bytes, outputs=outputs)

    def compile(self, device: torch.device) -> None:
        """Compile for `device` now, if it has not been done since the sources last changed.

        Raises:
            nanoqwen.simt.CompileError, RuntimeError: as `launch`.
        """
        if self._state != _sources_state():
            self._forget()
        if device.type == "cuda":
            if (index := _index(device)) not in self._modules:
                self._modules[index] = self._compile_for_gpu(index)
        elif self._simt is None:
            self._simt = simt.compile(
                CSRC / self.source if isinstance(self.source, Path) else self.source,
                list(self.kernels),
                filename=self.filename,
                first_line=self.first_line,
                include_dirs=(INCLUDE,),
            )

    def _forget(self) -> None:
        """Compile anew at the next launch: the sources have changed."""
        self._retired.extend(self._modules.values())
        self._simt, self._gpu, self._modules, self._state = None, {}, {}, _sources_state()

    def _params(self, name: str) -> str:
        if name not in self.kernels:
            raise KeyError(f"{self.filename} has no kernel {name!r}; it has {', '.join(self.kernels)}")
        return self.kernels[name]

    def _gpu_kernel(self, name: str, device: int) -> "_GpuKernel":
        if (name, device) in self._gpu:  # asked for as plain "cuda"
            return self._gpu[name, device]
        params = self._params(name)
        self.compile(torch.device("cuda", device))
        kernel = self._gpu[name, device] = _GpuKernel(self._modules[device], name, params, device)
        return kernel

    def _compile_for_gpu(self, device: int):
        cupy = _cupy()
        text = (CSRC / self.source).read_text(encoding="utf-8") if isinstance(self.source, Path) else self.source
        options = (
            "-std=c++17",
            f"-I{CSRC}",
            f"-I{INCLUDE}",
            # CuPy keys its cache on the text and the options alone; this brings the headers in.
            f"-DNANOQWEN_HEADERS=0x{_headers_hash()}",
        )
        code = f'#line {self.first_line} "{self.filename}"\n{text}'
        torch.cuda.init()
        with cupy.cuda.Device(device):
            try:
                module = cupy.RawModule(code=code, options=options, name_expressions=tuple(self.kernels))
                module.compile()
            except cupy.cuda.compiler.CompileException as error:
                raise self._compile_error(str(error), text) from None
        return module

    def _compile_error(self, output: str, text: str) -> simt.CompileError:
        found = re.search(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<words>.*)$", output, re.M)
        if not found:
            return simt.CompileError(f"NVRTC failed on {self.filename}:\n{output.strip()}", output=output)
        file, line = found["file"], int(found["line"])
        message, at = f"{file}:{line}: {found['words']}", line - self.first_line
        if file == self.filename and 0 <= at < len(lines := text.splitlines()):
            message += f"\n    {line} | {lines[at]}"
        return simt.CompileError(message, file, line, output)


@functools.cache
def sms(device: torch.device) -> int:
    """Multiprocessors of a GPU. The SIMT machine has those of an H200, so that it runs the same launches."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS


class _LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute; `value` is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint), ("_", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


_PDL = _LaunchAttribute(6, 0, (1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed


class _LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class _GpuKernel:
    """One loaded kernel.

    A launch costs microseconds, so nothing is done in it that could be done once. A shape is checked when it is first
    seen. The arguments lie where they always lie, 8 bytes each: a launch packs their values, in one call, and the
    driver gets objects that ctypes need not convert.
    """

    def __init__(self, module, name: str, params: str, device: int):
        raw = module.get_function(name)
        self.raw, self.name, self.params, self.device = raw, name, params, device
        self.function = ctypes.c_void_p(raw.kernel.ptr)
        self.values = ctypes.create_string_buffer(8 * max(1, len(params)))
        base = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_void_p * max(1, len(params)))(*(base + 8 * i for i in range(len(params))))
        self.pointers = [i for i, kind in enumerate(params) if kind == "p"]
        self.pack_into = struct.Struct("=" + "".join(_PACKED[kind] for kind in params)).pack_into
        properties = torch.cuda.get_device_properties(device)
        self.shared_limit, self.has_pdl = properties.shared_memory_per_block_optin, properties.major >= 9
        self.shared_allowed = 48 * 1024
        self.several_gpus = torch.cuda.device_count() > 1
        self.current_stream = torch._C._cuda_getCurrentRawStream
        self.driver_launch = _driver().cuLaunchKernelEx
        self.configs: dict[tuple, object] = {}
        self.lock = threading.Lock()

    def launch(self, grid, block, args: Sequence, shared_bytes: int, pdl: bool) -> None:
        stream = self.current_stream(self.device)
        try:
            config = self.configs[grid, block, shared_bytes, pdl, stream]
        except (KeyError, TypeError):  # new, or a list, which is no key
            config = self._config(grid, block, shared_bytes, pdl, stream)
        with self.lock:
            try:
                values = list(args)
                for i in self.pointers:
                    tensor = values[i]
                    values[i] = tensor.data_ptr() if tensor.is_cuda else None  # None does not pack
                self.pack_into(self.values, 0, *values)
            except (AttributeError, IndexError, OverflowError, struct.error):  # a null pointer, or what does not fit
                self._pack_with_care(args)
            status = self._start(config)
        if status:
            raise RuntimeError(f"{self.name}: the driver refused the launch ({_driver_words(status)})")

    def _pack_with_care(self, args: Sequence) -> None:
        _check_arguments(self.name, self.params, args, "cuda")
        values = [
            arg if kind != "p" else 0 if arg is None else arg.data_ptr()
            for kind, arg in zip(self.params, args, strict=True)
        ]
        self.pack_into(self.values, 0, *values)

    def _start(self, config) -> int:
        if self.several_gpus and torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.driver_launch(config, self.function, self.addresses, None)
        status = self.driver_launch(config, self.function, self.addresses, None)
        if status == _INVALID_CONTEXT:  # a thread of the reader's that has not used the GPU before
            torch.cuda.mem_get_info(self.device)
            status = self.driver_launch(config, self.function, self.addresses, None)
        return status

    def _config(self, grid, block, shared_bytes: int, pdl: bool, stream: int):
        grid3, block3 = simt.launch_shape(grid, block, shared_bytes, self.shared_limit)
        if shared_bytes > self.shared_allowed:
            self.raw.max_dynamic_shared_size_bytes = self.shared_allowed = shared_bytes
        if len(self.configs) >= _CONFIGS_KEPT:
            self.configs.clear()
        config = _LaunchConfig((ctypes.c_uint * 3)(*grid3), (ctypes.c_uint * 3)(*block3), shared_bytes, stream)
        if pdl and self.has_pdl:
            self.raw.preferred_shared_memory_carveout = (
                100  # kernels that split an SM's memory otherwise do not overlap
            )
            config.attributes, config.attribute_count = ctypes.addressof(_PDL), 1
        self.configs[_key(grid), _key(block), shared_bytes, pdl, stream] = reference = ctypes.byref(config)
        return reference


_CONFIGS_KEPT = 256  # shapes and streams of a kernel
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def _key(size):
    return size if isinstance(size, int) else tuple(size)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _check_arguments(name: str, params: str, args: Sequence, device: str) -> None:
    """Refuse arguments that a kernel's parameters cannot take.

    Raises:
        TypeError: too many or too few, or of another kind. ValueError: a number out of range, a tensor elsewhere.
    """
    if len(args) != len(params):
        raise TypeError(f"{name} takes {len(params)} arguments, got {len(args)}")
    for i, (kind, arg) in enumerate(zip(params, args, strict=True)):
        if kind == "p":
            if not (arg is None or hasattr(arg, "data_ptr")):
                raise TypeError(f"argument {i} of {name} must be a tensor or None, got {type(arg).__name__} {arg!r}")
            if arg is not None and arg.device.type != device:
                raise ValueError(f"argument {i} of {name} is on {arg.device}; the kernel runs on {device}")
            continue
        try:
            struct.pack("=" + _PACKED[kind], arg)
        except (struct.error, OverflowError) as error:
            too_large = isinstance(error, OverflowError) or (isinstance(arg, int) and kind != "f")
            wanted = _C_TYPES[kind].__name__.removeprefix("c_")
            raise (ValueError if too_large else TypeError)(
                f"argument {i} of {name} is {arg!r}; it must be a number that fits C's {wanted}"
            ) from None


@functools.cache
def _driver() -> ctypes.PyDLL:
    # Not CDLL: a launch is over in microseconds, less than letting go of the interpreter and taking it back.
    return ctypes.PyDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def _driver_words(status: int) -> str:
    words = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(words))
    return (words.value or b"unknown error").decode()


def _cupy():
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"kernels on a GPU need CuPy, which cannot be imported ({error}); run `nanoqwen doctor` for the command"
        ) from None
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache_dir() / "cupy"))
    return cupy


def _headers() -> list[Path]:
    return sorted(INCLUDE.glob("*.cuh"))


def _headers_hash() -> str:
    digest = hashlib.sha256()
    for path in _headers():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


_looked: tuple[float, int] = (float("-inf"), 0)


def _sources_state() -> int:
    """A number that changes when a kernel source or header does; the files are looked at twice a second at most."""
    global _looked
    now = time.monotonic()
    if now - _looked[0] > _LOOK_AGAIN_S:
        files = (*CSRC.glob("*.cu"), *_headers())
        dates = [(path.name, (status := path.stat()).st_mtime_ns, status.st_size) for path in sorted(files)]
        _looked = (now, hash(tuple(dates)))
    return _looked[1]
