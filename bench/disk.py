"""Measures the disk level with the K/V of a 135M model (30 layers, 3 heads of 64, f16: 22.5 KiB per position).

    python bench/disk.py [--folder DIR] [--tokens 2048] [--rounds 9] [--peer llama_cpp_peer.py --model MODEL.gguf]

Everything is measured in turns with what it is compared with; the medians of the pairs' ratios are printed with
their bars:

* spill: handing an entry over until its bytes are in files, against writing as many bytes to one file (90 %); and until
  it is durable, against the same write followed by fdatasync;
* restore with the files in the page cache, index lookup and verification included, against the peer's loading of the
  same number of positions from its file (at least as fast);
* restore with the page cache dropped, against plainly reading the same files (85 %).

``--peer`` is a script with a class ``LlamaCpp`` that drives llama.cpp through ctypes.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "tiers"))

from strata_tiers.layout import Shape
from strata_tiers.level import DiskLevel, LevelOptions, Workshop

from strata_core.compute.reference import NumpyPageStore
from strata_core.conversations.identity import Identity, page_addresses
from strata_core.conversations.index import Query
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.pool.pool import PagePool, chunk_pages_for
from strata_core.pool.sink import PageSink
from strata_core.pool.table import HeldPages
from strata_core.store.base import Entry

RUN = 1 << 20


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Bench:
    """A pool, a level in a fresh folder, and entries of random pages."""

    def __init__(self, folder: Path, tokens: int):
        self.folder, self.tokens = folder, tokens
        layout = PageLayout.attention(layers=30, kv_heads=3, head_dim=64, kv_type="f16", page_tokens=32)
        self.pool = PagePool(NumpyPageStore(layout, chunk_pages_for(layout), PortableArena("auto")), 1 << 16)
        self.identity = Identity.of({"weights": "bench"})
        shape = Shape(32, (layout.nbytes,))
        self.level = DiskLevel("cold", 20, folder / "level", self.identity, shape, LevelOptions(64 << 30), Workshop())
        random = np.random.default_rng(0)
        self.contents = random.integers(0, 256, (layout.pages_for(tokens), layout.nbytes), np.uint8)
        self.nbytes = self.contents.nbytes
        self.held = self._pages()
        # Memory that was touched before, as an engine's is: a page here and there keeps its chunk from being freed.
        room = [self.pool.allocate() for _ in range(3 * len(self.contents))]
        for number, page in enumerate(room):
            self.pool.store.host_view(page)[:] = 1
            if number % 16:
                self.pool.release(page)
        self.random = random

    def entry(self) -> Entry:
        ids = self.random.integers(0, 49152, self.tokens).astype(np.int32)
        ids.setflags(write=False)
        now, name = time.time(), f"e{self.random.integers(1 << 60)}"
        addresses = page_addresses(self.identity, ids, 32)
        return Entry(name, name, self.identity.digest, ids, addresses, now, now, "bench", turns=(0, self.tokens // 2))

    def spill(self, entry: Entry, durable: bool) -> None:
        self.level.put(entry, self.held)
        if durable:
            self.level.flush()
        else:
            self.level.settle()

    def write(self, durable: bool) -> None:
        """The same bytes into one file, from memory that lies in one piece."""
        path = self.folder / f"plain{time.time_ns()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        data = memoryview(self.contents.reshape(-1))
        for offset in range(0, self.nbytes, RUN):
            os.pwrite(fd, data[offset : offset + RUN], offset)
        if durable:
            os.fdatasync(fd)
        os.close(fd)
        self.plain = path

    def restore(self, entry: Entry) -> None:
        query = Query(entry.identity, entry.tokens, entry.addresses)
        [(found, shared)] = self.level.find(query)
        sink = PageSink((self.pool,), shared)
        self.level.load(found, shared, sink)
        sink.finish().release()

    def files(self, entry: Entry) -> list[Path]:
        place = self.level.place
        return [place.segment_path(part) for part in place.holdings.kept[entry.id].parts]

    def read(self, files: list[Path], target: np.ndarray) -> None:
        """The same files from their beginnings to their ends, into memory that has been touched."""
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for offset in range(0, path.stat().st_size, RUN):
                os.preadv(fd, [target[:RUN]], offset)
            os.close(fd)

    def _pages(self) -> HeldPages:
        sink = PageSink((self.pool,), self.tokens)
        for number, row in enumerate(self.contents):
            sink.put(number, (row,))
        return sink.finish()


def drop(files: list[Path]) -> None:
    """Take clean files out of the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def report(what: str, nbytes: int, ours: list[float], theirs: list[float], bar: float) -> None:
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    print(
        f"{what:34} ours {1e3 * statistics.median(ours):7.1f} ms {nbytes / statistics.median(ours) / 1e9:5.2f} GB/s   "
        f"other {1e3 * statistics.median(theirs):7.1f} ms   {100 * ratio:4.0f} % of its rate "
        f"(bar {100 * bar:.0f} %: {'met' if ratio >= bar else 'MISSED'})"
    )


