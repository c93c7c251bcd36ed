"""The script that trains the tiny model, end to end on a small corpus, and the folder that ships."""

import json
import math
import random
import re
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from toys import TOY, random_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoqwen import tiny
from nanoqwen.config import ModelConfig
from nanoqwen.paths import TINY
from nanoqwen.reference import Qwen2, build

STDLIB = Path(sysconfig.get_path("stdlib"))
SMALL = ["--steps", "20", "--batch", "4", "--length", "32", "--every", "5", "--device", "cpu", "--no-compile"]
FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "training.json",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """So small a model gains nothing from a second thread, and waits for it where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("a corpus") / "python"
    shutil.copytree(STDLIB / "json", folder / "json", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("argparse.py", "textwrap.py"):
        shutil.copy(STDLIB / name, folder / name)
    shutil.copy(STDLIB / "bisect.py", folder / "held_out_26.py")  # a name whose hash falls on the validation side
    return folder


@pytest.fixture
def quick(monkeypatch):
    """A still smaller model, and no completions, for runs that are about the script and not about its result."""
    full = tiny.tiny_config
    fewer = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 2}
    monkeypatch.setattr(tiny, "tiny_config", lambda tokenizer: replace(full(tokenizer), **fewer))
    monkeypatch.setattr(tiny, "sample_completions", lambda model, tokenizer: [])


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "nanoqwen-tiny"
    tiny.main([*SMALL, "--stdlib", str(corpus), "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def tokenizer(corpus):
    train, _ = tiny.read_corpus(corpus)
    return tiny.train_tokenizer(list(train.values()))


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def ours(folder: Path) -> Qwen2:
    weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
    return build(ModelConfig.read(folder / "config.json"), weights)


# --- The run ----------------------------------------------------------------------------------------------------------


def test_the_loss_goes_down_and_the_numbers_agree(trained):
    facts = facts_of(trained)
    losses = [row["validation_loss"] for row in facts["curve"]]
    assert [row["step"] for row in facts["curve"]] == [5, 10, 15, 20]
    assert losses[-1] < losses[0] < math.log(4096)
    assert facts["validation_loss"] == pytest.approx(min(losses), abs=0.01), "bf16 weights: nearly the same loss"
    nats = facts["validation_loss"] * (facts["validation_tokens"] - 1)
    assert facts["table"][-1]["bits_per_byte"] == pytest.approx(nats / math.log(2) / facts["validation_bytes"])
    assert facts["seen_tokens"] == 18 * 4 * 32 + 2 * 2 * 128, "every eighth step has windows four times as long"


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(corpus, tmp_path, quick):
    for name, seed in (("once", "0"), ("again", "0"), ("other", "1")):
        tiny.main([*SMALL, "--seed", seed, "--stdlib", str(corpus), "--out", str(tmp_path / name)])

    def written(run: str, file: str) -> bytes:
        return (tmp_path / run / file).read_bytes()

    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert written("once", file) == written("again", file)
    assert written("once", "model.safetensors") != written("other", "model.safetensors")
    assert written("once", "tokenizer.json") == written("other", "tokenizer.json"), "the vocabulary has no seed"


def test_the_folder_is_whole_small_and_tells_no_path(trained, corpus):
    assert {path.name for path in trained.iterdir()} == FILES
    assert sum(path.stat().st_size for path in trained.iterdir()) <= 12_000_000
    for path in trained.iterdir():
        assert str(corpus.parent).encode() not in path.read_bytes()


def test_the_card_carries_the_measured_numbers(trained):
    card, facts = (trained / "README.md").read_text(encoding="utf-8"), facts_of(trained)
    for row in facts["table"]:
        assert f"| {row['model']} | {row['bits_per_byte']:.3f} |" in card
    assert f"**{facts['validation_loss']:.3f} nats a" in card
    assert f"{facts['train_seconds']:.0f} seconds" in card
    assert "--steps 20 --batch 4 --length 32 --lr 0.002 --weight-decay 0.1 --dropout 0.1 --seed 0" in card
    assert all(sample["completion"] in card for sample in facts["samples"])


def test_the_weights_of_the_lowest_validation_loss_are_kept(corpus, tmp_path, monkeypatch, quick):
    losses, seen = iter([5.0, 3.0, 4.0, 6.0, 3.0, 3.0]), []

    def scripted(model, stream, length, rows):
        seen.append(model.model.embed_tokens.weight.detach().bfloat16())
        return next(losses) * (len(stream) - 1)

    monkeypatch.setattr(tiny, "validation_nats", scripted)
    tiny.main([*SMALL, "--steps", "4", "--every", "1", "--stdlib", str(corpus), "--out", str(tmp_path)])
    kept = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert [torch.equal(kept, weights) for weights in seen[:4]] == [False, True, False, False]
    assert facts_of(tmp_path)["best_step"] == 2


def test_a_run_stopped_by_hand_writes_what_it_has(corpus, tmp_path, monkeypatch, quick):
    draw, calls = tiny.draw, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 13:  # two draws a step: in the seventh
            raise KeyboardInterrupt
        return draw(*args)

    monkeypatch.setattr(tiny, "draw", interrupted)
    tiny.main([*SMALL, "--stdlib", str(corpus), "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert facts_of(tmp_path)["curve"][-1]["step"] == 5


def test_a_run_that_fails_leaves_the_folder_as_it_was(corpus, tmp_path, monkeypatch, quick):
    (tmp_path / "model.safetensors").write_bytes(b"the old weights")
    monkeypatch.setattr(tiny, "model_card", lambda facts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.main([*SMALL, "--steps", "1", "--stdlib", str(corpus), "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == b"the old weights"


@pytest.mark.parametrize(
    "option", ["--steps=0", "--batch=1", "--length=4", "--length=513", "--every=0", "--dropout=1.0"]
)
def test_a_bad_option_is_refused_by_name(option, capsys):
    with pytest.raises(SystemExit):
        tiny.parse([option])
    name, value = option.split("=")
    assert f"{name} is {value}" in capsys.readouterr().err


# --- The corpus -------------------------------------------------------------------------------------------------------


def test_no_text_is_in_both_parts_and_the_split_depends_on_the_path_alone(corpus, tmp_path):
    train, valid = tiny.read_corpus(corpus)
    assert train and valid and not set(train) & set(valid) and not set(train.values()) & set(valid.values())
    for name in valid:  # the same file in other company falls on the same side
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(corpus / name, tmp_path / name)
    (tmp_path / "x.py").write_text("x = 1\n")
    assert tiny.read_corpus(tmp_path)[1] == valid


def test_what_is_no_plain_library_source_is_left_out(corpus, tmp_path):
    folder = tmp_path / "python"
    shutil.copytree(corpus, folder)
    for name in (
        "site-packages/numpy/core.py", "dist-packages/a.py", "lib2to3/tests/data/b.py", "pydoc_data/topics.py",
        "encodings/cp437.py", "_sysconfigdata__linux_.py", "config-3.11/python-config.py",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"name = {name!r}\n")
    (folder / "latin.py").write_bytes("# coding: latin-1\nname = 'é'\n".encode("latin-1"))
    (folder / "empty.py").touch()
    (folder / "notes.txt").write_text("not code\n")
    shutil.copy(folder / "json" / "decoder.py", folder / "zz_copy.py")
    assert tiny.read_corpus(folder) == tiny.read_corpus(corpus)


def test_a_folder_without_a_corpus_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        tiny.read_corpus(tmp_path / "missing")
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        tiny.read_corpus(tmp_path)


def test_repeated_lines_are_counted_letter_by_letter():
    train = {"a": "import a_rather_long_name\nx = 1\n"}
    valid = {"b": "    import a_rather_long_name\nx = 1\nimport another_long_name_\n"}
    assert tiny.repeated_lines(train, valid) == 0.5


# --- Tokens -----------------------------------------------------------------------------------------------------------

HARD = (
    "def f(x):\n\tif x:\r\n        return 'naïve 中文 🙂👩‍👩‍👧'  \n\n\n\x00"
    + " " * 1000
    + "<|endoftext|><|fim_middle|>"
)


def test_text_survives_the_tokenizer(tokenizer):
    (ids,) = tiny.encode_texts(tokenizer, [HARD])
    assert tokenizer.decode(ids, skip_special_tokens=False) == HARD
    assert not set(ids) & {tokenizer.token_to_id(token) for token in tiny.SPECIAL}, "text is text"


def test_the_special_tokens_are_the_last_seven_and_still_work_when_asked_for(tokenizer):
    size = tokenizer.get_vocab_size()
    assert size <= 4096
    assert [tokenizer.token_to_id(token) for token in tiny.SPECIAL] == list(range(size - 7, size))
    tiny.encode_texts(tokenizer, ["x"])
    assert tokenizer.encode("<|fim_suffix|>").ids == [tokenizer.token_to_id("<|fim_suffix|>")]


def test_indentation_costs_few_tokens(tokenizer):
    text = "def f():\n        return x\n"
    assert len(tokenizer.encode(text).ids) <= 9
    assert "ĠĠĠĠĠĠĠ" in tokenizer.encode(text).tokens


def test_every_text_stands_after_an_end_of_text(tokenizer):
    texts = ["a = 1\n", "b = 2\n"]
    end = tokenizer.token_to_id(tiny.END)
    ids = tiny.encode_plain(tokenizer, texts)
    assert ids == [end, *tokenizer.encode(texts[0]).ids, end, *tokenizer.encode(texts[1]).ids, end]


def test_training_text_is_cut_anywhere_and_loses_no_character(tokenizer, corpus):
    text = (corpus / "argparse.py").read_text(encoding="utf-8")
    whole, cut = tiny.encode_plain(tokenizer, [text]), tiny.encode_plain(tokenizer, [text], random.Random(0))
    assert tokenizer.decode(cut[1:-1], skip_special_tokens=False) == text
    assert len(whole) < len(cut) < 1.25 * len(whole)


def test_dropout_works_in_training_only_and_can_be_off():
    tokens = torch.arange(20)[None]

    def model_with(p: float) -> Qwen2:
        model = Qwen2(TOY)
        model.load_state_dict({**random_weights(TOY)})
        tiny.add_dropout(model, p)
        return model

    model, plain = model_with(0.2), build(TOY, random_weights(TOY))
    assert not torch.allclose(model.train()(tokens), model(tokens))
    torch.testing.assert_close(model.eval()(tokens), plain(tokens))
    torch.testing.assert_close(model_with(0.0).train()(tokens), plain(tokens))


def test_fill_in_the_middle_loses_no_character(tokenizer, corpus):
    text = (corpus / "json" / "decoder.py").read_text(encoding="utf-8")
    ids = tiny.encode_fim(tokenizer, [text], random.Random(0))
    told = tokenizer.decode(ids, skip_special_tokens=False)
    pieces = told.removesuffix(tiny.END).split(tiny.END)
    assert len(pieces) > 5
    rebuilt = ""
    for piece in pieces:
        before, rest = piece.removeprefix(tiny.PREFIX).split(tiny.SUFFIX)
        after, middle = rest.split(tiny.MIDDLE)
        rebuilt += before + middle + after
    assert rebuilt == text


def test_windows_are_runs_of_the_stream_and_reach_both_its_ends():
    stream = torch.arange(100, 140)
    rows = tiny.draw(stream, torch.arange(40), 500, 7, torch.Generator().manual_seed(0))
    assert rows.shape == (500, 8)
    assert torch.equal(rows - rows[:, :1], torch.arange(8).expand(500, 8))
    assert rows.min() == 100 and rows.max() == 139
    starts = torch.tensor([3, 10, 32, 33, 39])  # from 33 on, eight tokens do not fit
    rows = tiny.draw(stream, starts, 500, 7, torch.Generator().manual_seed(0))
    assert set(rows[:, 0].tolist()) == {103, 110, 132}


# --- Losses and baselines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [49, 50, 33, 17, 5])
def test_validation_counts_every_token_but_the_first_once(count):
    model = build(TOY, random_weights(TOY))
    stream = torch.randint(257, (count,), generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for start in range(0, count - 1, 16):
        window = stream[start : start + 17]
        expected += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum").item()
    assert tiny.validation_nats(model, stream, 16, rows=2) == pytest.approx(expected, rel=1e-5)


def ngram_bits_slowly(train: bytes, valid: bytes, order: int) -> float:
    """Witten-Bell, read off the paper: one byte at a time, counting by search."""

    def probability(context: bytes, byte: int) -> float:
        lower = probability(context[1:], byte) if context else 1 / 256
        n = len(context)
        followers = [train[i + n] for i in range(len(train) - n) if train[i : i + n] == context]
        if not followers:
            return lower
        kinds = len(set(followers))
        return (followers.count(byte) + kinds * lower) / (len(followers) + kinds)

    bits = [-math.log2(probability(valid[max(0, i - order + 1) : i], byte)) for i, byte in enumerate(valid)]
    return sum(bits) / len(bits)


def test_ngrams_equal_a_count_by_hand():
    rng = np.random.default_rng(0)
    train = bytes(rng.choice(list(b"abc \xff\x00"), 150, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]))
    valid = bytes(rng.choice(list(b"abcd \xff"), 25))
    fast = tiny.ngram_bits(train, valid, 5)
    assert fast == pytest.approx([ngram_bits_slowly(train, valid, n) for n in range(1, 6)])


def test_longer_contexts_help_on_code_and_a_unigram_of_noise_is_8_bits(corpus):
    train, valid = tiny.read_corpus(corpus)
    bits = tiny.ngram_bits("".join(train.values()).encode(), "".join(valid.values()).encode(), 4)
    assert bits == sorted(bits, reverse=True) and 1 < bits[-1] < bits[0] < 6
    noise = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8).tobytes()
    assert tiny.ngram_bits(noise, noise[:50_000], 1)[0] == pytest.approx(8, abs=0.01)


# --- What loads it ----------------------------------------------------------------------------------------------------

shipped = pytest.param(TINY, id="shipped", marks=pytest.mark.skipif(not (TINY / "model.safetensors").is_file(), reason="the tiny model is not in data/"))  # fmt: skip # noqa: E501


@pytest.fixture(params=[pytest.param(None, id="just trained"), shipped])
def folder(request, trained) -> Path:
    return request.param or trained


def test_transformers_loads_the_model_with_equal_logits(folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(4096, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
    assert (ours(folder)(tokens) - expected).abs().max() <= 1e-5
    assert theirs.dtype == torch.float32 and expected.std() > 0.1


def test_transformers_loads_the_tokenizer_with_equal_ids(folder):
    theirs = AutoTokenizer.from_pretrained(folder)
    raw = tiny.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (
        HARD,
        "class A:\n    def f(self):\n        pass\n",
        tiny.PREFIX + "a" + tiny.SUFFIX + "b" + tiny.MIDDLE,
    ):
        assert theirs(text)["input_ids"] == raw.encode(text).ids
        assert theirs.decode(raw.encode(text).ids) == text
    assert theirs.eos_token == tiny.END and theirs.eos_token_id in ModelConfig.read(folder / "config.json").eos_token_id
    chat = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_transformers_stops_where_we_stop(folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert tuple(theirs.generation_config.eos_token_id) == ModelConfig.read(folder / "config.json").eos_token_id


@pytest.mark.skipif(not (TINY / "model.safetensors").is_file(), reason="the tiny model is not in data/")
class TestTheShippedModel:
    def test_it_is_small_and_its_vocabulary_is_full(self):
        assert {path.name for path in TINY.iterdir()} == FILES
        assert sum(path.stat().st_size for path in TINY.iterdir()) <= 12_000_000
        assert tiny.Tokenizer.from_file(str(TINY / "tokenizer.json")).get_vocab_size() == 4096

    def test_it_beats_every_baseline(self):
        *baselines, model = facts_of(TINY)["table"]
        assert model["bits_per_byte"] < 0.85 * min(row["bits_per_byte"] for row in baselines)

    def test_def_continues_as_python(self):
        model, tokenizer = ours(TINY), tiny.Tokenizer.from_file(str(TINY / "tokenizer.json"))
        prompt = tokenizer.encode(tiny.END + "def ").ids
        text = "def " + tiny.complete(model, tokenizer, prompt)
        assert re.match(r"def \w+\(.*\).*:\n\s+\S", text), text
