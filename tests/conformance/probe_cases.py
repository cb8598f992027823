"""What each probe is given, and what NumPy says must come out: the third opinion beside GPU and simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from conformance.machines import LIMIT_NS, Array, Machine, Output

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f16_to_f32, f32_to_bf16, f32_to_e4m3
from qwen_raw.device import F32, U32, U64

# An outcome is (what the machine gave, what NumPy expects); the tolerance is the expectation's.
Outcome = tuple[Output, Output]
Run = Callable[[Machine, np.random.Generator], Outcome]
ODD = 331  # elements: a tail in every block


@dataclass(frozen=True)
class Probe:
    """One way to exercise the wrapper `wrapper`."""

    wrapper: str
    run: Run
    variant: str = ""
    gpu: bool = True  # also asked of a GPU

    @property
    def id(self) -> str:
        return f"{self.wrapper}-{self.variant}" if self.variant else self.wrapper


def words(rng: np.random.Generator, *shape: int) -> Array:
    """uint32 of any bits, those of special floats among them."""
    values = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 1, 0x807FFFFF, 0xFFFFFFFF], np.uint32)
    values.reshape(-1)[: special.size] = special
    return values


def floats(rng: np.random.Generator, n: int) -> Array:
    """float32 of every magnitude, and the borders of bf16 and f16: ties, subnormals, overflow, infinities, NaN."""
    edges: list[float] = [
        0.0,
        1.0,
        65504.0,
        65519.996,
        65520.0,
        7e4,
        3.3e38,
        3.4028235e38,
        1e-45,
        1.1754942e-38,
        9.2e-41,
        np.inf,
    ]
    edges += [
        2.0**-14,
        2.0**-24,
        2.0**-25,
        2.0**-25 * 1.5,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
    ]
    edges += [np.nan, 5.9604645e-08, 2.9e-08, 6.1e-05, 2049.0, 2051.0]
    fixed = np.array([*edges, *(-x for x in edges)], np.float32)
    scaled = rng.standard_normal(n - fixed.size) * 2.0 ** rng.integers(-150, 128, n - fixed.size)
    with np.errstate(over="ignore"):
        return np.concatenate([fixed, scaled.astype(np.float32)])


def copies(name: str, lanes: int, dtype: np.dtype[Any] = U32) -> Probe:
    """A load or a store: every word arrives as it was, whatever its bits."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        bits = words(rng, ODD, lanes * dtype.itemsize // 4).view(dtype)
        out = machine.dev.zeros(bits.shape, dtype)
        machine.run(name, [out, machine.dev.array(bits), np.int32(ODD)])
        got = out.download()
        return Output(got.view(U32)), Output(bits.view(U32))

    return Probe(name, run)


def host_words(machine: Machine, rng: np.random.Generator) -> Outcome:
    """64-bit release stores into host memory: the id ring's way."""
    bits = words(rng, 64, 2).view(U64).reshape(64)
    ring = machine.dev.host_ring(64)
    machine.run("st_release_sys_u64", [ring.buffer, machine.dev.array(bits), np.int32(64)])
    machine.finish()
    return Output(ring.words.copy()), Output(bits)


def reduction(machine: Machine, rng: np.random.Generator) -> Outcome:
    """Sums of 32-bit words that wrap, several threads and blocks on each cell."""
    bits, cells = words(rng, 1000), 5
    sums = machine.dev.zeros((cells,), U32)
    machine.run("red_release_sys_add_u32", [sums, machine.dev.array(bits), np.int32(1000), np.int32(cells)])
    want = np.array([int(bits[i::cells].sum(dtype=np.uint64)) & 0xFFFFFFFF for i in range(cells)], np.uint32)
    return Output(sums.download()), Output(want)


