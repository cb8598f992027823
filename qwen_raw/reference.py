"""The model in fp32 NumPy with a KV cache: the oracle of every test, and the backend where there is no GPU.

Qwen2 as Hugging Face transformers computes it: RMSNorm, attention with grouped queries and QKV biases, SwiGLU, rotary
position embedding, residual stream. Weights are rounded to bf16 where a file holds more, as a GPU would store them, and
widened to fp32 on loading (fp8: weight times the scale of its row).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from loaders.checkpoint import EMBEDDING, Checkpoint
from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16, quantize_rows_e4m3
from loaders.tensor import Tensor
from qwen_raw.config import ModelConfig
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import Progress, logits_hash
from qwen_raw.generation.sampling import choose
from qwen_raw.generation.speculation import PassCounts
from qwen_raw.model.kv_fp8 import KVFit, fit
from qwen_raw.model.rope import attention_factor, rope_table

F32 = npt.NDArray[np.float32]
Activations = Literal["fp32", "bf16"]
KVDType = Literal["bf16", "fp8"]

CHUNK = 256  # tokens of a prompt that go through the layers together: bounds the [H, CHUNK, S] scores


class KVCache:
    """Keys (rotated) and values of one sequence: k, v [L, KV, capacity, HD] float32, of which `length` are valid."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        shape = (config.L, config.KV, capacity, config.HD)
        self.k: F32 = np.empty(shape, np.float32)
        self.v: F32 = np.empty(shape, np.float32)
        self.capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


@dataclass(slots=True)
class Layer:
    """One decoder layer's weights, float32, [out, in]. Q, K, V and gate, up are stacked to be one product each."""

    attn_norm: F32  # [D]
    qkv: F32  # [(H + 2·KV)·HD, D]
    qkv_bias: F32  # [(H + 2·KV)·HD]
    o: F32  # [D, H·HD]
    mlp_norm: F32  # [D]
    gate_up: F32  # [2·I, D]
    down: F32  # [D, I]

    @property
    def nbytes(self) -> int:
        parts = (self.attn_norm, self.qkv, self.qkv_bias, self.o, self.mlp_norm, self.gate_up, self.down)
        return sum(part.nbytes for part in parts)


