import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from toys import TOY, random_weights, transformers_twin

from nanoqwen import quantize as q
from nanoqwen import reference
from nanoqwen.packing import FRAGMENT, GROUP_SIZES, LAYOUTS, SEQUENTIAL, VALUE_SHUFFLE, unpack
from nanoqwen.quantize import QuantizedLinear, compare, quantize, quantize_model, use_kernels

WIDE = replace(TOY, hidden_size=128, intermediate_size=256, head_dim=32)  # columns for groups up to 128
each_method = pytest.mark.parametrize("method", q.METHODS)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def errors(weight, made):
    """|w − value · scale|, and the size of the scale, both (rows, groups, group)."""
    grouped = weight.float().unflatten(1, (-1, made.group))
    return (made.dequantize() - weight.float()).abs().view_as(grouped), made.scales.float().abs()[..., None]


def toy(config=WIDE, seed=0, **how):
    return reference.build(config, random_weights(config, seed, **how))


# One matrix


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rounding_is_off_by_half_a_step_at_most(group, dtype):
    weight = normal(33, 1024).to(dtype)
    made = quantize(weight, group, "rtn")
    error, scale = errors(weight, made)
    assert (error <= scale / 2 * (1 + 1e-6)).all()
    largest = weight.float().abs().unflatten(1, (-1, group)).amax(-1)
    assert torch.equal(made.scales, (largest / 7).half())
    assert made.values.dtype == torch.int8 and made.scales.dtype == torch.float16
    assert made.values.abs().max() == 7 and made.group == group


def test_eight_bits_are_off_by_half_a_smaller_step():
    weight = normal(9, 896)
    made = quantize(weight, 128, "rtn", bits=8)
    error, scale = errors(weight, made)
    assert (error <= scale / 2 * (1 + 1e-6)).all()
    assert made.values.abs().max() == 127
    assert torch.equal(made.scales, (weight.abs().unflatten(1, (-1, 128)).amax(-1) / 127).half())


@pytest.mark.parametrize("group", GROUP_SIZES)
def test_the_search_never_has_more_weighted_error_than_rounding(group):
    weight = normal(64, 1024)
    rounded, searched = (errors(weight, quantize(weight, group, method))[0] for method in ("rtn", "mse"))
    importance = weight.abs().view_as(rounded)
    before, after = ((importance * error.square()).sum(-1) for error in (rounded, searched))
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.85 * before.sum()


def test_the_search_gives_the_largest_weight_of_either_sign_the_eighth_step():
    weight = torch.zeros(2, 32)
    weight[0, :2], weight[1, :2] = torch.tensor([8.0, -1.0]), torch.tensor([-8.0, 1.0])
    made = quantize(weight, 32, "mse")
    assert made.values[:, :2].tolist() == [[-8, 1], [-8, 1]] and made.scales.tolist() == [[-1.0], [1.0]]
    assert torch.equal(made.dequantize(), weight)


@each_method
def test_whole_steps_come_back_exactly(method):
    values = (torch.arange(128) % 15 - 7).to(torch.int8).repeat(7, 1)
    weight = values.float() * torch.tensor([2.0**-i for i in range(7)])[:, None]
    made = quantize(weight, 128, method)
    assert torch.equal(made.dequantize(), weight) and torch.equal(made.values, values)


@each_method
def test_a_group_of_zeros_stays_zero(method):
    weight = normal(5, 256)
    weight[2, 128:] = 0
    made = quantize(weight, 128, method)
    assert made.scales[2, 1] == 0 and made.values[2, 128:].count_nonzero() == 0
    assert made.dequantize().isfinite().all() and made.dequantize()[2, 128:].count_nonzero() == 0
    assert quantize(torch.zeros(3, 64), 64, method).dequantize().count_nonzero() == 0


@each_method
@pytest.mark.parametrize("outlier", [1e3, -1e3, 4e5])
def test_an_outlier_is_held_to_half_a_step(method, outlier):
    weight = normal(3, 256)
    weight[1, 77] = outlier
    error, scale = errors(weight, quantize(weight, 128, method))
    assert error[1, 0, 77] <= scale[1, 0, 0] / 2
    assert (error[1, 0] <= scale[1, 0] / 2 * (1 + 1e-6)).all()