def increments(machine: Machine, rng: np.random.Generator) -> Outcome:
    """Each counter's old values, sorted, and its end: wraps at its limit, from above it, at 0, past 2^32 - 1."""
    starts, limits, n = [0, 9, 100, 3, 0xFFFFFFF0], [6, 6, 6, 0, 0xFFFFFFFF], 1000
    cells = len(starts)
    old, counters = machine.dev.zeros((n,), U32), machine.dev.array(np.array(starts, np.uint32))
    args = [old, counters, machine.dev.array(np.array(limits, np.uint32)), np.int32(n), np.int32(cells)]
    machine.run("atom_inc_acq_rel_gpu", args)
    seen, ends = old.download(), counters.download()
    got, want = [], []
    for cell, (value, limit) in enumerate(zip(starts, limits, strict=True)):
        history = []
        for _ in range(n // cells):
            history.append(value)
            value = 0 if value >= limit else value + 1
        want += [*sorted(history), value]
        got += [*sorted(seen[cell::cells].tolist()), int(ends[cell])]
    return Output(np.array(got, np.uint32)), Output(np.array(want, np.uint32))


def chain(machine: Machine, rng: np.random.Generator, link: str = "griddep_wait") -> Outcome:
    """A slow producer that lets its successor start early, then dependent links; each sees all of the one before."""
    n, links, dev = 1000, 4, machine.dev
    bits = words(rng, n)
    source = dev.array(bits)
    rounds = []
    for _ in range(3):
        stages = [dev.zeros((n,), U32) for _ in range(links + 1)]
        dev.synchronize()
        machine.run("griddep_launch", [stages[0], source, np.int32(n), np.uint64(50_000)], grid=8)
        for before, after in pairwise(stages):
            machine.run(link, [after, before, np.int32(n)], grid=8, pdl=True)
        rounds.append([stage.download() for stage in stages])
    want = np.array([[bits + np.uint32(1 + stage) for stage in range(links + 1)]] * 3)
    return Output(np.array(rounds)), Output(want)


def message(wrapper: str, grid: int) -> Probe:
    """What was written before the release is there after the acquire. Three rounds with new payloads."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        dev, rounds, got = machine.dev, [words(rng, ODD) for _ in range(3)], []
        limit = [] if wrapper == "atom_inc_acq_rel_gpu" else [np.uint64(LIMIT_NS)]
        for bits in rounds:
            out, payload, flag = dev.zeros((ODD,), U32), dev.zeros((ODD,), U32), dev.zeros((1,), U32)
            args = [out, payload, flag, dev.array(bits), np.int32(ODD), *limit]
            machine.run(f"{wrapper}_message", args, grid=grid)
            got.append(out.download())
        return Output(np.array(got)), Output(np.array(rounds))

    return Probe(wrapper, run, "message")


def overlap(machine: Machine, rng: np.random.Generator) -> Outcome:
    """A kernel that lets its successor start hears from it while it still runs.

    Never where dependent launches do not exist (before sm_90) or are run one after another (the simulator in order).
    """
    dev = machine.dev
    heard, bell = dev.zeros((32,), U32), dev.zeros((1,), U32)
    can = dev.pdl if dev.kind == "cuda" else dev.world.seed is not None
    limit = np.uint64(LIMIT_NS if can else 1_000_000)
    machine.probe("probe_griddep_wait_early")  # loaded before its predecessor runs
    machine.run("griddep_launch_early", [heard, bell, limit], grid=1, block=32)
    machine.run("griddep_wait_early", [bell], grid=1, block=32, pdl=True)
    return Output(heard.download()), Output(np.full(32, can, np.uint32))


CLUSTER, CLUSTERS, BLOCK = 4, 3, 64


def ranks_in_clusters(machine: Machine, rng: np.random.Generator) -> Outcome:
    out = machine.dev.zeros((CLUSTERS, CLUSTER, BLOCK), U32)
    machine.run("cluster_rank", [out], grid=CLUSTERS * CLUSTER, block=BLOCK, cluster=CLUSTER)
    want = np.broadcast_to(np.arange(CLUSTER, dtype=np.uint32)[None, :, None], out.shape)
    return Output(out.download()), Output(want.copy())


def cluster_barrier(wrapper: str) -> Probe:
    """Nobody leaves the barrier before the block that is late has come to it."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        arrived, left = (machine.dev.zeros((CLUSTERS, CLUSTER * BLOCK), U64) for _ in range(2))
        args = [arrived, left, np.uint64(50_000)]
        machine.run(wrapper, args, grid=CLUSTERS * CLUSTER, block=BLOCK, cluster=CLUSTER)
        in_order = left.download().min(1) >= arrived.download().max(1)
        return Output(in_order.astype(np.uint32)), Output(np.ones(CLUSTERS, np.uint32))

    return Probe(wrapper, run)


def pushes(wrapper: str, lanes: int) -> Probe:
    """What every block of a cluster pushes is in every block's shared memory, whatever its bits."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        bits = words(rng, CLUSTERS, 1, CLUSTER, BLOCK, lanes)
        out = machine.dev.zeros((CLUSTERS, CLUSTER, CLUSTER, BLOCK, lanes), F32)
        args = [out, machine.dev.array(bits.view(F32)), np.uint64(LIMIT_NS)]
        smem = CLUSTER * BLOCK * lanes * 4 + 8
        machine.run(wrapper, args, grid=CLUSTERS * CLUSTER, block=BLOCK, cluster=CLUSTER, smem=smem)
        return Output(out.download().view(U32)), Output(np.broadcast_to(bits, out.shape).copy())

    return Probe(wrapper, run)


def transposed(machine: Machine, rng: np.random.Generator) -> Outcome:
    matrices = rng.integers(0, 1 << 16, (6, 8, 8), np.uint16)
    out = machine.dev.zeros((6, 32), U32)
    machine.run("movmatrix_trans", [out, machine.dev.array(matrices.reshape(6, -1).view(U32))], grid=3, block=64)
    return Output(out.download()), Output(np.ascontiguousarray(matrices.swapaxes(1, 2)).reshape(6, -1).view(U32))


def exponentials(machine: Machine, rng: np.random.Generator) -> Outcome:
    """2^x for borders, subnormal x, every magnitude, and the softmax's range.

    Allowed: the 2 ulp (2^-22 of the result) that CUDA states for exp2f, which is this instruction; one more for the
    simulator's own rounding; and 2^-126 where the result is within a factor of two of it, as smaller ones are flushed.
    """
    tiny = 2.0**-126
    edges = [0.0, 1.0, 0.5, 126.0, 127.0, 127.99, 128.0, 129.0, 149.0, 150.0, 1e5, 3e38, np.inf, np.nan]
    edges += [125.5, 125.999, 126.0001, 126.5, 1e-45, 1e-40, 1.1754942e-38, 1.1754944e-38, 1e-20, 1e-8, 6e-8]
    spread = rng.standard_normal(3000) * 2.0 ** rng.integers(-30, 8, 3000)
    signed = np.array([*edges, *(-x for x in edges), *spread, *rng.uniform(-30, 0, 3000)])
    x = signed.astype(np.float32)
    out = machine.dev.zeros(x.shape, F32)
    machine.run("ex2_approx", [out, machine.dev.array(x), np.int32(x.size)])
    flushed = np.where(np.abs(x) < np.float32(tiny), np.float32(0), x).astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp2(flushed)
        want = exact.astype(np.float32)
        want[exact < tiny] = 0.0
    finite = np.where(np.isfinite(exact) & (exact < 2.0**128), exact, 0.0)
    allowed = finite * (2.0**-22 + 2.0**-23) + np.where(finite < 2 * tiny, tiny, 0.0)
    return Output(out.download()), Output(want, allowed)


def reciprocals(machine: Machine, rng: np.random.Generator) -> Outcome:
    """1/x for every magnitude: an ulp, 2^-23 of the result, and half of one for the simulator's rounding."""
    x = floats(rng, 4096)
    out = machine.dev.zeros(x.shape, F32)
    machine.run("rcp_approx", [out, machine.dev.array(x), np.int32(x.size)])
    tiny = np.float32(2.0**-126)
    flushed = np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x)
    with np.errstate(divide="ignore", over="ignore"):
        exact = 1 / flushed.astype(np.float64)
        want = np.where(np.abs(exact) < tiny, np.copysign(0, exact), exact).astype(np.float32)
    finite = np.where(np.isfinite(exact), np.abs(exact), 0.0)
    return Output(out.download()), Output(want, finite * 1.5 * 2.0**-23 + np.where(finite < 2 * tiny, tiny, 0.0))


