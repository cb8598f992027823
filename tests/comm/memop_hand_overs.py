"""Run by test_signal.py: `python memop_hand_overs.py 0,0` puts its tests to the forms whose streams wait."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import test_signal as cases  # noqa: E402

from qwen_raw.comm.signal import SignalChannel  # noqa: E402
from qwen_raw.driver.device import CudaDevice  # noqa: E402
from qwen_raw.errors import QwenRawError  # noqa: E402


def refused(pair: cases.Pair, options: dict[str, str]) -> None:
    """A graph that would fill its stream's queue while it waits for the other end is refused, not launched."""
    channel = SignalChannel(pair.producer, pair.consumer, 16 * cases.PACKS, **options)  # type: ignore[arg-type]
    *_, put, wait = cases.graphs(pair, channel, 768)
    first, name = (put, "wait") if channel.writes_by_node else (wait, "put")
    try:
        first.launch()
    except QwenRawError as error:
        assert f"would be 768 hand-overs ahead of {name}" in str(error), error
    else:
        raise AssertionError("a graph of 768 hand-overs was launched")


def main() -> None:
    """An assertion that fails is a traceback, and its exit code."""
    rng = np.random.default_rng(0)
    for options in cases.MEMOP:
        with ExitStack() as stack:
            pair = cases.Pair(*(stack.enter_context(CudaDevice(int(n))) for n in sys.argv[1].split(",")), None)
            cases.test_every_payload_arrives_whole_and_in_order(pair, options, rng)
            for slots in (1, 2, 3, 5):
                cases.test_any_number_of_slots_holds(pair, options, rng, slots)
            cases.test_puts_run_ahead_of_the_consumer(pair, options, rng)
            for value in (0.0, -0.0, float(np.float32(-1e-45))):
                cases.test_a_payload_may_look_like_the_signal(pair, options, value)
            cases.test_large_payloads(pair, options, rng)
            cases.test_payloads_of_several_sizes_and_in_pieces(pair, options, rng)
            refused(pair, options)
        print(*options.values(), "right", flush=True)
    print(len(cases.MEMOP), "ways")


if __name__ == "__main__":
    main()
