"""The record `counters`: what Nsight Compute counts for every kernel, beside what the SIMT machine counts, and the
instructions and bytes that the INT4 ladder takes on a large matrix, and those of attention over a long context.

`python -m nanoqwen.counters` launches every case once on a GPU, in order, `python -m nanoqwen.counters issue` the
ladder and `... attention` attention: they are the processes that `ncu` watches.
"""

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen import kernels, records, simt
from nanoqwen.awq import dequantize_reference
from nanoqwen.kernels.gemv import H200_SMS
from nanoqwen.kernels.int4 import choose
from nanoqwen.packing import FRAGMENT, GROUP_SIZE, PAGE_SIZE, pack, tile_scales
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
ATTENTION_SOURCES = (
    *records.with_headers("attention.cu", "paged_attention.cu", "paged_attention_ring.cu", "paged_attention_mma.cu"),
    *records.with_headers("rope_append.cu"),
    "nanoqwen/kernels/attention.py",
    "nanoqwen/packing.py",
)
SOURCES = tuple(dict.fromkeys((*GEMV_SOURCES, *INT4_SOURCES, *AWQ_SOURCES, *ATTENTION_SOURCES, "nanoqwen/counters.py")))
KERNELS = ("gemv_naive", "gemv_coalesced", "gemv_vectorized", "gemv_unrolled", "gemv_rows", "gemv")
DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((256, 256), (129, 1536), (896, 896), (33, 4864))
INT4_KERNELS = (*(f"int4_gemv_{step}" for step in ("naive", "warp", "prmt", "dp4a", "magic")), "int4_gemm_mma")
INT4_SHAPES = ((33, 896), (16, 1536), (33, 3584), (17, 4864))  # rows, columns
AWQ_KERNELS = ("awq_v1", "awq_v2", "awq_v3")
AWQ_DTYPES = ("bfloat16", "float16")
AWQ_SHAPES = ((128, 896), (256, 256), (384, 1536))  # in, out
ATTENTION_KERNELS = (
    "rope_append",
    "attention_online",
    *(f"paged_attention{step}" for step in ("", "_split", "_prefetch", "_mma")),
)
"""Those whose loads are loads: copies to shared memory that go on by themselves are counted elsewhere on a GPU."""
ATTENTION_SHAPES = tuple((tokens, cols) for tokens in (49, 257) for cols in (896, 3584))  # tokens, heads * head_dim
ATTENTION_HEADS = {896: (14, 2, 64), 3584: (28, 4, 128)}  # query heads, KV heads, head_dim
ATTENTION_SPLITS = 3
ISSUE_SHAPE = (37888, 3584)
ISSUE_ATTENTION = (32768, 3584)
METRICS = {
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
ISSUE = {
    "instructions": "smsp__inst_executed.sum",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
"""What tells whether instructions or the memory hold a kernel up. The time is that under ncu, at whatever clocks."""
GLOBAL = tuple(METRICS)[:4]
"""The counts that must be equal. Of shared memory the compilers may load several words at once, so it may differ."""


class NoCounters(RuntimeError):
    """The hardware's counters cannot be read here; the message says why, and the way out."""


@dataclass(frozen=True)
class Case:
    """One call of a kernel's function, as the CUDA source calls the kernel. `dtype` int4: fp16 x and scales.

    Of attention, `rows` are the tokens, and `cols` the query heads times their dimensions.
    """

    kernel: str
    dtype: str
    rows: int
    cols: int

    @property
    def launched(self) -> tuple[str, ...]:
        """The kernels that the call launches, in order."""
        if self.kernel in ("paged_attention_split", "paged_attention_prefetch", "paged_attention_ring"):
            return (self.kernel, "combine_splits")
        return ("quantize_x", self.kernel) if self.kernel == "int4_gemv_dp4a" else (self.kernel,)

    @property
    def is_attention(self) -> bool:
        return "attention" in self.kernel or self.kernel == "rope_append"

    @property
    def kv_bytes(self) -> int:
        """Of attention: the keys and values, once each."""
        _, kv_heads, head_dim = ATTENTION_HEADS[self.cols]
        return self.rows * kv_heads * 2 * head_dim * getattr(torch, self.dtype).itemsize

    def inputs(self, device: str | torch.device) -> tuple[Tensor, ...]:
        """Weights, x where there is one, and y, in memory of their own. Of attention, all but the workspace."""
        make = torch.Generator().manual_seed(self.rows + self.cols)
        if self.is_attention:
            return tuple(t.to(device) for t in self._attention(make))
        if self.dtype == "int4":
            values, scales = self._int4(make)
            tiled = self.kernel == "int4_gemm_mma"
            weights = (pack(values, FRAGMENT), tile_scales(scales)) if tiled else (pack(values), scales)
            made = (*weights, torch.randn(self.cols, generator=make).half(), torch.zeros(self.rows))
        elif self.kernel in AWQ_KERNELS:
            groups, words = self.rows // GROUP_SIZE, self.cols // 8
            numbers = torch.randint(-(2**31), 2**31, (self.rows + groups, words), generator=make, dtype=torch.int32)
            qweight, qzeros = (part.clone() for part in numbers.split((self.rows, groups)))
            scales = (torch.rand(groups, self.cols, generator=make) * 0.03).half()
            made = (qweight, qzeros, scales, torch.zeros(self.rows, self.cols, dtype=getattr(torch, self.dtype)))
        else:
            w, x = (torch.randn(size, generator=make) for size in ((self.rows, self.cols), (self.cols,)))
            made = tuple(t.to(getattr(torch, self.dtype)) for t in (w, x, torch.zeros(self.rows)))
        return tuple(t.to(device) for t in made)

    def launch(self, *tensors: Tensor) -> Tensor:
        # The same instance of the last steps on every machine.
        *given, out = tensors
        if self.is_attention:
            how = {} if self.kernel in ATTENTION_KERNELS[:3] else {"splits": ATTENTION_SPLITS}
            return getattr(kernels, self.kernel)(*given, out, **how)
        if self.kernel in AWQ_KERNELS:
            return getattr(kernels, f"awq_dequantize_{self.kernel.removeprefix('awq_')}")(*given, out)
        if self.kernel == "int4_gemm_mma":
            tiles = choose(16 * -(-self.rows // 16), H200_SMS)
            return kernels.int4_gemm_mma(*given, out, rows=self.rows, shape=tiles)
        chosen = {"sms": H200_SMS} if self.kernel == "gemv" else {}
        return getattr(kernels, self.kernel)(*given, out, **chosen)

    def reference(self, *tensors: Tensor) -> Tensor:
        """What `launch` should give for the same tensors, in float64 on the CPU."""
        first, *rest = (tensor.cpu() for tensor in tensors)
        if self.is_attention:
            return self._attended(first, *rest)
        if self.kernel in AWQ_KERNELS:
            return dequantize_reference(first, *rest[:2], torch.float32).T.double()
        if self.dtype != "int4":
            return first.double() @ rest[0].double()
        values, scales = self._int4(torch.Generator().manual_seed(self.rows + self.cols))
        return (values.double() * scales.double().repeat_interleave(GROUP_SIZE, dim=1)) @ rest[1].double()

    def _int4(self, make: torch.Generator) -> tuple[Tensor, Tensor]:
        values = torch.randint(-8, 8, (self.rows, self.cols), generator=make, dtype=torch.int8)
        scales = torch.rand(self.rows, self.cols // GROUP_SIZE, generator=make) * 0.03 + 1e-3
        return values, scales.half()

    def _attention(self, make: torch.Generator) -> tuple[Tensor, ...]:
        heads, kv_heads, head_dim = ATTENTION_HEADS[self.cols]
        count, dtype = -(-self.rows // PAGE_SIZE), getattr(torch, self.dtype)
        pages = torch.randn(count + 2, kv_heads, 2, PAGE_SIZE, head_dim, generator=make).to(dtype)
        table = torch.randperm(count + 2, generator=make)[:count].int()
        q, out = torch.randn(heads, head_dim, generator=make).to(dtype), torch.zeros(heads, head_dim, dtype=dtype)
        length = torch.tensor([self.rows], dtype=torch.int32)
        if self.kernel == "rope_append":  # the last of the tokens
            qkv = torch.randn(heads + 2 * kv_heads, head_dim, generator=make)
            angles = torch.rand(self.rows, head_dim // 2, generator=make).repeat(1, 2)
            return qkv, angles.cos(), angles.sin(), length - 1, table, pages, out
        if self.kernel == "attention_online":
            return q, *self._contiguous(pages, table), length, out
        return q, pages, table, length, out

    def _contiguous(self, pages: Tensor, table: Tensor) -> Iterator[Tensor]:
        return (x.transpose(0, 1).flatten(1, 2)[:, : self.rows].contiguous() for x in pages[table.long()].unbind(2))

    def _attended(self, q: Tensor, *given: Tensor) -> Tensor:
        heads, kv_heads, _ = ATTENTION_HEADS[self.cols]
        if self.kernel == "rope_append":
            cos, sin = (x[-1].double() for x in given[:2])
            first, second = q[:heads].double().chunk(2, dim=1)
            return q[:heads].double() * cos + torch.cat((-second, first), dim=1) * sin
        k, v = given[:2] if self.kernel == "attention_online" else self._contiguous(*given[:2])
        scores = q.double().unflatten(0, (kv_heads, -1)) @ k.double().transpose(1, 2) * q.shape[1] ** -0.5
        return (scores.softmax(-1) @ v.double()).flatten(0, 1)

    def __str__(self) -> str:
        return f"{self.kernel} {self.dtype} {self.rows}x{self.cols}"


CASES = (
    *(Case(k, d, *shape) for k in KERNELS for d in DTYPES for shape in SHAPES),
    *(Case(k, "int4", *shape) for k in INT4_KERNELS for shape in INT4_SHAPES),
    *(Case(k, d, *shape) for k in AWQ_KERNELS for d in AWQ_DTYPES for shape in AWQ_SHAPES),
    *(Case(k, "bfloat16", *shape) for k in ATTENTION_KERNELS for shape in ATTENTION_SHAPES),
)
LONG_CONTEXT = tuple(Case(k, "bfloat16", *ISSUE_ATTENTION) for k in ("paged_attention_ring", "paged_attention_mma"))


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
        issue, attention = issue_on_gpu(), attention_on_gpu()
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
        "ncu watched a process that called every case once; only our kernels were profiled. Requests and sectors are "
        "those of the load/store unit for global memory, wavefronts those for shared memory; int4_gemv_dp4a includes "
        "quantize_x. The SIMT machine observed the same launches on the same inputs on a CPU; difference is simulated "
        "minus hardware, where it is not zero. issue: another such process, one launch of each step of the INT4 ladder "
        "and of the 16-bit gemv on one large matrix, in groups of 128, caches flushed by ncu. attention: a third, one "
        "call each of two kernels over a long context. In the cases of attention, rows are tokens, columns the "
        f"dimensions of all query heads, and there are {ATTENTION_SPLITS} splits. Clocks left alone."
    )
    results = {"ncu": version, "metrics": METRICS, "gemv_sms": H200_SMS, "cases": cases}
    results |= {"issue": issue, "attention": attention}
    record = records.make("counters", results, protocol, SOURCES)
    path = records.save(record, folder)
    print(f"{parity_table(record)}\n{issue_table(record)}")
    print(f"saved data/records/{path.parent.name}/{path.name}", flush=True)
    return record


# The hardware


def count_on_gpu(cases: Sequence[Case], timeout: float = 300) -> tuple[list[dict[str, int]], str]:
    """The counts of each case from `ncu`, and its version.

    Raises:
        NoCounters: no GPU, no `ncu`, or the driver refuses. RuntimeError: `ncu` or the process it watched failed.
    """
    return _watched([], METRICS, lambda text: match(parse(text), cases), timeout)


def issue_on_gpu(timeout: float = 300) -> dict:
    """Instructions, bytes and shares of `ISSUE` for each launch of the INT4 ladder on one large matrix.

    Raises:
        NoCounters, RuntimeError: as `count_on_gpu`.
    """
    names = [*(name for step in INT4_KERNELS for name in Case(step, "int4", 1, 1).launched), "int4_gemm_ring", "gemv"]
    rows, cols = ISSUE_SHAPE
    found, _ = _watched(["issue"], ISSUE, lambda text: _launches(text, names), timeout)
    return {"rows": rows, "cols": cols, "metrics": ISSUE, "launches": found}


def attention_on_gpu(timeout: float = 300) -> dict:
    """Instructions, bytes and shares of `ISSUE` for each launch of `LONG_CONTEXT`.

    Raises:
        NoCounters, RuntimeError: as `count_on_gpu`.
    """
    names = [name for case in LONG_CONTEXT for name in case.launched]
    tokens, cols = ISSUE_ATTENTION
    heads = dict(zip(("heads", "kv_heads", "head_dim"), ATTENTION_HEADS[cols], strict=True))
    found, _ = _watched(["attention"], ISSUE, lambda text: _launches(text, names), timeout)
    return {"tokens": tokens, **heads, "kv_bytes": LONG_CONTEXT[0].kv_bytes, "metrics": ISSUE, "launches": found}


def _launches(text: str, names: Sequence[str]) -> list[dict]:
    launches = parse(text, ISSUE, _number)
    if [base_name(name) for name, _ in launches] != list(names):
        raise ValueError(f"ncu saw {', '.join(base_name(name) for name, _ in launches)}, not {', '.join(names)}")
    return [{"kernel": name, **figures} for name, (_, figures) in zip(names, launches, strict=True)]


def _watched(
    words: Sequence[str], metrics: Mapping[str, str], read: Callable[[str], list], timeout: float
) -> tuple[list, str]:
    """What `read` makes of the table that `ncu` writes about this module run with `words`, and ncu's version."""
    if not torch.cuda.is_available():
        raise NoCounters("there is no CUDA GPU here")
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoCounters("ncu is not on the PATH; it comes with the CUDA toolkit, or as Nsight Compute by itself")
    with tempfile.TemporaryDirectory() as work:
        log = Path(work) / "counts.csv"
        command = [ncu, "--clock-control", "none", "--metrics", ",".join(metrics.values())]
        command += ["--kernel-name", "regex:gemv|int4_|quantize_x|awq_v|attention|combine_splits|rope_append"]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += [sys.executable, "-m", "nanoqwen.counters", *words]
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
        return read(text), _version(ncu)
    except ValueError as error:
        tail = "\n".join(said.strip().split("\n")[-12:])
        raise RuntimeError(f"{error}; ncu's last words:\n{tail}") from None


def _version(ncu: str) -> str:
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version ([\d.]+)", said)
    return found[1] if found else "unknown"


def parse(
    text: str, metrics: Mapping[str, str] = METRICS, number: Callable[[str, str], float] | None = None
) -> list[tuple[str, dict[str, float]]]:
    """(kernel's name, counts by the names of `metrics`) of each launch in the CSV that `ncu` writes, in order.

    Args:
        number: the text of a cell and its metric → the number; by default it must be a whole one.

    Raises:
        ValueError: no table, a metric that is missing, or a count that is no such number.
    """
    number = number or _whole
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(r'"?ID"?,', line)), None)
    if start is None:
        raise ValueError("ncu wrote no table")
    rows = list(csv.reader(line for line in lines[start:] if line.strip() and not line.startswith("==")))
    header, body = rows[0], [row for row in rows[1:] if row and row[0].strip().isdigit()]  # the units' row has no ID
    if missing := [name for name in ("Kernel Name", *metrics.values()) if name not in header]:
        raise ValueError(f"ncu's table lacks the column {missing[0]}")
    launches = []
    for row in body:
        cells = dict(zip(header, row, strict=False))
        counts = {name: number(cells.get(metric, ""), metric) for name, metric in metrics.items()}
        launches.append((cells["Kernel Name"], counts))
    return launches


def _whole(text: str, metric: str) -> int:
    """'67,584' or '67584.00' → 67584."""
    value = _number(text, metric, "a whole number")
    if value != int(value):
        raise ValueError(f"ncu gives {metric} as {text!r}; it must be a whole number")
    return int(value)


def _number(text: str, metric: str, wanted: str = "a number") -> float:
    """'67,584.5' → 67584.5."""
    plain = re.sub(r"[,\s\u00a0\u202f']", "", text)
    if not re.fullmatch(r"\d+(\.\d*)?", plain):
        raise ValueError(f"ncu gives {metric} as {text!r}; it must be {wanted}")
    return float(plain)


def match(launches: Sequence[tuple[str, dict[str, int]]], cases: Sequence[Case]) -> list[dict[str, int]]:
    """The counts of each case, of all its launches together: they come in the order of the cases.

    Raises:
        ValueError: more or fewer launches than the cases make, or one of another kernel.
    """
    wanted = [(kernel, case) for case in cases for kernel in case.launched]
    if len(launches) != len(wanted):
        raise ValueError(f"ncu saw {len(launches)} launches of the kernels, not {len(wanted)}")
    counts = {case: dict.fromkeys(METRICS, 0) for case in cases}
    for i, ((name, found), (kernel, case)) in enumerate(zip(launches, wanted, strict=True)):
        if base_name(name) != kernel:
            raise ValueError(f"launch {i} is {name!r} to ncu; it must be {kernel} of {case}")
        counts[case] = {metric: counts[case][metric] + found[metric] for metric in METRICS}
    return list(counts.values())


def base_name(name: str) -> str:
    """`gemv_naive` for 'void gemv_naive<float>(const T1 *, …)', and for '_Z10gemv_naiveIfEvPKT_'."""
    if mangled := re.match(r"_Z(\d+)", name):
        return name[mangled.end() : mangled.end() + int(mangled[1])]
    found = re.search(r"(\w+)\s*(?:[<(]|$)", name)
    return found[1] if found else name


def main(cases: Sequence[Case] | None = None) -> None:
    """Call every case once, in order, and check what came out."""
    cases, device = CASES if cases is None else cases, torch.device("cuda", 0)
    inputs = [case.inputs(device) for case in cases]
    torch.cuda.synchronize()
    outputs = [case.launch(*tensors) for case, tensors in zip(cases, inputs, strict=True)]
    torch.cuda.synchronize()
    for case, y, tensors in zip(cases, outputs, inputs, strict=True):
        _check(str(case), y, case.reference(*tensors))


def issue() -> None:
    """Call every step of the INT4 ladder and the 16-bit `gemv` once on a large matrix, and check what came out."""
    from nanoqwen.bench_int4 import GEMM, GEMV, Weights  # here: that module names this one's sources

    weights = Weights(*ISSUE_SHAPE, torch.device("cuda", 0), rotate_bytes=0, tokens=1)
    fragments, x = weights.fragments[0], weights.x[0]
    calls = {
        name: lambda kernel=kernel: kernel(weights.shuffled[0], weights.scales[0], x) for name, kernel in GEMV.items()
    }
    calls |= {name: lambda kernel=kernel: kernel(*fragments, x) for name, kernel in GEMM.items() if name != "pdl"}
    calls["gemv"] = lambda: kernels.gemv(weights.bf16[0], weights.x_bf16[0])
    reference = next(weights.products(None))
    for name, call in calls.items():
        _check(name, call(), reference)


def _check(name: str, y: Tensor, reference: Tensor) -> None:
    y, reference = y.double().cpu(), reference.cpu()
    error = ((y - reference).norm() / reference.norm()).item()
    if not error < 2e-2:
        raise RuntimeError(f"{name} is off by {error:.3g} of the result's norm under ncu")


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


def issue_table(record: Record) -> str:
    """The section `issue` of the record as a table of text."""
    found = record.results["issue"]
    weights = found["rows"] * found["cols"]
    lines = [f"{'kernel':<18} {'instr. a weight':>16} {'issue %':>8} {'DRAM %':>7} {'MB read':>8} {'µs':>7}"]
    for f in found["launches"]:
        lines.append(
            f"{f['kernel']:<18} {32 * f['instructions'] / weights:>16.3f} {f['issue_percent']:>8.1f} "
            f"{f['dram_percent']:>7.1f} {f['dram_read_bytes'] / 1e6:>8.1f} {f['nanoseconds'] / 1e3:>7.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    {"issue": issue, "attention": lambda: main(LONG_CONTEXT), "": main}[" ".join(sys.argv[1:])]()
