"""Files that appear under their name only when they are complete and safe."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import attrs

from strata_tiers.files import Files
from strata_tiers.layout import TEMPORARY

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is: bytes, or things where that is said."""


def no_progress(done: int, total: int) -> None:
    """For callers that do not want to know."""


@attrs.define
class NewFile:
    """A file that gets its name when the block ends well, durable; else nothing of it stays."""

    files: Files
    path: Path
    nbytes: int
    temporary: Path = attrs.field(init=False)
    fd: int = attrs.field(init=False)

    def __enter__(self) -> int:
        self.temporary = self.path.with_name(TEMPORARY + secrets.token_hex(8))
        self.fd = self.files.create(self.temporary)
        try:
            self.files.reserve(self.fd, self.nbytes)
        except OSError:
            self._undo()
            raise
        return self.fd

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._undo()
            return
        try:
            self.files.sync(self.fd)
        except OSError:
            self._undo()
            raise
        try:
            self.files.close(self.fd)
            self.files.rename(self.temporary, self.path)
        except OSError:
            self._unlink()
            raise
        self.files.sync_folder(self.path.parent)

    def _undo(self) -> None:
        self.files.close(self.fd)
        self._unlink()

    def _unlink(self) -> None:
        with suppress(OSError):
            self.files.unlink(self.temporary)