class ReferenceModel:
    """Qwen2 in fp32. `activations="bf16"` rounds where the GPU path stores 16 bits (see `_store`), and nowhere else."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        quantize: bool = False,
        activations: Activations = "fp32",
        kv: KVDType = "bf16",
        progress: Progress | None = None,
    ) -> None:
        """`quantize`: first round linears that are not fp8 to e4m3, one scale a row, as --dtype fp8 does on a GPU.

        `kv`: "fp8" rounds keys and values as an e4m3 cache does (qwen_raw/model/kv_fp8.py); "bf16" leaves them to
        `activations`.
        """
        self.config = config
        self.activations = activations
        report = progress or (lambda stage, done, total: None)
        self.layers: list[Layer] = []
        for index in range(config.L):
            report("widening weights to fp32", index, config.L + 1)
            self.layers.append(_load_layer(checkpoint, index, quantize))
        self.fits: list[KVFit] | None = None
        if kv == "fp8":
            self.refit()
        self.embedding = _wide(checkpoint.tensors[EMBEDDING])  # [V, D]
        self.final_norm = _wide(checkpoint.tensors["model.norm.weight"])  # [D]
        self.head = self.embedding if config.tied else bf16_to_f32(checkpoint.linear("lm_head").bf16())  # [V, D]
        report("widening weights to fp32", config.L + 1, config.L + 1)

    def refit(self) -> None:
        """Round keys and values from now on, as the weights are now."""
        self.fits = [_fit(self.config, layer) for layer in self.layers]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one decode step reads: every layer, the final norm and the LM head."""
        return sum(layer.nbytes for layer in self.layers) + self.final_norm.nbytes + self.head.nbytes

    @property
    def nbytes(self) -> int:
        return self.bytes_per_token + (0 if self.config.tied else self.embedding.nbytes)

    def forward(self, ids: Sequence[int], cache: KVCache, *, last_only: bool = False) -> F32:
        """Append `ids` to the sequence in `cache`; logits [T, V] after each of them, or [1, V] after the last."""
        if cache.length + len(ids) > cache.capacity:
            raise QwenRawError(
                f"the KV cache holds {cache.capacity} positions, {cache.length + len(ids)} were asked for"
            )
        rows: list[F32] = []
        # damaged weights make infinities and NaNs that reach the logits, where `choose` refuses them: no warnings here
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(ids), CHUNK):
                x = self._layers(np.asarray(ids[start : start + CHUNK], dtype=np.int64), cache)
                rows = [x[-1:]] if last_only else [*rows, x]
            x = _rms_norm(np.concatenate(rows), self.final_norm, self.config.rms_eps)
            logits: F32 = x @ self.head.T
        return logits

    def _layers(self, ids: npt.NDArray[np.int64], cache: KVCache) -> F32:
        """The residual stream [T, D] after the last layer; appends K and V of the T tokens to the cache."""
        config, past = self.config, cache.length
        cos, sin = rope_table(config, np.arange(past, past + ids.size))
        x = self.embedding[ids]
        for index, layer in enumerate(self.layers):
            h = self._store_normed(_rms_norm(x, layer.attn_norm, config.rms_eps))
            fit = self.fits[index] if self.fits else None
            x = x + self._attention(h, layer, cos, sin, cache.k[index], cache.v[index], past, fit) @ layer.o.T
            h = self._store_normed(_rms_norm(x, layer.mlp_norm, config.rms_eps))
            gate_up = h @ layer.gate_up.T
            x = x + self._store(_silu(gate_up[:, : config.I]) * gate_up[:, config.I :]) @ layer.down.T
        cache.length = past + ids.size
        return x

    def _attention(
        self, h: F32, layer: Layer, cos: F32, sin: F32, k_cache: F32, v_cache: F32, past: int, fit: KVFit | None
    ) -> F32:
        """Causal attention of T new tokens. h [T, D]; caches [KV, capacity, HD] get rows past…past+T; → [T, H·HD]."""
        config, T = self.config, h.shape[0]
        H, KV, HD, S = config.H, config.KV, config.HD, past + h.shape[0]
        qkv = (h @ layer.qkv.T + layer.qkv_bias).reshape(T, H + 2 * KV, HD).transpose(1, 0, 2)  # [heads, T, HD]
        k, v = self._store(_rotate(qkv[H : H + KV], cos, sin)), self._store(qkv[H + KV :])
        k_cache[:, past:S] = fit.round_k(k) if fit else k
        v_cache[:, past:S] = fit.round_v(v) if fit else v
        # Query head j reads KV head j // group, so the heads of one group lie side by side: [KV, group·T, HD].
        q = self._store(_rotate(qkv[:H], cos, sin)).reshape(KV, config.group * T, HD)
        scores = (q @ k_cache[:, :S].transpose(0, 2, 1)).reshape(KV, config.group, T, S) * np.float32(HD**-0.5)
        if T > 1:
            future = np.arange(S)[None, :] > np.arange(past, S)[:, None]  # [T, S]
            scores[:, :, future] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = weights.reshape(KV, config.group * T, S) @ v_cache[:, :S]
        return self._store(out.reshape(H, T, HD).transpose(1, 0, 2).reshape(T, H * HD))

    def _store(self, x: F32) -> F32:
        """Round to bf16 what the GPU path keeps as bf16.

        That is: attention's output, SwiGLU's output, and q, k, v after the rotation. The residual stream, products,
        scores, logits and the LM head's input stay fp32.
        """
        return x if self.activations == "fp32" else bf16_to_f32(f32_to_bf16(x))

    def _store_normed(self, x: F32) -> F32:
        """Round the input of QKV and gate/up to f16, saturating: it is bounded, so f16's range suffices."""
        return x if self.activations == "fp32" else x.clip(-65504, 65504).astype(np.float16).astype(np.float32)


