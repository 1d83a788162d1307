"""``strata simulate`` and ``strata why`` as they are typed."""

from __future__ import annotations

import json
import re
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from strata_core.cli import main
from strata_core.cli.why import EVENTS, REREAD, REUSED, TOKENS
from strata_core.engine.requests import RequestRecord, Reread
from strata_core.server.collector import SOURCES
from strata_core.server.replies import record_object

AGENTS = (
    "--generate", "agents", "--agents", "5", "--rounds", "3", "--system", "100", "--first", "300", "--parallel", "2",
)  # fmt: skip
RECORD = RequestRecord(
    id="abc", status="stop", prompt_tokens=1000, cached_tokens=600, read_tokens=400, generated_tokens=50,
    reused={"cold": 600}, reread=(Reread(250, "evicted: budget"),), created=1.0, queued_s=0.5, restore_s=0.0123,
    read_s=12.5, generate_s=None, slot=0, why="evicted: budget",
)  # fmt: skip


def strata(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, list(arguments), **options)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    result = strata("simulate", *AGENTS)
    assert result.exit_code == 0
    path = tmp_path / "trace.jsonl"
    path.write_text(result.stdout)
    return str(path)


# -- simulate ---------------------------------------------------------------------------------------------------------


def test_configurations_stand_beside_each_other(trace: str, tmp_path: Path) -> None:
    result = strata(
        "simulate", trace, "--ram-mib", "0", "--read-rate", "900", "--compare", "more RAM: ram-mib=500",
        "--compare", "cold-mib=500", "--plot", str(tmp_path / "plot.svg"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.split("  +", lines[0].strip()) == ["these options", "more RAM", "cold-mib=500"]
    [again] = [line.split() for line in lines if line.startswith("tokens read again ") and len(line.split()) == 6]
    assert [cell == "0" for cell in again[3:]] == [False, True, True]
    assert any(line.endswith(" a  these options") for line in lines)
    svg = ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 3


def test_json_has_all_numbers(trace: str) -> None:
    result = strata("simulate", trace, "--json", "--ram-mib", "500", "--until", "40")
    [outcome] = json.loads(result.stdout)
    assert outcome["requests"] + outcome["unfinished"] == 15
    assert outcome["prompt"] == outcome["read"] + sum(outcome["reused"].values())
    assert {"hits", "reread", "written", "counts", "rereads", "seconds", "reread_tokens"} <= outcome.keys()


def test_a_trace_comes_from_standard_input_too(trace: str) -> None:
    piped = strata("simulate", "-", "--json", input=Path(trace).read_text())
    assert json.loads(piped.stdout) == json.loads(strata("simulate", trace, "--json").stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("none.jsonl",), 3, "there is no file none.jsonl"),
        ((), 2, "which TRACE?"),
        (("TRACE", "--agents", "3"), 2, "--agents goes with --generate"),
        (("TRACE", "--generate", "agents"), 2, "--generate makes a trace"),
        (("TRACE", "--compare", "x: ram=5"), 2, "write key=value"),
        (("TRACE", "--restore-rate", "cold=fast"), 2, "is no rate"),
        (("TRACE", "--run", "2"), 1, "there is no run 2"),
        (("TRACE", "--ram-mib", "-1"), 2, "-1"),
        (("--generate", "agents", "--spread", "2"), 2, "spread must be"),
    ],
)
def test_what_cannot_be_simulated_says_why(trace: str, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = strata("simulate", *(trace if word == "TRACE" else word for word in arguments))
    assert (result.exit_code, "Traceback" in result.output) == (code, False)
    assert message in result.output


# -- why --------------------------------------------------------------------------------------------------------------


@attrs.define
class Server:
    url: str
    replies: dict[str, tuple[int, Any]]
    seen: list[tuple[str, str | None]] = attrs.field(factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.seen.append((self.path, self.headers.get("Authorization")))
            status, body = found.replies.get(self.path, (404, {"error": {"message": f"no {self.path}"}}))
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    found = Server(f"http://127.0.0.1:{http.server_port}", {})
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield found
    http.shutdown()
    thread.join()
    http.server_close()


def rows(result: Result) -> dict[str, str]:
    split = (line.split(maxsplit=1) for line in result.stdout.splitlines() if line[:1].isdigit())
    return {text: tokens for tokens, text in split}


def test_a_request_says_where_its_tokens_came_from(server: Server) -> None:
    server.replies["/v1/requests/chatcmpl-abc"] = 200, record_object(RECORD)
    result = strata("why", "chatcmpl-abc", "--url", server.url + "/v1/", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert rows(result) == {
        "reused from cold": "600",
        "read again: evicted: budget": "250",
        "read: evicted: budget": "150",
        "prompt": "1,000",
        "generated": "50",
    }
    assert "abc: stop; queued 500 ms, restored in 12 ms, read in 12.5 s, generated in -" in result.stdout
    assert server.seen == [("/v1/requests/chatcmpl-abc", "Bearer secret")]
    assert json.loads(strata("why", "chatcmpl-abc", "--url", server.url, "--json").stdout)["id"] == "abc"


def test_without_a_request_the_totals_are_told(server: Server) -> None:
    server.replies["/metrics?format=json"] = 200, {
        "strata:reused_tokens_total": [{"labels": {"source": "ram"}, "value": 12345.0}],
        "strata:reread_tokens_total": [{"labels": {"reason": "evicted: budget"}, "value": 7.0}],
        "strata:read_tokens_total": 99.0, "strata:prompt_tokens_total": 12444.0, "strata:evictions_total": 3.0,
    }  # fmt: skip
    result = strata("why", "--url", server.url)
    assert rows(result) == {
        "reused from ram": "12,345",
        "read again: evicted: budget": "7",
        "read, those read again included": "99",
        "prompts": "12,444",
    }
    assert "evictions 3" in result.stdout
    assert "discards" not in result.stdout, "what is not measured is not told"


def test_names_of_counters_are_those_of_the_server() -> None:
    known = {source.name + ("" if source.gauge else "_total") for source in SOURCES}
    assert {REUSED, REREAD, *TOKENS, *EVENTS} <= known


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        (None, 3, "no /v1/requests/x%2Fy"),
        ((401, {"error": {"message": "wrong key"}}), 1, "wrong key"),
        ((500, b"oops"), 1, "500"),
        ((200, b"<html>"), 1, "not JSON"),
        ((200, []), 1, "not an object"),
        ((200, {"id": "x"}), 1, "not complete"),
    ],
)
def test_what_the_server_cannot_tell_is_an_error(server: Server, reply: Any, code: int, message: str) -> None:
    if reply is not None:
        server.replies["/v1/requests/x%2Fy"] = reply
    result = strata("why", "x/y", "--url", server.url)
    assert (result.exit_code, "Traceback" in result.output) == (code, False)
    assert message in result.output


def test_a_server_that_does_not_answer_is_named() -> None:
    result = strata("why", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:9" in result.output


def test_a_server_without_a_model_has_no_totals(server: Server) -> None:
    server.replies["/metrics?format=json"] = 200, {}
    result = strata("why", "--url", server.url)
    assert result.exit_code == 1
    assert "is its model loaded?" in result.output
