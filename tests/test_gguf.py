"""GGUF files: converted once, whole, under their hash; equal to the `gguf` library and to `transformers`."""

import errno
import os
import threading
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import TOY, random_weights, toy_tokenizer, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoqwen import gguf_convert, reference
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.gguf_convert import convert, file_sha256, open_gguf, plan
from nanoqwen.tokenizer import Tokenizer

# 408 tokens are real, the rest padding. Stop tokens as the file gives them: its own, then <|endoftext|>.
TOKENIZER = toy_tokenizer()
CONFIG = replace(TOY, vocab_size=512, eos_token_id=(402, 400))
TIED = replace(CONFIG, tie_word_embeddings=True)
PROMPT = torch.tensor([[5, 200, 31, 7, 256]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def toy(path, config=CONFIG, kind=Kind.Q8_0, **how):
    return write_gguf(path, config, random_weights(config), TOKENIZER, kind, **how)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1, Kind.Q4_0, Kind.Q4_1])
def test_every_type_is_dequantised_as_the_library_does(tmp_path, kind):
    held = toy(tmp_path / "toy.gguf", kind=kind)
    checkpoint = open_checkpoint(tmp_path / "toy.gguf")
    weights = checkpoint.weights(torch.bfloat16)
    assert checkpoint.config == CONFIG
    assert list(weights) == list(CONFIG.weight_shapes())
    assert all(torch.equal(weights[name], held[name].bfloat16()) for name in weights)


def test_large_tensors_are_converted_piece_by_piece(tmp_path, monkeypatch):
    held = toy(tmp_path / "toy.gguf")
    monkeypatch.setattr(gguf_convert, "_CHUNK", 64 * 3)
    weights = open_checkpoint(tmp_path / "toy.gguf").weights(torch.bfloat16)
    assert all(torch.equal(weights[name], held[name].bfloat16()) for name in weights)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["with a head", "tied"])
def test_transformers_reads_the_converted_folder(tmp_path, config):
    toy(tmp_path / "toy.gguf", config)
    checkpoint = open_checkpoint(tmp_path / "toy.gguf")
    assert checkpoint.config.tie_word_embeddings == config.tie_word_embeddings
    ours = reference.build(checkpoint.config, checkpoint.weights(torch.float32))(PROMPT)
    twin = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval().requires_grad_(False)
    torch.testing.assert_close(ours, twin(PROMPT).logits, rtol=0, atol=1e-5)
    assert twin.generation_config.eos_token_id == [402, 400]


def test_the_vocabulary_survives_and_padding_is_no_token(tmp_path):
    toy(tmp_path / "toy.gguf")
    path = open_checkpoint(tmp_path / "toy.gguf").tokenizer_path
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    assert ours.num_tokens == len(theirs) == 408
    assert ours.special == {t.content: i for i, t in TOKENIZER.get_added_tokens_decoder().items()}
    assert ours.eos_ids == CONFIG.eos_token_id
    text = "def f(x):\n\treturn [x] * 7  # naïve 中文 [PAD410]<|im_end|><|fim_middle|>"
    want = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, allow_special=True) == theirs.encode(text) == want
    marked = {t.content for t in theirs.added_tokens_decoder.values() if t.special}
    assert marked == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}  # as in the official release
    assert ours.chat([{"role": "user", "content": "hi"}]) == theirs.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )


def test_a_tokenizer_loads_from_the_gguf_itself(tmp_path):
    toy(tmp_path / "toy.gguf")
    assert Tokenizer.load(tmp_path / "toy.gguf").num_tokens == 408


def test_a_folder_with_one_gguf_is_that_gguf(tmp_path):
    (tmp_path / "folder").mkdir()
    toy(tmp_path / "folder" / "toy.gguf")
    assert open_checkpoint(tmp_path / "folder").config == CONFIG


