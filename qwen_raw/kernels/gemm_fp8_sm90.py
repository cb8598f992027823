"""cuda_src/gemm_fp8_sm90.cu: prefill's matrix products with e4m3 weights and activations on Hopper."""

from qwen_raw.device import Device
from qwen_raw.kernels.gemm_sm90 import GemmSm90, Workspace


def create(dev: Device) -> GemmSm90:
    """The launchers, with a workspace of their own."""
    return GemmSm90("gemm_fp8_sm90", fp8=True, workspace=Workspace.create(dev))
