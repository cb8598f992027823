"""Sums by rows, with the norm behind them: every bit of h against NumPy, the normed rows the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comm.guarded import Guarded
from comm.ranks import Ranks
from kernel_reference import bf16_input

from loaders.dtypes import bf16_to_f32, e4m3_to_f32
from qwen_raw.device import BF16, F32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.allreduce_rows import KINDS, LONGEST, RowBuffers, RowsWorkspace, allreduce_rows, rows_of_owner
from qwen_raw.kernels.last_row import last_row
from qwen_raw.simt import run
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

LIMIT_NS = 2_000_000_000
EPS = 1e-6


class Rows:
    """Ends with buffers for `rows` rows of D, and calls with fresh shares."""

    def __init__(
        self,
        devices: list[Any],
        rng: np.random.Generator,
        rows: int,
        D: int,
        kind: str,
        *,
        over: bool = False,
        limit_ns: int = LIMIT_NS,
    ) -> None:
        """`over`: the normed rows take the shares' place."""
        self.D, self.rng, self.devices = D, rng, devices
        self.g, self.weight = bf16_input(rng, D)
        self.base = rng.standard_normal((rows, D)).astype(np.float32)
        self.gs, buffers = [dev.array(self.g) for dev in devices], []
        for dev in devices:
            share = dev.empty((rows, D), BF16)
            out = share if over else dev.empty((rows, D), KINDS[kind])
            buffers.append(
                RowBuffers(kind, share, out, dev.zeros((rows,), F32) if kind == "e4m3" else None, dev.array(self.base))
            )
        self.ends = RowsWorkspace.create(devices, buffers, limit_ns=limit_ns)

    def shares(self, T: int) -> list[np.ndarray[Any, Any]]:
        """New ones, uploaded; their values."""
        parts = [bf16_input(self.rng, T * self.D) for _ in self.ends]
        for end, (bits, _) in zip(self.ends, parts, strict=True):
            end.buffers[end.rank].share.view((T * self.D,)).upload(bits)
        return [values.astype(np.float32).reshape(T, self.D) for _, values in parts]

    def call(self, T: int, *, spread: bool = False, **options: Any) -> None:
        for end, g in zip(self.ends, self.gs, strict=True):
            allreduce_rows(end, T, self.D, None if spread else g, EPS, **options)

    def h(self, rank: int) -> np.ndarray[Any, Any]:
        return self.ends[rank].buffers[rank].h.download()  # type: ignore[no-any-return]

    def normed(self, rank: int, T: int) -> np.ndarray[Any, Any]:
        """The values of a rank's normed rows."""
        own = self.ends[rank].buffers[rank]
        bits = own.out.view((T, self.D)).download()
        if own.scale is None:
            return bits.view(np.float16).astype(np.float32) if own.kind == "f16" else bf16_to_f32(bits)
        return e4m3_to_f32(bits) * own.scale.download()[:T, None]

    def owner(self, T: int) -> np.ndarray[Any, Any]:
        return np.arange(T) // rows_of_owner(T, len(self.ends))


def in_order(h: np.ndarray[Any, Any], parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    total = np.zeros_like(parts[0])
    for part in parts:
        total += part
    return h + total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [48, 896])
def test_sums_and_normed_rows(ranks: Ranks, rng: np.random.Generator, kind: str, D: int) -> None:
    """Calls of changing numbers of rows, fewer than ranks too, and whole boxes; then one that spreads h."""
    world = len(ranks.devices)
    many = 64 * world + 3 if D == 48 else 21
    rows = Rows(ranks.devices, rng, many, D, kind, over=kind != "e4m3")
    want = rows.base.copy()
    for T in (21, 1, world, world + 1, 20, many):
        parts = rows.shares(T)
        ranks.finish()
        with ranks.together():
            rows.call(T, grid=2)
        ranks.finish()
        assert [end.limit.fault() for end in rows.ends] == [None] * world
        want[:T] = in_order(want[:T], parts)
        owner = rows.owner(T)
        for t in range(T):
            np.testing.assert_array_equal(rows.h(owner[t])[t], want[t], err_msg=f"row {t} of {T}")
        normed = want[:T] / np.sqrt((want[:T] ** 2).mean(-1, keepdims=True) + EPS) * rows.weight
        found = [rows.normed(rank, T) for rank in range(world)]
        for x in found:
            np.testing.assert_array_equal(x, found[0])
        largest = np.abs(normed).max(-1, keepdims=True)
        bound = {"f16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4}[kind] * np.abs(normed) + 2.0**-9 * largest * (
            kind == "e4m3"
        )
        assert (np.abs(found[0] - normed) <= bound * 1.01 + 1e-6).all()
        # What a rank does not own is left alone; here all are given what the owner has.
        for rank, end in enumerate(rows.ends):
            others = np.flatnonzero(owner != rank)
            before = rows.h(rank)
            assert not (before[others] == want[others]).all() or not len(others)
            end.buffers[rank].h.upload(want)
    parts = rows.shares(9)
    ranks.finish()
    with ranks.together():
        rows.call(9, spread=True)
    ranks.finish()
    want[:9] = in_order(want[:9], parts)
    for rank in range(world):
        np.testing.assert_array_equal(rows.h(rank), want)


