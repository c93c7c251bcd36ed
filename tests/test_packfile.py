import errno
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import TOY, random_weights, save_tokenizer, save_toy, toy_tokenizer

from nanoqwen import cli, packfile, packing, quantize, reference
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.packfile import ENTRY_BYTES, HEADER_BYTES, open_packfile, write
from nanoqwen.paths import REPO
from nanoqwen.tokenizer import Tokenizer

SMALL = replace(TOY, vocab_size=448)
TIED = replace(SMALL, tie_word_embeddings=True)


def checkpoint(folder, config=SMALL, **how):
    weights = random_weights(config, **how)
    save_toy(
        folder,
        config,
        {name: weight.bfloat16().float() for name, weight in weights.items()},
    )
    save_tokenizer(folder, toy_tokenizer(400))
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("tied"), TIED)


@pytest.fixture(scope="module")
def whole(untied, tmp_path_factory):
    """The bytes of a good file."""
    return write(untied, tmp_path_factory.mktemp("whole") / "a.nanoqwen", group=64).path.read_bytes()


@pytest.fixture
def opened(tmp_path):
    def open_bytes(data):
        path = tmp_path / "file.nanoqwen"
        path.write_bytes(data)
        return open_packfile(path)

    return open_bytes


# A file


@pytest.mark.parametrize("which", ["untied", "tied"])
@pytest.mark.parametrize("head_bits", [16, 8])
@pytest.mark.parametrize("method", quantize.METHODS)
def test_the_file_is_the_quantised_model_bit_for_bit(request, tmp_path, which, head_bits, method):
    source = request.getfixturevalue(which)
    write(source, tmp_path / "a.nanoqwen", 32, method, head_bits)
    model, tokenizer = packfile.load(tmp_path / "a.nanoqwen")
    want = quantize.quantize_model(
        reference.build(source.config, source.weights(torch.bfloat16)), 32, method, head_bits
    )
    found, state = model.state_dict(), want.state_dict()
    assert list(found) == list(state)
    for name in state:
        assert found[name].dtype == state[name].dtype and torch.equal(found[name], state[name]), name
    ids = torch.arange(30)[None]
    assert torch.equal(model(ids), want(ids))
    assert model.config == source.config
    theirs = Tokenizer.load(source.tokenizer_path)
    text = "def f(x):\n    return x  # é 漢字"
    assert tokenizer.encode(text) == theirs.encode(text) and tokenizer.eos_ids == theirs.eos_ids
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == theirs.chat([{"role": "user", "content": "hi"}])
    assert model.num_tokens == tokenizer.num_tokens < SMALL.vocab_size


def test_another_dtype_is_only_a_cast(untied, tmp_path):
    write(untied, tmp_path / "a.nanoqwen", 64)
    model, _ = packfile.load(tmp_path / "a.nanoqwen", torch.float32)
    want = quantize.quantize_model(reference.build(untied.config, untied.weights(torch.float32)), 64)
    assert torch.equal(model(torch.arange(30)[None]), want(torch.arange(30)[None]))


@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_every_layout_gives_the_same_model(untied, tmp_path, layout):
    path = write(untied, tmp_path / "a.nanoqwen", 64, layout=layout).path
    file = open_packfile(path)
    want = quantize.quantize(untied.weights()["model.layers.1.mlp.up_proj.weight"], 64)
    words = file.tensor("model.layers.1.mlp.up_proj.words")
    assert file.plan.layout == layout and torch.equal(packing.unpack(words, layout, 128), want.values)
    assert torch.equal(file.model().model.layers[1].mlp.up_proj.weight, want.dequantize(torch.bfloat16))


def test_fp16_stays_fp16(tmp_path):
    folder = tmp_path / "half"
    weights = {name: w.half() for name, w in random_weights(SMALL).items()}
    save_toy(folder, SMALL, random_weights(SMALL))
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors")
    save_tokenizer(folder, toy_tokenizer(400))
    file = open_packfile(write(open_checkpoint(folder), tmp_path / "a.nanoqwen", 64).path)
    norm = file.tensor("model.norm.weight")
    assert norm.dtype == torch.float16 and torch.equal(norm, weights["model.norm.weight"])
    assert file.model()(torch.arange(9)[None]).dtype == torch.float16


