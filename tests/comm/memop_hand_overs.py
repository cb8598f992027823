"""Run by test_signal.py: `python memop_hand_overs.py 0,0` puts its tests to the forms whose streams wait."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import test_signal as cases  # noqa: E402

from qwen_raw.driver.device import CudaDevice  # noqa: E402


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
        print(*options.values(), "right", flush=True)
    print(len(cases.MEMOP), "ways")


if __name__ == "__main__":
    main()
