"""The workspace of a verification holds the partial sums of every product, of every size of Qwen2.5."""

from typing import Any

import pytest

from loaders.synthetic import SIZES, random_config
from qwen_raw.kernels.gemv_rows import MAX_RANGES, MAX_ROWS, MAX_SPLITS
from qwen_raw.kernels.gemv_rows_bf16 import GEMV_ROWS as BF16_ROWS
from qwen_raw.kernels.gemv_rows_fp8 import GEMV_ROWS as FP8_ROWS
from qwen_raw.model.verify import workspace_sums

SHARED = 227 << 10  # bytes a multiprocessor has for its blocks


class Clusterless:
    """A device as far as a product's division asks."""

    arch = "sm_90a"
    sm_count = 132
    smem_per_block = SHARED

    def resident_blocks(self, kernel: Any, threads: int, smem: int) -> int:
        return min(512 // threads, SHARED // max(smem, 1))

    def resident_clusters(self, kernel: Any, threads: int, smem: int, blocks: int) -> int:
        return 0


class H200(Clusterless):
    """Multiprocessors in groups as they were found."""

    def resident_clusters(self, kernel: Any, threads: int, smem: int, blocks: int) -> int:
        per_sm = self.resident_blocks(kernel, threads, smem)
        return sum(n * per_sm // blocks for n in (18, 18, 18, 18, 18, 16, 16, 10))


@pytest.mark.parametrize("rows", [BF16_ROWS, FP8_ROWS], ids=["bf16", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_the_workspace_is_large_enough(size: str, rows: Any) -> None:
    c = random_config(size)
    normed = ((2 * c.I, c.D), ((c.H + 2 * c.KV) * c.HD, c.D), (c.V, c.D))
    plain = ((c.D, c.I), (c.D, c.H * c.HD))
    for M in range(2, MAX_ROWS + 1):
        have = workspace_sums(c, M) + MAX_RANGES * MAX_SPLITS * MAX_ROWS
        for N, K, norm in (*((*s, True) for s in normed), *((*s, False) for s in plain)):
            p = rows.plan(Clusterless(), None, N, 1, K, rows.tokens(M, norm), norm, None)
            assert p.S == 1 or have >= p.S * (M * N + p.R * MAX_ROWS), (M, N, K)


@pytest.mark.parametrize("rows", [BF16_ROWS, FP8_ROWS], ids=["bf16", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_splits_of_every_model_are_clusters(size: str, rows: Any) -> None:
    """And there is room for a division of every product, all of whose blocks fit shared memory."""
    c = random_config(size)
    normed = ((2 * c.I, c.D), ((c.H + 2 * c.KV) * c.HD, c.D), (c.V, c.D))
    plain = ((c.D, c.I), (c.D, c.H * c.HD))
    for M in (2, 4, 8, 16):
        for N, K, norm in (*((*s, True) for s in normed), *((*s, False) for s in plain)):
            p = rows.plan(H200(), None, N, 1, K, rows.tokens(M, norm), norm, None)
            alone = not rows.fp8 and M == 16 and norm  # the one kind whose splits meet in the workspace
            assert p.together == (p.S > 1 and not alone) and p.S <= 8 and p.smem <= SHARED, (M, N, K, p)
            assert p.S * p.K_block >= K and p.warps <= 16, (M, N, K, p)