def test_it_is_converted_once(tmp_path, monkeypatch):
    toy(tmp_path / "toy.gguf")
    first = convert(tmp_path / "toy.gguf")
    monkeypatch.setattr(gguf_convert, "weights", lambda *_: pytest.fail("converted again"))
    monkeypatch.setattr(gguf_convert.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert convert(tmp_path / "toy.gguf") == first
    os.rename(tmp_path / "toy.gguf", tmp_path / "moved.gguf")
    assert convert(tmp_path / "moved.gguf") == first


def test_a_changed_file_is_converted_anew(tmp_path):
    path = tmp_path / "toy.gguf"
    toy(path)
    first = convert(path)
    toy(path, kind=Kind.Q4_0)
    second = convert(path)
    assert first != second
    assert second.name[:16] == file_sha256(path)[:16]


def test_many_at_once_convert_it_once(tmp_path, monkeypatch):
    toy(tmp_path / "toy.gguf")
    calls, real = [], gguf_convert.weights
    monkeypatch.setattr(gguf_convert, "weights", lambda *args: calls.append(1) or real(*args))
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(convert(tmp_path / "toy.gguf"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 6 and len(set(folders)) == 1 and len(calls) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_conversion_that_breaks_off_leaves_nothing_under_the_final_name(tmp_path, monkeypatch, cache, error):
    toy(tmp_path / "toy.gguf")

    def breaks(tensors, file, **_):
        file.write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "save_file", breaks)
        with pytest.raises(type(error)) as raised:
            convert(tmp_path / "toy.gguf")
    if isinstance(error, OSError):
        assert "No space left" in str(raised.value) and "NANOQWEN_CACHE" in str(raised.value)
    assert not [entry for entry in (cache / "converted").iterdir() if entry.is_dir() and entry.name != "hashes"]
    assert open_checkpoint(tmp_path / "toy.gguf").config == CONFIG


def test_what_a_killed_conversion_left_does_no_harm(tmp_path):
    toy(tmp_path / "toy.gguf")
    folder = convert(tmp_path / "toy.gguf")
    os.rename(folder, folder.with_name(folder.name + ".tmp"))  # killed just before its last step
    (folder.with_name(folder.name + ".tmp") / "model.safetensors").write_bytes(b"half")
    assert open_checkpoint(tmp_path / "toy.gguf").config == CONFIG
    assert not folder.with_name(folder.name + ".tmp").exists()


def test_another_architecture_is_named(tmp_path):
    toy(tmp_path / "toy.gguf", architecture="llama")
    with pytest.raises(ValueError, match=r"general\.architecture is 'llama'; nanoqwen reads 'qwen2'"):
        open_checkpoint(tmp_path / "toy.gguf")


def test_missing_and_misshapen_tensors_are_all_named(tmp_path, cache):
    weights = random_weights(CONFIG)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.k_proj.bias"] = torch.randn(16)
    write_gguf(tmp_path / "toy.gguf", CONFIG, weights, TOKENIZER)
    with pytest.raises(ValueError) as error:
        open_checkpoint(tmp_path / "toy.gguf")
    assert "model.layers.1.mlp.up_proj.weight is missing" in str(error.value)
    assert "blk.0.attn_k.bias has shape (16,); the configuration wants (32,)" in str(error.value)
    assert not list((cache / "converted").glob("*-v*"))


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "toy.gguf", "qwen2")
    for add, value in (
        (writer.add_context_length, 512),
        (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 128),
        (writer.add_block_count, 1),
        (writer.add_head_count, 4),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_token_list, ["a"]),
    ):
        add(value)
    writer.add_tensor("token_embd.weight", np.ones((512, 64), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"token_embd\.weight has type I8, which the gguf library cannot dequantise"):
        plan(open_gguf(tmp_path / "toy.gguf"), tmp_path / "toy.gguf")


def test_a_billion_layers_are_refused_at_once(tmp_path):
    path = tmp_path / "toy.gguf"
    toy(path)
    data, key = path.read_bytes(), b"qwen2.block_count"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + (10**9).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ValueError, match=r"block_count is 1000000000, but it holds only 27 tensors"):
        open_checkpoint(path)


def test_a_missing_metadata_key_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "toy.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", np.ones((512, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"has no qwen2\.block_count"):
        open_checkpoint(tmp_path / "toy.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "toy.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"starts with b'vers', not with b'GGUF'"):
        open_checkpoint(tmp_path / "toy.gguf")


def test_a_tensor_past_the_end_is_named(tmp_path):
    toy(tmp_path / "toy.gguf")
    os.truncate(tmp_path / "toy.gguf", (tmp_path / "toy.gguf").stat().st_size - 64)
    with pytest.raises(ValueError, match=r"truncated or damaged \(tensor .* ends at byte \d+, the file at byte \d+\)"):
        open_checkpoint(tmp_path / "toy.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "toy.gguf"
    toy(path)
    return path


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.99))
def test_a_file_cut_anywhere_is_refused(tmp_path, whole, share):
    (tmp_path / "toy.gguf").write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])
    with pytest.raises(ValueError, match=r"toy\.gguf"):
        open_checkpoint(tmp_path / "toy.gguf")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # a damaged scale may be NaN
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255))
def test_a_damaged_byte_of_the_metadata_is_an_error_or_harmless(tmp_path, whole, share, value):
    # The first 24 KB hold the counts, keys, vocabulary; never a crash, never another exception.
    damaged = bytearray(whole.read_bytes())
    damaged[int(24_000 * share)] ^= value
    path = tmp_path / "toy.gguf"
    path.write_bytes(damaged)
    try:
        convert(path)
    except ValueError as error:
        assert "toy.gguf" in str(error)


def test_the_real_file_holds_what_its_readers_say(real_model_path, monkeypatch):
    monkeypatch.delenv("NANOQWEN_CACHE")
    checkpoint = open_checkpoint(real_model_path)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_path)
    assert (checkpoint.config.num_hidden_layers, checkpoint.config.num_attention_heads) == (24, 14)
    assert tokenizer.num_tokens == 151665 and checkpoint.config.vocab_size == 151936
    assert tokenizer.eos_ids == checkpoint.config.eos_token_id == (151645, 151643)
    assert [tokenizer.special[f"<|fim_{part}|>"] for part in ("prefix", "middle", "suffix")] == [151659, 151660, 151661]
