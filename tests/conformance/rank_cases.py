"""Cases of the entry points that talk to another rank: fp32 sums in rank order, and every bit of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from conformance.by_rows_cases import by_rows_cases
from conformance.each_cases import exchange_cases
from conformance.kernel_cases import ADD, EPS, Case, Outputs, exact, fp32, rounded
from conformance.loop_cases import LOOPS
from conformance.machines import LIMIT_NS, MOST_RANKS, Machine, Output
from kernel_reference import bf16_input, make_linear

from qwen_raw.device import BF16, F32, I32, U32
from qwen_raw.kernels import allreduce_flag, allreduce_lamport, allreduce_twoshot, signal
from qwen_raw.kernels.accept import PassBuffers, accept, accept_begin
from qwen_raw.kernels.allreduce_host import allreduce_host as read_and_sum
from qwen_raw.kernels.allreduce_host import load
from qwen_raw.kernels.allreduce_norm import allreduce_norm as reduce_and_norm
from qwen_raw.kernels.draft import SharedGuesses, draft_share
from qwen_raw.kernels.gemv_exchange import Exchange, GemvExchange, Next
from qwen_raw.kernels.gemv_exchange_bf16 import EXCHANGE as EXCHANGE_BF16
from qwen_raw.kernels.gemv_exchange_fp8 import EXCHANGE as EXCHANGE_FP8
from qwen_raw.kernels.peercheck import count_wrong, store_pattern
from qwen_raw.kernels.sample import Sampler, sample

MESSAGES = (40, 1, 17, 3)  # packs
WORLDS = {2: 2, 3: 4, 5: 8}  # ranks → the variant that is compiled for so many or less


def allreduce(name: str, workspace: Any, reduce: Callable[..., None], add: bool, world: int) -> Case:
    entry = f"allreduce_{name}_{'add_' if add else ''}bf16_r{WORLDS[world]}"

    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        ends = workspace.create(machine.ranks, 40, limit_ns=LIMIT_NS)
        calls = []
        for packs in MESSAGES:
            base, inputs = fp32(rng, 8 * packs), [bf16_input(rng, 8 * packs)[0] for _ in machine.ranks]
            outs = [rank.array(base) if add else rank.zeros((8 * packs,), BF16) for rank in machine.ranks]
            calls.append([(o, rank.array(x)) for rank, o, x in zip(machine.ranks, outs, inputs, strict=True)])
        # Each rank's calls are queued back to back; all ranks' blocks fit the GPU many times over.
        with machine.together((f"allreduce_{name}", entry)):
            for call in calls:
                for end, (out, inp) in zip(ends, call, strict=True):
                    reduce(end, out, inp, add=add, block=32, grid=2)
        assert [end.limit.fault() for end in ends] == [None] * world
        return {
            f"call {i}, rank {r}": exact(out.download())
            for i, call in enumerate(calls)
            for r, (out, _) in enumerate(call)
        }

    return Case(entry, run, world)


def allreduce_norm(world: int) -> Case:
    """The sum in every bit. The norm goes through fma and rsqrtf."""
    entry = f"allreduce_norm_bf16_r{WORLDS[world]}"

    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        D, ends = 8 * 70, allreduce_lamport.LamportWorkspace.create(machine.ranks, 70 * 3, limit_ns=LIMIT_NS)
        g, calls = bf16_input(rng, D)[0], []
        for T in (1, 3, 2):
            base, inputs = fp32(rng, T, D), [bf16_input(rng, T, D)[0] for _ in machine.ranks]
            buffers = [
                (rank.zeros((T, D), F32), rank.zeros((T, D), BF16), rank.array(base), rank.array(g))
                for rank in machine.ranks
            ]
            calls.append([(*own, rank.array(x)) for rank, own, x in zip(machine.ranks, buffers, inputs, strict=True)])
        with machine.together(("allreduce_norm", entry)):
            for call in calls:
                for end, (total, out, h, weight, inp) in zip(ends, call, strict=True):
                    reduce_and_norm(end, total, out, h, inp, weight, EPS, block=64, row_blocks=3)
        results: Outputs = {}
        for i, call in enumerate(calls):
            for r, (total, out, *_) in enumerate(call):
                results[f"call {i}, rank {r}: sum"] = exact(total.download())
                results[f"call {i}, rank {r}: norm"] = rounded(out.download())
                np.testing.assert_array_equal(out.download(), call[0][1].download())
        return results

    return Case(entry, run, world)


def allreduce_host(world: int) -> Case:
    entry = f"allreduce_host_add_bf16_r{WORLDS[world]}"

    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        load(machine.ranks)
        inputs = [rank.array(bf16_input(rng, 8 * 40)[0]) for rank in machine.ranks]
        h = [rank.array(fp32(rng, 8 * 40)) for rank in machine.ranks]
        machine.finish()
        for rank, own in zip(machine.ranks, h, strict=True):
            read_and_sum(rank, own, inputs)
        return {f"rank {r}": exact(own.download()) for r, own in enumerate(h)}

    return Case(entry, run, world)


def gemv_exchange(kernels: GemvExchange, variant: str, K: int) -> Case:
    """Three sums in a row into h: bf16 in every bit, fp8 within what tensor cores may be off by."""

    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        ends, base, fp8 = Exchange.create(machine.ranks, 37, limit_ns=LIMIT_NS), fp32(rng, 37), kernels.gemv.fp8
        h, terms, work = [rank.array(base) for rank in machine.ranks], np.abs(base).astype(np.float64), []
        for end, own, rank in zip(ends, h, machine.ranks, strict=True):
            x, X = bf16_input(rng, K)
            weights, values = zip(*(make_linear(rank, rng, 37, K, fp8) for _ in range(3)), strict=True)
            terms += sum(np.abs(W) @ np.abs(X) for W in values)
            work.append((end, own, rank.array(x), weights))
        following = make_linear(machine.dev, rng, 37, 272, fp8)[0]
        with machine.together((kernels.stem, f"{kernels.stem}_{variant}")):
            for number in range(3):
                for end, own, x, weights in work:
                    ahead = Next(kernels.gemv, "swiglu", (following, following)).struct(end.dev, 4 * 272)
                    kernels.add(end, number, own, x, weights[number], ahead=ahead, grid=3)
        assert [end.limit.fault() for end in ends] == [None] * len(ends)
        allowed = 2.0**-22 * 12 * terms if fp8 else 0.0  # as kernel_cases.fp8_error
        return {f"rank {r}": Output(own.download(), allowed) for r, own in enumerate(h)}

    return Case(f"{kernels.stem}_{variant}", run, MOST_RANKS if variant == "c1" else 2)


def run_peercheck(machine: Machine, rng: np.random.Generator) -> Outputs:
    """What one rank stores, the other counts, both ways; then a word is spoilt, and the wrong seed is asked for."""
    (one, two), seed = machine.ranks, int(rng.integers(1 << 32))
    data, counts = two.zeros((4 * 300,), U32), []
    one.enable_peer(two)
    machine.finish()  # zeroes of one rank's stream, before the other rank stores
    for writer, reader in ((one, two), (two, one)):
        for spoilt, asked in ((False, seed), (True, seed), (False, seed ^ 1)):
            store_pattern(writer, data, seed)
            machine.finish()
            stored = data.download()
            if spoilt:
                data.view((1,), 77).upload(stored[77:78] ^ np.uint32(1))
            machine.finish()
            wrong = reader.zeros((1,), U32)
            count_wrong(reader, wrong, data, asked)
            counts.append(wrong.download())
    assert [int(n[0]) for n in counts[:2]] == [0, 1] and int(counts[2][0]) > 1190
    return {"pattern": exact(stored), "wrong": exact(np.array(counts))}


def run_sample_ranks(machine: Machine, rng: np.random.Generator) -> Outputs:
    """The same between ranks that hold some rows each: all end in the same state, and post the same."""
    parts = [range(0, 301), range(301, 700)]
    samplers = Sampler.create_ranks(machine.ranks, parts, limit_ns=LIMIT_NS, blocks=3)
    results: Outputs = {}
    for step in range(5):
        logits = fp32(rng, 700)
        if step == 0:
            logits[[57, 601]] = 9.0
        seed, rows = int(rng.integers(1 << 63)), []
        for rank, s in zip(machine.ranks, samplers, strict=True):
            s.set_params(0.0 if step < 2 else 0.8, seed, 690)
            rows.append(rank.array(logits[s.rows.start : s.rows.stop]))
        with machine.together(("sample", "sample_ranks_f32")):
            for rank, s, row in zip(machine.ranks, samplers, rows, strict=True):
                sample(rank, row, s)
        results |= {f"state {step}, rank {r}": exact(s.state.download()) for r, s in enumerate(samplers)}
    return results | {f"ring of rank {r}": exact(s.ring.words.copy()) for r, s in enumerate(samplers)}


def run_passes(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Rank 0's guesses reach the other rank; both choose from what rows each has, and keep the same."""
    M, V, parts = 4, 700, [range(0, 301), range(301, 700)]
    samplers = Sampler.create_ranks(machine.ranks, parts, limit_ns=LIMIT_NS, blocks=3)
    buffers = PassBuffers.create_ranks(machine.ranks, M, 60, V)
    shared = SharedGuesses.create_ranks(machine.ranks, [s.meeting.limit for s in samplers if s.meeting is not None])
    drafts, results = [rank.zeros((4,), I32) for rank in machine.ranks], {}
    ends = list(zip(machine.ranks, samplers, buffers, drafts, shared, strict=True))
    for rank, s, b, draft, _ in ends:
        s.set_params(0.0, 0, 690)
        s.set_position(1, 10)
        b.limit.upload(np.array([40], np.uint32))
        accept_begin(rank, b, s, draft)
    for step in range(5):
        logits = fp32(rng, M, V)
        choices = logits[:, :690].argmax(1)
        ids = np.array([1, *(c + (i >= step) for i, c in enumerate(choices[:-1]))], np.int32)
        buffers[0].ids.upload(ids)
        rows = [rank.array(logits[:, s.rows.start : s.rows.stop].copy()) for rank, s, *_ in ends]
        with machine.together(("draft", "draft_share"), ("accept", "accept_f32")):
            for (rank, s, b, draft, end), mine in zip(ends, rows, strict=True):
                draft_share(rank, b.ids, b.rows, end)
                accept(rank, b, s, draft, mine)
        for r, (_, s, b, *_) in enumerate(ends):
            left = np.concatenate([x.download().reshape(-1) for x in (s.state, b.rows, b.history, b.ids)])
            results[f"pass {step}, rank {r}"] = exact(left)
    return results | {f"ring of rank {r}": exact(s.ring.words.copy()) for r, s in enumerate(samplers)}


