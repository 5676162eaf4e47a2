"""Writing a file so that nobody ever sees half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_in_one_step"]


def write_in_one_step(path: str | os.PathLike[str], text: str) -> None:
    """Write the file, and its folder if there is none; what was there stays until all is written.

    Raises:
        OSError: it cannot be written; the old one is still there.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