@each_method
@pytest.mark.parametrize("size", [1e-9, 1e-7, 3e-7, 1e-6, 1e-5, 1e-4])
def test_weights_below_the_normal_numbers_of_fp16_are_not_clipped(method, size):
    weight = normal(64, 128) * size
    error, scale = errors(weight, quantize(weight, 128, method))
    assert scale.min() > 0
    if method == "rtn":
        assert (error <= scale / 2 * (1 + 1e-6)).all()


def test_the_same_rows_give_the_same_bits_in_any_company(monkeypatch):
    weight = normal(200, 256)
    whole = quantize(weight, 64)
    monkeypatch.setitem(q._CHUNK, "cpu", 1000)
    pieces = quantize(weight, 64)
    assert torch.equal(whole.values, pieces.values) and torch.equal(whole.scales, pieces.scales)
    alone = quantize(weight[17:18], 64)
    assert torch.equal(whole.values[17:18], alone.values)


@pytest.mark.parametrize("cols", [192, 896, 4864, 10944])
@pytest.mark.parametrize("group", GROUP_SIZES)
@each_method
def test_columns_are_whole_groups_or_refused_by_name(cols, group, method):
    weight = normal(3, cols)
    if cols % group:
        with pytest.raises(
            ValueError, match=f"down_proj has K = {cols} columns, no multiple of group {group}; use group"
        ):
            quantize(weight, group, method, name="down_proj")
        return
    made = quantize(weight, group, method)
    assert made.scales.shape == (3, cols // group)
    assert ((made.dequantize() - weight).norm() / weight.norm()) < 0.15


@each_method
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "an infinity"), (-float("inf"), "an inf")]
)
def test_weights_that_are_not_finite_are_refused_by_name(method, bits, value, kind):
    weight = normal(300, 2048)
    weight[-1, -1] = value
    with pytest.raises(ValueError, match=f"layers.3.mlp.up_proj.weight holds {kind}"):
        quantize(weight, 128, method, bits, name="layers.3.mlp.up_proj.weight")


def test_a_scale_beyond_fp16_is_refused():
    weight = normal(3, 128)
    weight[1, 5] = 65504 * 7 * 1.01
    with pytest.raises(ValueError, match=r"q_proj holds a weight of 4.631e\+05.*above fp16's 65504"):
        quantize(weight, name="q_proj")
    weight[1, 5] = 65504 * 7
    assert quantize(weight, method="rtn").scales[1, 0] == 65504


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group": 48}, "group is 48; it must be one of 32, 64, 128, 256"),
        ({"method": "gptq"}, "method is 'gptq'; it must be one of rtn, mse"),
        ({"bits": 3}, "bits is 3; it must be 4 or 8"),
    ],
)
def test_settings_that_there_are_not_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        quantize(normal(2, 768), **settings)


@pytest.mark.parametrize("weight", [torch.zeros(128), torch.zeros(2, 128, dtype=torch.int8), torch.zeros(0, 128)])
def test_what_is_no_floating_matrix_is_refused(weight):
    with pytest.raises(ValueError, match="must be a floating matrix"):
        quantize(weight)


# The layer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantised_layer_is_a_linear_layer_with_its_weights(layout, rows, bias):
    linear = nn.Linear(256, rows, bias=bias)
    layer = QuantizedLinear.from_linear(linear, 64, layout=layout)
    want = quantize(linear.weight, 64).dequantize()
    assert torch.equal(layer.weight, want) and layer.weight.dtype == torch.float32
    for shape in ((256,), (1, 1, 256), (2, 5, 256)):  # one token, a prompt
        x = normal(*shape)
        assert torch.equal(layer(x), nn.functional.linear(x, want, linear.bias))
    assert torch.equal(layer(torch.eye(256)[:5]).T if not bias else layer.weight[:, :5], want[:, :5])


