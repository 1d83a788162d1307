"""What a level and its jobs share: the folder, what is in it, and how much of the disk it takes now."""

from __future__ import annotations

import threading
from pathlib import Path

import attrs

from strata_tiers.directory import Directory
from strata_tiers.files import Files
from strata_tiers.holdings import Holdings, Part
from strata_tiers.layout import FOLDER_BYTES, Shape, manifest_name


@attrs.define(eq=False)
class Place:
    """What a level and its jobs share.

    :ivar lock: guards ``holdings`` and the fields here; never held during a call to the system that may take long.
    :ivar physical: charge of the files that are on the disk now.
    :ivar drops: jobs that will delete files.
    :ivar taken: ids of manifests in the folder that are no entries of this level; they must not be overwritten.
    :ivar garbage: files that no entry needs and that may go when room is needed, with their charge.
    """

    name: str
    files: Files
    directory: Directory
    holdings: Holdings
    max_bytes: int
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    physical: int = 0
    drops: int = 0
    garbage: dict[Path, int] = attrs.field(factory=dict)
    taken: set[str] = attrs.field(factory=set)

    @property
    def shape(self) -> Shape:
        return self.holdings.shape

    def segment_path(self, part: Part) -> Path:
        return self.directory.segments / part.piece.name

    def manifest_path(self, entry_id: str) -> Path:
        return self.directory.conversations / manifest_name(entry_id)

    def account(self, nbytes: int) -> None:
        with self.lock:
            self.physical += nbytes

    def gone(self, path: Path) -> None:
        """A file is no garbage any more: it was deleted or overwritten."""
        with self.lock:
            self.holdings.others -= self.garbage.pop(path, 0)

    def recount(self) -> None:
        """Look at what is really on the disk: others may have deleted files."""
        total = self.directory.charge() - FOLDER_BYTES
        with self.lock:
            self.physical = total

    def relief(self) -> bool:
        """Whether room will come without anything new being decided."""
        with self.lock:
            return self.drops > 0 or any(kept.leaving for kept in self.holdings.kept.values())
