"""Host time on a CPU; on a GPU events, which nobody waits for until the seconds are wanted."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rkfac.curvature.stopwatch import Stopwatch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Device:
    """A stream that has its own clock and does its work when somebody waits for it."""

    def __init__(self) -> None:
        self.now, self.waits, self.reached = 0.0, 0, -1.0

    def event(self) -> Event:
        return Event(self)


class Event:
    """What torch.cuda.Event does, as far as it is used."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, float("nan")

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.reached = max(self.device.reached, self.at)

    def query(self) -> bool:
        return self.at <= self.device.reached

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "torch raises here"
        return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    def entered(_: Any) -> Any:
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", entered)
    return Device()


def test_host_time_is_counted_by_phase_also_when_an_error_passes() -> None:
    watch = Stopwatch(("a", "b"))
    with watch.timed("a", CPU):
        time.sleep(0.002)
    with pytest.raises(KeyError), watch.timed("a", CPU):
        raise KeyError
    assert watch.seconds()["a"] >= 0.002
    assert watch.seconds()["b"] == 0.0


def test_a_device_is_asked_only_when_the_seconds_are_wanted(device: Device) -> None:
    watch = Stopwatch(("a", "b"), device.event)
    for phase, milliseconds in (("a", 250.0), ("b", 500.0), ("a", 1000.0)):
        device.now += 7.0  # other work
        with watch.timed(phase, GPU):
            device.now += milliseconds
    assert device.waits == 0
    assert watch.seconds() == {"a": 1.25, "b": 0.5}
    assert device.waits > 0
    assert watch.seconds() == {"a": 1.25, "b": 0.5}


def test_events_do_not_pile_up_and_nothing_is_lost(device: Device) -> None:
    watch = Stopwatch(("a",), device.event)
    for i in range(1000):
        with watch.timed("a", GPU):
            device.now += 1.0
        device.reached = device.now - 5.0  # the device is five milliseconds behind
        if i > 100:
            assert len(watch._running) <= 64
    assert device.waits == 0
    assert watch.seconds()["a"] == pytest.approx(1.0)
