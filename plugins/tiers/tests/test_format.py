"""What lies on disk is what the document says: a reader written from it alone reads everything back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from disk_kit import SMALL, drain, files_in, ids, new_scene, open_level
from format_reader import read_conversation, read_manifest, read_segment, read_session, read_states
from strata_tiers import exchange
from strata_tiers.cut import Limits, cut
from strata_tiers.layout import Shape


@pytest.mark.parametrize("length", [1, 3, 4, 11, 64, 130])
def test_an_independent_reader_reads_everything_back(tmp_path: Path, length: int) -> None:
    scene = new_scene()
    level = open_level(scene, tmp_path, limits=SMALL)
    entry = scene.put(
        level, ids(1, length), turns=(0, length // 2), pinned=True, tenant="t", root=True,
        identity=scene.identity.for_tenant("t"), reason="switch", used=1.25,
    )  # fmt: skip
    drain(level)
    manifest, blocks = read_conversation(tmp_path, entry.id)
    assert [[page.tobytes() for page in block] for block in scene.blocks(entry)] == blocks
    assert manifest["ids"] == tuple(entry.tokens.tolist())
    assert manifest["identity"] == entry.identity
    assert manifest["parts"] == dict(scene.identity.parts)
    assert manifest.items() >= {
        "conversation": entry.conversation, "tenant": "t", "created": entry.created, "used": 1.25, "reason": "switch",
        "pinned": True, "root": True,
    }.items()  # fmt: skip
    level.close()


def test_files_and_folders_are_private_and_named_as_documented(tmp_path: Path) -> None:
    scene = new_scene()
    level = open_level(scene, tmp_path / "a" / "b")
    scene.put(level, ids(1, 11))
    drain(level)
    for path in (tmp_path / "a", *(tmp_path / "a").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    names = {path.name.split("-")[1] + path.suffix for path in files_in(tmp_path)}
    assert names == {"seg.seg", "conv.meta"}
    level.close()


def test_a_session_file_is_read_by_the_independent_reader(tmp_path: Path) -> None:
    scene = new_scene()
    level = open_level(scene, tmp_path / "level")
    entry = scene.put(level, ids(1, 27), turns=(0, 9, 20), pinned=True)
    drain(level)
    level.close()
    size = exchange.export_entry(tmp_path / "level", entry.id, tmp_path / "one.sess")
    data = (tmp_path / "one.sess").read_bytes()
    assert len(data) == size
    session = read_session(data)
    assert session["identity"] == entry.identity and session["ids"] == entry.tokens.tolist()
    assert session.items() >= {
        "conversation": entry.conversation, "tenant": "", "created": entry.created, "used": entry.used, "pinned": True,
        "reason": "switch", "turns": [0, 9, 20], "parts": dict(scene.identity.parts),
    }.items()  # fmt: skip
    assert session["blocks"] == [[page.tobytes() for page in block] for block in scene.blocks(entry)]


@pytest.mark.parametrize("states", [(1,), (4, 27), (8, 13, 24, 27)])
def test_states_are_read_from_their_files_and_from_a_session(tmp_path: Path, states: tuple[int, ...]) -> None:
    scene = new_scene(states=True)
    level = open_level(scene, tmp_path / "level", limits=SMALL)
    entry = scene.put(level, ids(1, states[-1]), turns=(0,), states=states)
    drain(level)
    level.close()
    expected = {position: scene.state(entry, position).tobytes() for position in states}
    blocks = [[page.tobytes() for page in block] for block in scene.blocks(entry)]
    manifest, found = read_conversation(tmp_path / "level", entry.id)
    assert found == blocks
    assert read_states(tmp_path / "level", manifest) == expected
    exchange.export_entry(tmp_path / "level", entry.id, tmp_path / "one.sess")
    session = read_session((tmp_path / "one.sess").read_bytes())
    assert session["states"] == expected and session["blocks"] == blocks


def test_the_reader_finds_a_flip_of_any_byte(tmp_path: Path) -> None:
    scene = new_scene(states=True)
    level = open_level(scene, tmp_path)
    scene.put(level, ids(1, 5), states=(5,))
    drain(level)
    level.close()
    for path in files_in(tmp_path):
        read = read_manifest if path.suffix == ".meta" else read_segment
        data = path.read_bytes()
        read(data)
        for at in range(0, len(data), 1 if path.suffix == ".meta" else 7):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            with pytest.raises(ValueError):
                read(bytes(flipped))


# -- cutting --------------------------------------------------------------------------------------------------------

SHAPE = Shape(32, (32 << 10,))  # a page of 32 KiB: 1 KiB per position
MIB = 1 << 20


def test_a_conversation_without_turns_is_cut_where_its_last_page_begins() -> None:
    assert cut(0, 1000, (), SHAPE, Limits()) == [992, 1000]
    assert cut(0, 992, (), SHAPE, Limits()) == [992]
    assert cut(0, 5, (), SHAPE, Limits()) == [5]
    assert cut(0, 1000, (), SHAPE, Limits(), prefix=333) == [320, 992, 1000]


def test_the_system_prompt_and_the_last_turn_begin_a_segment() -> None:
    assert cut(0, 2000, (0, 1010, 1200, 1500, 1700), SHAPE, Limits()) == [992, 1696, 1984, 2000]


def test_intermediate_turns_cut_only_large_parts() -> None:
    turns = (0, 1010, 5000, 9300, 12000, 20000, 20100)
    ends = cut(0, 20200, turns, SHAPE, Limits(max_tokens=1 << 20))
    assert ends == [992, 9280, 20000, 20096, 20192, 20200]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_turns_the_parts_follow_each_other_and_none_is_too_large(seed: int) -> None:
    random = np.random.default_rng(seed)
    stop = int(random.integers(1, 9000))
    start = int(random.integers(0, stop)) // 32 * 32
    turns = tuple(sorted(random.integers(0, stop, int(random.integers(0, 12))).tolist()))
    limits = Limits(max_tokens=int(random.integers(1, 3000)), split_bytes=1 << 20, max_bytes=2 << 20)
    ends = cut(start, stop, turns, SHAPE, limits)
    assert ends[-1] == stop
    at = start
    for end in ends:
        assert at < end <= at + limits.most(SHAPE)
        assert end % 32 == 0 or end == stop
        at = end
