"""The trace of a run, and the picture of it."""

import errno
import json
import resource
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from trace_view import LANES, MAX_ROWS, longest_stalls, main, spans_of

import infinity
from infinity.report import write_trace
from swap.marks import DeviceMarks
from swap.timeline import Timeline
from tests.support.fake_events import FakeDevice
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import least_budget


def _trace(nvme: Path, path: Path) -> dict[str, Any]:
    least = least_budget(Stack, nvme)
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=least) as offloaded:
        for step in range(3):
            vector_loss(model, step).backward()
            offloaded.step()
        offloaded.flush()
        offloaded.trace(path)
        report = offloaded.report()
    trace: dict[str, Any] = json.loads(path.read_text())
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    stalls = [event["dur"] for event in trace["traceEvents"] if event["cat"] == "stall"]
    assert sum(stalls) / 1e6 == pytest.approx(report.stall_seconds, rel=1e-6)
    return trace


def test_a_trace_has_every_phase_transfer_and_stall_by_name(nvme: Path, tmp_path: Path) -> None:
    events = _trace(nvme, tmp_path / "trace.json")["traceEvents"]
    kinds = {event["cat"] for event in events}
    assert {"forward", "backward", "kernel", "read", "write", "stall"} <= kinds <= LANES.keys()
    assert sum(event["cat"] == "forward" for event in events) == 3
    assert sum(event["cat"] == "backward" for event in events) == 3
    names = {name for name, _ in Stack().named_parameters()}
    assert {event["name"] for event in events if event["cat"] == "stall"} <= names
    assert all(event["args"]["bytes"] > 0 for event in events if event["cat"] in {"read", "write"})
    forwards, backwards = (
        [event for event in events if event["cat"] == kind] for kind in ("forward", "backward")
    )
    for forward, backward in zip(forwards, backwards, strict=True):
        assert forward["ts"] + forward["dur"] <= backward["ts"]


def test_the_picture_of_a_trace_is_drawn(
    nvme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _trace(nvme, tmp_path / "trace.json")
    main([str(tmp_path / "trace.json"), str(tmp_path / "trace.png")])
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert f"{len(trace['traceEvents'])} events" in capsys.readouterr().out
    main([str(tmp_path / "trace.json"), str(tmp_path / "none.png"), "--from", "1e6"])
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")


def test_events_of_a_row_of_a_trace_never_overlap_and_rows_have_names(tmp_path: Path) -> None:
    timeline, path = Timeline(), tmp_path / "trace.json"
    spans = [(0, 5), (1, 2), (1, 7), (2, 3), (6, 8), (5, 6)]
    for start, stop in spans:
        timeline.add("read", timeline.started_at + start, timeline.started_at + stop)
    timeline.add("kernel", timeline.started_at, timeline.started_at + 9)
    write_trace(timeline, path)
    events = json.loads(path.read_text())["traceEvents"]
    rows: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = round(event["ts"] / 1e6), round((event["ts"] + event["dur"]) / 1e6)
            rows.setdefault(event["tid"], []).append(span)
    assert sorted(span for row in rows.values() for span in row) == sorted([*spans, (0, 9)])
    for row in rows.values():
        assert all(before[1] <= after[0] for before, after in pairwise(row))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["kernel", "read", "read 2", "read 3"]
    assert names.keys() == rows.keys()


def test_trace_shows_when_a_device_did_what_it_was_given(tmp_path: Path) -> None:
    timeline, device, path = Timeline(), FakeDevice(), tmp_path / "trace.json"
    mark = DeviceMarks(device.event, lambda: device)
    device.give(0.5)  # what it was given before
    start = mark()
    device.give(0.25)
    timeline.add_between("forward", start, mark())
    write_trace(timeline, path)
    assert json.loads(path.read_text())["traceEvents"] == []
    device.run()
    write_trace(timeline, path)
    (event,) = (e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X")
    assert event["dur"] == pytest.approx(0.25e6, rel=1e-4)
    assert event["ts"] >= 0.499e6


def _event(kind: str, start: float, stop: float, name: str = "w") -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": start * 1e6, "dur": (stop - start) * 1e6}


def test_events_that_overlap_are_in_rows_of_their_own() -> None:
    events = [_event("read", 0, 2), _event("read", 1, 3), _event("read", 2, 4)]
    events.append(_event("write", 0, 9))
    rows = [(span.kind, span.row) for span in spans_of({"traceEvents": events})]
    assert rows == [("read", 0), ("write", 0), ("read", 1), ("read", 0)]
    many = [_event("read", 0, 1) for _ in range(3 * MAX_ROWS)]
    assert max(span.row for span in spans_of({"traceEvents": many})) == MAX_ROWS - 1


def test_a_window_has_what_touches_it_and_stalls_are_ranked() -> None:
    events = [_event("stall", at, at + 0.1 * (at + 1), name=f"p{at}") for at in range(9)]
    assert [span.label for span in spans_of({"traceEvents": events}, 2.5, 4.0)] == ["p3", "p4"]
    stalls = longest_stalls(spans_of({"traceEvents": events}))
    assert [span.label for span in stalls] == ["p8", "p7", "p6", "p5", "p4"]


@pytest.mark.parametrize("trace", [{}, [], {"traceEvents": [{"cat": "read"}]}])
def test_what_is_no_trace_is_refused(trace: Any) -> None:
    with pytest.raises(ValueError, match="no trace that offloaded"):
        spans_of(trace)
    with pytest.raises(ValueError, match="unknown kinds: nap"):
        spans_of({"traceEvents": [_event("nap", 0, 1)]})


def test_a_trace_that_finds_no_room_leaves_the_one_before_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("from before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
        with pytest.raises(OSError, match=r"trace\.json") as refused:
            write_trace(Timeline(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert refused.value.errno == errno.EFBIG
    assert path.read_text() == "from before"
    assert list(tmp_path.iterdir()) == [path]
