"""TextStream: ids in, whole characters out, and why it ended."""

from collections.abc import Iterator
from typing import Any

import pytest

from loaders.resolve import open_model, open_tokenizer
from loaders.tokenizer import Tokenizer
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.sampling import SamplingParams
from qwen_raw.generation.stream import Request, TextStream
from qwen_raw.observe.stats import Stats, Stopwatch

EOS = 4095


class Ids:
    """A runner's iterator that knows whether it was closed and how far it was read."""

    def __init__(self, ids: list[int], fails: bool = False) -> None:
        self.ids, self.fails, self.taken, self.closed = ids, fails, 0, False

    def generate(self) -> Iterator[int]:
        try:
            for token in self.ids:
                self.taken += 1
                yield token
            if self.fails:
                raise QwenRawError("the logits are not finite")
        finally:
            self.closed = True


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(open_model())


def start(tokenizer: Tokenizer, ids: Ids, limit: int | None = None, **params: Any) -> TextStream:
    watch = Stopwatch()
    limit = len(ids.ids) if limit is None else limit
    request = Request([1, 2, 3], SamplingParams(max_tokens=max(limit, 1), **params), limit, None)

    def measure(tokens: int) -> Stats:
        return Stats(3, tokens, watch.prompt_s, watch.decode_s, 10, 0, None, 0, 0, None)

    eos: frozenset[int] = frozenset() if request.params.ignore_eos else frozenset({EOS})
    return TextStream(request, ids.generate(), decoder=tokenizer.stream(), eos_ids=eos, watch=watch, measure=measure)


def test_characters_are_never_split(tokenizer: Tokenizer) -> None:
    """Byte-level BPE cuts characters it has not learned into bytes; pieces are whole characters all the same."""
    samples = [
        "浮世絵は美しい",
        "👩‍👩‍👧‍👦 and 🇫🇷",
        "naïve café — “quoted”",
        "Ελληνικά, русский, हिन्दी",
        "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
        "日本語" * 40,
    ]
    split = 0
    for text in samples + [chr(code) * 3 for code in range(0x4E00, 0x4E00 + 200)]:
        ids = tokenizer.encode(text)
        stream = start(tokenizer, Ids(ids))
        pieces = list(stream)
        assert all(pieces) and "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text == stream.completion().text
        split += len(pieces) < len(ids)
    assert split > 100  # the tokenizer does cut them


def test_a_character_cut_by_the_limit_is_flushed_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("A浮")
    stream = start(tokenizer, Ids(ids), limit=len(ids) - 1)
    assert "".join(stream) == "A\ufffd"
    assert stream.completion().text == "A\ufffd" == tokenizer.decode(ids[:-1])
    assert stream.completion().finish_reason == "length"


def test_eos_ends_the_text_and_is_counted(tokenizer: Tokenizer) -> None:
    ids = Ids([*tokenizer.encode("Enter"), EOS, *tokenizer.encode("never")])
    stream = start(tokenizer, ids)
    assert "".join(stream) == "Enter"
    done = stream.completion()
    assert (done.finish_reason, done.token_ids[-1]) == ("stop", EOS)
    assert done.stats.completion_tokens == len(done.token_ids)
    assert ids.closed and ids.taken == len(done.token_ids)  # surplus work is dropped


def test_ignore_eos_goes_on(tokenizer: Tokenizer) -> None:
    ids = Ids([*tokenizer.encode("Enter"), EOS, *tokenizer.encode(" MACBETH")])
    stream = start(tokenizer, ids, ignore_eos=True)
    assert "".join(stream) == "Enter MACBETH"
    assert stream.completion().finish_reason == "length"


def test_a_stop_string_ends_the_text_inside_a_token(tokenizer: Tokenizer) -> None:
    ids = Ids(tokenizer.encode("To be, or not to be, that is the question"))
    stream = start(tokenizer, ids, stop=("t to", "quest"))
    assert "".join(stream) == "To be, or no"
    assert stream.completion().finish_reason == "stop"
    assert ids.closed and ids.taken < len(ids.ids)


def test_a_held_back_tail_is_shown_at_the_limit(tokenizer: Tokenizer) -> None:
    stream = start(tokenizer, Ids(tokenizer.encode("the end")), stop=("end of the play",))
    assert "".join(stream) == "the end"
    assert stream.completion().finish_reason == "length"


def test_an_interruption_keeps_what_there_is(tokenizer: Tokenizer) -> None:
    ids = Ids(tokenizer.encode("Good morrow, cousin"))
    stream = start(tokenizer, ids, stop=("orr",))
    shown = next(stream) + stream.interrupt()
    done = stream.completion()
    assert done.text == shown and "Good morrow, cousin".startswith(shown)
    assert done.finish_reason == "interrupted"
    assert ids.closed
    assert list(stream) == [] and stream.interrupt() == ""


def test_an_error_is_not_mistaken_for_the_end(tokenizer: Tokenizer) -> None:
    stream = start(tokenizer, Ids(tokenizer.encode("Ay me"), fails=True), limit=100)
    with pytest.raises(QwenRawError, match="not finite"):
        list(stream)
    assert list(stream) == []
    assert stream.completion().finish_reason == "interrupted"


def test_no_room_means_no_work(tokenizer: Tokenizer) -> None:
    ids = Ids([5])
    stream = start(tokenizer, ids, limit=0)
    assert list(stream) == []
    assert stream.completion().finish_reason == "length"
    assert ids.taken == 0
