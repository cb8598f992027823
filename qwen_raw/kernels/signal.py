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
THREADS = 512  # of a block at the most: a thread a pack
BLOCKS = 32  # at the most: they poll, perhaps on a GPU that the other end needs too


@dataclass(frozen=True, slots=True)
class Pieces:
    """A payload that lies in pieces of equal length, as rows of a cache do: bytes are multiples of 16."""

    buffer: Buffer  # from the first byte of the first piece on
    count: int
    nbytes: int  # of a piece
    stride: int  # bytes from one piece to the next

    def __post_init__(self) -> None:
        require(
            self.count > 0
            and 0 < self.nbytes <= self.stride
            and self.nbytes % 16 == self.stride % 16 == 0
            and (self.count - 1) * self.stride + self.nbytes <= self.buffer.nbytes,
            f"{self.count} pieces of {self.nbytes} bytes, {self.stride} apart, in {self.buffer.nbytes} bytes: "
            "they must lie in it, apart from each other, in whole 16-byte packs",
        )


@dataclass(frozen=True, slots=True)
class SignalEnds:
    """Both ends of a one-way channel; one stream an end."""

    producer: Device
    consumer: Device
    ranks: tuple[int, int]  # producer's, consumer's: for messages
    packs: int  # of the largest payload: 16 bytes each
    count: int  # slots
    slots: Buffer  # u32 [count, 1 + packs, 4]: payloads; the consumer's, or the producer's if pulled
    bells: Buffer  # consumer: the same shape; the first word of each slot is its doorbell, armed; `slots` if pushed
    credit: Buffer  # producer: u32 [1] hand-overs that the consumer has finished
    put_number: Buffer  # producer: u32 [1]
    take_number: Buffer  # consumer: u32 [1]
    arrived: tuple[Buffer, Buffer]  # producer, consumer: u32 [1] blocks of a launch, zero between launches
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
        """A fresh channel, armed and synchronised. `payload_bytes`: of the largest payload.

        `pulled`: payloads stay on the producer until they are taken.
        """
        require(
            0 < payload_bytes < 1 << 34 and payload_bytes % 16 == 0,
            f"a payload of {payload_bytes} bytes is not whole 16-byte packs, less than 16 GiB",
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
            (producer.zeros((1,), U32), consumer.zeros((1,), U32)),
            (PollLimit.create(producer, limit_ns), PollLimit.create(consumer, limit_ns)),
        )
        producer.synchronize()
        consumer.synchronize()
        return ends

    def doorbell(self, slot: int) -> Buffer:
        """u32 [1] of a slot."""
        return self.bells.view((1,), slot * (1 + self.packs) * 4)


def _payload(ends: SignalEnds, payload: Buffer | Pieces) -> tuple[Buffer, int, int, int]:
    """(memory, packs, packs of a piece, packs from one piece to the next)."""
    whole = payload if isinstance(payload, Pieces) else Pieces(payload, 1, payload.nbytes, payload.nbytes)
    nbytes = whole.count * whole.nbytes
    require(
        nbytes <= 16 * ends.packs and whole.buffer.ptr % 16 == 0,
        f"payload of {nbytes} bytes at {whole.buffer.ptr:#x}: the channel takes {16 * ends.packs}, 16-byte aligned",
    )
    return whole.buffer, nbytes // 16, whole.nbytes // 16, whole.stride // 16


def geometry(packs: int) -> tuple[int, int]:
    """(blocks, threads) that move so many packs."""
    threads = min(THREADS, (packs + 31) // 32 * 32)
    return min(BLOCKS, (packs + threads - 1) // threads), threads


def _launch(
    ends: SignalEnds,
    name: str,
    payload: Buffer | Pieces,
    slot: int | None,
    grid: tuple[int | None, int | None],
    pdl: bool,
) -> None:
    """A kernel beside a stream operation is told the slot. `grid`: blocks and threads, None for the usual ones."""
    end = 0 if name in ("signal_put", "signal_store") else 1
    dev = (ends.producer, ends.consumer)[end]
    memory, packs, piece, stride = _payload(ends, payload)
    bells = [] if name == "signal_store" else [np.uint64(ends.bells.ptr)]
    number = (ends.put_number, ends.take_number)[end]
    which = [] if slot is None else [np.uint32(slot)]
    dims = [np.int32(x) for x in (ends.ranks[end], ends.ranks[1 - end], ends.packs, packs, piece)]
    args: list[Arg] = [memory, np.uint64(ends.slots.ptr), *bells, ends.credit, number, ends.arrived[end]]
    args += [np.uint32(ends.count), *which, *dims, np.int64(stride), ends.limits[end].struct()]
    blocks, threads = geometry(packs)
    dev.launch(dev.kernel(STEM, name), (grid[0] or blocks, 1, 1), (grid[1] or threads, 1, 1), args, pdl=pdl)


def signal_put(
    ends: SignalEnds,
    payload: Buffer | Pieces,
    *,
    blocks: int | None = None,
    threads: int | None = None,
    pdl: bool = False,
) -> None:
    """On the producer: hand `payload` over. Waits on the device while all slots hold what is not taken yet."""
    _launch(ends, "signal_put", payload, None, (blocks, threads), pdl)


def signal_store(
    ends: SignalEnds, payload: Buffer | Pieces, slot: int, *, blocks: int | None = None, threads: int | None = None
) -> None:
    """On the producer: `payload` into `slot`, whose doorbell has to be rung by what follows on the stream."""
    _launch(ends, "signal_store", payload, slot, (blocks, threads), False)


def signal_ring(ends: SignalEnds, slot: int) -> None:
    """On the producer: ring the doorbell of `slot`, after everything before it on the stream."""
    dev = ends.producer
    dev.launch(dev.kernel(STEM, "signal_ring"), (1, 1, 1), (1, 1, 1), [np.uint64(ends.doorbell(slot).ptr)])


def signal_take(
    ends: SignalEnds,
    payload: Buffer | Pieces,
    *,
    blocks: int | None = None,
    threads: int | None = None,
    pdl: bool = False,
) -> None:
    """On the consumer: wait on the device for the next hand-over, copy it to `payload`, free its slot."""
    _launch(ends, "signal_take", payload, None, (blocks, threads), pdl)


def signal_fetch(
    ends: SignalEnds, payload: Buffer | Pieces, slot: int, *, blocks: int | None = None, threads: int | None = None
) -> None:
    """On the consumer, whose stream has waited for the doorbell of `slot`: the rest of signal_take."""
    _launch(ends, "signal_fetch", payload, slot, (blocks, threads), False)
