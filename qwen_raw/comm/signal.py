"""Put-with-signal: one device hands payloads to another, in order, without the host (protocol: cuda_src/signal.cu).

    channel = SignalChannel(producer, consumer, payload_bytes)
    channel.put(payload)   # on the producer's stream; waits on the device while all slots are full
    channel.wait(payload)  # on the consumer's stream; what follows on it sees the payload

Two forms. "kernel": the consumer's kernel polls the doorbell, which the producer's kernel rings: a fence at system
scope and a release store. "memop": the consumer's stream waits for the doorbell (cuStreamWaitValue32), so that nothing
runs meanwhile. Its doorbell is rung by the producer's kernel in the same way (`ring` "release"), or by a
cuStreamWriteValue32 behind a kernel without a fence ("node"): one of the two, as both order the same stores.

Two shapes, by the link: "push" stores payloads in the consumer's memory, so that only writes cross the link; "pull"
leaves them with the producer until the consumer loads them, which is refused where the link is not NVLink: loads over
PCIe are slow. "auto" pushes.

Both ends can be captured and replayed, and neither needs a node that resets anything. A memop's address is fixed when
it is captured: graphs of the "memop" form have a whole number of rotations (`slots` hand-overs, or twice as many, …).
One that has not fails on the device, by name, not with a torn payload.

Neither end may be queued far ahead of the other: qwen_raw/comm/lead.py refuses what could make the host wait.
"""

from __future__ import annotations

from typing import Literal, get_args

from qwen_raw.comm.lead import Lead
from qwen_raw.comm.topology import require_links
from qwen_raw.device import Buffer, Device
from qwen_raw.driver.check import DriverError
from qwen_raw.driver.device import CudaDevice
from qwen_raw.driver.probe import peer_paths
from qwen_raw.driver.stream import Stream, Wait
from qwen_raw.errors import UsageError
from qwen_raw.kernels.signal import (
    ARMED,
    KERNELS,
    MAGNITUDE,
    RUNG,
    SLOTS,
    STEM,
    Pieces,
    SignalEnds,
    signal_fetch,
    signal_put,
    signal_ring,
    signal_store,
    signal_take,
)

Form = Literal["auto", "kernel", "memop"]
Ring = Literal["release", "node"]
Shape = Literal["auto", "push", "pull"]
LIMIT_NS = 2_000_000_000


