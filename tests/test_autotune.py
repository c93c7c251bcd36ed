"""The tuner takes the fastest launch that is right, keeps it for other processes, and believes no damaged file."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoqwen import autotune
from nanoqwen.autotune import FORMAT, Tuner
from nanoqwen.kernels import launch

CANDIDATES = [{"block": 128, "rows": 4}, {"block": 64, "rows": 1}, {"block": 256, "rows": 2}]
DEFAULT, SMALL, LARGE = CANDIDATES
NAMES = ["block 128, rows 4", "block 64, rows 1", "block 256, rows 2"]
TIMES = {64: 3e-6, 128: 2e-6, 256: 1e-6}
RIGHT = torch.arange(6.0).view(2, 3)


class Clock:
    """A timer that runs every call once and says what the test wants."""

    def __init__(self, times=None):
        self.times, self.seen = times or TIMES, []

    def __call__(self, calls, device):
        self.seen.append(list(calls))
        for call in calls.values():
            call()
        return {name: self.times[int(name.split()[1].rstrip(","))] for name in calls}


class Kernel:
    """Writes what is right, unless the launch with a certain block does something else."""

    def __init__(self, data=RIGHT, **spoiled):
        self.data, self.spoiled, self.runs = data, spoiled, []

    def __call__(self, out, block, rows):
        self.runs.append(block)
        self.spoiled.get(f"block_{block}", copy)(out, self.data)


def copy(out, data):
    out.copy_(data)


@pytest.fixture(autouse=True)
def csrc(tmp_path, monkeypatch):
    """A folder of sources of its own, looked at before every choice."""
    folder = tmp_path / "csrc"
    (folder / "include").mkdir(parents=True)
    (folder / "kernel.cu").write_text("// one\n")
    (folder / "include" / "header.cuh").write_text("// one\n")
    monkeypatch.setattr(launch, "CSRC", folder)
    monkeypatch.setattr(launch, "INCLUDE", folder / "include")
    monkeypatch.setattr(launch, "_LOOK_AGAIN_S", -1)
    return folder


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "autotune.json"


def tuner(path, clock=None, machine="GPU X, driver 1", candidates=CANDIDATES, kernel="kernel"):
    return Tuner(kernel, Path("kernel.cu"), candidates, path, clock or Clock(), lambda device: machine)


def choose(tuner, kernel=None, shape=(2, 3), dtype=torch.float32):
    return tuner.choose(shape, torch.empty(2, 3, dtype=dtype), kernel or Kernel())


def kept(path):
    values = json.loads(path.read_text())
    assert values["format"] == FORMAT
    return values["choices"]


# The choice


def test_the_fastest_candidate_is_chosen_and_kept_with_all_times(path):
    clock = Clock()
    assert choose(tuner(path, clock)) == LARGE
    assert clock.seen == [NAMES]
    (name, entry), *more = kept(path).items()
    assert not more and "GPU X, driver 1 | kernel " in name and name.endswith(" | 2x3 float32")
    assert entry == {"choice": NAMES[2], "timings": dict(zip(NAMES, (2e-6, 3e-6, 1e-6), strict=True))}


def test_the_default_wins_where_it_is_fastest(path):
    assert choose(tuner(path, Clock({64: 3e-6, 128: 1e-6, 256: 2e-6}))) == DEFAULT


def test_the_second_call_runs_nothing_and_reads_nothing(path):
    one, clock, kernel = tuner(path), Clock(), Kernel()
    one._timer = clock
    assert choose(one, kernel) == LARGE
    runs = list(kernel.runs)
    path.unlink()
    assert choose(one, kernel) is one.candidates[NAMES[2]] and kernel.runs == runs
    assert len(clock.seen) == 1 and not path.exists()


def test_the_output_of_the_caller_is_left_alone(path):
    out = torch.full((2, 3), 7.0)
    tuner(path).choose((2, 3), out, Kernel())
    assert out.eq(7).all()


def nothing(out, data): ...
def zeros(out, data): out.zero_()  # fmt: skip


def half(out, data): out[0] = data[0]  # fmt: skip


def nan(out, data): out.copy_(data).view(-1)[3] = float("nan")  # fmt: skip


def near(out, data): out.copy_(data * (1 + 1e-6))  # fmt: skip


def fails(out, data): raise RuntimeError("the driver refused the launch (too many resources)\nmore")  # fmt: skip


def refuses(out, data): raise ValueError("rows is 2")  # fmt: skip


@pytest.mark.parametrize("spoil", [nothing, zeros, half, nan, near, fails, refuses], ids=lambda spoil: spoil.__name__)
def test_a_candidate_that_fails_or_gives_another_result_is_never_chosen(path, spoil):
    clock = Clock()
    assert choose(tuner(path, clock), Kernel(block_256=spoil)) == DEFAULT
    assert clock.seen == [NAMES[:2]]  # it was not even timed
    words = next(iter(kept(path).values()))["timings"][NAMES[2]]
    assert words == {
        "fails": "RuntimeError: the driver refused the launch (too many resources)",
        "refuses": "ValueError: rows is 2",
    }.get(spoil.__name__, "another result")


def test_a_candidate_that_goes_wrong_while_it_is_timed_is_not_chosen(path):
    calls = []

    def tires(out, data):
        calls.append(1)
        out.copy_(data if len(calls) < 3 else data + 1)

    assert choose(tuner(path), Kernel(block_256=tires)) == DEFAULT
    assert next(iter(kept(path).values()))["timings"][NAMES[2]] == "another result after timing"


def test_near_enough_may_be_the_caller_s_to_say(path):
    chosen = tuner(path).choose((2, 3), RIGHT, Kernel(block_256=near), same=torch.allclose)
    assert chosen == LARGE


def test_integers_are_compared_too(path):
    data = RIGHT.int()
    assert choose(tuner(path), Kernel(data, block_256=nothing), dtype=torch.int32) == DEFAULT


def test_where_the_default_fails_the_caller_is_told(path):
    with pytest.raises(RuntimeError, match="the driver refused"):
        choose(tuner(path), Kernel(block_128=fails))
    assert not path.exists()
    assert choose(tuner(path)) == LARGE  # and the lock is free


def test_data_that_cannot_be_compared_decides_nothing_for_others(path):
    one, kernel = tuner(path, clock := Clock()), Kernel(RIGHT * float("nan"))
    assert choose(one, kernel) == DEFAULT and not path.exists() and not clock.seen
    runs = list(kernel.runs)
    assert choose(one, kernel) == DEFAULT and kernel.runs == runs
    assert choose(tuner(path)) == LARGE


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 0.0, -1e-6])
def test_what_is_no_time_wins_nothing(path, time):
    assert choose(tuner(path, Clock(TIMES | {256: time}))) == DEFAULT
    assert next(iter(kept(path).values()))["timings"][NAMES[2]] == "no time"
    assert choose(tuner(path, Clock(dict.fromkeys(TIMES, time))), shape=(9,)) == DEFAULT
    assert len(kept(path)) == 1


def test_no_room_for_another_output_takes_the_default(path, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty_like", full)
    assert choose(tuner(path)) == DEFAULT and not path.exists()


def test_without_a_clock_the_default_is_taken_and_nothing_kept(path):
    clock, kernel = Clock(), Kernel()
    one = tuner(path, clock, machine=None)
    for _ in range(2):
        assert choose(one, kernel) == DEFAULT
    assert not (clock.seen or kernel.runs or one._known or path.parent.exists())
    assert autotune.gpu_and_driver(torch.device("cpu")) is None


# What a choice holds for


def test_another_tuner_takes_the_choice_from_the_file(path):
    choose(tuner(path))
    clock, kernel = Clock(), Kernel()
    assert choose(tuner(path, clock), kernel) == LARGE
    assert not clock.seen and not kernel.runs


OTHERS = {
    "machine": lambda path, clock: choose(tuner(path, clock, machine="GPU X, driver 2")),
    "kernel": lambda path, clock: choose(tuner(path, clock, kernel="other")),
    "shape": lambda path, clock: choose(tuner(path, clock), shape=(2, 4)),
    "dtype": lambda path, clock: choose(tuner(path, clock), dtype=torch.float64),
    "candidates": lambda path, clock: choose(tuner(path, clock, candidates=[*CANDIDATES, {"block": 64, "rows": 8}])),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_machine_kernel_shape_dtype_or_list_is_timed_anew(path, other):
    choose(tuner(path))
    clock = Clock()
    OTHERS[other](path, clock)
    assert len(clock.seen) == 1
    assert len(kept(path)) == (1 if other == "candidates" else 2)


@pytest.mark.parametrize("file", ["kernel.cu", "include/header.cuh"])
def test_a_changed_source_or_header_is_timed_anew_in_the_same_process_too(path, csrc, file):
    one = tuner(path, clock := Clock())
    choose(one)
    first = (csrc / file).read_text()
    (csrc / file).write_text("// another text\n")
    choose(one)
    assert len(clock.seen) == 2 and len(kept(path)) == 2
    (csrc / file).write_text(first)
    choose(one)
    assert len(clock.seen) == 2  # the old text's choice is still there


# The file


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "\x00\xff", '{"choices": {}}', "[" * 100_000, '{"model_type": "qwen2"}'),
        json.dumps({"format": "nanoqwen autotune 2", "choices": {}}),
        json.dumps({"format": FORMAT, "choices": []}),
    ],
    ids=range(10),
)
def test_a_file_that_is_damaged_or_not_ours_is_put_aside_with_a_word(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"autotune\.json holds no choices .* is autotune\.json\.damaged now"):
        assert choose(tuner(path)) == LARGE
    assert path.with_name("autotune.json.damaged").read_text() == text
    assert len(kept(path)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(tuner(path, clock := Clock())) == LARGE and not clock.seen


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "timings"]), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entry=json_values | st.fixed_dictionaries({"choice": json_values, "timings": json_values}))
def test_an_entry_that_makes_no_sense_is_decided_anew_and_the_others_stay(path, entry):
    path.unlink(missing_ok=True)
    choose(tuner(path), shape=(1,))
    choose(tuner(path), shape=(2,))
    choices = kept(path)
    name, other = sorted(choices)
    path.write_text(json.dumps({"format": FORMAT, "choices": {name: entry, other: choices[other], "foreign": [1]}}))
    one = tuner(path, clock := Clock())
    chosen = choose(one, shape=(1,))
    if clock.seen:
        assert chosen == LARGE and kept(path)[name] == choices[name]
    else:  # it made sense after all
        assert one.candidates[entry["choice"]] == chosen and entry["timings"][entry["choice"]] > 0
    assert kept(path)[other] == choices[other] and kept(path)["foreign"] == [1]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(path, monkeypatch):
    choose(tuner(path))
    before = path.read_text()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="for this process only .*No space left"):
        assert choose(tuner(path), shape=(5,)) == LARGE
    assert path.read_text() == before
    assert {file.name for file in path.parent.iterdir()} <= {path.name, path.name + ".lock"}


def test_a_folder_that_cannot_be_written_costs_the_memory_only(path):
    path.parent.write_text("a file where the folder should be")
    one = tuner(path, clock := Clock())
    with pytest.warns(UserWarning, match="the choice of a launch is for this process only"):
        assert choose(one) == LARGE
    assert choose(one) == LARGE and len(clock.seen) == 1


def test_a_lock_that_nobody_holds_does_not_block(path):
    path.parent.mkdir()
    path.with_name("autotune.json.lock").write_text("left by a killed process")
    assert choose(tuner(path)) == LARGE and len(kept(path)) == 1


def test_a_lock_held_for_too_long_is_not_waited_for_for_ever(path, monkeypatch):
    monkeypatch.setattr(autotune, "LOCK_TIMEOUT_S", 0.05)
    path.parent.mkdir()
    held = FileLock(path.with_name("autotune.json.lock"))
    with held, pytest.warns(UserWarning, match="for this process only"):
        assert choose(tuner(path)) == LARGE
    assert not path.exists()


# Processes

PROCESS = """
import json, sys, time
from pathlib import Path
import torch
from nanoqwen.autotune import Tuner
from nanoqwen.kernels import launch

