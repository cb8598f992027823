"""An e4m3 KV cache for any checkpoint, without calibration: scales from the weights, and a second part of large keys.

**Range.** RMSNorm bounds what K and V can be: Σ w·g·x̂ <= |w·g|·√D by Cauchy and Schwarz, since |x̂| <= √D. A scale
that is a power of two takes this bound, bias included, to 448 or less, so nothing ever saturates. It costs little, for
e4m3 is a floating-point format: its error is relative, at most 2⁻⁴, for 15 binades, whatever the scale. With D = 3584
and no bias a value as large as |w·g|, the typical one, is at least 3.7 after scaling: 240 times the smallest that has
full precision.

Powers of two fold exactly into the weights: a pair of dimensions that RoPE turns together gets its K rows and bias
divided by the scale and its Q rows multiplied by it; V is divided by one scale a layer, and O multiplied by it. So no
kernel knows of a scale.

**Precision.** A relative error is a large one where a key has a large bias, several hundred in Qwen2.5: 2⁻⁴ of 300,
times a query's element, would drown all else in the score. The FINE_PAIRS pairs of each KV head with the largest
root mean square, by weights and bias, are stored as two e4m3, the value and what rounding took off it: 2⁻⁸ relative,
what bf16 has. A key has HD + 2·FINE_PAIRS bytes, a value HD.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loaders.dtypes import E4M3_MAX, e4m3_to_f32, f32_to_e4m3
from qwen_raw.device import F32, Device
from qwen_raw.kernels.kv_cache import COARSE, FINE_PAIRS
from qwen_raw.kernels.kv_fold import kv_fold, kv_norms
from qwen_raw.model.rope import attention_factor
from qwen_raw.model.shard import Shard
from qwen_raw.model.weights import Weights

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KVFit:
    """How one layer's keys and values become e4m3. All scales are powers of two."""

    k_scale: Floats  # [KV, HD/2], of each pair (d, d + HD/2)
    v_scale: np.float32
    pairs: npt.NDArray[np.uint8]  # [KV, FINE_PAIRS] ascending: those with a second part

    @property
    def slots(self) -> npt.NDArray[np.uint8]:
        """[KV, HD/2]: where a pair is in `pairs`, or COARSE."""
        out = np.full(self.k_scale.shape, COARSE, np.uint8)
        np.put_along_axis(out, self.pairs.astype(np.int64), np.arange(FINE_PAIRS, dtype=np.uint8)[None], axis=1)
        return out

    def rows(self, group: int) -> Floats:
        """[(H + 2·KV)·HD]: what rows of QKV, and biases, are multiplied by. `group`: query heads of a KV head."""
        k = np.concatenate([self.k_scale, self.k_scale], axis=1)
        return np.concatenate(
            [np.repeat(k, group, axis=0).reshape(-1), (1 / k).reshape(-1), np.full(k.size, 1 / self.v_scale)]
        ).astype(np.float32)

    def round_k(self, k: Floats) -> Floats:
        """What the cache gives back of rotated keys k [KV, T, HD] float32."""
        scale = np.concatenate([self.k_scale, self.k_scale], axis=-1)[:, None]
        scaled = k / scale
        coarse = e4m3_to_f32(f32_to_e4m3(scaled))
        fine = np.concatenate([self.slots, self.slots], axis=-1)[:, None] != COARSE
        rest = e4m3_to_f32(f32_to_e4m3(scaled - coarse))
        out: Floats = np.where(fine, coarse + rest, coarse) * scale
        return out

    def round_v(self, v: Floats) -> Floats:
        """What the cache gives back of values v [KV, T, HD] float32."""
        out: Floats = e4m3_to_f32(f32_to_e4m3(v / self.v_scale)) * self.v_scale
        return out


def fit(norms: Floats, bias: Floats, D: int, KV: int, HD: int, rope_factor: float = 1.0) -> KVFit:
    """The fit of one layer, or of a rank's part of it.

    norms float32 [2·KV·HD]: |w·g| of the rows of K, then of V, g being the weight of the norm before them; bias
    likewise. `rope_factor`: what cos and sin are multiplied by (YaRN).
    """
    k, v = (part.reshape(KV, HD).astype(np.float64) for part in np.split(norms, 2))
    k_bias, v_bias = (np.abs(part.reshape(KV, HD).astype(np.float64)) for part in np.split(bias, 2))
    bound = np.hypot(*np.split(k * np.sqrt(D) + k_bias, 2, axis=1)) * rope_factor  # a turn may lay all on one of both
    square = k**2 + k_bias**2
    size = square[:, : HD // 2] + square[:, HD // 2 :]
    pairs = np.sort(np.argsort(-size, axis=1, kind="stable")[:, :FINE_PAIRS], axis=1).astype(np.uint8)
    largest = np.max(v * np.sqrt(D) + v_bias)
    return KVFit(_power_of_two(bound), np.float32(_power_of_two(largest)), pairs)


def _power_of_two(bound: npt.ArrayLike) -> Floats:
    """The smallest power of two that takes `bound` to what e4m3 holds; 1 for 0."""
    ratio = np.asarray(bound, np.float64) / E4M3_MAX
    out: Floats = np.where(ratio > 0, np.exp2(np.ceil(np.log2(np.maximum(ratio, 2.0**-100)))), 1.0).astype(np.float32)
    return out


def fold(dev: Device, shard: Shard, weights: Weights) -> tuple[KVFit, ...]:
    """Fit every layer of a rank's part of a model, and fold the scales into its weights and biases, in place."""
    c, kv = shard.local, 2 * shard.local.KV * shard.local.HD
    factor, fits = attention_factor(c), []
    norms = dev.empty((kv,), F32)
    for layer in weights.layers:
        queries = layer.qkv.N - kv
        kv_norms(dev, norms, layer.qkv.rows(queries, kv), layer.norm1)
        bias = layer.qkv_bias.download()
        found = fit(norms.download(), bias[queries:], c.D, c.KV, c.HD, factor)
        rows = found.rows(c.group)
        kv_fold(dev, layer.qkv, rows)
        layer.qkv_bias.upload(bias * rows)
        kv_fold(dev, layer.o, np.full(c.D, found.v_scale, np.float32))
        fits.append(found)
    return tuple(fits)