class SignalChannel:
    """A one-way channel of payloads between the main streams of two devices, which may share a GPU.

    Payloads may differ in size; what one end puts is as long as what the other waits for. The "memop" form's wait has
    no deadline: queue it only when the put that it waits for is certain to be queued.
    """

    def __init__(
        self,
        producer: Device,
        consumer: Device,
        payload_bytes: int,
        slots: int = SLOTS,
        *,
        form: Form = "auto",
        ring: Ring = "release",
        shape: Shape = "auto",
        ranks: tuple[int, int] = (0, 1),
        limit_ns: int = LIMIT_NS,
    ) -> None:
        """payload_bytes: of the largest payload, a multiple of 16. `slots`: hand-overs that the producer may be ahead.

        `form` "auto" is "kernel", the faster one. `ranks`: what messages call the two. `limit_ns`: a kernel that waits
        longer ends with an error; 0: never. Synchronises both devices.
        Raises UsageError for what these two cannot do, QwenRawError without a peer path.
        """
        for name, value, choices in (("form", form, Form), ("ring", ring, Ring), ("shape", shape, Shape)):
            if value not in get_args(choices):
                raise UsageError(f"{name} {value!r} is not one of {', '.join(get_args(choices))}")
        self.form: Form = "kernel" if form == "auto" else form
        if self.form == "kernel" and ring == "node":
            raise UsageError('ring "node" belongs to form "memop": a kernel that polls is rung by a release store')
        self.shape: Shape = "push" if shape == "auto" else shape
        if self.shape == "pull":
            _require_nvlink(producer, consumer)
        self.ring: Ring = ring
        self.slots = slots
        if producer.kind == "cuda":
            require_links((producer, consumer))
        producer.enable_peer(consumer)
        consumer.enable_peer(producer)
        for dev in (producer, consumer):
            for name in KERNELS:  # before one of them waits: loading may wait for what runs
                dev.kernel(STEM, name)
        self._ends = SignalEnds.create(
            producer, consumer, payload_bytes, ranks=ranks, count=slots, pulled=self.shape == "pull", limit_ns=limit_ns
        )
        self._queued = [0, 0]  # hand-overs queued or captured at the producer, at the consumer
        self.writes_by_node = False
        if self.form == "memop":
            self._streams = (_stream(producer), _stream(consumer))
            self._flush = _flushes(producer, consumer)
            self.writes_by_node = ring == "node" and self._may_write()
        put = (2, 2) if self.writes_by_node else (1 if ring == "release" else 2, 0)
        self._lead = Lead((producer, consumer), (put, (2, 2) if self.form == "memop" else (1, 0)))

    def put(self, payload: Buffer | Pieces, *, pdl: bool = False) -> None:
        """Queue on the producer: hand over `payload`, up to payload_bytes; it may be overwritten by what follows.

        `pdl`: as a dependent launch, which saves part of its latency; not beside a stream operation, and not where the
        two share a GPU, whose room blocks that wait would take from those that they wait for.
        Raises QwenRawError, here or when a graph is launched, where too much would be queued ahead of the consumer.
        """
        slot = self._next(0)
        if self.ring == "release":
            signal_put(self._ends, payload, pdl=pdl)
            return
        signal_store(self._ends, payload, slot)
        if self.writes_by_node:
            self._streams[0].write_value32(self._ends.doorbell(slot).ptr, RUNG)
        else:
            signal_ring(self._ends, slot)

    def wait(self, payload: Buffer | Pieces, *, pdl: bool = False) -> None:
        """Queue on the consumer: hold its stream until the next hand-over, and copy that to `payload`.

        `pdl`: as a dependent launch, see `put`; of form "kernel".
        Raises QwenRawError, here or when a graph is launched, where too much would be queued ahead of the producer.
        """
        slot = self._next(1)
        if self.form == "kernel":
            signal_take(self._ends, payload, pdl=pdl)
            return
        condition = Wait.AND | Wait.FLUSH if self._flush else Wait.AND
        self._streams[1].wait_value32(self._ends.doorbell(slot).ptr, MAGNITUDE, condition)
        signal_fetch(self._ends, payload, slot)

    def fault(self) -> str | None:
        """After a launch has failed: who waited for whom in vain, or which hand-over met the wrong slot."""
        for limit in self._ends.limits:
            said = limit.fault()
            if said is None:
                continue
            if int(limit.ring.words[0]) >> 32 == 0:
                k = int(limit.ring.words[1]) & 0xFFFFFFFF
                return (
                    f"hand-over {k} does not belong to the slot that its stream operation names: "
                    f"graphs of form memop need a multiple of {self.slots} hand-overs"
                )
            return said
        return None

    def _next(self, end: int) -> int:
        """The slot of the next hand-over at one end: they are counted from 1."""
        self._lead.queue(end)
        self._queued[end] += 1
        return self._queued[end] % self.slots

    def _may_write(self) -> bool:
        """Whether the producer's stream may write the consumer's words: refused for other GPUs since CUDA 13.1."""
        try:
            self._streams[0].write_value32(self._ends.doorbell(0).ptr, ARMED)  # as it is
        except DriverError as error:
            if error.name not in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"):
                raise
            return False
        self._streams[0].synchronize()
        return True


def _stream(dev: Device) -> Stream:
    if not isinstance(dev, CudaDevice):
        raise UsageError(f'{dev.name} has no stream operations: use form "kernel"')
    return dev.stream


def _flushes(producer: Device, consumer: Device) -> bool:
    """Whether to ask for a flush: only where remote writes arrive, and where the device says that it can."""
    return producer.ordinal != consumer.ordinal and _stream(consumer).memops.flush


def _require_nvlink(producer: Device, consumer: Device) -> None:
    """Loads are for NVLink, for one GPU, and for simulated ranks."""
    if producer.kind == "sim" or producer.ordinal == consumer.ordinal:
        return
    paths = peer_paths(sorted({producer.ordinal, consumer.ordinal}))
    path = next(p for p in paths if (p.source, p.target) == (consumer.ordinal, producer.ordinal))
    if not path.nvlink:
        raise UsageError(
            f'GPU {consumer.ordinal} does not reach GPU {producer.ordinal} over NVLink: shape "pull" would load over '
            'PCIe, use "push"'
        )
