"""The group ``strata cache``."""

from __future__ import annotations

import click

from strata_tiers.commands.reading import check, list_entries, show, warm
from strata_tiers.commands.writing import export, import_file, prune_foreign, rm


@click.group()
def cache() -> None:
    """Look after stored conversations, without a server.

    ls, show, check, warm and export read only, and work beside a running server. rm, import, prune-foreign and
    check --repair change a folder and refuse while a server uses it.

    Exit codes: 0 all is well, 1 damage was found, 2 wrong usage or settings, 3 no such conversation, file or folder,
    8 another process uses the folder, 9 something cannot be read or written.
    """


for command in (list_entries, show, check, rm, export, import_file, prune_foreign, warm):
    cache.add_command(command)