@pytest.mark.parametrize("kind", KINDS)
def test_replays_of_a_graph(ranks: Ranks, rng: np.random.Generator, kind: str) -> None:
    """An odd number of calls, the last spreads h: replayed back to back, and with late ranks."""
    rows = Rows(ranks.devices, rng, 6, 64, kind)
    parts = rows.shares(6)
    graphs = []
    for end, g in zip(rows.ends, rows.gs, strict=True):
        with end.dev.capture() as capture:
            for weight in (g, g, None):
                allreduce_rows(end, 6, 64, weight, EPS)
        graphs.append(capture.graph)
    want = rows.base.copy()
    ranks.finish()
    with ranks.together():
        for _ in range(3):
            for rank in rng.permutation(len(graphs)).tolist():
                graphs[rank].launch()
    ranks.finish()
    for _ in range(9):
        want = in_order(want, parts)
    for rank in range(len(graphs)):
        np.testing.assert_array_equal(rows.h(rank), want)


def test_nothing_is_written_around_a_buffer(ranks: Ranks, rng: np.random.Generator) -> None:
    guarded = [Guarded(dev) for dev in ranks.devices]
    rows = Rows(guarded, rng, 19, 48, "e4m3")
    for T in (19, 1, 19):
        rows.shares(T)
        ranks.finish()
        with ranks.together():
            rows.call(T)
        ranks.finish()
    for dev in guarded:
        dev.check()


def test_requests_that_cannot_be_met(ranks: Ranks, rng: np.random.Generator) -> None:
    rows = Rows(ranks.devices, rng, 4, 48, "bf16")
    end, g = rows.ends[0], rows.gs[0]
    with pytest.raises(QwenRawError, match="5 rows of 48 elements"):
        allreduce_rows(end, 5, 48, g, EPS)
    with pytest.raises(QwenRawError, match=f"the kernel takes {LONGEST}"):
        allreduce_rows(end, 1, LONGEST + 8, None, EPS)
    with pytest.raises(QwenRawError, match="multiples of 8"):
        allreduce_rows(end, 1, 44, g, EPS)
    with pytest.raises(QwenRawError, match="the ranks' buffers differ"):
        a, b = rows.ends[0].buffers[:2]
        RowsWorkspace.create(
            ranks.devices[:2], [a, RowBuffers(b.kind, b.share.view((2, 48)), b.out, None, b.h)], limit_ns=0
        )


def test_a_rank_that_never_comes_is_named(ranks: Ranks, rng: np.random.Generator) -> None:
    """On the simulator: a trap would cost a GPU its context (tests/model/lost_rank.py has it there)."""
    if ranks.devices[0].kind == "cuda":
        pytest.skip("see lost_rank.py")
    rows, last = Rows(ranks.devices, rng, 4, 48, "bf16", limit_ns=50_000_000), len(ranks.devices) - 1
    ranks.finish()
    with ranks.together():
        rows.call(4)
    ranks.finish()
    with pytest.raises(QwenRawError, match="trap"):
        with ranks.together():
            for end, g in list(zip(rows.ends, rows.gs, strict=True))[:-1]:
                allreduce_rows(end, 4, 48, g, EPS)
        ranks.finish()
    said = [end.limit.fault() for end in rows.ends if end.limit.fault() is not None]
    assert said and all(f"waited 50 ms for rank {last} in call 3" in line for line in said)  # barriers are counted


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule(seed: int, rng: np.random.Generator) -> None:
    """Ranks that run ahead, links that hold stores back; once with every access checked for races."""
    race = seed == 0 and not run.active()  # the race checker and AddressSanitizer exclude each other
    with SimWorld(3, seed=seed, race=race, sanitize="address" if run.active() else None) as world:
        devices = [SimDevice(world=world, rank=rank) for rank in range(3)]
        rows = Rows(devices, rng, 8, 48, "bf16", over=True)
        want, T = rows.base.copy(), 8
        span, outs = np.array([0, T], np.int32), [dev.zeros((48,), F32) for dev in devices]
        spans = [dev.array(span) for dev in devices]
        for spread in (False, True):
            parts = rows.shares(T)
            world.run()
            with world.together():
                rows.call(T, spread=spread, grid=2, block=32)
                for dev, out, each, end in zip(devices, outs, spans, rows.ends, strict=True):  # at once: it has arrived
                    last_row(dev, out, end.buffers[end.rank].h, each)
            world.run()
            for t, owner in enumerate(rows.owner(T)):
                want[t] = in_order(want[t], [part[t] for part in parts])
                np.testing.assert_array_equal(rows.h(owner)[t], want[t])
        for rank, out in enumerate(outs):
            np.testing.assert_array_equal(rows.h(rank), want)
            np.testing.assert_array_equal(out.download(), want[T - 1])


@pytest.mark.parametrize("world", [2, 3, 8])
def test_parts_of_many_rows_are_whole_boxes(world: int) -> None:
    """All rows have an owner, and a chunk has room for any number of rows that is smaller."""
    parts = [rows_of_owner(T, world) for T in range(1, 64 * world + 200)]
    assert all(part * world >= T for T, part in enumerate(parts, 1))
    assert parts == sorted(parts)
    assert all(part % 64 == 0 for part in parts[64 * world - 1 :]) and parts[64 * world - 2] == 64
    assert parts[20] == -(-21 // world)
