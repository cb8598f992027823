"""Rotary position embedding tables, plain and YaRN-scaled, with angles in float64.

At position 30,000 an angle in fp32 is off by about 2e-3 rad and one in bf16 means nothing; float64 costs nothing here,
because the table is made once. The pairing is Hugging Face's: element i of a head turns with element i + HD/2.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qwen_raw.config import ModelConfig, Yarn

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def inverse_frequencies(config: ModelConfig) -> F64:
    """Radians per position of each pair, [HD/2] float64: theta**(-2i/HD), blended as YaRN says where it is set."""
    half = config.HD // 2
    plain = config.rope_theta ** (-np.arange(half, dtype=np.float64) * 2 / config.HD)
    return plain if config.yarn is None else _yarn_blend(plain, config.yarn, config.HD, config.rope_theta)


def _yarn_blend(plain: F64, yarn: Yarn, head_dim: int, theta: float) -> F64:
    """Slow pairs are interpolated (divided by the factor), fast ones kept, those between ramped linearly.

    YaRN (Peng et al., arXiv 2309.00071, section 3.2), with the rounding of transformers' `_compute_yarn_parameters`.
    """

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that makes `times` full turns over the original context."""
        return head_dim * math.log(yarn.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), head_dim - 1)
    width = high - low if high != low else 0.001  # transformers' guard against a ramp of width 0
    ramp = np.clip((np.arange(plain.size, dtype=np.float64) - low) / width, 0.0, 1.0)
    blended: F64 = plain / yarn.factor * ramp + plain * (1.0 - ramp)
    return blended


def attention_factor(config: ModelConfig) -> float:
    """What cos and sin are both multiplied by: 1, or YaRN's 0.1·ln(factor) + 1 unless the checkpoint names another."""
    if config.yarn is None:
        return 1.0
    if config.yarn.attention_factor is not None:
        return config.yarn.attention_factor
    return 0.1 * math.log(config.yarn.factor) + 1.0 if config.yarn.factor > 1 else 1.0


def rope_table(config: ModelConfig, positions: npt.ArrayLike) -> tuple[F32, F32]:
    """(cos, sin) for `positions` [n], each [n, HD/2] float32, YaRN's attention factor included."""
    angles = np.asarray(positions, dtype=np.float64)[:, None] * inverse_frequencies(config)
    factor = attention_factor(config)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
