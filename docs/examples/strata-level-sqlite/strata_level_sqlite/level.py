"""The level: one row per entry, one row per block of pages, an index in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from strata_core.conversations.identity import DIGEST_BYTES
from strata_core.conversations.index import PrefixIndex, Query
from strata_core.errors import DamagedEntry, LevelError
from strata_core.pool.pool import PagePool
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry, Level, Outcome, Usage

SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (id TEXT PRIMARY KEY, conversation TEXT, identity BLOB, tokens BLOB, addresses BLOB,
    created REAL, used REAL, reason TEXT, tenant TEXT, pinned INTEGER, turns BLOB, root INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocks (entry TEXT, number INTEGER, digest BLOB, data BLOB, PRIMARY KEY (entry, number));
"""

#: SQLite's unit of storage, and how much of it a large value really gets.
DB_PAGE, DB_PAYLOAD = 4096, 4092
#: File pages of the empty tables, and beyond: what max_bytes does not pay for.
DB_SLACK = 16


class SqliteLevel(Level):
    """Entries in the file ``path``, each with all its blocks, also those that others have too.

    Opened by one process at a time. ``put`` writes before it returns. Entries of other identities - another model,
    another K/V type - are kept and counted, and never match, since a query names its identity.

    :param pools: the engine's, whose pages are stored.
    :param max_bytes: what entries may hold; the file has a hard bound slightly above.
    :raises LevelError: the file cannot be opened or is in use.
    """

    name = "sqlite"
    rank = 15

    def __init__(self, path: Path, pools: Sequence[PagePool], max_bytes: int):
        self._sizes = [pool.layout.nbytes for pool in pools]
        self._page_tokens = pools[0].layout.page_tokens
        self._max_bytes = max_bytes
        self._entries: dict[str, Entry] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._bytes = 0
        with _as_level_errors(path):
            # Made by the thread that opens the engine, used and closed by the engine's.
            self._db = sqlite3.connect(path, timeout=1, check_same_thread=False)
        try:
            with _as_level_errors(path):
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.execute(f"PRAGMA max_page_count = {max_bytes // DB_PAGE + DB_SLACK}")
                self._db.executescript(SCHEMA)
                for row in self._db.execute("SELECT * FROM entries"):
                    self._list(_entry(row))
        except LevelError:
            self._db.close()
            raise

    def entries(self) -> Collection[Entry]:
        return list(self._entries.values())

    def find(self, query: Query, excluded: Collection[str] = ()) -> list[tuple[Entry, int]]:
        return [(self._entries[key], shared) for key, shared in self._index.longest(query, excluded)]

    def usage(self) -> Usage:
        return Usage(self._bytes, len(self._entries), self._max_bytes, None)

    def weigh(self, entries: Collection[Entry]) -> int:
        return sum(self.cost(entry) for entry in entries)

    def cost(self, entry: Entry) -> int:
        described = _file_bytes(entry.tokens.nbytes + DIGEST_BYTES * len(entry.addresses))
        return described + len(self._pieces(entry)) * _file_bytes(sum(self._sizes))

    def put(self, entry: Entry, pages: HeldPages) -> Outcome:
        if self._bytes + self.cost(entry) > self._max_bytes:
            raise LevelError(f"no room: the entry takes {self.cost(entry)} bytes of {self._max_bytes}")
        row = (
            entry.id, entry.conversation, entry.identity, entry.tokens.tobytes(), b"".join(entry.addresses),
            entry.created, entry.used, entry.reason, entry.tenant, entry.pinned,
            np.array(entry.turns, np.int64).tobytes(), entry.root,
        )  # fmt: skip
        with _as_level_errors(), self._db:  # the connection as context: all of it is committed, or nothing
            self._db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            for number, piece in enumerate(self._pieces(entry)):
                data = _read(pages, number)
                self._db.execute(
                    "INSERT INTO blocks VALUES (?, ?, ?, ?)", (entry.id, number, _digest(piece, data), data)
                )
        self._list(entry)
        return Outcome("stored", entry, nbytes=self.cost(entry), parts=1)

    def load(self, entry: Entry, tokens: int, sink: PageSink) -> None:
        for number, piece in zip(range(sink.blocks), self._pieces(entry), strict=False):
            with _as_level_errors():
                row = self._db.execute(
                    "SELECT digest, data FROM blocks WHERE entry = ? AND number = ?", (entry.id, number)
                ).fetchone()
            if row is None or len(row[1]) != sum(self._sizes) or _digest(piece, row[1]) != row[0]:
                self.remove(entry)
                raise DamagedEntry(f"block {number} of conversation {entry.conversation} is not what was stored")
            data, offset = np.frombuffer(row[1], np.uint8), 0
            for buffer in sink.buffers(number):
                buffer[:] = data[offset : offset + len(buffer)]
                offset += len(buffer)
            sink.filled(number)

    def remove(self, entry: Entry) -> None:
        with _as_level_errors(), self._db:
            self._db.execute("DELETE FROM blocks WHERE entry = ?", (entry.id,))
            self._db.execute("DELETE FROM entries WHERE id = ?", (entry.id,))
        del self._entries[entry.id]
        self._bytes -= self.cost(entry)
        self._index.remove(entry.id)

    def update(self, entry: Entry) -> None:
        with _as_level_errors(), self._db:
            self._db.execute(
                "UPDATE entries SET used = ?, pinned = ? WHERE id = ?", (entry.used, entry.pinned, entry.id)
            )
        self._entries[entry.id] = entry

    def close(self) -> None:
        self._db.close()

    def _list(self, entry: Entry) -> None:
        self._entries[entry.id] = entry
        self._bytes += self.cost(entry)
        self._index.add(entry.id, entry)

    def _pieces(self, entry: Entry) -> list[bytes]:
        """The token ids of each block: part of its digest, so that ids and K/V cannot come apart."""
        size = self._page_tokens
        return [entry.tokens[start : start + size].tobytes() for start in range(0, len(entry.tokens), size)]


def _entry(row: tuple[str, str, bytes, bytes, bytes, float, float, str, str, int, bytes, int]) -> Entry:
    tokens = np.frombuffer(row[3], np.int32)  # read-only, as it is a view of bytes
    addresses = tuple(row[4][start : start + DIGEST_BYTES] for start in range(0, len(row[4]), DIGEST_BYTES))
    turns = tuple(np.frombuffer(row[10], np.int64).tolist())
    pinned, root = bool(row[9]), bool(row[11])
    return Entry(row[0], row[1], row[2], tokens, addresses, row[5], row[6], row[7], row[8], pinned, turns, root)


def _read(pages: HeldPages, number: int) -> bytes:
    """One block: a page of every pool, in host memory or on a device alike."""
    rows = []
    for pool, table in zip(pages.pools, pages.tables, strict=True):
        row = np.empty((1, pool.layout.nbytes), np.uint8)
        pool.store.download([table[number]], row).wait()
        rows.append(row.tobytes())
    return b"".join(rows)


def _digest(piece: bytes, data: bytes) -> bytes:
    digest: bytes = xxh3_128_digest(piece + data)
    return digest


def _file_bytes(value: int) -> int:
    """What a row with a value of so many bytes takes in the file, at most."""
    return (value // DB_PAYLOAD + 2) * DB_PAGE


@contextmanager
def _as_level_errors(path: Path | None = None) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise LevelError(f"{path}: {error}" if path else str(error)) from error