def test_payloads_are_aligned_and_in_the_order_of_a_decode_step(whole, opened):
    file = opened(whole)
    entries = list(file.entries.values())
    assert all(entry.offset % 128 == 0 for entry in entries) and len(whole) % 128 == 0
    assert all(file.tensor(entry.name).data_ptr() % 128 == 0 for entry in entries)
    names = [entry.name for entry in entries]
    assert names[:3] == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert names[3:6] == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.words",
    ]
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_tensors_are_views_and_a_write_never_reaches_the_file(whole, opened):
    file = opened(whole)
    first, again = file.tensor("model.norm.weight"), file.tensor("model.norm.weight")
    assert first.data_ptr() == again.data_ptr()
    first.fill_(7)
    assert file.path.read_bytes() == whole
    file.path.chmod(0o444)
    assert not torch.equal(open_packfile(file.path).tensor("model.norm.weight"), first)
    with pytest.raises(KeyError, match=r"no tensor 'model.norm.bias'"):
        file.tensor("model.norm.bias")


def test_tensors_outlive_the_name_of_their_file(whole, opened):
    file = opened(whole)
    before = file.tensor("lm_head.weight").clone()
    file.path.unlink()
    assert torch.equal(file.tensor("lm_head.weight"), before)


def test_the_same_model_gives_the_same_bytes(untied, tmp_path, whole):
    assert write(untied, tmp_path / "b.nanoqwen", group=64).path.read_bytes() == whole


@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_small_pieces_of_a_tensor_make_the_same_file(untied, tmp_path, monkeypatch, layout):
    whole = write(untied, tmp_path / "a.nanoqwen", 64, head_bits=8, layout=layout).path.read_bytes()
    monkeypatch.setattr(packfile, "_PIECE", 17 * 64)
    assert write(untied, tmp_path / "b.nanoqwen", 64, head_bits=8, layout=layout).path.read_bytes() == whole


def test_the_documentation_gives_the_numbers_of_the_format():
    text = (REPO / "docs" / "packfile.md").read_text(encoding="utf-8")
    table = [(int(at), int(width)) for at, width in re.findall(r"^\| (\d+) \| (\d+) \|", text, re.M)]
    second = [at for at, _ in table].index(0, 1)
    header, entry = table[:second], table[second:]
    for rows, size in ((header, HEADER_BYTES), (entry, ENTRY_BYTES)):
        at = 0
        for offset, width in rows:
            assert offset == at
            at += width
        assert at == size
    assert packfile._ENTRY.size == ENTRY_BYTES and packfile._HEADER.size == 72
    for i, kind in enumerate(packfile.KINDS):
        assert f"{i} {kind}" in text
    for i, dtype in enumerate(packfile.DTYPES):
        assert f"{i} {str(dtype).removeprefix('torch.')}" in text


# Writing: nothing half-done


def left(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_failure_leaves_the_old_file_and_nothing_else(untied, tmp_path, monkeypatch, whole):
    path = tmp_path / "a.nanoqwen"
    path.write_bytes(whole)
    calls = []

    def fails(*args):
        calls.append(args)
        if len(calls) == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    original = quantize.quantize
    monkeypatch.setattr(quantize, "quantize", fails)
    with pytest.raises(OSError, match="No space left"):
        write(untied, path, 32)
    assert left(tmp_path) == ["a.nanoqwen"] and path.read_bytes() == whole


def test_a_killed_run_leaves_no_half_file_and_the_next_one_succeeds(untied, tmp_path, whole):
    code = """
import os, signal, sys
from nanoqwen import checkpoint, packfile, quantize
original, calls = quantize.quantize, []
def dies(*args):
    calls.append(args)
    if len(calls) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)
quantize.quantize = dies
packfile.write(checkpoint.open_checkpoint(sys.argv[1]), sys.argv[2], 64)
"""
    path = tmp_path / "a.nanoqwen"
    run = subprocess.run([sys.executable, "-c", code, str(untied.path), str(path)])
    assert run.returncode == -9 and not path.exists() and (tmp_path / "a.nanoqwen.partial").exists()
    write(untied, path, 64)
    assert path.read_bytes() == whole and left(tmp_path) == ["a.nanoqwen"]


def test_too_small_a_disk_is_told_before_anything_is_written(untied, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 10**5))
    with pytest.raises(OSError, match=r"has room for 0.00 GB, and 0.00 GB are needed"):
        write(untied, tmp_path / "a.nanoqwen", 64)
    assert left(tmp_path) == []


