"""The lessons' own cells, for tests that run them."""

import json

from nanoqwen.paths import NOTEBOOKS


def cell(notebook: str, start: str) -> str:
    """The first code cell of a notebook that begins so."""
    cells = json.loads((NOTEBOOKS / notebook).read_text(encoding="utf-8"))["cells"]
    return next(text for c in cells if (text := "".join(c["source"])).startswith(start) and c["cell_type"] == "code")