def test_eight_bits_are_kept_as_they_are():
    linear = nn.Linear(256, 9)
    layer = QuantizedLinear.from_linear(linear, 128, "rtn", bits=8)
    assert torch.equal(layer.words, quantize(linear.weight, 128, "rtn", 8).values)
    assert (layer.weight - linear.weight).abs().max() < linear.weight.abs().max() / 127


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_model_keeps_its_scales_in_fp16(dtype):
    layer = QuantizedLinear.from_linear(nn.Linear(128, 16))
    scales = layer.scales.clone()
    want = layer.dequantize(torch.float32).to(dtype)
    layer.to(dtype)
    assert torch.equal(layer.scales, scales) and layer.scales.dtype == torch.float16
    assert layer.bias.dtype == layer.dtype == layer.weight.dtype == dtype
    assert torch.equal(layer.weight, want)
    assert layer(normal(3, 128).to(dtype)).dtype == dtype


def test_a_layer_comes_back_from_its_state():
    layer = QuantizedLinear.from_linear(nn.Linear(128, 16), 32, layout=FRAGMENT)
    other = QuantizedLinear(128, 16, group=32, layout=FRAGMENT, dtype=torch.float32)
    assert other(normal(2, 128)).count_nonzero() == 0
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(normal(2, 128)), layer(normal(2, 128)))
    assert set(layer.state_dict()) == {"words", "scales", "bias"}


def test_a_large_activation_stays_finite():
    layer = QuantizedLinear.from_linear(nn.Linear(128, 16))
    layer.scales *= 300
    x = torch.full((1, 128), 3000.0).copysign(layer.weight[0])
    out = layer(x)
    assert out.isfinite().all() and out[0, 0] > 65504
    assert layer.to(torch.bfloat16)(x.bfloat16()).isfinite().all()


# The layer, through our kernels


def asymmetric(layer, seed=0):
    """The layer with zero-points of all kinds."""
    make = torch.Generator().manual_seed(seed)
    layer.zeros = torch.randint(-8, 8, layer.scales.shape, generator=make, dtype=torch.int8)
    return layer


def exact(layer, x):
    """x Wᵀ + b in float64, and the size of a sum of such products."""
    zeros = 0 if layer.zeros is None else layer.zeros[..., None]
    values = unpack(layer.words, layer.layout, layer.out_features).unflatten(1, (-1, layer.group)).double()
    weight = ((values - zeros) * layer.scales.double()[..., None]).flatten(1)
    bias = 0 if layer.bias is None else layer.bias.double()
    return x.double() @ weight.T + bias, (x.double().square() @ weight.square().T).sqrt()


def parted(y, x, layer):
    """‖y − exact‖ against the size of y."""
    want, size = exact(layer, x)
    return ((y.double() - want).norm() / size.maximum(want.abs()).norm()).item()


