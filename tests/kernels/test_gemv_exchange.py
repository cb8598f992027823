"""gemv_exchange_bf16.cu and gemv_exchange_fp8.cu on several ranks against float64; what is refused."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from comm.guarded import Guarded
from kernel_reference import assert_sums_close, bf16_input, make_linear
from model.ranks import PAIRS, open_ranks

from loaders.dtypes import bf16_to_f32, f32_to_bf16
from qwen_raw.device import BF16, E4M3, F32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.gemv_bf16 import GEMV as GEMV_BF16
from qwen_raw.kernels.gemv_exchange import Exchange, GemvExchange, Next
from qwen_raw.kernels.gemv_exchange_bf16 import EXCHANGE as BF16_EXCHANGE
from qwen_raw.kernels.gemv_exchange_fp8 import EXCHANGE as FP8_EXCHANGE
from qwen_raw.kernels.linear import Linear

EXCHANGES = pytest.mark.parametrize("kernels", [BF16_EXCHANGE, FP8_EXCHANGE], ids=["bf16", "fp8"])
LIMIT_NS = 2_000_000_000


@pytest.fixture(params=PAIRS)
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    yield from open_ranks(request.param)


def add(
    ranks: list[Any], kernels: GemvExchange, ends: list[Exchange], work: list[tuple[Any, ...]], **options: Any
) -> None:
    """Sums 0, 1, … on all ranks: `work` has each rank's (h, x, the sums' weights)."""
    with ranks[0].queueing():
        for number in range(len(work[0][2])):
            for end, (h, x, weights) in zip(ends, work, strict=True):
                kernels.add(end, number, h, x, weights[number], **options)
    for rank in ranks:
        rank.synchronize()


@EXCHANGES
@pytest.mark.parametrize(
    ("N", "K", "grid"), [(1, 16, None), (37, 272, 1), (130, 272, 3), (64, 1024, None), (18, 528, 7)]
)
def test_adds_the_sum_of_all_ranks(
    ranks: list[Any], rng: np.random.Generator, kernels: GemvExchange, N: int, K: int, grid: int | None
) -> None:
    """Five sums in a row; every rank ends with the same bits."""
    base = rng.standard_normal(N).astype(np.float32)
    ends, work, want, terms = Exchange.create(ranks, N, limit_ns=LIMIT_NS), [], base.astype(np.float64), np.abs(base)
    kernels.load(ranks, [K])
    for rank in ranks:
        x, X = bf16_input(rng, K)
        made = [make_linear(rank, rng, N, K, kernels.gemv.fp8) for _ in range(5)]
        work.append((rank.array(base), rank.array(x), [w for w, _ in made]))
        want = want + sum(W @ X for _, W in made)
        terms = terms + sum(np.abs(W) @ np.abs(X) for _, W in made)
    add(ranks, kernels, ends, work, grid=grid, pdl=True)
    got = [h.download() for h, _, _ in work]
    assert_sums_close(got[0], want, terms, what="h")
    np.testing.assert_array_equal(got[1], got[0])
    assert [end.limit.fault() for end in ends] == [None] * len(ends)


def test_a_share_of_negative_zero_is_no_sentinel(ranks: list[Any]) -> None:
    """Zeros with a negative scale: -0.0 is what receive memory is armed with."""
    ends = Exchange.create(ranks, 8, limit_ns=LIMIT_NS)
    FP8_EXCHANGE.load(ranks, [16])
    base, scale = np.arange(8, dtype=np.float32), np.full(8, -1, np.float32)
    work = [
        (rank.array(base), rank.zeros((16,), BF16), [Linear(rank.zeros((8, 16), E4M3), rank.array(scale))] * 3)
        for rank in ranks
    ]
    add(ranks, FP8_EXCHANGE, ends, work)
    for h, _, _ in work:
        np.testing.assert_array_equal(h.download(), base)


def test_replays_with_new_inputs_and_ranks_that_start_late(ranks: list[Any], rng: np.random.Generator) -> None:
    """Whole numbers, so that every bit of the accumulated h is known. On a GPU a hundred thousand sums."""
    N, K, cuda = 200, 64, ranks[0].kind == "cuda"
    sums, replays, rounds = (100, 250, 4) if cuda else (4, 2, 2)
    ends = Exchange.create(ranks, N, limit_ns=LIMIT_NS)
    BF16_EXCHANGE.load(ranks, [K])
    weights = [[rng.integers(-1, 2, (N, K)).astype(np.float32) for _ in range(4)] for _ in ranks]
    h, x, graphs = [dev.zeros((N,), F32) for dev in ranks], [dev.zeros((K,), BF16) for dev in ranks], []
    for rank, dev in enumerate(ranks):
        linears = [Linear(dev.array(f32_to_bf16(w))) for w in weights[rank]]
        with dev.capture() as capture:
            for number in range(sums):
                BF16_EXCHANGE.add(ends[rank], number, h[rank], x[rank], linears[number % 4], pdl=True)
        graphs.append(capture.graph)
    for _ in range(rounds):
        inputs = [rng.integers(-1, 2, K).astype(np.float32) for _ in ranks]
        for buffer, values, out in zip(x, inputs, h, strict=True):
            buffer.upload(f32_to_bf16(values))
            out.fill(0)
        for dev in ranks:
            dev.synchronize()
        with ranks[0].queueing():
            for replay in range(replays):
                for rank in rng.permutation(len(ranks)).tolist():
                    graphs[rank].launch()
                    if cuda and replay % 50 == 0:
                        time.sleep(float(rng.uniform(0, 2e-3)))
        each = sum(w @ v for own, v in zip(weights, inputs, strict=True) for w in own)
        for out in h:
            np.testing.assert_array_equal(out.download(), replays * sums // 4 * each)
    assert [end.limit.fault() for end in ends] == [None] * len(ends)


def test_an_input_may_be_overwritten_right_after_the_product(ranks: list[Any], rng: np.random.Generator) -> None:
    """In stream order: what comes next must not reach a sum that a peer is late for."""
    N, K = 40, 32
    ends = Exchange.create(ranks, N, limit_ns=LIMIT_NS)
    BF16_EXCHANGE.load(ranks, [K])
    made = [make_linear(dev, rng, N, K, False) for dev in ranks]
    inputs = [[bf16_input(rng, K) for _ in ranks] for _ in range(4)]
    h = [dev.zeros((N,), F32) for dev in ranks]
    sources = [[dev.array(bits) for dev, (bits, _) in zip(ranks, row, strict=True)] for row in inputs]
    with ranks[0].queueing():
        for number, row in enumerate(sources):
            for rank, source in enumerate(row):
                BF16_EXCHANGE.add(ends[rank], number, h[rank], source, made[rank][0])
                source.fill(0xFF)  # NaN
            if ranks[0].kind == "cuda":
                time.sleep(float(rng.uniform(0, 2e-3)))
    want = sum(W @ X for row in inputs for (_, W), (_, X) in zip(made, row, strict=True))
    terms = sum(np.abs(W) @ np.abs(X) for row in inputs for (_, W), (_, X) in zip(made, row, strict=True))
    for out in h:
        assert_sums_close(out.download(), want, terms, what="h")


def test_nothing_is_written_around_a_buffer(ranks: list[Any], rng: np.random.Generator) -> None:
    """Of receive memory, of h and of what is read; a block for all rows, and more rows than blocks divide."""
    guarded: list[Any] = [Guarded(dev) for dev in ranks]
    N, K = 37, 48
    ends = Exchange.create(guarded, N, limit_ns=LIMIT_NS)
    BF16_EXCHANGE.load(guarded, [K])
    work, want, terms = [], np.zeros(N), np.zeros(N)
    for dev in guarded:
        x, X = bf16_input(rng, K)
        w, W = make_linear(dev, rng, N, K, False)
        work.append((dev.zeros((N,), F32), dev.array(x), [w] * 4))
        want, terms = want + W @ X, terms + np.abs(W) @ np.abs(X)
    for dev in ranks:
        dev.synchronize()
    for grid in (1, 5):
        add(guarded, BF16_EXCHANGE, ends, work, grid=grid)
    for h, _, _ in work:
        assert_sums_close(h.download(), 8 * want, 8 * terms, what="h")
    for dev in guarded:
        dev.check()


def test_shares_that_a_poll_could_take_for_nothing(ranks: list[Any]) -> None:
    """Negative subnormal shares of one rank, 0x8001 to 0x807F above zeros: as floats they might compare equal to -0."""
    patterns = np.arange(0x8001, 0x8080, dtype=np.uint16)
    N, K = patterns.size, 16
    BF16_EXCHANGE.load(ranks, [K])
    bits, one = np.zeros((N, K), np.uint16), np.zeros(K, np.uint16)
    bits[:, 0], one[0] = patterns, 0x3F80
    for sender in range(len(ranks)):
        ends = Exchange.create(ranks, N, limit_ns=LIMIT_NS)
        work = [
            (dev.zeros((N,), F32), dev.array(one), [Linear(dev.array(bits if rank == sender else 0 * bits))] * 3)
            for rank, dev in enumerate(ranks)
        ]
        add(ranks, BF16_EXCHANGE, ends, work)
        for h, _, _ in work:
            np.testing.assert_array_equal(h.download(), 3 * bf16_to_f32(patterns))


def test_infinities_and_nans_are_data(ranks: list[Any], rng: np.random.Generator) -> None:
    """Of one rank: they arrive, and nobody waits for ever. A whole warp's row: behind a shorter one inf meets zeros."""
    ends, K = Exchange.create(ranks, 8, limit_ns=LIMIT_NS), 256
    BF16_EXCHANGE.load(ranks, [K])
    bits = np.full((8, K), 0x3F80, np.uint16)
    bits[1, 3], bits[2, 5], bits[3, 7] = 0x7F80, 0xFF80, 0x7FC1
    work = [
        (
            rank.zeros((8,), F32),
            rank.array(np.full(K, 0x3F80, np.uint16)),
            [Linear(rank.array(bits if first else bits * 0))],
        )
        for rank, first in zip(ranks, (True, False), strict=True)
    ]
    add(ranks, BF16_EXCHANGE, ends, work)
    for h, _, _ in work:
        np.testing.assert_array_equal(h.download(), np.array([K, np.inf, -np.inf, np.nan, *[K] * 4], np.float32))


