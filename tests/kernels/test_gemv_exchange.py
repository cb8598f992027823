"""gemv_exchange_bf16.cu and gemv_exchange_fp8.cu on several ranks against float64; what is refused."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_reference import assert_sums_close, bf16_input, make_linear
from model.ranks import PAIRS, open_ranks

from loaders.dtypes import f32_to_bf16
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
    """Four sums a graph; whole numbers, so that every bit of the accumulated h is known. On a GPU 4,000 sums."""
    N, K, cuda = 200, 64, ranks[0].kind == "cuda"
    ends = Exchange.create(ranks, N, limit_ns=LIMIT_NS)
    BF16_EXCHANGE.load(ranks, [K])
    weights = [[rng.integers(-2, 3, (N, K)).astype(np.float32) for _ in range(4)] for _ in ranks]
    h, x, graphs = [dev.zeros((N,), F32) for dev in ranks], [dev.zeros((K,), BF16) for dev in ranks], []
    for rank, dev in enumerate(ranks):
        linears = [Linear(dev.array(f32_to_bf16(w))) for w in weights[rank]]
        with dev.capture() as capture:
            for number, linear in enumerate(linears):
                BF16_EXCHANGE.add(ends[rank], number, h[rank], x[rank], linear, pdl=True)
        graphs.append(capture.graph)
    want, replays = np.zeros(N, np.float32), 250 if cuda else 2
    for _ in range(4 if cuda else 2):
        inputs = [rng.integers(-1, 2, K).astype(np.float32) for _ in ranks]
        for buffer, values in zip(x, inputs, strict=True):
            buffer.upload(f32_to_bf16(values))
        for dev in ranks:
            dev.synchronize()
        with ranks[0].queueing():
            for replay in range(replays):
                for rank in rng.permutation(len(ranks)).tolist():
                    graphs[rank].launch()
                    if cuda and replay == 0:
                        time.sleep(float(rng.uniform(0, 2e-3)))
        want += replays * sum(w @ v for own, v in zip(weights, inputs, strict=True) for w in own)
        for out in h:
            np.testing.assert_array_equal(out.download(), want)
    assert [end.limit.fault() for end in ends] == [None] * len(ends)


def test_infinities_and_nans_are_data(ranks: list[Any], rng: np.random.Generator) -> None:
    """Of one rank: they arrive, and nobody waits for ever."""
    ends, K = Exchange.create(ranks, 8, limit_ns=LIMIT_NS), 16
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
