"""Models with random weights, of any Qwen2.5 size: `random:7b` has every shape of the real one and needs no files.

Each value is a function of (element's row-major index i, tensor id, seed), so that a device makes the same bits with no
transfer (cuda_src/synthetic.cu). In uint32 arithmetic:

  x  = lo32(i)·0x9E3779B1 + hi32(i)·0x85EBCA77 + tid·0xC2B2AE3D + seed
  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
  u  = (float32(x >> 8) - 2^23) · 2^-23 ∈ [-1, 1)
  bf16 weight = bf16(u · bound);   e4m3 weight = e4m3(u · 448) with the row scale bound / 448

bound = √3 · std makes the variance std². std: linears 1/√K of their input width K, o_proj and down_proj further divided
by √(2L) (so that the residual stream stays near 1 whatever the depth), embedding 1, q, k, v biases 0.1, an untied head
2/√D. Norm weights are 1. Where the head is the embedding, that has 1/(2√D), and o_proj half of its std: else a token's
own embedding, or what attention has gathered over the context, outweighs what the layers make of the last token, and
greedy text is one token for ever.
"""

from dataclasses import replace
from functools import partial
from math import prod, sqrt
from types import MappingProxyType
from typing import Any, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt

from loaders.checkpoint import EMBEDDING, HEAD, Checkpoint, linear_shapes, tensor_shapes
from loaders.dtypes import E4M3_MAX, F32, U8, U16, f32_to_bf16, f32_to_e4m3
from loaders.quant_format import QuantFormat
from loaders.tensor import SyntheticSource, Tensor
from qwen_raw.config import GenerationDefaults, ModelConfig
from qwen_raw.errors import UsageError

_CHUNK = 1 << 16  # divides 2^32: the upper half of the index is constant in a chunk
_BF16_ONE = 0x3F80


def _size(D: int, L: int, H: int, KV: int, I: int, V: int, tied: bool) -> ModelConfig:  # noqa: E741
    return ModelConfig(
        D=D,
        H=H,
        KV=KV,
        HD=D // H,
        I=I,
        V=V,
        L=L,
        rms_eps=1e-6,
        rope_theta=1e6,
        max_position=32768,
        tied=tied,
        eos_ids=(151645, 151643),
        bos_id=151643,
    )


# The published dimensions of Qwen2.5 (config.json of the Instruct models).
SIZES = MappingProxyType(
    {
        "0.5b": _size(D=896, L=24, H=14, KV=2, I=4864, V=151936, tied=True),
        "1.5b": _size(D=1536, L=28, H=12, KV=2, I=8960, V=151936, tied=True),
        "3b": _size(D=2048, L=36, H=16, KV=2, I=11008, V=151936, tied=True),
        "7b": _size(D=3584, L=28, H=28, KV=4, I=18944, V=152064, tied=False),
        "14b": _size(D=5120, L=48, H=40, KV=8, I=13824, V=152064, tied=False),
        "32b": _size(D=5120, L=64, H=40, KV=8, I=27648, V=152064, tied=False),
        "72b": _size(D=8192, L=80, H=64, KV=8, I=29568, V=152064, tied=False),
    }
)


def random_config(size: str) -> ModelConfig:
    """The dimensions of a size, named "random:SIZE", without EOS ids: random text never ends of itself."""
    key = size.lower()
    if key not in SIZES:
        raise UsageError(f"there is no Qwen2.5 of size {size!r}; sizes are {', '.join(SIZES)}")
    return replace(SIZES[key], eos_ids=(), bos_id=None, name=f"random:{key}")


def parse_random(spec: str, what: str = "model") -> tuple[str, int]:
    """ "random:SIZE" or "random:SIZE:SEED" → (size, seed); seed 0 where none is given. UsageError on anything else.

    `what`: messages call it.
    """
    kind, _, rest = spec.partition(":")
    size, colon, seed = rest.partition(":")
    if kind != "random" or size.lower() not in SIZES:
        raise UsageError(f"{what} {spec!r} is not random:SIZE or random:SIZE:SEED with SIZE one of {', '.join(SIZES)}")
    if colon and not (seed.isdecimal() and seed.isascii() and int(seed) < 2**32):
        raise UsageError(f"{what} {spec!r} has the seed {seed!r}, expected an integer from 0 to 4294967295")
    return size.lower(), int(seed) if colon else 0


def tensor_id(name: str) -> int:
    """The uint32 that stands for a tensor in the formula: CRC-32 of its Hugging Face name."""
    return crc32(name.encode())


