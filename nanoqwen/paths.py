"""Where things are: the repository's folders, and the reader's cache."""

import os
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
CSRC = REPO / "csrc"
DATA = REPO / "data"
NOTEBOOKS = REPO / "notebooks"
RECORDS = DATA / "records"
TINY = DATA / "nanoqwen-tiny"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def cache_dir() -> Path:
    """The folder for downloaded weights and compiled kernels, created on first use.

    `NANOQWEN_CACHE` if set, else `$XDG_CACHE_HOME/nanoqwen` or `~/.cache/nanoqwen`; where that cannot be
    written (a read-only home), a folder of this user's under the system's temporary directory.

    Raises:
        OSError: `NANOQWEN_CACHE` is set to a folder that cannot be written.
    """
    if chosen := os.environ.get("NANOQWEN_CACHE"):
        folder = Path(chosen).expanduser()
        if not _writable(folder):
            raise OSError(f"NANOQWEN_CACHE={chosen} cannot be written; point it at a folder that can")
        return folder
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "nanoqwen"
    if _writable(folder):
        return folder
    uid = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"nanoqwen-{uid}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
