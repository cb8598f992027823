"""config.json and generation_config.json: both spellings, and everything unsupported refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import TINY

from loaders.config_json import load_config, load_generation_defaults, parse_config
from qwen_raw.config import GenerationDefaults, Yarn
from qwen_raw.errors import UsageError

# Qwen2.5-0.5B-Instruct's config.json, field by field.
QWEN_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def without(key: str, values: dict[str, Any] = TINY) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def test_official_config() -> None:
    c = parse_config(QWEN_05B, name="q")
    assert (c.D, c.H, c.KV, c.HD, c.I, c.V, c.L) == (896, 14, 2, 64, 4864, 151936, 24)
    assert (c.rms_eps, c.rope_theta, c.max_position, c.tied) == (1e-6, 1e6, 32768, True)
    assert (c.yarn, c.eos_ids, c.bos_id, c.name) == (None, (151645,), 151643, "q")


def test_newer_spelling_gives_the_same() -> None:
    newer = without("torch_dtype", without("rope_theta", QWEN_05B))
    newer |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}
    newer |= {"layer_types": ["full_attention"] * 24}
    assert parse_config(newer) == parse_config(QWEN_05B)


def test_head_dim_is_honoured_and_defaults() -> None:
    assert parse_config(TINY | {"head_dim": 16}).HD == 16
    assert parse_config(TINY | {"head_dim": None}).HD == 8
    assert parse_config(without("num_key_value_heads")).KV == 4
    assert parse_config(without("tie_word_embeddings")).tied is False
    assert parse_config(TINY | {"rms_norm_eps": 1e-5}).rms_eps == 1e-5


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
    ],
)
def test_yarn_in_every_spelling(rope: dict[str, Any]) -> None:
    c = parse_config(TINY | {"max_position_embeddings": 32} | rope)
    assert c.yarn == Yarn(4.0, 32, 32.0, 1.0, None) and c.rope_theta == 10000.0
    assert c.max_position == 128  # factor times the original window


def test_yarn_options() -> None:
    yarn = {"type": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}
    assert parse_config(TINY | {"rope_scaling": yarn}).yarn == Yarn(4.0, 128, 16.0, 2.0, 1.5)
    pair = parse_config(TINY | {"rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}).yarn
    # (0.1 ln 4 + 1) / (0.05 ln 4 + 1)
    assert pair is not None and pair.attention_factor == pytest.approx(1.1386294361 / 1.0693147181)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model type": (TINY | {"model_type": "llama"}, "model_type 'llama' is not supported"),
    "mixture of experts": (TINY | {"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is not supported"),
    "another architecture": (TINY | {"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClass"),
    "neither": (without("model_type", without("architectures")), "neither model_type nor architectures"),
    "activation": (TINY | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "dtype": (TINY | {"torch_dtype": "int8"}, "torch_dtype 'int8' is not supported"),
    "newer dtype": (TINY | {"dtype": "float64"}, "dtype 'float64' is not supported"),
    "mrope": (TINY | {"use_mrope": True}, "use_mrope"),
    "no hidden size": (without("hidden_size"), "hidden_size is missing"),
    "text for a number": (TINY | {"hidden_size": "32"}, "hidden_size is '32', expected an integer ≥ 1"),
    "zero layers": (TINY | {"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer ≥ 1"),
    "true for a number": (TINY | {"vocab_size": True}, "vocab_size is True"),
    "no eps": (without("rms_norm_eps"), "rms_norm_eps is missing"),
    "NaN eps": (TINY | {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "no theta": (without("rope_theta"), "rope_theta is missing"),
    "theta 0": (TINY | {"rope_theta": 0}, "rope_theta is 0, expected a number above 1"),
    "theta 1": (TINY | {"rope_theta": 1}, "rope_theta is 1, expected a number above 1"),
    "no theta inside": (TINY | {"rope_parameters": {"rope_theta": 0.5}}, "rope_theta is 0.5, expected a number above"),
    "heads": (TINY | {"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
    "width": (TINY | {"hidden_size": 34}, "hidden_size 34 is not a multiple of 4 heads"),
    "odd head": (TINY | {"head_dim": 7}, "head_dim 7 is odd"),
    "tied text": (TINY | {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    "eos text": (TINY | {"eos_token_id": ["a"]}, "eos_token_id is .'a'., expected a token id"),
    "linear rope": (TINY | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
    "dynamic rope": (TINY | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    "llama3 rope": (TINY | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "llama3"}}, "rope type 'llama3'"),
    "mrope type": (TINY | {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope type 'mrope'"),
    "partial rope": (
        TINY | {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        "partial_rotary",
    ),
    "rope text": (TINY | {"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
    "yarn factor": (TINY | {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
    "yarn shrinks": (TINY | {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor is 0.5, expected a number ≥ 1"),
    "yarn option": (TINY | {"rope_scaling": {"type": "yarn", **YARN, "truncate": False}}, "option 'truncate'"),
    "layer type": (TINY | {"layer_types": ["linear_attention"] * 2}, "layer type 'linear_attention'"),
    "layer types": (TINY | {"layer_types": "full"}, "layer_types is 'full', expected a list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    values, message = REFUSED[case]
    with pytest.raises(UsageError, match=message) as caught:
        parse_config(values, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ") and "\n" not in str(caught.value)


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False},
        {"use_sliding_window": None},
        {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
        {"max_window_layers": 2},  # as many as there are layers: none is windowed
        {"max_window_layers": 70},
        {"max_window_layers": None},  # 28 by default
        {"sliding_window": None},
        {"sliding_window": 128},  # as long as the context
        {"layer_types": ["full_attention"] * 2},
    ],
)
def test_windows_that_no_layer_uses_are_ignored(change: dict[str, Any]) -> None:
    assert parse_config(TINY | WINDOW | change) == parse_config(TINY)


@pytest.mark.parametrize(
    "change",
    [{}, {"max_window_layers": 0}, {"max_window_layers": 70, "layer_types": ["full_attention", "sliding_attention"]}],
)
def test_windows_that_a_layer_uses_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"sliding-window attention \(window 4\) is not supported"):
        parse_config(TINY | WINDOW | change)


def write(folder: Path, **files: dict[str, Any]) -> Path:
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_eos_is_a_union(tmp_path: Path) -> None:
    write(tmp_path, config=TINY | {"eos_token_id": 45})
    assert load_config(tmp_path).eos_ids == (45,) and load_config(tmp_path).name == tmp_path.name
    write(tmp_path, generation_config={"eos_token_id": [43, 45]})
    assert load_config(tmp_path).eos_ids == (45, 43)
    added = {"44": {"content": "<|end|>"}, "45": {"content": "<|x|>"}}
    write(tmp_path, tokenizer_config={"eos_token": "<|end|>", "added_tokens_decoder": added})
    assert load_config(tmp_path).eos_ids == (45, 43, 44)
    write(tmp_path, tokenizer_config={"eos_token": {"content": "<|other|>"}})
    write(tmp_path, tokenizer={"added_tokens": [{"id": 42, "content": "<|other|>"}]})
    assert load_config(tmp_path).eos_ids == (45, 43, 42)
    for malformed in (5, "x", [5], [None], [{"content": "<|other|>"}], [{"content": "<|other|>", "id": "42"}]):
        write(tmp_path, tokenizer={"added_tokens": malformed})
        assert load_config(tmp_path).eos_ids == (45, 43)
    write(tmp_path, tokenizer_config={"eos_token": None})
    assert load_config(tmp_path).eos_ids == (45, 43)


def test_eos_outside_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, config=TINY | {"eos_token_id": 50})
    with pytest.raises(UsageError, match="EOS id 50 is outside the vocabulary of 50 rows"):
        load_config(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()
    said = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    write(tmp_path, generation_config=said | {"max_new_tokens": 2048, "eos_token_id": [151645, 151643], "pad": 1})
    assert load_generation_defaults(tmp_path) == GenerationDefaults(True, 0.7, 20, 0.8, 1.1, 2048, (151645, 151643))
    write(tmp_path, generation_config={"temperature": None, "eos_token_id": 3})
    assert load_generation_defaults(tmp_path) == GenerationDefaults(eos_ids=(3,))
    write(tmp_path, generation_config={"temperature": "hot"})
    with pytest.raises(UsageError, match="temperature is 'hot', expected a number ≥ 0"):
        load_generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"{", "is not valid JSON"), (b"[1]", "holds a list, expected"), (b'{"a\xff', r"is not UTF-8 \(byte 3\)")],
)
def test_broken_json(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UsageError, match=message):
        load_config(tmp_path)
