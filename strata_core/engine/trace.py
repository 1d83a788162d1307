"""``--record-trace``: one JSON line per request that has ended, for ``strata simulate``.

The engine thread hands over what it has anyway; hashing and writing happen on a thread of the recorder's own, behind a
bounded queue. The format is described in ``docs/simulate.md``. A trace holds no token ids and no text, see
:mod:`strata_core.engine.fingerprints`.
"""

from __future__ import annotations

import base64
import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from strata_core.engine.fingerprints import Fingerprints
from strata_core.engine.requests import RequestRecord
from strata_core.errors import SettingsError

log = logging.getLogger("strata.trace")

VERSION = 1
#: Requests that may wait to be written. A request of 100,000 tokens waits with 400 kB.
CAPACITY = 64


@attrs.frozen(eq=False)
class TracedRequest:
    """A request that has ended.

    :ivar record: its ledger.
    :ivar tokens: int32, its prompt and what was generated and computed after it.
    :ivar computed: how many of them the slot was left with.
    :ivar turns: positions of the tokens that open a turn.
    :ivar cache: whether it used and left anything; :ivar pin: whether its conversation was pinned.
    :ivar after: id of the request whose prompt had to be read before this one started.
    """

    record: RequestRecord
    tokens: np.ndarray = attrs.field(repr=False)
    computed: int
    turns: tuple[int, ...] = ()
    cache: bool = True
    pin: bool = False
    after: str | None = None


class TraceWriter:
    """Turns requests into lines.

    :param header: what a reader must know of the engine, ``page_tokens`` among it.
    :param key: of the fingerprints; None draws one.
    """

    def __init__(self, header: Mapping[str, Any], key: bytes | None = None):
        self._header = dict(header)
        self._prints = Fingerprints(header["page_tokens"], key)
        self._start = float(header["start"])

    def header(self) -> str:
        return json.dumps({"strata_trace": VERSION, **self._header}, separators=(",", ":"))

    def line(self, request: TracedRequest) -> str:
        record = request.record
        sequence = self._prints.take(record.tenant, request.tokens)
        return json.dumps(
            {
                "id": record.id,
                "t": round(record.created - self._start, 6),
                "tenant": self._prints.tenant(record.tenant),
                "status": record.status,
                "prompt": record.prompt_tokens,
                "generated": record.generated_tokens,
                "computed": request.computed,
                "cache": request.cache,
                "pin": request.pin,
                "after": request.after,
                "known": sequence.known,
                "parent": base64.b64encode(sequence.parent).decode(),
                "names": base64.b64encode(sequence.names).decode(),
                "prints": base64.b64encode(sequence.prints.tobytes()).decode(),
                "turns": [turn for turn in request.turns if turn >= sequence.known],
                "really": {
                    "cached": record.cached_tokens,
                    "reused": dict(record.reused),
                    "read": record.read_tokens,
                    "reread": {item.reason: item.tokens for item in record.reread},
                    "why": record.why,
                    "queued_s": _short(record.queued_s),
                    "restore_s": _short(record.restore_s),
                    "read_s": _short(record.read_s),
                    "generate_s": _short(record.generate_s),
                },
            },
            separators=(",", ":"),
        )


class TraceRecorder:
    """Appends to a trace file until :meth:`close`. What cannot be written is counted and logged; no request waits for
    it or fails because of it. After a failed write, which may have left half a line, nothing more is written.

    :ivar dropped: requests that are not in the trace, because writing was too slow or failed.
    :raises SettingsError: the file cannot be opened for appending.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]):
        self._path = path
        self._writer = TraceWriter({"start": time.time(), **header})
        self.dropped = 0
        self._queue: queue.Queue[TracedRequest | None] = queue.Queue(CAPACITY)
        try:
            # Unbuffered: a line is in the file when it was written, and closing has nothing left that could fail.
            self._file = path.open("ab", buffering=0)
            self._whole = self._ends_a_line()
        except OSError as error:
            raise SettingsError(f"record_trace {path}: {error.strerror or error}", param="record_trace") from error
        self._thread = threading.Thread(target=self._run, name="strata-trace", daemon=True)
        self._thread.start()

    def take(self, request: TracedRequest) -> None:
        """Queue a request and return at once. Engine thread."""
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            self._drop("it is written too slowly")

    def close(self) -> None:
        """Write what waits, then close the file."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        # What an earlier run left half written is ended, so that this one begins on a line of its own.
        failure = self._write(("" if self._whole else "\n") + self._writer.header())
        while (request := self._queue.get()) is not None:
            failure = failure or self._write(self._writer.line(request))
            if failure:
                self._drop(failure)

    def _write(self, line: str) -> str:
        """Write a line. What went wrong, empty if nothing did."""
        rest = memoryview(line.encode("ascii") + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _ends_a_line(self) -> bool:
        size = self._path.stat().st_size
        if not size or not self._path.is_file():
            return True
        with self._path.open("rb") as file:
            file.seek(size - 1)
            return file.read(1) == b"\n"

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.warning("trace %s: requests are missing from it: %s", self._path, why)


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
