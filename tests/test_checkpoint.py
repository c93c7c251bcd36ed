"""Checkpoints: what is whole loads and equals `transformers`; what is not is refused, by name, on opening."""

import json
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from toys import TOY, random_weights, save_toy
from transformers import Qwen2ForCausalLM

from nanoqwen import reference
from nanoqwen.checkpoint import open_checkpoint

TIED = replace(TOY, tie_word_embeddings=True)
PROMPT = torch.tensor([[5, 200, 31, 7, 256]])


def logits(path):
    checkpoint = open_checkpoint(path)
    return reference.build(checkpoint.config, checkpoint.weights(torch.float32))(PROMPT)


def their_logits(path):
    return Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)(PROMPT).logits


def change(folder, **tensors):
    """Rewrite the weights with some tensors replaced; None leaves one out."""
    file = folder / "model.safetensors"
    held = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file, metadata={"format": "pt"})


def shards(folder):
    save_toy(folder, max_shard_size="100KB")
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    return files


def test_a_tied_file_needs_no_head(tmp_path):
    save_toy(tmp_path, TIED)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    weights = checkpoint.weights(torch.float32)
    assert list(weights) == list(TIED.weight_shapes())
    model = reference.build(checkpoint.config, weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits(tmp_path), their_logits(tmp_path), rtol=0, atol=1e-5)


def test_a_tied_file_may_carry_the_same_head_twice(tmp_path):
    save_toy(tmp_path, TIED)
    change(tmp_path, lm_head__weight=load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone())
    assert open_checkpoint(tmp_path).config.tie_word_embeddings
    torch.testing.assert_close(logits(tmp_path), their_logits(tmp_path), rtol=0, atol=1e-5)


def test_a_head_of_its_own_is_believed_over_the_flag_as_in_transformers(tmp_path):
    save_toy(tmp_path, TIED)
    head = random_weights(TOY, seed=1)["lm_head.weight"]
    change(tmp_path, lm_head__weight=head)
    assert not open_checkpoint(tmp_path).config.tie_word_embeddings
    torch.testing.assert_close(logits(tmp_path), their_logits(tmp_path), rtol=0, atol=1e-5)


def test_an_untied_configuration_without_a_head_is_refused(tmp_path):
    save_toy(tmp_path)
    change(tmp_path, lm_head__weight=None)
    with pytest.raises(ValueError, match=r"lm_head\.weight .* is missing; .* tie_word_embeddings"):
        open_checkpoint(tmp_path)


def test_large_biases_count(tmp_path):
    save_toy(tmp_path, TOY, random_weights(TOY, bias=5.0))
    ours, theirs = logits(tmp_path), their_logits(tmp_path)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    checkpoint = open_checkpoint(tmp_path)
    dropped = {n: w * (not n.endswith("bias")) for n, w in checkpoint.weights(torch.float32).items()}
    assert (reference.build(checkpoint.config, dropped)(PROMPT) - theirs).abs().max() > 0.1


