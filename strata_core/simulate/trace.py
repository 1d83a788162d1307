"""Reading a trace: the file of ``--record-trace``, described in ``docs/simulate.md``.

The token ids that a replay works with are made up so that any two sequences agree exactly as far as their names and
prints do. They are ids of no model.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from strata_core.conversations.tokens import common_prefix
from strata_core.engine.fingerprints import NAME_BYTES
from strata_core.engine.trace import VERSION
from strata_core.errors import StrataError

#: Stands for every token that opens a turn.
OPENER = 1 << 30


class TraceError(StrataError, ValueError):
    """A trace cannot be read; the message names the line."""

    code = "invalid_trace"


@attrs.frozen(eq=False)
class Item:
    """One request of a trace. Times in seconds since the trace began.

    :ivar arrived: when it was submitted; :ivar ended: when it ended, as recorded.
    :ivar prompt: tokens of its prompt; :ivar generated: tokens generated; :ivar computed: tokens left in the slot.
    :ivar page: name of its last complete page, empty where there is none; :ivar tail: int32 ids after that.
    :ivar follows: id of the request whose reply its prompt goes on from, which it therefore cannot precede.
    :ivar really: what happened when it was recorded; empty for a generated trace.
    """

    id: str
    arrived: float
    ended: float
    tenant: str
    status: str
    prompt: int
    generated: int
    computed: int
    cache: bool
    pin: bool
    after: str | None
    page: bytes = attrs.field(repr=False)
    tail: np.ndarray = attrs.field(repr=False)
    really: Mapping[str, Any] = attrs.field(repr=False)
    follows: str | None = None

    @property
    def complete(self) -> bool:
        """Whether it ended with a whole reply."""
        return self.status in ("stop", "length")


@attrs.define
class Trace:
    """One run of a trace file.

    :ivar header: its first line; :ivar items: requests in order of arrival.
    """

    header: Mapping[str, Any]
    items: list[Item]
    _pages: dict[bytes, tuple[bytes, np.ndarray]] = attrs.field(factory=dict, repr=False)

    def tokens(self, item: Item) -> np.ndarray:
        """Ids of a request's prompt and of what was computed after it, int32."""
        parts = [item.tail]
        page = item.page
        while page:
            page, ids = self._pages[page]
            parts.append(ids)
        return np.concatenate(parts[::-1])

    def rate(self, tokens: str, seconds: str) -> float | None:
        """Tokens per second as recorded, of ``read`` or ``generated``; None where nothing was."""
        done = [(item, item.really) for item in self.items if item.really and item.really[seconds]]
        if tokens == "read":
            n = sum(really["read"] for _, really in done)
            spent = sum(really[seconds] - (really["restore_s"] or 0.0) for _, really in done)
        else:
            n = sum(item.generated - 1 for item, _ in done)
            spent = sum(really[seconds] for _, really in done)
        return n / spent if n > 0 and spent > 0 else None


def read_trace(lines: Iterable[str], run: int | None = None) -> Trace:
    """The last run in a trace file, or run number ``run``, counted from 1.

    A last line of a run that was cut off (the recording process died, the disk was full) is left out.

    :raises TraceError: a line is no part of a trace, or there is no such run.
    """
    runs: list[list[tuple[int, dict[str, Any]]]] = []
    broken = 0
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and "strata_trace" in line:
            if line["strata_trace"] != VERSION:
                raise TraceError(f"line {number}: trace version {line['strata_trace']!r} is not known, {VERSION} is")
            runs.append([])
            broken = 0
        elif not runs:
            raise TraceError(f"line {number}: a trace begins with a line that has 'strata_trace'")
        elif broken:
            raise TraceError(f"line {broken} is not JSON")
        if line is None:
            broken = number
        else:
            runs[-1].append((number, line))
    if not runs or not 1 <= (run or 1) <= len(runs):
        raise TraceError(f"there is no run {run or 1}: the trace has {len(runs)}")
    (_, header), *rest = runs[(run or len(runs)) - 1]
    builder = _Builder(int(header["page_tokens"]))
    for number, line in rest:
        try:
            builder.add(line)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"line {number} is not a request of a trace: {error!r}") from None
    return builder.trace(header)


class _Builder:
    def __init__(self, page_tokens: int):
        self._size = page_tokens
        self._pages: dict[bytes, tuple[bytes, np.ndarray]] = {}
        self._items: list[Item] = []

    def add(self, line: Mapping[str, Any]) -> None:
        really = line["really"] or {}
        times = [really.get(key) or 0.0 for key in ("queued_s", "read_s", "generate_s")]
        page, tail = self._sequence(line)
        self._items.append(
            Item(
                id=str(line["id"]),
                arrived=float(line["t"]),
                ended=float(line["t"]) + sum(times),
                tenant=str(line["tenant"]),
                status=str(line["status"]),
                prompt=int(line["prompt"]),
                generated=int(line["generated"]),
                computed=int(line["computed"]),
                cache=bool(line["cache"]),
                pin=bool(line["pin"]),
                after=line["after"],
                page=page,
                tail=tail,
                really=really,
            )
        )

    def _sequence(self, line: Mapping[str, Any]) -> tuple[bytes, np.ndarray]:
        size = self._size
        names, parent, prints = (base64.b64decode(line[key], validate=True) for key in ("names", "parent", "prints"))
        if len(names) != len(prints) // size * NAME_BYTES or len(prints) + line["known"] < line["computed"]:
            raise ValueError("its names and prints are not as many as its tokens")
        if parent and parent not in self._pages:
            raise ValueError("its parent page was not written before")
        ids = np.frombuffer(prints, np.uint8).astype(np.int32)
        turns = np.array(line["turns"], np.intp) - line["known"]
        page, start = parent, 0
        for start in range(0, len(ids) - size + 1, size):
            ids[start : start + size] |= _salt(page)
            ids[turns[(turns >= start) & (turns < start + size)]] = OPENER
            name = names[start // size * NAME_BYTES :][:NAME_BYTES]
            self._pages.setdefault(name, (page, ids[start : start + size]))
            page = name
        rest = len(names) // NAME_BYTES * size
        ids[rest:] |= _salt(page)
        ids[turns[turns >= rest]] = OPENER
        return page, ids[rest:]

    def trace(self, header: Mapping[str, Any]) -> Trace:
        items = sorted(self._items, key=lambda item: item.arrived)
        trace = Trace(header, items, self._pages)
        trace.items = _with_order(trace)
        return trace


def _salt(page: bytes) -> int:
    """Upper bits of the ids that follow a page: where prints agree by chance at its end, the next ids do not."""
    return int.from_bytes(page[:4], "little") >> 10 << 8


def _with_order(trace: Trace) -> list[Item]:
    """The requests, with ``follows`` set: the latest that had ended before and whose prompt is wholly in this one's."""
    ended: dict[bytes, list[Item]] = {}  # by the last complete page
    found = []
    for item in trace.items:
        mine = trace.tokens(item)[: item.prompt]
        earlier: list[Item] = []
        for page in trace_pages(trace, item):
            earlier = [
                other
                for other in ended.get(page, ())
                if other.ended <= item.arrived and common_prefix(trace.tokens(other), mine) >= other.prompt
            ]
            if earlier:
                break
        follows = max(earlier, key=lambda other: other.ended).id if earlier else None
        found.append(attrs.evolve(item, follows=follows))
        if item.complete and item.page:
            ended.setdefault(item.page, []).append(item)
    return found


def trace_pages(trace: Trace, item: Item) -> Iterable[bytes]:
    """Names of a request's complete pages, the last first."""
    page = item.page
    while page:
        yield page
        page = trace._pages[page][0]
