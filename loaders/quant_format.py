"""`quantization_config` of config.json → QuantFormat: the FP8 formats that are read; others are refused by name.

Both formats that are read store a linear as `X.weight` F8_E4M3 [N, K] and `X.weight_scale` with w ≈ e4m3 · scale, where
the scale is one number or one a row. `X.input_scale` (static activation scales) is not needed: activations stay bf16 or
are scaled per token.
"""

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from qwen_raw.errors import UsageError

READ = (
    "FP8 with a scale per channel or per tensor: quant_method 'compressed-tensors' (float-quantized) or 'fp8' without "
    "weight_block_size"
)


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """A weight format that the loader reads."""

    method: Literal["compressed-tensors", "fp8"]
    strategies: tuple[str, ...]  # of the weights: "channel", "tensor"


def parse_quantization(values: Any, where: str = "config.json") -> QuantFormat | None:
    """`values` is config.json's `quantization_config`, None where it has none. UsageError names a refused format."""
    if values is None:
        return None
    if not isinstance(values, dict):
        raise UsageError(f"{where}: quantization_config is {values!r}, expected an object")
    method = values.get("quant_method")
    if method == "compressed-tensors":
        return _parse_compressed_tensors(values, where)
    if method == "fp8":
        block = values.get("weight_block_size")
        if block is not None:
            _refuse(where, f"block FP8 (weight_block_size {block})")
        return QuantFormat("fp8", ("tensor",))
    bits = values.get("bits")
    _refuse(where, f"quant_method {method!r}" + (f" with {bits} bits" if bits else ""))


def _parse_compressed_tensors(values: dict[str, Any], where: str) -> QuantFormat:
    """Every group of weights, whatever its name, must be 8-bit float, symmetric, one scale a channel or a tensor."""
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise UsageError(f"{where}: quantization_config.config_groups is missing or not an object of objects")
    for key in ("sparsity_config", "transform_config"):
        extra = values.get(key)
        if extra and not (isinstance(extra, dict) and extra.get("format") == "dense"):
            _refuse(where, f"compressed-tensors with a {key}")
    strategies: list[str] = []
    for name, group in groups.items():
        weights = group.get("weights")
        if weights is None:  # a group for the KV cache or activations alone
            continue
        form = group.get("format") or values.get("format")
        if not isinstance(weights, dict):
            raise UsageError(f"{where}: quantization_config group {name} has weights {weights!r}, expected an object")
        bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
        good = form in ("float-quantized", "naive-quantized") and bits == 8 and kind == "float"
        good = good and strategy in ("channel", "tensor") and weights.get("symmetric", True) is True
        if not good:
            symmetric = "symmetric" if weights.get("symmetric", True) else "asymmetric"
            _refuse(where, f"compressed-tensors {form} ({bits}-bit {kind}, {symmetric}, strategy {strategy!r})")
        strategies.append(str(strategy))
    if not strategies:
        _refuse(where, "compressed-tensors without a group of weights")
    return QuantFormat("compressed-tensors", tuple(dict.fromkeys(strategies)))


def _refuse(where: str, what: str) -> NoReturn:
    raise UsageError(f"{where}: quantisation format {what} is not supported; supported is {READ}")