def peer_loader(script: Path, model: str, tokens: int, folder: Path) -> Callable[[], object]:
    """Loads the K/V of as many positions from the peer's own file."""
    spec = importlib.util.spec_from_file_location("peer", script)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    peer = module.LlamaCpp(model, 2, None)
    ids = np.random.default_rng(0).integers(1000, 40000, tokens).astype(np.int32)
    for start in range(0, tokens, 512):
        peer.decode(ids[start : start + 512])
    path, count, target = str(folder / "peer").encode(), ctypes.c_size_t(), np.zeros(2 * tokens, np.int32)
    peer.lib.llama_state_seq_save_file(peer.context, path, 0, ids.ctypes.data, tokens)

    def load() -> None:
        peer.clear()
        peer.lib.llama_state_seq_load_file(
            peer.context, path, 0, target.ctypes.data, 2 * tokens, ctypes.byref(count)
        )
        assert count.value == tokens

    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        bench = Bench(Path(name), options.tokens)
        print(f"{options.tokens} positions, {bench.nbytes / 1e6:.1f} MB")
        for durable in (False, True):
            ours, theirs = [], []
            for _ in range(options.rounds):
                entry = bench.entry()
                ours.append(timed(lambda e=entry, d=durable: bench.spill(e, d)))
                bench.level.flush()
                bench.level.poll()
                bench.level.remove(entry)
                theirs.append(timed(lambda d=durable: bench.write(d)))
                os.sync()
                bench.plain.unlink()
            report("spill, durable" if durable else "spill, in files", bench.nbytes, ours, theirs, 0.9)
        entry = bench.entry()
        bench.spill(entry, True)
        bench.level.poll()
        files, target = bench.files(entry), np.ones(RUN, np.uint8)
        bench.restore(entry)
        if options.peer:
            load = peer_loader(options.peer, options.model, options.tokens, Path(name))
            load()
            pairs = [(timed(lambda: bench.restore(entry)), timed(load)) for _ in range(options.rounds)]
            report("restore, page cache, against peer", bench.nbytes, *map(list, zip(*pairs, strict=True)), 1.0)
        ours, theirs = [], []
        for number in range(2 * options.rounds):  # whoever comes second may profit from what the first one fetched
            for mine in (True, False) if number % 2 else (False, True):
                drop(files)
                action = (lambda: bench.restore(entry)) if mine else (lambda: bench.read(files, target))
                (ours if mine else theirs).append(timed(action))
        report("restore, cache dropped, against read", bench.nbytes, ours, theirs, 0.85)
        ours = [timed(lambda: bench.restore(entry)) for _ in range(options.rounds)]
        theirs = [timed(lambda: bench.read(files, target)) for _ in range(options.rounds)]
        report("restore, page cache, against read", bench.nbytes, ours, theirs, 0.0)
        bench.held.release()
        bench.level.close()


if __name__ == "__main__":
    main()
