"""Commands that change nothing: they work beside a running server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from strata_core.cli.tables import print_table
from strata_core.errors import LevelError
from strata_tiers.check import Problem, Report
from strata_tiers.check import check as check_folder
from strata_tiers.commands.common import (
    Stored,
    archive_option,
    chosen_folders,
    folders_option,
    mib,
    pick,
    progress_bar,
    stored_in,
)
from strata_tiers.files import Files
from strata_tiers.newfile import Progress

_PIECE = 4 << 20


@click.command("ls")
@folders_option
@archive_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def list_entries(ctx: click.Context, folders: Sequence[Path], as_json: bool) -> None:
    """List the stored conversations, the latest used first."""
    stored = stored_in(chosen_folders(ctx, folders))
    if as_json:
        click.echo(json.dumps([_facts(one) for one in stored], indent=2))
        return
    rows = [
        (
            one.id, one.manifest.entry.conversation[:12], str(len(one.manifest.entry.tokens)), mib(one.nbytes),
            _states(one), _date(one.manifest.entry.used), _kind(one), one.base[:12], str(one.folder),
        )
        for one in stored
    ]  # fmt: skip
    print_table(("ID", "CONVERSATION", "TOKENS", "SIZE", "STATES", "USED", "KIND", "IDENTITY", "FOLDER"), rows)


@click.command()
@folders_option
@archive_option
@click.argument("name", metavar="ID")
@click.option("--ids", "with_ids", is_flag=True, help="Add the token ids, which `/v1/completions` takes as a prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def show(ctx: click.Context, folders: Sequence[Path], name: str, with_ids: bool, as_json: bool) -> None:
    """Show everything about an entry, or about all entries of a conversation."""
    found = pick(stored_in(chosen_folders(ctx, folders)), name)
    facts = [_facts(one) | _details(one) for one in found]
    if with_ids:
        ids = [one.manifest.entry.tokens.tolist() for one in found]
        facts = [fact | {"token_ids": these} for fact, these in zip(facts, ids, strict=True)]
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for number, one in enumerate(facts):
        if number:
            click.echo()
        segments, states = one.pop("segments"), one.pop("state_files")
        parts = one.pop("parts")
        for key, value in (one | {f"identity.{part}": text for part, text in parts.items()}).items():
            click.echo(f"{key + ':':<22} {value}")
        print_table(("SEGMENT", "FIRST", "TOKENS", "SIZE"), [(s["file"], *map(str, s["span"])) for s in segments])
        if states:
            rows = [(state["file"], str(state["position"]), str(state["size"])) for state in states]
            print_table(("STATE", "POSITION", "SIZE"), rows)


@click.command()
@folders_option
@archive_option
@click.option("--repair", is_flag=True, help="Put damaged files into quarantine, cut what used them, delete clutter.")
@click.option("--quick", is_flag=True, help="Check names, sizes and headers, not the pages.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def check(ctx: click.Context, folders: Sequence[Path], repair: bool, quick: bool, as_json: bool) -> None:
    """Check every file. Exits with 1 when damage was found, or was left after --repair."""
    reports: dict[str, Report] = {}
    for folder in chosen_folders(ctx, folders):
        with progress_bar(f"checking {folder}") as progress:
            reports[str(folder)] = check_folder(folder, repair=repair, payloads=not quick, progress=progress)
    if as_json:
        click.echo(json.dumps({folder: _report(report) for folder, report in reports.items()}, indent=2))
    else:
        for where, report in reports.items():
            _print_report(where, report)
    if any(not _dealt_with(problem) for report in reports.values() for problem in report.damaged):
        sys.exit(1)


@click.command()
@folders_option
@click.argument("names", metavar="[ID]...", nargs=-1)
@click.pass_context
def warm(ctx: click.Context, folders: Sequence[Path], names: Sequence[str]) -> None:
    """Read conversations into the system's page cache, so that they come back faster; all of them without an ID."""
    stored = stored_in(chosen_folders(ctx, folders))
    wanted = [one for name in names for one in pick(stored, name)] if names else stored
    paths = {one.folder / "segments" / piece.name: piece.size for one in wanted for piece in one.manifest.pieces}
    start = time.perf_counter()
    with progress_bar("reading") as progress:
        _read_through(paths, progress)
    seconds = time.perf_counter() - start
    click.echo(f"read {mib(sum(paths.values()))} of {len(wanted)} conversations in {seconds:.1f} s")


