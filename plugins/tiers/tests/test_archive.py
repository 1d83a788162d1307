"""The archive keeps what a newer copy made needless, within its own bounds, and fails without anybody noticing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from disk_kit import drain, files_in, ids, new_scene, open_level, shape_of
from faulty_files import FaultyFiles
from format_reader import read_conversation
from strata_tiers.archive import DiskArchive
from strata_tiers.directory import Directory
from strata_tiers.exchange import export_entry, import_entry
from strata_tiers.files import Files
from strata_tiers.level import DiskLevel, Workshop
from strata_tiers.shelf import ArchiveOptions
from strata_tiers.writer import Writer

from strata_core.errors import LevelError
from strata_core.store.base import Entry, Level, Outcome
from strata_core.store.ram import RamLevel
from strata_core.testing.scene import Scene


class Volumes(Files):
    """The archive is on another volume than the levels."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@attrs.define
class World:
    """A cold level and an archive that share a writer."""

    scene: Scene
    root: Path
    files: Files = attrs.field(factory=Files)
    options: dict[str, Any] = attrs.field(factory=dict)
    cold: DiskLevel = attrs.field(init=False)
    archive: DiskArchive = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        shop = Workshop(Writer(self.files))
        self.cold = open_level(self.scene, self.root / "cold", workshop=shop)
        options = ArchiveOptions(**({"mode": "state", "max_bytes": 1 << 20} | self.options))
        scene, root = self.scene, self.root / "cold" / "archive"
        self.archive = DiskArchive(root, scene.identity, shape_of(scene), options, shop)

    def retire(self, level: Level, entry: Entry, why: str = "superseded") -> Outcome:
        """What the coordinator does with a copy that is not needed any more, and what came of it."""
        self.archive.take(entry, why, level)
        level.remove(entry)
        return self.outcome()

    def outcome(self) -> Outcome:
        self.archive.flush()
        [outcome] = self.archive.poll()
        return outcome

    def listed(self) -> set[str]:
        return {path.name[len("strata-conv-") : -len(".meta")] for path in (self.folder / "conversations").iterdir()}

    @property
    def folder(self) -> Path:
        assert self.archive.folder is not None
        return self.archive.folder

    def close(self) -> None:
        self.cold.close()
        self.archive.close()

    def sound(self) -> bool:
        """Whether the account is right, and everything that is listed is complete."""
        for entry_id in self.listed():
            read_conversation(self.folder, entry_id)
        usage = self.archive.usage()
        charge = Directory(self.folder, Files(), read_only=True).charge() if usage.bytes else 0
        return (usage.bytes, usage.entries) == (charge, len(self.listed())) and usage.bytes <= (usage.max_bytes or 0)


Make = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda files=None, **options: World(new_scene(), tmp_path, files or Files(), options)


@pytest.mark.parametrize("files", [Files, Volumes])
def test_a_superseded_copy_is_kept_and_comes_back_as_a_session(make: Make, files: type[Files]) -> None:
    world = make(files())
    old, new = (world.scene.put(world.cold, ids(1, count), conversation="one") for count in (27, 40))
    drain(world.cold)
    outcome = world.retire(world.cold, old)
    assert (outcome.kind, outcome.entry.reason, outcome.entry.id) == ("stored", "superseded", old.id)
    drain(world.cold)
    manifest, blocks = read_conversation(world.folder, old.id)
    assert manifest["ids"] == tuple(old.tokens.tolist())
    assert [[bytes(page) for page in block] for block in blocks] == [
        [page.tobytes() for page in block] for block in world.scene.blocks(old)
    ]
    assert world.sound()
    world.cold.remove(new)
    world.close()
    export_entry(world.folder, old.id, world.root / "old.sess")
    import_entry(world.root / "cold", world.root / "old.sess")
    level = open_level(world.scene, world.root / "cold")
    [back] = level.entries()
    assert back.tokens.tolist() == old.tokens.tolist()
    pages = world.scene.restore(level, back, len(back.tokens))
    assert world.scene.holds(pages, old)
    pages.release()
    level.close()
    assert world.scene.used == 0


def test_a_copy_on_the_same_volume_takes_a_second_name_and_no_room(make: Make) -> None:
    world = make()
    old = world.scene.put(world.cold, ids(1, 27))
    drain(world.cold)
    outcome = world.retire(world.cold, old)
    assert (outcome.nbytes, outcome.parts) == (next((world.folder / "conversations").iterdir()).stat().st_size, 2)
    world.close()


