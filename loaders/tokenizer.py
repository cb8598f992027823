"""Text ↔ token ids: byte-level BPE through the `tokenizers` package, and a stand-in for models without a tokenizer.

Decoding is done on bytes: a token stands for some bytes of UTF-8, often for a part of a character. The bytes of all
tokens are joined and decoded with U+FFFD for what is malformed, whether at once (`decode`) or piece by piece
(`stream`), so that both give the same text.
"""

import codecs
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from qwen_raw.errors import UsageError


class StreamDecoder:
    """Text of a growing sequence of ids. All returned pieces joined, `flush` included, equal `decode` of all ids."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        """The characters that `token` completes; "" while it ends inside one."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else ""."""
        return self._utf8.decode(b"", final=True)


class Tokenizer(ABC):
    """What the engine needs of a tokenizer."""

    vocab_size: int
    """Ids from 0 that have text; rows of the embedding from here on are padding and must never be sampled."""

    special_tokens: Mapping[str, int]
    """Control tokens, such as <|im_end|>, by their text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which the text of a special token is that token. Nothing is added."""

    @abstractmethod
    def encode_content(self, text: str) -> list[int]:
        """Ids of text that came from a user: the text of a special token is ordinary text."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for; none for special tokens and for ids without text."""

    @abstractmethod
    def token_text(self, token: int) -> str | None:
        """What an id is called, special tokens too; None for one without text. Alike in two tokenizers: one token."""

    def first_difference(self, other: "Tokenizer") -> int | None:
        """The lowest id that means something in both and not the same; None if there is none.

        Checkpoints of one family differ in how many ids follow the text's, so an id that one of them lacks is none.
        """
        for token in range(min(self.vocab_size, other.vocab_size)):
            mine, theirs = self.token_text(token), other.token_text(token)
            if mine != theirs and mine is not None and theirs is not None:
                return token
        return None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens; malformed UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte ↔ character table: printable Latin-1 stands for itself, the other bytes for U+0100, U+0101, …"""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(kept))
    return {chr(byte): byte for byte in kept} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class BpeTokenizer(Tokenizer):
    """A tokenizer.json with a ByteLevel decoder, as Qwen2.5's."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a tokenizers.Tokenizer; it is kept and changed."""
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._bytes = _byte_of_char()
        self._lock = threading.Lock()  # encode_special_tokens is the tokenizer's state, not the call's

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special_as_text=False)

    def encode_content(self, text: str) -> list[int]:
        return self._encode(text, special_as_text=True)

    def _encode(self, text: str, *, special_as_text: bool) -> list[int]:
        _check_unicode(text)
        with self._lock:
            self._tokenizer.encode_special_tokens = special_as_text
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        text = None if token in self._special_ids else self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        try:
            return bytes([self._bytes[char] for char in text])
        except KeyError:  # an added token whose text is not in the byte alphabet stands for itself
            return bytes(text, "utf-8")

    def token_text(self, token: int) -> str | None:
        text: str | None = self._tokenizer.id_to_token(token)
        return text


class ByteTokenizer(Tokenizer):
    """For models without a tokenizer: ids 0…255 are bytes, an id above is shown as ⟨id⟩."""

    def __init__(self, V: int) -> None:
        self.vocab_size = V
        self.special_tokens = {}

    def encode(self, text: str) -> list[int]:
        _check_unicode(text)
        return list(text.encode())

    def encode_content(self, text: str) -> list[int]:
        return self.encode(text)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"⟨{token}⟩".encode()

    def token_text(self, token: int) -> str | None:
        return f"<0x{token:02X}>" if token < 256 else f"⟨{token}⟩"


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from error


def load_tokenizer(path: Path | str, V: int | None = None) -> Tokenizer:
    """The tokenizer.json of a folder. `V`: the embedding's rows, which its ids must fit. Raises UsageError."""
    file = Path(path) / "tokenizer.json"
    if not file.exists():
        raise UsageError(f"{path} has no tokenizer.json")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception for every malformed file
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(inner.decoder, ByteLevel):
        kind = type(inner.decoder).__name__
        raise UsageError(f"{file} has the decoder {kind}; only byte-level BPE (decoder ByteLevel) is supported")
    tokenizer = BpeTokenizer(inner)
    if V is not None and tokenizer.vocab_size > V:
        raise UsageError(f"{file} has ids up to {tokenizer.vocab_size - 1}, but the embedding has {V} rows")
    return tokenizer
