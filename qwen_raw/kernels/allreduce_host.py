"""cuda_src/allreduce_host.cu: every rank reads every rank's vector; that they are there is the host's business."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qwen_raw.device import BF16, F32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import PACK, connect, peer_struct, variant

STEM = "allreduce_host"
THREADS = 128


def load(devices: Sequence[Device]) -> None:
    """Peer access between all devices, and the kernel on each. Raises QwenRawError where there is no peer path."""
    connect(devices, STEM, ["allreduce_host_add_bf16"])


def allreduce_host(dev: Device, h: Buffer, inputs: Sequence[Buffer]) -> None:
    """h f32 [n] += Σ over ranks of inputs bf16 [n] each, one a rank, all of them written and none about to change."""
    (n,) = h.shape
    require(n > 0 and n % PACK == 0, f"a message of {n} elements is not whole packs of {PACK}")
    check_buffer(h, (n,), F32, "h")
    for inp in inputs:
        check_buffer(inp, (n,), BF16, "in")
    kernel = dev.kernel(STEM, f"allreduce_host_add_bf16_r{variant(len(inputs))}")
    blocks = min(-(-n // (PACK * THREADS)), 4 * dev.sm_count)
    args: list[Arg] = [h, peer_struct(inputs), np.int32(len(inputs)), np.int32(n // PACK)]
    dev.launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), args)
