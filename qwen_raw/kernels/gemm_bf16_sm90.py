"""cuda_src/gemm_bf16_sm90.cu: prefill's matrix products with bf16 weights on Hopper."""

from qwen_raw.device import Device
from qwen_raw.kernels.gemm_sm90 import GemmSm90, Workspace


def create(dev: Device) -> GemmSm90:
    """The launchers, with a workspace of their own."""
    return GemmSm90("gemm_bf16_sm90", fp8=False, workspace=Workspace.create(dev))
