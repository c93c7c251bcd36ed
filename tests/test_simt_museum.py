"""Every exhibit of csrc/museum: the broken kernel is caught by the observer it names, at its marked line, and
the mended one is clean and right. These are also the tests of the observers."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from nanoqwen import simt
from nanoqwen.paths import CSRC

MUSEUM = CSRC / "museum"


@dataclass
class Exhibit:
    grid: int
    block: int
    n: int
    data: torch.Tensor
    expected: torch.Tensor
    starts_at_zero: bool = False  # the output is added to


def attention(tokens: torch.Tensor) -> torch.Tensor:
    """Of one query, with a head of one dimension, over rows of a score and a value."""
    scores, values = tokens.double().unbind(1)
    return (scores.softmax(0) @ values).float()[None]


def exhibits() -> dict[str, Exhibit]:
    make = torch.Generator().manual_seed(0)
    x = torch.rand(300, generator=make) + 0.5
    rows = torch.randn(70, 32, generator=make)
    six = torch.randn(40, 6, generator=make)
    digits = torch.randint(0, 16, (500,), generator=make)
    plain = torch.randn(512, generator=make)
    tokens = torch.randn(49, 2, generator=make)
    return {
        "barrier_in_branch": Exhibit(1, 256, 300, x, x / x.sum()),
        "missing_barrier": Exhibit(1, 256, 256, x[:256], x[:256].flip(0)),
        "tail_row": Exhibit(3, 32, 70, rows, rows.sum(1)),
        "wrong_mask": Exhibit(1, 32, 20, x[:20], x[:20].sum()[None]),
        "uninitialised_sum": Exhibit(1, 64, 300, x, x.sum()[None]),
        "misaligned_load": Exhibit(2, 32, 40, six, six.sum(1)),
        "racy_histogram": Exhibit(4, 128, 500, digits.float(), torch.bincount(digits, minlength=16).float(), True),
        "async_without_wait": Exhibit(2, 64, 512, plain, plain),
        "bulk_copy_without_wait": Exhibit(6, 64, 6, plain[:96], plain[:96].view(6, 16).sum(1)),
        "barrier_at_the_tail": Exhibit(1, 64, 49, tokens, attention(tokens)),
        "block_barrier_for_a_warp": Exhibit(1, 128, 6, plain[:96], plain[:96].view(6, 16).sum(1)),
        "page_too_many": Exhibit(1, 32, 48, plain[:48].clone(), plain[:48].sum()[None]),
    }


EXHIBITS = exhibits()


def marked(file: Path) -> tuple[str, int]:
    """What the file says of itself: the observer that must catch it, and the line of the fault."""
    text = file.read_text()
    lines = [i for i, row in enumerate(text.splitlines(), 1) if row.endswith("// the fault")]
    assert len(lines) == 1, f"{file.name} must mark one line with '// the fault'"
    return re.search(r"^// Caught by: (\w+)$", text, re.M)[1], lines[0]


@pytest.fixture(scope="module")
def modules():
    return {name: simt.compile(MUSEUM / f"{name}.cu", ["broken", "mended"]) for name in EXHIBITS}


def run(module, kernel: str, exhibit: Exhibit) -> tuple[simt.Report, torch.Tensor]:
    out = torch.zeros_like(exhibit.expected)
    outputs = () if exhibit.starts_at_zero else ("out",)
    data = exhibit.data.contiguous()
    launch = module[kernel].launch
    report = simt.observe(launch, exhibit.grid, exhibit.block, (data, out, exhibit.n), outputs=outputs)
    return report, out


def test_every_file_of_the_museum_is_tested_and_explained():
    files = {f.stem for f in MUSEUM.glob("*.cu")}
    assert files == set(EXHIBITS)
    page = (MUSEUM / "README.md").read_text()
    for name in files:
        observer, _ = marked(MUSEUM / f"{name}.cu")
        row = next(line for line in page.splitlines() if line.startswith(f"| [{name}]"))
        assert f"| {observer} |" in row


def test_the_example_of_the_page_prints_what_is_found(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (MUSEUM / "README.md").read_text(), re.S)
    exec(example, {})
    assert f"[synccheck] barrier_in_branch.cu:{marked(MUSEUM / 'barrier_in_branch.cu')[1]}:" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_broken_kernel_is_caught_at_its_line(modules, name):
    observer, line = marked(MUSEUM / f"{name}.cu")
    report, _ = run(modules[name], "broken", EXHIBITS[name])
    caught = [f for f in report.findings if f.kind == observer and line in (f.line, f.other_line)]
    assert caught, f"{observer} saw nothing at line {line}; the report says:\n{report}"
    assert f"{name}.cu:{line}" in str(report)


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_mended_kernel_is_clean_and_right(modules, name):
    report, out = run(modules[name], "mended", EXHIBITS[name])
    assert report.clean, str(report)
    torch.testing.assert_close(out, EXHIBITS[name].expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_mended_kernel_is_right_in_the_fast_build(modules, name):
    exhibit = EXHIBITS[name]
    out = torch.zeros_like(exhibit.expected)
    modules[name]["mended"].launch(exhibit.grid, exhibit.block, (exhibit.data.contiguous(), out, exhibit.n))
    torch.testing.assert_close(out, exhibit.expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 15, 47])
def test_the_barrier_at_the_tail_is_caught_at_every_partial_page(modules, tokens):
    exhibit = EXHIBITS["barrier_at_the_tail"]
    report, _ = run(modules["barrier_at_the_tail"], "broken", replace(exhibit, n=tokens))
    assert not report.clean
    mended = replace(exhibit, n=tokens, expected=attention(exhibit.data[:tokens]))
    report, out = run(modules["barrier_at_the_tail"], "mended", mended)
    assert report.clean, str(report)
    torch.testing.assert_close(out, mended.expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [16, 32, 48])
def test_the_barrier_at_the_tail_does_no_harm_while_all_pages_are_full(modules, tokens):
    exhibit = EXHIBITS["barrier_at_the_tail"]
    full = replace(exhibit, n=tokens, expected=attention(exhibit.data[:tokens]))
    report, out = run(modules["barrier_at_the_tail"], "broken", full)
    assert report.clean, str(report)
    torch.testing.assert_close(out, full.expected, rtol=1e-5, atol=1e-6)


def test_the_barrier_at_the_tail_names_both_places_at_which_warps_wait(modules):
    report, _ = run(modules["barrier_at_the_tail"], "broken", EXHIBITS["barrier_at_the_tail"])
    _, line = marked(MUSEUM / "barrier_at_the_tail.cu")
    other = (MUSEUM / "barrier_at_the_tail.cu").read_text().splitlines().index("        __syncthreads();") + 1
    assert any({f.line, f.other_line} == {line, other} for f in report.findings), str(report)


def test_a_page_too_many_does_no_harm_at_other_lengths(modules):
    exhibit = EXHIBITS["page_too_many"]
    for n in (33, 47):
        other = replace(exhibit, n=n, expected=exhibit.data[:n].sum()[None])
        report, out = run(modules["page_too_many"], "broken", other)
        assert report.clean, str(report)
        torch.testing.assert_close(out, other.expected, rtol=1e-5, atol=1e-6)
