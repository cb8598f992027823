"""Every kernel on a GPU against itself in the simulator: the same launcher, the same inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conformance.attn_cases import ATTENTION
from conformance.each_cases import EACH
from conformance.kernel_cases import Case, all_cases
from conformance.machines import Machine, Output, compare
from conformance.rank_cases import rank_cases
from conformance.rows_cases import ROWS
from conformance.sm90_kernel_cases import hopper_cases

from qwen_raw import paths
from qwen_raw.kernels import compile as nvrtc
from qwen_raw.kernels.gemm_sm90 import ARCH

CASES = all_cases() + ATTENTION + hopper_cases() + ROWS + EACH + rank_cases()
NewRng = Callable[[], np.random.Generator]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.entry)


def test_every_kernel_has_a_case() -> None:
    """A new entry point in cuda_src needs a case; a case needs an entry point."""
    from qwen_raw.errors import UsageError
    from qwen_raw.simt.build import Builder

    try:
        builder = Builder()
    except UsageError as error:
        pytest.skip(str(error))
    found = [e.name for stem in nvrtc.stems() for e in builder.entry_points(paths.cuda_src() / f"{stem}.cu")]
    assert len(found) >= 40
    assert sorted(found) == sorted(case.entry for case in CASES)


@each_case
def test_simulator_gives_the_same_bits_in_any_order(
    in_order: Machine, shuffled: Machine, new_rng: NewRng, case: Case
) -> None:
    """The case launches its kernel, and no result depends on who ran when: so a GPU's may be held against it."""
    first, second = case.on(in_order, new_rng()), case.on(shuffled, new_rng())
    assert case.entry in in_order.dev.launched
    assert first.keys() == second.keys() and first
    for name, want in second.items():
        compare(first[name], Output(want.values), f"{case.entry}, {name}")
    assert any(output.values.any() for output in first.values()), "nothing was written"


@pytest.mark.gpu
@each_case
def test_gpu_equals_simulator(
    request: pytest.FixtureRequest, gpu: Machine, shuffled: Machine, new_rng: NewRng, case: Case
) -> None:
    if case.entry in {c.entry for c in hopper_cases()} and gpu.dev.arch != ARCH:
        pytest.skip(f"{gpu.dev.name} is no Hopper GPU")
    shuffled.mma_error = gpu.mma_error
    if case.ranks == 1:
        got, want = case.on(gpu, new_rng()), case.on(shuffled, new_rng())
        assert case.entry in gpu.dev.launched
    else:
        seed, results = request.getfixturevalue("some_ranks")
        print(f"rng seed {seed}")
        want = case.on(shuffled, np.random.default_rng(seed))
        got = {name: Output(values) for name, values in results[case.entry].items()}
    assert got.keys() == want.keys()
    for name, output in want.items():
        compare(got[name], output, f"{case.entry}, {name}")
