"""FP8 checkpoints in the forms that exporters write: equal numbers from each; other formats refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from checkpoint_files import TINY, Tensors, model_tensors, write_folder

from loaders.checkpoint import linear_shapes, open_checkpoint
from loaders.config_json import parse_config
from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16, quantize_rows_e4m3
from loaders.quant_format import QuantFormat, parse_quantization
from qwen_raw.errors import UsageError

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def compressed(**weights: Any) -> dict[str, Any]:
    """A compressed-tensors config as RedHatAI's FP8-dynamic files have it; the group has a scheme's name."""
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": ACTIVATIONS}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"FP8_DYNAMIC": group | {"output_activations": None}},
    }


STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODULES = tuple(linear_shapes(parse_config(TINY)))
DOWN, GATE = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.gate_proj"


def fp8_tensors(scale_of: Any) -> Tensors:
    """TINY with e4m3 linears whose row scales are powers of two (exact in every dtype), stored by `scale_of`."""
    tensors = model_tensors()
    for module in MODULES:
        bits, scale = quantize_rows_e4m3(bf16_to_f32(tensors[f"{module}.weight"][1]))
        tensors[f"{module}.weight"] = ("F8_E4M3", bits)
        tensors[f"{module}.weight_scale"] = scale_of(np.exp2(np.ceil(np.log2(scale))).astype(np.float32))
    return tensors


SCALES: dict[str, Any] = {
    "F32 [N, 1]": lambda s: ("F32", s[:, None]),
    "F32 [N]": lambda s: ("F32", s),
    "BF16 [N, 1]": lambda s: ("BF16", f32_to_bf16(s)[:, None]),
    "F16 [N, 1]": lambda s: ("F16", s.astype(np.float16).view(np.uint16)[:, None]),
}


@pytest.mark.parametrize("form", SCALES)
def test_channel_scales_in_every_form_give_the_same(tmp_path: Path, form: str) -> None:
    expected = fp8_tensors(SCALES["F32 [N]"])
    c = open_checkpoint(
        write_folder(tmp_path / "m", TINY | {"quantization_config": compressed()}, fp8_tensors(SCALES[form]))
    )
    assert c.dtype == "fp8" and c.quant == QuantFormat("compressed-tensors", ("channel",)) and c.unused == ()
    for module in MODULES:
        linear = c.linear(module)
        scale = expected[f"{module}.weight_scale"][1]
        assert linear.weight.dtype == "F8_E4M3" and linear.weight.raw.dtype == np.uint8
        assert linear.scale is not None and linear.scale.dtype == np.float32 and np.array_equal(linear.scale, scale)
        assert np.array_equal(linear.f32(), e4m3_to_f32(expected[f"{module}.weight"][1]) * scale[:, None])
        assert np.array_equal(linear.bf16(), f32_to_bf16(linear.f32()))
        assert (linear.bias is not None) == module.endswith(("q_proj", "k_proj", "v_proj"))
    assert c.linear("lm_head").scale is None


@pytest.mark.parametrize("config", [STATIC, compressed(strategy="tensor")])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_tensor(tmp_path: Path, config: dict[str, Any], shape: tuple[int, ...]) -> None:
    tensors = fp8_tensors(lambda s: ("F32", np.full(shape, s.max(), np.float32)))
    tensors[f"{DOWN}.input_scale"] = ("F32", np.ones(shape, np.float32))
    c = open_checkpoint(write_folder(tmp_path / "m", TINY | {"quantization_config": config}, tensors))
    assert c.unused == (f"{DOWN}.input_scale",) and c.notes == ()
    for module in (DOWN, "model.layers.0.self_attn.k_proj"):
        scale, stored = c.linear(module).scale, tensors[f"{module}.weight_scale"][1]
        assert scale is not None and scale.shape == c.linear(module).weight.shape[:1] and (scale == stored).all()
    # q and k have scales of their own: nothing is fused before it is widened.
    assert tensors["model.layers.0.self_attn.q_proj.weight_scale"][1] != tensors[f"{DOWN}.weight_scale"][1]


def test_a_linear_left_out_of_quantisation(tmp_path: Path) -> None:
    tensors = fp8_tensors(SCALES["F32 [N]"])
    del tensors[f"{GATE}.weight_scale"]
    tensors[f"{GATE}.weight"] = model_tensors()[f"{GATE}.weight"]
    c = open_checkpoint(write_folder(tmp_path / "m", TINY | {"quantization_config": compressed()}, tensors))
    assert c.dtype == "fp8" and c.linear(GATE).scale is None and c.linear(DOWN).scale is not None


def test_kv_scales_are_noted(tmp_path: Path) -> None:
    one = ("F32", np.ones((), np.float32))
    tensors = fp8_tensors(SCALES["F32 [N]"]) | {"model.layers.0.self_attn.k_scale": one}
    c = open_checkpoint(write_folder(tmp_path / "m", TINY | {"quantization_config": compressed()}, tensors))
    assert c.notes == ("the checkpoint's KV cache scales are ignored: the cache is kept in bf16",)


def broken(change: dict[str, tuple[str, npt.NDArray[Any]] | None]) -> Tensors:
    merged = {**fp8_tensors(SCALES["F32 [N]"]), **change}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


HEAD = np.zeros((TINY["vocab_size"], TINY["hidden_size"]), np.uint8)
BROKEN: dict[str, tuple[Any, str]] = {
    "no scale": ({f"{DOWN}.weight_scale": None}, f"tensor {DOWN}.weight_scale is missing"),
    "scale of another length": (
        {f"{DOWN}.weight_scale": ("F32", np.ones(31, np.float32))},
        r"down_proj\.weight_scale has shape \[31\], expected one scale or one for each of 32 rows",
    ),
    "scale along K": (
        {f"{GATE}.weight_scale": ("F32", np.ones((1, 48), np.float32))},
        r"weight_scale has shape \[1, 48\]",
    ),
    "scale of integers": (
        {f"{DOWN}.weight_scale": ("I32", np.ones(32, np.int32))},
        "weight_scale is I32, expected BF16",
    ),
    "head": ({"lm_head.weight": ("F8_E4M3", HEAD)}, r"lm_head\.weight is F8_E4M3, .* only for the layers' linears"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_fp8_files(tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    folder = write_folder(tmp_path / "m", TINY | {"quantization_config": compressed()}, broken(change))
    with pytest.raises(UsageError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_value_that_is_no_scale(tmp_path: Path, value: float) -> None:
    scale = np.ones(32, np.float32)
    scale[5] = value
    tensors = broken({f"{DOWN}.weight_scale": ("F32", scale)})
    c = open_checkpoint(write_folder(tmp_path / "m", TINY | {"quantization_config": compressed()}, tensors))
    with pytest.raises(UsageError, match=f"{DOWN}.weight_scale holds a value that is no scale"):
        c.linear(DOWN)


def test_bf16_files_that_claim_fp8(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", TINY | {"quantization_config": compressed()})
    with pytest.raises(UsageError, match="has a quantization_config, but no linear is F8_E4M3"):
        open_checkpoint(folder)


REFUSED: dict[str, tuple[Any, str]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quant_method 'gptq' with 4 bits"),
    "AWQ": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "quant_method 'awq' with 4 bits"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, "quant_method 'fbgemm_fp8'"),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_method 'modelopt'"),
    "unnamed": ({"bits": 8}, "quant_method None with 8 bits"),
    "block FP8": (STATIC | {"weight_block_size": [128, 128]}, r"block FP8 \(weight_block_size \[128, 128\]\)"),
    "INT8": (compressed(type="int") | {"format": "int-quantized"}, r"int-quantized \(8-bit int, symmetric"),
    "INT4 packed": (compressed(num_bits=4, type="int") | {"format": "pack-quantized"}, r"pack-quantized \(4-bit int"),
    "FP4": (compressed(num_bits=4) | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    "4 bits": (compressed(num_bits=4), r"float-quantized \(4-bit float"),
    "integers": (compressed(type="int"), r"float-quantized \(8-bit int"),
    "grouped FP8": (compressed(strategy="group"), "strategy 'group'"),
    "block strategy": (compressed(strategy="block"), "strategy 'block'"),
    "zero points": (compressed(symmetric=False), "asymmetric"),
    "sparse": (compressed() | {"sparsity_config": {"format": "sparse-bitmask"}}, "with a sparsity_config"),
    "rotated": (compressed() | {"transform_config": {"config_groups": {"R1": {}}}}, "with a transform_config"),
    "activations alone": (
        compressed() | {"config_groups": {"kv": {"targets": ["re:.*attn"], "weights": None}}},
        "without a group of weights",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_formats_are_refused_by_name(case: str) -> None:
    values, message = REFUSED[case]
    with pytest.raises(UsageError, match=message) as caught:
        parse_quantization(values, "m/config.json")
    text = str(caught.value)
    assert (
        text.startswith("m/config.json: quantisation format ") and "supported is FP8 with a scale per channel" in text
    )


@pytest.mark.parametrize(
    "values", ["fp8", {"quant_method": "compressed-tensors"}, compressed() | {"config_groups": [1]}]
)
def test_malformed_configs(values: Any) -> None:
    with pytest.raises(UsageError, match="quantization_config"):
        parse_quantization(values)


def test_accepted_variants() -> None:
    assert parse_quantization(None) is None
    assert parse_quantization(STATIC) == QuantFormat("fp8", ("tensor",))
    older = compressed() | {"format": "naive-quantized", "sparsity_config": {"format": "dense"}}
    assert parse_quantization(older) == QuantFormat("compressed-tensors", ("channel",))
    groups = compressed()["config_groups"] | compressed(strategy="tensor")["config_groups"]
    two = {"group_0": groups["FP8_DYNAMIC"], "x": compressed()["config_groups"]["FP8_DYNAMIC"]}
    assert parse_quantization(compressed() | {"config_groups": two}) == QuantFormat(
        "compressed-tensors", ("tensor", "channel")
    )


def test_an_unsupported_format_is_named_before_any_tensor(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", TINY | {"quantization_config": {"quant_method": "awq", "bits": 4}}, {})
    with pytest.raises(UsageError, match="'awq'"):
        open_checkpoint(folder)
