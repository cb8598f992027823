"""The all-reduce bench, as far as that goes without a GPU."""

from bench.allreduce import BYTES, PATHS, measured
from bench.allreduce_parts import stamped
from qwen_raw.kernels.allreduce_norm import LONGEST


def test_a_message_is_measured_on_the_paths_that_take_it() -> None:
    """The fused norm's message is one row."""
    for nbytes in BYTES:
        assert measured("lamport fused", nbytes) == (nbytes <= 2 * LONGEST), nbytes
        assert measured("twoshot", nbytes)


def test_stamps_fit_todays_kernels() -> None:
    """An edit that no longer fits its kernel raises."""
    for path in PATHS:
        if path != "host":
            assert stamped(path, 2).count("stamps.stamp(") >= 4
