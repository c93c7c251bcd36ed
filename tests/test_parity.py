"""The SIMT machine counts what the hardware counted, and what Nsight Compute writes is read right."""

import importlib

import pytest
import torch

from nanoqwen import cli, counters, records, simt
from nanoqwen.counters import CASES, GLOBAL, METRICS, Case, NoCounters, base_name, match, parse, simulate
from nanoqwen.packing import PAGE_SIZE
from nanoqwen.readme import UNEQUAL_LOADS, WHY_UNEQUAL

gemv = importlib.import_module("nanoqwen.kernels.gemv")  # the module, not the function of that name

try:
    RECORD = records.load("counters", "NVIDIA H200")
except FileNotFoundError:
    RECORD = None
recorded = pytest.mark.skipif(RECORD is None, reason="there is no record of the hardware's counts yet")
RECORDED_CASES = RECORD.results["cases"] if RECORD else []

HEADER = ["ID", "Process ID", "Process Name", "Kernel Name", "Block Size", "Grid Size", *METRICS.values(), "CC"]


def line(*cells):
    return ",".join(f'"{cell}"' for cell in cells)


def launch(number, name, *counts):
    return line(number, 4242, "python3.11", name, "(128, 1, 1)", "(2, 1, 1)", *counts, "9.0")


NAIVE = "void gemv_naive<float>(const T1 *, const T1 *, T1 *, int, int)"
SAMPLE = "\n".join(
    [
        "==PROF== Connected to process 4242",
        "==WARNING== Found outstanding GPU clock reset.",
        line(*HEADER),
        line("", "", "", "", "", "", *["request", "sector"] * 2, "", "", ""),
        launch(0, NAIVE, "4,096", "67,584", 8, 32, 0, 0),
        "==PROF== Disconnected from process 4242",
        launch(1, "gemv(const T1 *, T1 *)", "1,024.00", "1 234 567", "12", "12", "1'032", "0"),
        "",
    ]
)


# Held to the hardware


def row_bytes(entry):
    return entry["cols"] // 2 if entry["dtype"] == "int4" else entry["cols"] * getattr(torch, entry["dtype"]).itemsize


FAMILIES = {"gemv": counters.KERNELS, "int4": counters.INT4_KERNELS, "awq": counters.AWQ_KERNELS}
FAMILIES["attention"] = counters.ATTENTION_KERNELS


@pytest.mark.parametrize("family", FAMILIES)
def test_the_record_holds_every_kernel_dtype_and_shape(family):
    seen = {
        Case(c["kernel"], c["dtype"], c["rows"], c["cols"]) for c in RECORDED_CASES if c["kernel"] in FAMILIES[family]
    }
    if not seen:
        pytest.skip(f"there is no record of the hardware's counts for {family} yet")
    assert seen == {case for case in CASES if case.kernel in FAMILIES[family]}


def test_there_are_cases_enough_to_tell_an_accident():
    for kernels in FAMILIES.values():
        for kernel in kernels:
            assert len({(case.rows, case.cols) for case in CASES if case.kernel == kernel}) >= 3
    assert {case.cols for case in CASES if case.dtype == "int4"} == {896, 1536, 3584, 4864}


@pytest.mark.parametrize("case", [case for case in CASES if case.kernel not in counters.KERNELS][::5], ids=str)
def test_a_case_s_reference_is_what_its_kernel_gives(case):
    tensors = case.inputs("cpu")
    y = case.launch(*tensors)
    assert y is tensors[-1]
    counters._check(str(case), y, case.reference(*tensors))
    with pytest.raises(RuntimeError, match="is off by"):
        counters._check(str(case), 1.1 * y, case.reference(*tensors))


