"""The ledger counts every byte, figures above a ceiling are errors, and plots say where their numbers come from."""

import math

import matplotlib.style
import matplotlib.text
import pytest
import torch

from nanoqwen.config import SHAPES, ModelConfig
from nanoqwen.hardware import DATASHEETS, Probe
from nanoqwen.measure import percentiles
from nanoqwen.reference import KVCache, Qwen2
from nanoqwen.roofline import (
    Bar,
    CeilingError,
    Grouped,
    Point,
    below_ceiling,
    ledger,
    mbu,
    plot_ledger,
    plot_mbu,
    plot_roofline,
)

TOY_SHAPE = dict(
    vocab_size=257, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
TOYS = {
    f"toy-{'tied' if tied else 'untied'}": ModelConfig(**TOY_SHAPE, tie_word_embeddings=tied) for tied in (False, True)
}
ALL = {**SHAPES, **TOYS}

# Which modules of the reference decoder a kind stands for.
MODULES = {
    "norm": ("input_layernorm", "post_attention_layernorm", "norm"),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


def meta_model(config: ModelConfig, dtype: torch.dtype) -> Qwen2:
    with torch.device("meta"):
        return Qwen2(config).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ALL)
def test_the_ledger_sums_to_the_decoder_s_own_tensors(name, dtype):
    config, depth = ALL[name], 77
    model = meta_model(config, dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())  # a shared tensor once
    embedding = model.model.embed_tokens.weight
    # All of it is read, but of the embedding one row; a tied head is the embedding, read whole.
    weights += embedding[0].nbytes - (0 if config.tie_word_embeddings else embedding.nbytes)
    past = KVCache(config, depth, dtype=dtype, device="meta")
    new = KVCache(config, 1, dtype=dtype, device="meta")
    counted = ledger(config, dtype, depth=depth)
    assert counted.read == weights + past.keys.nbytes + past.values.nbytes
    assert counted.written == new.keys.nbytes + new.values.nbytes
    assert counted.total == counted.read + counted.written == sum(counted.by_kind().values())


@pytest.mark.parametrize("name", ALL)
def test_each_kind_sums_to_its_modules(name):
    config = ALL[name]
    model = meta_model(config, torch.bfloat16)
    kinds = ledger(config, torch.bfloat16, depth=3).by_kind()
    parameters = dict(model.named_parameters())
    for kind, modules in MODULES.items():
        want = sum(p.nbytes for n, p in parameters.items() if n.split(".")[-2] in modules and n.endswith("weight"))
        assert kinds[kind] == want, kind
    assert kinds["bias"] == sum(p.nbytes for n, p in parameters.items() if n.endswith("bias"))
    assert kinds["lm_head"] == model.lm_head.weight.nbytes
    assert kinds["embed"] == 2 * config.hidden_size


def test_a_batch_shares_the_weights_but_not_its_embeddings_and_cache():
    config = TOYS["toy-tied"]
    one, many = (ledger(config, depth=9, batch=batch).by_kind() for batch in (1, 5))
    for kind in one:
        assert many[kind] == one[kind] * (5 if kind in ("embed", "kv_read", "kv_write") else 1), kind


def test_the_7b_in_int4_moves_4_455_gb():
    # Counted by hand: 6.525e9 layer weights at 4.125 bits, a head of 152,064 × 3,584 in fp16.
    forms = {"default": torch.float16, **dict.fromkeys(("qkv", "o", "gate_up", "down"), Grouped())}
    counted = ledger(SHAPES["qwen2.5-coder-7b"], forms)
    layers = 28 * (4608 * 3584 + 3584 * 3584 + 3 * 18944 * 3584)
    kinds = counted.by_kind()
    assert sum(kinds[k] for k in ("qkv", "o", "gate_up", "down")) == layers // 2 + layers // 128 * 2
    assert kinds["lm_head"] == 152064 * 3584 * 2
    assert f"{counted.total / 1e9:.3f}" == "4.455"


def test_flops_are_two_per_matrix_element_plus_attention():
    config = TOYS["toy-untied"]
    model = meta_model(config, torch.float32)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    # One query against 10 keys: q·k and weights·v, 64 elements of all heads each, two layers.
    assert ledger(config, depth=9).flops == 2 * linear + 2 * (2 * 2 * 64 * 10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"depth": -1}, "depth is -1"),
        ({"batch": 0}, "batch 0"),
        ({"dtype": {"head": torch.float16}}, "no kind 'head'"),
        ({"dtype": {"norm": torch.float16}}, "no dtype for 'embed'"),
        ({"dtype": {"default": torch.float16, "norm": Grouped()}}, "norm cannot be"),
        ({"dtype": {"default": torch.float16, "down": Grouped(group_size=128)}}, "160 columns"),
    ],
)
def test_a_ledger_that_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        ledger(TOYS["toy-tied"], **arguments)