def test_two_runs_do_not_write_one_file(untied, tmp_path):
    from filelock import FileLock

    with (
        FileLock(tmp_path / "a.nanoqwen.lock"),
        pytest.raises(OSError, match="is being written by another process"),
    ):
        write(untied, tmp_path / "a.nanoqwen", 64)
    assert write(untied, tmp_path / "a.nanoqwen", 64).path.is_file()


@pytest.mark.parametrize(
    ("where", "how", "words"),
    [
        ("a.nanoqwen", {"group": 128}, "embedding|q_proj.weight has K = 64 columns, no multiple of group 128"),
        ("a.nanoqwen", {"group": 100}, "group is 100"),
        ("a.nanoqwen", {"method": "awq"}, "method is 'awq'"),
        ("a.nanoqwen", {"head_bits": 4}, "head_bits is 4"),
        ("a.nanoqwen", {"layout": 9}, "layout id is 9"),
        ("", {}, "is a folder"),
        ("none/a.nanoqwen", {}, "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_it_begins(untied, tmp_path, where, how, words):
    with pytest.raises((ValueError, OSError), match=words):
        write(untied, tmp_path / where, **{"group": 64, **how})
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, name, value):
    weights = random_weights(SMALL)
    weights[name].view(-1)[-1] = value
    save_tokenizer(save_toy(tmp_path / "bad", SMALL, weights), toy_tokenizer(400))
    for head_bits in (16, 8):
        with pytest.raises(ValueError, match=f"{name} holds"):
            write(open_checkpoint(tmp_path / "bad"), tmp_path / "a.nanoqwen", 64, head_bits=head_bits)
    assert left(tmp_path) == ["bad"]


def test_a_model_without_its_tokenizer_is_refused(tmp_path):
    save_toy(tmp_path / "bare", SMALL)
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json"):
        write(open_checkpoint(tmp_path / "bare"), tmp_path / "a.nanoqwen", 64)


# Reading: every byte is checked


def sealed(front, body):
    """A file with valid checksums around a header's numbers and a table: what a forger would write."""
    return front[:-4] + struct.pack("<I", zlib.crc32(front[:-4])) + body


def forged(data, change_header=None, change_entry=None, where=None):
    """`data` with some fields of the header, or of the table's entry `where`, replaced and every checksum right."""
    header = list(packfile._HEADER.unpack_from(data))
    count = header[4]
    end = HEADER_BYTES + count * ENTRY_BYTES
    fields = [list(entry) for entry in packfile._ENTRY.iter_unpack(data[HEADER_BYTES:end])]
    if change_entry:
        names = [entry[0].rstrip(b"\0").decode() for entry in fields]
        entry = fields[names.index(where)]
        for place, value in change_entry.items():
            entry[place] = value(entry[place]) if callable(value) else value
    table = b"".join(packfile._ENTRY.pack(*entry) for entry in fields)
    header[7] = hashlib.sha256(table).digest()
    for place, value in (change_header or {}).items():
        header[place] = value(header[place]) if callable(value) else value
    front = packfile._HEADER.pack(*header).ljust(HEADER_BYTES, b"\0")
    return sealed(front, table + data[end:])


NAME, KIND, DTYPE, LAYOUT, GROUP, DIMS, ZERO, ROWS, COLS, OFFSET, NBYTES, SHA, ZERO2 = range(13)
WORDS, NORM = "model.layers.0.mlp.up_proj.words", "model.layers.0.input_layernorm.weight"


def test_a_forgery_that_changes_nothing_opens(whole, opened):
    assert forged(whole) == whole
    assert opened(forged(whole)).config == SMALL


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({0: b"GGUFxxxx"}, "is no .nanoqwen file: it starts with b'GGUFxxxx'"),
        ({1: 2}, "has version 2; this nanoqwen reads 1"),
        ({2: 64}, "alignment 64"),
        ({3: 128}, "entries of 128 bytes"),
        ({4: 0}, "table of 0 entries"),
        ({4: 2**32 - 1}, "table of 4294967295 entries, up to byte 824633720896, does not fit the file"),
        ({5: 2**63}, "does not fit"),
        ({5: lambda first: first + 128}, "does not fit"),
        ({6: 2**64 - 1}, "is truncated or overlong: the header says 18446744073709551615 bytes"),
        ({7: bytes(32)}, "its table is damaged"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(whole, opened, header, words):
    with pytest.raises(ValueError, match=words):
        opened(forged(whole, header))


@pytest.mark.parametrize(
    ("where", "entry", "words"),
    [
        (WORDS, {LAYOUT: 77}, f"{WORDS} has layout id 77; this nanoqwen knows 0, 1"),
        (WORDS, {LAYOUT: 0}, "holds .*up_proj.words .*layout 0.* where its configuration wants .*layout 1"),
        (WORDS, {GROUP: 32}, "group 32.* where its configuration wants"),
        (WORDS, {GROUP: 0}, "group 0.* where its configuration wants"),
        (WORDS, {KIND: 2}, "INT8 values of torch.int32.* where its configuration wants .*INT4 words"),
        (WORDS, {KIND: 5}, "kind 5"),
        (WORDS, {DTYPE: 5}, "dtype 5"),
        (WORDS, {DTYPE: 1}, "takes 1024 bytes; the table says 4096"),
        (WORDS, {DIMS: 3}, "in 3 dimensions"),
        (WORDS, {DIMS: 0}, "in 0 dimensions"),
        (WORDS, {ROWS: 0}, "has shape .0, 8."),
        (WORDS, {ROWS: 8, COLS: 128}, r"\[8, 128\].* where its configuration wants .*\[128, 8\]"),
        (WORDS, {ROWS: 2**62, COLS: 2**62}, "takes 85070591730234615865843651857942052864 bytes; the table says 4096"),
        (WORDS, {ROWS: 2**61, NBYTES: 2**64 - 2**12}, "takes 73786976294838206464 bytes"),
        (WORDS, {ROWS: 2**50, NBYTES: 2**55}, "ends at byte 3602.*, past the end of the file"),
        (WORDS, {OFFSET: 2**64 - 128}, "past the end"),
        (WORDS, {OFFSET: lambda at: at + 4}, "no multiple of 128"),
        (WORDS, {OFFSET: lambda at: at - 128}, "overlaps what is before it"),
        (WORDS, {OFFSET: 0}, "overlaps"),
        (WORDS, {OFFSET: lambda at: at + 128}, "leaves a gap"),
        (WORDS, {ZERO: 1}, "does not know"),
        (WORDS, {ZERO2: 1}, "does not know"),
        (WORDS, {SHA: bytes(32)}, f"{WORDS} is damaged"),
        (WORDS, {NAME: b"model.norm.weight"}, "a tensor's name is 'model.norm.weight'; .*no two the same"),
        (WORDS, {NAME: b"\xff\xfe"}, "not UTF-8"),
        (WORDS, {NAME: b""}, "a tensor's name is ''"),
        (WORDS, {NAME: b"a\0b"}, "a tensor's name is"),
        (WORDS, {NAME: b"model.layers.0.mlp.other.words"}, "holds model.layers.0.mlp.other.words"),
        (NORM, {ROWS: 32, DTYPE: 2}, "torch.int32.* where its configuration wants"),
        (NORM, {DTYPE: 3}, "torch.float16.* where its configuration wants"),
        ("tokenizer.json", {NAME: b"../../etc/passwd"}, "carries a file '../../etc/passwd'"),
        ("config.json", {NAME: b"chat_template.jinja"}, "has no config.json"),
        ("config.json", {KIND: 0}, "has no config.json"),
        ("config.json", {DTYPE: 1}, "holds config.json .*torch.int8.* not plain bytes"),
        ("tokenizer.json", {GROUP: 32}, "holds tokenizer.json .*group 32.*not plain bytes"),
        ("tokenizer_config.json", {KIND: 0}, "files do not come before|holds tokenizer_config.json"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(whole, opened, where, entry, words):
    with pytest.raises(ValueError, match=words):
        opened(forged(whole, change_entry=entry, where=where))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**9}, "has 1000000000 layers"),
        ({"num_hidden_layers": 1}, "holds .* where its configuration wants"),
        ({"vocab_size": 449}, r"\[448, 64\].* where its configuration wants .*\[449, 64\]"),
        ({"hidden_size": 96, "head_dim": 16}, "cannot be read|no multiple of group"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"tie_word_embeddings": True}, "tensors; its configuration wants"),
        ("[1]", "holds a list"),
        ("[" * 100_000, "cannot be read"),
        ("\xff", "cannot be read"),
    ],
)
def test_a_configuration_of_another_model_is_refused(whole, opened, change, words):
    count = packfile._HEADER.unpack_from(whole)[4]
    file = opened(whole)
    names = list(file.entries)
    contents = [bytes(file.tensor(name).view(-1).view(torch.uint8).numpy()) for name in names]
    config = json.loads(contents[0])
    contents[0] = change.encode("latin-1") if isinstance(change, str) else json.dumps({**config, **change}).encode()
    entries = [replace(file.entries[name]) for name in names]
    entries[0] = replace(entries[0], shape=(len(contents[0]),))
    entries = [
        replace(entry, sha256=hashlib.sha256(content).digest())
        for entry, content in zip(packfile._placed(entries), contents, strict=True)
    ]
    size = packfile._aligned(entries[-1].offset + entries[-1].nbytes)
    data = bytearray(size)
    data[: HEADER_BYTES + count * ENTRY_BYTES] = packfile._front(entries, size)
    for entry, content in zip(entries, contents, strict=True):
        data[entry.offset : entry.offset + entry.nbytes] = content
    with pytest.raises(ValueError, match=words):
        opened(bytes(data))


def test_no_file_and_a_folder_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_packfile(tmp_path / "none.nanoqwen")
    with pytest.raises(ValueError, match="is a folder"):
        open_packfile(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 255, 256, 257, 4000, -129, -1])
