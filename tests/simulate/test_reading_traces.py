"""Reading trace files: runs, damage, and which request follows which."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_fingerprints import HEADER, KEY, traced

from strata_core.engine import trace as recording
from strata_core.engine.trace import TraceRecorder, TraceWriter
from strata_core.errors import SettingsError
from strata_core.simulate.config import SimConfig
from strata_core.simulate.trace import TraceError, read_trace


def lines(*lengths: int, start: int = 0) -> list[str]:
    writer = TraceWriter(HEADER, KEY)
    requests = [writer.line(traced(np.arange(length), start + number)) for number, length in enumerate(lengths)]
    return [line + "\n" for line in (writer.header(), *requests)]


def test_the_last_run_is_read_unless_another_is_named() -> None:
    text = [*lines(10), *lines(20, 30)]
    assert [item.computed for item in read_trace(text).items] == [20, 30]
    assert [item.computed for item in read_trace(text, 1).items] == [10]
    with pytest.raises(TraceError, match="no run 3: the trace has 2"):
        read_trace(text, 3)


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    text = lines(10, 20)
    for cut in (1, 40, len(text[-1]) - 2):
        assert [item.computed for item in read_trace([*text[:-1], text[-1][:cut]]).items] == [10]
        several = [*text[:-1], text[-1][:cut] + "\n", *text]
        assert [item.computed for item in read_trace(several, 1).items] == [10]
        assert [item.computed for item in read_trace(several).items] == [10, 20]


def test_a_run_after_one_that_was_cut_off_begins_on_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("".join(lines(10, 20))[:-30])
    recorder = TraceRecorder(tmp_path / "trace", {"page_tokens": 8})
    recorder.take(traced(np.arange(30)))
    recorder.close()
    with (tmp_path / "trace").open() as text:
        assert [item.computed for item in read_trace(text).items] == [30]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: ["[]\n", *text], "line 1: a trace begins with"),
        (lambda text: text[1:], "line 1: a trace begins with"),
        (lambda text: [text[0], "{oops\n", *text[1:]], "line 2 is not JSON"),
        (lambda text: [text[0], "{}\n"], "line 2 is not a request"),
        (lambda text: [text[0], text[1].replace('"prints":"', '"prints":"?')], "line 2 is not a request"),
        (lambda text: [text[0], text[2]], "parent page was not written"),
        (lambda text: [text[0].replace('"strata_trace":1', '"strata_trace":9')], "version 9 is not known"),
        (lambda text: [], "no run 1: the trace has 0"),
    ],
)
def test_what_is_no_trace_is_refused_and_the_line_is_named(damage, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TraceError, match=message):
        read_trace(damage(lines(16, 24)))


def test_an_incomplete_first_line_is_refused_when_it_is_needed() -> None:
    with pytest.raises(TraceError, match="first line"):
        SimConfig.of_trace(read_trace(lines(10)))


def test_a_request_follows_the_reply_that_its_prompt_goes_on_from() -> None:
    writer = TraceWriter(HEADER, KEY)
    first, other = np.arange(40), np.arange(100, 140)
    requests = [
        traced(first, 0), traced(other, 10), traced(np.append(first, [7] * 20), 20), traced(np.arange(200, 230), 30),
    ]  # fmt: skip
    trace = read_trace([writer.header() + "\n", *(writer.line(request) + "\n" for request in requests)])
    assert [item.follows for item in trace.items] == [None, None, "r0", None]


def test_two_that_only_begin_alike_follow_nothing() -> None:
    writer = TraceWriter(HEADER, KEY)
    system = np.arange(24)
    requests = [traced(np.append(system, [seed] * 20), seed) for seed in (1, 2, 3)]
    trace = read_trace([writer.header() + "\n", *(writer.line(request) + "\n" for request in requests)])
    assert [item.follows for item in trace.items] == [None, None, None]


# -- recording --------------------------------------------------------------------------------------------------------


def test_a_recorder_appends_runs(tmp_path: Path) -> None:
    for number in range(2):
        recorder = TraceRecorder(tmp_path / "trace", {"page_tokens": 8})
        recorder.take(traced(np.arange(10 + number)))
        recorder.close()
        assert recorder.dropped == 0
    text = (tmp_path / "trace").read_text().splitlines(keepends=True)
    assert ["strata_trace" in json.loads(line) for line in text] == [True, False, True, False]
    assert read_trace(text).items[0].computed == 11


def test_a_file_that_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"record_trace .*no/where: No such file") as error:
        TraceRecorder(tmp_path / "no" / "where", {"page_tokens": 8})
    assert error.value.param == "record_trace"


def test_a_full_disk_costs_lines_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    recorder = TraceRecorder(full, {"page_tokens": 8})
    recorder.take(traced(np.arange(10)))
    recorder.take(traced(np.arange(20)))
    recorder.close()
    assert recorder.dropped >= 2
    assert [r.message for r in caplog.records] == [
        "trace /dev/full: requests are missing from it: No space left on device"
    ]


def test_a_writer_that_is_too_slow_costs_lines_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(recording, "CAPACITY", 2)
    gate = threading.Event()
    line = TraceWriter.line
    monkeypatch.setattr(TraceWriter, "line", lambda self, request: gate.wait(30) and line(self, request))
    recorder = TraceRecorder(tmp_path / "trace", {"page_tokens": 8})
    for number in range(10):
        recorder.take(traced(np.arange(10), number))
    gate.set()
    recorder.close()
    written = len(read_trace((tmp_path / "trace").read_text().splitlines(keepends=True)).items)
    assert written + recorder.dropped == 10
    assert 2 <= written <= 4
