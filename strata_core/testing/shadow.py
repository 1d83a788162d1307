"""A backend whose memory is apart from the host's, as a graphics card's is, without the card.

It computes with the numpy reference but lets nobody see that: arrays are handles without contents, pages have no host
view, and copies of pages take their time. Host code that holds to the compute contract runs on it as on any other
backend. Host code that does not either gets an error that says what it did, or sees NaN where it looked too early.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import attrs
import numpy as np

from strata_core.compute.base import NO_STATE, Array, AttentionSpec, Batch, Event, Indexer, PageStore, Router
from strata_core.compute.reference import NumpyBackend, NumpyPageStore
from strata_core.errors import BackendError
from strata_core.memory.arena import Arena, PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.testing.wrapped import WrappedBackend

#: Every byte of memory that holds nothing: NaN in each float type, and a NaN scale for int8.
POISON = 0xFF


class DeviceArray:
    """Handle of an array in the shadow's own memory. It has no contents, shape or arithmetic on the host."""

    __slots__ = ("__weakref__",)
    __array_ufunc__ = None  # numpy leaves operators alone, so that they raise TypeError

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise BackendError("an array of the backend was used on the host; only to_host reads one")

    __array__ = __len__ = __iter__ = __getitem__ = __bool__ = __float__ = _refuse


class _Copy(Event):
    """A page copy that is made when its countdown ends: at a poll of any event, at an operation, or when waited for."""

    def __init__(self, engine: _CopyEngine, countdown: int, run: Callable[[], None]):
        self._engine = engine
        self.countdown = countdown
        self.run = run
        self.finished = False
        self.error: BackendError | None = None

    def done(self) -> bool:
        self._engine.tick()
        return self.finished

    def wait(self) -> None:
        self._engine.finish(self)
        if self.error is not None:
            raise self.error


class _CopyEngine:
    """All copies under way. Which of them is made when is random but for the seed; they may overtake each other."""

    def __init__(self, seed: int, fail_copies: Collection[int]):
        self._random = random.Random(seed)
        self._fail = frozenset(fail_copies)
        self._lock = threading.RLock()
        self._pending: list[_Copy] = []
        self._started = 0

    def start(self, run: Callable[[], None]) -> _Copy:
        with self._lock:
            copy = _Copy(self, self._random.randint(1, 40), run)
            if self._started in self._fail:
                copy.error = BackendError(f"copy {self._started} failed, as it was told to")
            self._started += 1
            self._pending.append(copy)
            return copy

    def tick(self) -> None:
        with self._lock:
            for copy in list(self._pending):
                copy.countdown -= 1
                if copy.countdown <= 0:
                    self.finish(copy)

    def finish(self, copy: _Copy) -> None:
        with self._lock:
            if copy.finished:
                return
            if copy.error is None:
                copy.run()
            copy.finished = True
            self._pending.remove(copy)


