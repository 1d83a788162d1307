"""Offering the archive what a newer copy made needless, and following what becomes of it.

An archive that fails costs the copy it could have kept: it is counted, reported at most once a minute, and the copy is
dropped as it would be without an archive. No request notices.
"""

from __future__ import annotations

import logging
from collections import Counter

from strata_core.conversations.tolerance import Tolerance, Trouble
from strata_core.errors import LevelError
from strata_core.store.base import Archive, Entry, Level

log = logging.getLogger("strata.cache")


class Archiving(Tolerance):
    """:param counts: ``archived`` and ``archive_failures`` are counted there."""

    def __init__(self, archive: Archive | None, trouble: Trouble, counts: Counter[str]):
        super().__init__(trouble)
        self.archive = archive
        self._counts = counts

    def offer(self, entry: Entry, why: str, source: Level) -> None:
        """Give the archive a copy that ``source`` is about to remove."""
        if self.archive is None:
            return
        try:
            self.archive.take(entry, why, source)
        except Exception as error:  # noqa: BLE001 - archives come from plugins; see Tolerance
            self._failed(self.archive, error)

    def poll(self) -> None:
        """Count what the archive has completed."""
        archive = self.archive
        if archive is None:
            return
        with self.tolerating(archive):
            for outcome in archive.poll():
                if outcome.kind == "failed":
                    self._failed(archive, LevelError(outcome.error))
                    continue
                self._counts["archived"] += 1
                log.info(
                    "archived %d tokens (%s, %d MiB, %d new segments)",
                    len(outcome.entry.tokens), outcome.entry.reason, outcome.nbytes >> 20, outcome.parts,
                )

    def expire(self, now: float) -> None:
        """Let it drop what has been there for too long. :param now: seconds since the epoch."""
        if self.archive is not None:
            with self.tolerating(self.archive):
                self.archive.expire(now)

    def forget(self, conversation: str, tenant: str | None) -> None:
        """Have archived copies of a conversation deleted; with ``tenant``, only that tenant's."""
        if self.archive is not None:
            with self.tolerating(self.archive):
                self.archive.forget(conversation, tenant)

    def _failed(self, archive: Archive, error: Exception) -> None:
        self._counts["archive_failures"] += 1
        self._trouble(archive.name, error)
