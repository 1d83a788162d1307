"""Choosing and preparing what carries the server, and the pieces that need no process."""

from __future__ import annotations

import io
import select
import socket

import pytest
from rich.console import Console

from strata_core.errors import InvalidRequest, SettingsError
from strata_core.server import client_socket
from strata_core.server.body import Body
from strata_core.server.client_socket import ClientSocket
from strata_core.server.disconnect import has_hung_up, probe_of
from strata_core.server.runner import choose_server, listen, url_of
from strata_core.server.service import LoadingDisplay


@pytest.mark.parametrize(
    ("wanted", "platform", "chosen"),
    [
        ("auto", "posix", "gunicorn"),
        ("auto", "nt", "waitress"),
        ("gunicorn", "posix", "gunicorn"),
        ("waitress", "posix", "waitress"),
        ("waitress", "nt", "waitress"),
    ],
)
def test_the_carrier_follows_the_setting_and_the_platform(wanted, platform, chosen):
    assert choose_server(wanted, platform) == chosen


def test_gunicorn_on_windows_is_refused_by_name():
    with pytest.raises(SettingsError, match="does not run on Windows") as caught:
        choose_server("gunicorn", "nt")
    assert caught.value.param == "server"


@pytest.mark.parametrize(("host", "start"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")])
def test_a_free_port_has_its_number_before_serving(host, start):
    with listen(host, 0) as sock:
        assert url_of(sock) == f"{start}{sock.getsockname()[1]}" and sock.getsockname()[1] > 0


def test_a_host_that_cannot_be_bound_is_named():
    with pytest.raises(SettingsError, match=r"cannot listen on no\.such\.host\.invalid:0"):
        listen("no.such.host.invalid", 0)


def test_a_peer_that_closed_is_noticed_and_one_that_sent_more_is_not():
    here, there = socket.socketpair()
    with here, there:
        probe = probe_of({"gunicorn.socket": here})
        assert not probe()
        there.sendall(b"pipelined")
        assert not probe() and here.recv(9) == b"pipelined"
        there.close()
        assert probe()
    assert has_hung_up(here)


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="only Linux tells it apart from bytes not yet read")
def test_a_peer_that_closed_behind_bytes_nobody_has_read_is_noticed():
    here, there = socket.socketpair()
    with here:
        there.sendall(b"GET /health HTTP/1.1\r\n")
        assert not has_hung_up(here)
        there.close()
        assert has_hung_up(here) and here.recv(99).startswith(b"GET")


def test_a_client_that_stays_silent_or_takes_nothing_counts_as_reset(monkeypatch):
    monkeypatch.setattr(client_socket, "RECEIVE_S", 0.1)
    monkeypatch.setattr(client_socket, "SEND_S", 0.1)
    here, there = socket.socketpair()
    with ClientSocket.adopt(here) as client, there:
        client.setblocking(True)
        there.sendall(b"abc")
        assert client.recv(9) == b"abc"
        assert not has_hung_up(client)
        with pytest.raises(ConnectionResetError, match="nothing came"):
            client.recv(9)
        with pytest.raises(ConnectionResetError, match="took nothing"):
            client.sendall(bytes(1 << 24))
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(9)


def test_without_a_way_to_ask_a_client_counts_as_there():
    assert probe_of({})() is False
    assert probe_of({"waitress.client_disconnected": lambda: True})() is True


def test_loading_is_a_bar_on_a_terminal_and_a_line_per_stage_elsewhere(capsys):
    def run(terminal):
        written = io.StringIO()
        with LoadingDisplay(Console(file=written, force_terminal=terminal, width=100)) as display:
            for fraction in (0.0, 0.5, 1.0):
                display.show("loading weights", fraction)
            display.show("planning memory", 1.0)
        return written.getvalue()

    drawn = run(True)
    assert "planning memory" in drawn and "100%" in drawn and capsys.readouterr().err == ""
    assert run(False) == ""
    assert capsys.readouterr().err == "strata serve: loading weights\nstrata serve: planning memory\n"


def test_a_field_that_is_read_must_be_declared():
    with pytest.raises(KeyError, match="does not declare"):
        Body({"a": 1}, ("b",)).get("a")


def test_two_names_of_one_field_may_agree_but_not_differ():
    assert Body({"b": 1}, "ab").one_of("a", "b") == "b"
    assert Body({"a": 1, "b": 1}, "ab").one_of("a", "b") == "a"
    with pytest.raises(InvalidRequest, match="a and b mean the same"):
        Body({"a": 1, "b": 2}, "ab").one_of("a", "b")
