"""Datasheets are found by whole names, and probes read what they say they read."""

import subprocess

import pytest
import torch

from nanoqwen import hardware
from nanoqwen.hardware import DATASHEETS, copy_probe, machine, matmul_probe, read_ceiling, read_probe, spec_for

SMALL = 160 << 20  # above 4 × the last-level cache of the machines that run these tests, or the test is skipped


def small() -> int:
    cache = machine("cpu").cache or 32 << 20
    if 4 * cache > 1 << 30:
        pytest.skip(f"a last-level cache of {cache >> 20} MiB needs a larger buffer than a test should take")
    return max(SMALL, 4 * cache)


@pytest.mark.parametrize(
    ("reported", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_its_driver_reports(reported, key):
    assert spec_for(reported) is DATASHEETS[key]


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA H200 NVL",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3060 Ti",
        "AMD EPYC",
        "",
    ],
)
def test_a_relative_of_a_known_gpu_does_not_get_its_numbers(other):
    assert spec_for(other) is None


def test_two_cards_under_one_name_are_told_apart_by_their_memory():
    assert spec_for("NVIDIA GeForce RTX 3060", 12 << 30) is DATASHEETS["rtx-3060"]
    assert spec_for("NVIDIA GeForce RTX 3060", 8 << 30) is None


def test_datasheets_are_in_base_units_and_hang_together():
    names = [device for spec in DATASHEETS.values() for device in spec.devices]
    assert len(names) == len(set(names))
    for key, spec in DATASHEETS.items():
        assert 1e11 < spec.bandwidth < 1e13 and 1e12 < spec.fp32 < 1e15 and 4e9 < spec.memory < 1e12, key
        assert 1 << 20 <= spec.l2 < 1 << 28 and spec.source, key
        assert spec.bf16 is None or 1.9 * spec.fp32 < spec.bf16 < 20 * spec.fp32, key


def test_the_machine_says_what_it_is():
    here = machine("cpu")
    assert here.kind == "cpu" and here.units >= 1 and here.spec is None and here.torch == torch.__version__
    assert here.name in str(here) and "cores" in str(here)


def test_the_read_probe_reads_its_buffer_and_keeps_every_sample():
    size = small()
    probe = read_probe("cpu", size, repeats=3)
    assert probe.amount == pytest.approx(size, rel=1e-4) and probe.seconds.n == 3
    assert probe.rate == probe.amount / probe.best and probe.best <= probe.seconds.p10
    assert "GB/s" in str(probe) and "threads" in probe.method
    assert probe.to_dict()["bytes_per_s"] == probe.rate


def test_a_probe_that_reads_too_little_is_found_out(monkeypatch):
    whole = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda self, *a, **k: whole(self[: len(self) // 2]))
    with pytest.raises(RuntimeError, match="did not read every byte"):
        read_probe("cpu", small(), repeats=1)


def test_a_buffer_that_the_cache_could_hold_is_refused():
    cache = machine("cpu").cache or 32 << 20
    for probe in (read_probe, copy_probe):
        with pytest.raises(ValueError, match="would measure the cache"):
            probe("cpu", cache)


def test_a_copy_counts_what_it_reads_and_what_it_writes():
    probe = copy_probe("cpu", 2 * small(), repeats=2)
    assert probe.amount == pytest.approx(2 * small(), rel=1e-4)


def test_the_matmul_probe_counts_two_flops_per_multiply_add():
    probe = matmul_probe("cpu", torch.float32, size=256, repeats=2)
    assert probe.amount == 2 * 256**3 and probe.to_dict()["flops_per_s"] == probe.rate


def test_a_matmul_of_nan_is_not_a_result(monkeypatch):
    def broken(a, b, out):
        return out.fill_(float("nan"))

    monkeypatch.setattr(torch, "matmul", broken)
    with pytest.raises(RuntimeError, match="off by nan"):
        matmul_probe("cpu", torch.float32, size=64, repeats=1)


def test_the_ceiling_is_measured_once_and_only_ever_raised(monkeypatch):
    rates = iter([20e9, 10e9, 30e9])

    def probe(device):
        return hardware.Probe("read", next(rates), "B", hardware.percentiles([1.0]), 1.0, "by hand", "test")

    monkeypatch.setattr(hardware, "read_probe", probe)
    monkeypatch.setattr(hardware, "_CEILINGS", {})
    seen = [read_ceiling("cpu", again).rate for again in (False, False, True, True)]
    assert seen == [20e9, 20e9, 20e9, 30e9]


def test_without_nvidia_smi_the_state_is_empty(monkeypatch):
    def absent(*args, **kwargs):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", absent)
    assert hardware.gpu_state() == {}


def test_the_state_of_a_gpu_is_numbers_and_what_it_does_not_say_is_none(monkeypatch):
    answer = subprocess.CompletedProcess([], 0, "1980, 3201, 412.50, [N/A], 580.95.05\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    assert hardware.gpu_state() == {
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "power_w": 412.5,
        "temperature_c": None,
        "driver": "580.95.05",
    }
