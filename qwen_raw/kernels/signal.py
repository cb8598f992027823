"""cuda_src/signal.cu: a payload and a doorbell from one rank to another, slots in rotation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_raw.device import U32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.peers import PollLimit

STEM = "signal"
KERNELS = ("signal_put", "signal_store", "signal_ring", "signal_take", "signal_fetch")
SLOTS = 3
ARMED = 0x80000000  # a doorbell that has not been rung
MAGNITUDE = 0x7FFFFFFF  # a rung doorbell has one of these bits
RUNG = 1  # what signal_ring writes
THREADS = 256


@dataclass(frozen=True, slots=True)
class SignalEnds:
    """Both ends of a one-way channel; one stream an end."""

    producer: Device
    consumer: Device
    ranks: tuple[int, int]  # producer's, consumer's: for messages
    packs: int  # payload, in 16-byte packs
    count: int  # slots
    slots: Buffer  # u32 [count, 1 + packs, 4]: payloads; the consumer's, or the producer's if pulled
    bells: (
        Buffer  # consumer: u32 [count, 1 + packs, 4]; first word of each slot is its doorbell, armed; `slots` if pushed
    )
    credit: Buffer  # producer: u32 [1] hand-overs that the consumer has finished
    put_number: Buffer  # producer: u32 [1]
    take_number: Buffer  # consumer: u32 [1]
    limits: tuple[PollLimit, PollLimit]

    @staticmethod
    def create(
        producer: Device,
        consumer: Device,
        payload_bytes: int,
        *,
        ranks: tuple[int, int] = (0, 1),
        count: int = SLOTS,
        pulled: bool = False,
        limit_ns: int,
    ) -> SignalEnds:
        """A fresh channel, armed and synchronised. `pulled`: payloads stay on the producer until they are taken."""
        require(
            payload_bytes > 0 and payload_bytes % 16 == 0,
            f"a payload of {payload_bytes} bytes is not whole 16-byte packs",
        )
        require(count > 0, f"a channel of {count} slots")
        bells = np.zeros((count, 1 + payload_bytes // 16, 4), np.uint32)
        bells[:, 0, 0] = ARMED
        armed = consumer.array(bells)
        ends = SignalEnds(
            producer,
            consumer,
            ranks,
            payload_bytes // 16,
            count,
            producer.zeros(bells.shape, U32) if pulled else armed,
            armed,
            producer.zeros((1,), U32),
            producer.zeros((1,), U32),
            consumer.zeros((1,), U32),
            (PollLimit.create(producer, limit_ns), PollLimit.create(consumer, limit_ns)),
        )
        producer.synchronize()
        consumer.synchronize()
        return ends

    def doorbell(self, slot: int) -> Buffer:
        """u32 [1] of a slot."""
        return self.bells.view((1,), slot * (1 + self.packs) * 4)


def _payload(ends: SignalEnds, payload: Buffer) -> None:
    require(
        payload.nbytes == 16 * ends.packs and payload.ptr % 16 == 0,
        f"payload of {payload.nbytes} bytes at {payload.ptr:#x}: the channel takes {16 * ends.packs}, 16-byte aligned",
    )


def _launch(ends: SignalEnds, name: str, args: list[Arg], slot: int | None, threads: int, pdl: bool) -> None:
    """`args`: as far as `number`; a kernel beside a stream operation is told the slot."""
    end = 0 if name in ("signal_put", "signal_store") else 1
    dev = (ends.producer, ends.consumer)[end]
    which: list[Arg] = [] if slot is None else [np.uint32(slot)]
    dims = [np.int32(x) for x in (ends.ranks[end], ends.ranks[1 - end], ends.packs)]
    args = [*args, np.uint32(ends.count), *which, *dims, ends.limits[end].struct()]
    dev.launch(dev.kernel(STEM, name), (1, 1, 1), (threads, 1, 1), args, pdl=pdl)


def signal_put(ends: SignalEnds, payload: Buffer, *, threads: int = THREADS, pdl: bool = False) -> None:
    """On the producer: hand `payload` over. Waits on the device while all slots hold what is not taken yet."""
    _payload(ends, payload)
    memory = [np.uint64(ends.slots.ptr), np.uint64(ends.bells.ptr)]
    _launch(ends, "signal_put", [payload, *memory, ends.credit, ends.put_number], None, threads, pdl)


def signal_store(ends: SignalEnds, payload: Buffer, slot: int, *, threads: int = THREADS) -> None:
    """On the producer: `payload` into `slot`, whose doorbell has to be rung by what follows on the stream."""
    _payload(ends, payload)
    args: list[Arg] = [payload, np.uint64(ends.slots.ptr), ends.credit, ends.put_number]
    _launch(ends, "signal_store", args, slot, threads, False)


def signal_ring(ends: SignalEnds, slot: int) -> None:
    """On the producer: ring the doorbell of `slot`, after everything before it on the stream."""
    dev = ends.producer
    dev.launch(dev.kernel(STEM, "signal_ring"), (1, 1, 1), (1, 1, 1), [np.uint64(ends.doorbell(slot).ptr)])


def signal_take(ends: SignalEnds, payload: Buffer, *, threads: int = THREADS, pdl: bool = False) -> None:
    """On the consumer: wait on the device for the next hand-over, copy it to `payload`, free its slot."""
    _payload(ends, payload)
    memory = [np.uint64(ends.slots.ptr), np.uint64(ends.bells.ptr)]
    _launch(ends, "signal_take", [payload, *memory, ends.credit, ends.take_number], None, threads, pdl)


def signal_fetch(ends: SignalEnds, payload: Buffer, slot: int, *, threads: int = THREADS) -> None:
    """On the consumer, whose stream has waited for the doorbell of `slot`: the rest of signal_take."""
    _payload(ends, payload)
    memory = [np.uint64(ends.slots.ptr), np.uint64(ends.bells.ptr)]
    _launch(ends, "signal_fetch", [payload, *memory, ends.credit, ends.take_number], slot, threads, False)
