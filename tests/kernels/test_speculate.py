"""draft.cu and accept.cu against their definitions in Python: what is guessed, what stands, what the host is told."""

from typing import Any

import numpy as np
import pytest

from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import logits_hash
from qwen_raw.generation.sampling import choose
from qwen_raw.kernels.accept import PassBuffers, accept, accept_begin, accept_step
from qwen_raw.kernels.draft import draft_catch, draft_ngram, draft_row, draft_rows
from qwen_raw.kernels.sample import BAD_ID, SLOTS, Sampler, sample

Array = np.ndarray[Any, Any]
V, TEXT, MAX_LEN = 700, 650, 200


def looked_up(history: list[int], N: int, M: int) -> list[int]:
    """The last id and M - 1 guesses, by trying every earlier place."""
    last, best = len(history) - 1, (0, 0)
    for end in range(last):
        n = 0
        while n < N and n <= end and history[end - n] == history[last - n]:
            n += 1
        best = max(best, (n, end))
    n, end = best
    return [history[last], *(history[end + 1 + i % (last - end)] if n else history[last] for i in range(M - 1))]


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("M", [1, 2, 6, 16])
def test_ngrams_are_looked_up(dev: Any, rng: np.random.Generator, N: int, M: int) -> None:
    b = PassBuffers.create(dev, M, 3000, V)
    for length, kinds in ((1, 5), (2, 1), (2, 50), (40, 3), (40, 1000), (150, 4), (2500, 40)):
        history = rng.integers(0, kinds, length).tolist()
        b.history.view((length,)).upload(np.array(history, np.int32))
        state = dev.array(np.array([history[-1], length - 1, 0, 0], np.int32))
        draft_ngram(dev, b.ids, b.rows, state, b.history, N)
        want = looked_up(history, N, M)
        assert b.ids.download().tolist() == want
        assert b.rows.download()[:, 0].tolist() == want


def test_a_row_takes_a_state_s_token(dev: Any) -> None:
    b = PassBuffers.create(dev, 3, 10, V)
    for i in (0, 2):
        draft_row(dev, b.ids, b.rows, i, dev.array(np.array([70 + i, 5, 6, 7], np.int32)))
    assert b.ids.download().tolist() == [70, 0, 72]
    assert b.rows.download().tolist() == [[70, 0, 0, 0], [0, 0, 0, 0], [72, 0, 0, 0]]


@pytest.mark.parametrize("M", [1, 2, 6, 16])
def test_rows_take_guesses_from_elsewhere(dev: Any, M: int) -> None:
    """Row 0 is the target's own id, not what a draft model of another vocabulary took it for."""
    b = PassBuffers.create(dev, M, 10, V)
    state, guesses = (dev.array(np.array(x, np.int32)) for x in ([699, 5, 6, 7], range(100, 116)))
    draft_rows(dev, b.ids, b.rows, state, guesses)
    want = [699, *range(101, 100 + M)]
    assert b.ids.download().tolist() == want
    assert b.rows.download().tolist() == [[token, 0, 0, 0] for token in want]
    with pytest.raises(QwenRawError, match=f"for {M} rows" if M > 1 else "of int32"):
        draft_rows(dev, b.ids, b.rows, state, dev.zeros((M,), np.dtype(np.uint32)))


