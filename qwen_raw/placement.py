"""Where a model runs: the tensor-parallel degree is checked, then one device a rank is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qwen_raw.config import ModelConfig
from qwen_raw.device import Device
from qwen_raw.driver.probe import probe
from qwen_raw.errors import QwenRawError, UsageError, close_all

DeviceName = Literal["auto", "cuda", "cpu", "sim"]
Kind = Literal["cuda", "cpu", "sim"]


@dataclass(frozen=True, slots=True)
class Placement:
    """What was opened; `devices`: one a rank, none for the NumPy reference. `notes`: lines that a user should see.

    `draft`: the draft model's, if it has one of its own.
    """

    kind: Kind
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    draft: Device | None = None

    @property
    def opened(self) -> tuple[Device, ...]:
        """All devices."""
        return self.devices if self.draft is None else (*self.devices, self.draft)


def degree(tp: int | None, gpus: Sequence[int] | None, config: ModelConfig, *, fp8: bool) -> int:
    """How many ranks: as many as GPUs are named, or `tp`, or 1. UsageError if the model does not split so.

    `gpus`: GPU numbers by rank. `fp8`: how the linears are held.
    """
    if gpus is not None and not gpus:
        raise UsageError("devices names no GPU: expected one a rank, such as 0,1")
    if gpus is not None and tp is not None and tp != len(gpus):
        raise UsageError(f"tp {tp} with {len(gpus)} devices: name one GPU a rank (a GPU may repeat), or leave one out")
    ranks = len(gpus) if gpus is not None else 1 if tp is None else tp
    pack = 16 if fp8 else 8
    legal = config.legal_tp(pack)
    if ranks in legal:
        return ranks
    fits = " or ".join(filter(None, (", ".join(map(str, legal[:-1])), str(legal[-1]))))
    why = f"{config.H} query and {config.KV} KV heads"
    if 1 <= ranks <= 8 and config.H % ranks == 0 and (config.KV % ranks == 0 or ranks % config.KV == 0):
        why = f"intermediate size of {config.I}, of which a rank takes whole packs of {pack}"
    raise UsageError(f"tp {ranks} does not fit {config.name}'s {why}: use {fits}")


def place(wanted: DeviceName, ranks: int, gpus: Sequence[int] | None, draft_gpu: int | None = None) -> Placement:
    """Open one device a rank. The CUDA packages are imported only where they are wanted.

    `gpus`: GPU numbers by rank; None: 0, 1, … `draft_gpu`: of a draft model that has a device of its own, a rank's GPU
    or another. UsageError for what there is not.
    """
    if wanted in ("cpu", "sim") and gpus is not None:
        raise UsageError(f"--devices (devices=) names GPUs: it does not go with --device {wanted}")
    if wanted == "cpu" and draft_gpu is not None:
        raise UsageError("--draft-device (draft_device=) names a GPU: it does not go with --device cpu")
    if wanted == "cpu":
        if ranks > 1:
            raise UsageError(
                f"tp {ranks} needs GPUs: the NumPy reference of device cpu is one rank (device sim has any)"
            )
        return Placement("cpu")
    if wanted == "sim":
        from qwen_raw.simt.device import SimDevice

        if draft_gpu not in (None, ranks):
            raise UsageError(
                f"draft device {draft_gpu}: beside {ranks} simulated rank{'s' * (ranks > 1)} it is {ranks}: use {ranks}"
            )
        opened = tuple(SimDevice.of_world(ranks + (draft_gpu is not None)))
        slow = ("the kernels are simulated on the CPU: this is slow",)
        return Placement("sim", opened[:ranks], slow, opened[ranks] if draft_gpu is not None else None)
    try:
        devices = _open_gpus(range(ranks) if gpus is None else gpus)
    except QwenRawError as error:
        one = ranks == 1
        if wanted == "auto" and one and gpus is None:
            # a machine without a GPU is no news to its owner; a GPU that cannot be used is
            return Placement("cpu", (), () if isinstance(error, UsageError) else (f"the GPU cannot be used: {error}",))
        if not isinstance(error, UsageError):
            raise
        hint = "use --device cpu to run without a GPU" if one else "--device sim simulates several ranks"
        if not one and len(set(gpus or (0, 1))) > 1 and probe().gpus:
            hint = f"a GPU may have several ranks (--devices 0,0), and {hint}"
        raise UsageError(f"{error}: {hint}") from error
    return Placement("cuda", devices, draft=None if draft_gpu is None else _open_draft(draft_gpu, devices))


def _open_draft(gpu: int, others: Sequence[Device]) -> Device:
    """The draft model's, or none at all."""
    try:
        return _open_gpus([gpu])[0]
    except BaseException as error:
        close_all([device.close for device in others])
        if not isinstance(error, UsageError):
            raise
        raise UsageError(f"draft_device {gpu}: {error}; it may be a rank's GPU too") from error


def _open_gpus(gpus: Sequence[int]) -> tuple[Device, ...]:
    """All of them, or none."""
    from qwen_raw.driver.device import CudaDevice

    opened: list[CudaDevice] = []
    try:
        for ordinal in gpus:
            opened.append(CudaDevice(ordinal))
    except BaseException:
        close_all([device.close for device in opened])
        raise
    return tuple(opened)
