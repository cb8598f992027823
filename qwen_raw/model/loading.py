"""Checkpoint tensors → device buffers: files are uploaded, synthetic tensors made in place, bf16 may become fp8.

A rank takes a `Part` of each matrix. Of a file it reads that part only, with one exception: rounding to fp8 takes the
scale of a row from the whole row, so that a model has the same weights however many ranks share it. Tensors go a piece
at a time: the host holds no second copy of one, whether its columns are cut or its values converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from qwen_raw.kernels.synthetic import Window, synthetic_bf16, synthetic_e4m3

PIECE_BYTES = 16 << 20  # of a tensor at a time: what is not contiguous in the file, or converted, is copied on the host


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


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of the matrix `name`, which has `shape` [N, K] in the checkpoint."""

    name: str
    shape: tuple[int, int]
    rows: range
    columns: range

    @staticmethod
    def of_rows(name: str, shape: tuple[int, int], rows: range) -> Part:
        return Part(name, shape, rows, range(shape[1]))

    @staticmethod
    def of_columns(name: str, shape: tuple[int, int], columns: range) -> Part:
        return Part(name, shape, range(shape[0]), columns)

    @property
    def size(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def window(self) -> Window:
        return Window(self.rows.start * self.shape[1] + self.columns.start, len(self.columns), self.shape[1])

    def pieces(self, tensor: Tensor) -> Iterator[tuple[int, Part]]:
        """(first row within this part, its rows from there on), each as large as the host may hold a copy of.

        A synthetic tensor is one piece: it is computed whole each time it is asked for.
        """
        row = len(self.columns) * 4  # bytes, of what a conversion passes through
        step = len(self.rows) if tensor.synthetic is not None else max(1, PIECE_BYTES // row)
        for first in range(0, len(self.rows), step):
            yield first, Part(self.name, self.shape, self.rows[first : first + step], self.columns)

    def whole_rows(self) -> Part:
        """The same rows in their full length."""
        return Part.of_rows(self.name, self.shape, self.rows)

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor, as bits that are read when they are asked for."""
        rows, columns = slice(self.rows.start, self.rows.stop), slice(self.columns.start, self.columns.stop)
        return replace(tensor, shape=self.size, load=lambda: tensor.load()[rows, columns], synthetic=None)


def _rows(buffer: Buffer, first: int, piece: Part) -> Buffer:
    """Where a piece goes in the buffer of the whole part."""
    return buffer.view(piece.size, first * len(piece.columns))


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
        buffer.upload(self._tensor(name, (n,)).bf16())
        self._advance(buffer.nbytes)
        return buffer

    def matrix(self, part: Part) -> Buffer:
        """Part of the embedding or of the LM head, bf16 whatever the linears are."""
        buffer = self.dev.empty(part.size, BF16)
        self._fill_bf16(buffer, self._tensor(part.name, part.shape), part)
        self._advance(buffer.nbytes)
        return buffer

    def linear(self, parts: Sequence[Part]) -> Linear:
        """The parts stacked by rows: [N, K], bf16 or e4m3 with scales [N]. Names without ".weight"."""
        N, K = sum(len(part.rows) for part in parts), len(parts[0].columns)
        weight = self.dev.empty((N, K), E4M3 if self.fp8 else BF16)
        scale = self.dev.empty((N,), F32) if self.fp8 else None
        first = 0
        for part in parts:
            source = self.checkpoint.linear(part.name)
            if source.weight.shape != part.shape:
                raise QwenRawError(
                    f"{part.name}.weight is {list(source.weight.shape)}, the config says {list(part.shape)}"
                )
            target = weight.view(part.size, first * K)
            if scale is None:
                self._fill_linear_bf16(target, source, part)
            else:
                self._fill_linear_fp8(target, scale.view((len(part.rows),), first), source, part)
            self._advance(target.nbytes)
            first += len(part.rows)
        return Linear(weight, scale)

    def biases(self, parts: Sequence[Part]) -> Buffer:
        """The parts' biases end to end, f32 [N]; zeros where a linear has none."""
        pieces = []
        for part in parts:
            bias = self.checkpoint.linear(part.name).bias
            rows = slice(part.rows.start, part.rows.stop)
            pieces.append(np.zeros(len(part.rows), np.float32) if bias is None else bias[rows])
        return self.dev.array(np.concatenate(pieces).astype(np.float32))

    def finish(self) -> None:
        """Free the staging memory; report the whole."""
        self._staging = None
        self.dev.synchronize()
        self._done = self._total
        self._advance(0)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            raise QwenRawError(f"the checkpoint has no tensor {name}")
        if tensor.shape != shape:
            raise QwenRawError(f"{name} is {list(tensor.shape)}, the config says {list(shape)}")
        return tensor

    def _fill_bf16(self, buffer: Buffer, tensor: Tensor, part: Part) -> None:
        s = tensor.synthetic
        if s is not None and tensor.dtype == "BF16":
            synthetic_bf16(self.dev, buffer, s.tid, s.seed, s.bound, part.window)
        else:
            for first, piece in part.pieces(tensor):
                _rows(buffer, first, piece).upload(piece.of(tensor).bf16())

    def _fill_linear_bf16(self, buffer: Buffer, source: LinearLike, part: Part) -> None:
        if source.scale is None:
            self._fill_bf16(buffer, source.weight, part)
            return
        for first, piece in part.pieces(source.weight):
            scale = source.scale[piece.rows.start : piece.rows.stop, None]
            widened = e4m3_to_f32(piece.of(source.weight).raw) * scale
            _rows(buffer, first, piece).upload(f32_to_bf16(widened))

    def _fill_linear_fp8(self, q: Buffer, scale: Buffer, source: LinearLike, part: Part) -> None:
        if source.scale is None:
            self._quantize(q, scale, source.weight, part)
            return
        s = source.weight.synthetic
        if s is not None:
            synthetic_e4m3(self.dev, q, s.tid, s.seed, part.window)
        else:
            for first, piece in part.pieces(source.weight):
                _rows(q, first, piece).upload(piece.of(source.weight).raw)
        scale.upload(np.ascontiguousarray(source.scale[part.rows.start : part.rows.stop], np.float32))

    def _quantize(self, q: Buffer, scale: Buffer, tensor: Tensor, part: Part) -> None:
        """bf16 → e4m3 on the device; the bf16 rows pass through one staging buffer that grows to the largest tensor."""
        whole = part.whole_rows()
        n = whole.size[0] * whole.size[1]
        if self._staging is None or self._staging.nbytes < 2 * n:
            self._staging = self.dev.empty((n,), BF16)
        rows = self._staging.view(whole.size)
        self._fill_bf16(rows, tensor, whole)
        quantize_rows(self.dev, q, scale, rows, part.columns.start)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress("weights", min(self._done, self._total), self._total)
