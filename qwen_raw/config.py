"""What a Qwen2-architecture checkpoint says of itself, in the project's one alphabet.

T tokens, D hidden, H query heads, KV kv heads, HD head dim, I intermediate, V vocab, L layers, TP ranks.
"""

from dataclasses import dataclass, field

FINE = 16  # bytes of a key in an fp8 cache beside its HD: second parts (qwen_raw/model/kv_fp8.py)


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN rope scaling (static, as vLLM and transformers apply it)."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1·ln(factor) + 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and constants of one model; everything a kernel or a shard rule needs."""

    D: int
    H: int
    KV: int
    HD: int
    I: int  # noqa: E741 - the alphabet's name for the MLP's inner width
    V: int  # rows of the embedding, padding included
    L: int
    rms_eps: float
    rope_theta: float
    max_position: int
    tied: bool  # the LM head is the embedding
    yarn: Yarn | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    name: str = ""  # shown to people: the folder's name or "random:7b"

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.H // self.KV

    def legal_tp(self, pack: int = 8) -> tuple[int, ...]:
        """Tensor-parallel degrees 1…8 that this model can be split into.

        A rank's query heads must not straddle two KV heads: H % tp == 0, and KV % tp == 0 or tp % KV == 0 (KV heads are
        then replicated). A rank's share of I must be whole packs of `pack` weights, 16 bytes: 8 in bf16, 16 in fp8.
        """
        return tuple(
            tp
            for tp in range(1, 9)
            if self.H % tp == 0 and (self.KV % tp == 0 or tp % self.KV == 0) and (tp == 1 or self.I % (tp * pack) == 0)
        )

    def linear_params(self) -> int:
        """Weights of the L layers' linears (no biases, norms, embedding or head)."""
        qkv = (self.H + 2 * self.KV) * self.HD * self.D
        return self.L * (qkv + self.D * self.H * self.HD + 3 * self.D * self.I)

    def kv_bytes_per_token(self, kv: str = "bf16") -> int:
        """Bytes of K and V that one position takes over all layers, in a cache of bf16 or "fp8"."""
        return self.L * self.KV * (2 * self.HD + FINE if kv == "fp8" else 4 * self.HD)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """generation_config.json: what the checkpoint's authors would sample with. None means not said."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_ids: tuple[int, ...] = field(default=())
