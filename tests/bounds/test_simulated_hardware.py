"""What takes time in simulated steps: rates, streams, and the thread that lets time go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulation.hardware import Hardware, Queue

from tests.support.turns import Turns


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    turns = Turns(0, ())
    with turns.applied():
        made = Hardware(turns)
        try:
            yield made
        finally:
            made.close()


def at(hardware: Hardware, moments: dict[str, float], name: str) -> Callable[[], object]:
    return lambda: moments.setdefault(name, hardware.now)


def test_work_on_a_resource_takes_its_amount_over_the_rate(hardware: Hardware) -> None:
    disk = hardware.resource("disk", 10.0)
    hardware.spend(disk, 0, 5.0)
    hardware.spend(disk, 0, 20.0)
    assert hardware.now == pytest.approx(2.5)
    assert disk.amount == 25.0
    assert disk.busy_seconds == pytest.approx(2.5)


def test_lanes_share_a_resource_and_work_in_one_lane_is_in_order(hardware: Hardware) -> None:
    disk, moments = hardware.resource("disk", 1.0), dict[str, float]()
    hardware.begin(disk, "reads", 2.0, at(hardware, moments, "first"))
    hardware.begin(disk, "reads", 1.0, at(hardware, moments, "second"))
    hardware.begin(disk, "writes", 1.0, at(hardware, moments, "beside"))
    hardware.wait(lambda: len(moments) == 3)
    assert moments == pytest.approx({"beside": 2.0, "first": 3.0, "second": 4.0})


def test_resources_do_not_wait_for_one_another(hardware: Hardware) -> None:
    disk, link = hardware.resource("a", 1.0), hardware.resource("b", 4.0)
    moments: dict[str, float] = {}
    hardware.begin(disk, 0, 1.0, at(hardware, moments, "disk"))
    hardware.begin(link, 0, 2.0, at(hardware, moments, "link"))
    hardware.wait(lambda: len(moments) == 2)
    assert moments == pytest.approx({"link": 0.5, "disk": 1.0})


def test_a_stream_works_in_order_and_waits_for_events_of_others(hardware: Hardware) -> None:
    link, device = hardware.resource("link", 1.0), hardware.resource("device", 1.0)
    copies, kernels = Queue(hardware), Queue(hardware)
    copies.work(link, 3.0)
    arrived = copies.record()
    copies.work(link, 4.0)
    kernels.work(device, 1.0)
    before = kernels.record()
    kernels.wait_for(arrived)
    kernels.work(device, 2.0)
    computed = kernels.record()
    assert not any(moment.done() for moment in (arrived, before, computed))
    before.wait()
    assert hardware.now == pytest.approx(1.0)
    computed.wait()
    assert hardware.now == pytest.approx(5.0)
    assert arrived.done()
    copies.record().wait()
    assert hardware.now == pytest.approx(7.0)


def test_an_event_of_an_idle_stream_has_come(hardware: Hardware) -> None:
    stream: Any = Queue(hardware)
    assert stream.record().done()
    assert hardware.now == 0.0
