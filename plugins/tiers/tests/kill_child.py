"""For every line on standard input: a process that parks conversations until it is killed, and says what it was told.

A line is ``FOLDER SEED``. Lines out: ``pid N``, ``stored ID``, ``removing ID`` (before it does), ``ended``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
from disk_kit import SMALL, ids, new_scene, open_level

from strata_core.store.base import Entry


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def work(folder: Path, seed: int) -> None:
    """Conversations that share a beginning and grow; the older state goes when the newer is stored."""
    scene, random = new_scene(), np.random.default_rng(seed)
    level = open_level(scene, folder, limits=SMALL)
    say("pid", os.getpid())
    newest: dict[str, Entry] = {entry.conversation: entry for entry in level.entries()}
    superseded: dict[str, str] = {}
    for step in range(10_000):
        name = f"c{random.integers(4)}"
        before = newest.get(name)
        count = (len(before.tokens) if before is not None and len(before.tokens) < 200 else 12) + random.integers(1, 30)
        tokens = np.append(ids(1, 12), ids(100 + int(name[1:]), int(count)))
        entry = scene.put(
            level, tokens, id=f"s{seed}-{step}", conversation=name, turns=tuple(range(0, len(tokens), 12))
        )
        newest[name] = entry
        if before is not None:
            superseded[entry.id] = before.id
        while level.busy():
            for outcome in level.poll():
                assert outcome.kind == "stored", outcome.error
                say("stored", outcome.entry.id)
                older = superseded.pop(outcome.entry.id, None)
                if older is not None and level.holds(older):
                    say("removing", older)
                    level.remove(next(e for e in level.entries() if e.id == older))
            if random.integers(3):
                break


if __name__ == "__main__":
    for line in sys.stdin:
        folder, seed = line.split()
        child = os.fork()
        if child == 0:
            work(Path(folder), int(seed))
        os.waitpid(child, 0)
        say("ended")