def test_what_was_only_in_memory_is_written_from_there(make: Make) -> None:
    world = make()
    ram = RamLevel(world.scene.pools, copies=False, max_bytes=1 << 20, max_entries=9)
    old = world.scene.put(ram, ids(1, 27))
    assert world.retire(ram, old).kind == "stored"
    assert world.sound()
    assert world.listed() == {old.id}
    world.close()
    assert world.scene.used == 0


def test_a_copy_that_is_still_being_written_is_kept_from_its_pages(make: Make) -> None:
    world = make()
    old = world.scene.put(world.cold, ids(1, 27))
    world.archive.take(old, "superseded", world.cold)
    world.cold.remove(old)
    assert world.outcome().kind == "stored"
    assert world.sound()
    world.close()
    assert world.scene.used == 0


def test_ids_alone_are_kept_without_segments(make: Make) -> None:
    world = make(mode="ids")
    old = world.scene.put(world.cold, ids(1, 27), turns=(0, 12))
    assert world.retire(world.cold, old, "compacted").kind == "stored"
    assert world.sound()
    [path] = files_in(world.folder)
    manifest, blocks = read_conversation(world.folder, old.id)
    assert (manifest["ids"], manifest["turns"], blocks) == (tuple(old.tokens.tolist()), [0, 12], [])
    with pytest.raises(LevelError, match="only the token ids"):
        export_entry(world.folder, old.id, world.root / "no.sess")
    world.close()
    # Where a level finds such a manifest it does not offer it.
    path.rename(world.root / "cold" / "conversations" / path.name)
    level = open_level(world.scene, world.root / "cold")
    assert (list(level.entries()), level.report.foreign) == ([], 1)
    level.close()
    assert (world.root / "cold" / "conversations" / path.name).exists()


def test_the_archive_in_the_cold_levels_folder_is_not_the_cold_levels(make: Make) -> None:
    world = make()
    old = world.scene.put(world.cold, ids(1, 27))
    drain(world.cold)
    before = world.cold.usage()
    world.retire(world.cold, old)
    drain(world.cold)
    world.close()
    level = open_level(world.scene, world.root / "cold")
    assert level.usage().bytes == 0 < before.bytes
    assert level.find(world.scene.query(old.tokens)) == []
    level.close()
    assert (world.folder / "conversations").iterdir()


def test_no_more_copies_of_a_conversation_are_kept_than_asked_for_rewritten_ones_longest(make: Make) -> None:
    world = make(keep=2)
    whys = ["compacted", "superseded", "superseded", "compacted", "superseded", "compacted"]
    copies = [world.scene.put(world.cold, ids(seed, 9), conversation="one") for seed in range(len(whys))]
    other = world.scene.put(world.cold, ids(9, 9), conversation="other")
    drain(world.cold)
    kept = [{copies[n].id for n in group} for group in ([0], [0, 1], [0, 2], [0, 3], [3, 4], [3, 5])]
    world.retire(world.cold, other)
    for copy, why, expected in zip(copies, whys, kept, strict=True):
        world.retire(world.cold, copy, why)
        assert world.listed() == {other.id} | expected
        assert world.sound()
    world.close()


