"""cuda_src/signal.cu: a payload and a doorbell from one rank to another, three slots in rotation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_raw.device import U32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.peers import PollLimit

STEM = "signal"
SLOTS = 3
ARMED = 0x80000000  # a doorbell that has not been rung
THREADS = 256


@dataclass(frozen=True, slots=True)
class SignalEnds:
    """Both ends of a one-way channel; one stream an end."""

    producer: Device
    consumer: Device
    ranks: tuple[int, int]  # producer's, consumer's: for messages
    packs: int  # payload, in 16-byte packs
    slots: Buffer  # consumer: u32 [3, 1 + packs, 4]; first word of each slot is its doorbell, armed
    credit: Buffer  # producer: u32 [1] hand-overs that the consumer has finished
    put_number: Buffer  # producer: u32 [1]
    take_number: Buffer  # consumer: u32 [1]
    limits: tuple[PollLimit, PollLimit]

    @staticmethod
    def create(
        producer: Device, consumer: Device, payload_bytes: int, *, ranks: tuple[int, int] = (0, 1), limit_ns: int
    ) -> SignalEnds:
        """A fresh channel, armed and synchronised."""
        require(
            payload_bytes > 0 and payload_bytes % 16 == 0,
            f"a payload of {payload_bytes} bytes is not whole 16-byte packs",
        )
        slots = np.zeros((SLOTS, 1 + payload_bytes // 16, 4), np.uint32)
        slots[:, 0, 0] = ARMED
        ends = SignalEnds(
            producer,
            consumer,
            ranks,
            payload_bytes // 16,
            consumer.array(slots),
            producer.zeros((1,), U32),
            producer.zeros((1,), U32),
            consumer.zeros((1,), U32),
            (PollLimit.create(producer, limit_ns), PollLimit.create(consumer, limit_ns)),
        )
        producer.synchronize()
        consumer.synchronize()
        return ends


def _payload(ends: SignalEnds, payload: Buffer) -> None:
    require(
        payload.nbytes == 16 * ends.packs and payload.ptr % 16 == 0,
        f"payload of {payload.nbytes} bytes at {payload.ptr:#x}: the channel takes {16 * ends.packs}, 16-byte aligned",
    )


def signal_put(ends: SignalEnds, payload: Buffer, *, threads: int = THREADS, pdl: bool = False) -> None:
    """On the producer: hand `payload` over. Waits on the device while three hand-overs are not taken yet."""
    _payload(ends, payload)
    dims = [np.int32(x) for x in (*ends.ranks, ends.packs)]
    slots = np.uint64(ends.slots.ptr)
    args: list[Arg] = [payload, slots, ends.credit, ends.put_number, *dims, ends.limits[0].struct()]
    ends.producer.launch(ends.producer.kernel(STEM, "signal_put"), (1, 1, 1), (threads, 1, 1), args, pdl=pdl)


def signal_take(ends: SignalEnds, payload: Buffer, *, threads: int = THREADS, pdl: bool = False) -> None:
    """On the consumer: wait on the device for the next hand-over, copy it to `payload`, free its slot."""
    _payload(ends, payload)
    dims = [np.int32(x) for x in (ends.ranks[1], ends.ranks[0], ends.packs)]
    slots = np.uint64(ends.slots.ptr)
    args: list[Arg] = [payload, slots, ends.credit, ends.take_number, *dims, ends.limits[1].struct()]
    ends.consumer.launch(ends.consumer.kernel(STEM, "signal_take"), (1, 1, 1), (threads, 1, 1), args, pdl=pdl)
