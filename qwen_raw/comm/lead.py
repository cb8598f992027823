"""How far one end of a channel is queued ahead of the other, and how far it may be.

What waits for the other end stays in its stream's queue. A stream holds HELD submissions: a launch or a stream
operation is one; a graph is one, and every stream operation in it begins another. The next one makes the host wait
inside the launch, and if the other end's work was to be queued by that host, it waits for ever. (When the device gives
up meanwhile, its driver may fail with the process, so a deadline does not help.) `tests/driver/test_gpu.py` has the
figures, `docs/handover.md` how this was found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from qwen_raw.device import Device
from qwen_raw.errors import QwenRawError

HELD = 1020  # submissions that a stream takes while it is held: H200, driver 580
MOST = HELD // 2  # of one channel at one end: streams have other work too
NAMES = ("put", "wait")


@dataclass(slots=True)
class _Batch:
    """Hand-overs at one end that are queued together: one call, or a graph's."""

    capture: object | None
    handovers: int = 0
    submissions: int = 0


@dataclass(slots=True)
class _End:
    """What one end has queued."""

    device: Device
    cost: tuple[int, int]  # submissions of a hand-over: called eagerly, in a graph
    handovers: int = 0  # ever
    ahead: deque[tuple[int, int]] = field(default_factory=deque)  # (`handovers` then, submissions) not met yet
    capturing: _Batch | None = None


class Lead:
    """Both ends of one channel."""

    def __init__(self, devices: tuple[Device, Device], costs: tuple[tuple[int, int], tuple[int, int]]) -> None:
        """Producer's and consumer's. `costs`: submissions of a hand-over at each, eager and in a graph."""
        self._ends = tuple(_End(device, cost) for device, cost in zip(devices, costs, strict=True))

    def queue(self, end: int) -> None:
        """A hand-over is about to be queued, or captured, at an end: 0 the producer's, 1 the consumer's.

        Raises QwenRawError, now or when the graph is launched, if the host could come to wait for itself.
        """
        mine = self._ends[end]
        capture = mine.device.capturing
        if capture is None:
            mine.device.when_queued(self._meeting(end, _Batch(None, 1, mine.cost[0])))
            return
        batch = mine.capturing
        if batch is None or batch.capture is not capture:
            batch = mine.capturing = _Batch(capture, 0, 1)
            mine.device.when_queued(self._meeting(end, batch))
        batch.handovers += 1
        batch.submissions += mine.cost[1]

    def _meeting(self, end: int, batch: _Batch) -> Callable[[], None]:
        return lambda: self._queued(end, batch)

    def _queued(self, end: int, batch: _Batch) -> None:
        mine, other = self._ends[end], self._ends[1 - end]
        while mine.ahead and mine.ahead[0][0] <= other.handovers:
            mine.ahead.popleft()
        total = mine.handovers + batch.handovers
        held = sum(submissions for _, submissions in mine.ahead) + batch.submissions
        if total > other.handovers and held > MOST:
            one, two = NAMES[end], NAMES[1 - end]
            raise QwenRawError(
                f"{one} would be {total - other.handovers} hand-overs ahead of {two}, {held} submissions in a stream "
                f"that is held: it takes {HELD}, then the host waits; queue {two} in between, at the latest after "
                f"{MOST} submissions (a stream operation in a graph counts as two)"
            )
        mine.handovers = total
        if total > other.handovers:
            mine.ahead.append((total, batch.submissions))