class ShadowPageStore(PageStore):
    """Pages of the shadow: poisoned when new and when freed; knows which pages a copy is under way for.

    :raises BackendError: from whatever names a page in a way that its copies under way forbid.
    """

    def __init__(self, layout: PageLayout, chunk_pages: int, copies: _CopyEngine):
        self.layout = layout
        self.chunk_pages = chunk_pages
        self.inner = NumpyPageStore(layout, chunk_pages, PortableArena("off"))
        self._copies = copies
        self._chunks: set[int] = set()
        self._reading: list[tuple[_Copy, frozenset[int]]] = []
        self._writing: list[tuple[_Copy, frozenset[int]]] = []

    def add_chunk(self, chunk: int) -> None:
        self.inner.add_chunk(chunk)
        self._chunks.add(chunk)
        self.inner.rows(chunk)[:] = POISON

    def drop_chunk(self, chunk: int) -> None:
        pages = range(chunk * self.chunk_pages, (chunk + 1) * self.chunk_pages)
        copied = {page for copies in (self._reading, self._writing) for _, held in copies for page in held}
        for page in sorted(copied.intersection(pages)):
            self.check_write(page, "its chunk was dropped")
        self.inner.rows(chunk)[:] = POISON
        self.inner.drop_chunk(chunk)
        self._chunks.remove(chunk)

    def copy(self, source: int, target: int) -> None:
        self.check_read(source, "it was copied")
        self.check_write(target, "it was overwritten by a copy")
        self.inner.copy(source, target)

    def download(self, pages: Sequence[int], target: np.ndarray) -> Event:
        self._check_block(pages, target)
        for page in pages:
            self.check_read(page, "it was downloaded")
        target[:] = POISON  # what a reader sees who does not wait
        copy = self._copies.start(lambda: self.inner.download(pages, target).wait())
        self._reading.append((copy, frozenset(pages)))
        return copy

    def upload(self, source: np.ndarray, pages: Sequence[int]) -> Event:
        self._check_block(pages, source)
        if len(set(pages)) != len(pages):
            raise BackendError("an upload names a page twice")
        for page in pages:
            self.check_write(page, "it was uploaded to")
            self._memory(page)[:] = POISON
        copy = self._copies.start(lambda: self.inner.upload(source, pages).wait())
        self._writing.append((copy, frozenset(pages)))
        return copy

    def close(self) -> None:
        for chunk in sorted(self._chunks):
            self.drop_chunk(chunk)

    def check_read(self, page: int, what: str) -> None:
        """:raises BackendError: an upload to the page is not done."""
        self._memory(page)
        self._check(self._writing, page, "upload to", what)

    def check_write(self, page: int, what: str) -> None:
        """:raises BackendError: a copy from or to the page is not done."""
        self.check_read(page, what)
        self._check(self._reading, page, "download of", what)

    def _check(self, copies: list[tuple[_Copy, frozenset[int]]], page: int, kind: str, what: str) -> None:
        copies[:] = [(copy, pages) for copy, pages in copies if not copy.finished]
        if any(page in pages for _, pages in copies):
            raise BackendError(f"page {page}: {what} while a {kind} it was not done")

    def _check_block(self, pages: Sequence[int], block: np.ndarray) -> None:
        if block.dtype != np.uint8 or block.shape != (len(pages), self.layout.nbytes):
            raise BackendError(f"{len(pages)} pages do not fit a {block.dtype} block of shape {block.shape}")

    def _memory(self, page: int) -> np.ndarray:
        memory = self.inner.host_view(page)
        if memory is None:
            raise BackendError(f"page {page} has no memory")
        return memory


