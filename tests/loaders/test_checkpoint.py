"""Folders of safetensors → Checkpoint: one file or shards, tied or not, and each thing that can be wrong by name."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import TINY, Tensors, model_tensors, write_folder, write_shards

from loaders.checkpoint import open_checkpoint
from loaders.dtypes import bf16_to_f32
from loaders.resolve import builtin_path
from qwen_raw.errors import UsageError

Q = "model.layers.1.self_attn.q_proj"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = TINY | {"tie_word_embeddings": True}


def halves() -> tuple[Tensors, Tensors]:
    items = list(model_tensors().items())
    return dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])


def refused(folder: Path, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_single_file(tmp_path: Path) -> None:
    tensors = model_tensors()
    c = open_checkpoint(write_folder(tmp_path / "m"))
    assert (c.config.D, c.config.name, c.path, c.dtype, c.quant) == (32, "m", tmp_path / "m", "bf16", None)
    assert (c.unused, c.notes) == ((), ()) and c.tensors.keys() == tensors.keys()
    for name, (_, bits) in tensors.items():
        assert np.array_equal(c.tensors[name].raw, bits)
    assert c.nbytes == sum(bits.nbytes for _, bits in tensors.values())
    for name in (Q, f"{Q}.weight"):
        q = c.linear(name)
        assert q.scale is None and q.weight.shape == (32, 32) and np.array_equal(q.bf16(), tensors[f"{Q}.weight"][1])
        assert q.bias is not None and np.array_equal(q.bias, bf16_to_f32(tensors[f"{Q}.bias"][1]))
    assert c.linear("model.layers.0.mlp.down_proj").bias is None
    assert np.array_equal(c.linear("lm_head").f32(), bf16_to_f32(tensors[HEAD][1]))
    with pytest.raises(UsageError, match=r"m has no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        c.linear("model.layers.2.mlp.up_proj")


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    first, second = halves()
    sharded = open_checkpoint(write_shards(tmp_path / "s", {"a.safetensors": first, "b.safetensors": second}))
    single = open_checkpoint(write_folder(tmp_path / "m"))
    assert sharded.tensors.keys() == single.tensors.keys()
    assert all(np.array_equal(sharded.tensors[n].raw, single.tensors[n].raw) for n in single.tensors)


def test_fp16_and_fp32_files(tmp_path: Path) -> None:
    tensors = model_tensors()
    wide = bf16_to_f32(tensors[f"{Q}.weight"][1])
    tensors[f"{Q}.weight"] = ("F32", wide)
    tensors[f"{Q}.bias"] = ("F16", np.full(32, 0x3C00, np.uint16))
    c = open_checkpoint(write_folder(tmp_path / "m", tensors=tensors))
    assert c.dtype == "bf16" and np.array_equal(c.linear(Q).bf16(), model_tensors()[f"{Q}.weight"][1])
    bias = c.linear(Q).bias
    assert bias is not None and (bias == 1).all()


def test_tied_without_head(tmp_path: Path) -> None:
    c = open_checkpoint(write_folder(tmp_path / "m", TIED))
    assert HEAD not in c.tensors and c.linear("lm_head").weight is c.tensors[EMBEDDING]
    assert (c.unused, c.notes) == ((), ())


def test_tied_with_head(tmp_path: Path) -> None:
    """The config decides: the head in the file is not used, and one that says something else is worth a note."""
    tensors = model_tensors(TIED)
    same = open_checkpoint(write_folder(tmp_path / "same", TIED, tensors | {HEAD: tensors[EMBEDDING]}))
    assert same.linear("lm_head").weight is same.tensors[EMBEDDING]
    assert (same.unused, same.notes) == ((HEAD,), ())
    other = ("BF16", tensors[EMBEDDING][1] ^ 1)
    c = open_checkpoint(write_folder(tmp_path / "other", TIED, tensors | {HEAD: other}))
    assert np.array_equal(c.linear("lm_head").bf16(), tensors[EMBEDDING][1]) and c.unused == (HEAD,)
    assert len(c.notes) == 1 and "lm_head.weight differs from the embedding and is ignored" in c.notes[0]


def test_untied_without_head(tmp_path: Path) -> None:
    tensors = model_tensors()
    del tensors[HEAD]
    refused(write_folder(tmp_path / "m", tensors=tensors), r"lm_head\.weight is missing \(tie_word_embeddings is false")


def test_unused_tensors_are_listed(tmp_path: Path) -> None:
    extra: Tensors = {
        "model.layers.0.self_attn.o_proj.bias": ("BF16", np.zeros(32, np.uint16)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", np.zeros(4, np.float32)),
    }
    c = open_checkpoint(write_folder(tmp_path / "m", tensors=model_tensors() | extra))
    assert c.unused == tuple(sorted(extra))
    assert c.notes == ("1 tensors in the files are not used: model.layers.0.self_attn.o_proj.bias",)


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = model_tensors()
    del tensors[f"{Q}.bias"]
    refused(
        write_folder(tmp_path / "m", tensors=tensors), r"tensor model\.layers\.1\.self_attn\.q_proj\.bias is missing$"
    )


def test_packed_weights_are_named(tmp_path: Path) -> None:
    tensors = model_tensors()
    del tensors[f"{Q}.weight"]
    tensors[f"{Q}.qweight"] = ("I32", np.zeros((4, 32), np.int32))
    refused(write_folder(tmp_path / "m", tensors=tensors), "GPTQ and AWQ are not supported")


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = model_tensors()
    tensors[f"{Q}.weight"] = ("BF16", np.zeros((32, 16), np.uint16))
    refused(write_folder(tmp_path / "m", tensors=tensors), r"has shape \[32, 16\], config\.json implies \[32, 32\]")


@pytest.mark.parametrize(("name", "dtype"), [(f"{Q}.weight", "I8"), (f"{Q}.weight", "F8_E4M3"), (EMBEDDING, "F8_E5M2")])
def test_wrong_dtype(tmp_path: Path, name: str, dtype: str) -> None:
    tensors = model_tensors()
    tensors[name] = (dtype, np.zeros(tensors[name][1].shape, np.uint8))
    refused(write_folder(tmp_path / "m", tensors=tensors), f"{name} is {dtype}, expected BF16 or F16 or F32")


def test_missing_shard(tmp_path: Path) -> None:
    first, second = halves()
    folder = write_shards(tmp_path / "s", {"a.safetensors": first, "b.safetensors": second})
    (folder / "b.safetensors").unlink()
    refused(folder, r"lacks the shard b\.safetensors that its index lists")


def test_shard_cut_by_a_byte(tmp_path: Path) -> None:
    first, second = halves()
    folder = write_shards(tmp_path / "s", {"a.safetensors": first, "b.safetensors": second})
    data = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(data[:-1])
    refused(folder, r"b\.safetensors is truncated")


def test_duplicate_across_shards(tmp_path: Path) -> None:
    first, second = halves()
    name, tensor = next(iter(first.items()))
    folder = write_shards(tmp_path / "s", {"a.safetensors": first, "b.safetensors": second | {name: tensor}})
    refused(folder, f"duplicate tensor {name}, in a.safetensors and in b.safetensors")


def test_index_that_disagrees_with_a_shard(tmp_path: Path) -> None:
    first, second = halves()
    where = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    name = next(iter(first))
    folder = write_shards(
        tmp_path / "s", {"a.safetensors": first, "b.safetensors": second}, where | {name: "b.safetensors"}
    )
    refused(folder, f"tensor {name} is missing from b.safetensors, where the index says")
    folder = write_shards(
        tmp_path / "t", {"a.safetensors": first, "b.safetensors": second}, where | {"x": "b.safetensors"}
    )
    refused(folder, r"tensor x is missing from b\.safetensors")


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors"])
def test_index_that_leaves_the_folder(tmp_path: Path, shard: str) -> None:
    folder = write_shards(tmp_path / "s", {"a.safetensors": model_tensors()}, {EMBEDDING: shard})
    refused(folder, "expected a file name in the same folder")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_broken_index(tmp_path: Path, index: dict[str, object]) -> None:
    folder = write_shards(tmp_path / "s", {})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "has no weight_map of tensor names to file names")


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    refused(tmp_path, r"has neither model\.safetensors nor model\.safetensors\.index\.json$")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, r"index\.json; pytorch_model\.bin cannot be read")


@pytest.mark.parametrize("name", ["tiny-shakespeare", "tiny-shakespeare-draft"])
def test_builtin_models(name: str) -> None:
    c = open_checkpoint(builtin_path(name))
    assert (c.config.V, c.config.tied, c.config.eos_ids, c.dtype) == (4160, True, (4095, 4093), "bf16")
    assert (c.unused, c.notes, c.config.name) == ((), (), name)
    assert np.isfinite(c.linear("model.layers.1.mlp.down_proj").f32()).all()
