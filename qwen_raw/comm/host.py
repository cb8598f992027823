"""Path "host": ranks meet on the host, which waits for all of them twice a message. The baseline."""

from __future__ import annotations

from collections.abc import Sequence

from qwen_raw.device import Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.allreduce_host import allreduce_host, load


class Host:
    """One rank's end. A sum is made when the last rank has asked for it: until then the others' work stands still."""

    path = "host"

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank = rank
        self._meeting = meeting

    @staticmethod
    def create(devices: Sequence[Device]) -> list[Host]:
        """All ranks' ends."""
        load(devices)
        meeting = Meeting(devices)
        return [Host(rank, meeting) for rank in range(len(devices))]

    def add(self, h: Buffer, partial: Buffer, *, pdl: bool = False) -> None:
        """See Reducer. Not in a graph; every rank must ask for one sum before any asks for the next."""
        del pdl  # its launches follow a wait of the host
        self._meeting.arrive(self._rank, h, partial)

    def fault(self) -> str | None:
        """None: no kernel waits for another."""
        return None


class Meeting:
    """What all ranks' ends share."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = list(devices)
        self._arrived: dict[int, tuple[Buffer, Buffer]] = {}

    def arrive(self, rank: int, h: Buffer, partial: Buffer) -> None:
        """One rank's call; the last one's sums on all ranks."""
        missing = [r for r in range(len(self._devices)) if r not in self._arrived]
        require(rank in missing, f"rank {rank} asks for a sum before rank {missing[0]} has asked for the last one")
        require(
            self._devices[rank].owns(h) and self._devices[rank].owns(partial),
            f"{h!r} and {partial!r} are not both of rank {rank}'s device",
        )
        self._arrived[rank] = (h, partial)
        if len(missing) > 1:
            return
        calls = [self._arrived[r] for r in range(len(self._devices))]
        self._arrived = {}
        for dev in self._devices:  # every rank has written its vector
            dev.synchronize()
        for dev, (own, _) in zip(self._devices, calls, strict=True):
            allreduce_host(dev, own, [other for _, other in calls])
        for dev in self._devices:  # every rank has read the others'
            dev.synchronize()
