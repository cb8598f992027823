"""Random models: the published sizes, and the formula that a CUDA kernel shares, element by element."""

from dataclasses import replace
from math import prod, sqrt

import numpy as np
import pytest

from loaders.checkpoint import tensor_shapes
from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16, f32_to_e4m3
from loaders.synthetic import (
    SIZES,
    e4m3_scale,
    parse_random,
    random_checkpoint,
    random_config,
    synthetic_bound,
    synthetic_units,
    synthetic_values,
    synthetic_values_e4m3,
    tensor_id,
)
from qwen_raw.config import ModelConfig
from qwen_raw.errors import UsageError
from qwen_raw.reference import ReferenceRunner

# Published: parameters, tensors, bytes of the files' tensors per token of KV cache in bf16.
PUBLISHED = {
    "0.5b": (494_032_768, 290, 12_288),
    "1.5b": (1_543_714_304, 338, 28_672),
    "3b": (3_085_938_688, 434, 36_864),
    "7b": (7_615_616_512, 339, 57_344),
    "14b": (14_770_033_664, 579, 196_608),
    "32b": (32_763_876_352, 771, 262_144),
    "72b": (72_706_203_648, 963, 327_680),
}
TINY = ModelConfig(
    D=64, H=4, KV=2, HD=16, I=96, V=100, L=2, rms_eps=1e-6, rope_theta=1e6, max_position=64, tied=False, name="tiny"
)
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_have_the_published_counts(size: str) -> None:
    shapes = tensor_shapes(SIZES[size])
    parameters, tensors, kv_bytes = PUBLISHED[size]
    assert (sum(map(prod, shapes.values())), len(shapes)) == (parameters, tensors)
    assert SIZES[size].kv_bytes_per_token() == kv_bytes and list(SIZES) == list(PUBLISHED)
    c = random_config(size.upper())
    assert (c.name, c.eos_ids) == (f"random:{size}", ()) and c.D == SIZES[size].D
    assert random_checkpoint(size).nbytes == 2 * parameters  # opened, not computed


def unit(i: int, tid: int, seed: int) -> float:
    """The formula in Python integers."""
    mask = 2**32 - 1
    x = ((i & mask) * 0x9E3779B1 + (i >> 32) * 0x85EBCA77 + tid * 0xC2B2AE3D + seed) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    x ^= x >> 16
    return ((x >> 8) - 2**23) / 2**23


@pytest.mark.parametrize("begin", [0, 2**16 - 3, 2**32 - 4, 2**32, 2**40 + 12345])
@pytest.mark.parametrize(("tid", "seed"), [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0x1234567, 42)])
def test_units_follow_the_formula(begin: int, tid: int, seed: int) -> None:
    n = 4 if begin == 2**32 - 4 else 9
    expected = np.array([unit(i, tid, seed) for i in range(begin, begin + n)])
    got = synthetic_units(begin, begin + n, tid, seed)
    assert got.dtype == np.float32 and np.array_equal(got.astype(np.float64), expected)


def test_known_values() -> None:
    """Written out once: models made from a seed must stay the same from version to version."""
    assert [round(unit(i, 0, 0) * 2**23) for i in range(3)] == [-8388608, -1224137, 2897101]
    assert tensor_id("model.embed_tokens.weight") == 0x15DA8852


