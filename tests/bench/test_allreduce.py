"""The all-reduce bench, as far as that goes without a GPU."""

import numpy as np

from bench import skew
from bench.allreduce import BYTES, measured
from bench.allreduce_parts import STAMPED, stamped
from qwen_raw.kernels.allreduce_norm import LONGEST


def test_a_message_is_measured_on_the_paths_that_take_it() -> None:
    """The fused norm's message is one row."""
    for nbytes in BYTES:
        assert measured("lamport fused", nbytes) == (nbytes <= 2 * LONGEST), nbytes
        assert measured("twoshot", nbytes)


def test_stamps_fit_todays_kernels() -> None:
    """An edit that no longer fits its kernel raises."""
    for path in STAMPED:
        assert stamped(path, 2).count("stamps.stamp(") >= 4
    assert skew.stamped().count("stamps[") >= 8


def test_what_a_sum_waits_for_is_split() -> None:
    """The last to arrive waits 1 µs; rank 0 is 0.2 µs earlier, and one of its four blocks by 0.4 µs more."""
    stamps = np.zeros((2, 2, 3, 4, 4), np.uint32)
    stamps[..., 0], stamps[..., 2] = 60_000, 30_000  # 2,000 MHz
    stamps[..., 1] = 2000
    stamps[:, 0, ..., 1] += 400
    stamps[:, 0, :, 3, 1] += 800
    found = skew.waits(stamps)
    for name, us in {"mhz": 2000, "work": 30, "hand_over": 1, "skew": 0.15, "ranks": 0.15, "blocks": 0}.items():
        assert abs(found[name] - us) < 1e-9, name
    np.testing.assert_allclose(found["rank_waits"], [1.3, 1.0])
    row = {"model": "m", "dtype": "bf16", "tp": 2, "product": "o", "blocks_used": 4, "us": {"whole": [1.0, 1.0]}}
    assert "by rank 1.30 / 1.00" in skew.lines([{**row, "reduce_us": 1.0, **found}])[1]
    stamps[:, 1, :, 2, 1] += 1600  # one block of rank 1 is the earlier one
    assert skew.waits(stamps)["blocks"] > 0