def clock(machine: Machine, rng: np.random.Generator) -> Outcome:
    """Never back, and forward within a million readings."""
    out = machine.dev.zeros((64, 2), U32)
    machine.run("global_timer_ns", [out, np.int32(64), np.int32(1_000_000)], grid=2, block=32)
    return Output(out.download()), Output(np.ones((64, 2), np.uint32))


def no_trap(machine: Machine, rng: np.random.Generator) -> Outcome:
    """A trap that is not reached changes nothing."""
    out = machine.dev.zeros((64,), U32)
    machine.run("trap", [out, np.int32(0)], grid=1)
    return Output(out.download()), Output(np.arange(64, dtype=np.uint32))


def widens(name: str, in_dtype: np.dtype[Any], lanes: int, bits: Array, values: Array) -> Probe:
    """A conversion to float32, of every pattern that there is."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        order = rng.permutation(bits.size)
        source = np.ascontiguousarray(bits[order]).view(in_dtype)
        out = machine.dev.zeros(bits.shape, F32)
        machine.run(name, [out, machine.dev.array(source), np.int32(bits.size // lanes)])
        return Output(out.download()), Output(values[order])

    return Probe(name, run)


def halves(name: str, upper: bool) -> Probe:
    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        bits = words(rng, ODD)
        out = machine.dev.zeros((ODD,), F32)
        machine.run(name, [out, machine.dev.array(bits), np.int32(ODD)])
        half = (bits >> np.uint32(16 if upper else 0)).astype(np.uint16)
        return Output(out.download()), Output(bf16_to_f32(half))

    return Probe(name, run)


def widened(name: str) -> Probe:
    """Every e4m3 pattern to f16, in any place of a word."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        codes = rng.permutation(_BITS8)
        out = machine.dev.zeros((128,), U32)
        machine.run(name, [out, machine.dev.array(codes.view(U32)), np.int32(64)])
        return Output(f16_to_f32(out.download().view(np.uint16))), Output(e4m3_to_f32(codes))

    return Probe(name, run)