@pytest.mark.parametrize("mode", ["ids", "state"])
def test_the_oldest_copies_go_when_the_budget_is_full_also_after_a_restart(make: Make, mode: str) -> None:
    bound = 90 << 10
    world = make(mode=mode, max_bytes=bound)
    count = 40 if mode == "ids" else 10
    copies = [world.scene.put(world.cold, ids(seed, 30)) for seed in range(count)]
    drain(world.cold)
    for copy in copies[: count // 2]:
        assert world.retire(world.cold, copy).kind == "stored"
        assert world.sound()
    world.close()
    world = make(mode=mode, max_bytes=bound)
    for copy in copies[count // 2 :]:
        assert world.retire(world.cold, copy).kind == "stored"
        assert world.sound()
    left = len(world.listed())
    assert 1 < left < count
    assert world.listed() == {copy.id for copy in copies[-left:]}
    world.close()


def test_a_copy_that_is_larger_than_the_archive_is_refused_and_nothing_leaves_for_it(make: Make) -> None:
    world = make(max_bytes=64 << 10, keep=1)
    small, large = (
        world.scene.put(world.cold, ids(seed, count), conversation="one") for seed, count in ((1, 9), (2, 200))
    )
    drain(world.cold)
    world.retire(world.cold, small)
    outcome = world.retire(world.cold, large)
    assert outcome.kind == "failed"
    assert "larger than the archive" in outcome.error
    assert world.listed() == {small.id}
    assert world.sound()
    world.close()


def test_copies_leave_with_age_and_when_their_conversation_is_deleted(make: Make) -> None:
    world = make(max_age_s=60)
    for number, conversation in enumerate(("one", "one", "two", "three")):
        world.retire(world.cold, world.scene.put(world.cold, ids(number, 9), conversation=conversation, tenant="t"))
    world.archive.forget("one", "somebody else")
    world.archive.flush()
    assert world.archive.usage().entries == 4
    world.archive.forget("one", "t")
    world.archive.forget("two", None)
    while world.archive.busy():
        world.archive.poll()
    assert world.archive.usage().entries == 1
    assert world.sound()
    [path] = (world.folder / "conversations").iterdir()
    now = path.stat().st_mtime
    for later, left in ((50, 1), (70, 0)):
        world.archive.expire(now + later)
        while world.archive.busy():
            world.archive.poll()
        assert world.archive.usage().entries == left
    assert world.archive.usage().bytes == 0
    assert files_in(world.folder) == []
    world.close()


@pytest.mark.parametrize("volumes", [1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_whatever_fails_costs_the_copy_and_leaves_nothing_of_it(tmp_path: Path, code: int, volumes: int) -> None:
    number, kinds = 0, set[str]()
    while True:
        failing, start = False, 0

        def fails(call: int, name: str, arguments: tuple[Any, ...]) -> int:
            if failing and call - start == number:  # noqa: B023 - called within the turn of the loop
                return code
            return errno.EXDEV if name == "link" and volumes == 2 else 0

        files = FaultyFiles(fails)
        world = World(new_scene(), tmp_path / str(number), files)
        first = world.scene.put(world.cold, ids(1, 20), conversation="one")
        second = world.scene.put(world.cold, ids(2, 20), conversation="two")
        drain(world.cold)
        world.retire(world.cold, first)
        while world.cold.place.drops:  # so that all calls from here on are for the archive
            time.sleep(0.001)
        start, failing = len(files.calls), True
        world.archive.take(second, "superseded", world.cold)
        outcome = world.outcome()
        calls, failing = files.calls[start:], False
        kinds.add(outcome.kind)
        assert world.listed() == {first.id} | ({second.id} if outcome.kind == "stored" else set())
        assert world.sound()
        assert world.retire(world.cold, second).kind == "stored"
        assert world.sound()
        world.close()
        assert world.scene.used == 0
        if len(calls) <= number:
            break
        number += 1
    assert number > 8
    assert kinds == {"stored", "failed"}


def test_a_restart_deletes_nothing_but_what_does_not_fit_any_more(make: Make) -> None:
    world = make()
    copies = [world.scene.put(world.cold, ids(seed, 20), conversation=f"c{seed}") for seed in range(4)]
    drain(world.cold)
    for copy in copies:
        world.retire(world.cold, copy)
    usage = world.archive.usage()
    (world.folder / "segments" / ".strata-tmp-left").write_bytes(bytes(9000))
    world.close()
    world = make()
    world.archive.flush()
    world.retire(world.cold, world.scene.put(world.cold, ids(9, 20)))
    assert world.listed() >= {copy.id for copy in copies}
    assert world.sound()
    world.close()
    world = make(max_bytes=usage.bytes * 2 // 3)
    while world.archive.busy():
        world.archive.poll()
    assert 0 < world.archive.usage().entries < 4
    assert world.sound()
    assert not (world.folder / "segments" / ".strata-tmp-left").exists()
    world.close()


def test_an_archive_whose_folder_disappears_goes_on_in_a_new_one(make: Make) -> None:
    import shutil

    world = make()
    copies = [world.scene.put(world.cold, ids(1, count), conversation="one") for count in (20, 40)]
    drain(world.cold)
    world.retire(world.cold, copies[0])
    shutil.rmtree(world.folder)
    assert world.retire(world.cold, copies[1]).kind == "stored"
    read_conversation(world.folder, copies[1].id)
    world.close()


def test_a_second_process_is_refused(make: Make) -> None:
    world = make()
    with pytest.raises(LevelError, match="in use by another process"):
        DiskArchive(
            world.folder, world.scene.identity, shape_of(world.scene), ArchiveOptions("ids", 1 << 20), Workshop()
        )
    world.close()
