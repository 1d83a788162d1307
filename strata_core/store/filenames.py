"""Names of files that clients choose: which are allowed, and what is opened under them.

A name is taken as it is or refused, never repaired. What is allowed is allowed on every system, so that a folder can be
moved from one to another; nothing outside the folder can be named.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path

from strata_core.errors import InvalidRequest, StorageError

#: Longest name in bytes of UTF-8; the least bound of common file systems is 255.
MAX_BYTES = 200

_SEPARATORS = frozenset('/\\:<>"|?*')
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", "clock$", "conin$", "conout$"]
    + [kind + digit for kind in ("com", "lpt") for digit in "0123456789¹²³"]
)
#: Control, format and surrogate characters, line and paragraph separators, unassigned code points.
_UNPRINTABLE = frozenset(["Cc", "Cf", "Cs", "Cn", "Zl", "Zp"])


def refusal(name: str) -> str | None:
    """Why a name is not allowed, in words that follow "a file name"; None for one that is. Pure."""
    if not name:
        return "must not be empty"
    bad = sorted(_SEPARATORS.intersection(name))
    if bad:
        return f"must not contain {bad[0]!r}"
    if any(unicodedata.category(letter) in _UNPRINTABLE for letter in name):
        return "must not contain control characters"
    if len(name.encode()) > MAX_BYTES:
        return f"must not have more than {MAX_BYTES} bytes"
    if name[0] == "." or name[0].isspace():
        return "must not begin with a dot or a space"
    if name[-1] == "." or name[-1].isspace():
        return "must not end with a dot or a space"
    if name.split(".")[0].rstrip().casefold() in _DEVICES:
        return "must not be that of a device"  # Windows opens the device whatever follows the dot
    return None


def private_folder(path: Path) -> None:
    """Make a folder that only its owner may read, with its parents, where it is missing.

    :raises StorageError: it cannot be made, or is a symbolic link or no folder.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"folder {path} cannot be used: {error.strerror or error}") from error
    if path.is_symlink():
        raise StorageError(f"folder {path} is a symbolic link")


def resolve(folder: Path, name: str, param: str) -> Path:
    """The path of ``name`` in ``folder``, which need not exist.

    :param param: the request field that the name comes from.
    :raises InvalidRequest: the name is not allowed, is that of a link or of anything but a regular file, or differs
        from an existing one only in case or in how its characters are composed.
    """
    why = refusal(name)
    if why is not None:
        raise InvalidRequest(f"{param}: a file name {why}", param=param)
    path = folder / name
    twin = _twin(folder, name)
    if twin is not None:
        raise InvalidRequest(
            f"{param}: {name!r} and the existing {twin!r} would be the same file on some systems", param=param
        )
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return path
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
        raise InvalidRequest(f"{param}: {name!r} is {kind}", param=param)
    return path


def _twin(folder: Path, name: str) -> str | None:
    """Another name in the folder that a file system may take for this one."""
    wanted = _folded(name)
    try:
        with os.scandir(folder) as entries:
            return next((e.name for e in entries if e.name != name and _folded(e.name) == wanted), None)
    except FileNotFoundError:
        return None


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
