"""``strata why``: where a request's tokens came from, asked of a running server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import click

from strata_core.cli.client import CLIENT, error_message, server_address, server_key
from strata_core.cli.options import resolve, settings_options
from strata_core.cli.tables import print_table
from strata_core.errors import NotFound, StrataError

#: Counters by what they are called here.
REUSED, REREAD = "strata:reused_tokens_total", "strata:reread_tokens_total"
TOKENS = {
    "strata:read_tokens_total": "read, those read again included",
    "strata:prompt_tokens_total": "prompts",
    "strata:generated_tokens_total": "generated",
}
EVENTS = {
    "strata:evictions_total": "evictions",
    "strata:disk_evictions_total": "disk evictions",
    "strata:demotions_total": "demotions",
    "strata:discards_total": "discards",
    "strata:restore_failures_total": "restores that failed",
}


class ServerError(StrataError):
    """The server cannot be reached, or refused; the message is the server's."""

    code = "server_error"


@click.command()
@click.argument("request", required=False)
@click.option("--url", metavar="URL", help="Server to ask; without it, the one at HOST and PORT.")
@click.option("--json", "as_json", is_flag=True, help="Print the server's JSON.")
@click.pass_context
def why(ctx: click.Context, request: str | None, url: str | None, as_json: bool) -> None:
    """Show where the tokens of REQUEST came from, what of it was read again and why, and its times.

    REQUEST is the `id` of a reply. Without it, the totals since the server started.
    """
    settings = resolve(ctx)
    address, key = server_address(url, settings), server_key(settings)
    if request is None:
        found = ask(address, "/metrics?format=json", key)
        rows = totals(found)
    else:
        found = ask(address, f"/v1/requests/{urllib.parse.quote(request, safe='')}", key)
        rows = ledger(found)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        print_table(("TOKENS", "FROM"), rows[0])
        click.echo()
        for line in rows[1]:
            click.echo(line)


why = settings_options(why, only=CLIENT)


def ask(address: str, path: str, key: str | None) -> dict[str, Any]:
    """A JSON object of a server.

    :raises NotFound: it does not know what was asked for. :raises ServerError: any other failure.
    """
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers), timeout=10) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        message = error_message(error.read()) or f"{address}{path}: {error.code} {error.reason}"
        raise (NotFound if error.code == 404 else ServerError)(message) from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServerError(f"no server answers at {address}: {reason}") from None
    except ValueError:
        raise ServerError(f"{address} is no Strata server: its reply is not JSON") from None
    if not isinstance(found, dict):
        raise ServerError(f"{address} is no Strata server: its reply is not an object")
    return found


Rows = tuple[Sequence[Sequence[str]], Sequence[str]]


def ledger(record: Mapping[str, Any]) -> Rows:
    """Rows and lines of one request's record."""
    try:
        rows = [(f"{tokens:,}", f"reused from {source}") for source, tokens in record["reused"].items()]
        lost = 0
        for item in record["reread"]:
            lost += item["tokens"]
            rows.append((f"{item['tokens']:,}", f"read again: {item['reason']}"))
        # The ledger counts what is to be read again; a request that ended early read less.
        rows.append((f"{max(0, record['read_tokens'] - lost):,}", f"read: {record['why'] or 'new text'}"))
        rows.append((f"{record['prompt_tokens']:,}", "prompt"))
        rows.append((f"{record['generated_tokens']:,}", "generated"))
        times = ", ".join(
            f"{name} {_seconds(record[key])}"
            for name, key in (
                ("queued", "queued_s"), ("restored in", "restore_s"), ("read in", "read_s"),
                ("generated in", "generate_s"),
            )
        )  # fmt: skip
        return rows, [f"{record['id']}: {record['status']}; {times}"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"the server's record is not complete: {error!r}") from None


def totals(metrics: Mapping[str, Any]) -> Rows:
    """Rows and lines of a server's counters."""
    rows = [
        (f"{sample['value']:,.0f}", f"reused from {sample['labels']['source']}")
        for sample in metrics.get(REUSED, ())
    ]
    rows += [
        (f"{sample['value']:,.0f}", f"read again: {sample['labels']['reason']}") for sample in metrics.get(REREAD, ())
    ]
    rows += [(f"{metrics[name]:,.0f}", text) for name, text in TOKENS.items() if name in metrics]
    if not rows:
        raise ServerError("the server has no such counters: is its model loaded?")
    return rows, [", ".join(f"{text} {metrics[name]:,.0f}" for name, text in EVENTS.items() if name in metrics)]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:,.0f} ms" if value < 10 else f"{value:,.1f} s"
