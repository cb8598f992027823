"""Hopper's wrappers: barriers, bulk copies with their swizzle and zeros, products of warpgroups (probes_sm90.cu)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from conformance.machines import Array, Machine, Output
from conformance.probe_cases import Outcome, Probe, words

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f16_to_f32, f32_to_bf16
from qwen_raw.device import BF16, E4M3, F32, U32, BoxShape, TensorMap

ROW = 128  # bytes of a box row
E4M3_ERROR = 2.0**-12  # of the sum of magnitudes: an e4m3 product keeps about 14 bits while it adds


def addresses(machine: Machine, rng: np.random.Generator) -> Outcome:
    out = machine.dev.zeros((100,), U32)
    machine.run("shared_address", [out, np.int32(100)], grid=1, smem=1024)
    return Output(out.download()), Output(4 * np.arange(100, dtype=np.uint32))


def rounds(name: str) -> Probe:
    """Rounds of a two-phase ring among 160 threads: nobody is early or late."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        bits = words(rng, 5, 160)
        out = machine.dev.zeros(bits.shape, U32)
        machine.run(name, [out, machine.dev.array(bits), np.int32(5)], grid=1, block=160, smem=1024)
        return Output(out.download()), Output(np.roll(bits, -1, 1))

    return Probe(name, run)


def swizzle(box: Array) -> Array:
    """Rows of 128 bytes as they lie in shared memory: 16-byte piece i of row r at piece i ^ (r % 8)."""
    pieces = box.reshape(-1, 8, 16)
    out = np.empty_like(pieces)
    for r in range(len(pieces)):
        out[r, np.arange(8) ^ (r % 8)] = pieces[r]
    return out.reshape(box.shape)