folder, mine, favourite = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
launch.CSRC, launch.INCLUDE = folder / "csrc", folder / "csrc" / "include"
timed = []
def timer(calls, device):
    timed.append(1)
    time.sleep(0.01)
    return {name: 1e-6 if favourite in name else 2e-6 for name in calls}
candidates = [{"block": 128, "rows": 4}, {"block": 64, "rows": 1}, {"block": 256, "rows": 2}]
path = folder / "cache" / "autotune.json"
tuner = Tuner("kernel", Path("kernel.cu"), candidates, path, timer, lambda device: "GPU X, driver 1")
(folder / f"ready-{mine}").touch()
while not all((folder / f"ready-{i}").exists() for i in "ab"):
    time.sleep(0.001)
out, run = torch.empty(2, 3), lambda out, block, rows: out.fill_(1)
chosen = {}
for i in range(12):
    tuner.choose((ord(mine), i), out, run)
    chosen[i] = tuner.choose((0, i), out, run)["block"]
print(json.dumps([chosen, len(timed)]))
"""


def test_two_processes_at_once_lose_nothing_and_agree(tmp_path, path):
    both = [
        subprocess.Popen([sys.executable, "-c", PROCESS, tmp_path, name, block], stdout=subprocess.PIPE, text=True)
        for name, block in (("a", "64"), ("b", "256"))
    ]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    (one, timed_by_one), (other, timed_by_other) = map(json.loads, outputs)
    assert one == other  # though their clocks disagree: the first to time decides for both
    assert timed_by_one + timed_by_other == len(kept(path)) == 12 * 3
    clock = Clock()
    for first in (0, ord("a"), ord("b")):
        for i in range(12):
            choose(tuner(path, clock), shape=(first, i))
    assert not clock.seen