def test_shards_hold_the_same_as_one_file(tmp_path):
    shards(tmp_path / "many")
    save_toy(tmp_path / "one")
    many = open_checkpoint(tmp_path / "many").weights(torch.float32)
    one = open_checkpoint(tmp_path / "one").weights(torch.float32)
    assert list(many) == list(one) == list(TOY.weight_shapes())
    assert all(torch.equal(many[name], one[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_come_in_the_dtype_asked_for(tmp_path, dtype):
    save_toy(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    for name, weight in open_checkpoint(tmp_path).weights(dtype).items():
        assert weight.dtype == dtype
        assert torch.equal(weight, held[name].to(dtype))


def test_weights_in_the_files_dtype_are_mapped_not_copied(tmp_path):
    save_toy(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    weights = open_checkpoint(tmp_path).weights(torch.float32)
    # Copies would lie anywhere; views of one map lie as far apart as in the file.
    assert len({w.data_ptr() - header[name]["data_offsets"][0] for name, w in weights.items()}) == 1


def test_another_dtype_is_refused(tmp_path):
    save_toy(tmp_path)
    with pytest.raises(ValueError, match=r"torch\.int8.*torch\.bfloat16"):
        open_checkpoint(tmp_path).weights(torch.int8)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is empty; a checkpoint has config\.json and \*\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_configuration_alone_is_refused(tmp_path):
    save_toy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        open_checkpoint(tmp_path)


def test_every_missing_and_damaged_shard_is_listed(tmp_path):
    first, second, *_ = shards(tmp_path)
    first.unlink()
    os.truncate(second, second.stat().st_size - 1)
    with pytest.raises(ValueError) as error:
        open_checkpoint(tmp_path)
    assert f"{first.name} is missing" in str(error.value)
    assert f"{second.name} is truncated or damaged" in str(error.value)


def test_a_folder_is_no_weight_file(tmp_path):
    save_toy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"x\.safetensors is a folder"):
        open_checkpoint(tmp_path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(tmp_path, share):
    if not (tmp_path / "whole").exists():
        save_toy(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        open_checkpoint(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), header=st.booleans())
def test_random_bytes_are_refused(tmp_path, data, header):
    if not (tmp_path / "config.json").exists():
        save_toy(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data if header else data)
    with pytest.raises(ValueError):
        open_checkpoint(tmp_path)


def test_bytes_after_the_end_are_refused(tmp_path):
    save_toy(tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 64)
    with pytest.raises(ValueError, match="truncated or damaged"):
        open_checkpoint(tmp_path)


def test_a_large_file_pointer_is_called_one(tmp_path):
    save_toy(tmp_path)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a1' * 32}\nsize 988097824\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ValueError, match=rf"git-lfs pointer \({len(pointer)} bytes of text\).*git lfs pull"):
        open_checkpoint(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    save_toy(tmp_path)
    change(tmp_path, model__layers__1__self_attn__k_proj__weight=torch.randn(64, 64))
    match = r"model\.layers\.1\.self_attn\.k_proj\.weight has shape \[64, 64\]; the configuration wants \[32, 64\]"
    with pytest.raises(ValueError, match=match):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype, name", [(torch.float64, "F64"), (torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_a_dtype_that_is_not_read_is_named(tmp_path, dtype, name):
    save_toy(tmp_path)
    change(tmp_path, model__norm__weight=torch.ones(64).to(dtype))
    with pytest.raises(ValueError, match=rf"model\.norm\.weight has dtype {name}; nanoqwen reads F32, BF16, F16"):
        open_checkpoint(tmp_path)


def test_all_missing_and_unknown_tensors_are_named(tmp_path):
    save_toy(tmp_path)
    change(tmp_path, model__norm__weight=None, model__layers__0__mlp__up_proj__weight=None, score__weight=torch.ones(2))
    with pytest.raises(ValueError) as error:
        open_checkpoint(tmp_path)
    for text in (
        "model.norm.weight [64] is missing",
        "model.layers.0.mlp.up_proj.weight [128, 64] is missing",
        "score.weight is no weight of a Qwen2 model",
    ):
        assert text in str(error.value)


def test_rotary_frequencies_in_the_file_are_harmless(tmp_path):
    save_toy(tmp_path)
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert list(open_checkpoint(tmp_path).weights()) == list(TOY.weight_shapes())


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    first, second, *_ = shards(tmp_path)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    with pytest.raises(ValueError, match=rf"{name} is in {first.name} and in {second.name}"):
        open_checkpoint(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"safetensors files and no model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "..", "x.bin"])
def test_an_index_may_not_point_elsewhere(tmp_path, shard):
    folder = save_toy(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {name: shard for name in TOY.weight_shapes()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"must be a .*file of that folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "\x00"])
def test_a_broken_index_is_refused(tmp_path, text):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_a_billion_layers_are_refused_at_once(tmp_path):
    save_toy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9, "layer_types": None}))
    with pytest.raises(ValueError, match=r"num_hidden_layers 1000000000, but there are only \d+ tensors"):
        open_checkpoint(tmp_path)


class Trap:
    """Unpickling this runs code."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_never_opened(tmp_path, name):
    save_toy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap()}, tmp_path / name)
    with pytest.raises(ValueError, match=rf"pickled \({name}\).*safetensors"):
        open_checkpoint(tmp_path)


def test_a_lone_file_is_refused_with_advice(tmp_path):
    save_toy(tmp_path)
    with pytest.raises(ValueError, match=r"give the folder that holds config\.json"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_path_with_spaces_and_letters_of_any_script(tmp_path):
    folder = save_toy(tmp_path / "my models 模型")
    assert open_checkpoint(folder).tokenizer_path == folder
