"""Simulated time: sharing, order, and what happens when everything waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.clock import Clock, Lane, Process, Shared, Signal


def _run(clock: Clock, process: Process) -> float:
    clock.run_until(clock.start(process))
    return clock.now


def _waits(*signals: Signal) -> Process:
    yield from signals


def test_jobs_of_one_kind_share_a_machine_evenly() -> None:
    clock = Clock()
    machine = Shared(clock, {"read": 10.0})
    first, second = machine.use("read", 10.0), machine.use("read", 20.0)
    assert _run(clock, _waits(first)) == pytest.approx(2.0)
    assert _run(clock, _waits(second)) == pytest.approx(3.0)
    assert machine.done["read"] == pytest.approx(30.0)
    assert machine.busy_seconds == pytest.approx(3.0)


def test_kinds_go_on_side_by_side_up_to_what_the_machine_does_together() -> None:
    for together, expected in ((float("inf"), 1.0), (15.0, 20.0 / 15.0)):
        clock = Clock()
        machine = Shared(clock, {"read": 10.0, "write": 10.0}, together=together)
        both = (machine.use("read", 10.0), machine.use("write", 10.0))
        assert _run(clock, _waits(*both)) == pytest.approx(expected)


def test_kinds_that_take_turns_take_as_long_as_one_after_the_other() -> None:
    clock = Clock()
    speeds = {"compute": 1.0, "kernel": 100.0}
    weights = {kind: 1 / speed for kind, speed in speeds.items()}
    cores = Shared(clock, speeds, together=1.0, weights=weights)
    jobs = (cores.use("compute", 2.0), cores.use("kernel", 300.0))
    assert _run(clock, _waits(*jobs)) == pytest.approx(5.0)


@given(amounts=st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=20))
def test_a_machine_takes_what_its_work_takes_whatever_the_jobs(amounts: list[float]) -> None:
    clock = Clock()
    machine = Shared(clock, {"read": 1e3})
    jobs = [machine.use("read", amount) for amount in amounts]
    assert _run(clock, _waits(*jobs)) == pytest.approx(sum(amounts) / 1e3, rel=1e-6, abs=1e-7)


def test_a_lane_does_one_job_after_the_other() -> None:
    clock = Clock()
    machine, lane = Shared(clock, {"read": 1.0}), Lane(clock)
    order: list[str] = []

    def job(name: str) -> Process:
        order.append(name)
        yield machine.use("read", 1.0)
        order.append(f"{name} done")

    jobs = [lane.submit(job(name)) for name in "ab"]
    assert _run(clock, _waits(*jobs)) == pytest.approx(2.0)
    assert order == ["a", "a done", "b", "b done"]


def test_processes_that_wait_for_one_another_are_reported() -> None:
    clock = Clock()
    with pytest.raises(RuntimeError, match="everything waits"):
        _run(clock, _waits(Signal(clock)))
