"""Levels and entries for the tests of the disk levels."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import numpy as np
from strata_tiers.cut import Limits
from strata_tiers.files import Files
from strata_tiers.layout import Shape
from strata_tiers.level import DiskLevel, LevelOptions, Workshop
from strata_tiers.writer import Writer

from strata_core.errors import LevelError
from strata_core.store.base import Entry, Outcome
from strata_core.testing.scene import LAYOUTS, STATES, Scene


def new_scene(*, states: bool = False) -> Scene:
    """:param states: of a model with recurrent state."""
    return Scene.build(LAYOUTS["two layouts"], states=STATES if states else None)


def shape_of(scene: Scene) -> Shape:
    states = scene.state_pool
    pages = tuple(pool.layout.nbytes for pool in scene.pools)
    return Shape(scene.page_tokens, pages, 0 if states is None else states.layout.nbytes)


def open_level(
    scene: Scene,
    root: Path,
    *,
    files: Files | None = None,
    workshop: Workshop | None = None,
    name: str = "cold",
    rank: int = 20,
    max_bytes: int = 64 << 20,
    **options: object,
) -> DiskLevel:
    shop = workshop or Workshop(Writer(files))
    return DiskLevel(name, rank, root, scene.identity, shape_of(scene), LevelOptions(max_bytes, **options), shop)


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, 1 << 13).astype(np.int32)[:count]


def drain(level: DiskLevel) -> list[Outcome]:
    """Wait for all background work and take what it came to."""
    with contextlib.suppress(LevelError):  # the outcomes tell
        level.flush()
    found = list(level.poll())
    level.poll()
    return found


def whole(scene: Scene, level: DiskLevel, entry: Entry) -> bool:
    """Whether all of an entry comes back as it was put."""
    pages = scene.restore(level, entry, len(entry.tokens))
    try:
        return scene.holds(pages, entry)
    finally:
        pages.release()


def du(folder: Path) -> int:
    """What the folder takes on the disk, in bytes."""
    return 1024 * int(subprocess.run(["du", "-sk", folder], capture_output=True, check=True).stdout.split()[0])


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "strata.lock")


SMALL = Limits(split_bytes=1 << 10, max_bytes=4 << 10, max_tokens=64)
