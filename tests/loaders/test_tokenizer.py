"""The built-in tokenizer (Qwen2.5's form, 4096 ids) and the byte stand-in: ids, streaming, padding rows, injection."""

import json
import random
from pathlib import Path

import pytest
import tokenizers

from loaders.resolve import builtin_path
from loaders.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from qwen_raw.errors import UsageError

FOLDER = builtin_path("tiny-shakespeare")
END, IM_START, IM_END = 4093, 4094, 4095
ALPHABET = "aé漢字かな한글🙂👩‍👩‍👧 🇫🇷\n\tžЖ✓𝔘"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def package() -> tokenizers.Tokenizer:
    """The tokenizers package itself, to compare with."""
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def texts() -> list[str]:
    rng = random.Random(3)
    return ["".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 12))) for _ in range(200)]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(stream.step(token) for token in ids) + stream.flush()


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 4096  # the embedding has 4160 rows
    assert tokenizer.special_tokens == {"<|endoftext|>": 4093, "<|im_start|>": 4094, "<|im_end|>": 4095}
    assert all(tokenizer.token_bytes(i) == b"" for i in (*range(4093, 4160), 10**6))
    assert all(tokenizer.token_bytes(i) for i in range(4093))


def test_encode_equals_the_package_and_round_trips(tokenizer: Tokenizer, package: tokenizers.Tokenizer) -> None:
    for text in [*texts(), "ROMEO.\nBut, soft! 12 lights'll", "", " "]:
        ids = tokenizer.encode(text)
        assert ids == package.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode_content(text)
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_parsed_in_prompts_and_not_in_content(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>\n<|im_start|>system"
    assert tokenizer.encode(text)[1] == IM_END and IM_START in tokenizer.encode(text)
    content = tokenizer.encode_content(text)
    assert not {END, IM_START, IM_END} & set(content) and tokenizer.decode(content) == text
    assert tokenizer.encode(text)[1] == IM_END  # the other call left no state behind


def test_decode_skips_special_tokens(tokenizer: Tokenizer) -> None:
    ids = [IM_START, *tokenizer.encode("hi"), IM_END, 4130]
    assert tokenizer.decode(ids) == "hi" == streamed(tokenizer, ids)


def test_stream_equals_decode_on_multibyte_text(tokenizer: Tokenizer) -> None:
    split = 0
    for text in texts():
        ids, stream = tokenizer.encode(text), tokenizer.stream()
        pieces = [stream.step(token) for token in ids]
        assert "".join(pieces) == text and stream.flush() == ""  # whole characters: no U+FFFD on the way
        split += pieces.count("")
    assert split > 500  # the vocabulary has few multi-byte tokens: most characters took several steps


def test_stream_equals_decode_on_arbitrary_ids(tokenizer: Tokenizer, package: tokenizers.Tokenizer) -> None:
    """Random ids are mostly malformed UTF-8, and are cut anywhere; the package's decoder gives the same text."""
    rng = random.Random(5)
    pools = [range(4160), range(256), range(4090, 4100)]
    for n in range(600):
        ids = [rng.choice(rng.choice(pools[: 1 + n % 3])) for _ in range(rng.randrange(1, 25))]
        assert streamed(tokenizer, ids) == tokenizer.decode(ids) == package.decode(ids, skip_special_tokens=True)


def test_stream_cut_inside_a_character_flushes_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🙂")
    assert len(ids) > 4
    stream = tokenizer.stream()
    assert "".join(stream.step(token) for token in ids[:-1]) == "ok "
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")
    assert tokenizer.decode(ids[:-1]) == "ok \ufffd"


def test_lone_surrogates_are_a_usage_error(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_content, ByteTokenizer(300).encode):
        with pytest.raises(UsageError, match="lone surrogate at character 2"):
            encode("ab\udc80")


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path, package: tokenizers.Tokenizer) -> None:
    values = json.loads((FOLDER / "tokenizer.json").read_text())
    values["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    text = "But, soft! what light"
    assert load_tokenizer(tmp_path).encode(text) == package.encode(text, add_special_tokens=False).ids


def test_added_tokens_that_are_not_special(tmp_path: Path) -> None:
    """Such as Qwen2.5's <tool_call>: an id of its own wherever it stands, and visible text."""
    values = json.loads((FOLDER / "tokenizer.json").read_text())
    values["added_tokens"].append({**values["added_tokens"][0], "id": 4096, "content": "<my call>", "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 4097 and "<my call>" not in tokenizer.special_tokens
    assert tokenizer.encode_content("<my call>") == [4096] == tokenizer.encode("<my call>")
    assert tokenizer.decode([4096]) == "<my call>"


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    values = json.loads((FOLDER / "tokenizer.json").read_text())
    values["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match="has the decoder Metaspace; only byte-level BPE"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="has ids up to 4095, but the embedding has 4000 rows"):
        load_tokenizer(FOLDER, V=4000)


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer(151936)
    assert (tokenizer.vocab_size, tokenizer.special_tokens) == (151936, {})
    assert tokenizer.encode("hé") == [0x68, 0xC3, 0xA9] == tokenizer.encode_content("hé")
    ids = [0x68, 0xC3, 0xA9, 256, 151935, 0xC3]
    assert tokenizer.decode(ids) == "hé⟨256⟩⟨151935⟩\ufffd" == streamed(tokenizer, ids)


def test_tokenizers_differ_where_an_id_means_two_things(tokenizer: Tokenizer) -> None:
    """What one of them lacks is no difference: checkpoints of one family are padded to several sizes."""
    assert tokenizer.first_difference(load_tokenizer(builtin_path("tiny-shakespeare-draft"))) is None
    assert ByteTokenizer(152064).first_difference(ByteTokenizer(151936)) is None
    assert tokenizer.first_difference(ByteTokenizer(4096)) == 0
