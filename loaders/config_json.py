"""config.json → ModelConfig and generation_config.json → GenerationDefaults.

Both spellings that transformers has written are read: `rope_theta` + `rope_scaling` or `rope_parameters`, `torch_dtype`
or `dtype`. What the engine does not compute is refused by name, never ignored.
"""

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any, NoReturn

from qwen_raw.config import GenerationDefaults, ModelConfig, Yarn
from qwen_raw.errors import UsageError

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
YARN_KEYS = {
    *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"),
}


def read_text(path: Path) -> str:
    """A UTF-8 file. UsageError when it cannot be read or is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object. UsageError when it cannot be read or is not one."""
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


class Fields:
    """Typed access to a JSON object; every error names the file and the field."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self.where, self.values = where, values

    def fail(self, message: str) -> NoReturn:
        raise UsageError(f"{self.where}: {message}")

    def optional_int(self, key: str, least: int = 0) -> int | None:
        value = self.values.get(key)
        if value is not None and (type(value) is not int or value < least):
            self.fail(f"{key} is {value!r}, expected an integer ≥ {least}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer, `default` where it is absent or null (None: it must be there)."""
        value = self.optional_int(key, least=1)
        if value is None:
            value = default
        return self.fail(f"{key} is missing") if value is None else value

    def optional_number(self, key: str, least: float = 0.0) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e308:
            self.fail(f"{key} is {value!r}, expected a number ≥ {least:g}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(f"{key} is {value!r}, expected true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: an integer, a list of them, null or absent."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(i) is not int or i < 0 for i in ids):
            self.fail(f"{key} is {value!r}, expected a token id or a list of them")
        return tuple(ids)


def load_config(folder: Path) -> ModelConfig:
    """ModelConfig of a folder; `eos_ids` is the union of what config, generation config and tokenizer config say."""
    config = parse_config(read_json(folder / "config.json"), str(folder / "config.json"), folder.resolve().name)
    defaults = load_generation_defaults(folder)
    eos = dict.fromkeys((*config.eos_ids, *defaults.eos_ids, *_tokenizer_eos(folder)))
    beyond = [i for i in eos if i >= config.V]
    if beyond:
        raise UsageError(f"{folder}: the EOS id {beyond[0]} is outside the vocabulary of {config.V} rows")
    return replace(config, eos_ids=tuple(eos))


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """generation_config.json of a folder; all None where there is no such file."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    fields = Fields(str(path), read_json(path))
    return GenerationDefaults(
        do_sample=fields.flag("do_sample"),
        temperature=fields.optional_number("temperature"),
        top_k=fields.optional_int("top_k"),
        top_p=fields.optional_number("top_p"),
        repetition_penalty=fields.optional_number("repetition_penalty"),
        max_new_tokens=fields.optional_int("max_new_tokens"),
        eos_ids=fields.ids("eos_token_id"),
    )


def parse_config(values: dict[str, Any], where: str = "config.json", name: str = "") -> ModelConfig:
    """A config.json's object → ModelConfig. UsageError names what is missing, wrong or not supported."""
    fields = Fields(where, values)
    _check_architecture(fields)
    D, H, L = fields.integer("hidden_size"), fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    KV = fields.integer("num_key_value_heads", H)
    if H % KV:
        fields.fail(f"{H} attention heads cannot share {KV} KV heads evenly")
    if not values.get("head_dim") and D % H:
        fields.fail(f"hidden_size {D} is not a multiple of {H} heads, and head_dim is missing")
    HD = fields.integer("head_dim", D // H)
    if HD % 2:
        fields.fail(f"head_dim {HD} is odd; rotary embedding needs an even one")
    position = fields.integer("max_position_embeddings")
    theta, yarn = _parse_rope(fields, position)
    if yarn is not None:
        position = round(yarn.factor * yarn.original_max_position)
    _check_window(fields, L, position)
    eps = fields.optional_number("rms_norm_eps")
    return ModelConfig(
        D=D,
        H=H,
        KV=KV,
        HD=HD,
        I=fields.integer("intermediate_size"),
        V=fields.integer("vocab_size"),
        L=L,
        rms_eps=fields.fail("rms_norm_eps is missing") if eps is None else eps,
        rope_theta=theta,
        max_position=position,
        tied=bool(fields.flag("tie_word_embeddings")),
        yarn=yarn,
        eos_ids=fields.ids("eos_token_id"),
        bos_id=fields.optional_int("bos_token_id"),
        name=name,
    )


def _check_architecture(fields: Fields) -> None:
    kind, architectures = fields.values.get("model_type"), fields.values.get("architectures") or []
    if kind is None and not architectures:
        fields.fail("neither model_type nor architectures is given, expected qwen2 and Qwen2ForCausalLM")
    if kind not in (None, "qwen2"):
        fields.fail(f"model_type {kind!r} is not supported, only 'qwen2' (Qwen2 and Qwen2.5 text models) is")
    if architectures and architectures != ["Qwen2ForCausalLM"]:
        fields.fail(f"architecture {architectures!r} is not supported, only ['Qwen2ForCausalLM'] is")
    if fields.values.get("hidden_act", "silu") != "silu":
        fields.fail(f"hidden_act {fields.values['hidden_act']!r} is not supported, only 'silu' is")
    for key in ("torch_dtype", "dtype"):
        if fields.values.get(key) not in (None, *DTYPES):
            fields.fail(f"{key} {fields.values[key]!r} is not supported; supported are {', '.join(DTYPES)}")
    if fields.values.get("use_mrope"):
        fields.fail("use_mrope (multimodal rotary embedding) is not supported")


def _check_window(fields: Fields, L: int, max_position: int) -> None:
    """Refuse sliding-window attention, but only where transformers would apply it: the flag, then the layer's type.

    Without layer_types, layers from max_window_layers on have the window. A window of the context's length or more
    masks nothing.
    """
    kinds = fields.values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        fields.fail(f"layer_types is {kinds!r}, expected a list")
    for kind in kinds or []:
        if kind not in ("full_attention", "sliding_attention"):
            fields.fail(f"layer type {kind!r} is not supported, only 'full_attention' is")
    if not fields.flag("use_sliding_window"):
        return
    window = fields.optional_int("sliding_window", least=1)
    if window is None or window >= max_position:
        return
    first = fields.optional_int("max_window_layers")
    windowed = "sliding_attention" in kinds[:L] if kinds else (28 if first is None else first) < L
    if windowed:
        fields.fail(f"sliding-window attention (window {window}) is not supported; set use_sliding_window to false")


def _parse_rope(fields: Fields, max_position: int) -> tuple[float, Yarn | None]:
    """(rope_theta, YaRN or None) from either spelling."""
    modern, older = fields.values.get("rope_parameters"), fields.values.get("rope_scaling")
    for key, value in (("rope_parameters", modern), ("rope_scaling", older)):
        if value is not None and not isinstance(value, dict):
            fields.fail(f"{key} is {value!r}, expected an object")
    rope = Fields(f"{fields.where}: {'rope_parameters' if modern else 'rope_scaling'}", modern or older or {})
    inner = rope.optional_number("rope_theta")
    theta = fields.optional_number("rope_theta") if inner is None else inner
    if theta is None:
        fields.fail("rope_theta is missing (neither rope_theta nor rope_parameters.rope_theta)")
    if theta <= 1:
        fields.fail(f"rope_theta is {theta:g}, expected a number above 1 (Qwen2.5 has 1000000)")
    kind = rope.values.get("rope_type", rope.values.get("type")) or "default"
    if rope.values.get("partial_rotary_factor") not in (None, 1):
        rope.fail(f"partial_rotary_factor {rope.values['partial_rotary_factor']!r} is not supported, only 1 is")
    if kind == "default":
        return theta, None
    if kind != "yarn":
        rope.fail(f"rope type {kind!r} is not supported; supported are 'default' and 'yarn'")
    return theta, _parse_yarn(rope, max_position)


def _parse_yarn(rope: Fields, max_position: int) -> Yarn:
    """YaRN's numbers with transformers' defaults: a missing original_max_position_embeddings is the model's own."""
    unknown = sorted(key for key, value in rope.values.items() if key not in YARN_KEYS and value is not None)
    if unknown:
        rope.fail(f"YaRN option {unknown[0]!r} is not supported")
    factor = rope.optional_number("factor", least=1.0)
    if factor is None:
        rope.fail("factor is missing, YaRN needs one")
    attention = rope.optional_number("attention_factor")
    mscale, mscale_all = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if attention is None and mscale and mscale_all:
        # transformers' reading of DeepSeek's pair: the ratio of the two temperatures.
        attention = (0.1 * mscale * log(factor) + 1) / (0.1 * mscale_all * log(factor) + 1)
    fast, slow = rope.optional_number("beta_fast"), rope.optional_number("beta_slow")
    return Yarn(
        factor=factor,
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
        beta_fast=32.0 if fast is None else fast,
        beta_slow=1.0 if slow is None else slow,
        attention_factor=attention,
    )


def _tokenizer_eos(folder: Path) -> tuple[int, ...]:
    """The id of tokenizer_config.json's eos_token, if there is such a file and the id is found beside it."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return ()
    values = read_json(path)
    token = values.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not text:
        return ()
    added = values.get("added_tokens_decoder")
    if isinstance(added, dict):
        for key, entry in added.items():
            if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal():
                return (int(key),)
    if (folder / "tokenizer.json").exists():
        listed = read_json(folder / "tokenizer.json").get("added_tokens")
        for entry in listed if isinstance(listed, list) else []:  # what is malformed here, load_tokenizer refuses
            if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
                return (entry["id"],)
    return ()
