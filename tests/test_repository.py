"""What the repository says about itself is true."""

import re
import tomllib
from importlib.metadata import version

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nanoqwen.kernels import launch
from nanoqwen.notebooks import all_notebooks, with_syllabus
from nanoqwen.paths import DATA, REPO

README = (REPO / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), *(REPO / "csrc").rglob("*.md"), *DATA.glob("prompts/*.md")]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    canonicalize_name(name): pin
    for name, pin in re.findall(r"^([\w.-]+)==(\S+)$", (REPO / "constraints.txt").read_text(encoding="utf-8"), re.M)
}
EXTRAS = PROJECT["optional-dependencies"]
EVERYWHERE = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["lab"], *EXTRAS["test"])]


def test_conda_and_pip_install_the_same():
    environment = yaml.safe_load((REPO / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert environment["channels"] == ["conda-forge"]
    assert conda == [f"python{PROJECT['requires-python']}", "cxx-compiler", "make", "pip"]
    assert pip == {"pip": ["-c constraints.txt", "-e .[test,lab]"]}
    assert '-c constraints.txt -e ".[test,lab' in re.sub(r"\s*\\\n\s*", " ", (REPO / "Makefile").read_text())


@pytest.mark.parametrize("wanted", EVERYWHERE, ids=str)
def test_every_dependency_is_pinned_within_its_bounds(wanted):
    assert wanted.specifier.contains(PINS[canonicalize_name(wanted.name)])


def test_constraints_hold_pins_and_comments_only():
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"#.*|[\w.-]+==\S+", line) for line in lines)
    assert PINS["torch"] == "2.13.0"


def test_every_dependency_has_its_reason():
    table = CONTRIBUTING.partition("## Dependencies")[2]
    reasons = set(re.findall(r"[\w-]+", " ".join(re.findall(r"^\| ([^|]+) \|", table, re.M))))
    names = {requirement.name for requirement in EVERYWHERE} | {"cuda-bindings", "cupy"}
    assert names <= reasons


def layout():
    """(path, indented below) of every entry in the README's picture."""
    picture = re.search(r"## Layout\n+```\n(.*?)```", README, re.S)[1]
    folder, paths = "", []
    for line in picture.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        folder = folder if indent else name
        paths.append(folder + name if indent else name)
    return paths


def test_the_layout_picture_is_true():
    assert [path for path in layout() if not (REPO / path).exists()] == []


def test_the_layout_picture_leaves_nothing_out():
    text = README.partition("## Layout")[2]
    modules = {path.name for path in (REPO / "nanoqwen").iterdir() if path.name.strip("_") == path.name}
    modules -= {"paths.py", "__init__.py", "__pycache__"}
    assert sorted(name for name in modules if not re.search(rf"\b{re.escape(name)}", text)) == []
    folders = {f"csrc/{path.name}/" for path in (REPO / "csrc").iterdir() if path.is_dir()}
    assert folders <= set(layout())


def test_the_table_of_lessons_is_up_to_date():
    assert with_syllabus(README, all_notebooks()) == README


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_links_and_commands_exist(text):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (REPO / link).exists()] == []
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z]+)$|`make ([a-z]+)`", text, re.M):
        assert re.search(rf"^{''.join(target)}:", makefile, re.M), target
    from nanoqwen.cli import _parser

    commands = _parser()._subparsers._group_actions[0].choices
    assert set(re.findall(r"\bnanoqwen ([a-z]+)\b(?! is)", " ".join(re.findall(r"`(nanoqwen [^`]+)`", text)))) <= set(
        commands
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_prose_has_at_most_120_columns(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_the_example_of_the_engine_runs(monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    small = example.replace('"qwen2.5-coder-0.5b"', '"nanoqwen-tiny", max_tokens=32')
    small = small.replace("max_new_tokens=64", "max_new_tokens=2")
    assert small.count("nanoqwen-tiny") == small.count("max_new_tokens=2") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exec(small, {})
    assert len(capsys.readouterr().out) > len("def quicksort(a):\n")


def test_the_simt_page_explains_its_words_and_limits_before_the_long_table():
    page = (REPO / "csrc" / "simt" / "README.md").read_text(encoding="utf-8")
    before = page.partition("<!-- parity:")[0]
    assert all(f"*{word}*" in before for word in ("fiber", "wavefronts", "mbarrier", "bulk copy"))
    assert "## What it does not do" in before


def test_every_solution_is_run_by_a_test_that_the_page_names():
    for path in (REPO / "notebooks" / "solutions").glob("*.*"):
        if path.suffix == ".py":
            tests, used_as = "tests/test_solutions.py", f'solution("{path.stem}")'
        else:  # a test runs it in its notebook, which says where it is
            tests = "tests/test_kernel_lessons.py"
            shown = f'lesson.solution(\\"{path.name}\\")'
            (used_as,) = (lesson.name for lesson in all_notebooks() if shown in lesson.read_text("utf-8"))
        assert f"`{tests}`" in CONTRIBUTING and used_as in (REPO / tests).read_text("utf-8")


def test_sources_are_looked_at_as_often_as_said():
    assert "twice a second at most" in " ".join(CONTRIBUTING.split()) and launch._LOOK_AGAIN_S == 0.5


def test_the_package_says_its_version_once():
    import nanoqwen

    assert nanoqwen.__version__ == PROJECT["version"] == version("nanoqwen")
