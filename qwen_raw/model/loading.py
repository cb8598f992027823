"""Checkpoint tensors → device buffers: files are uploaded, synthetic tensors made in place, bf16 may become fp8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loaders.dtypes import e4m3_to_f32, f32_to_bf16
from loaders.tensor import Tensor
from qwen_raw.config import ModelConfig
from qwen_raw.device import BF16, E4M3, F32, Buffer, Device
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import Progress
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.quantize import quantize_rows
from qwen_raw.kernels.synthetic import synthetic_bf16, synthetic_e4m3


class LinearLike(Protocol):
    """One linear of a checkpoint."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def scale(self) -> npt.NDArray[np.float32] | None: ...
    @property
    def bias(self) -> npt.NDArray[np.float32] | None: ...


class CheckpointLike(Protocol):
    """What `loaders.resolve.open_model` returns, as far as the device needs it."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    def linear(self, name: str) -> LinearLike: ...


class WeightLoader:
    """Moves a checkpoint to one device, tensor by tensor, and reports progress in bytes."""

    def __init__(
        self, dev: Device, checkpoint: CheckpointLike, *, fp8: bool, total: int, progress: Progress | None
    ) -> None:
        self.dev, self.checkpoint, self.fp8 = dev, checkpoint, fp8
        self._total, self._progress, self._done = total, progress, 0
        self._staging: Buffer | None = None  # bf16 rows on their way to e4m3

    def vector(self, name: str, n: int) -> Buffer:
        """A norm weight, bf16 [n]."""
        buffer = self.dev.empty((n,), BF16)
        self._fill_bf16(buffer, self._tensor(name, (n,)))
        return buffer

    def matrix(self, name: str, shape: tuple[int, int]) -> Buffer:
        """The embedding or the LM head, bf16 whatever the linears are."""
        buffer = self.dev.empty(shape, BF16)
        self._fill_bf16(buffer, self._tensor(name, shape))
        return buffer

    def linear(self, names: Sequence[str], rows: Sequence[int], K: int) -> Linear:
        """The named linears stacked by rows: [sum(rows), K], bf16 or e4m3 with scales [sum(rows)]."""
        N = sum(rows)
        weight = self.dev.empty((N, K), E4M3 if self.fp8 else BF16)
        scale = self.dev.empty((N,), F32) if self.fp8 else None
        first = 0
        for name, n in zip(names, rows, strict=True):
            source = self.checkpoint.linear(name)
            if source.weight.shape != (n, K):
                raise QwenRawError(f"{name}.weight is {list(source.weight.shape)}, the config says [{n}, {K}]")
            part = weight.view((n, K), first * K)
            if scale is None:
                self._fill_linear_bf16(part, source)
            else:
                self._fill_linear_fp8(part, scale.view((n,), first), source)
            first += n
        return Linear(weight, scale)

    def biases(self, names: Sequence[str], rows: Sequence[int]) -> Buffer:
        """The named linears' biases end to end, f32 [sum(rows)]; zeros where a linear has none."""
        parts = []
        for name, n in zip(names, rows, strict=True):
            bias = self.checkpoint.linear(name).bias
            parts.append(np.zeros(n, np.float32) if bias is None else bias)
        return self.dev.array(np.concatenate(parts).astype(np.float32))

    def finish(self) -> None:
        """Free the staging memory; report the whole."""
        self._staging = None
        self.dev.synchronize()
        if self._progress is not None:
            self._progress("weights", self._total, self._total)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            raise QwenRawError(f"the checkpoint has no tensor {name}")
        if tensor.shape != shape:
            raise QwenRawError(f"{name} is {list(tensor.shape)}, the config says {list(shape)}")
        return tensor

    def _fill_bf16(self, buffer: Buffer, tensor: Tensor) -> None:
        s = tensor.synthetic
        if s is not None and tensor.dtype == "BF16":
            synthetic_bf16(self.dev, buffer, s.tid, s.seed, s.bound)
        else:
            buffer.upload(tensor.bf16())
        self._advance(buffer.nbytes)

    def _fill_linear_bf16(self, buffer: Buffer, source: LinearLike) -> None:
        if source.scale is None:
            self._fill_bf16(buffer, source.weight)
            return
        widened = e4m3_to_f32(source.weight.raw) * source.scale[:, None]
        buffer.upload(f32_to_bf16(widened))
        self._advance(buffer.nbytes)

    def _fill_linear_fp8(self, q: Buffer, scale: Buffer, source: LinearLike) -> None:
        if source.scale is None:
            self._quantize(q, scale, source.weight)
        else:
            s = source.weight.synthetic
            if s is not None:
                synthetic_e4m3(self.dev, q, s.tid, s.seed)
            else:
                q.upload(source.weight.raw)
            scale.upload(np.ascontiguousarray(source.scale, np.float32))
        self._advance(q.nbytes)

    def _quantize(self, q: Buffer, scale: Buffer, tensor: Tensor) -> None:
        """bf16 → e4m3 on the device; the bf16 rows pass through one staging buffer that grows to the largest tensor."""
        n = q.shape[0] * q.shape[1]
        if self._staging is None or self._staging.nbytes < 2 * n:
            self._staging = self.dev.empty((n,), BF16)
        rows = self._staging.view(q.shape)
        if tensor.synthetic is not None and tensor.dtype == "BF16":
            synthetic_bf16(self.dev, rows, tensor.synthetic.tid, tensor.synthetic.seed, tensor.synthetic.bound)
        else:
            rows.upload(tensor.bf16())
        quantize_rows(self.dev, q, scale, rows)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress("weights", min(self._done, self._total), self._total)
