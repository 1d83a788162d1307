"""The level of the documentation's example keeps the level contract."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from strata_level_sqlite.level import SqliteLevel

from strata_core.errors import LevelError
from strata_core.store.base import Entry, Level
from strata_core.testing.levels import MakeLevel, PersistentLevelTests, Reopen, tokens
from strata_core.testing.scene import LAYOUTS, Scene


class TestSqliteLevel(PersistentLevelTests):
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "conversations.db"

    @pytest.fixture
    def make_level(self, path: Path) -> MakeLevel:
        return lambda scene, max_bytes: SqliteLevel(path, scene.pools, max_bytes)

    @pytest.fixture
    def reopen(self, path: Path) -> Reopen:
        def reopen(scene: Scene, level: Level) -> Level:
            bound = level.usage().max_bytes
            assert bound is not None
            level.close()
            return SqliteLevel(path, scene.pools, bound)

        return reopen

    def damage(self, level: Level, entry: Entry) -> bool:
        db: sqlite3.Connection = level._db  # type: ignore[attr-defined]
        [data] = db.execute("SELECT data FROM blocks WHERE entry = ? AND number = 1", (entry.id,)).fetchone()
        with db:
            db.execute(
                "UPDATE blocks SET data = ? WHERE entry = ? AND number = 1",
                (data[:-1] + bytes([data[-1] ^ 1]), entry.id),
            )
        return True

    def test_token_ids_that_changed_are_damage_too(self, scene: Scene, path: Path) -> None:
        level = SqliteLevel(path, scene.pools, 1 << 20)
        entry = scene.put(level, tokens(1, 7))
        changed = entry.tokens.copy()
        changed[6] += 1
        with level._db as db:
            db.execute("UPDATE entries SET tokens = ?", (changed.tobytes(),))
        level.close()
        level = SqliteLevel(path, scene.pools, 1 << 20)
        [found] = level.entries()
        with pytest.raises(LevelError, match="not what was stored"):
            scene.restore(level, found, 7)
        level.close()


@pytest.fixture
def scene() -> Scene:
    return Scene.build(LAYOUTS["one layout"])


def test_the_file_never_exceeds_its_bound(scene: Scene, tmp_path: Path) -> None:
    path, bound = tmp_path / "c.db", 1 << 20
    level = SqliteLevel(path, scene.pools, bound)
    kept = []
    for seed in range(200):
        entry = scene.entry(tokens(seed, 40))
        while kept and level.usage().bytes + level.cost(entry) > bound:
            level.remove(kept.pop(0))
        kept.append(scene.put(level, entry.tokens))
    assert len(kept) > 5
    level.close()
    assert path.stat().st_size <= bound + (64 << 10)


def test_a_full_medium_refuses_and_keeps_nothing(scene: Scene, tmp_path: Path) -> None:
    level = SqliteLevel(tmp_path / "c.db", scene.pools, 1 << 20)
    entry = scene.put(level, tokens(1, 40))
    level._db.execute("PRAGMA max_page_count = 1")  # as if the disk were full: the file cannot grow
    before = level.usage()
    with pytest.raises(LevelError, match="full"):
        for seed in range(2, 200):
            before = level.usage()
            scene.put(level, tokens(seed, 40))
    assert level.usage() == before
    assert level._db.execute("SELECT count(*) FROM entries").fetchone() == (before.entries,)
    assert level.find(scene.query(entry.tokens))
    level.close()


def test_a_second_process_is_refused(scene: Scene, tmp_path: Path) -> None:
    first = SqliteLevel(tmp_path / "c.db", scene.pools, 1 << 20)
    with pytest.raises(LevelError, match="locked"):
        SqliteLevel(tmp_path / "c.db", scene.pools, 1 << 20)
    first.close()


def test_a_file_that_is_no_database_is_named(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"no database, but long enough to be taken for one" * 100)
    with pytest.raises(LevelError, match=r"c\.db.*not a database"):
        SqliteLevel(tmp_path / "c.db", scene.pools, 1 << 20)
