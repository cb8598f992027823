"""The safetensors parser: what the safetensors package writes is read bit for bit, what it refuses has its line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from checkpoint_files import Tensors, header_of, write_raw, write_safetensors

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16
from loaders.safetensors_file import read_safetensors
from qwen_raw.errors import UsageError

RNG = np.random.default_rng(7)
SAMPLE: Tensors = {
    "a.weight": ("BF16", RNG.integers(0, 65536, (3, 5), np.uint16)),
    "b": ("F8_E4M3", RNG.integers(0, 256, (2, 7), np.uint8)),  # 14 bytes: what follows is not aligned to 4
    "c": ("F32", RNG.standard_normal((4,), dtype=np.float32)),
    "d": ("F16", RNG.standard_normal((2, 2)).astype(np.float16).view(np.uint16)),
    "scalar": ("F32", np.array(2.5, np.float32)),
    "empty": ("BF16", np.empty((0, 4), np.uint16)),
}


def test_reads_every_dtype(tmp_path: Path) -> None:
    tensors = read_safetensors(write_safetensors(tmp_path / "x.safetensors", SAMPLE))
    assert list(tensors) == list(SAMPLE)
    for name, (dtype, bits) in SAMPLE.items():
        tensor = tensors[name]
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) == (name, dtype, bits.shape, bits.nbytes)
        assert tensor.raw.dtype == bits.dtype and np.array_equal(tensor.raw, bits)
        assert not tensor.raw.flags.writeable
    assert np.array_equal(tensors["a.weight"].f32(), bf16_to_f32(SAMPLE["a.weight"][1]), equal_nan=True)
    assert np.array_equal(tensors["a.weight"].bf16(), SAMPLE["a.weight"][1])
    assert np.array_equal(tensors["b"].f32(), e4m3_to_f32(SAMPLE["b"][1]), equal_nan=True)
    assert np.array_equal(tensors["d"].f32(), SAMPLE["d"][1].view(np.float16).astype(np.float32))
    assert np.array_equal(tensors["c"].bf16(), f32_to_bf16(SAMPLE["c"][1]))


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    arrays = {
        "f": SAMPLE["c"][1],
        "h": SAMPLE["d"][1].view(np.float16),
        "i": np.arange(6, dtype=np.int64).reshape(2, 3),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"k": "v"})
    tensors = read_safetensors(tmp_path / "x.safetensors")
    assert {name: t.dtype for name, t in tensors.items()} == {"f": "F32", "h": "F16", "i": "I64"}
    for name, array in arrays.items():
        assert tensors[name].raw.tobytes() == array.tobytes() and tensors[name].shape == array.shape
    with pytest.raises(UsageError, match="tensor i is I64; expected BF16"):
        tensors["i"].f32()


def test_the_safetensors_package_reads_what_these_tests_write(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", SAMPLE)
    with safetensors.safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(SAMPLE)
        assert np.array_equal(file.get_tensor("c"), SAMPLE["c"][1])


def edited(**entry: Any) -> dict[str, Any]:
    """SAMPLE's header with fields of tensor c replaced; None removes one."""
    header = header_of(SAMPLE)
    header["c"] = {key: value for key, value in (header["c"] | entry).items() if value is not None}
    return header


DATA = b"".join(bits.tobytes() for _, bits in SAMPLE.values())
SIZE = len(DATA)
MALFORMED: dict[str, tuple[bytes | dict[str, Any], bytes, str]] = {
    "cut by a byte": (
        header_of(SAMPLE),
        DATA[:-1],
        f"is truncated: its tensors take {SIZE} bytes, {SIZE - 1} are there",
    ),
    "no data": (header_of(SAMPLE), b"", "is truncated: its tensors take"),
    "bytes left over": (header_of(SAMPLE), DATA + b"x", "1 bytes after the last tensor belong to no tensor"),
    "not JSON": (b"{'a': 1}", b"", "malformed header, not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "malformed header, not JSON"),
    "deep JSON": (b"[" * 100_000, b"", "malformed header, not JSON"),
    "a list": (b"[]", b"", "a list, expected a JSON object"),
    "named twice": (b'{"a": 1, "a": 2}', b"", "duplicate entry 'a'"),
    "offset past the end": (edited(data_offsets=[SIZE, SIZE + 16]), DATA, "tensor c ends at offset .* past the end"),
    "overlap": (edited(data_offsets=[40, 56]), DATA, "tensors b and c overlap at offset 40"),
    "gap": ({"c": header_of(SAMPLE)["c"]}, DATA, "bytes before tensor c belong to no tensor"),
    "bytes for shape": (edited(shape=[5]), DATA, r"tensor c has 16 bytes, F32 \[5\] takes 20"),
    "unknown dtype": (edited(dtype="F4"), DATA, "tensor c has the unknown dtype 'F4'"),
    "dtype of a list": (edited(dtype=["F32"]), DATA, "tensor c has the unknown dtype"),
    "negative shape": (edited(shape=[-4]), DATA, r"tensor c has the malformed shape \[-4\]"),
    "shape of booleans": (edited(shape=[True, 4]), DATA, "tensor c has the malformed shape"),
    "offsets reversed": (edited(data_offsets=[60, 44]), DATA, "tensor c has the malformed data_offsets"),
    "three offsets": (edited(data_offsets=[44, 50, 60]), DATA, "tensor c has the malformed data_offsets"),
    "no offsets": (edited(data_offsets=None), DATA, "tensor c has a malformed entry"),
    "entry of a number": (header_of(SAMPLE) | {"c": 3}, DATA, "tensor c has a malformed entry"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_each_have_their_line(tmp_path: Path, case: str) -> None:
    header, data, message = MALFORMED[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = write_raw(tmp_path / "x.safetensors", text, data)
    with pytest.raises(UsageError, match=message) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    if case not in ("named twice", "shape of booleans"):  # the package is laxer there
        with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, "numpy"):
            pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated: 0 bytes"),
        (b"\x01\x02\x03", "is truncated: 3 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "is truncated: its header is 1000 bytes long, the file 10"),
        (b"\xff" * 64, "is not a safetensors file: its header would be"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
    ],
)
def test_files_without_a_header(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_safetensors(path)


def test_unreadable_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*No such file"):
        read_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(UsageError, match=r"cannot read .*directory"):
        read_safetensors(tmp_path)


def test_header_alone(tmp_path: Path) -> None:
    assert read_safetensors(write_raw(tmp_path / "x.safetensors", b"{}   ", b"")) == {}


def test_a_tensor_outlives_the_call_and_the_file_name(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", SAMPLE)
    tensor = read_safetensors(path)["c"]
    path.unlink()
    assert np.array_equal(tensor.f32(), SAMPLE["c"][1])