def test_values_are_rounded_units() -> None:
    n, tid, seed, bound = 140_000, 99, 7, 0.123  # three chunks
    u = np.concatenate([synthetic_units(i, min(i + 1000, n), tid, seed) for i in range(0, n, 1000)])
    values = synthetic_values((n // 100, 100), tid, seed, bound)
    assert values.shape == (n // 100, 100) and np.array_equal(values.reshape(-1), f32_to_bf16(u * np.float32(bound)))
    fp8 = synthetic_values_e4m3((n,), tid, seed)
    assert np.array_equal(fp8, f32_to_e4m3(u * np.float32(448)))
    # The same weight within one step of each format.
    wide = e4m3_to_f32(fp8) * e4m3_scale(bound)
    assert np.abs(wide - bf16_to_f32(values.reshape(-1))).max() < bound / 16


def test_distribution_and_seeds() -> None:
    u = synthetic_units(0, 1 << 16, 5, 0).astype(np.float64)
    assert u.min() < -0.999 and u.max() > 0.999 and abs(u.mean()) < 0.01 and abs(u.std() * sqrt(3) - 1) < 0.01
    for other in (synthetic_units(0, 1 << 16, 6, 0), synthetic_units(0, 1 << 16, 5, 1)):
        assert abs(np.corrcoef(u, other)[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("model.embed_tokens.weight", 1),
        ("lm_head.weight", 2 / sqrt(64)),
        (f"{Q}.weight", 1 / sqrt(64)),
        (f"{Q}.bias", 0.1),
        ("model.layers.0.self_attn.o_proj.weight", 1 / sqrt(64) / 2),
        ("model.layers.0.mlp.up_proj.weight", 1 / sqrt(64)),
        (f"{DOWN}.weight", 1 / sqrt(96) / 2),
    ],
)
def test_standard_deviations(name: str, std: float) -> None:
    assert synthetic_bound(TINY, name) == float(np.float32(sqrt(3) * std))
    values = random_checkpoint(TINY).tensors[name].f32()
    assert abs(values.std() / std - 1) < 0.15


def test_standard_deviations_of_a_tied_model() -> None:
    tied, o_proj = replace(TINY, tied=True), "model.layers.0.self_attn.o_proj.weight"
    assert synthetic_bound(tied, "model.embed_tokens.weight") == float(np.float32(sqrt(3) / (2 * sqrt(64))))
    assert synthetic_bound(tied, o_proj) == float(np.float32(sqrt(3) / sqrt(64) / 2 / 2))
    assert synthetic_bound(tied, f"{DOWN}.weight") == synthetic_bound(TINY, f"{DOWN}.weight")


def test_a_tied_model_does_not_repeat_itself() -> None:
    """Greedy text of any random model goes on changing."""
    small = replace(TINY, D=256, H=4, KV=2, HD=64, I=512, V=8192, L=6)
    for config in (small, replace(small, tied=True)):
        runner = ReferenceRunner(
            random_checkpoint(config), dtype="bf16", max_model_len=64, text_vocab=config.V, progress=None
        )
        assert len(set(runner.generate([5, 6, 7], max_tokens=32, temperature=0.0, seed=0))) > 12


def test_random_checkpoint_bf16() -> None:
    c = random_checkpoint(TINY, seed=3)
    assert (c.dtype, c.quant, c.path, c.config, c.generation.eos_ids) == ("bf16", None, None, TINY, ())
    assert c.tensors.keys() == tensor_shapes(TINY).keys()
    for name, shape in tensor_shapes(TINY).items():
        tensor, source = c.tensors[name], c.tensors[name].synthetic
        assert tensor.dtype == "BF16" and tensor.raw.shape == tensor.shape == shape and tensor.raw.dtype == np.uint16
        if name.endswith("norm.weight"):
            assert source is None and (tensor.f32() == 1).all()
        else:
            assert source is not None and (source.tid, source.seed) == (tensor_id(name), 3)
            assert np.array_equal(tensor.raw, synthetic_values(shape, source.tid, source.seed, source.bound))
            assert np.array_equal(tensor.raw, tensor.raw)
    q = c.linear(Q)
    assert q.scale is None and q.bias is not None and np.array_equal(q.bias, c.tensors[f"{Q}.bias"].f32())
    assert not np.array_equal(random_checkpoint(TINY, seed=4).tensors[f"{Q}.weight"].raw, q.weight.raw)


def test_random_checkpoint_fp8() -> None:
    c, plain = random_checkpoint(TINY, "fp8"), random_checkpoint(TINY)
    assert c.dtype == "fp8" and c.quant is not None
    linear, bound = c.linear(DOWN), plain.tensors[f"{DOWN}.weight"].synthetic
    assert linear.weight.dtype == "F8_E4M3" and linear.scale is not None and bound is not None
    assert (linear.scale == e4m3_scale(bound.bound)).all() and linear.scale.shape == (64,)
    assert np.abs(linear.f32() - plain.linear(DOWN).f32()).max() <= bound.bound / 16
    for name in ("model.embed_tokens.weight", "lm_head.weight", f"{Q}.bias", "model.norm.weight"):
        assert np.array_equal(c.tensors[name].raw, plain.tensors[name].raw) and c.tensors[name].dtype == "BF16"


def test_parse_random() -> None:
    assert parse_random("random:7b") == ("7b", 0) and parse_random("random:0.5B:12") == ("0.5b", 12)
    assert parse_random("random:72b:4294967295") == ("72b", 2**32 - 1)


@pytest.mark.parametrize("spec", ["random", "random:", "random:8b", "random:8b:1", "rand:7b"])
def test_unknown_sizes(spec: str) -> None:
    with pytest.raises(UsageError, match=r"SIZE one of 0\.5b, 1\.5b, 3b, 7b, 14b, 32b, 72b"):
        parse_random(spec)


@pytest.mark.parametrize("seed", ["", "x", "-1", "1.5", "4294967296", "1:2", "²"])
def test_bad_seeds(seed: str) -> None:
    with pytest.raises(UsageError, match="expected an integer from 0 to 4294967295"):
        parse_random(f"random:7b:{seed}")


def test_random_config_of_an_unknown_size() -> None:
    with pytest.raises(UsageError, match=r"there is no Qwen2\.5 of size '9b'; sizes are 0\.5b"):
        random_config("9b")
