"""The launch of a kernel that is fastest for a shape: timed on first sight, kept on disk, looked up from then on.

Only a GPU has times to compare. On a CPU kernels run on the SIMT machine, which has no clock: there the default launch
is taken, and nothing is kept.

The file is `autotune.json` in the cache folder. It maps GPU, driver, kernel, hash of its source, shape and dtype to the
choice, with the seconds of every candidate beside it, or why it was out.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from nanoqwen.hardware import gpu_state
from nanoqwen.paths import cache_dir

FORMAT = "nanoqwen autotune 1"
ROUNDS = 15  # calls of each candidate that count
LOCK_TIMEOUT_S = 60.0

Launch = dict[str, int]  # a candidate: keyword arguments of a launch


class Tuner:
    """Chooses between launches of one kernel.

    Args:
        kernel: its name.
        source: its file under `csrc/`; a choice holds for this text and that of the headers.
        candidates: the launches; the first is the default, and the others must give its result.
        path: the file of choices; default: `autotune.json` in the cache folder.
        timer: callables by name, and the device → seconds by name.
        machine: a device → GPU and driver in words, or None where there is nothing to time.
    """

    def __init__(
        self,
        kernel: str,
        source: Path,
        candidates: Sequence[Launch],
        path: Path | None = None,
        timer: Callable[[Mapping[str, Callable[[], None]], torch.device], Mapping[str, float]] | None = None,
        machine: Callable[[torch.device], str | None] | None = None,
    ):
        from nanoqwen.kernels import launch  # here: the kernels of that package are tuned by this module

        self.kernel, self.source, self._launch = kernel, source, launch
        self.candidates = {_label(candidate): dict(candidate) for candidate in candidates}
        self.default = next(iter(self.candidates.values()))
        self._path, self._timer, self._machine = path, timer or gpu_seconds, machine or gpu_and_driver
        self._known: dict[tuple, Launch] = {}
        self._state: int | None = None

    def choose(
        self,
        shape: tuple[int, ...],
        out: Tensor,
        run: Callable[..., object],
        same: Callable[[Tensor, Tensor], bool] = torch.equal,
    ) -> Launch:
        """The fastest candidate for a shape; timed if no process of this user has seen it on this GPU.

        Args:
            shape: all sizes on which the speed depends.
            out: an output: its shape, dtype and device. It is not written to.
            run: `run(out, **candidate)` runs the kernel into `out`.
            same: whether an output may stand for the default's. Default: equal in every bit but the sign of zero.

        Raises:
            Whatever `run` raises for the default candidate. Others that fail, or give another result, are out.
        """
        key = (shape, out.dtype, out.device)
        if self._state == self._launch._sources_state() and (found := self._known.get(key)):
            return found
        return self._first(key, out, run, same)

    def _first(self, key: tuple, out: Tensor, run: Callable[..., object], same: Callable) -> Launch:
        machine = self._machine(out.device)
        if machine is None:
            return self.default
        if (state := self._launch._sources_state()) != self._state:
            self._known, self._state = {}, state
        shape = "x".join(map(str, key[0]))
        name = f"{machine} | {self.kernel} {self._hash()} | {shape} {str(out.dtype).removeprefix('torch.')}"
        if out.is_cuda and torch.cuda.is_current_stream_capturing():
            # Nothing can be timed inside a capture. What is known is used, and the next call outside it decides.
            return self._stored(self._read()[0], name) or self.default
        self._known[key] = chosen = self._stored(self._read()[0], name) or self._decide(name, out, run, same)
        return chosen

    def _decide(self, name: str, out: Tensor, run: Callable[..., object], same: Callable) -> Launch:
        """Time the candidates and keep the choice, one process at a time: two would disturb each other's times."""
        with self._alone() as alone:
            if alone and (found := self._stored(self._read()[0], name)):  # another process chose meanwhile
                return found
            entry = self._tune(out, run, same)
            if entry is None:
                return self.default
            if alone:
                self._keep(name, entry)
            return self.candidates[entry["choice"]]

    def _tune(self, out: Tensor, run: Callable[..., object], same: Callable) -> dict | None:
        """The fastest candidate of those that are right; None where no comparison was possible."""
        timings: dict[str, float | str] = {}
        run_into = functools.partial(_run_into, run)
        first, *others = self.candidates
        try:
            want, got = torch.empty_like(out), torch.empty_like(out)
            run_into(want, self.default)
            if not same(want, want):
                return None  # NaN in the data: nothing can be told to be right
            calls = {first: functools.partial(run, got, **self.default)}
            for label in others:
                candidate = self.candidates[label]
                try:
                    run_into(got, candidate)
                    if same(got, want):
                        calls[label] = functools.partial(run, got, **candidate)
                    else:
                        timings[label] = "another result"
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError, TypeError) as error:
                    timings[label] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            seconds = self._timer(calls, out.device)
            timings |= {label: seconds[label] if _usable(seconds[label]) < math.inf else "no time" for label in calls}
            for label in sorted(calls, key=lambda label: _usable(timings[label])):
                if timings[label] == "no time":
                    return None
                run_into(got, self.candidates[label])  # once more: what was timed must still be right
                if same(got, want):
                    return {"choice": label, "timings": timings}
                timings[label] = "another result after timing"
        except torch.OutOfMemoryError:
            pass  # no room for two more outputs
        return None

    # The file

    @property
    def path(self) -> Path:
        return self._path or cache_dir() / "autotune.json"

    def _hash(self) -> str:
        text = (self._launch.CSRC / self.source).read_bytes()
        return hashlib.sha256(text + self._launch._headers_hash().encode()).hexdigest()[:16]

    def _read(self) -> tuple[dict, str]:
        """The choices on disk, and what is wrong with the file."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"{type(error).__name__}: {error}"
        if (
            not isinstance(values, dict)
            or values.get("format") != FORMAT
            or not isinstance(values.get("choices"), dict)
        ):
            return {}, f"it does not say that its format is {FORMAT!r}"
        return values["choices"], ""

    def _stored(self, choices: dict, name: str) -> Launch | None:
        """A choice from disk, if it was made between the candidates of today."""
        entry = choices.get(name)
        try:
            timings, choice = entry["timings"], entry["choice"]
            if timings.keys() == self.candidates.keys() and _usable(timings[choice]) < math.inf:
                return self.candidates[choice]
        except (KeyError, TypeError, AttributeError):
            pass  # none, or not one of ours: it is decided anew
        return None

    def _keep(self, name: str, entry: dict) -> None:
        choices, wrong = self._read()
        try:
            if wrong:
                aside = self.path.with_name(self.path.name + ".damaged")
                os.replace(self.path, aside)
                warnings.warn(
                    f"{self.path} holds no choices of launches ({wrong}); it is {aside.name} now, and a new one begins",
                    stacklevel=2,
                )
            text = json.dumps({"format": FORMAT, "choices": choices | {name: entry}}, indent=1, ensure_ascii=False)
            handle, part = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text + "\n")
                os.replace(part, self.path)
            except BaseException:
                Path(part).unlink(missing_ok=True)
                raise
        except OSError as error:
            _warn_not_kept(error)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Holds the file's lock, which ends with its process; False where there is none to be had."""
        try:
            path = self.path
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.with_name(path.name + ".lock"), timeout=LOCK_TIMEOUT_S)
            lock.acquire()
        except OSError as error:  # a folder that cannot be written, or a lock that is held for too long
            _warn_not_kept(error)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def _label(candidate: Launch) -> str:
    return ", ".join(f"{name} {value}" for name, value in candidate.items())


