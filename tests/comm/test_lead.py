"""Neither end of a channel is queued so far ahead that the host would wait before it has queued the other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen_raw.comm.lead import MOST, Lead
from qwen_raw.device import F32
from qwen_raw.errors import QwenRawError

MEMOP = ((2, 2), (2, 2))
KERNEL = ((1, 0), (1, 0))


class Recorder:
    """A device as far as Lead needs one."""

    def __init__(self) -> None:
        self.capturing: list[Callable[[], None]] | None = None

    def when_queued(self, call: Callable[[], None]) -> None:
        if self.capturing is None:
            call()
        else:
            self.capturing.append(call)

    def graph(self, queue: Callable[[], None], times: int) -> Callable[[], None]:
        """A capture of so many calls, as what launches it."""
        calls = self.capturing = []
        for _ in range(times):
            queue()
        self.capturing = None
        return lambda: [call() for call in calls] and None


def ends(costs: Any) -> tuple[Lead, Recorder, Recorder]:
    devices = Recorder(), Recorder()
    return Lead(devices, costs), *devices  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [0, 1])
def test_calls_ahead_are_counted_in_submissions(end: int) -> None:
    """Of either end, and only those that the other has not met."""
    lead, *_ = ends(MEMOP)
    for _ in range(MOST // 2):
        lead.queue(end)
    with pytest.raises(
        QwenRawError, match=f"would be {MOST // 2 + 1} hand-overs ahead of {('wait', 'put')[end]}, 512 sub"
    ):
        lead.queue(end)
    for _ in range(10):
        lead.queue(1 - end)
    for _ in range(10):
        lead.queue(end)
    with pytest.raises(QwenRawError, match="hand-overs ahead"):
        lead.queue(end)


def test_a_graph_is_refused_when_it_is_launched() -> None:
    """Every stream operation of it begins a submission; kernels of one graph are one. It is counted at each launch."""
    lead, producer, consumer = ends(MEMOP)
    large = producer.graph(lambda: lead.queue(0), 768)
    for _ in range(2):  # what was refused is not counted
        with pytest.raises(QwenRawError, match="would be 768 hand-overs ahead of wait, 1537 submissions"):
            large()
    put, wait = producer.graph(lambda: lead.queue(0), 240), consumer.graph(lambda: lead.queue(1), 240)
    for _ in range(5):
        put()
        wait()
    put()
    with pytest.raises(QwenRawError, match="would be 480 hand-overs ahead"):
        put()
    kernels, producer, _ = ends(KERNEL)
    put = producer.graph(lambda: kernels.queue(0), 768)
    for _ in range(MOST):
        put()
    with pytest.raises(QwenRawError, match="ahead of wait, 511 submissions"):
        put()


def test_an_end_that_follows_is_never_refused() -> None:
    """However much it queues: what it waits for has been queued."""
    lead, producer, consumer = ends((KERNEL[0], MEMOP[1]))
    producer.graph(lambda: lead.queue(0), 3000)()
    consumer.graph(lambda: lead.queue(1), 3000)()
    for _ in range(MOST):
        lead.queue(0)


def test_when_queued(dev: Any) -> None:
    """At once, or before each launch of what is captured; what raises leaves nothing of that launch queued."""
    calls: list[object] = []
    x = dev.zeros((4,), F32)

    def call() -> None:
        calls.append(dev.capturing)
        if len(calls) == 4:
            raise QwenRawError("no more")

    dev.when_queued(call)
    with dev.capture() as capture:
        token = dev.capturing
        dev.when_queued(call)
        x.fill(1)
        assert dev.capturing is token is not None
    assert calls == [None]
    capture.graph.launch()
    capture.graph.launch()
    assert calls == [None] * 3
    x.fill(0)
    with pytest.raises(QwenRawError, match="no more"):
        capture.graph.launch()
    np.testing.assert_array_equal(x.download(), np.zeros(4, np.float32))
    with dev.capture() as again:
        assert dev.capturing is not token
    for graph in (capture.graph, again.graph):
        graph.close()


def test_a_channel_keeps_nothing_of_a_closed_graph_alive(dev: Any) -> None:
    """What counts its launches goes with it, without the collector."""
    lead, x = Lead((dev, dev), KERNEL), dev.zeros((4,), F32)
    owner = weakref.ref(x.owner)
    gc.collect()
    gc.disable()
    try:
        with dev.capture() as capture:
            lead.queue(0)
            x.fill(0)
        del x
        assert owner() is not None
        capture.graph.launch()
        dev.synchronize()
        capture.graph.close()
        del capture
        assert owner() is None
    finally:
        gc.enable()
