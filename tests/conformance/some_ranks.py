"""The cases that need several ranks, on one GPU: a device each, thus a stream each, whose kernels run side by side.

In a process of its own, `python -m conformance.some_ranks SEED FILE.npz`: should a poll run into its deadline, its trap
takes the process's GPU with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

import numpy as np
from conformance.machines import MOST_RANKS, Array, Machine, Recording
from conformance.rank_cases import rank_cases

import qwen_raw


def run(seed: int, folder: Path) -> dict[str, dict[str, Array]]:
    """Results by case and name, each case with a fresh generator of `seed`.

    Raises RuntimeError with the process's last words if it failed.
    """
    file = folder / "some_ranks.npz"
    roots = [str(Path(__file__).parents[1]), str(Path(qwen_raw.__file__).parents[1])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    command = [sys.executable, "-m", "conformance.some_ranks", str(seed), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    results: dict[str, dict[str, Array]] = {}
    with np.load(file) as archive:
        for key in archive.files:
            entry, _, name = key.partition("|")
            results.setdefault(entry, {})[name] = archive[key]
    return results


def main(seed: int, file: Path) -> None:
    """Runs the cases and writes what came out."""
    from qwen_raw.driver.device import CudaDevice

    arrays = {}
    with ExitStack() as stack:
        ranks = [Recording(stack.enter_context(CudaDevice(0))) for _ in range(MOST_RANKS)]

        def finish() -> None:
            for rank in ranks:
                rank.synchronize()

        machine = Machine(ranks, lambda name: None, nullcontext, finish)
        for case in rank_cases():
            if case.ranks > 1:
                for name, output in case.on(machine, np.random.default_rng(seed)).items():
                    arrays[f"{case.entry}|{name}"] = output.values
                assert all(case.entry in rank.launched for rank in ranks[: case.ranks]), case.entry
    np.savez(file, **arrays)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
