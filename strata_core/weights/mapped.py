"""Model files mapped into memory."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

from strata_core.errors import ModelFileError, NotFound


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only.

    :raises NotFound: there is no such file.
    :raises ModelFileError: it is empty, not a regular file, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # looked at before opening: opening a pipe would wait for its writer
            raise ModelFileError(f"{path}: not a regular file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise NotFound(f"no such model file: {path}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: cannot be read: {error}") from error


def unmap(mapping: mmap.mmap) -> None:
    """Let go of a map; while arrays still look into it, Python keeps it until the last of them is gone."""
    try:
        mapping.close()
    except BufferError:
        return
