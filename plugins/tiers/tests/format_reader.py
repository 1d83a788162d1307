"""Reads what lies on disk, written from docs/format.md alone: no code of the levels is used."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import xxhash
from blake3 import blake3


def check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def checksum(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data[:16] + data[32:])


def chain(parent: bytes, ids: tuple[int, ...], page_tokens: int) -> list[bytes]:
    """Addresses of all pages of a run of ids, the last one complete or not."""
    found = []
    for start in range(0, len(ids), page_tokens):
        page = ids[start : start + page_tokens]
        parent = blake3(parent + struct.pack(f"<{len(page)}i", *page)).digest(length=16)
        found.append(parent)
    return found


def read_segment(data: bytes) -> dict:
    """A segment file: its fields, its ids, and its blocks, each a list of pages."""
    magic, version, flags = struct.unpack_from("<8sII", data, 0)
    check(magic == b"STRATSEG" and version == 1, "no segment of version 1")
    identity, parent, end, start, count, page_tokens, pools, blocks = struct.unpack_from("<16s16s16sQIIII", data, 32)
    ids_at, digests_at, data_at, size = struct.unpack_from("<QQQQ", data, 104)
    check(size == len(data), "size")
    check(data[16:32] == checksum(data[:data_at]), "checksum")
    check(flags == (1 if count % page_tokens else 0), "flags")
    check(data_at % 4096 == 0, "alignment")
    page_bytes = struct.unpack_from(f"<{pools}Q", data, 136)
    check(ids_at == 136 + 8 * pools and digests_at == ids_at + 4 * count, "offsets")
    check(blocks == -(-count // page_tokens), "blocks")
    ids = struct.unpack_from(f"<{count}i", data, ids_at)
    check(parent == end or chain(parent, ids, page_tokens)[-1] == end, "end address")  # equal in a state
    check(not any(data[digests_at + 16 * blocks * pools : data_at]), "zeros before the data")
    found, at, digest_at = [], data_at, digests_at
    for _ in range(blocks):
        pages = []
        for nbytes in page_bytes:
            page = data[at : at + nbytes]
            check(xxhash.xxh3_128_digest(page) == data[digest_at : digest_at + 16], "digest of a page")
            pages.append(page)
            at, digest_at = at + nbytes, digest_at + 16
        found.append(pages)
    check(at == size, "end of the data")
    return {"identity": identity, "parent": parent, "end": end, "start": start, "ids": ids, "blocks": found}


def read_manifest(data: bytes) -> dict:
    """A manifest: the JSON's members, and identity, ids, addresses, page_tokens."""
    magic, version, flags = struct.unpack_from("<8sII", data, 0)
    check(magic == b"STRATCNV" and version == 1 and flags == 0, "no manifest of version 1")
    identity, size, text, count, complete, page_tokens, zeros = struct.unpack_from("<16sQIIIIQ", data, 32)
    check(size == len(data) and zeros == 0, "size")
    check(data[16:32] == checksum(data), "checksum")
    check(text % 64 == 0 and complete == count // page_tokens, "counts")
    found = json.loads(data[80 : 80 + text])
    ids = struct.unpack_from(f"<{count}i", data, 80 + text)
    at = 80 + text + 4 * count
    addresses = [data[at + 16 * number : at + 16 * number + 16] for number in range(complete)]
    check(at + 16 * complete == size, "end")
    check(chain(identity, ids, page_tokens)[:complete] == addresses, "addresses")
    return found | {"identity": identity, "ids": ids, "addresses": addresses, "page_tokens": page_tokens}


def read_conversation(folder: Path, entry_id: str) -> tuple[dict, list[list[bytes]]]:
    """A whole entry: its manifest, and all its blocks from position 0 on."""
    manifest = read_manifest((folder / "conversations" / f"strata-conv-{entry_id}.meta").read_bytes())
    check(manifest["id"] == entry_id, "id")
    blocks: list[list[bytes]] = []
    at, parent = 0, manifest["identity"]
    for address, start, count, size in manifest["segments"]:
        partial = (start + count) % manifest["page_tokens"]
        name = f"strata-seg-{address}-{start}" + (f"-{entry_id}" if partial else "") + ".seg"
        data = (folder / "segments" / name).read_bytes()
        segment = read_segment(data)
        check(len(data) == size and start == at == segment["start"], "chain")
        check(segment["parent"] == parent and segment["end"].hex() == address, "addresses of the chain")
        check(segment["ids"] == manifest["ids"][start : start + count], "ids")
        blocks += segment["blocks"]
        at, parent = start + count, segment["end"]
    check(at == len(manifest["ids"]) or not manifest["segments"], "end of the chain")
    return manifest, blocks


def read_states(folder: Path, manifest: dict) -> dict[int, bytes]:
    """The states of an entry by their positions."""
    ids, page_tokens, found, before = manifest["ids"], manifest["page_tokens"], {}, 0
    for address, position, size in manifest["states"]:
        check(before < position <= len(ids), "ascending positions")
        ends = chain(manifest["identity"], ids[:position], page_tokens)[-1]
        check(ends.hex() == address, "address of what precedes a state")
        name = f"strata-state-{address}-{position - 1}"
        name += f"-{manifest['id']}.seg" if position % page_tokens else ".seg"
        data = (folder / "segments" / name).read_bytes()
        state = read_segment(data)
        check(len(data) == size and state["identity"] == manifest["identity"], "a state's file")
        check((state["start"], state["ids"]) == (position - 1, (ids[position - 1],)), "a state's position")
        check(state["end"] == state["parent"] == ends, "a state's addresses")
        [[found[position]]] = state["blocks"]
        before = position
    check(before == len(ids), "a state at the end")
    return found


def read_session(data: bytes) -> dict:
    """A session file, with its blocks as lists of pages, and its states by their positions."""
    magic, version, flags = struct.unpack_from("<8sII", data, 0)
    check(magic == b"STRATSES" and version in (1, 2) and flags == 0, "no session of version 1 or 2")
    size, start, text, count, page_tokens, pools, blocks, states = struct.unpack_from("<QQIIIIII", data, 48)
    check(size == len(data) and blocks == -(-count // page_tokens) and (states > 0) == (version == 2), "counts")
    check(data[16:32] == checksum(data[:start]), "checksum")
    pages = struct.unpack_from(f"<{pools}Q", data, 88)
    ids_at = 88 + 8 * pools + text
    digests_at = ids_at + 4 * count
    check(start == _grain(digests_at + 16 * (blocks + states)), "where the data is")
    session = json.loads(data[88 + 8 * pools : ids_at])
    session |= {"identity": data[32:48], "ids": list(struct.unpack_from(f"<{count}i", data, ids_at)), "blocks": []}
    state_bytes, positions = session.get("state_bytes", 0), session.get("states", [])
    check(len(positions) == states and (not states or positions[-1] == count), "positions of states")
    sizes = [_grain(sum(pages))] * blocks + [_grain(state_bytes)] * states
    check(size == start + sum(sizes), "size")
    found, at = [], start
    for number, nbytes in enumerate(sizes):
        found.append(data[at : at + nbytes])
        digest = data[digests_at + 16 * number : digests_at + 16 * number + 16]
        check(xxhash.xxh3_128_digest(found[-1]) == digest, "digest of a block or state")
        at += nbytes
    ends = [sum(pages[:pool]) for pool in range(pools + 1)]
    for block in found[:blocks]:
        session["blocks"].append([block[a:b] for a, b in itertools.pairwise(ends)])
        check(not any(block[ends[-1] :]), "zeros behind the pages")
    check(not any(any(state[state_bytes:]) for state in found[blocks:]), "zeros behind a state")
    session["states"] = {p: state[:state_bytes] for p, state in zip(positions, found[blocks:], strict=True)}
    return session


def _grain(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