class ReferenceRunner:
    """`qwen_raw.generation.runner.Runner` on NumPy."""

    driver = f"NumPy {np.__version__}"
    read_ceiling: float | None = None
    notes: tuple[str, ...] = ()
    host_syncs = 0  # the host is the device

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        max_model_len: int,
        text_vocab: int,
        kv: KVDType = "bf16",
        progress: Progress | None = None,
    ) -> None:
        """`dtype`: what the linears' weights are rounded to before they are widened to fp32.

        `kv`: "fp8" rounds keys and values as an e4m3 cache would; they are kept in fp32 either way.
        """
        self.config = checkpoint.config
        self.max_model_len = max_model_len
        self.text_vocab = text_vocab
        self.dtype = dtype
        self.device_name = f"NumPy on {os.cpu_count() or 1} CPU cores"
        _check_memory(self.config)
        self._model: ReferenceModel | None = ReferenceModel(
            self.config, checkpoint, quantize=dtype == "fp8", kv=kv, progress=progress
        )
        self.kv_dtype: str = kv
        self.kv_bytes_per_token = 2 * self.config.kv_bytes_per_token()  # fp32
        self.bytes_per_token = self._model.bytes_per_token
        self.peak_bytes = (self._model.nbytes,)
        self.logits_hash: int | None = None
        self.speculated: PassCounts | None = None

    def generate(self, ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        """See `Runner.generate`."""
        model, cache = self._begin(len(ids) + max_tokens)
        logits = model.forward(ids, cache, last_only=True)[0]
        for position in range(len(ids), len(ids) + max_tokens):
            token = choose(logits, position=position, temperature=temperature, seed=seed, text_vocab=self.text_vocab)
            self.logits_hash = logits_hash(logits[: self.text_vocab])
            yield token
            if position + 1 < len(ids) + max_tokens:
                logits = model.forward([token], cache)[0]

    def logits(self, ids: Sequence[int]) -> F32:
        """See `Runner.logits`."""
        model, cache = self._begin(len(ids))
        return model.forward(ids, cache)

    def _begin(self, capacity: int) -> tuple[ReferenceModel, KVCache]:
        if self._model is None:
            raise QwenRawError("this engine has been closed")
        cache = KVCache(self.config, capacity)
        self.peak_bytes = (max(*self.peak_bytes, self._model.nbytes + cache.nbytes),)
        return self._model, cache

    def close(self) -> None:
        self._model = None


def _check_memory(config: ModelConfig) -> None:
    """Refuse a model whose fp32 weights exceed the machine's memory, before filling it for minutes."""
    need = 4 * (config.linear_params() + config.V * config.D * (1 if config.tied else 2))
    try:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return
    if need > have:
        raise QwenRawError(
            f"{config.name or 'the model'} needs {need / 2**30:.1f} GiB as fp32 and this machine has "
            f"{have / 2**30:.1f} GiB: use a smaller model, or a GPU"
        )


def _load_layer(checkpoint: Checkpoint, index: int, quantize: bool) -> Layer:
    prefix = f"model.layers.{index}"

    def weight(name: str) -> F32:
        linear = checkpoint.linear(f"{prefix}.{name}")
        if linear.scale is not None:
            return linear.f32()
        wide = _wide(linear.weight)
        if not quantize:
            return wide
        codes, scale = quantize_rows_e4m3(wide)
        return e4m3_to_f32(codes) * scale[:, None]

    def bias(name: str) -> F32:
        values = checkpoint.linear(f"{prefix}.{name}").bias
        if values is None:
            raise QwenRawError(f"{prefix}.{name} has no bias, and Qwen2's has one")
        return values

    qkv = [f"self_attn.{part}_proj" for part in "qkv"]
    return Layer(
        attn_norm=_wide(checkpoint.tensors[f"{prefix}.input_layernorm.weight"]),
        qkv=np.concatenate([weight(name) for name in qkv]),
        qkv_bias=np.concatenate([bias(name) for name in qkv]),
        o=weight("self_attn.o_proj"),
        mlp_norm=_wide(checkpoint.tensors[f"{prefix}.post_attention_layernorm.weight"]),
        gate_up=np.concatenate([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
        down=weight("mlp.down_proj"),
    )


def _fit(config: ModelConfig, layer: Layer) -> KVFit:
    """Of the layer's K and V rows."""
    kv = slice(config.H * config.HD, None)
    norms = np.sqrt(np.sum((layer.qkv[kv] * layer.attn_norm) ** 2, axis=1))
    return fit(norms, layer.qkv_bias[kv], config.D, config.KV, config.HD, attention_factor(config))


def _wide(tensor: Tensor) -> F32:
    return bf16_to_f32(tensor.bf16())


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; x [T, D], weight [D]."""
    normed: F32 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
    return normed


def _silu(x: F32) -> F32:
    activated: F32 = x / (1 + np.exp(-x))  # where exp(-x) overflows to inf, x / inf = -0 is right
    return activated


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotary embedding: element i turns with element i + HD/2. x [heads, T, HD]; cos, sin [T, HD/2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