def boxes(name: str, item: int, *, odd: bool = False) -> Probe:
    """A matrix whose rows and columns end inside the boxes; `odd` ones begin outside, before and behind.

    Kernels ask for no odd ones, and a GPU is not asked for them.
    """

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        dev, rows, columns, high = machine.dev, 37, 3 * ROW // item // 2 - 16 // item, 24
        data = rng.integers(0, 256, (rows, columns * item), dtype=np.uint8)
        source = dev.array(data.view(BF16 if item == 2 else E4M3))
        shape = BoxShape((columns, rows), (columns * item,), (ROW // item, high))
        pack, corners = 16 // item, [(0, 0), (ROW // item, 8), (0, 24), (ROW // item, 24)]
        if odd:
            corners = [(pack, 30), (-pack, -5), (columns, 0), (3 * pack, 17)]
        at = np.zeros((len(corners), 5), np.int32)
        at[:, :2] = corners
        padded = np.zeros((rows + 2 * high, columns * item + 4 * ROW), np.uint8)
        padded[high : high + rows, ROW : ROW + columns * item] = data
        want = []
        for x, y in at[:, :2]:
            left = ROW + x * item
            want.append(swizzle(padded[high + y : high + y + high, left : left + ROW].copy()))
        return take(machine, name, dev.tensor_map([source], shape), at, high, np.array(want))

    return Probe(name, run, f"{8 * item} bits{', odd' if odd else ''}", gpu=not odd)


def planes(machine: Machine, rng: np.random.Generator) -> Outcome:
    """Three dimensions: boxes that end inside a plane do not run into the next one."""
    dev, (depth, rows, K) = machine.dev, (3, 19, 72)
    data = rng.integers(0, 1 << 16, (depth, rows, K), dtype=np.uint16)
    shape = BoxShape((K, rows, depth), (2 * K, 2 * K * rows), (ROW // 2, 8, 2))
    corners = [(0, 0, 0), (64, 8, 1), (0, 16, 2), (64, 16, 0), (0, -5, 1)]  # the last begins before its plane
    at = np.array([(*corner, 0, 0) for corner in corners], np.int32)
    padded = np.zeros((depth + 2, rows + 16, K + 64), np.uint16)
    padded[:depth, 8 : rows + 8, :K] = data
    want = [
        swizzle(np.ascontiguousarray(padded[z : z + 2, y + 8 : y + 16, x : x + 64]).view(np.uint8).reshape(-1, ROW))
        for x, y, z, _, _ in at
    ]
    source = dev.array(data)
    return take(machine, "tma_load_3d", dev.tensor_map([source], shape), at, 16, np.array(want))


def take(machine: Machine, name: str, tensor_map: TensorMap, at: Array, rows: int, want: Array) -> Outcome:
    nbytes = rows * ROW
    out = machine.dev.zeros((len(at) * nbytes // 4,), U32)
    args = [out, tensor_map, machine.dev.array(at), np.int32(len(at)), np.int32(nbytes)]
    machine.run(name, args, grid=1, block=128, smem=nbytes + 1024)
    return Output(out.download()), Output(np.ascontiguousarray(want).view(U32).reshape(-1))


def ping_pong(machine: Machine, rng: np.random.Generator) -> Outcome:
    out = machine.dev.zeros((4, 7), U32)
    machine.run("mbarrier_arrive_at", [out, np.int32(7)], grid=4, block=64, smem=1024, cluster=2)
    return Output(out.download()), Output(np.ones((4, 7), np.uint32))


def multicast(machine: Machine, rng: np.random.Generator) -> Outcome:
    """Boxes of 16 rows from column 8 on; the matrix ends inside the second."""
    data = rng.integers(0, 1 << 16, (29, 80), dtype=np.uint16)
    padded = np.zeros((32, 72), np.uint16)
    padded[:29] = data[:, 8:]
    box = swizzle(np.ascontiguousarray(padded[:, :64]).view(np.uint8).reshape(-1, ROW))
    tensor_map = machine.dev.tensor_map([machine.dev.array(data)], BoxShape((80, 29), (160,), (64, 16)))
    out = machine.dev.zeros((2, box.size // 4), U32)
    args = [out, tensor_map, np.int32(box.size)]
    machine.run("tma_multicast_2d", args, grid=2, block=128, smem=box.size + 1024, cluster=2)
    return Output(out.download()), Output(np.tile(box.reshape(-1).view(U32), (2, 1)))


def boxes_out(name: str) -> Probe:
    """Boxes of 8 rows, the last ones ending outside of the matrix: stored, or integers added."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        dev, add = machine.dev, name == "tma_add_2d"
        columns, rows, wide = (72, 37, 32) if add else (136, 37, 64)
        kind = np.dtype(np.float32) if add else np.dtype(np.uint16)
        old = rng.integers(0, 999, (rows, columns)).astype(kind)
        at = np.array([(0, 0), (wide, 8), (0, 32), (2 * wide, 16), (2 * wide, 32), (wide, 0)], np.int32)
        boxes = rng.integers(0, 999, (len(at), 8, wide)).astype(kind)
        want = np.zeros((rows + 8, columns + wide), kind)
        want[:rows, :columns] = old
        for (x, y), box in zip(at, boxes, strict=True):
            want[y : y + 8, x : x + wide] = box + (want[y : y + 8, x : x + wide] if add else 0)
        out = dev.array(old)
        shape = BoxShape((columns, rows), (columns * kind.itemsize,), (wide, 8))
        lying = np.array([swizzle(box.view(np.uint8).reshape(8, ROW)) for box in boxes]).view(U32)
        nbytes = 8 * ROW
        args = [dev.tensor_map([out], shape), dev.array(lying), dev.array(at), np.int32(len(at)), np.int32(nbytes)]
        machine.run(name, args, grid=1, block=128, smem=2 * nbytes)
        return Output(out.download()), Output(want[:rows, :columns])

    return Probe(name, run)


def matrices(machine: Machine, rng: np.random.Generator) -> Outcome:
    """Row r of matrix i lies at place 31 - (8i + r)."""
    bits = words(rng, 4, 8, 4)
    out = machine.dev.zeros((32, 4), U32)
    machine.run("stmatrix_x4", [out, machine.dev.array(bits)], grid=1, block=32, smem=1024)
    return Output(out.download()), Output(np.ascontiguousarray(bits.reshape(32, 4)[::-1]))


def groups(machine: Machine, rng: np.random.Generator) -> Outcome:
    bits = words(rng, 128)
    out = machine.dev.zeros((128,), U32)
    machine.run("named_barrier", [out, machine.dev.array(bits)], grid=1, block=128, smem=1024)
    return Output(out.download()), Output(np.roll(bits.reshape(2, 64), -33, 1).reshape(-1))


def hand_over(machine: Machine, rng: np.random.Generator) -> Outcome:
    bits = words(rng, 64)
    out = machine.dev.zeros((64,), U32)
    machine.run("named_barrier_arrive", [out, machine.dev.array(bits)], grid=1, block=128, smem=1024)
    return Output(out.download()), Output(bits[::-1].copy())


def registers(name: str) -> Probe:
    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        bits = words(rng, 384)
        out = machine.dev.zeros((384,), U32)
        machine.run(name, [out, machine.dev.array(bits)], grid=1, block=384)
        return Output(out.download()), Output(np.where(np.arange(384) < 128, bits, ~bits))

    return Probe(name, run)


def additions(machine: Machine, rng: np.random.Generator) -> Outcome:
    """Integers, whose sums do not depend on the order."""
    values, cells = rng.integers(-999, 1000, (1000, 2)).astype(np.float32), 7
    sums = machine.dev.array(np.ones((cells, 2), np.float32))
    machine.run("red_add_f32x2", [sums, machine.dev.array(values), np.int32(1000), np.int32(cells)])
    want = np.array([1 + values[i::cells].sum(0) for i in range(cells)], np.float32)
    return Output(sums.download()), Output(want)


def product(wrapper: str, N: int, variant: str, name: str) -> Probe:
    """Four steps of k over 128 bytes: exact with integers; random within what the hardware cuts."""
    kind = wrapper.removeprefix("wgmma_") if wrapper in ("wgmma_f16", "wgmma_e4m3") else "bf16"
    K = ROW if kind == "e4m3" else ROW // 2

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        dev = machine.dev
        if variant == "integers":
            draw: Callable[[int], Array] = lambda n: rng.integers(-7, 8, (n, K)).astype(np.float32)  # noqa: E731
            c = (
                rng.integers(-999, 1000, (64, N)).astype(np.float32)
                if kind != "e4m3"
                else np.zeros((64, N), np.float32)
            )
        else:
            draw = lambda n: rng.standard_normal((n, K)).astype(np.float32)  # noqa: E731
            c = rng.standard_normal((64, N)).astype(np.float32)
        (a_bits, a), (b_bits, b) = (encode(draw(n), kind) for n in (64, N))
        maps = []
        for bits in (a_bits, b_bits):
            item = bits.dtype.itemsize
            shape = BoxShape((K, len(bits)), (K * item,), (K, len(bits)))
            maps.append(dev.tensor_map([dev.array(bits)], shape))
        # -1: the first step overwrites; 0: all steps in one group; 1: a group each.
        how = int(rng.integers(-1, 2))
        out = dev.zeros((64, N), F32)
        smem = (64 + N) * ROW + 1024
        machine.run(name, [out, *maps, dev.array(c), np.int32(how)], grid=1, block=128, smem=smem)
        start = c.astype(np.float64) * (how >= 0)
        want = start + a @ b.T
        magnitude = np.abs(start) + np.abs(a) @ np.abs(b).T
        error = E4M3_ERROR if kind == "e4m3" else 4 * machine.mma_error
        return Output(out.download()), Output(
            want.astype(np.float32), error * magnitude if variant == "normal" else 0.0
        )

    return Probe(wrapper, run, f"{N} {variant}")


def product_of_rows(wrapper: str, N: int, variant: str, name: str) -> Probe:
    """a from registers, b's rows along N: four steps of 16 rows."""

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        dev, shapes = machine.dev, ((64, 64), (64, N))
        if variant == "integers":
            draws = [rng.integers(-7, 8, shape).astype(np.float32) for shape in shapes]
            c = rng.integers(-999, 1000, (64, N)).astype(np.float32)
        else:
            draws = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
            c = rng.standard_normal((64, N)).astype(np.float32)
        (a_bits, a), (b_bits, b) = (encode(x, "bf16") for x in draws)
        b_map = dev.tensor_map([dev.array(b_bits)], BoxShape((N, 64), (2 * N,), (64, 64)))
        out = dev.zeros((64, N), F32)
        args = [out, dev.array(a_bits), b_map, dev.array(c)]
        machine.run(name, args, grid=1, block=128, smem=N * ROW + 1024)
        want, magnitude = c + a @ b, np.abs(c) + np.abs(a) @ np.abs(b)
        allowed = 4 * machine.mma_error * magnitude if variant == "normal" else 0.0
        return Output(out.download()), Output(want.astype(np.float32), allowed)

    return Probe(wrapper, run, f"{N} {variant}")


def encode(x: Array, kind: str) -> tuple[Array, Array]:
    """(bits, the same values as float64)."""
    if kind == "bf16":
        bits = f32_to_bf16(x)
        return bits, bf16_to_f32(bits).astype(np.float64)
    if kind == "f16":
        bits = x.astype(np.float16).view(np.uint16)
        return bits, f16_to_f32(bits).astype(np.float64)
    table = e4m3_to_f32(np.arange(256, dtype=np.uint8)).astype(np.float64)
    finite = np.flatnonzero(np.isfinite(table))
    order = finite[np.argsort(table[finite], kind="stable")]
    values = table[order]
    at = np.clip(np.searchsorted(values, x), 1, values.size - 1)
    nearest = np.where(np.abs(values[at - 1] - x) <= np.abs(values[at] - x), at - 1, at)
    bits = order[nearest].astype(np.uint8)
    return bits, table[bits]


_WIDTHS = {
    "wgmma_bf16": (8, 16, 32, 64, 128, 144, 160, 192, 224, 256),
    "wgmma_f16": (64, 256),
    "wgmma_e4m3": (8, 16, 32, 128, 256),
}
SM90 = [
    Probe("shared_address", addresses),
    *(rounds(f"mbarrier_{what}") for what in ("init", "init_fence", "arrive", "try_wait")),
    *(boxes("tma_load_2d", item, odd=odd) for item in (1, 2) for odd in (False, True)),
    boxes("mbarrier_arrive_expect_tx", 2),
    Probe("tma_load_3d", planes),
    Probe("mbarrier_arrive_at", ping_pong),
    Probe("tma_multicast_2d", multicast),
    *(boxes_out(name) for name in ("tma_store_2d", "tma_add_2d", "tma_prefetch")),
    *(boxes_out(name) for name in ("bulk_commit", "bulk_wait_read", "async_fence")),
    Probe("stmatrix_x4", matrices),
    Probe("named_barrier", groups),
    Probe("named_barrier_arrive", hand_over),
    *(registers(f"register_{what}") for what in ("increase", "decrease")),
    Probe("red_add_f32x2", additions),
    *(product(w, N, v, f"{w}_n{N}") for w, widths in _WIDTHS.items() for N in widths for v in ("integers", "normal")),
    *(
        product_of_rows("wgmma_bf16_rows", N, v, f"wgmma_bf16_rows_n{N}")
        for N in (64, 128)
        for v in ("integers", "normal")
    ),
    product_of_rows("wgmma_operand", 64, "integers", "wgmma_operand"),
    *(product(w, 16, "integers", w) for w in ("wgmma_fence", "wgmma_commit", "wgmma_wait", "wgmma_results")),
]
