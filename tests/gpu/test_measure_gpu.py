"""On a GPU: the probe reads every byte, and a captured decode step makes the eager tokens."""

import pytest
import torch

from nanoqwen import hardware, models
from nanoqwen.config import ModelConfig
from nanoqwen.generation import generate
from nanoqwen.measure import decode, graph_decode, time_calls
from nanoqwen.reference import Qwen2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOY = ModelConfig(
    vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, eos_token_id=(3,),
)  # fmt: skip


def lively() -> Qwen2:
    """A toy whose greedy tokens keep changing: its matrices neither shrink nor blow up what they multiply."""
    model = models.random(TOY, torch.float32, "cuda", seed=1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter *= 50 * parameter.shape[1] ** -0.5
    return model


@pytest.fixture(scope="module")
def toy():
    return lively()


def test_the_read_probe_stays_below_the_datasheet():
    probe, machine = hardware.read_probe("cuda", repeats=20), hardware.machine("cuda")
    assert probe.seconds.n == 20 and probe.amount >= 4 * machine.cache
    assert machine.spec is None or probe.rate <= machine.spec.bandwidth


def test_our_read_kernel_sums_every_word_on_any_length():
    pytest.importorskip("cupy")
    for count in (2, 4, 510, 1 << 20, (1 << 20) + 6):
        words = torch.randint(-(2**62), 2**62, (count,), device="cuda")
        launch, total = hardware._read_kernel(words)
        launch()
        assert total() % (1 << 32) == int(words.view(torch.int32).sum(dtype=torch.int64)) % (1 << 32), count


def test_our_read_kernel_runs_on_torch_s_current_stream():
    pytest.importorskip("cupy")
    words = torch.zeros(1 << 22, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    launch, total = hardware._read_kernel(words)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        words.fill_(1)  # on the side stream, late: a launch elsewhere would still see zeros
        launch()
        assert total() == 1 << 22


def test_copy_and_matmul_probes_check_their_results():
    assert hardware.copy_probe("cuda", repeats=5).rate > 0
    assert hardware.matmul_probe("cuda", size=2048, repeats=5).rate > 0


def test_events_time_the_device_not_the_launch():
    a = torch.randn(4096, 4096, device="cuda")
    one, four = (sorted(time_calls(lambda n=n: [a @ a for _ in range(n)], "cuda", 20))[10] for n in (1, 4))
    assert four > 2 * one


@pytest.mark.parametrize("length", [1, 7, 600])
def test_a_replayed_graph_makes_the_eager_tokens(toy, length):
    prompt = torch.randint(257, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    timing = graph_decode(toy, prompt, steps=200)
    assert list(timing.tokens) == list(generate(toy, prompt, len(timing.tokens), stop=()))
    assert len(set(timing.tokens)) > 12  # lively: a frozen position would show
    assert timing.tpot.n == 200 and timing.ttft is None
    # 3 eager steps and 10 warm replays come before the timed ones.
    assert timing.mean_depth == length + 13 + 199 / 2


def test_a_graph_does_not_freeze_its_prompt(toy):
    first, second = graph_decode(toy, [5, 6, 7], steps=20), graph_decode(toy, list(range(40)), steps=20)
    assert list(second.tokens) == list(generate(toy, list(range(40)), len(second.tokens), stop=()))
    assert first.tokens[:5] != second.tokens[:5]


def test_pad_rows_are_never_chosen_by_the_graph(toy):
    model = lively()
    model.lm_head.weight[200:] *= 50
    model.num_tokens = 200
    assert max(graph_decode(model, 16, steps=20).tokens) < 200


def test_eager_decode_on_the_gpu_counts_the_gpu_s_memory(toy):
    timing = decode(toy, [1, 2, 3], 20)
    assert timing.peak_memory_is == "allocated on the GPU" and timing.peak_memory >= 4 * 257 * 64
    assert timing.mbu_probe is None and "cache" in timing.note