def narrows(
    name: str, lanes: int, convert: Callable[[Array], Array], widen: Callable[[Array], Array], bits: type = np.uint16
) -> Probe:
    """A conversion from float32. Compared as float32, exactly: of a NaN only that it is one."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        x = rng.permutation(floats(rng, 4096))
        out = machine.dev.zeros((x.size * np.dtype(bits).itemsize // 4,), U32)
        machine.run(name, [out, machine.dev.array(x), np.int32(x.size // lanes)])
        return Output(widen(out.download().view(bits))), Output(widen(convert(x)))

    return Probe(name, run)


def to_f16(x: Array) -> Array:
    """Saturating; a NaN becomes -65504, as the minimum and maximum of a NaN and a number are the number."""
    limited = np.where(np.isnan(x), np.float32(-65504), np.clip(x, -65504, 65504)).astype(np.float32)
    return limited.astype(np.float16).view(np.uint16)


def to_f16_nan(x: Array) -> Array:
    """Saturating, infinities too; a NaN stays one."""
    return np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16)


def lane_tree(x: Array, combine: Callable[[Array, Array], Array]) -> Array:
    """What every lane holds after the butterfly over 32 lanes; x [warps, 32]."""
    lanes = np.arange(32)
    for step in (16, 8, 4, 2, 1):
        x = combine(x, x[:, lanes ^ step])
    return x


def block_tree(x: Array) -> Array:
    """block_sum over x [blocks, threads]: the warps' sums, added in order."""
    total = np.zeros(x.shape[0], np.float32)
    for sums in lane_tree(x.reshape(-1, 32), np.add)[:, 0].reshape(x.shape[0], -1).T:
        total = total + sums
    return np.repeat(total[:, None], x.shape[1], 1)


