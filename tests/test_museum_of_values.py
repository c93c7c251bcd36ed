"""Every exhibit of csrc/museum/values: the broken kernel passes the easy test that it names and every observer, and
fails against float64; the mended one is right on both."""

import re

import pytest
import torch

from nanoqwen import simt
from nanoqwen.kernels.launch import INCLUDE
from nanoqwen.packing import pack
from nanoqwen.paths import CSRC

VALUES = CSRC / "museum" / "values"
ROWS, GROUP = 9, 32


def product(cols=256, low=-8, constant_x=False, size=1.0, scale=0.05):
    make = torch.Generator().manual_seed(cols)
    values = torch.randint(low, 8, (ROWS, cols), generator=make, dtype=torch.int8)
    scales = ((torch.rand(ROWS, cols // GROUP, generator=make) + 0.5) * scale).half()
    x = torch.ones(cols) if constant_x else torch.randn(cols, generator=make)
    x = (size * x).half()
    weights = values.double() * scales.double().repeat_interleave(GROUP, 1)
    return (pack(values), scales, x), (ROWS, cols, GROUP.bit_length() - 1), weights @ x.double()


def attention(tokens=49, alike=False, dominant=None):
    """Scores and values of tokens in pages of 16; the free slots of the last page hold NaN."""
    make = torch.Generator().manual_seed(tokens)
    pages = torch.full((-(-tokens // 16) * 16, 2), torch.nan)
    pages[:tokens] = torch.randn(tokens, 2, generator=make)
    if alike:
        pages[:tokens, 0] = 0
    if dominant is not None:
        pages[dominant, 0] = 12
    scores, values = pages[:tokens].double().unbind(1)
    return (pages,), (tokens,), (scores.softmax(0) @ values)[None]


# Threads, what makes the data, the data that hides the fault, and the data that shows it.
EXHIBITS = {
    "octet_off_by_one": (32, product, dict(cols=32, constant_x=True), {}),
    "sign_not_extended": (32, product, dict(low=0), {}),
    "scale_of_another_group": (32, product, dict(cols=64), dict(cols=96)),
    "sum_in_half": (32, product, dict(cols=32), dict(cols=2048, constant_x=True, low=1, size=8000.0)),
    "tail_not_masked": (32, attention, dict(tokens=48), dict(tokens=49)),
    "combined_without_rescaling": (64, attention, dict(alike=True), dict(dominant=48)),
}


def error(kernel, threads, data):
    """Of a kernel on some data, against float64; and the observers' report."""
    inputs, sizes, reference = data
    out = torch.empty(reference.shape)
    report = simt.observe(kernel.launch, 1, threads, (*inputs, out, *sizes), outputs=[len(inputs)])
    return ((out.double() - reference).norm() / reference.norm()).nan_to_num(torch.inf).item(), report


@pytest.fixture(scope="module")
def modules():
    return {n: simt.compile(VALUES / f"{n}.cu", ["broken", "mended"], include_dirs=(INCLUDE,)) for n in EXHIBITS}


def test_every_exhibit_is_tested_and_explained():
    files = {file.stem: file.read_text() for file in VALUES.glob("*.cu")}
    assert set(files) == set(EXHIBITS)
    page = (VALUES / "README.md").read_text()
    for name, text in files.items():
        assert text.count("// the fault") == 1 and "// Caught by: a check against float64\n" in text
        missed_by = re.search(r"^// Not caught by: (.*)$", text, re.M)[1]
        assert re.search(rf"^\| \[{name}\]\({name}.cu\) \| [^|]+ \| {re.escape(missed_by)} \|$", page, re.M)


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_broken_kernel_passes_the_easy_test_and_fails_the_right_one(modules, name):
    threads, make, hides, shows = EXHIBITS[name]
    wrong, report = error(modules[name]["broken"], threads, make(**shows))
    assert wrong > 0.05 and report.clean, str(report)
    assert error(modules[name]["broken"], threads, make(**hides))[0] < 5e-3


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_mended_kernel_passes_both(modules, name):
    threads, make, *both = EXHIBITS[name]
    for data in both:
        value, report = error(modules[name]["mended"], threads, make(**data))
        assert value < 1e-5 and report.clean, str(report)
