"""What a machine can move and compute: datasheets, and probes that measure it in this process."""

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanoqwen.timing import Percentiles, percentiles, time_calls

GIB = 1 << 30


@dataclass(frozen=True)
class Spec:
    """A GPU's datasheet. Rates are dense (no structured sparsity), with fp32 accumulation; `bf16` is None where the
    GPU has no bf16 tensor cores. `devices`: the names under which drivers report it."""

    name: str
    bandwidth: float  # bytes/s
    bf16: float | None  # FLOP/s
    fp32: float  # FLOP/s
    l2: int  # bytes
    memory: float  # bytes
    sms: int
    source: str
    devices: tuple[str, ...]


def _spec(name, gb_s, bf16, fp32, l2_mb, memory_gb, sms, source, *devices) -> Spec:
    """Rates in GB/s and TFLOP/s, as datasheets print them."""
    return Spec(
        name,
        gb_s * 1e9,
        bf16 and bf16 * 1e12,
        fp32 * 1e12,
        int(l2_mb * (1 << 20)),
        memory_gb * 1e9,
        sms,
        source,
        devices,
    )


# fmt: off
DATASHEETS: dict[str, Spec] = {
    "h200": _spec("H200 SXM", 4800, 989.4, 66.9, 50, 141, 132, "NVIDIA H200 datasheet", "H200"),
    "h100-sxm": _spec("H100 SXM", 3350, 989.4, 66.9, 50, 80, 132, "NVIDIA H100 datasheet", "H100 80GB HBM3"),
    "h100-pcie": _spec("H100 PCIe", 2039, 756, 51.2, 50, 80, 114, "NVIDIA H100 PCIe product brief", "H100 PCIe"),
    "a100-sxm-80gb": _spec("A100 SXM 80 GB", 2039, 312, 19.5, 40, 80, 108, "NVIDIA A100 datasheet", "A100-SXM4-80GB"),
    "a100-pcie-80gb": _spec("A100 PCIe 80 GB", 1935, 312, 19.5, 40, 80, 108, "NVIDIA A100 datasheet",
                            "A100 80GB PCIe"),
    "a100-40gb": _spec("A100 40 GB", 1555, 312, 19.5, 40, 40, 108, "NVIDIA A100 datasheet",
                       "A100-SXM4-40GB", "A100-PCIE-40GB"),
    "a10": _spec("A10", 600, 125, 31.2, 6, 24, 72, "NVIDIA A10 datasheet", "A10"),
    "a10g": _spec("A10G", 600, 70, 35, 6, 24, 80, "NVIDIA A10G datasheet", "A10G"),
    "l4": _spec("L4", 300, 121, 30.3, 48, 24, 58, "NVIDIA L4 datasheet", "L4"),
    "l40s": _spec("L40S", 864, 362, 91.6, 96, 48, 142, "NVIDIA L40S datasheet", "L40S"),
    "t4": _spec("T4", 320, None, 8.1, 4, 16, 40, "NVIDIA T4 product brief", "Tesla T4", "T4"),
    "rtx-6000-ada": _spec("RTX 6000 Ada", 960, 364.2, 91.1, 96, 48, 142, "NVIDIA Ada GPU architecture paper",
                          "RTX 6000 Ada Generation"),
    "rtx-a6000": _spec("RTX A6000", 768, 154.8, 38.7, 6, 48, 84, "NVIDIA RTX A6000 datasheet", "RTX A6000"),
    "rtx-5090": _spec("RTX 5090", 1792, 209.5, 104.8, 96, 32, 170, "NVIDIA RTX Blackwell architecture paper",
                      "GeForce RTX 5090"),
    "rtx-5070-ti": _spec("RTX 5070 Ti", 896, 87.9, 43.9, 48, 16, 70, "NVIDIA RTX Blackwell architecture paper",
                         "GeForce RTX 5070 Ti"),
    "rtx-4090": _spec("RTX 4090", 1008, 165.2, 82.6, 72, 24, 128, "NVIDIA Ada GPU architecture paper",
                      "GeForce RTX 4090"),
    "rtx-3090": _spec("RTX 3090", 936, 71, 35.6, 6, 24, 82, "NVIDIA Ampere GA102 paper", "GeForce RTX 3090"),
    "rtx-3060": _spec("RTX 3060 12 GB", 360, 25.4, 12.7, 3, 12, 28,
                      "NVIDIA GeForce page; bf16 is twice fp32 on GA10x (Ampere GA102 paper)", "GeForce RTX 3060"),
}
# fmt: on