def reduces(name: str, expect: Callable[[Array], Array]) -> Probe:
    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        x = (rng.standard_normal((3, 160)) * 2.0 ** rng.integers(-20, 20, (3, 160))).astype(np.float32)
        out = machine.dev.zeros(x.shape, F32)
        machine.run(name, [out, machine.dev.array(x)], grid=3, block=160)
        return Output(out.download()), Output(expect(x))

    return Probe(name, run)


_BITS16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
_BITS8 = np.arange(256, dtype=np.uint32).astype(np.uint8)

PTX = [
    *(copies(name, 4) for name in ("ld_stream_v4", "ld_global_v4", "prefetch_l2", "ld_volatile_v4", "st_volatile_v4")),
    copies("ld_global_f2", 2, F32),
    copies("ld_global_f4", 4, F32),
    *(copies(name, n) for name, n in (("ld_once_v4", 4), ("ld_once_v2", 2), ("ld_once_u32", 1))),
    *(copies(name, 1) for name in ("ld_volatile_u32", "ld_acquire_sys_u32", "st_volatile_u32", "st_release_sys_u32")),
    copies("settle", 1),
    *(copies(name, 4) for name in ("cp_async_v4", "cp_async_commit", "cp_async_wait")),
    *(copies(name, 2) for name in ("ld_volatile_v2", "st_volatile_v2")),
    *(copies(name, 1, U64) for name in ("st_volatile_u64", "st_release_sys_u64")),
    Probe("st_release_sys_u64", host_words, "host"),
    Probe("red_release_sys_add_u32", reduction),
    Probe("atom_inc_acq_rel_gpu", increments),
    message("st_release_sys_u32", 2),
    message("red_release_sys_add_u32", 4),
    message("atom_inc_acq_rel_gpu", 4),
    Probe("griddep_launch", chain),
    Probe("griddep_launch", overlap, "early"),
    Probe("griddep_wait", chain),
    Probe("griddep_wait_with", partial(chain, link="griddep_wait_with")),
    Probe("griddep_wait", overlap, "early"),
    Probe("cluster_rank", ranks_in_clusters),
    *(cluster_barrier(name) for name in ("cluster_arrive", "cluster_wait")),
    *(pushes(name, 4) for name in ("push_init", "push_f4", "push_arrived")),
    *(pushes(name, 2) for name in ("push_expect", "push_f2")),
    pushes("push_f1", 1),
    Probe("ex2_approx", exponentials),
    Probe("rcp_approx", reciprocals),
    copies("split_halves", 1),
    narrows("cvt_f16x2_sat", 2, to_f16_nan, f16_to_f32),
    Probe("movmatrix_trans", transposed),
    Probe("global_timer_ns", clock),
    Probe("trap", no_trap),
]
CONVERSIONS = [
    halves("bf16_lo", False),
    halves("bf16_hi", True),
    widens("unpack_bf16", U32, 8, _BITS16, bf16_to_f32(_BITS16)),
    widens("unpack_f16", U32, 8, _BITS16, f16_to_f32(_BITS16)),
    widens("unpack_e4m3", U32, 4, _BITS8, e4m3_to_f32(_BITS8)),
    *(widened(name) for name in ("widen_e4m3", "widen_e4m3x4")),
    *(narrows(name, lanes, f32_to_bf16, bf16_to_f32) for name, lanes in (("pack_bf16", 2), ("pack_bf16x8", 8))),
    *(narrows(name, lanes, to_f16, f16_to_f32) for name, lanes in (("pack_f16", 2), ("pack_f16x8", 8))),
    narrows("pack_e4m3x4", 4, f32_to_e4m3, e4m3_to_f32, np.uint8),
]
REDUCTIONS = [
    reduces("warp_sum", lambda x: lane_tree(x.reshape(-1, 32), np.add).reshape(x.shape)),
    reduces("warp_max", lambda x: lane_tree(x.reshape(-1, 32), np.maximum).reshape(x.shape)),
    reduces("block_sum", block_tree),
]