def test_a_truncated_file_is_refused(whole, opened, size):
    with pytest.raises(ValueError, match=r"truncated|is no .nanoqwen file"):
        opened(whole[:size])


def test_a_file_that_goes_on_is_refused(whole, opened):
    for more in (b"\0", bytes(128)):
        with pytest.raises(ValueError, match="overlong"):
            opened(whole + more)
        with pytest.raises(ValueError, match="bytes follow the last tensor"):
            opened(forged(whole, {6: len(whole) + len(more)}) + more)


fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(st.data())
def test_any_flipped_bit_is_noticed(whole, opened, draw):
    front = HEADER_BYTES + ENTRY_BYTES * packfile._HEADER.unpack_from(whole)[4]
    limit = draw.draw(st.sampled_from([HEADER_BYTES, front, len(whole)]))
    bit = draw.draw(st.integers(0, 8 * limit - 1))
    data = bytearray(whole)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError):
        opened(bytes(data))


@fuzz
@given(st.integers(0), st.binary(max_size=64))
def test_any_cut_or_overwritten_file_is_refused(whole, opened, at, junk):
    at %= len(whole)
    for data in (whole[:at], whole[:at] + junk + whole[at + len(junk) :], whole[:at] + whole[at + 1 :]):
        if data != whole:
            with pytest.raises(ValueError):
                opened(data)


