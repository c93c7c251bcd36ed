"""A model's shape, from `config.json` and back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import TOY
from transformers import Qwen2Config, Qwen2ForCausalLM

from nanoqwen.config import SHAPES, ModelConfig

CODER = {  # the keys of Qwen2.5-Coder-0.5B-Instruct's own file that matter here
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "use_sliding_window": False, "vocab_size": 151936, "eos_token_id": 151645,
}  # fmt: skip


def write(folder: Path, name: str, values) -> Path:
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_the_coders_file_gives_the_coders_shape():
    config = ModelConfig.from_dict(CODER)
    assert replace(config, eos_token_id=()) == replace(SHAPES["qwen2.5-coder-0.5b"], eos_token_id=())
    assert (config.head_dim, config.q_size, config.kv_size) == (64, 896, 128)


@pytest.mark.parametrize(("name", "millions"), [("0.5b", 494), ("1.5b", 1544), ("7b", 7616)])
def test_the_shapes_hold_as_many_parameters_as_their_cards_say(name, millions):
    shapes = SHAPES[f"qwen2.5-coder-{name}"].weight_shapes().values()
    assert round(sum(torch.Size(shape).numel() for shape in shapes) / 1e6) == millions


@pytest.mark.parametrize("name", SHAPES)
def test_it_survives_a_round_trip_through_json_and_through_transformers(name):
    config = SHAPES[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    theirs = Qwen2Config.from_dict(config.to_dict())
    assert ModelConfig.from_dict(json.loads(theirs.to_json_string(use_diff=False))) == config


@pytest.mark.parametrize("tied", [True, False])
def test_weight_names_and_shapes_are_those_of_transformers(tied):
    config = replace(TOY, tie_word_embeddings=tied, head_dim=32)
    with torch.device("meta"):
        theirs = Qwen2ForCausalLM(Qwen2Config.from_dict(config.to_dict()))
    assert config.weight_shapes() == {name: tuple(p.shape) for name, p in theirs.named_parameters()}


def test_rope_theta_is_read_from_both_of_its_homes():
    bare = {key: value for key, value in CODER.items() if key != "rope_theta"}
    assert ModelConfig.from_dict(CODER).rope_theta == 1e6
    nested = {**bare, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert ModelConfig.from_dict(nested).rope_theta == 5e5
    assert ModelConfig.from_dict(bare).rope_theta == Qwen2Config.from_dict(bare).rope_parameters["rope_theta"] == 1e4


def test_what_a_file_leaves_out_is_what_transformers_assumes():
    for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"):
        bare = {k: v for k, v in {**CODER, "num_key_value_heads": 14, "tie_word_embeddings": False}.items() if k != key}
        ours = ModelConfig.from_dict(bare)
        theirs = Qwen2Config.from_dict({**bare, "num_key_value_heads": 14})
        assert getattr(ours, key) == getattr(theirs, key), key


# --- W8: the end of sequence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (3, "no file", (3,)),
        (3, None, (3,)),
        ([3, 4], None, (3, 4)),
        (None, None, ()),
        (3, 5, (5, 3)),
        (3, [5, 3], (5, 3)),
        (None, [5], (5,)),
    ],
)
def test_stop_tokens_come_from_both_files(tmp_path, in_config, in_generation, expected):
    path = write(tmp_path, "config.json", {**CODER, "eos_token_id": in_config})
    if in_generation != "no file":
        write(tmp_path, "generation_config.json", {"eos_token_id": in_generation})
    assert ModelConfig.read(path).eos_token_id == expected


# --- Bad files: the message names the file, the key and the value -----------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", "model_type is 'llama'"),
        ("model_type", None, "model_type is None"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("use_sliding_window", True, "use_sliding_window is true"),
        ("quantization_config", {"quant_method": "awq"}, "quant_method 'awq'"),
        ("quantization_config", "awq", "quantization_config is 'awq'"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, "rope type 'yarn'"),
        ("rope_scaling", "yarn", "rope_scaling is 'yarn'"),
        ("vocab_size", None, "vocab_size missing"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("hidden_size", 896.0, "hidden_size is 896.0"),
        ("hidden_size", "896", "hidden_size is '896'"),
        ("intermediate_size", True, "intermediate_size is True"),
        ("num_key_value_heads", 4, "num_attention_heads 14 is not a multiple of num_key_value_heads 4"),
        ("hidden_size", 897, "hidden_size 897 is not a multiple of num_attention_heads 14"),
        ("head_dim", 63, "head_dim is 63"),
        ("head_dim", -64, "head_dim is -64"),
        ("head_dim", "64", "head_dim is '64'"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6'"),
        ("rope_theta", float("nan"), "rope_theta is nan"),
        ("rope_theta", float("inf"), "rope_theta is inf"),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false'"),
        ("eos_token_id", 151936, "eos_token_id 151936 is outside the vocabulary of 151936"),
        ("eos_token_id", [-1], "eos_token_id -1"),
        ("eos_token_id", 1.5, "eos_token_id is 1.5"),
        ("eos_token_id", [3, "</s>"], "eos_token_id is .*</s>"),
    ],
)
def test_a_bad_value_is_named(tmp_path, key, value, message):
    path = write(tmp_path, "config.json", {**CODER, key: value})
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"qwen2"', "null", "\x00\x01"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, name, text):
    write(tmp_path, "config.json", CODER)
    broken = write(tmp_path, name, text)
    with pytest.raises(ValueError) as caught:
        ModelConfig.read(tmp_path / "config.json")
    assert str(broken) in str(caught.value)


def test_a_stop_token_outside_the_vocabulary_names_its_file(tmp_path):
    write(tmp_path, "config.json", CODER)
    generation = write(tmp_path, "generation_config.json", {"eos_token_id": [151936]})
    with pytest.raises(ValueError, match="eos_token_id 151936") as caught:
        ModelConfig.read(tmp_path / "config.json")
    assert str(generation) in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "config.json", tmp_path):
        with pytest.raises(ValueError, match="cannot be read") as caught:
            ModelConfig.read(path)
        assert str(path) in str(caught.value)