STEP = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 5e-4}  # of x or y: what its rounding may cost
by_dtype = pytest.mark.parametrize("dtype", STEP, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture
def called(monkeypatch):
    """The kernels' names, in the order of their calls."""
    names = []
    for name in ("int4_gemm_mma", "int4_gemm_ring", "int4_dequantize", "half_x", "widen_y"):
        kernel = getattr(q.kernels, name)
        monkeypatch.setattr(
            q.kernels, name, lambda *args, kernel=kernel, name=name, **how: names.append(name) or kernel(*args, **how)
        )
    q._product.cache_clear()
    yield names
    q._product.cache_clear()


@by_dtype
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_up_to_eight_tokens_of_any_shape_go_through_the_fused_kernel(dtype, zeros, bias, called):
    layer = QuantizedLinear.from_linear(nn.Linear(256, 33, bias=bias), 64).to(dtype)
    layer = use_kernels(asymmetric(layer) if zeros else layer)
    for shape in ((256,), (1, 1, 256), (1, 8, 256), (2, 2, 2, 256)):
        x = normal(*shape).to(dtype)
        y = layer(x)
        assert y.dtype == dtype and y.shape == (*shape[:-1], 33) and y.is_contiguous()
        assert parted(y, x, layer) < STEP[dtype]
    assert called.count("int4_gemm_mma") == 4 and "int4_dequantize" not in called
    assert ("half_x" in called) == (dtype != torch.float16)


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zeros", [False, True])
def test_more_tokens_are_multiplied_with_w_in_full_and_kernels_change_no_bit(dtype, layout, zeros, called):
    layer = QuantizedLinear.from_linear(nn.Linear(256, 33), 64, layout=layout).to(dtype)
    layer = asymmetric(layer) if zeros else layer
    x = normal(3, 3, 256).to(dtype)
    plain = layer(x)
    assert not called and parted(plain, x, layer) < STEP[dtype]
    layer.kernels = True
    assert torch.equal(layer(x), plain)
    sixteen = dtype != torch.float32 and layout != SEQUENTIAL
    assert called == ["int4_dequantize"] * sixteen
    layer.kernels = False
    assert torch.equal(layer(x), plain) and len(called) == sixteen


def test_a_slice_and_a_transposed_x_are_taken_as_a_linear_layer_takes_them(called):
    layer = use_kernels(QuantizedLinear.from_linear(nn.Linear(64, 5), 64))
    for dtype in STEP:
        layer = layer.to(dtype)
        for x in (normal(3, 65).to(dtype)[:, 1:], normal(64, 2).to(dtype).T, normal(193).to(dtype)[1::3]):
            assert parted(layer(x), x, layer) < STEP[dtype]
    assert called.count("int4_gemm_mma") == 9


def test_what_the_fused_kernel_cannot_take_goes_the_other_way(called):
    layer = use_kernels(QuantizedLinear.from_linear(nn.Linear(64, 5), 64))
    assert layer(torch.empty(0, 64)).shape == (0, 5)
    assert layer(normal(2, 64).double()).dtype == torch.float64
    with pytest.raises(RuntimeError, match="shapes"):
        layer(normal(2, 32))
    x = normal(2, 64).requires_grad_()
    layer(x).sum().backward()  # gradients come through
    torch.testing.assert_close(x.grad[0], layer.weight.sum(0))
    narrow = use_kernels(QuantizedLinear.from_linear(nn.Linear(96, 5), 32))  # no tile of "fragment" is 96 wide
    assert narrow.layout == VALUE_SHUFFLE and narrow(normal(96)).shape == (5,)
    assert not called
    with torch.no_grad():
        assert layer(x).shape == (2, 5) and "int4_gemm_mma" in called


def test_activations_past_fp16_come_through_the_kernels():
    layer = use_kernels(QuantizedLinear.from_linear(nn.Linear(256, 33), 64).to(torch.bfloat16))
    for size in (1e-30, 1e-6, 70000.0, 1e30):
        x = (normal(3, 256) * size).bfloat16()
        x[0, 7] = 3 * size  # one outlier, as models have them
        layer.bias *= 0
        y = layer(x)
        assert y.isfinite().all() and parted(y, x, layer) < STEP[torch.bfloat16], size
    x = normal(2, 256).bfloat16()
    x[1] *= 1e20  # a token's size is its own
    y = layer(x)
    assert all(parted(y[i], x[i], layer) < STEP[torch.bfloat16] for i in range(2))
    assert not layer(torch.full((1, 256), float("inf")).bfloat16()).isfinite().any()
    assert not layer(torch.full((1, 256), float("nan")).bfloat16()).isfinite().any()
    assert torch.equal(layer(torch.zeros(1, 256).bfloat16()), torch.zeros(1, 33).bfloat16())


def test_a_large_row_is_finite_in_bf16_and_the_finite_check_names_it_in_fp16():
    model = toy()
    twin = quantize_model(model, 64)
    layer = twin.model.layers[1].mlp.down_proj
    layer.scales *= 300
    use_kernels(twin)
    x = torch.full((1, 256), 3000.0).copysign(layer.weight[0])
    with torch.no_grad(), q.check_finite(layer):
        assert layer.to(torch.bfloat16)(x.bfloat16())[0, 0] > 65504
    twin = twin.half()
    words = r"^down_proj gave an infinity in torch.float16; its largest input was 3000: use bfloat16"
    with pytest.raises(ValueError, match=words), q.check_finite(nn.ModuleDict({"down_proj": layer})):
        layer(x.half())
    assert layer(x.half()).isinf().any()  # outside, nobody looks
    with q.check_finite(twin.model.layers[0]):
        twin.model.layers[0].mlp(normal(1, 3, 128).half())
    part = nn.Sequential(layer)
    with pytest.raises(ValueError, match=r"^0 gave NaN .* look at the layers before it"), q.check_finite(part):
        part[0](x=x.half() * float("nan"))


def test_what_the_kernels_keep_follows_the_layer():
    layer = use_kernels(QuantizedLinear.from_linear(nn.Linear(128, 16)))
    x, size = normal(2, 128), len(pickle.dumps(layer))
    first = layer(x)
    assert len(pickle.dumps(layer)) == size  # and goes into no copy
    layer.scales *= 2  # in place
    layer.bias.data = layer.bias * 2
    torch.testing.assert_close(layer(x), 2 * first)
    layer.scales = layer.scales / 2  # another tensor
    layer.bias = layer.bias / 2
    assert torch.equal(layer(x), first)
    twin = copy.deepcopy(layer)
    twin.scales *= 4
    twin.bias *= 4
    torch.testing.assert_close(twin(x), 4 * first)
    assert torch.equal(layer(x), first) and set(layer.state_dict()) == {"words", "scales", "bias"}
    asymmetric(layer)
    assert parted(layer(x), x, layer) < 5e-4
    with torch.inference_mode():
        layer.scales = layer.scales.clone()
        assert parted(layer(x), x, layer) < 5e-4


def test_zero_points_are_part_of_the_state_and_of_no_cast():
    layer = asymmetric(QuantizedLinear.from_linear(nn.Linear(128, 16), 32)).to(torch.bfloat16)
    assert layer.zeros.dtype == torch.int8
    other = QuantizedLinear(128, 16, group=32, zeros=True)
    other.load_state_dict(layer.state_dict())
    x = normal(3, 128).bfloat16()
    assert torch.equal(other(x), layer(x)) and layer.read_bytes == 128 * 16 // 2 + 2 * 2 * 16 * 4


def test_words_change_their_layout_and_nothing_else():
    layer = QuantizedLinear.from_linear(nn.Linear(128, 19), 32)
    weight, before = layer.weight, layer.words
    for layout in (FRAGMENT, SEQUENTIAL, VALUE_SHUFFLE):
        assert layer.relayout(layout) is layer and layer.layout == layout
        assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.words, before)
    with pytest.raises(ValueError, match="layout id is 9"):
        layer.relayout(9)