@fuzz
@given(st.binary(max_size=2000), st.booleans())
def test_random_bytes_are_refused(opened, data, magic):
    with pytest.raises(ValueError):
        opened((packfile.MAGIC + struct.pack("<I", 1) if magic else b"") + data)


numbers = st.one_of(st.integers(0, 300), st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 2**64 - 128]))


@fuzz
@given(
    st.dictionaries(st.integers(KIND, ZERO), numbers.map(lambda n: n % 2**32), max_size=2),
    st.dictionaries(st.sampled_from([ROWS, COLS, OFFSET, NBYTES, ZERO2]), numbers, max_size=3),
    st.sampled_from([WORDS, NORM, "config.json", "tokenizer.json", "model.embed_tokens.weight", "lm_head.weight"]),
)
def test_a_random_table_opens_as_it_was_or_not_at_all(whole, opened, small, large, where):
    data = forged(whole, change_entry=small | large, where=where)
    if data == whole:
        opened(data)
        return
    with pytest.raises(ValueError):
        opened(data)


@fuzz
@given(st.dictionaries(st.integers(1, 6), numbers, min_size=1, max_size=3))
def test_a_random_header_is_refused(whole, opened, changes):
    data = forged(whole, {place: n % 2 ** (32 if place < 5 else 64) for place, n in changes.items()})
    if data != whole:
        with pytest.raises(ValueError):
            opened(data)


