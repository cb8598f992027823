"""What is compared: a GPU and the simulator, one or two ranks of each; and how their results are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qwen_raw import paths
from qwen_raw.device import Arg, Dim

Array = np.ndarray[Any, Any]
HERE = Path(__file__).parent
MOST_RANKS = 5  # that a case takes: kernels that are compiled for up to eight are used by five
# Deadline of the polls of kernels that wait for a peer: a fault ends the launch instead of hanging it.
LIMIT_NS = 2_000_000_000
PROBE_STEMS = ("probes", "probes_sm90")
HOPPER = (
    *("shared_", "mbarrier_", "tma_", "bulk_", "async_fence", "tensor_map_", "named_", "register_"),
    *("red_add_f32x2", "wgmma_", "stmatrix_"),
)


class Recording:
    """A device that also remembers the names of the kernels launched on it."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.launched: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, kernel: Any, grid: Dim, block: Dim, args: Sequence[Arg], **options: Any) -> None:
        """As the device's."""
        self.launched.add(kernel.name)
        self._device.launch(kernel, grid, block, args, **options)

    def enable_peer(self, other: Any) -> None:
        """As the device's."""
        self._device.enable_peer(other._device)


@dataclass
class Machine:
    """Ranks of one kind. `probe(name)`: an entry point of probes.cu, for rank 0. `finish()`: waits for all."""

    ranks: list[Recording]
    probe: Callable[[str], Any]
    holding: Callable[[], Any]  # context: what it queues starts together, where that can be said
    finish: Callable[[], None]
    mma_error: float = 2.0**-22  # see mma_error()

    def of(self, ranks: int) -> Machine:
        """The first so many ranks of it."""
        return replace(self, ranks=self.ranks[:ranks])

    @property
    def dev(self) -> Recording:
        return self.ranks[0]

    def run(
        self,
        name: str,
        args: Sequence[Arg],
        *,
        grid: int = 3,
        block: int = 64,
        pdl: bool = False,
        smem: int = 0,
        cluster: int | None = None,
    ) -> None:
        """Queues the probe `name` on rank 0."""
        clusters = {} if cluster is None else {"cluster": (cluster, 1, 1)}
        self.dev.launch(self.probe(f"probe_{name}"), (grid, 1, 1), (block, 1, 1), args, pdl=pdl, smem=smem, **clusters)

    @contextmanager
    def together(self, *kernels: tuple[str, str]) -> Iterator[None]:
        """The block launches kernels that wait for each other, all ranks' before the host waits for any.

        `kernels`: (stem, name) of each; loaded first, because loading code may wait for what runs.
        """
        for rank in self.ranks:
            for stem, name in kernels:
                rank.kernel(stem, name)
            rank.synchronize()
        with self.holding():
            yield
        self.finish()


def mma_error(arch: str) -> float:
    """What one mma.sync may be off by, as a part of the sum of its addends' magnitudes: two fp32 ulp from sm_90 on.

    Four before: the window into which addends are shifted is a bit narrower, and there are two additions, not one.
    """
    return 2.0**-21 if arch in ("sm_80", "sm_86", "sm_87", "sm_89") else 2.0**-22


@dataclass(frozen=True)
class Output:
    """One result: `values` are compared as numbers, a NaN equals any NaN, and -0 is not +0.

    `allowed`: the absolute difference that is right, for each element or for all; 0: every bit must agree.
    `share`: of the elements (and two more) may differ at all.
    """

    values: Array
    allowed: Array | float = 0.0
    share: float = 1.0


def compare(got: Output, want: Output, what: str) -> None:
    """Raises AssertionError at the worst element. The tolerance is `want`'s."""
    a, b = got.values, want.values
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.dtype}{a.shape}, expected {b.dtype}{b.shape}"
    assert a.size, f"{what}: nothing to compare"
    if a.dtype.kind != "f":
        np.testing.assert_array_equal(a, b, err_msg=what)
        return
    same = (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a.astype(np.float64) - b.astype(np.float64)))
    error[~same & ~(np.isfinite(a) & np.isfinite(b))] = np.inf
    allowed = np.broadcast_to(np.asarray(want.allowed, np.float64), error.shape)
    bad = np.where(allowed > 0, error > allowed, ~same)
    if bad.any():
        excess = np.where(bad, error - allowed, -1.0)
        at = np.unravel_index(int(excess.argmax()), excess.shape)
        place = tuple(int(i) for i in at)
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} wrong, worst at {place}: "
            f"got {a[at]!r}, expected {b[at]!r}, allowed {allowed[at]:g}"
        )
    differing = int((~same).sum())
    assert differing <= want.share * a.size + 2, f"{what}: {differing} of {a.size} differ, {want.share:.0%} may"


def stage_probes(root: Path) -> Path:
    """Makes `root` what the GPU's compiler takes for a source root: the probes beside the project's real headers."""
    shutil.copytree(paths.cuda_src() / "include", root / "include")
    for stem in PROBE_STEMS:
        shutil.copy(HERE / f"{stem}.cu", root)
    return root


def probe_stem(name: str) -> str:
    """The file that has the entry point `name`: what Hopper alone has is apart."""
    wrapper = name.removeprefix("probe_")
    return PROBE_STEMS[1] if wrapper.startswith(HOPPER) else PROBE_STEMS[0]