def _usable(seconds: float | str) -> float:
    """Seconds to sort by; infinite for what is no time."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    return seconds if number and 0 < seconds < math.inf else math.inf


def _run_into(run: Callable[..., object], out: Tensor, candidate: Launch) -> None:
    """Run over poison, so that a launch that writes nothing, or not all, does not pass for the one before it."""
    out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)
    run(out, **candidate)


def _warn_not_kept(error: Exception) -> None:
    warnings.warn(f"the choice of a launch is for this process only ({error})", stacklevel=2)


@functools.cache
def gpu_and_driver(device: torch.device) -> str | None:
    """A GPU's name and driver; None for a CPU."""
    if device.type != "cuda":
        return None
    return f"{torch.cuda.get_device_name(device)}, driver {gpu_state(device).get('driver', 'unknown')}"


def gpu_seconds(calls: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, float]:
    """Median seconds of each call between two CUDA events, in turn A B C A B C …, each with a cold L2."""
    with torch.cuda.device(device):
        # Written before each call: pushes weights and outputs out of the L2, and the host runs ahead meanwhile.
        flush = torch.empty(
            4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device
        )
        marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
        for turn in range(1 + ROUNDS):
            for name, call in calls.items():
                flush.zero_()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                if turn:  # the first round warms up
                    marks[name].append((start, end))
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs) for name, pairs in marks.items()}