class Passes:
    """A decode state, and passes over logits that the test makes, checked against single choices."""

    def __init__(self, dev: Any, M: int, temperature: float = 0.0, seed: int = 0) -> None:
        self.dev, self.M, self.temperature, self.seed = dev, M, temperature, seed
        self.b, self.s, self.draft = (
            PassBuffers.create(dev, M, MAX_LEN, V),
            Sampler.create(dev, V, 2),
            dev.zeros((4,), np.dtype(np.int32)),
        )
        self.s.set_params(temperature, seed, TEXT)
        self.token, self.pos, self.step, self.history = 9, 20, 0, {20: 9}
        self.told, self.ended = [0] * 4, 0
        self.s.set_position(self.token, self.pos)
        self.limit(1000)
        accept_begin(dev, self.b, self.s, self.draft)
        self.check_left_behind()

    def limit(self, step: int) -> None:
        self.room = step
        self.b.limit.upload(np.array([step], np.uint32))

    def check_left_behind(self) -> None:
        assert self.s.state.download()[:3].tolist() == [self.token, self.pos, self.step]
        assert self.draft.download().tolist() == [self.token, self.pos, 0, 0]
        assert self.b.rows.download()[:, 1].tolist() == [self.pos + i for i in range(self.M)]
        assert self.b.span.download().tolist() == [self.pos, self.M]
        got = self.b.history.download()
        assert {at: int(got[at]) for at in self.history} == self.history

    def run(self, logits: Array, right: int) -> int:
        """One pass over f32 [M, V] whose first `right` guesses are right; the ids that it posted."""
        want = []
        for row in range(self.M):
            if np.isfinite(logits[row, :TEXT]).all():
                options = {"temperature": self.temperature, "seed": self.seed, "text_vocab": TEXT}
                want.append(choose(logits[row], position=self.pos + 1 + row, **options))
            else:
                want.append(BAD_ID)
        ids = [self.token, *(w if i < right else (w + 1) % TEXT for i, w in enumerate(want[:-1]))]
        self.b.ids.upload(np.array(ids, np.uint32).view(np.int32))
        accept(self.dev, self.b, self.s, self.draft, self.dev.array(logits))
        stands = min(right + 1, self.M, max(0, self.room - self.step))
        if BAD_ID in want[:stands]:
            stands = want.index(BAD_ID) + 1
        self.ended += 1
        if stands:
            wrong = stands == right + 1 < self.M and want[stands - 1] != BAD_ID
            self.told[0] += stands - 1
            self.told[1] += self.M - 1
            self.told[2] += stands - 1 + wrong
            self.told[3] += 1
        ring = self.s.ring.words
        self.dev.synchronize()
        for i, id_ in enumerate(want[:stands]):
            word, number = (int(x) for x in ring[2 * ((self.step + i) % SLOTS) :][:2])
            assert (word & 0xFFFFFFFF, number) == (id_, self.step + i + 1)
            assert word >> 32 == logits_hash(logits[i][:TEXT])
            self.token = 0 if id_ == BAD_ID else id_
            self.history[self.pos + 1 + i] = self.token
        self.pos, self.step = self.pos + stands, self.step + stands
        assert self.b.ended == (self.ended, self.step)
        assert [int(w) for w in self.b.told.words[1:]] == self.told
        self.check_left_behind()
        return stands


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("M", [1, 2, 5, 16])
def test_rows_stand_as_far_as_guesses_are_right(dev: Any, rng: np.random.Generator, M: int, temperature: float) -> None:
    """Every number of right guesses, in turn; the choices are sample.cu's, at the rows' own positions."""
    passes = Passes(dev, M, temperature, seed=1 << 40 | 7)
    for right in range(M):
        logits = rng.standard_normal((M, V)).astype(np.float32)
        logits[:, TEXT:] = 1e4  # padding
        assert passes.run(logits, right) == right + 1


def test_a_step_that_chose_by_itself_is_a_pass_without_guesses(dev: Any, rng: np.random.Generator) -> None:
    passes = Passes(dev, 3)
    for right in (1, 2):
        logits = rng.standard_normal((4, V)).astype(np.float32)
        passes.run(logits[:3], right)
        sample(dev, dev.array(logits[3]), passes.s)
        accept_step(dev, passes.b, passes.s, passes.draft)
        passes.pos, passes.step, passes.ended = passes.pos + 1, passes.step + 1, passes.ended + 1
        passes.token = passes.history[passes.pos] = int(logits[3, :TEXT].argmax())
        passes.told[3] += 1
        passes.check_left_behind()
        dev.synchronize()
        assert passes.b.ended == (passes.ended, passes.step)
        assert [int(w) for w in passes.b.told.words[1:]] == passes.told
        assert passes.b.filled.download().tolist() == [passes.pos - 1]  # the draft model has not seen the step's id


def test_nothing_is_posted_beyond_the_limit(dev: Any, rng: np.random.Generator) -> None:
    """Passes that were queued too many change nothing, also when a limit of an older request is far behind."""
    passes = Passes(dev, 4)
    logits = rng.standard_normal((4, V)).astype(np.float32)
    passes.limit(6)
    assert [passes.run(logits, 3) for _ in range(4)] == [4, 2, 0, 0]
    passes.limit(3)
    assert passes.run(logits, 3) == 0
    passes.limit(8)
    assert passes.run(logits, 0) == 1


@pytest.mark.parametrize("bad_row", [0, 1, 3])
def test_a_logit_that_is_not_finite_ends_the_pass(dev: Any, rng: np.random.Generator, bad_row: int) -> None:
    passes = Passes(dev, 4)
    logits = rng.standard_normal((4, V)).astype(np.float32)
    logits[bad_row, 300] = np.nan
    assert passes.run(logits, 3) == bad_row + 1
    assert passes.run(rng.standard_normal((4, V)).astype(np.float32), 3) == 4