def test_the_table_shows_reads_writes_and_their_sum():
    counted = ledger(TOYS["toy-tied"], depth=5, name="toy")
    for text in (str(counted), counted._repr_html_()):
        for part in ("toy", "kv_read", "kv_write", "read", "write", "bfloat16", f"{counted.total:,}"):
            assert part in text


def test_mbu_is_bytes_over_time_over_bandwidth():
    assert mbu(15e9, 5e-3, 4.8e12) == pytest.approx(0.625)


def test_above_the_datasheet_is_an_error_not_a_triumph():
    with pytest.raises(CeilingError, match=r"103\.0 %"):
        below_ceiling(4.944e12, 4.8e12, "read")
    with pytest.raises(CeilingError):
        mbu(5e9, 1e-3, 4.8e12)
    assert below_ceiling(4.8e12, 4.8e12, "read") == 1


def test_a_measured_ceiling_may_be_passed_by_its_noise_but_never_shows_more_than_one():
    assert below_ceiling(102, 100, "read", noise=0.03) == 1
    with pytest.raises(CeilingError):
        below_ceiling(103.1, 100, "read", noise=0.03)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_figure_that_is_not_one_never_passes_the_ceiling(value):
    with pytest.raises(ValueError):
        below_ceiling(value, 1.0, "read")
    with pytest.raises(ValueError):
        mbu(1e9, value, 1e12)


def probe_of(what: str, rate: float, unit: str) -> Probe:
    return Probe(what, rate, unit, percentiles([1.0]), 1.0, "by hand", "test")


def texts(figure) -> str:
    found = figure.findobj(matplotlib.text.Text)
    return "\n".join(text.get_text() for text in found)


def test_a_roofline_has_its_ceilings_its_units_and_its_label():
    h200 = DATASHEETS["h200"]
    figure = plot_roofline(
        [Point("decode", 1.0, 3e12), Point("prefill", 400.0, 5e14)],
        h200, probe_of("read", 4.4e12, "B"), probe_of("matmul", 7e14, "FLOP"), label="recorded: H200",
    )  # fmt: skip
    axes = figure.axes[0]
    said = texts(figure)
    assert axes.get_xscale() == axes.get_yscale() == "log"
    for part in ("FLOP per byte", "FLOP/s", "recorded: H200", "H200 SXM datasheet", "probes", "decode", "prefill"):
        assert part in said
    roof = axes.lines[0]
    assert roof.get_ydata()[-1] == h200.bf16
    assert roof.get_ydata()[0] / roof.get_xdata()[0] == pytest.approx(h200.bandwidth)
    assert roof.get_xdata()[1] == pytest.approx(h200.bf16 / h200.bandwidth)  # the ridge
    assert [line.get_linestyle() for line in axes.lines[:2]] == ["-", "--"]


def test_a_point_above_the_roof_is_not_drawn():
    with pytest.raises(CeilingError, match="too good"):
        plot_roofline([Point("too good", 1.0, 4.9e12)], DATASHEETS["h200"])
    with pytest.raises(CeilingError, match="too good"):
        plot_mbu([Bar("too good", 300.0, 1.01)])


def test_a_roofline_without_a_ceiling_is_refused():
    with pytest.raises(ValueError, match="needs a ceiling"):
        plot_roofline([Point("decode", 1.0, 1e9)])


def test_a_figure_without_an_honest_label_is_refused():
    with pytest.raises(ValueError, match="measured, recorded, simulated"):
        plot_mbu([Bar("eager", 10.0, 0.1)], label="")


def test_ledger_bars_add_up_to_their_totals():
    ledgers = [ledger(config, name=name) for name, config in SHAPES.items()]
    figure = plot_ledger(*ledgers)
    axes = figure.axes[0]
    ends = [max(bar.patches[i].get_x() + bar.patches[i].get_width() for bar in axes.containers) for i in range(3)]
    assert ends == pytest.approx([counted.total / 1e9 for counted in ledgers])
    assert "GB" in axes.get_xlabel() and "counted" in texts(figure)
    assert [text.get_text() for text in axes.get_yticklabels()] == list(SHAPES)


def test_figures_look_the_same_on_a_dark_page():
    def picture():
        return plot_mbu([Bar("eager", 94.0, 0.3), Bar("graph", 208.0, 0.66)], label="recorded")._repr_png_()

    light = picture()
    with matplotlib.style.context("dark_background"):
        assert picture() == light
    assert light.startswith(b"\x89PNG")
