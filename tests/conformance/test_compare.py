"""The comparison that the other tests rest on: what it lets pass and what it does not."""

from __future__ import annotations

import numpy as np
import pytest
from conformance.machines import Output, compare

ONE = np.array([1.0, 2.0, np.nan, np.inf], np.float32)


def test_equal_passes() -> None:
    compare(Output(ONE), Output(ONE.copy()), "floats")
    compare(Output(ONE + np.float32(1e-6)), Output(ONE, 2e-6), "floats within what is allowed")


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (ONE + np.spacing(np.float32(1)), Output(ONE)),
        (ONE + np.float32(1e-5), Output(ONE, 2e-6)),
        (np.array([1.0, np.nan, np.nan, np.inf], np.float32), Output(ONE, 9.0)),
        (np.array([1.0, 2.0, 0.0, np.inf], np.float32), Output(ONE, 9.0)),
        (np.array([1.0, 2.0, np.nan, -np.inf], np.float32), Output(ONE, 9.0)),
        (np.array([-0.0], np.float32), Output(np.array([0.0], np.float32))),
        (np.full(100, 1.001, np.float32), Output(np.ones(100, np.float32), 0.01, share=0.5)),
        (np.array([3], np.uint32), Output(np.array([4], np.uint32))),
        (ONE.astype(np.float64), Output(ONE)),
        (ONE[:2], Output(ONE)),
        (ONE[:0], Output(ONE[:0])),
    ],
)
def test_different_fails(got: np.ndarray, want: Output) -> None:
    with pytest.raises(AssertionError):
        compare(Output(got), want, "got")