def test_an_id_that_the_draft_model_does_not_know_is_its_id_0(dev: Any) -> None:
    passes = Passes(dev, 2)
    logits = np.zeros((2, V), np.float32)
    for choice, known in ((80, 81), (80, 80)):
        logits[0] = 0.0
        logits[0, choice] = 1.0
        passes.b.ids.upload(np.array([9, 0], np.int32))
        accept(dev, passes.b, passes.s, passes.draft, dev.array(logits), known)
        assert passes.draft.download()[0] == (80 if known > 80 else 0)
        assert passes.s.state.download()[0] == 80
    accept_begin(dev, passes.b, passes.s, passes.draft, 80)
    assert passes.draft.download()[0] == 0


def test_forced_guesses_stand_whatever_is_right(dev: Any, rng: np.random.Generator) -> None:
    """As often as asked for; what is posted before a row that stands is that row's id, and else the choice."""
    M, passes = 4, 40
    for acceptance in (0.0, 0.5, 1.0):
        b, s = PassBuffers.create(dev, M, MAX_LEN, V, forced=True), Sampler.create(dev, V, 2)
        draft = dev.zeros((4,), np.dtype(np.int32))
        s.set_params(0.0, 0, TEXT)
        s.set_position(9, 20)
        b.limit.upload(np.array([1000], np.uint32))
        b.force(acceptance)
        accept_begin(dev, b, s, draft)
        pos = 20
        for _ in range(passes):
            logits = rng.standard_normal((M, V)).astype(np.float32)
            ids, choices = rng.integers(0, TEXT, M), logits[:, :TEXT].argmax(1)
            b.ids.upload(ids.astype(np.int32))
            accept(dev, b, s, draft, dev.array(logits))
            token, now = (int(x) for x in s.state.download()[:2])
            stood = now - pos - 1
            history = b.history.download()
            assert history[pos + 1 : now].tolist() == ids[1 : stood + 1].tolist()
            assert token == history[now] == choices[stood]
            ring = s.ring.words.reshape(SLOTS, 2)[(np.arange(pos, now) - 20) % SLOTS, 0] & 0xFFFFFFFF
            assert ring.tolist() == [*ids[1 : stood + 1], choices[stood]]
            assert stood == {0.0: 0, 1.0: M - 1}.get(acceptance, stood)
            pos = now
            if pos > MAX_LEN - M:
                break
        right, compared = int(b.told.words[1]), int(b.told.words[3])
        assert abs(right / compared - acceptance) < 0.15
    with pytest.raises(QwenRawError, match="forced to 2"):
        b.force(2.0)
    with pytest.raises(QwenRawError, match="cannot be forced"):
        PassBuffers.create(dev, M, MAX_LEN, V).force(0.5)


def test_keys_that_a_draft_model_lacks(dev: Any, rng: np.random.Generator) -> None:
    """A pass of one row leaves them out; draft_catch asks for as many as fit, and in the end for one at least."""
    passes = Passes(dev, 3)
    b = passes.b
    assert b.filled.download().tolist() == [20]
    passes.run(rng.standard_normal((3, V)).astype(np.float32), 1)
    assert b.filled.download().tolist() == [22]
    for _ in range(9):
        accept(dev, b, passes.s, passes.draft, dev.array(rng.standard_normal((1, V)).astype(np.float32)))
    assert b.filled.download().tolist() == [22]
    history, request = b.history.download(), dev.zeros((4 + 5,), np.dtype(np.int32))
    for start, count, filled in ((22, 5, 27), (27, 4, 31), (31, 1, 31)):
        draft_catch(dev, passes.s.state, b.filled, b.history, request, 300)
        got = request.download().tolist()
        assert got[:2] == [start, count] and b.filled.download().tolist() == [filled]
        assert got[4 : 4 + count] == [x if x < 300 else 0 for x in history[start : start + count].tolist()]


def test_what_does_not_fit_is_refused(dev: Any) -> None:
    for M in (0, 17):
        with pytest.raises(QwenRawError, match="rows a pass"):
            PassBuffers.create(dev, M, 10, V)
    b, s, draft = PassBuffers.create(dev, 2, 10, V), Sampler.create(dev, V), dev.zeros((4,), np.dtype(np.int32))
    with pytest.raises(QwenRawError, match="3 rows of logits"):
        accept(dev, b, s, draft, dev.zeros((3, V), np.dtype(np.float32)))
    with pytest.raises(QwenRawError, match="logits of 8 ids"):
        accept(dev, b, s, draft, dev.zeros((2, 8), np.dtype(np.float32)))
    with pytest.raises(QwenRawError, match="row 2 of 2"):
        draft_row(dev, b.ids, b.rows, 2, draft)
    with pytest.raises(QwenRawError, match="up to 0 ids"):
        draft_ngram(dev, b.ids, b.rows, draft, b.history, 0)