@recorded
@pytest.mark.parametrize("entry", RECORDED_CASES, ids=lambda e: "{kernel}-{dtype}-{rows}x{cols}".format(**e))
def test_the_machine_counts_what_the_hardware_counted(entry):
    counts = simulate(Case(entry["kernel"], entry["dtype"], entry["rows"], entry["cols"]))
    assert counts == entry["simulated"]
    different = {name: counts[name] - entry["hardware"][name] for name in METRICS}
    assert {name: by for name, by in different.items() if by} == entry["difference"]
    if entry["kernel"] in PAGED:
        left_out = numbers_loaded(entry["kernel"], entry["rows"], entry["cols"])[1]
        assert [different[name] for name in GLOBAL] == [left_out, left_out, 0, 0]  # a number is a sector
    else:
        assert set(entry["difference"]) & set(GLOBAL) == UNEQUAL_LOADS.get((entry["kernel"], row_bytes(entry)), set())


@recorded
def test_the_unequal_loads_are_those_of_a_loop_unrolled_by_four():
    cases = [c for c in RECORDED_CASES if c["kernel"] == "gemv_vectorized" and row_bytes(c) == 1792]
    assert len(cases) == 2
    for case in cases:
        steps = [len(range(lane, case["cols"] // 8, 32)) for lane in range(32)]  # of 16-byte packs
        rest, unrolled = {n % 4 for n in steps} - {0}, {n - n % 4 for n in steps} - {0}
        assert case["simulated"]["load_requests"] == case["rows"] * 2 * max(steps)
        assert case["hardware"]["load_requests"] == case["rows"] * 2 * (sum(rest) + sum(unrolled))


def int4_cases(kernel):
    """Of each recorded case its entry, and for each lane the columns at which its loads of 32 weights start."""
    cases = [c for c in RECORDED_CASES if c["kernel"] == kernel]
    if not cases:
        pytest.skip(f"there is no record of the hardware's counts for {kernel} yet")
    return [(c, [list(range(32 * lane, c["cols"], 1024)) for lane in range(32)]) for c in cases]


def sectors(spans):
    """The sectors of one request: of each lane the first byte and how many."""
    return len({sector for first, size in spans for sector in range(first // 32, (first + size - 1) // 32 + 1)})


def steps(lanes):
    """What lanes that each have a list do together: first with first, and so on."""
    return [[lane[n] for lane in lanes if n < len(lane)] for n in range(max(map(len, lanes)))]


@recorded
def test_dp4a_loads_in_a_loop_unrolled_by_four_behind_one_for_the_rest():
    for case, lanes in int4_cases("int4_gemv_dp4a"):
        cols = case["cols"]
        unrolled = [lane[len(lane) % 4 :] for lane in lanes]
        rest = [lane[: len(lane) % 4] for lane in lanes]
        for machine, trips in (("simulated", steps(lanes)), ("hardware", steps(rest) + steps(unrolled))):
            # quantize_x: 8 bytes a lane.
            requests, moved = -(-cols // 128), cols * 2 // 32
            for row in range(case["rows"]):
                for ks in trips:
                    requests += 5
                    moved += sectors((row * cols // 2 + k // 2, 16) for k in ks)
                    moved += sectors((k, 16) for k in ks) + sectors((k + 16, 16) for k in ks)  # x, a byte each
                    moved += sectors((2 * (row * (cols // 128) + k // 128), 2) for k in ks)
                    moved += sectors((4 * (k // 128), 4) for k in ks)
            assert (case[machine]["load_requests"], case[machine]["load_sectors"]) == (requests, moved)


@recorded
def test_of_magic_s_scales_the_machine_counts_a_lane_s_next_load_for_one_that_it_skips():
    for case, lanes in int4_cases("int4_gemv_magic"):
        rows, cols = case["rows"], case["cols"]
        counts = {"hardware": 0, "simulated": 0}
        for first in range(0, rows, 2):
            pair = (first, min(first + 1, rows - 1))
            for k0 in range(0, cols, 2048):  # two loads of each row
                mine = [[k for k in lane if k0 <= k < k0 + 2048] for lane in lanes]
                byte = {(row, k): 2 * (row * (cols // 128) + k // 128) for row in pair for lane in mine for k in lane}
                apart = [step for row in pair for step in steps([[(byte[row, k], 2) for k in lane] for lane in mine])]
                joined = steps([[(byte[row, k], 2) for row in pair for k in lane] for lane in mine])
                counts["hardware"] += sum(map(sectors, apart))
                counts["simulated"] += sum(map(sectors, joined))
        x = -(-rows // 2) * cols * 2 // 16  # every 16 bytes are a load of their own and half a sector
        weights = 2 * -(-rows // 2) * cols // 2 // 32
        for machine, scales in counts.items():
            assert case[machine]["load_sectors"] == weights + x + scales


PAGED = tuple(kernel for kernel in counters.ATTENTION_KERNELS if kernel.startswith("paged_attention"))


def numbers_loaded(kernel, tokens, cols):
    """The loads of page numbers that a kernel's source has, and how many of them the GPU does not make."""
    heads, kv_heads, head_dim = counters.ATTENTION_HEADS[cols]
    group, splits, warps = heads // kv_heads, counters.ATTENTION_SPLITS, 8
    pages = [min(PAGE_SIZE, tokens - first) for first in range(0, tokens, PAGE_SIZE)]  # how many tokens in each
    match kernel:
        case "paged_attention" | "paged_attention_split":  # not made: by a warp that copies nothing of the page
            idle = [max(0, group - -(-here * head_dim // 32)) for here in pages]
            return kv_heads * group * len(pages), kv_heads * sum(idle)
        case "paged_attention_prefetch":  # by a warp whose tokens the page lacks, if its lanes ask for one piece each
            rows = 32 * 8 // head_dim  # that 32 pieces of eight elements make
            idle = [sum(warp * rows % PAGE_SIZE >= here for warp in range(warps)) for here in pages]
            return kv_heads * warps * len(pages), kv_heads * sum(idle) if head_dim == 64 else 0
        case "paged_attention_mma":  # two at first, and one for each page; ordered loads, which the GPU makes as well
            return kv_heads * (2 * warps * splits + len(pages)), 0


@pytest.mark.parametrize("case", [case for case in CASES if case.kernel in PAGED], ids=str)
def test_page_numbers_are_loaded_here_as_the_source_says(case):
    lines = simt.observe(case.launch, *case.inputs("cpu")).lines
    requests, sectors = (
        sum(getattr(x, unit) for x in lines if x.buffers == ("table",)) for unit in ("requests", "sectors")
    )
    assert requests == sectors == numbers_loaded(case.kernel, case.rows, case.cols)[0]


def test_the_page_s_words_on_page_numbers_are_those_counted():
    left_out = {
        (kernel, *shape): numbers_loaded(kernel, *shape)[1] for kernel in PAGED for shape in counters.ATTENTION_SHAPES
    }
    words = " ".join(WHY_UNEQUAL.split())
    for rows in (49, 257):
        for kernel in ("paged_attention", "paged_attention_split"):
            assert (left_out[kernel, rows, 896], left_out[kernel, rows, 3584]) == (5 * 2, 3 * 4)
        assert left_out["paged_attention_prefetch", rows, 896] == 6 * 2
        assert left_out["paged_attention_prefetch", rows, 3584] == 0
    assert "so five load no number of the last page in each of two blocks, and of 128 dimensions three in each" in words
    assert "in six of eight warps it holds for no lane" in words
    assert not any(left_out["paged_attention_mma", *shape] for shape in counters.ATTENTION_SHAPES)


@recorded
def test_mma_reads_the_maxima_of_its_warps_once_more_here():
    for case in (c for c in RECORDED_CASES if c["kernel"] == "paged_attention_mma"):
        _, kv_heads, _ = counters.ATTENTION_HEADS[case["cols"]]
        blocks = kv_heads * min(counters.ATTENTION_SPLITS, -(-case["rows"] // (8 * PAGE_SIZE)))  # that have a page
        shared = {name: by for name, by in case["difference"].items() if name not in GLOBAL}
        more = {(49, 3584): 9, (257, 3584): 26}.get((case["rows"], case["cols"]), 0)  # that the GPU counted here
        assert shared == {"shared_load_wavefronts": blocks * 8 * 8 * 2 - more}
    assert "8 x 8 x 2 = 128 wavefronts a block" in WHY_UNEQUAL and "9 and 26 wavefronts more" in WHY_UNEQUAL


@recorded
def test_shared_memory_is_read_as_the_page_says():
    # Stores and reads of a row: by the page's words, of four warps and of two.
    for dtype, theirs, ours in (("float32", (4, 1), (4, 16)), ("bfloat16", (2, 1), (2, 3))):
        (case,) = (
            c for c in RECORDED_CASES if (c["kernel"], c["dtype"], c["rows"], c["cols"]) == ("gemv", dtype, 896, 896)
        )
        for machine, counts in (("hardware", theirs), ("simulated", ours)):
            seen = [case[machine][f"shared_{how}_wavefronts"] / 896 for how in ("store", "load")]
            assert tuple(seen) == counts
    assert "4 stores + 1 read = 5 wavefronts on the GPU, and\n4 + 16 = 20 here" in WHY_UNEQUAL
    assert "2 + 1 and 2 + 3" in WHY_UNEQUAL


def test_hand_counted_launches_come_out():
    # 256 rows of 256: 2 blocks of 4 warps. Each of the 256 steps loads w from 32 rows, and one word of x.
    counts = simulate(Case("gemv_naive", "float32", 256, 256))
    assert [counts[name] for name in GLOBAL] == [8 * 256 * 2, 8 * 256 * (32 + 1), 8, 8 * 4]
    # A warp a row, 512 bytes a request: two requests of w and two of x, 16 sectors each; one lane stores.
    counts = simulate(Case("gemv_vectorized", "float32", 256, 256))
    assert [counts[name] for name in GLOBAL] == [256 * 4, 256 * 4 * 16, 256, 256]
    # Of a row's 448 bytes of INT4 28 lanes load 16 each; four times 16 of x, 64 apart: every sector of the row's 1792
    # bytes, half of it each time; and 7 scales in 14 bytes, in one sector or two.
    rows = [{byte // 32 for byte in (14 * row, 14 * row + 13)} for row in range(33)]
    counts = simulate(Case("int4_gemv_warp", "int4", 33, 896))
    sectors = 33 * (14 + 4 * 28) + sum(map(len, rows))
    assert [counts[name] for name in GLOBAL] == [33 * 6, sectors, 33, 33]
    # A thread a word, eight elements of 2 bytes: a warp stores 512 bytes in a request.
    words = 128 * 896 // 8
    counts = simulate(Case("awq_v2", "bfloat16", 128, 896))
    assert [counts[name] for name in GLOBAL][2:] == [words // 32, words // 32 * 16]
    # 14 heads of 64 dimensions and 2 KV heads; 49 tokens, of which a warp reads one at a time, in two requests of 32
    # elements: for each head q, for each token k and v, and the length.
    counts = simulate(Case("attention_online", "bfloat16", 49, 896))
    requests = 14 * (2 + 49 * 4)
    assert [counts[name] for name in GLOBAL] == [requests + 14, 2 * requests + 14, 14 * 2, 14 * 4]
    # A pair a thread, 32 apart: a warp reads two rows of 128 bytes; cos and sin for q and k alone; it writes 64 bytes.
    counts = simulate(Case("rope_append", "bfloat16", 49, 896))
    scalars = 18 + 4  # the position; where k and v go, the table
    assert [counts[name] for name in GLOBAL] == [18 * 2 + 16 * 2 + scalars, (18 * 2 + 16 * 2) * 4 + scalars, 36, 72]


def test_bulk_copies_move_every_page_once():
    """Loads do not show them: a bulk copy is one request of one lane, of half a page."""
    for tokens in (48, 257):
        case = Case("paged_attention_ring", "bfloat16", tokens, 896)
        report = simt.observe(case.launch, *case.inputs("cpu"))
        pages = -(-tokens // 16)
        assert report.clean and report.totals.async_sectors * 32 == pages * 16 * case.kv_bytes // tokens
        assert report.totals.async_copies == pages * 2 * 2  # keys and values of two KV heads


@recorded
def test_the_recorded_long_context_reads_its_cache_once():
    if "attention" not in RECORD.results:
        pytest.skip("the bytes of attention have not been recorded yet")
    found = RECORD.results["attention"]
    for each in found["launches"]:
        if each["kernel"] != "combine_splits":
            assert each["dram_read_bytes"] == pytest.approx(found["kv_bytes"], rel=0.05)


def test_a_call_of_two_kernels_counts_as_their_sum():
    names = list(METRICS)
    case = Case("int4_gemv_dp4a", "int4", 33, 896)
    assert case.launched == ("quantize_x", "int4_gemv_dp4a")
    launches = [(name, dict(zip(names, range(start, start + 6), strict=True))) for name, start in
                (("quantize_x", 1), ("int4_gemv_dp4a(const unsigned int *, int)", 10))]  # fmt: skip
    assert match(launches, [case]) == [dict(zip(names, range(11, 23, 2), strict=True))]
    with pytest.raises(
        ValueError, match="launch 1 is 'quantize_x' to ncu; it must be int4_gemv_dp4a of int4_gemv_dp4a"
    ):
        match([launches[0], launches[0]], [case])


# What ncu writes


def test_the_table_is_read_between_words_units_and_separators():
    names = list(METRICS)
    assert parse(SAMPLE) == [
        (NAIVE, dict(zip(names, (4096, 67584, 8, 32, 0, 0), strict=True))),
        ("gemv(const T1 *, T1 *)", dict(zip(names, (1024, 1234567, 12, 12, 1032, 0), strict=True))),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table"),
        ("==PROF== No kernels were profiled.\n", "no table"),
        (SAMPLE.replace(METRICS["store_sectors"], "other"), f"lacks the column {METRICS['store_sectors']}"),
        (SAMPLE.replace("67,584", "n/a"), "'n/a'; it must be a whole number"),
        (SAMPLE.replace("67,584", "67.5"), "'67.5'; it must be a whole number"),
        (SAMPLE.replace("67,584", ""), "''; it must be a whole number"),
    ],
)
def test_a_table_that_cannot_be_trusted_is_refused(text, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        parse(text)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        (NAIVE, "gemv_naive"),
        ("gemv_rows", "gemv_rows"),
        ("void gemv<__nv_bfloat16, 32, 7>(const T1 *, const T1 *, T1 *, int, int)", "gemv"),
        ("_Z10gemv_naiveIfEvPKT_S2_PS0_ii", "gemv_naive"),
        ("void at::native::gemv_other<float>(int)", "gemv_other"),
    ],
)
def test_a_kernel_is_known_by_its_plain_name(name, base):
    assert base_name(name) == base


def test_launches_are_matched_in_order_and_by_name():
    cases = [Case("gemv_naive", "float32", 1, 8), Case("gemv", "float32", 1, 8)]
    launches = parse(SAMPLE)
    assert match(launches, cases) == [counts for _, counts in launches]
    with pytest.raises(ValueError, match="2 launches of the kernels, not 1"):
        match(launches, cases[:1])
    with pytest.raises(ValueError, match=r"launch 0 is 'void gemv_naive.*must be gemv of gemv float32 1x8"):
        match(launches, cases[::-1])


# A machine whose counters cannot be read


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU to all appearances, and an `ncu` that does what a test says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def ncu(script):
        (tmp_path / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ncu").chmod(0o755)

    return ncu


def test_without_a_gpu_counts_are_simulated_and_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(counters, "CASES", CASES[:2])
    answer = counters.record_counters(tmp_path)
    assert "4,096" in answer and "67,584" in answer
    assert "simulated, and no record was written: there is no CUDA GPU here" in answer
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_it_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for program in (*gemv._NAIVE.values(), *gemv._LADDER.values()):
        monkeypatch.setattr(program, "_simt", None)
    assert cli.main(["record", "counters"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("nanoqwen record: no C++ compiler") and said.count("\n") == 1


def test_without_ncu_it_says_where_it_comes_from(gpu):
    with pytest.raises(NoCounters, match="ncu is not on the PATH; it comes with the CUDA toolkit"):
        counters.count_on_gpu(CASES)


def test_counters_that_the_driver_refuses_are_told_with_the_way_out(gpu):
    gpu("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1")
    with pytest.raises(NoCounters, match=r"ERR_NVGPUCTRPERM.*NVreg_RestrictProfilingToAdminUsers=0"):
        counters.count_on_gpu(CASES)


def test_a_failing_ncu_is_quoted(gpu):
    gpu("echo 'something new is wrong' >&2; exit 9")
    with pytest.raises(RuntimeError, match=r"exit status 9:[\s\S]*something new is wrong"):
        counters.count_on_gpu(CASES)
    gpu("exit 0")
    with pytest.raises(RuntimeError, match="wrote no table"):
        counters.count_on_gpu(CASES)


def test_counts_become_a_record_with_the_differences(gpu, monkeypatch, tmp_path):
    cases = (Case("gemv_naive", "float32", 256, 256), Case("gemv", "bfloat16", 33, 256))
    simulated = [simulate(case) for case in cases]
    seen = [dict(counts) for counts in simulated]
    seen[1]["shared_load_wavefronts"] += 3
    rows = [launch(i, f"void {c.kernel}<T>()", *s.values()) for i, (c, s) in enumerate(zip(cases, seen, strict=True))]
    (tmp_path / "table").write_text("\n".join([line(*HEADER), *rows]))
    gpu(
        'case "$*" in *--version*) echo "Version 2025.3.1.0 (build 1)"; exit 0;; esac\n'
        f'while [ "$1" != --log-file ]; do shift; done; cp {tmp_path / "table"} "$2"'
    )
    environment = {
        "device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.13.0", "state": {}, "commit": None,
        "dirty": None, "date": "2025-06-01T12:00:00Z",
    }  # fmt: skip
    monkeypatch.setattr(records, "record_environment", lambda device=None: environment)
    monkeypatch.setattr(counters, "CASES", cases)
    monkeypatch.setattr(counters, "issue_on_gpu", lambda: ISSUED)
    monkeypatch.setattr(counters, "attention_on_gpu", lambda: {})
    record = counters.record_counters(tmp_path / "records")
    assert records.load("counters", "NVIDIA H200", tmp_path / "records") == record
    assert record.results["ncu"] == "2025.3.1.0"
    assert [case["difference"] for case in record.results["cases"]] == [{}, {"shared_load_wavefronts": -3}]
    table = counters.parity_table(record)
    assert "| `gemv_naive` | float32 | 256 x 256 | 4,096 | 67,584 | 8 | 32 | 0 |" in table
    assert "| 3 (0) |" in table
    assert "0.024     55.5    71.2     70.1    27.0" in counters.issue_table(record)


FIGURES = ("int4_gemm_mma", 1e5, 55.5, 71.2, 7.01e7, 3e5, 27e3)
ISSUED = {
    "rows": 37888,
    "cols": 3584,
    "metrics": counters.ISSUE,
    "launches": [dict(zip(("kernel", *counters.ISSUE), FIGURES, strict=True))],
}
LADDER = [
    "int4_gemv_naive", "int4_gemv_warp", "int4_gemv_prmt", "quantize_x", "int4_gemv_dp4a", "int4_gemv_magic",
    "void int4_gemm_mma<(int)128, (int)4, (int)2>(const uint4 *)", "int4_gemm_ring<128, 2>(const uint4 *)", "gemv<T>()",
]  # fmt: skip


def test_instructions_and_bytes_of_the_ladder_are_read_launch_by_launch(gpu, tmp_path):
    header = line(*HEADER[:6], *counters.ISSUE.values())
    rows = [launch(i, name, "1,000", 45.25, 60, "7e1", 0, "9 000")[: -len(',"9.0"')] for i, name in enumerate(LADDER)]

    def write(rows):
        (tmp_path / "table").write_text("\n".join([header, *rows]).replace("7e1", "70,000,000"))

    write(rows)
    gpu(
        'case "$*" in *--version*) exit 0;; *"nanoqwen.counters issue"*) ;; *) exit 1;; esac\n'
        f'while [ "$1" != --log-file ]; do shift; done; cp {tmp_path / "table"} "$2"'
    )
    found = counters.issue_on_gpu()
    assert [each["kernel"] for each in found["launches"]] == [base_name(name) for name in LADDER]
    figures = {"instructions": 1000, "issue_percent": 45.25, "dram_percent": 60, "dram_read_bytes": 7e7}
    assert found["launches"][0] == {
        "kernel": "int4_gemv_naive", **figures, "dram_written_bytes": 0, "nanoseconds": 9000,
    }  # fmt: skip
    write(rows[1:])
    with pytest.raises(RuntimeError, match=r"ncu saw int4_gemv_warp, .*, not int4_gemv_naive, "):
        counters.issue_on_gpu()


def test_bytes_of_a_long_context_are_read_launch_by_launch(gpu, tmp_path):
    names = ["void paged_attention_ring<x, 128, 7, true>(int)", "combine_splits<x>()", "paged_attention_mma<x>()"]
    rows = [launch(i, name, 1000, 45.25, 60, 70_000_000, 0, 9000)[: -len(',"9.0"')] for i, name in enumerate(names)]
    (tmp_path / "table").write_text("\n".join([line(*HEADER[:6], *counters.ISSUE.values()), *rows]))
    gpu(
        'case "$*" in *--version*) exit 0;; *"nanoqwen.counters attention"*) ;; *) exit 1;; esac\n'
        f'while [ "$1" != --log-file ]; do shift; done; cp {tmp_path / "table"} "$2"'
    )
    found = counters.attention_on_gpu()
    assert found["kv_bytes"] == 32768 * 4 * 2 * 128 * 2
    assert [each["kernel"] for each in found["launches"]] == [base_name(name) for name in names]
    assert found["launches"][0]["dram_read_bytes"] == 7e7


@recorded
def test_the_recorded_ladder_reads_its_matrix_once():
    if "issue" not in RECORD.results:
        pytest.skip("the ladder's instructions have not been recorded yet")
    found = RECORD.results["issue"]
    matrix = found["rows"] * found["cols"] / 2 * (1 + 4 / 128)
    for each in found["launches"]:
        if each["kernel"] not in ("gemv", "quantize_x", "int4_gemv_naive"):
            assert each["dram_read_bytes"] == pytest.approx(matrix, rel=0.03)


def test_the_watched_process_launches_every_case_in_order(monkeypatch):
    order = []
    monkeypatch.setattr(torch, "device", lambda *a: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(counters, "CASES", CASES[::9])
    launch = Case.launch
    monkeypatch.setattr(Case, "launch", lambda self, *tensors: (order.append(self), launch(self, *tensors))[1])
    counters.main()
    assert order == list(CASES[::9])
    monkeypatch.setattr(Case, "launch", lambda self, *tensors: tensors[-1])
    with pytest.raises(RuntimeError, match="is off by 1 of the result's norm"):
        counters.main()
