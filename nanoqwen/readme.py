"""What pages show of the records: `python -m nanoqwen.readme` writes tables and figures from data/records into them.

A page marks the place with two comments. Where a record is missing the place stays empty.
"""

import hashlib
import io
import os
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from nanoqwen import bench_int4, records
from nanoqwen.bench_e2e import OURS
from nanoqwen.bench_gemv import ladder
from nanoqwen.config import SHAPES
from nanoqwen.counters import GLOBAL, parity_table
from nanoqwen.engine_weights import step_ledger
from nanoqwen.hardware import spec_for
from nanoqwen.paths import DATA, REPO
from nanoqwen.records import Record
from nanoqwen.roofline import OKABE_ITO, Bar, plot_mbu
from nanoqwen.scoreboard_pictures import launches_of
from nanoqwen.step_pictures import region_bytes

SHAPE = "7B gate_up"
SCORED, DEPTH = "qwen2.5-coder-7b", "128"
RUNG = "pdl"  # of the record `engine`: as the engine launches by default
GOAL = 0.8  # of the datasheet's bandwidth
GPU = "NVIDIA H200"
CHANGES = {
    "naive": "one thread a row",
    "coalesced": "a warp a row: neighbouring lanes read neighbours",
    "vectorized": "16 bytes a lane",
    "unrolled": "four loads in flight",
    "rows": "two rows a warp",
    "gemv": "the launch chosen for the shape",
    "torch": "cuBLAS",
}
INT4_CHANGES = {
    "naive": "one thread a row",
    "warp": "a warp a row, 16 bytes a lane, unpacked by shifts",
    "prmt": "unpacked by byte permutes",
    "dp4a": "x in INT8, four products an instruction",
    "magic": "unpacked into half2, two products an instruction",
    "mma": "tensor cores, one to eight tokens",
    "ring": "the weights through a ring of bulk copies",
    "pdl": "the ring fills while the launch before it still runs",
    "torch_int4": "`_weight_int4pack_mm`",
    "torch_bf16": "cuBLAS, 16-bit weights",
}
CONTENDERS = {
    "transformers": ("`transformers`", "bf16", "transformers\nbf16"),
    "torch-bf16-eager": ("PyTorch, static cache, launched one by one", "bf16", "PyTorch\nbf16, eager"),
    "torch-bf16-graph": ("PyTorch, static cache, CUDA graph", "bf16", "PyTorch\nbf16, CUDA graph"),
    "torch-bf16": ("PyTorch, static cache, `torch.compile`, CUDA graph", "bf16", "PyTorch\nbf16, compiled"),
    "torch-int4": (
        "PyTorch's INT4 kernel, `torch.compile`, CUDA graph",
        "INT4 g128, bf16 head",
        "PyTorch\nINT4, CUDA graph",
    ),
    "llama.cpp": ("llama.cpp", "its GGUF file's", "llama.cpp\nGGUF"),
    OURS: ("**nanoqwen**", "INT4 g128, bf16 head", "nanoqwen\nINT4, CUDA graph"),
}
"""What each contender of the scoreboard is, the weights that it reads, and both in a figure."""


def markers(name: str) -> tuple[str, str]:
    """The comments between which the section `name` stands."""
    return f"<!-- {name}: written by `make format` -->", f"<!-- end of {name} -->"


def with_section(page: str, name: str, body: str) -> str:
    """The page's text with its section `name` brought up to date.

    Raises:
        ValueError: the markers are missing.
    """
    start, end = markers(name)
    before, found_start, rest = page.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise ValueError(f"the page lacks the lines {start} and {end}")
    return f"{before}{start}\n{body}{end}{after}"


def _paragraph(text: str) -> list[str]:
    """Lines of at most 120 columns, and an empty one; nothing for no text."""
    return [*textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False), ""] if text else []


