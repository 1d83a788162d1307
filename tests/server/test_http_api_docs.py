"""docs/http-api.md has every route and every field, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata_core.server import fields

PAGE = (Path(__file__).parents[2] / "docs/http-api.md").read_text("utf-8")
SECTIONS = {
    title.strip("`"): body for title, body in re.findall(r"^#{2,3} (.+)\n((?:(?!^#{2,3} ).*\n?)*)", PAGE, re.MULTILINE)
}


def documented_fields(section):
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def routes(client):
    for rule in client.application.url_map.iter_rules():
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)
        for method in rule.methods - {"HEAD", "OPTIONS"}:
            yield f"{method} {path}"


def test_every_route_has_a_section_and_every_such_section_a_route(client):
    described = {title for title in SECTIONS if re.match(r"(GET|POST|DELETE) /", title)}
    assert described == set(routes(client))


@pytest.mark.parametrize("path", fields.REQUEST_FIELDS)
def test_every_field_that_an_endpoint_reads_is_in_its_table(path):
    known = set(fields.REQUEST_FIELDS[path])
    found = documented_fields(SECTIONS[f"POST {path}"])
    if known >= set(fields.GENERATING):
        found |= documented_fields(SECTIONS["Fields of generating requests"])
    assert found == known


def test_every_post_route_that_reads_a_body_declares_its_fields(client):
    posts = {route.removeprefix("POST ") for route in routes(client) if route.startswith("POST ")}
    assert {path for path in posts if "{" not in path} == set(fields.REQUEST_FIELDS)


def test_what_is_refused_is_listed():
    section = SECTIONS["Fields of generating requests"]
    refused = section[section.index("Refused, because") :].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", refused)) == set(fields.UNSUPPORTED)


def test_every_metric_that_dashboards_know_is_named():
    from strata_core.server.collector import SOURCES

    assert {s.name for s in SOURCES if s.name.startswith("vllm:") and s.gauge} <= set(re.findall(r"vllm:\w+", PAGE))


def test_links_within_the_page_lead_somewhere():
    titles = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
