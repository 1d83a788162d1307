"""Names that clients give to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.errors import InvalidRequest
from strata_core.store.filenames import MAX_BYTES, refusal, resolve

REFUSED = [
    "", ".", "..", "../x", "..\\x", "a/b", "/etc/passwd", "\\\\host\\share", "C:x", "C:\\x", "x:stream", ".hidden",
    "x.", "x ", " x", "x\u00a0", "a\0b", "a\nb", "a\x7fb", "a\u202eb", "a\ud800b", "a\u2028b", "a*b", "a?b", 'a"b',
    "a<b", "a|b", "NUL", "nul", "Nul.sess", "nul .txt", "CON", "con.a.b", "AUX", "PRN", "COM1", "com9.sess", "LPT1",
    "COM\u00b9", "CONIN$", "x" * 300, "\u00e9" * 101,
]  # fmt: skip
ALLOWED = [
    "a", "a.sess", "agent 1 (second).sess", "nullable", "COM10", "conx", "Ünïcode-会話.bin", "x" * MAX_BYTES, "a..b",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_mean_something_else_somewhere_are_refused(name: str, tmp_path: Path) -> None:
    assert refusal(name)
    with pytest.raises(InvalidRequest, match=r"^filename: a file name must") as caught:
        resolve(tmp_path, name, "filename")
    assert caught.value.param == "filename"


@pytest.mark.parametrize("name", ALLOWED)
def test_ordinary_names_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    assert refusal(name) is None
    assert resolve(tmp_path, name, "filename").parent == tmp_path


def test_a_name_that_another_system_takes_for_an_existing_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Café.sess").touch()
    assert resolve(tmp_path, "Café.sess", "filename").exists()
    for twin in ("CAFÉ.SESS", "café.sess", "Cafe\u0301.sess"):
        with pytest.raises(InvalidRequest, match="same file on some systems"):
            resolve(tmp_path, twin, "filename")


def test_links_and_folders_are_refused_wherever_they_lead(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    folder = tmp_path / "sessions"
    (folder / "sub").mkdir(parents=True)
    (folder / "out").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    for name, kind in (("out", "symbolic link"), ("dangling", "symbolic link"), ("sub", "no regular file")):
        with pytest.raises(InvalidRequest, match=kind):
            resolve(folder, name, "filename")


def test_a_folder_that_is_not_there_yet_has_no_twins(tmp_path: Path) -> None:
    assert resolve(tmp_path / "new", "a.sess", "filename") == tmp_path / "new" / "a.sess"
