"""What the commands of ``strata cache`` share: which folders, which conversations, errors, progress."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click

from strata_core.cli.app import application
from strata_core.conversations.identity import Identity
from strata_core.errors import DamagedEntry, LevelError, NotFound, StorageError, StrataError
from strata_tiers.check import entries
from strata_tiers.directory import FolderInUse
from strata_tiers.factory import archive_folder, cold_folder
from strata_tiers.manifest import Manifest
from strata_tiers.newfile import Progress, no_progress
from strata_tiers.settings import DiskSettings

_ARCHIVE = "strata_tiers.archive"


class CacheFailure(StrataError):
    """A folder or file cannot be read or written."""

    exit_code = 9


@attrs.frozen(eq=False)
class Stored:
    """An entry and the folder it is in."""

    folder: Path
    manifest: Manifest

    @property
    def id(self) -> str:
        return self.manifest.entry.id

    @property
    def nbytes(self) -> int:
        """Of its files, shared ones in full."""
        return self.manifest.size + sum(piece.size for piece in self.manifest.pieces)

    @property
    def state_nbytes(self) -> int:
        """Of the files of its states."""
        return sum(piece.size for piece in self.manifest.pieces if piece.state)

    @property
    def base(self) -> str:
        """The identity without the tenant, in hexadecimal: what `--keep` takes."""
        return Identity.of(self.manifest.parts).digest.hex()


def folders_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--dir``, and the conversion of errors to exit codes."""
    option = click.option(
        "--dir", "folders", metavar="DIR", multiple=True, type=click.Path(path_type=Path),
        help="Folder of a level; without it, the configured ones. May be repeated.",
    )  # fmt: skip

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (FolderInUse, DamagedEntry):
            raise
        except (LevelError, StorageError) as error:
            raise CacheFailure(error.message) from error

    return option(run)


def _choose_archive(ctx: click.Context, parameter: click.Parameter, chosen: bool) -> None:
    ctx.meta[_ARCHIVE] = chosen


#: ``--archive``, which :func:`chosen_folders` follows.
archive_option = click.option(
    "--archive", is_flag=True, expose_value=False, callback=_choose_archive,
    help="Work on the archive: copies that newer ones replaced.",
)  # fmt: skip


def chosen_folders(ctx: click.Context, given: Sequence[Path]) -> list[Path]:
    """The folders to work on: those given, or of the configured ones those that are there; or the archive.

    :raises NotFound: one that was given, or the archive, is not there.
    :raises UsageError: folders and the archive were given.
    """
    if ctx.meta.get(_ARCHIVE):
        if given:
            raise click.UsageError("--archive is a folder of its own; give it or --dir")
        given = [archive_folder(application(ctx).settings({}).plugin(DiskSettings))]
    missing = [folder for folder in given if not folder.is_dir()]
    if missing:
        raise NotFound(f"there is no folder {missing[0]}", param="dir")
    return list(given) or [folder for folder in configured_folders(ctx) if folder.is_dir()]


def configured_folders(ctx: click.Context) -> list[Path]:
    """The folders of the settings for system prompts, warm and cold level, whether they are there or not."""
    core = application(ctx).settings({})
    settings = core.plugin(DiskSettings)
    upper = [core.system_prompt_cache_dir, settings.conversation_cache_warm_dir]
    return [*(folder for folder in upper if folder is not None), cold_folder(settings)]


def stored_in(folders: Sequence[Path]) -> list[Stored]:
    """Everything that is sound in the folders, the latest used first within each."""
    return [Stored(folder, found) for folder in folders for found in entries(folder)]


def pick(stored: Sequence[Stored], wanted: str) -> list[Stored]:
    """The entries that a name means: the beginning of an entry's id, or of a conversation's, whose entries it are then.

    :raises NotFound: nothing is called so. :raises UsageError: several are.
    """
    named: dict[str, list[Stored]] = {}
    for one in stored:
        for name in {one.id, one.manifest.entry.conversation}:
            if wanted and name.startswith(wanted):
                named.setdefault(name, []).append(one)
    if wanted in named:
        return named[wanted]
    groups = {frozenset(one.id for one in group): group for group in named.values()}
    if not groups:
        raise NotFound(f"no conversation is called {wanted!r}", param="id")
    if len(groups) > 1:
        raise click.UsageError(f"{wanted!r} is the beginning of several names; give more of it")
    return next(iter(groups.values()))


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A bar on standard error while something long runs, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        yield no_progress
        return
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total or None)


def mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
