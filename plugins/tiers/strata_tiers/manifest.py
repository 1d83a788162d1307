"""The manifest of an entry, see ``docs/format.md``."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from strata_core.conversations.identity import DIGEST_BYTES
from strata_core.store.base import Entry
from strata_tiers.layout import VERSION, BadFile, Piece, UnknownVersion, checksum, valid_id

MAGIC = b"STRATCNV"
_START = struct.Struct("<8sII")
_REST = struct.Struct("<16sQIIIIQ")
_HEAD = _START.size + DIGEST_BYTES + _REST.size
_JSON_GRAIN = 64
#: The JSON's members and their types.
_MEMBERS: dict[str, type] = {
    "id": str, "conversation": str, "tenant": str, "parts": dict, "created": float, "used": float, "reason": str,
    "pinned": bool, "root": bool, "turns": list, "segments": list,
}  # fmt: skip
_TYPES = tuple(_MEMBERS.values())
#: No float is longer than this when written with repr, nor a boolean.
_LONGEST_FLOAT, _LONGEST_BOOL = 24, 5


@attrs.frozen(eq=False)
class Manifest:
    """:ivar parts: of the identity, without the tenant.
    :ivar pieces: the segments, from position 0 on, then the states; none for an archived copy of which only the ids
        are kept.
    """

    entry: Entry
    parts: Mapping[str, str]
    pieces: tuple[Piece, ...]
    page_tokens: int
    size: int


def size(entry: Entry, parts: Mapping[str, str], pieces: Sequence[Piece]) -> int:
    """Bytes of the manifest; the same whatever ``used`` and ``pinned`` are."""
    return _HEAD + len(_json(entry, parts, pieces)) + 4 * len(entry.tokens) + DIGEST_BYTES * len(entry.addresses)


def encode(entry: Entry, parts: Mapping[str, str], pieces: Sequence[Piece], page_tokens: int) -> bytes:
    """The whole file."""
    text = _json(entry, parts, pieces)
    body = text + np.ascontiguousarray(entry.tokens, "<i4").tobytes() + b"".join(entry.addresses)
    start = _START.pack(MAGIC, VERSION, 0)
    counts = (len(text), len(entry.tokens), len(entry.addresses), page_tokens, 0)
    rest = _REST.pack(entry.identity, _HEAD + len(body), *counts) + body
    return start + checksum(start, rest) + rest


def parse(data: bytes, name_id: str | None) -> Manifest:
    """The manifest in a file's bytes.

    :param name_id: the id in the file's name, None where it has none.
    :raises BadFile: it is no manifest, of an unknown version, or damaged.
    """
    if len(data) < _HEAD or data[:8] != MAGIC:
        raise BadFile("not a manifest")
    _, version, flags = _START.unpack_from(data)
    if version != VERSION:
        raise UnknownVersion(f"manifest version {version}")
    view = memoryview(data)
    if checksum(view[: _START.size], view[_START.size + DIGEST_BYTES :]) != data[_START.size : 32]:
        raise BadFile("the manifest's checksum does not fit")
    identity, length, text_bytes, count, complete, page_tokens, zero = _REST.unpack_from(data, 32)
    end = _HEAD + text_bytes + 4 * count + DIGEST_BYTES * complete
    if flags or zero or length != len(data) or end != length:
        raise BadFile("the manifest's counts do not fit its size")
    if not count or not page_tokens or complete != count // page_tokens:
        raise BadFile("the manifest's counts do not fit each other")
    tokens = np.frombuffer(data, "<i4", count, _HEAD + text_bytes).astype(np.int32, copy=False)
    addresses_at = _HEAD + text_bytes + 4 * count
    addresses = tuple(data[at : at + DIGEST_BYTES] for at in range(addresses_at, length, DIGEST_BYTES))
    about = _object(data[_HEAD : _HEAD + text_bytes])
    entry = _entry(about, identity, tokens, addresses)
    if name_id is not None and entry.id != name_id:
        raise BadFile(f"the file's name is not that of entry {entry.id!r}")
    parts = about["parts"]
    if any(type(value) is not str for value in parts.values()):
        raise BadFile("the identity's parts are not all text")
    pieces = _pieces(about, entry, page_tokens)
    if "states" in about:
        states = _states(about["states"], entry, page_tokens)
        entry = attrs.evolve(entry, states=tuple(piece.stop for piece in states))
        pieces += states if pieces else ()
    return Manifest(entry, parts, pieces, page_tokens, length)


def _json(entry: Entry, parts: Mapping[str, str], pieces: Sequence[Piece]) -> bytes:
    about: dict[str, Any] = {
        "id": entry.id,
        "conversation": entry.conversation,
        "tenant": entry.tenant,
        "parts": dict(parts),
        "created": float(entry.created),
        "used": float(entry.used),
        "reason": entry.reason,
        "pinned": bool(entry.pinned),
        "root": bool(entry.root),
        "turns": sorted({int(turn) for turn in entry.turns if 0 <= turn < len(entry.tokens)}),
        "segments": [[p.address.hex(), p.start, p.count, p.size] for p in pieces if not p.state],
    }
    if entry.key:
        about["key"] = entry.key
    if entry.states is not None:
        about["states"] = [[p.address.hex(), p.stop, p.size] for p in pieces if p.state]
    text = json.dumps(about, allow_nan=False, separators=(",", ":")).encode("ascii")
    # Room for any time of use and either pin, so that a change of these does not change the size.
    room = _LONGEST_FLOAT - len(repr(about["used"])) + _LONGEST_BOOL - len(json.dumps(about["pinned"]))
    return text.ljust(-(-(len(text) + room) // _JSON_GRAIN) * _JSON_GRAIN)


def _object(text: bytes) -> dict[str, Any]:
    try:
        about = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise BadFile(f"the manifest's JSON cannot be read: {error}") from None
    if not isinstance(about, dict):
        raise BadFile("the manifest's JSON is no object")
    if tuple(map(type, map(about.get, _MEMBERS))) != _TYPES:
        name, kind = next((n, kind) for n, kind in _MEMBERS.items() if type(about.get(n)) is not kind)
        raise BadFile(f"the manifest's {name!r} is {about.get(name)!r}, not of type {kind.__name__}")
    return about


def _entry(about: Mapping[str, Any], identity: bytes, tokens: np.ndarray, addresses: tuple[bytes, ...]) -> Entry:
    entry = Entry(
        id=about["id"],
        conversation=about["conversation"],
        identity=identity,
        tokens=tokens,
        addresses=addresses,
        created=about["created"],
        used=about["used"],
        reason=about["reason"],
        tenant=about["tenant"],
        pinned=about["pinned"],
        turns=tuple(about["turns"]),
        root=about["root"],
        key=about.get("key", ""),
    )
    if type(entry.key) is not str:
        raise BadFile("the manifest's 'key' is no text")
    if not (math.isfinite(entry.created) and math.isfinite(entry.used)):
        raise BadFile("a time in the manifest is no number")
    if not valid_id(entry.id):
        raise BadFile(f"{entry.id!r} is no id")
    previous = -1
    for turn in entry.turns:
        if type(turn) is not int or not previous < turn < len(tokens):
            raise BadFile("the manifest's turns are not ascending positions")
        previous = turn
    return entry


def _pieces(about: Mapping[str, Any], entry: Entry, page_tokens: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    at, parent = 0, entry.identity
    for item in about["segments"]:
        try:
            text, start, count, nbytes = item
        except (TypeError, ValueError):
            raise BadFile("a segment in the manifest is not address, start, count and size") from None
        if type(text) is not str or type(start) is not int or type(count) is not int or type(nbytes) is not int:
            raise BadFile("a segment in the manifest is not address, start, count and size")
        if start != at or at % page_tokens or not 0 < count <= len(entry.tokens) - at or nbytes <= 0:
            raise BadFile("the manifest's segments do not follow each other")
        try:
            address = bytes.fromhex(text)
        except ValueError:
            raise BadFile("an address in the manifest is no hexadecimal number") from None
        at += count
        whole = at % page_tokens == 0
        if len(address) != DIGEST_BYTES or (whole and address != entry.addresses[at // page_tokens - 1]):
            raise BadFile("a segment's address is not that of its last page")
        pieces.append(Piece(parent, address, start, count, nbytes, "" if whole else entry.id))
        parent = address
    if pieces and at != len(entry.tokens):
        raise BadFile("the manifest's segments do not hold all its tokens")
    return tuple(pieces)


def _states(listed: Any, entry: Entry, page_tokens: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    previous = 0
    for item in listed if type(listed) is list else [None]:
        if type(item) is not list or [type(value) for value in item] != [str, int, int]:
            raise BadFile("a state in the manifest is not address, position and size")
        text, position, nbytes = item
        if not previous < position <= len(entry.tokens) or nbytes <= 0:
            raise BadFile("the manifest's states are not at ascending positions")
        try:
            address = bytes.fromhex(text)
        except ValueError:
            raise BadFile("an address in the manifest is no hexadecimal number") from None
        whole = position % page_tokens == 0
        if len(address) != DIGEST_BYTES or (whole and address != entry.addresses[position // page_tokens - 1]):
            raise BadFile("a state's address is not that of what it is the state of")
        pieces.append(Piece(address, address, position - 1, 1, nbytes, "" if whole else entry.id, state=True))
        previous = position
    return tuple(pieces)