def test_what_is_fetched_ahead_lies_in_the_next_weights(ranks: list[Any], rng: np.random.Generator) -> None:
    """Of every kind of product, more than there is: the simulator refuses an address outside of a buffer."""
    dev = ranks[0]
    ends = Exchange.create(ranks, 8, limit_ns=LIMIT_NS)
    BF16_EXCHANGE.load(ranks, [16])
    (w, _), (up, _) = (make_linear(dev, rng, 96, 64, False) for _ in range(2))
    for following in (
        Next(GEMV_BF16, "swiglu", (w, up)),
        Next(GEMV_BF16, "qkv", (w,), half=8),
        Next(GEMV_BF16, "logits", (w,)),
    ):
        ahead = following.struct(dev, 1 << 20)
        assert ahead["rows"][0] > 96 // 2 and (ahead["second"][0] > 0) == (following.op != "logits")
        work = [
            (rank.zeros((8,), F32), rank.zeros((16,), BF16), [make_linear(rank, rng, 8, 16, False)[0]])
            for rank in ranks
        ]
        for grid in (1, 3):
            add(ranks, BF16_EXCHANGE, ends, [(h, x, [w8, w8]) for h, x, (w8,) in work], ahead=ahead, grid=grid)


def test_what_cannot_be_summed_is_refused(ranks: list[Any], rng: np.random.Generator) -> None:
    ends = Exchange.create(ranks, 8, limit_ns=LIMIT_NS)
    dev = ranks[0]
    w, x, h = Linear(dev.zeros((8, 16), BF16)), dev.zeros((16,), BF16), dev.zeros((8,), F32)
    with pytest.raises(QwenRawError, match="a product of 16 rows, the ranks exchange 8"):
        BF16_EXCHANGE.add(ends[0], 0, h, x, Linear(dev.zeros((16, 16), BF16)))
    with pytest.raises(QwenRawError, match=r"h or x is not of .*'s stream, which rank 1 belongs to"):
        BF16_EXCHANGE.add(ends[1], 0, h, x, w)
    with pytest.raises(QwenRawError, match="h is "):
        BF16_EXCHANGE.add(ends[0], 0, dev.zeros((9,), F32), x, w)
    crowd = replace(ends[0], sharing=10**6)
    with pytest.raises(QwenRawError, match=r"8 blocks wait for each other, .* holds 0 at once"):
        BF16_EXCHANGE.add(crowd, 0, h, x, w, grid=8)
    with pytest.raises(QwenRawError, match="a residual stream of 0 elements"):
        Exchange.create(ranks, 0, limit_ns=LIMIT_NS)