def spec_for(device_name: str, memory: int | None = None) -> Spec | None:
    """The datasheet of a GPU by the name that its driver reports; None for one that is not in the table.

    Names must match whole: a laptop's, a Ti's or a MIG slice's numbers are others. `memory` (bytes), where given,
    must be within a tenth of the datasheet's, which tells apart cards that are sold under one name.
    """
    name = device_name.strip().removeprefix("NVIDIA ").lower()
    for spec in DATASHEETS.values():
        if name in (device.lower() for device in spec.devices):
            return spec if memory is None or abs(memory - spec.memory) <= 0.1 * spec.memory else None
    return None


@dataclass(frozen=True)
class Machine:
    """What this process runs on: a GPU where `kind` is 'gpu', else the CPU."""

    kind: str
    name: str
    units: int  # SMs, or CPU cores of this process
    cache: int | None  # last-level cache, bytes; None: unknown
    memory: int | None  # bytes
    python: str
    torch: str
    cuda: str | None
    driver: str | None
    cupy: str | None
    spec: Spec | None

    def __str__(self) -> str:
        units = "SMs" if self.kind == "gpu" else "cores"
        parts = [f"{self.name}: {self.units} {units}"]
        if self.memory:
            parts.append(f"{self.memory / GIB:.0f} GiB")
        if self.cache:
            parts.append(f"{self.cache / (1 << 20):.0f} MiB {'L2' if self.kind == 'gpu' else 'last-level cache'}")
        parts.append(f"Python {self.python}, torch {self.torch}")
        if self.kind == "gpu":
            parts.append(f"CUDA {self.cuda}, driver {self.driver or 'unknown'}, CuPy {self.cupy or 'absent'}")
        return ", ".join(parts)


