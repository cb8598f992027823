"""What a user may write for --model, and what they are told when it is something else."""

from pathlib import Path

import pytest
from checkpoint_files import write_folder

from loaders.resolve import BUILTIN, open_model, open_tokenizer
from loaders.synthetic import SyntheticCheckpoint
from loaders.tokenizer import ByteTokenizer
from qwen_raw.errors import UsageError


def test_builtin_by_default_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # found from any folder
    assert open_model().config == open_model("tiny-shakespeare").config
    assert (open_model().config.L, open_model("tiny-shakespeare-draft").config.L) == (6, 2)
    for name in BUILTIN:
        checkpoint = open_model(name)
        tokenizer = open_tokenizer(checkpoint)
        assert checkpoint.config.name == name and (tokenizer.vocab_size, checkpoint.config.V) == (4096, 4160)


def test_a_folder_called_like_a_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "tiny-shakespeare")
    assert open_model("tiny-shakespeare").config.D == 256 and open_model("./tiny-shakespeare").config.D == 32


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "m")
    checkpoint = open_model(str(folder))
    assert checkpoint.config.D == 32 and checkpoint.path == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_model("~/m").config.D == 32
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        open_tokenizer(checkpoint)


def test_random_models() -> None:
    checkpoint = open_model("random:0.5b:9")
    source = checkpoint.tensors["model.embed_tokens.weight"].synthetic
    assert isinstance(checkpoint, SyntheticCheckpoint) and checkpoint.dtype == "bf16"
    assert checkpoint.config.name == "random:0.5b" and source is not None and source.seed == 9
    assert open_model("random:7B", "fp8").dtype == "fp8" and open_model("random:7b", "bf16").dtype == "bf16"
    tokenizer = open_tokenizer(checkpoint)
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.vocab_size == checkpoint.config.V


@pytest.mark.parametrize("spec", ["", "Qwen/Qwen2.5-7B-Instruct", "tiny", "./none"])
def test_what_is_no_model(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is not a folder; expected a folder with config\.json") as caught:
        open_model(spec)
    text = str(caught.value)
    assert text.startswith(f"model {spec!r} ") and "\n" not in text
    assert all(part in text for part in ("tiny-shakespeare", "random:SIZE", "0.5b", "72b", "nothing is downloaded"))


def test_a_file_and_a_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        open_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(UsageError, match=r"has no config\.json; expected a folder with config\.json"):
        open_model(str(tmp_path))


def test_bad_random_size() -> None:
    with pytest.raises(UsageError, match="'random:8b' is not random:SIZE"):
        open_model("random:8b")
