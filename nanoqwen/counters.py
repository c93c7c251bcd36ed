"""The record `counters`: what Nsight Compute counts for every GEMV kernel, beside what the SIMT machine counts.

`python -m nanoqwen.counters` launches every case once on a GPU, in order: it is the process that `ncu` watches.
"""

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen import kernels, records, simt
from nanoqwen.kernels.gemv import H200_SMS
from nanoqwen.paths import RECORDS as FOLDER
from nanoqwen.paths import REPO
from nanoqwen.records import Record

GEMV_SOURCES = (*records.with_headers("gemv_naive.cu", "gemv.cu"), "nanoqwen/kernels/gemv.py")
INT4_SOURCES = (
    *records.with_headers("int4_gemv.cu", "quantize_x.cu", "int4_gemm.cu", "int4_ring.cu"),
    "nanoqwen/kernels/int4.py",
    "nanoqwen/packing.py",
)
AWQ_SOURCES = (*records.with_headers("awq_dequantize.cu"), "nanoqwen/kernels/awq.py")
SOURCES = (*GEMV_SOURCES, "nanoqwen/counters.py")
KERNELS = ("gemv_naive", "gemv_coalesced", "gemv_vectorized", "gemv_unrolled", "gemv_rows", "gemv")
DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((256, 256), (129, 1536), (896, 896), (33, 4864))
METRICS = {
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
GLOBAL = tuple(METRICS)[:4]
"""The counts that must be equal. Of shared memory the compilers may load several words at once, so it may differ."""


class NoCounters(RuntimeError):
    """The hardware's counters cannot be read here; the message says why, and the way out."""


@dataclass(frozen=True)
class Case:
    """One launch."""

    kernel: str
    dtype: str
    rows: int
    cols: int

    def inputs(self, device: str | torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """w, x and y, in memory of their own."""
        make = torch.Generator().manual_seed(self.rows + self.cols)
        w, x = (torch.randn(size, generator=make) for size in ((self.rows, self.cols), (self.cols,)))
        return tuple(t.to(device, getattr(torch, self.dtype)) for t in (w, x, torch.zeros(self.rows)))

    def launch(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        # The same instance of the last step on every machine.
        chosen = {"sms": H200_SMS} if self.kernel == "gemv" else {}
        return getattr(kernels, self.kernel)(w, x, y, **chosen)

    def __str__(self) -> str:
        return f"{self.kernel} {self.dtype} {self.rows}x{self.cols}"


CASES = tuple(Case(k, d, *shape) for k in KERNELS for d in DTYPES for shape in SHAPES)


def simulate(case: Case) -> dict[str, int]:
    """The counts of the SIMT machine, by the names of `METRICS`.

    Raises:
        RuntimeError: an observer found a fault.
    """
    report = simt.observe(case.launch, *case.inputs("cpu"))
    if not report.clean:
        raise RuntimeError(f"{case}: the kernel is not clean:\n{report}")
    t = report.totals
    counts = (t.global_load_requests, t.global_load_sectors, t.global_store_requests, t.global_store_sectors)
    return dict(zip(METRICS, (*counts, t.shared_load_wavefronts, t.shared_store_wavefronts), strict=True))


def record_counters(folder: Path = FOLDER) -> Record | str:
    """Measure and save the record `counters`; where counters cannot be read, give simulated counts and say why."""
    with ThreadPoolExecutor(1) as pool:  # ncu works meanwhile, in a process of its own
        on_gpu = pool.submit(count_on_gpu, CASES)
        simulated = [simulate(case) for case in CASES]
    try:
        hardware_counts, version = on_gpu.result()
    except NoCounters as reason:
        return (
            f"{counts_table(list(zip(CASES, simulated, strict=True)))}\n"
            f"These counts are simulated, and no record was written: {reason}"
        )
    cases = []
    for case, ours, theirs in zip(CASES, simulated, hardware_counts, strict=True):
        difference = {name: ours[name] - theirs[name] for name in METRICS if ours[name] != theirs[name]}
        names = {"kernel": case.kernel, "dtype": case.dtype, "rows": case.rows, "cols": case.cols}
        cases.append({**names, "hardware": theirs, "simulated": ours, "difference": difference})
    protocol = (
        "ncu watched a process that launched every case once; only kernels named gemv were profiled. Requests and "
        "sectors are those of the load/store unit for global memory, wavefronts those for shared memory. The SIMT "
        "machine observed the same launches on the same inputs on a CPU; difference is simulated minus hardware, where "
        "it is not zero. Clocks left alone."
    )
    results = {"ncu": version, "metrics": METRICS, "gemv_sms": H200_SMS, "cases": cases}
    record = records.make("counters", results, protocol, SOURCES)
    path = records.save(record, folder)
    print(parity_table(record))
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


# The hardware


def count_on_gpu(cases: Sequence[Case], timeout: float = 300) -> tuple[list[dict[str, int]], str]:
    """The counts of each case from `ncu`, and its version.

    Raises:
        NoCounters: no GPU, no `ncu`, or the driver refuses. RuntimeError: `ncu` or the process it watched failed.
    """
    if not torch.cuda.is_available():
        raise NoCounters("there is no CUDA GPU here")
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoCounters("ncu is not on the PATH; it comes with the CUDA toolkit, or as Nsight Compute by itself")
    with tempfile.TemporaryDirectory() as work:
        log = Path(work) / "counts.csv"
        command = [
            ncu,
            "--clock-control",
            "none",
            "--metrics",
            ",".join(METRICS.values()),
            "--kernel-name",
            "regex:gemv",
        ]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += [sys.executable, "-m", "nanoqwen.counters"]
        try:
            done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, errors="replace", timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"ncu was not done after {timeout:g} s") from None
        text = log.read_text(errors="replace") if log.exists() else ""
    said = "\n".join((text, done.stdout, done.stderr))
    if "ERR_NVGPUCTRPERM" in said:
        raise NoCounters(
            "the driver lets only administrators read the counters (ERR_NVGPUCTRPERM); run it as one, or load the "
            "nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode:
        raise RuntimeError(f"ncu ended with exit status {done.returncode}:\n" + "\n".join(said.split("\n")[-30:]))
    try:
        return match(parse(text), cases), _version(ncu)
    except ValueError as error:
        tail = "\n".join(said.strip().split("\n")[-12:])
        raise RuntimeError(f"{error}; ncu's last words:\n{tail}") from None


def _version(ncu: str) -> str:
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version ([\d.]+)", said)
    return found[1] if found else "unknown"


def parse(text: str) -> list[tuple[str, dict[str, int]]]:
    """(kernel's name, counts by the names of `METRICS`) of each launch in the CSV that `ncu` writes, in order.

    Raises:
        ValueError: no table, a metric that is missing, or a count that is no whole number.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(r'"?ID"?,', line)), None)
    if start is None:
        raise ValueError("ncu wrote no table")
    rows = list(csv.reader(line for line in lines[start:] if line.strip() and not line.startswith("==")))
    header, body = rows[0], [row for row in rows[1:] if row and row[0].strip().isdigit()]  # the units' row has no ID
    if missing := [name for name in ("Kernel Name", *METRICS.values()) if name not in header]:
        raise ValueError(f"ncu's table lacks the column {missing[0]}")
    launches = []
    for row in body:
        cells = dict(zip(header, row, strict=False))
        counts = {name: _whole(cells.get(metric, ""), metric) for name, metric in METRICS.items()}
        launches.append((cells["Kernel Name"], counts))
    return launches


def _whole(text: str, metric: str) -> int:
    """'67,584' or '67584.00' → 67584."""
    plain = re.sub(r"[,\s\u00a0\u202f']", "", text)
    if not re.fullmatch(r"\d+(\.0*)?", plain):
        raise ValueError(f"ncu gives {metric} as {text!r}; it must be a whole number")
    return int(plain.split(".")[0])


def match(launches: Sequence[tuple[str, dict[str, int]]], cases: Sequence[Case]) -> list[dict[str, int]]:
    """The counts of each case: launches come in the order of the cases.

    Raises:
        ValueError: more or fewer launches than cases, or one of another kernel.
    """
    if len(launches) != len(cases):
        raise ValueError(f"ncu saw {len(launches)} launches of the kernels, not {len(cases)}")
    for i, ((name, _), case) in enumerate(zip(launches, cases, strict=True)):
        if base_name(name) != case.kernel:
            raise ValueError(f"launch {i} is {name!r} to ncu; it must be {case}")
    return [counts for _, counts in launches]


def base_name(name: str) -> str:
    """`gemv_naive` for 'void gemv_naive<float>(const T1 *, …)', and for '_Z10gemv_naiveIfEvPKT_'."""
    if mangled := re.match(r"_Z(\d+)", name):
        return name[mangled.end() : mangled.end() + int(mangled[1])]
    found = re.search(r"(\w+)\s*(?:[<(]|$)", name)
    return found[1] if found else name


def main() -> None:
    """Launch every case once, in order, and check what came out."""
    device = torch.device("cuda", 0)
    inputs = [case.inputs(device) for case in CASES]
    torch.cuda.synchronize()
    outputs = [case.launch(*tensors) for case, tensors in zip(CASES, inputs, strict=True)]
    torch.cuda.synchronize()
    for case, y, (w, x, _) in zip(CASES, outputs, inputs, strict=True):
        reference = w.double().cpu() @ x.double().cpu()
        error = ((y.double().cpu() - reference).norm() / reference.norm()).item()
        if not error < 1e-2:
            raise RuntimeError(f"{case} is off by {error:.3g} of the result's norm under ncu")


# Tables


def counts_table(rows: Sequence[tuple[Case, dict[str, int]]]) -> str:
    """Counts as a table of text."""
    lines = [f"{'launch':<36}" + "".join(f"{name.replace('_', ' '):>24}" for name in METRICS)]
    lines += [f"{case!s:<36}" + "".join(f"{counts[name]:>24,}" for name in METRICS) for case, counts in rows]
    return "\n".join(lines)


def parity_table(record: Record) -> str:
    """The record `counters` as a table in Markdown: one row for each kernel and shape, the dtypes side by side.

    A cell holds the hardware's count, and the SIMT machine's in brackets where it is another.
    """
    titles = ("load requests", "load sectors", "store requests", "store sectors", "shared wavefronts")
    lines = [f"| kernel | dtype | rows x columns | {' | '.join(titles)} |", f"|---|---|---|{'---:|' * len(titles)}"]
    for case in record.results["cases"]:
        theirs, ours = (_with_shared(case[machine]) for machine in ("hardware", "simulated"))
        cells = [f"{a:,}" if a == b else f"{a:,} ({b:,})" for a, b in zip(theirs, ours, strict=True)]
        lines.append(
            f"| `{case['kernel']}` | {case['dtype']} | {case['rows']} x {case['cols']} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _with_shared(counts: dict[str, int]) -> list[int]:
    return [*(counts[name] for name in GLOBAL), counts["shared_load_wavefronts"] + counts["shared_store_wavefronts"]]


if __name__ == "__main__":
    main()