# The command


def test_the_command_packs_and_reports(untied, tmp_path, capsys):
    path = tmp_path / "out file.nanoqwen"
    assert cli.main(["pack", str(untied.path), str(path), "--group", "32", "--method", "rtn", "--head", "8"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{path}\n" and "MB in " in err and "peak memory" in err
    file = open_packfile(path)
    assert (file.plan.group, file.plan.head_bits, file.plan.layout) == (32, 8, packing.VALUE_SHUFFLE)


@pytest.mark.parametrize("words", [["--group", "128"], ["--group", "48"]])
def test_what_the_command_refuses_is_one_line(untied, tmp_path, capsys, words):
    assert cli.main(["pack", str(untied.path), str(tmp_path / "a.nanoqwen"), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("nanoqwen pack: ") and err.count("\n") == 1 and "group" in err
    assert left(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_peak_memory_is_far_below_the_model(tmp_path):
    """Below one layer plus the embedding, over what the process takes before it begins."""
    config = replace(
        SMALL, vocab_size=8192, hidden_size=1024, intermediate_size=2048, num_hidden_layers=10, head_dim=64
    )
    weights = {name: weight.bfloat16() for name, weight in random_weights(config).items()}
    folder = save_tokenizer(tmp_path / "large", toy_tokenizer(400))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors")
    code = """
import resource, sys
from nanoqwen import checkpoint, packfile
warm, source = (checkpoint.open_checkpoint(path) for path in sys.argv[1:3])
packfile.write(warm, sys.argv[3], 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
packfile.write(source, sys.argv[3], 64)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""
    warm = checkpoint(tmp_path / "warm").path
    words = [sys.executable, "-c", code, str(warm), str(folder), str(tmp_path / "a.nanoqwen")]
    grown = int(subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ).stdout)
    nbytes = {name: weight.nbytes for name, weight in weights.items()}
    layer = sum(size for name, size in nbytes.items() if name.startswith("model.layers.0."))
    assert grown < layer + nbytes["model.embed_tokens.weight"] < sum(nbytes.values()) / 3


# The real model


def test_the_real_model_comes_back_from_its_file_bit_for_bit(real_model_path, tmp_path):
    source = open_checkpoint(real_model_path)
    write(source, tmp_path / "real.nanoqwen", method="rtn", head_bits=8)
    model, tokenizer = packfile.load(tmp_path / "real.nanoqwen")
    want = quantize.quantize_model(reference.build(source.config, source.weights()), method="rtn", head_bits=8)
    state = want.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    ids = torch.tensor(tokenizer.encode("def quicksort(a):"))[None]
    assert torch.equal(model(ids), want(ids))
