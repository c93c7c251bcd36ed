"""What every test shares: figures without a window, the real model where it is, GPU tests where they can run."""

import os
from pathlib import Path

import pytest
import torch

import nanoqwen.models  # noqa: F401 (the first cosine of a process is made there, by one thread)

os.environ["MPLBACKEND"] = "Agg"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """The fetched 0.5B. Tests that want the real model skip where it is not, and say how to get it."""
    from nanoqwen.fetch import find_model

    try:
        return find_model("qwen2.5-coder-0.5b")
    except FileNotFoundError as missing:
        pytest.skip(f"the real model is not here: {missing}")
