"""Session files: what is written comes back, and nothing else does."""

from __future__ import annotations

import json
import os
import random
import stat
import struct
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from strata_core.conversations.identity import Identity
from strata_core.errors import (
    IdentityMismatch,
    InsufficientStorage,
    NotFound,
    SessionFileError,
    StorageError,
    StrataError,
)
from strata_core.store import session as module
from strata_core.store.session import Session, SessionFile, check_identity, rounded, write

IDENTITY = Identity.of({"weights": "w", "kv": "f16"})


def a_session(tokens: int = 11, page_bytes: tuple[int, ...] = (192, 64), **fields) -> Session:
    made = Session(
        conversation="c0ffee", tenant="", identity=IDENTITY.digest, parts=IDENTITY.parts,
        tokens=np.arange(100, 100 + tokens, dtype=np.int32), turns=(0, 5), created=1000.25, used=2000.5, reason="save",
        pinned=True, page_tokens=4, page_bytes=page_bytes,
    )  # fmt: skip
    return attrs.evolve(made, **fields)


def pages_of(session: Session) -> list[list[np.ndarray]]:
    numbers = np.random.default_rng(len(session.tokens))
    return [[numbers.integers(0, 256, n, dtype=np.uint8) for n in session.page_bytes] for _ in range(session.blocks)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.sess"


@pytest.fixture
def written(path: Path) -> Path:
    session = a_session()
    write(path, session, pages_of(session))
    return path


def read_all(path: Path) -> tuple[Session, list[list[np.ndarray]]]:
    with SessionFile.open(path) as file:
        blocks = []
        for number in range(file.session.blocks):
            buffers = [np.empty(n, np.uint8) for n in file.session.page_bytes]
            file.read_block(number, buffers)
            blocks.append(buffers)
        return file.session, blocks


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 40), page_bytes=st.lists(st.integers(1, 9000), min_size=1, max_size=3), text=st.text())
def test_what_is_written_comes_back(tmp_path_factory, tokens, page_bytes, text) -> None:
    path = tmp_path_factory.mktemp("session") / "one.sess"
    session = a_session(tokens, tuple(page_bytes), reason=text, turns=())
    assert write(path, session, pages_of(session)) == path.stat().st_size == session.size
    found, blocks = read_all(path)
    assert np.array_equal(found.tokens, session.tokens)
    for field in attrs.fields(Session):
        if field.name != "tokens":
            assert getattr(found, field.name) == getattr(session, field.name), field.name
    for block, expected in zip(blocks, pages_of(session), strict=True):
        assert all(np.array_equal(page, wanted) for page, wanted in zip(block, expected, strict=True))


def test_the_bytes_are_those_of_the_document(written: Path) -> None:
    data = written.read_bytes()
    assert (data[:8], struct.unpack_from("<II", data, 8)) == (b"STRATSES", (1, 0))
    size, start, text, count, page_tokens, pools, blocks, zero = struct.unpack_from("<QQIIIIII", data, 48)
    assert (size, count, page_tokens, pools, blocks, zero) == (len(data), 11, 4, 2, 3, 0)
    assert start % 4096 == 0 and struct.unpack_from("<2Q", data, 88) == (192, 64)
    assert data[16:32] == xxh3_128_digest(data[:16] + data[32:start])
    about = json.loads(data[104 : 104 + text])
    assert about["conversation"] == "c0ffee" and about["turns"] == [0, 5] and about["parts"]["kv"] == "f16"
    assert np.frombuffer(data, "<i4", 11, 104 + text).tolist() == list(range(100, 111))
    digests = 104 + text + 44
    pages = pages_of(a_session())
    for number in range(3):
        block = data[start + 4096 * number : start + 4096 * (number + 1)]
        assert block == b"".join(page.tobytes() for page in pages[number]).ljust(4096, b"\0")
        assert data[digests + 16 * number : digests + 16 * number + 16] == xxh3_128_digest(block)
    assert not any(data[digests + 48 : start])


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def refused(path: Path) -> bool:
    """Whether reading all of a file is refused, and as damage."""
    try:
        read_all(path)
    except SessionFileError:
        return True
    return False


