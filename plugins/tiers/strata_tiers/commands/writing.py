"""Commands that change a folder, or write a file. The former take the folder's lock: no server may be using it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from strata_core.errors import NotFound
from strata_tiers.check import prune_foreign as prune_folder
from strata_tiers.check import remove_entry
from strata_tiers.commands.common import (
    Stored,
    archive_option,
    chosen_folders,
    configured_folders,
    folders_option,
    mib,
    pick,
    progress_bar,
    stored_in,
)
from strata_tiers.exchange import export_entry, import_entry

_yes = click.option("--yes", is_flag=True, help="Do not ask.")


@click.command()
@folders_option
@archive_option
@click.argument("names", metavar="ID...", nargs=-1, required=True)
@_yes
@click.pass_context
def rm(ctx: click.Context, folders: Sequence[Path], names: Sequence[str], yes: bool) -> None:
    """Delete entries, or all entries of conversations. Segments that others share stay."""
    stored = stored_in(chosen_folders(ctx, folders))
    going = {(one.folder, one.id): one for name in names for one in pick(stored, name)}
    _confirm(f"Delete {_counted(list(going.values()))}?", yes)
    freed = 0
    with progress_bar("deleting") as progress:
        for number, (folder, entry_id) in enumerate(going):
            freed += remove_entry(folder, entry_id)
            progress(number + 1, len(going))
    click.echo(f"deleted {len(going)} entries, {mib(freed)}")


@click.command()
@folders_option
@archive_option
@click.argument("name", metavar="ID")
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.pass_context
def export(ctx: click.Context, folders: Sequence[Path], name: str, target: Path, force: bool) -> None:
    """Write an entry, or the longest of a conversation, to a session file. Every page is verified."""
    found = max(pick(stored_in(chosen_folders(ctx, folders)), name), key=lambda one: len(one.manifest.entry.tokens))
    if not force and target.exists():
        raise click.UsageError(f"{target} exists; --force replaces it")
    with progress_bar("exporting") as progress:
        nbytes = export_entry(found.folder, found.id, target, progress=progress)
    click.echo(f"wrote {len(found.manifest.entry.tokens)} tokens, {mib(nbytes)}, to {target}")


@click.command("import")
@folders_option
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_context
def import_file(ctx: click.Context, folders: Sequence[Path], source: Path) -> None:
    """Put the conversation of a session file into a folder, the cold level's without --dir."""
    if len(folders) > 1:
        raise click.UsageError("a conversation is imported into one folder")
    folder = folders[0] if folders else configured_folders(ctx)[-1]
    with progress_bar("importing") as progress:
        entry_id = import_entry(folder, source, progress=progress)
    click.echo(f"imported {entry_id} into {folder}")


@click.command("prune-foreign")
@folders_option
@click.option("--keep", metavar="IDENTITY", multiple=True, help="Identity that stays, or its beginning; repeatable.")
@_yes
@click.pass_context
def prune_foreign(ctx: click.Context, folders: Sequence[Path], keep: Sequence[str], yes: bool) -> None:
    """Delete conversations of other models, K/V types and so on than those to keep.

    `strata cache ls` shows identities, `GET /props` that of a running server. All API keys' conversations of an
    identity stay.
    """
    places = chosen_folders(ctx, folders)
    stored = stored_in(places)
    known = {one: one.base for one in stored}
    if not keep:
        counts = Counter(known.values())
        listed = ", ".join(f"{base} ({count} entries)" for base, count in counts.most_common()) or "none"
        raise click.UsageError(f"say what stays with --keep IDENTITY; there are: {listed}")
    for wanted in keep:
        if len(wanted) < 8 or not any(base.startswith(wanted.lower()) for base in known.values()):
            raise NotFound(f"no conversation is of an identity that begins with {wanted!r} (8 digits at least)")
    staying = tuple(wanted.lower() for wanted in keep)
    going = [one for one, base in known.items() if not base.startswith(staying)]
    if not going:
        click.echo("nothing to delete")
        return
    _confirm(f"Delete {_counted(going)}?", yes)
    digests = {one.manifest.entry.identity for one, base in known.items() if base.startswith(staying)}
    pruned = 0
    for place in places:
        with progress_bar(f"pruning {place}") as progress:
            pruned += prune_folder(place, digests, progress=progress)
    click.echo(f"deleted {pruned} entries of other identities")


def _counted(stored: Sequence[Stored]) -> str:
    return f"{len(stored)} entries of {mib(sum(one.nbytes for one in stored))}"


def _confirm(question: str, yes: bool) -> None:
    if not yes:
        click.confirm(question, abort=True, err=True)
