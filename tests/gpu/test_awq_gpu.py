"""On a GPU: the dequantisers give the SIMT machine's bits; the tuner times, keeps and captures."""

import json

import pytest
import torch

from nanoqwen import autotune, kernels
from nanoqwen.awq import dequantize_reference
from nanoqwen.kernels import awq

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("cupy")

KERNELS = [
    kernels.awq_dequantize_v1,
    kernels.awq_dequantize_v2,
    kernels.awq_dequantize_v3,
    kernels.awq_dequantize,
]
SMALL = [(32, 8, 32), (64, 264, 64), (896, 128, 128), (96, 1032, 32)]
MODELS = [(896, 4864, 128), (3584, 4608, 128), (18944, 3584, 128), (3584, 37888, 128)]

by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A file of choices of the test's own."""
    path = tmp_path / "autotune.json"
    monkeypatch.setattr(awq.TUNER, "_path", path)
    monkeypatch.setattr(awq.TUNER, "_known", {})
    return path


def problem(rows, cols, group):
    make = torch.Generator("cuda").manual_seed(rows * 7919 + cols)
    words = [
        torch.randint(-(2**31), 2**31, (height, cols // 8), generator=make, dtype=torch.int64, device="cuda").int()
        for height in (rows, rows // group)
    ]
    return *words, torch.randn(rows // group, cols, generator=make, device="cuda").half()


def nothing(rows, cols, dtype):
    return torch.full((rows, cols), float("nan"), dtype=dtype, device="cuda")


def same_bits(got, parts, dtype):
    return torch.equal(got.view(torch.int16), dequantize_reference(*parts, dtype).T.contiguous().view(torch.int16))


@by_dtype
@by_name
def test_every_element_has_the_bits_of_the_reference_and_of_the_simt_machine(kernel, dtype):
    for shape in SMALL:
        parts, out = problem(*shape), nothing(*shape[:2], dtype)
        kernel(*parts, out=out)
        assert same_bits(out, parts, dtype), shape
        assert torch.equal(
            out.cpu().view(torch.int16), kernel(*(p.cpu() for p in parts), dtype=dtype).view(torch.int16)
        )


@by_dtype
@by_name
def test_the_shapes_of_the_models_are_right(kernel, dtype):
    for shape in MODELS:
        parts, out = problem(*shape), nothing(*shape[:2], dtype)
        kernel(*parts, out=out)
        assert same_bits(out, parts, dtype), shape


@by_dtype
def test_every_launch_gives_the_same_bits(dtype):
    parts = problem(256, 264, 64)
    for launch in awq.TUNER.candidates.values():
        out = nothing(256, 264, dtype)
        kernels.awq_dequantize_v3(*parts, out, **launch)
        assert same_bits(out, parts, dtype), launch


@by_dtype
@by_name
def test_subnormals_overflow_and_negative_scales_round_as_on_the_simt_machine(kernel, dtype):
    q = (torch.arange(32, dtype=torch.int32)[:, None] // 2 * 0x11111111).expand(32, 64).contiguous()
    z = (torch.arange(64, dtype=torch.int32)[None] % 16 * 0x11111111).contiguous()
    ends = [65504.0, -65504.0, 6e-8, -6e-8, 3e-5, 0.0, 1.0009765625, 4094.0]
    parts = q, z, torch.tensor(ends).half().repeat(64)[None].contiguous()
    assert same_bits(kernel(*(p.cuda() for p in parts), dtype=dtype).cpu(), parts, dtype)


def test_the_first_call_times_every_candidate_and_the_next_process_need_not(cache, monkeypatch):
    shape = (1024, 4096, 128)
    parts = problem(*shape)
    kernels.awq_dequantize(*parts)
    ((name, entry),) = json.loads(cache.read_text())["choices"].items()
    assert torch.cuda.get_device_name() in name and name.endswith("1024x4096x128 float16")
    assert set(entry["timings"]) == set(awq.TUNER.candidates)
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in entry["timings"].values()), entry
    assert entry["timings"][entry["choice"]] == min(entry["timings"].values())
    before = cache.read_text()
    monkeypatch.setattr(awq.TUNER, "_known", {})  # as a new process finds it
    monkeypatch.setattr(awq.TUNER, "_timer", lambda *args: pytest.fail("timed again"))
    assert same_bits(kernels.awq_dequantize(*parts), parts, torch.float16)
    assert cache.read_text() == before


def test_inside_a_capture_nothing_is_timed_and_nothing_decided(cache):
    parts = problem(128, 264, 64)
    kernels.awq_dequantize_v3(*parts)  # compiled
    out = nothing(128, 264, torch.float16)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernels.awq_dequantize(*parts, out=out)
    assert not cache.exists() and not awq.TUNER._known
    for seed in range(2):
        parts[0].copy_(torch.randint(0, 2**31, parts[0].shape, generator=torch.Generator().manual_seed(seed)))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, parts, torch.float16)
    kernels.awq_dequantize(*parts)
    assert cache.exists()


def test_launches_go_to_torch_s_current_stream():
    parts = problem(128, 264, 64)
    late, out = torch.zeros_like(parts[0]), nothing(128, 264, torch.float16)
    kernels.awq_dequantize(late, *parts[1:])  # compiled, timed
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(parts[0])
        kernels.awq_dequantize(late, *parts[1:], out=out)
    side.synchronize()
    assert same_bits(out, parts, torch.float16)


def test_the_clock_orders_a_short_and_a_long_call():
    small, large = (torch.empty(n, device="cuda") for n in (1 << 20, 1 << 26))
    seconds = autotune.gpu_seconds({"large": large.zero_, "small": small.zero_}, torch.device("cuda", 0))
    assert 0 < seconds["small"] < seconds["large"]


def test_the_machine_is_named_with_its_driver():
    name = autotune.gpu_and_driver(torch.device("cuda", 0))
    assert torch.cuda.get_device_name(0) in name and "driver " in name and "unknown" not in name
