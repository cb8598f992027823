"""Cases of allreduce_rows: h in every bit, normed rows to their rounding, the same on all ranks."""

from __future__ import annotations

import numpy as np
from conformance.kernel_cases import EPS, Case, Outputs, exact, fp32, rounded
from conformance.machines import LIMIT_NS, Machine, Output
from kernel_reference import bf16_input

from loaders.dtypes import e4m3_to_f32
from qwen_raw.device import F32
from qwen_raw.kernels.allreduce_rows import KINDS, SPREAD, RowBuffers, RowsWorkspace, allreduce_rows

WORLDS = {2: 2, 3: 4, 5: 8}  # ranks → the variant that is compiled for so many or less
T, D = 12, 560


def _case(name: str, world: int) -> Case:
    entry, kind = f"allreduce_rows_{name}_r{WORLDS[world]}", "bf16" if name == SPREAD else name

    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        g, base, part = bf16_input(rng, D)[0], fp32(rng, T, D), -(-T // world)
        buffers = []
        for rank in machine.ranks:
            share, out = rank.array(bf16_input(rng, T, D)[0]), rank.zeros((T, D), KINDS[kind])
            scale = rank.zeros((T,), F32) if kind == "e4m3" else None
            pushed = rank.array(bf16_input(rng, world * part, D)[0])
            buffers.append(RowBuffers(kind, share, out, scale, rank.array(base), pushed))
        ends = RowsWorkspace.create(machine.ranks, buffers, limit_ns=LIMIT_NS)
        weights = [None if name == SPREAD else rank.array(g) for rank in machine.ranks]
        with machine.together(("allreduce_rows", entry)):
            for rows, pushed in ((T, False), (T, True), (1, False)):
                for end, weight in zip(ends, weights, strict=True):
                    allreduce_rows(end, rows, D, weight, EPS, block=64, grid=2, pushed=pushed)
        assert [end.limit.fault() for end in ends] == [None] * world
        results: Outputs = {f"h of rank {r}": exact(own.h.download()) for r, own in enumerate(buffers)}
        if name == SPREAD:
            return results
        for r, own in enumerate(buffers):
            bits = own.out.download()
            np.testing.assert_array_equal(bits, buffers[0].out.download())
            if own.scale is None:
                results[f"rows of rank {r}"] = rounded(bits, f16=kind == "f16")
                continue
            # Apart: a scale, which rsqrtf goes into, may differ in its last bits, and all values of its row with it.
            codes, scales = e4m3_to_f32(bits), own.scale.download()
            step = 2.0**-3 * np.abs(codes) + 2.0**-9  # the next code
            results[f"codes of rank {r}"] = Output(codes, step, 0.02)
            results[f"scales of rank {r}"] = Output(scales, 2.0**-20 * scales.astype(np.float64))
        return results

    return Case(entry, run, world)


def by_rows_cases() -> list[Case]:
    """Every entry point's."""
    return [_case(name, world) for name in (*KINDS, SPREAD) for world in WORLDS]
