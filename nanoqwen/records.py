"""Records: what was measured on which machine, by which protocol, on which sources (design.md section 8).

A record is the file `data/records/<device>/<name>.json`. Its `results` are plain JSON. Three kinds of key in them are
held against the machine when a record is saved or read: `mbu…` must not pass 1, `…bytes_per_s` not the datasheet's
bandwidth, `…flops_per_s` not its compute rate.
"""

import hashlib
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import torch

from nanoqwen import hardware
from nanoqwen.ledger import below_ceiling
from nanoqwen.paths import RECORDS, REPO

FORMAT = 1
"""The schema's number; a record of another is refused."""


class RecordError(ValueError):
    """A record that breaks the schema; the message names the record, the field, what it holds and what it must."""


@dataclass(frozen=True)
class Record:
    """One record. `sources` maps each file it depends on (path in the repository) to its SHA-256."""

    name: str
    device: str
    driver: str | None
    cuda: str | None
    torch: str
    state: dict  # clocks (MHz), power (W), temperature (°C) right after the run; empty where unknown
    commit: str | None  # None: not run from a git checkout
    dirty: bool | None  # whether tracked files differed from the commit
    date: str  # UTC, to the second
    sources: dict[str, str]
    protocol: str
    results: dict
    format: int = FORMAT

    @property
    def slug(self) -> str:
        """The device's folder under data/records."""
        return slug(self.device)

    def __str__(self) -> str:
        commit = f"{(self.commit or 'no commit')[:12]}{' + changes' if self.dirty else ''}"
        return f"{self.name}, recorded on {self.device} ({self.date[:10]}, torch {self.torch}, {commit})"


def slug(device: str) -> str:
    """A device's name as a folder: 'NVIDIA H200' → 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def hash_sources(paths: Sequence[str | Path], repo: Path = REPO) -> dict[str, str]:
    """SHA-256 of files of the repository, by their path in it.

    Raises:
        FileNotFoundError: one that is not there.
    """
    return {Path(p).as_posix(): hashlib.sha256((repo / p).read_bytes()).hexdigest() for p in paths}


def with_headers(*kernels: str) -> tuple[str, ...]:
    """Sources under csrc, and the headers of csrc/include that they include: paths in the repository, sorted."""
    found, left = set(), [f"csrc/{name}" for name in kernels]
    while left:
        source = left.pop()
        if source not in found:
            found.add(source)
            text = (REPO / source).read_text(encoding="utf-8")
            left += [f"csrc/include/{name}" for name in re.findall(r'^#include "(\w+\.cuh)"', text, re.MULTILINE)]
    return tuple(sorted(found))


def record_environment(device: str | torch.device | None = None) -> dict:
    """The fields of a `Record` that this process and machine fill in.

    The commit is git's, or `NANOQWEN_COMMIT` where the sources were copied here without their history.
    """
    machine = hardware.machine(device)
    state = hardware.gpu_state(device) if machine.kind == "gpu" else {}
    state.pop("driver", None)
    commit, dirty = _commit()
    return {
        "device": machine.name,
        "driver": None if machine.driver is None else str(machine.driver),
        "cuda": machine.cuda if machine.kind == "gpu" else None,
        "torch": machine.torch,
        "state": state,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _commit() -> tuple[str | None, bool | None]:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(REPO), *words], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    try:
        # Records themselves do not count: two made in one go belong to the same commit.
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!data/records")
        return git("rev-parse", "HEAD"), bool(changes)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("NANOQWEN_COMMIT"), None


def make(
    name: str, results: dict, protocol: str, sources: Sequence[str | Path], device: str | torch.device | None = None
) -> Record:
    """A record of this process's results, checked."""
    record = Record(
        name=name, results=results, protocol=protocol, sources=hash_sources(sources), **record_environment(device)
    )
    validate(asdict(record), f"record {name!r}")
    return record


_TYPES = {
    "name": (str,),
    "device": (str,),
    "driver": (str, type(None)),
    "cuda": (str, type(None)),
    "torch": (str,),
    "state": (dict,),
    "commit": (str, type(None)),
    "dirty": (bool, type(None)),
    "date": (str,),
    "sources": (dict,),
    "protocol": (str,),
    "results": (dict,),
    "format": (int,),
}
_ABSOLUTE = re.compile(r"(?<![\w.~-])(?:/[\w.-]+){2,}|\b[A-Za-z]:\\")


def validate(values: Mapping, where: str) -> None:
    """Check a record's JSON against the schema.

    Raises:
        RecordError: a field missing, unknown, or of the wrong kind; a number that is not finite; percentiles out of
            order; a path of this machine. CeilingError: a figure above the ceiling.
    """

    def wrong(field: str, what: str) -> RecordError:
        return RecordError(f"{where}: {field} {what}")

    if not isinstance(values, Mapping):
        raise RecordError(f"{where}: holds a {type(values).__name__}, not an object")
    if missing := [name for name in _TYPES if name not in values]:
        raise wrong(missing[0], "is missing")
    if unknown := [name for name in values if name not in _TYPES]:
        raise wrong(str(unknown[0]), f"is not a field; the fields are {', '.join(_TYPES)}")
    for name, types in _TYPES.items():
        if not isinstance(values[name], types) or (isinstance(values[name], bool) and bool not in types):
            wanted = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise wrong(name, f"is {values[name]!r}; it must be {wanted}")
    if values["format"] != FORMAT:
        raise wrong("format", f"is {values['format']}; this version reads {FORMAT}")
    for name, pattern, wanted in (
        ("name", r"[a-z0-9][a-z0-9_-]*", "lower-case letters, digits, - and _"),
        ("commit", r"[0-9a-f]{40}", "40 hex digits"),
        ("date", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "like 2025-01-31T12:00:00Z"),
    ):
        if values[name] is not None and not re.fullmatch(pattern, values[name]):
            raise wrong(name, f"is {values[name]!r}; it must be {wanted}")
    for name in ("device", "protocol", "results", "sources"):
        if not values[name] or not slug(str(values[name])):
            raise wrong(name, "is empty")
    for path, digest in values["sources"].items():
        if Path(path).is_absolute() or ".." in Path(path).parts or "\\" in path:
            raise wrong("sources", f"names {path!r}; it must be a path inside the repository")
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise wrong("sources", f"gives {path!r} the hash {digest!r}; it must be 64 hex digits (SHA-256)")
    spec = hardware.spec_for(values["device"])
    for field, value in _leaves(values):
        _check_leaf(field, value, spec, wrong)