def synthetic_units(begin: int, end: int, tid: int, seed: int) -> F32:
    """u of elements begin…end, which share the upper half of their index."""
    constant = ((begin >> 32) * 0x85EBCA77 + tid * 0xC2B2AE3D + seed) & 0xFFFFFFFF
    x = np.arange(begin, end, dtype=np.uint64).astype(np.uint32)  # the lower half
    x *= np.uint32(0x9E3779B1)
    x += np.uint32(constant)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    u = (x >> np.uint32(8)).astype(np.float32)
    u -= np.float32(2.0**23)
    u *= np.float32(2.0**-23)
    return u


def synthetic_values(shape: tuple[int, ...], tid: int, seed: int, bound: float) -> U16:
    """bfloat16 bits in `shape`. `bound` is rounded to float32 before it is used."""
    out = np.empty(prod(shape), np.uint16)
    for i in range(0, out.size, _CHUNK):
        end = min(i + _CHUNK, out.size)
        out[i:end] = f32_to_bf16(synthetic_units(i, end, tid, seed) * np.float32(bound))
    return out.reshape(shape)


def synthetic_values_e4m3(shape: tuple[int, ...], tid: int, seed: int) -> U8:
    """e4m3 bits in `shape`, uniform over ±448; the row scale that belongs to them is `e4m3_scale(bound)`."""
    out = np.empty(prod(shape), np.uint8)
    for i in range(0, out.size, _CHUNK):
        end = min(i + _CHUNK, out.size)
        out[i:end] = f32_to_e4m3(synthetic_units(i, end, tid, seed) * np.float32(E4M3_MAX))
    return out.reshape(shape)


def e4m3_scale(bound: float) -> np.float32:
    """bound / 448 in float32."""
    return np.float32(np.float32(bound) / np.float32(E4M3_MAX))


def synthetic_bound(config: ModelConfig, name: str) -> float | None:
    """Half-width of the tensor's uniform distribution, a float32's value; None for a norm weight, which is 1."""
    if name.endswith(("layernorm.weight", "norm.weight")):
        return None
    if name == EMBEDDING:
        std = 1 / (2 * sqrt(config.D)) if config.tied else 1.0
    elif name.endswith(".bias"):
        std = 0.1
    elif name == HEAD:
        std = 2 / sqrt(config.D)
    else:
        std = 1 / sqrt(linear_shapes(config)[name.removesuffix(".weight")][1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= sqrt(2 * config.L)
        if config.tied and name.endswith("o_proj.weight"):
            std /= 2
    return float(np.float32(sqrt(3) * std))


class SyntheticCheckpoint(Checkpoint):
    """A Checkpoint whose tensors are computed each time they are asked for; `Tensor.synthetic` says from what."""


def random_checkpoint(
    model: str | ModelConfig, dtype: Literal["bf16", "fp8"] = "bf16", seed: int = 0
) -> SyntheticCheckpoint:
    """A random model of a size ("7b") or of any config. fp8: the layers' linears are e4m3, all else bf16."""
    config = random_config(model) if isinstance(model, str) else model
    tensors: dict[str, Tensor] = {}
    linears = {f"{module}.weight" for module in linear_shapes(config)} if dtype == "fp8" else set()
    for name, shape in tensor_shapes(config).items():
        bound, tid = synthetic_bound(config, name), tensor_id(name)
        if bound is None:
            tensors[name] = Tensor(name, "BF16", shape, partial(np.full, shape, _BF16_ONE, np.uint16))
            continue
        source = SyntheticSource(tid, seed, bound)
        make: Any = partial(synthetic_values, shape, tid, seed, bound)
        if name in linears:
            make = partial(synthetic_values_e4m3, shape, tid, seed)
            tensors[f"{name}_scale"] = _constant(f"{name}_scale", (shape[0], 1), e4m3_scale(bound))
        tensors[name] = Tensor(name, "F8_E4M3" if name in linears else "BF16", shape, make, source)
    quant = QuantFormat("compressed-tensors", ("channel",)) if dtype == "fp8" else None
    return SyntheticCheckpoint(config, GenerationDefaults(), tensors, quant)


def _constant(name: str, shape: tuple[int, ...], value: np.float32) -> Tensor:
    def fill() -> npt.NDArray[np.float32]:
        return np.full(shape, value, np.float32)

    return Tensor(name, "F32", shape, fill)