def scoreboard_section(record: Record) -> str:
    """The README's table of whole decode steps, ours beside others, in Markdown, with its figure."""
    contenders, entry = _scored(record), record.results["models"][SCORED]
    probe, datasheet = record.results["ceilings"]["read_probe"]["bytes_per_s"], spec_for(record.device).bandwidth
    lines = [
        "## How fast",
        "",
        *_paragraph(
            f"The 7B's shape with {entry['weights']} weights, one sequence, greedy, sampling included, {DEPTH} tokens "
            f"in the cache. Recorded on one {record.device}, all in turn in one process. Its datasheet says "
            f"{datasheet / 1e9:,.0f} GB/s; the read probe, a kernel that only reads, moves {probe / 1e9:,.0f}."
        ),
        "| | weights | GB a token | tok/s | % of the datasheet | % of the read probe | time a token, over ours "
        "| first token of a 512-token prompt, ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (each, f) in contenders.items():
        over = f"{f['over_ours']['p50']:.2f}" if "over_ours" in f else "1"
        lines.append(
            f"| {' | '.join(CONTENDERS[name][:2])} | {f['bytes'] / 1e9:.2f} | {f['tokens_per_s']:,.0f} "
            f"| {100 * f['mbu_datasheet']:.1f} | {100 * f['mbu_probe']:.1f} | {over} "
            f"| {1e3 * each['ttft']['p50']:.1f} |"
        )
    picture = FIGURES["scoreboard"][0].relative_to(REPO).as_posix()
    lines += [
        "",
        f"![Tokens a second and the share of the memory's bandwidth]({picture})",
        "",
        *_paragraph(_sooner(record)),
        *_paragraph(_missing(record)),
        *_paragraph(
            "Lesson [06](notebooks/06_graph_capture.ipynb) shows what each way to launch a step is worth, lesson "
            "[07](notebooks/07_scoreboard.ipynb) other depths, the memory of each, and how all of this was timed."
        ),
    ]
    return "\n".join(lines) + "\n"


def _called(name: str) -> str:
    return CONTENDERS[name][2].replace("\n", " ")


def _sooner(record: Record) -> str:
    """Whose first token comes before ours; empty where it is nobody's."""
    peers = record.results["models"][SCORED]["contenders"].items()
    ahead = {name: e["ttft_over_ours"]["p50"] for name, e in peers if e.get("ttft_over_ours", {"p50": 1})["p50"] < 1}
    if not ahead:
        return ""
    shares = sorted({f"{share:.2f}" for share in ahead.values()})
    share = shares[0] if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
    return (
        f"The first token comes sooner from {'; '.join(map(_called, ahead))}: {share} of our time. Ours "
        "dequantises every matrix of the prompt first."
    )


def _missing(record: Record) -> str:
    """What the record does not show: peers that were left out or not run, and the text of the engine."""
    results, words = record.results, []
    if left := results["models"][SCORED]["left_out"]:
        words.append(f"Left out: {'; '.join(f'{_called(name)} ({why})' for name, why in left.items())}.")
    ran = {name for entry in results["models"].values() for name in (*entry["contenders"], *entry["left_out"])}
    if never := [_called(name) for name in results["peers"] if name not in ran]:
        words.append(f"Not in this record: {'; '.join(never)}.")
    if absent := results["left_out"]:
        words.append(
            f"Real weights are timed too where they are there, but {', '.join(absent)} was not on that machine."
        )
    if ladder := _record("ladder"):
        r = ladder.results
        words.append(
            f"With the real weights of {r['model']}, {r['equal']} of {r['prompts']} prompts get the {r['tokens']} "
            f"tokens that the same INT4 model writes in PyTorch; ties, where the two part: {len(r['ties'])}."
        )
    else:
        words.append(
            "The engine's text on real weights, beside the same INT4 model in PyTorch, is not recorded yet: "
            "`nanoqwen record ladder` does that."
        )
    return " ".join(words)


def losses_section(record: Record) -> str:
    """The README's list of what the engine does not reach, in Markdown: the record `engine`, by shape."""
    datasheet, probe = spec_for(record.device).bandwidth, record.results["ceilings"]["read_probe"]["bytes_per_s"]
    steps = {size: entry["depths"][DEPTH] for size, entry in record.results["sizes"].items()}
    large = steps["7B"]
    f, small = large["rungs"][RUNG], ("qkv_proj", "attention", "o_proj")
    seconds = {name: region["seconds"]["p50"] for name, region in large["regions"].items()}
    taken = sum(seconds[name] for name in small) / (sum(seconds.values()) + large["gap"]["p50"])
    nbytes = region_bytes(step_ledger(SHAPES[SCORED], int(DEPTH)), seconds)
    moved = sum(nbytes[name] for name in small) / sum(nbytes.values())
    lines = [
        "### Where we lose",
        "",
        *_paragraph(
            f"The goal for the 7B is {100 * GOAL:.0f} % of the datasheet's bandwidth: "
            f"{GOAL * datasheet / large['bytes']:,.0f} tok/s. By itself the engine reaches {f['tokens_per_s']:,.0f}, "
            f"or {100 * f['mbu_datasheet']:.1f} %. The time over that of the bytes is a few microseconds for each "
            "launch, whatever the size of the model, so small models are the furthest from their bandwidth:"
        ),
        "| shape, random weights | launches a token | bytes at the probe's speed, µs | a token, µs | tok/s "
        "| % of the read probe | over the bytes, µs a launch |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for size, entry in steps.items():
        f, launches, floor = entry["rungs"][RUNG], launches_of(entry), entry["bytes"] / probe
        seconds = f["seconds"]["p50"]
        lines.append(
            f"| {size} | {launches} | {1e6 * floor:,.0f} | {1e6 * seconds:,.0f} | {f['tokens_per_s']:,.0f} "
            f"| {100 * f['mbu_probe']:.1f} | {1e6 * (seconds - floor) / launches:.1f} |"
        )
    lines += [
        "",
        *_paragraph(
            f"Of the 7B's step the QKV product, attention and the output product move {100 * moved:.0f} % of the bytes "
            f"and take {100 * taken:.0f} % of the time. Fewer launches would help; one kernel that stays for all "
            "layers is no faster yet (lesson [06](notebooks/06_graph_capture.ipynb)). And one step is one sequence: "
            "past a few tokens a call, the kernels read the weights again (lesson "
            "[08](notebooks/08_dequantise_or_fuse.ipynb))."
        ),
    ]
    return "\n".join(lines) + "\n"


def _scored(record: Record) -> dict[str, tuple[dict, dict]]:
    """The contenders at `DEPTH`, the slowest first: all of each, and its figures there."""
    found = record.results["models"][SCORED]["contenders"]
    there = {name: (each, each["depths"][DEPTH]) for name, each in found.items() if DEPTH in each["depths"]}
    return dict(sorted(there.items(), key=lambda item: item[1][1]["tokens_per_s"]))


def ladder_section(record: Record) -> str:
    """The README's table of the GEMV ladder, in Markdown, with its figure."""
    entry = record.results["shapes"][SHAPE]
    probe = record.results["ceilings"]["read_probe"]["bytes_per_s"]
    lines = [
        "## The ladder in 16 bits",
        "",
        *_paragraph(
            f"`y = W x` for the 7B's gate and up projections, {entry['rows']} × {entry['cols']} in bf16, weights cold. "
            f"Recorded on one {record.device}, whose read probe moves {probe / 1e9:,.0f} GB/s."
        ),
        "| kernel | what changed | µs | GB/s | % of the read probe | % of cuBLAS's speed |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for rung in ladder(record, SHAPE):
        name = rung.kernel if rung.kernel in ("gemv", "torch") else f"gemv_{rung.kernel}"
        lines.append(
            f"| `{name}` | {CHANGES[rung.kernel]} | {1e6 * rung.seconds:,.1f} | {rung.rate / 1e9:,.0f} "
            f"| {100 * rung.of_probe:.1f} | {100 * rung.of_torch:.0f} |"
        )
    lines += [
        "",
        "Such a large matrix needs the last step least; [lesson 03](notebooks/03_coalesced_gemv.ipynb) has the others.",
        "",
        f"![The ladder as a share of the read probe]({FIGURES['ladder'][0].relative_to(REPO).as_posix()})",
        "",
    ]
    return "\n".join(lines) + "\n"


def int4_section(record: Record) -> str:
    """The README's tables of the INT4 ladder, in Markdown."""
    shapes, probe = record.results["shapes"], record.results["ceilings"]["read_probe"]["bytes_per_s"]
    entry = shapes[SHAPE]
    lines = [
        "## The ladder in INT4",
        "",
        *_paragraph(
            f"The same matrix in INT4, groups of {record.results['group']}, cold, launches included. Recorded on one "
            f"{record.device}, whose read probe moves {probe / 1e9:,.0f} GB/s."
        ),
        "| kernel | what changed | µs | GB/s | % of the read probe | times torch's int4 | times cuBLAS in bf16 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for rung in bench_int4.ladder(record, SHAPE):
        name = _int4_name(rung.kernel)
        lines.append(
            f"| `{name}` | {INT4_CHANGES[rung.kernel]} | {1e6 * rung.seconds:,.1f} | {rung.rate / 1e9:,.0f} "
            f"| {100 * rung.of_probe:.1f} | {rung.of_torch_int4:.2f} | {rung.of_torch_bf16:.2f} |"
        )
    lines += [
        "",
        *_paragraph(
            "`pdl` is programmatic dependent launch, timed back to back as in a decode step: the kernel starts before "
            "its predecessor has ended, and fetches its first weights while it waits for x."
        ),
        *_paragraph(
            "The fastest kernel for each matrix. The last two columns are the time of eight tokens over that of one: "
            "with this kernel, and with `int4_gemm_mma`."
        ),
        "| matrix | rows × columns | kernel | µs | % of the read probe | times torch's int4 | eight tokens | `mma`'s |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for shape, entry in shapes.items():
        best, f = entry["best"], entry["cold"][entry["best"]]
        eight, mma = (
            f"{entry['tokens'][name]['8']['of_one']['p50']:.2f}" if name in entry["tokens"] else "–"
            for name in (best, "mma")
        )
        lines.append(
            f"| {shape} | {entry['rows']} × {entry['cols']} | `{_int4_name(best)}` | {1e6 * f['seconds']['p50']:,.1f} "
            f"| {100 * f['of_probe']:.1f} | {f['versus_torch_int4']['p50']:.2f} | {eight} | {mma} |"
        )
    return "\n".join([*lines, ""]) + "\n"


def _int4_name(kernel: str) -> str:
    if kernel.startswith("torch"):
        return kernel
    if kernel == "pdl":
        return "int4_gemm_ring(pdl=True)"
    return f"int4_gemm_{kernel}" if kernel in bench_int4.GEMM else f"int4_gemv_{kernel}"


# Where the compilers made different loops of one source: kernel, bytes of a row, and what differs.
UNEQUAL_LOADS = {
    ("gemv_vectorized", 1792): {"load_requests"},
    ("int4_gemv_dp4a", 1792): {"load_requests", "load_sectors"},
    ("int4_gemv_dp4a", 2432): {"load_sectors"},
    ("int4_gemv_magic", 1792): {"load_sectors"},
}
WHY_UNEQUAL = """\
**Where they differ, and why.** The count of `gemv_vectorized` at 896 columns of 16 bits: the GPU's compiler unrolls its
loop by four and puts a loop for the rest in front. Of a row's 112 packs half of the lanes have four and half have
three, so the two halves of a warp go different ways, in 4 + 3 steps instead of 4, with two loads each: 14 requests a
row instead of 8. The sectors, and so the bytes, are the same. The later steps of the ladder unroll by hand and do not
diverge.

`int4_gemv_dp4a` has such a loop too. At 3584 columns of INT4 a row has 112 packs again: 4 + 3 steps instead of 4, with
five loads each. The sectors differ as well, for half a warp asks for four scales of the weights and four of x, and
the other half for the rest of the same sector. At 4864 columns 24 lanes have five packs and eight have four: the 24 do
one in the loop for the rest and stay a step ahead of the eight. The requests are as many, but the eight scales of x in
each of the unrolled steps lie across two sectors instead of in one.

`int4_gemv_magic` at 3584 columns is counted wrong here, by eight sectors of scales. In the observed build the loops
over two rows and two loads stay loops; half of the lanes have no second load in the last step, and their first of the
next row is taken for a part of the other lanes' second load.

The kernels of attention over pages take a page's number from the table in every warp, needed or not. The GPU's compiler
moves such a load to where its answer is used, and whoever does not get there does not load. Both contexts end in a
page of one token. In `paged_attention` and `paged_attention_split` the load ends up behind the condition of the loop
that copies the page: a token of 64 dimensions keeps two of a block's seven warps busy, so five load no number of the
last page in each of two blocks, and of 128 dimensions three in each of four. In `paged_attention_prefetch` a lane
copies one piece of a page of 64 dimensions, and the load takes over the piece's condition: in six of eight warps it
holds for no lane. Of 128 dimensions a lane copies two pieces, and the load stays before both. In
`paged_attention_mma` the numbers are to be asked for while the length is on its way; there the compiler moved them
behind the branch that waits for it, until they became ordered loads (`ld.relaxed`), which stay where they are.

In shared memory `gemv` leaves a partial sum for each warp of a row, and all of the row's threads add them up. The GPU's
compiler puts these additions behind the condition of the last line: only the warp that writes `y` still reads, all sums
in one wide load. The CPU's compiler leaves them, or all but the last, where they stand: every warp reads, a sum at a
time. Of a row that four warps share (float32, 896 x 896) that makes 4 stores + 1 read = 5 wavefronts on the GPU, and
4 + 16 = 20 here; of one that two share (bfloat16), 2 + 1 and 2 + 3.

In `paged_attention_mma` every warp needs the maxima of its block's eight warps twice, those of two heads a lane. The
GPU's compiler keeps them; the observed build reads them again, in 8 x 8 x 2 = 128 wavefronts a block. (Of two launches
the GPU counted 9 and 26 wavefronts more than that leaves. No such number divides among the blocks, so they are not of
the kernel's doing; an earlier recording of the same accesses had none.)
"""


def parity_section(record: Record) -> str:
    """The SIMT machine's counts beside the hardware's, in Markdown."""
    cases = record.results["cases"]
    counts = [(case, name) for case in cases for name in GLOBAL]
    equal = sum(case["hardware"][name] == case["simulated"][name] for case, name in counts)
    launches = len(cases)
    intro = _paragraph(
        f"Recorded on one {record.device} with ncu {record.results['ncu']}: {launches} launches, and "
        f"{equal} of {len(counts)} requests and sectors of global memory are equal. A number in brackets is the SIMT "
        "machine's where it is another."
    )
    return "\n".join(intro) + f"\n{WHY_UNEQUAL}\n{parity_table(record)}\n"


SECTIONS: dict[str, tuple[Path, str, Callable[[Record], str]]] = {
    "scoreboard": (REPO / "README.md", "scoreboard", scoreboard_section),
    "losses": (REPO / "README.md", "engine", losses_section),
    "ladder": (REPO / "README.md", "gemv", ladder_section),
    "int4": (REPO / "README.md", "int4", int4_section),
    "parity": (REPO / "csrc" / "simt" / "README.md", "counters", parity_section),
}
"""Section: the page it stands on, the record it shows, and how."""


def _record(name: str) -> Record | None:
    try:
        return records.load(name, GPU)
    except FileNotFoundError:
        return None


def page_as_it_should_be(name: str) -> str:
    """The text of the page that holds the section `name`, with the section brought up to date."""
    page, record_name, body = SECTIONS[name]
    record = _record(record_name)
    return with_section(page.read_text(encoding="utf-8"), name, body(record) if record else "")


def plot_ladder(record: Record):
    """The ladder as bars: each kernel's share of the read probe, naive at the top, cuBLAS for comparison."""
    entry = record.results["shapes"][SHAPE]
    names = {"torch": "cuBLAS"}
    bars = [Bar(names.get(r.kernel, r.kernel), r.rate / 1e9, r.of_probe, "GB/s") for r in ladder(record, SHAPE)]
    title = f"y = W x, {entry['rows']} × {entry['cols']}, bf16, cold"
    figure = plot_mbu(bars, "the read probe", f"recorded, {record.device}", title)
    figure.axes[0].patches[-1].set_facecolor(OKABE_ITO[3])  # cuBLAS is no rung
    return figure


def shown_ladder(record: Record) -> list:
    """What `plot_ladder` draws."""
    return [(r.kernel, r.rate, r.of_probe) for r in ladder(record, SHAPE)]


def plot_scoreboard(record: Record):
    """Tokens a second of each contender, and the share of the datasheet's bandwidth that its bytes make of them."""
    bars = [Bar(name, rate, share) for name, rate, share in shown_scoreboard(record)]
    probe = record.results["ceilings"]["read_probe"]["bytes_per_s"] / spec_for(record.device).bandwidth
    title = f"7B, {record.results['models'][SCORED]['weights']} weights, {DEPTH} tokens deep"
    figure = plot_mbu(bars, "the datasheet's bandwidth", f"recorded, {record.device}", title, probe)
    for patch, name in zip(figure.axes[0].patches, _scored(record), strict=False):
        patch.set_facecolor(OKABE_ITO[0 if name == OURS else 3])
    return figure


def shown_scoreboard(record: Record) -> list:
    """What `plot_scoreboard` draws."""
    return [(CONTENDERS[name][2], f["tokens_per_s"], f["mbu_datasheet"]) for name, (_, f) in _scored(record).items()]


FIGURES: dict[str, tuple[Path, str, Callable, Callable]] = {
    "ladder": (DATA / "figures" / "ladder.png", "gemv", plot_ladder, shown_ladder),
    "scoreboard": (DATA / "figures" / "scoreboard.png", "scoreboard", plot_scoreboard, shown_scoreboard),
}
"""Figure: its file, the record it shows, how it is drawn, and what of the record it shows."""


def figure_source(name: str, record: Record) -> str:
    """The hash of the numbers that a picture shows; the PNG carries it."""
    return hashlib.sha256(repr((record.device, FIGURES[name][3](record))).encode()).hexdigest()


def main() -> None:
    for name, (page, _, _) in SECTIONS.items():
        text = page_as_it_should_be(name)
        if text != page.read_text(encoding="utf-8"):
            _write(page, text.encode())
    for name, (file, record_name, plot, _) in FIGURES.items():
        record = _record(record_name)
        if record is None:
            file.unlink(missing_ok=True)
        elif shown_source(file) != (source := figure_source(name, record)):
            buffer = io.BytesIO()
            metadata = {"Source": source, "Software": None}
            plot(record).savefig(buffer, format="png", dpi=120, bbox_inches="tight", metadata=metadata)
            file.parent.mkdir(exist_ok=True)
            _write(file, buffer.getvalue())


def shown_source(figure: Path) -> str | None:
    """The hash that a PNG carries; None where there is no picture, or none of ours."""
    from PIL import Image  # Matplotlib brings it

    if not figure.exists():
        return None
    with Image.open(figure) as picture:
        return picture.info.get("Source")


def _write(path: Path, data: bytes) -> None:
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.chmod(part, 0o644)
    os.replace(part, path)


if __name__ == "__main__":
    main()