def run_signal(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Both ends on one stream, three hand-overs ahead at most: the slots come round twice."""
    return hand_over(machine, rng, signal.signal_put, signal.signal_take)


def run_signal_parts(machine: Machine, rng: np.random.Generator) -> Outputs:
    """The same by the kernels that go beside stream operations, with a kernel that rings; payloads stay where put."""
    numbers = {"put": 0, "take": 0}

    def put(ends: signal.SignalEnds, payload: Any, **grid: int) -> None:
        numbers["put"] += 1
        signal.signal_store(ends, payload, numbers["put"] % signal.SLOTS, **grid)
        signal.signal_ring(ends, numbers["put"] % signal.SLOTS)

    def take(ends: signal.SignalEnds, payload: Any, **grid: int) -> None:
        numbers["take"] += 1
        signal.signal_fetch(ends, payload, numbers["take"] % signal.SLOTS, **grid)

    return hand_over(machine, rng, put, take, pulled=True)


def hand_over(
    machine: Machine,
    rng: np.random.Generator,
    put: Callable[..., None],
    take: Callable[..., None],
    pulled: bool = False,
) -> Outputs:
    dev, results = machine.dev, {}
    ends = signal.SignalEnds.create(dev, dev, 80, pulled=pulled, limit_ns=LIMIT_NS)
    for round_ in range(3):
        payloads = [rng.integers(0, 1 << 32, 20, dtype=np.uint32) for _ in range(signal.SLOTS)]
        payloads[0][:4] = 0x80000000  # the sentinel is data here
        sent, taken = [dev.array(p) for p in payloads], [dev.zeros((20,), U32) for _ in payloads]
        for buffer in sent:
            put(ends, buffer, blocks=2, threads=64)
        for buffer in taken:
            take(ends, buffer, blocks=2, threads=64)
        for i, buffer in enumerate(taken):
            got = buffer.download()
            np.testing.assert_array_equal(got, payloads[i])
            results[f"round {round_}, slot {i}"] = exact(got)
    for name, buffer in (("bells", ends.bells), ("credit", ends.credit), ("put", ends.put_number)):
        results[name] = exact(buffer.download())
    return results


def rank_cases() -> list[Case]:
    """Every such kernel's case."""
    reduces = (
        ("lamport", allreduce_lamport.LamportWorkspace, allreduce_lamport.allreduce_lamport),
        ("flag", allreduce_flag.FlagWorkspace, allreduce_flag.allreduce_flag),
        ("twoshot", allreduce_twoshot.TwoShotWorkspace, allreduce_twoshot.allreduce_twoshot),
    )
    return [
        *(allreduce(*reduce, add, world) for reduce in reduces for add in (False, True) for world in WORLDS),
        *map(allreduce_norm, WORLDS),
        *by_rows_cases(),
        *map(allreduce_host, WORLDS),
        *(gemv_exchange(EXCHANGE_BF16, v, ADD["bf16"][v]) for v in ("c1", "c2", "c4")),
        *(gemv_exchange(EXCHANGE_FP8, v, K) for v, K in ADD["fp8"].items()),
        *exchange_cases(),
        Case("peercheck_store_u32", run_peercheck, ranks=2),
        Case("peercheck_count_u32", run_peercheck, ranks=2),
        Case("signal_put", run_signal),
        Case("signal_take", run_signal),
        Case("signal_store", run_signal_parts),
        Case("signal_ring", run_signal_parts),
        Case("signal_fetch", run_signal_parts),
        Case("sample_ranks_f32", run_sample_ranks, ranks=2),
        Case("draft_share", run_passes, ranks=2),
        *LOOPS,
    ]