class ShadowBackend(WrappedBackend):
    """The numpy reference behind a wall; see the module's docstring.

    :param seed: of the order in which copies complete.
    :param fail_copies: numbers of the copies that fail, counted from 0.
    """

    def __init__(self, seed: int = 0, fail_copies: Collection[int] = ()):
        super().__init__(NumpyBackend())
        self.name = "shadow"
        self.host_memory = False
        self._copies = _CopyEngine(seed, fail_copies)
        # Contents live as long as their handle.
        self._heap: weakref.WeakKeyDictionary[DeviceArray, Any] = weakref.WeakKeyDictionary()

    def _read(self, operation: Callable[..., Any], *args: Any) -> Any:
        result = operation(*map(self._open, args))
        return np.array(result) if isinstance(result, np.ndarray) else result

    def page_store(self, layout: PageLayout, chunk_pages: int, arena: Arena) -> PageStore:
        return ShadowPageStore(layout, chunk_pages, self._copies)

    def begin(self, batch: Batch, stores: Sequence[PageStore]) -> Any:
        _check_batch(batch)
        for number, store in enumerate(stores):
            if not isinstance(store, ShadowPageStore):
                raise BackendError("the shadow backend can only use page stores that it made")
            if number < len(batch.spans[0].tables):
                self._check_spans(batch, number, store)
            else:
                _check_states(batch, store)
        inner = [store.inner for store in stores if isinstance(store, ShadowPageStore)]
        return self.inner.begin(batch, inner)

    def attention(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Array,
        k: Array,
        v: Array | None,
        spec: AttentionSpec,
        sinks: Array | None = None,
    ) -> Array:
        self._copies.tick()
        return super().attention(step, layer, q, k, v, spec, sinks)

    def indexed_attention(
        self,
        step: Any,
        layer: tuple[int, int],
        q: Array,
        k: Array,
        v: Array,
        spec: AttentionSpec,
        index_q: Array,
        index_k: Array,
        indexer: Indexer,
    ) -> Array:
        self._copies.tick()
        return super().indexed_attention(step, layer, q, k, v, spec, index_q, index_k, indexer)

    def _check_spans(self, batch: Batch, number: int, store: ShadowPageStore) -> None:
        read: list[int] = []
        written: list[int] = []
        for span in batch.spans:
            table = span.tables[number].tolist()
            first, stop = span.start // store.layout.page_tokens, store.layout.pages_for(span.start + span.rows)
            if len(table) < stop:
                raise BackendError(f"a span of {span.start} + {span.rows} positions has only {len(table)} pages")
            for page in table[:first]:
                store.check_read(page, "a step read it")
            for page in table[first:stop]:
                store.check_write(page, "a step wrote it")
            read += table[:first]
            written += table[first:stop]
        if len(set(written)) < len(written) or set(read) & set(written):
            raise BackendError("a page that one sequence writes is in the table of another, or twice in its own")

    def _call(self, operation: Callable[..., Any], *args: Any, consumed: Array = None) -> Any:
        result = operation(*(self._open(argument) for argument in args))
        if consumed is not None:
            del self._heap[consumed]  # its memory may have been reused
        return tuple(map(self._hide, result)) if isinstance(result, tuple) else self._hide(result)

    def _open(self, argument: Any) -> Any:
        if isinstance(argument, (tuple, list)):
            return type(argument)(map(self._open, argument))
        if isinstance(argument, Router):
            names = ("weight", "bias", "correction")
            return attrs.evolve(argument, **{name: self._open(getattr(argument, name)) for name in names})
        if isinstance(argument, Indexer):
            return attrs.evolve(argument, key_norm=self._open(argument.key_norm))
        if not isinstance(argument, DeviceArray):
            return argument
        try:
            return self._heap[argument]
        except KeyError:
            raise BackendError("an array was used after an operation that may reuse its memory") from None

    def _hide(self, contents: Any) -> DeviceArray:
        handle = DeviceArray()
        self._heap[handle] = contents
        return handle


def _check_batch(batch: Batch) -> None:
    rows, outputs = sum(span.rows for span in batch.spans), batch.outputs.tolist()
    if len(batch.tokens) != rows or any(span.rows < 1 for span in batch.spans):
        raise BackendError(f"{len(batch.tokens)} tokens do not fill the spans, which have {rows} rows")
    if outputs != sorted(set(outputs)) or any(not 0 <= row < rows for row in outputs):
        raise BackendError(f"outputs {outputs} are not ascending rows of {rows}")


def _check_states(batch: Batch, store: ShadowPageStore) -> None:
    written: list[int] = []
    for span in batch.spans:
        if span.state is None:
            raise BackendError("a span has no pages for its state")
        before, after = span.state
        if (before == NO_STATE) != (span.start == 0):
            raise BackendError(f"a span at {span.start} reads state page {before}")
        if before != NO_STATE:
            store.check_read(before, "a step read it")
        store.check_write(after, "a step wrote it")
        written.append(after)
    if len(set(written)) < len(written) or set(written) & {span.state[0] for span in batch.spans if span.state}:
        raise BackendError("a state page that one sequence writes is another's too, or is read")