def _leaves(value: object, field: str = "") -> Iterator[tuple[str, object]]:
    """Every value that is not a list or an object, with the way to it; percentiles objects too."""
    if isinstance(value, Mapping):
        if "p50" in value:
            yield field, value
        for key, inner in value.items():
            yield from _leaves(inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{field}[{i}]")
    else:
        yield field, value


def _check_leaf(field: str, value: object, spec: hardware.Spec | None, wrong) -> None:
    if isinstance(value, Mapping):
        steps = [value.get(p) for p in ("p10", "p50", "p90", "p99")]
        # Strings and NaN are reported where they stand, as leaves.
        if all(isinstance(step, (int, float)) for step in steps) and steps != sorted(steps):
            raise wrong(field, f"has percentiles out of order: {steps}")
        if missing := [key for key in ("p10", "p90", "p99", "n", "unit") if key not in value]:
            raise wrong(field, f"has percentiles without {missing[0]}")
    elif isinstance(value, str):
        if found := _ABSOLUTE.search(value):
            raise wrong(field, f"holds a path of this machine, {found[0]!r}; records travel, leave it out")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise wrong(field, f"is {value}; every number must be finite")
        key = re.sub(r"\[\d+\]$", "", field).split(".")[-1]
        if key.startswith("mbu"):
            below_ceiling(value, 1.0, field)
        elif key.endswith("bytes_per_s") and spec:
            below_ceiling(value, spec.bandwidth, f"{field} against the {spec.name} datasheet")
        elif key.endswith("flops_per_s") and spec:
            below_ceiling(value, spec.bf16 or spec.fp32, f"{field} against the {spec.name} datasheet")
    elif value is not None and not isinstance(value, bool):
        raise wrong(
            field, f"is a {type(value).__name__}; it must be JSON: number, text, true, false, null, list, object"
        )


def save(record: Record, folder: Path = RECORDS) -> Path:
    """Write `record` to <folder>/<device>/<name>.json, whole or not at all; an older one is replaced.

    Raises:
        RecordError, CeilingError: as `validate`; nothing is written then.
    """
    values = asdict(record)
    validate(values, f"record {record.name!r}")
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path = folder / record.slug / f"{record.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return path


def read(path: Path) -> Record:
    """Read and check one record file.

    Raises:
        FileNotFoundError: no such file. RecordError, CeilingError: as `validate`.
    """
    where = path.name if path.parent == path else f"{path.parent.name}/{path.name}"
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=float)
    except ValueError as error:
        raise RecordError(f"{where}: not JSON ({error})") from None
    validate(values, where)
    if values["name"] != path.stem or slug(values["device"]) != path.parent.name:
        raise RecordError(
            f"{where}: is the record {values['name']!r} of {values['device']!r}; it stands in a wrong place"
        )
    return Record(**{field.name: values[field.name] for field in fields(Record)})


def load(name: str, gpu: str | None = None, folder: Path = RECORDS) -> Record:
    """The record `name` of the GPU `gpu` (a device's name or its folder).

    None takes this machine's own record where there is one, then the H200's, then any other GPU's by name.

    Raises:
        FileNotFoundError: there is none; the message says which there are and how to make one.
        RecordError, CeilingError: as `validate`.
    """
    found = {path.parent.name: path for path in sorted(folder.glob(f"*/{name}.json"))}
    wanted = [slug(gpu)] if gpu is not None else [slug(hardware.machine().name), "nvidia-h200", *found]
    for device in wanted:
        if device in found:
            return read(found[device])
    there = ", ".join(f"{path.parent.name}/{path.stem}" for path in sorted(folder.glob("*/*.json"))) or "none"
    raise FileNotFoundError(
        f"no record {name!r}{f' of {gpu!r}' if gpu else ''} (there: {there}); make it with: nanoqwen record {name}"
    )


@dataclass(frozen=True)
class Stale:
    """A record older than one of the sources it describes."""

    record: str  # <device>/<name>
    source: str  # the file, by its path in the repository
    reason: str  # 'changed' or 'gone'

    def __str__(self) -> str:
        name = self.record.split("/")[-1]
        return f"{self.record}: {self.source} has {self.reason} since; make it anew with: nanoqwen record {name}"


def check(folder: Path = RECORDS, repo: Path = REPO) -> list[Stale]:
    """Every record and source that no longer belong together; every record is validated on the way.

    Raises:
        RecordError, CeilingError: a record that cannot be trusted at all.
    """
    stale = []
    for path in sorted(folder.glob("*/*.json")):
        record = read(path)
        for source, digest in record.sources.items():
            name = f"{record.slug}/{record.name}"
            if not (repo / source).is_file():
                stale.append(Stale(name, source, "gone"))
            elif hash_sources([source], repo)[source] != digest:
                stale.append(Stale(name, source, "changed"))
    return stale