def test_w_is_made_in_pieces(monkeypatch):
    for layout in LAYOUTS:
        layer = asymmetric(QuantizedLinear.from_linear(nn.Linear(256, 75), 64, layout=layout))
        whole = layer.weight
        monkeypatch.setitem(q._CHUNK, "cpu", 20 * 256)  # 20 rows, or one tile of 16
        assert torch.equal(layer.weight, whole)
        monkeypatch.undo()


def test_gpus_get_the_kernel_that_they_can_run(monkeypatch):
    for have, names in {
        (10, 0): ("int4_gemm_ring", "int4_gemm_mma"),
        (9, 0): ("int4_gemm_ring", "int4_gemm_mma"),
        (8, 6): ("int4_gemm_mma", "int4_gemm_mma"),
        (7, 5): (None, None),
    }.items():
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, have=have: have)
        for symmetric, name in zip((True, False), names, strict=True):
            q._product.cache_clear()
            found = q._product(torch.device("cuda", 0), symmetric)
            assert found is (name and getattr(q.kernels, name))
    q._product.cache_clear()
    assert q.best_layout(896, torch.device("cuda", 0)) == FRAGMENT
    assert q.best_layout(96, torch.device("cuda", 0)) == q.best_layout(896, torch.device("cpu")) == VALUE_SHUFFLE