def _read_through(paths: dict[Path, int], progress: Progress) -> None:
    files, buffer = Files(), bytearray(_PIECE)
    done, total = 0, sum(paths.values())
    for path, size in paths.items():
        try:
            fd = files.open(path)
            try:
                for offset in range(0, size, _PIECE):
                    files.read(fd, [memoryview(buffer)[: min(_PIECE, size - offset)]], offset)
            finally:
                files.close(fd)
        except OSError as error:
            raise LevelError(f"{path} cannot be read: {error.strerror or error}") from error
        done += size
        progress(done, total)


def _facts(one: Stored) -> dict[str, Any]:
    entry = one.manifest.entry
    return {
        "id": entry.id,
        "conversation": entry.conversation,
        "folder": str(one.folder),
        "tokens": len(entry.tokens),
        "bytes": one.nbytes,
        "states": None if entry.states is None else list(entry.states),
        "state_bytes": one.state_nbytes,
        "created": entry.created,
        "used": entry.used,
        "reason": entry.reason,
        "pinned": entry.pinned,
        "root": entry.root,
        "key": entry.key,
        "ids_only": not one.manifest.pieces,
        "tenant": entry.tenant,
        "identity": one.base,
    }


def _details(one: Stored) -> dict[str, Any]:
    pieces = one.manifest.pieces
    return {
        "turns": list(one.manifest.entry.turns),
        "page_tokens": one.manifest.page_tokens,
        "parts": dict(one.manifest.parts),
        "segments": [
            {"file": piece.name, "span": [piece.start, piece.count, piece.size]} for piece in pieces if not piece.state
        ],
        "state_files": [{"file": p.name, "position": p.stop, "size": p.size} for p in pieces if p.state],
    }


def _states(one: Stored) -> str:
    """How many recurrent states it has, and their bytes; nothing for models without such."""
    positions = one.manifest.entry.states
    return "" if positions is None else f"{len(positions)}, {mib(one.state_nbytes)}"


def _kind(one: Stored) -> str:
    entry = one.manifest.entry
    words = [word for word, is_so in (("pinned", entry.pinned), ("root", entry.root)) if is_so] or [entry.reason]
    return ", ".join([*words, *(["ids only"] if not one.manifest.pieces else [])])


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _report(report: Report) -> dict[str, Any]:
    def problems(found: list[Problem]) -> list[dict[str, str]]:
        return [{"file": str(one.path), "why": one.why, "done": one.done} for one in found]

    return {
        "sound": report.sound,
        "conversations": report.conversations,
        "segments": report.segments,
        "bytes": report.nbytes,
        "quarantined": report.quarantined,
        "unknown": report.unknown,
        "damaged": problems(report.damaged),
        "clutter": problems(report.clutter),
    }


def _print_report(where: str, report: Report) -> None:
    click.echo(
        f"{where}: {report.conversations} conversations, {report.segments} segments, {mib(report.nbytes)}; "
        f"{len(report.damaged)} damaged, {len(report.clutter)} left over, {report.quarantined} in quarantine, "
        f"{report.unknown} of unknown versions"
    )
    for kind, found in (("damaged", report.damaged), ("left over", report.clutter)):
        for problem in found:
            done = f" -> {problem.done}" if problem.done else ""
            click.echo(f"  {kind}: {problem.path.name}: {problem.why}{done}")


def _dealt_with(problem: Problem) -> bool:
    return bool(problem.done) and not problem.done.startswith("could not")