def default_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _device(device: str | torch.device | None) -> torch.device:
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def machine(device: str | torch.device | None = None) -> Machine:
    """What `device` (default: the GPU where there is one) is, and the versions of what drives it."""
    device = _device(device)
    cupy = next((v for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if (v := _version(name))), None)
    versions = (platform.python_version(), torch.__version__, torch.version.cuda)
    if device.type != "cuda":
        name, cores = _cpu_name(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return Machine("cpu", name, cores or 1, _cpu_cache(), _cpu_memory(), *versions, None, cupy, None)
    props = torch.cuda.get_device_properties(device)
    return Machine(
        "gpu",
        props.name,
        props.multi_processor_count,
        props.L2_cache_size,
        props.total_memory,
        *versions,
        gpu_state(device).get("driver"),
        cupy,
        spec_for(props.name, props.total_memory),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def _cpu_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _cpu_cache() -> int | None:
    """All last-level caches together, in bytes; each is listed once per core that shares it."""
    levels: dict[int, dict[str, int]] = {}
    try:
        for entry in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
            level, size = int((entry / "level").read_text()), (entry / "size").read_text().strip()
            scale = {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
            levels.setdefault(level, {})[(entry / "shared_cpu_list").read_text()] = int(size.rstrip("KM")) * scale
    except (OSError, ValueError):
        return None
    return sum(levels[max(levels)].values()) if levels else None


def gpu_state(device: str | torch.device | None = None) -> dict:
    """Clocks (MHz), power (W), temperature (°C) and driver of a GPU as `nvidia-smi` gives them; empty without it."""
    fields = {
        "sm_clock_mhz": "clocks.sm",
        "memory_clock_mhz": "clocks.mem",
        "power_w": "power.draw",
        "temperature_c": "temperature.gpu",
        "driver": "driver_version",
    }
    command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"]
    if torch.cuda.is_available():  # by its id: nvidia-smi does not follow CUDA_VISIBLE_DEVICES
        uuid = str(torch.cuda.get_device_properties(_device(device)).uuid)
        command += ["-i", uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return {name: _number(value) for name, value in zip(fields, values, strict=False)}


def _number(text: str) -> float | str | None:
    if text.startswith("["):  # [N/A], [Not Supported]
        return None
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else text


@dataclass(frozen=True)
class Probe:
    """A measured ceiling: `amount` of `unit` per call, and the seconds of each call.

    `rate` is that of the fastest call: a ceiling is what the machine can do, and noise only slows it down.
    """

    what: str  # 'read', 'copy' or 'matmul'
    amount: float
    unit: str  # 'B' or 'FLOP'
    seconds: Percentiles
    best: float  # seconds of the fastest call
    method: str
    device: str

    @property
    def rate(self) -> float:
        """Bytes/s or FLOP/s."""
        return self.amount / self.best

    def at_least(self, rate: float) -> "Probe":
        """This ceiling, raised to a `rate` that something else was seen to reach.

        On a machine that others use too, a CPU's probe is only a lower bound of what it can do.
        """
        return self if rate <= self.rate else replace(self, best=self.amount / rate)

    def __str__(self) -> str:
        rate, unit = self.rate / 1e9, "GB/s" if self.unit == "B" else "GFLOP/s"
        return f"{self.what} probe: {rate:.1f} {unit} on {self.device} ({self.method}; {self.seconds})"

    def to_dict(self) -> dict:
        """The JSON form that records hold."""
        rate = "bytes_per_s" if self.unit == "B" else "flops_per_s"
        return {rate: self.rate, "amount": self.amount, "seconds": self.seconds.to_dict(), "method": self.method}


def _probe(what: str, amount: float, unit: str, samples: list[float], method: str, device: torch.device) -> Probe:
    return Probe(what, amount, unit, percentiles(samples), min(samples), method, machine(device).name)


def _room(device: torch.device, wanted: int | None) -> int:
    """Bytes for a buffer: `wanted`, or 4 GiB on a GPU and 512 MiB on a CPU, never more than half of what is free.

    It must dwarf the cache, or the probe measures the cache.
    """
    if device.type == "cuda":
        free, cache = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_properties(device).L2_cache_size
        size = 4 * GIB if wanted is None else wanted
    else:
        free, cache = _cpu_memory() or 4 * GIB, _cpu_cache() or 32 << 20
        size = max(512 << 20, 4 * cache) if wanted is None else wanted
    size = min(size, free // 2) // 4096 * 4096
    if size < 4 * cache:
        raise ValueError(
            f"a probe of {size / 2**20:.0f} MiB would measure the cache ({cache / 2**20:.0f} MiB) of {device}; "
            f"give nbytes of at least {4 * cache} and free that much memory"
        )
    return size


def read_probe(
    device: str | torch.device | None = None, nbytes: int | None = None, repeats: int | None = None
) -> Probe:
    """The rate at which `device` reads its own memory, in bytes/s, over a buffer far larger than its caches.

    On a GPU the kernel of `csrc/read_probe.cu` (through CuPy; without it a slower torch sum, and `method` says so),
    on a CPU a torch sum over all of torch's threads. What was summed is checked after the timing.

    Args:
        nbytes: buffer; by default 4 GiB on a GPU, 512 MiB or 4 × the last-level cache on a CPU.
        repeats: by default 100 on a GPU, 12 on a CPU.

    Raises:
        ValueError: a buffer that the caches could hold. RuntimeError: the sum came out wrong.
    """
    device = _device(device)
    size = _room(device, nbytes)
    words = torch.arange(size // 8, device=device)  # int64: 0, 1, 2, …
    repeats = repeats or (100 if device.type == "cuda" else 12)
    fn, total = words.sum, lambda: int(words.sum())
    method = "torch.sum over int64"
    if device.type == "cpu":
        method += f", {torch.get_num_threads()} threads"
    else:
        try:
            fn, total = _read_kernel(words)
            method = "csrc/read_probe.cu, independent 16-byte loads"
        except Exception as error:  # absent, or for another CUDA: CuPy has many ways to say so
            method += f"; without our kernel ({type(error).__name__}: CuPy cannot run it): less than the GPU can do"
    samples = time_calls(fn, device, repeats)
    count = size // 8
    # The kernel adds 32-bit words, torch 64-bit ones: modulo 2^32 both are the sum of 0 … count − 1.
    got, want = total() % (1 << 32), (count * (count - 1) // 2) % (1 << 32)
    if got != want:
        raise RuntimeError(f"the read probe summed to {got}, not {want}; it did not read every byte once")
    return _probe("read", size, "B", samples, f"{size / GIB:.2g} GiB, {method}", device)


def _read_kernel(words: torch.Tensor):
    """The launch of `csrc/read_probe.cu` over an int64 CUDA tensor, and what its sums add up to."""
    from nanoqwen.kernels.launch import Program  # here: nothing else in this module needs kernels

    props, threads = torch.cuda.get_device_properties(words.device), 256
    blocks = props.multi_processor_count * (props.max_threads_per_multi_processor // threads)
    sums = torch.zeros(blocks * threads, dtype=torch.int32, device=words.device)
    program = Program(Path("read_probe.cu"), {"read_probe": "plp"})
    program.compile(words.device)

    def launch() -> None:
        program.launch("read_probe", words.device, blocks, threads, (words, words.numel() // 2, sums))

    return launch, lambda: int(sums.sum(dtype=torch.int64))


def copy_probe(
    device: str | torch.device | None = None, nbytes: int | None = None, repeats: int | None = None
) -> Probe:
    """The rate of a torch copy within `device`'s memory, read + written bytes/s; `nbytes` is read, as much written."""
    device = _device(device)
    size = _room(device, nbytes and nbytes // 2 if nbytes else (2 * GIB if device.type == "cuda" else None))
    source = torch.arange(size // 8, device=device)
    target = torch.empty_like(source)
    samples = time_calls(lambda: target.copy_(source), device, repeats or (100 if device.type == "cuda" else 12))
    if not torch.equal(source, target):
        raise RuntimeError("the copy probe's copy differs from its source")
    return _probe("copy", 2 * size, "B", samples, f"torch copy, {size / GIB:.2g} GiB each way", device)


def matmul_probe(
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    size: int | None = None,
    repeats: int | None = None,
) -> Probe:
    """FLOP/s of a square torch matmul on normal data, checked against float64 on some rows after the timing.

    Args:
        size: rows and columns; by default 8192 on a GPU, 1024 on a CPU.
    """
    device = _device(device)
    gpu = device.type == "cuda"
    size, repeats = size or (8192 if gpu else 1024), repeats or (100 if gpu else 12)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    samples = time_calls(lambda: torch.matmul(a, b, out=out), device, repeats)
    rows = slice(0, size, max(1, size // 16))
    want = a[rows].double() @ b.double()
    error = ((out[rows].double() - want).norm() / want.norm()).item()
    if not error < 0.02:
        raise RuntimeError(f"the matmul probe's result is off by {error:.3g} of its norm; it must be below 0.02")
    name = str(dtype).removeprefix("torch.")
    return _probe("matmul", 2.0 * size**3, "FLOP", samples, f"torch {name} matmul, {size}³", device)


_CEILINGS: dict[tuple[torch.device, int], Probe] = {}


def read_ceiling(device: str | torch.device | None = None, again: bool = False) -> Probe:
    """The best read probe of `device` so far in this process, measured on first use; `again` measures once more.

    On a CPU it is kept apart for each number of torch threads.
    """
    device = _device(device)
    key = device, torch.get_num_threads() if device.type == "cpu" else 0
    if again or key not in _CEILINGS:
        probes = [read_probe(device), *([_CEILINGS[key]] if key in _CEILINGS else [])]
        _CEILINGS[key] = max(probes, key=lambda probe: probe.rate)
    return _CEILINGS[key]