# The model


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("bias", [1.0, 5.0])
def test_a_whole_model_runs_through_the_kernels(tokens, bias, called):
    twin = quantize_model(toy(bias=bias), 64)
    ids = torch.arange(5, 5 + tokens)[None]
    want = twin(ids)
    got = use_kernels(copy.deepcopy(twin))(ids)
    assert called.count("int4_gemm_mma") == 14
    assert ((got - want).norm() / want.norm()) < 3e-3  # activations of fp32 lose bits
    half = use_kernels(copy.deepcopy(twin).to(torch.bfloat16))
    alike = twin.to(torch.bfloat16)(ids)
    ours, theirs = ((logits.float() - want).norm() / want.norm() for logits in (half(ids), alike))
    assert ours < 1.5 * theirs + 1e-3


def test_a_model_with_a_value_past_fp16_is_finite_and_right_through_the_kernels():
    """N1: the residual stream carries it through the layers after, and the norm brings it back."""
    twin = quantize_model(toy(), 64).bfloat16()
    twin.model.layers[0].mlp.down_proj.scales *= 300
    twin.model.layers[0].mlp.up_proj.scales *= 300
    seen = []
    twin.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, x, y: seen.append(y.abs().max().item()))
    ids = torch.arange(5, 13)[None]
    want = twin(ids)
    got = use_kernels(twin)(ids)
    assert max(seen) > 65504 and got.isfinite().all()
    assert (got.float() - want.float()).norm() / want.float().norm() < 0.02


def test_a_model_decodes_through_the_kernels_and_reads_its_prompt_through_the_library(called):
    from nanoqwen.generation import generate

    twin = quantize_model(toy(), 64).half()
    prompt = list(range(3, 15))
    want = list(generate(twin, prompt, 6))
    got = list(generate(use_kernels(copy.deepcopy(twin)), prompt, 6))
    assert called[:14] == ["int4_dequantize"] * 14 and set(called[14:]) == {"int4_gemm_mma"}
    assert got == want


@each_method
@pytest.mark.parametrize("layout", [SEQUENTIAL, VALUE_SHUFFLE, FRAGMENT])
def test_a_quantised_model_is_the_reference_with_dequantised_weights(method, layout):
    model = toy()
    twin = quantize_model(model, 64, method, layout=layout)
    weights = random_weights(WIDE)
    projections = [name for name in weights if name.endswith("_proj.weight")]
    assert len(projections) == 14
    for name in projections:
        weights[name] = quantize(weights[name], 64, method).dequantize()
    ids = torch.arange(20)[None]
    assert torch.equal(twin(ids), reference.build(WIDE, weights)(ids))
    assert not torch.equal(twin(ids), model(ids))


def test_biases_of_magnitude_five_come_through():
    model = toy(bias=5.0)
    twin = quantize_model(model, 32)
    theirs = transformers_twin(WIDE, {n: w for n, w in random_weights(WIDE, bias=5.0).items()})
    for layer in range(2):
        for name in ("q", "k", "v"):
            path = f"model.layers.{layer}.self_attn.{name}_proj"
            linear = theirs.get_submodule(path)
            made = quantize(linear.weight, 32)
            x = normal(4, 128)
            want = x.double() @ made.dequantize().double().T + linear.bias.double()
            assert torch.allclose(twin.get_submodule(path)(x).double(), want, atol=1e-4)
    ids = torch.arange(30)[None]
    for path, part in theirs.named_modules():
        if path.endswith("_proj"):
            part.weight.copy_(quantize(part.weight, 32).dequantize())
    want = theirs(ids).logits
    assert torch.allclose(twin(ids), want, atol=1e-4)
    for part in twin.modules():
        if isinstance(part, QuantizedLinear):
            part.bias = None
    assert not torch.allclose(twin(ids), want, atol=0.1)


def test_all_but_the_projections_is_shared_and_the_model_stays_as_it_was():
    model = toy()
    before = model(torch.arange(9)[None])
    twin = quantize_model(model, 128)
    assert torch.equal(model(torch.arange(9)[None]), before)
    assert not any(isinstance(part, QuantizedLinear) for part in model.modules())
    mine = {tensor.data_ptr() for tensor in model.parameters()}
    for name, tensor in twin.state_dict().items():
        assert (tensor.data_ptr() in mine) == (not name.endswith((".words", ".scales")))
    kinds = {name.rpartition(".")[2] for name, part in twin.named_modules() if isinstance(part, QuantizedLinear)}
    assert kinds == set(q.PROJECTIONS)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_can_have_eight_bits_and_the_embedding_stays(tied):
    config = replace(WIDE, tie_word_embeddings=tied)
    model = toy(config)
    twin = quantize_model(model, 128, head_bits=8)
    assert twin.lm_head.bits == 8 and twin.lm_head.group == 128
    assert torch.equal(twin.lm_head.weight, quantize(model.lm_head.weight, 128, "rtn", 8).dequantize())
    assert twin.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert compare(model, twin, range(50)).agreement > 0.3