def test_every_flipped_byte_is_detected(written: Path) -> None:
    data = bytearray(written.read_bytes())
    with written.open("r+b", buffering=0) as file:
        for at in range(len(data)):
            file.seek(at)
            file.write(bytes([data[at] ^ (1 << at % 8)]))
            assert refused(written), f"byte {at}"
            file.seek(at)
            file.write(data[at : at + 1])
    assert not refused(written)


def test_a_file_of_any_other_length_is_refused(written: Path) -> None:
    data = written.read_bytes()
    for length in (0, 1, 87, 88, 104, 4095, 4096, len(data) - 4096, len(data) - 1):
        written.write_bytes(data[:length])
        assert refused(written), length
    written.write_bytes(data + b"\0")
    assert refused(written)


def test_no_header_with_a_right_checksum_makes_the_reader_fail_otherwise(written: Path) -> None:
    """Headers that somebody made on purpose: counts at their limits, JSON of every kind."""
    original = written.read_bytes()
    numbers = random.Random(3)
    extremes = (0, 1, 2, 255, 1 << 12, (1 << 31) - 1, (1 << 32) - 1)
    [start] = struct.unpack_from("<Q", original, 56)
    for _ in range(400):
        data = bytearray(original)
        for _ in range(numbers.randint(1, 3)):
            kind = numbers.randrange(3)
            if kind == 0:
                struct.pack_into("<I", data, numbers.randrange(48, 104, 4), numbers.choice(extremes))
            elif kind == 1:
                data[numbers.randrange(104, start)] = numbers.randrange(256)
            else:
                struct.pack_into("<Q", data, numbers.choice((48, 56, 88, 96)), numbers.choice(extremes) << 31)
        data[16:32] = xxh3_128_digest(bytes(data[:16] + data[32:start]))
        written.write_bytes(data)
        try:
            read_all(written)
        except SessionFileError as error:
            assert "one.sess" in error.message


def test_a_later_version_is_named(written: Path) -> None:
    data = bytearray(written.read_bytes())
    data[8] = 7
    written.write_bytes(data)
    with pytest.raises(SessionFileError, match="version 7"):
        SessionFile.open(written)


def test_another_identity_is_refused_with_what_differs(written: Path) -> None:
    with SessionFile.open(written) as file:
        check_identity(file.session, IDENTITY, "")
        other = Identity.of({"weights": "w", "kv": "int8"})
        with pytest.raises(IdentityMismatch, match=r": kv differ"):
            check_identity(file.session, other, "")
        with pytest.raises(IdentityMismatch, match="API key"):
            check_identity(file.session, IDENTITY, "somebody else")


def test_links_fifos_folders_and_missing_files_are_not_opened(written: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(written)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("link", "fifo", "folder"):
        with pytest.raises(StorageError, match=name):
            SessionFile.open(tmp_path / name)
    with pytest.raises(NotFound):
        SessionFile.open(tmp_path / "missing")


def test_a_file_is_private_and_replaces_the_former_one_only_when_it_is_complete(written: Path) -> None:
    before = written.read_bytes()
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    longer = a_session(40)

    def failing():
        yield pages_of(longer)[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(InsufficientStorage, match="No space"):
        write(written, longer, failing())
    assert written.read_bytes() == before and names(written.parent) == ["one.sess"]
    write(written, longer, pages_of(longer))
    assert len(read_all(written)[0].tokens) == 40 and names(written.parent) == ["one.sess"]


def test_data_is_synced_before_the_name_and_the_folder_after_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    real_sync, real_fsync, real_replace = os.fdatasync, os.fsync, Path.replace
    monkeypatch.setattr(os, "fdatasync", lambda fd: (steps.append("data"), real_sync(fd))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append("folder"), real_fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (steps.append("name"), real_replace(self, to))[1])
    session = a_session()
    write(path, session, pages_of(session))
    assert steps == ["data", "name", "folder"]
    steps.clear()
    write(path, session, pages_of(session), durable=False)
    assert steps == ["name"]


def test_the_wrong_number_of_blocks_is_a_fault_of_the_caller(path: Path) -> None:
    session = a_session()
    with pytest.raises(ValueError, match="2 blocks were given for 3") as caught:
        write(path, session, pages_of(session)[:2])
    assert not isinstance(caught.value, StrataError) and names(path.parent) == []


def test_blocks_begin_where_pages_of_memory_do() -> None:
    session = a_session(40, (5000, 3))
    assert session.data % module.GRAIN == 0 and session.stride == rounded(5003) == 8192