def test_a_tied_head_stays_tied():
    model = toy(replace(WIDE, tie_word_embeddings=True))
    twin = quantize_model(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight


def test_a_transformers_model_is_quantised_alike():
    weights = random_weights(WIDE)
    ids = torch.arange(20)[None]
    theirs = quantize_model(transformers_twin(WIDE, weights), 64)
    ours = quantize_model(reference.build(WIDE, weights), 64)
    assert torch.allclose(theirs(ids).logits, ours(ids), atol=1e-4)


def test_a_quantised_model_decodes_as_it_reads_a_prompt():
    from nanoqwen.generation import generate

    for head_bits in (16, 8):
        model = quantize_model(toy(), 64, head_bits=head_bits)
        tokens = [5, 17, 101]
        for token in generate(model, tokens[:3], 12):
            assert token == int(model(torch.tensor(tokens)[None])[0, -1].argmax())
            tokens.append(token)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group": 256}, "q_proj has K = 128 columns, no multiple of group 256; use group 32 or 64 or 128"),
        ({"head_bits": 4}, "head_bits is 4; it must be 16 or 8"),
        ({"layout": 12}, "layout id is 12"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        quantize_model(toy(), **settings)


def test_not_finite_weights_of_a_model_are_named():
    model = toy()
    model.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.down_proj holds NaN"):
        quantize_model(model)


def test_a_model_without_the_projections_is_refused():
    with pytest.raises(ValueError, match="Sequential has no linear layer called q_proj, k_proj"):
        quantize_model(nn.Sequential(nn.Linear(128, 128)))


# Comparing


class Fixed(nn.Module):
    """A model whose logits are a table by token."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, ids):
        return self.table[ids]


def test_a_model_compared_with_itself_does_not_differ():
    model = toy()
    same = compare(model, model, range(100))
    assert (same.kl, same.agreement, same.tokens) == (0, 1, 99)
    assert same.perplexity == same.reference_perplexity > 1


def test_divergence_agreement_and_perplexity_are_those_of_the_definitions():
    p, other = normal(11, 11, seed=1), normal(11, 11, seed=2)
    ids = torch.randint(0, 11, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    found = compare(Fixed(p), Fixed(other), ids, window=16)
    kl = same = 0
    likelihood = [0.0, 0.0]
    places = [i for i in range(39) if i % 16 != 15]  # windows see nothing of each other
    for i in places:
        a, b = p[ids[i]].double().softmax(0), other[ids[i]].double().softmax(0)
        kl += (a * (a / b).log()).sum().item()
        same += int(a.argmax() == b.argmax())
        for k, each in enumerate((a, b)):
            likelihood[k] -= each[ids[i + 1]].log().item()
    n = len(places)
    assert found.tokens == n and found.kl == pytest.approx(kl / n) and found.agreement == pytest.approx(same / n)
    reference, perplexity = (torch.tensor(each / n).exp().item() for each in likelihood)
    assert found.reference_perplexity == pytest.approx(reference) and found.perplexity == pytest.approx(perplexity)


def test_pad_rows_of_the_vocabulary_do_not_count():
    model, other = toy(), toy(seed=4)
    model.num_tokens = 200
    before = compare(model, other, range(60))
    with torch.no_grad():
        other.lm_head.weight[200:] *= 100
    assert compare(model, other, range(60)) == before


def test_one_token_predicts_nothing():
    with pytest.raises(ValueError, match="a prediction needs 2"):
        compare(toy(), toy(), [3])


def test_logits_that_are_not_finite_are_no_comparison():
    model = toy()
    model.model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        compare(toy(), model, range(9))
