"""The public interface: load, generate, stream, logits, and how wrong requests are refused."""

import inspect
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen_raw
from loaders.config_json import read_json
from loaders.resolve import builtin_path, open_model
from loaders.synthetic import random_checkpoint
from qwen_raw import SamplingParams
from qwen_raw.engine import Engine, load
from qwen_raw.errors import QwenRawError, UsageError

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "tiny-shakespeare.npz")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(device="cpu") as opened:
        yield opened


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the built-in model, to be changed."""
    return Path(shutil.copytree(builtin_path("tiny-shakespeare"), tmp_path / "copy"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(read_json(path) | values), encoding="utf-8")


def test_public_names() -> None:
    assert qwen_raw.load is load
    assert all(getattr(qwen_raw, name) is not None for name in qwen_raw.__all__)
    assert set(qwen_raw.__all__) <= set(dir(qwen_raw))
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert [name for name in qwen_raw.__all__ if not name.startswith("_") and f"`{name}`" not in readme] == []
    assert not {name for name in inspect.signature(load).parameters if f"    {name}: " not in (load.__doc__ or "")}


def test_the_same_generation_from_text_ids_and_stream(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20)
    ids = engine.encode("ROMEO:\n")
    from_text, from_ids = engine.generate("ROMEO:\n", params), engine.generate(np.array(ids), params)  # type: ignore[arg-type]
    pieces = list(engine.stream("ROMEO:\n", params))
    assert from_text.token_ids == from_ids.token_ids and len(from_text.token_ids) == 20
    assert from_text.text == from_ids.text == "".join(pieces) == engine.tokenizer.decode(from_text.token_ids)
    assert from_text.finish_reason == "length"
    assert from_text.stats.prompt_tokens == len(ids)
    assert from_text.stats.logits_hash == from_ids.stats.logits_hash is not None


@pytest.mark.parametrize("k", [0, 3, 5])
def test_greedy_equals_golden(engine: Engine, k: int) -> None:
    done = engine.generate(GOLDEN[f"prompt{k}"].tolist(), SamplingParams(max_tokens=48, ignore_eos=True))
    assert done.token_ids == GOLDEN[f"greedy{k}"].tolist()


def test_logits_are_teacher_forced(engine: Engine) -> None:
    logits = engine.logits(GOLDEN["prompt1"].tolist())
    assert logits.dtype == np.float32 and logits.shape == (6, engine.config.V)
    assert np.abs(logits[-4:] - GOLDEN["logits1"]).max() < 2e-4


def test_a_seed_repeats_and_a_fresh_one_is_told(engine: Engine) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=5)
    first = engine.generate("KING", params)
    assert first.token_ids == engine.generate("KING", params).token_ids
    fresh = engine.stream("KING", replace(params, seed=None))
    assert fresh.request.seed is not None
    again = engine.generate("KING", replace(params, seed=fresh.request.seed))
    assert again.token_ids != first.token_ids


@pytest.mark.parametrize("newer", ["generate", "stream", "logits", "close"])
def test_a_generation_that_another_request_ended_says_so(newer: str) -> None:
    """Silence would look like an ordinary end of the text. A request that is refused ends nothing."""
    with load(device="cpu", max_model_len=64) as engine:
        first = engine.stream("KING", SamplingParams(max_tokens=None, ignore_eos=True))
        begun = next(first)
        for refused in (engine.generate, engine.stream, engine.logits):
            with pytest.raises(UsageError):
                refused([])
        begun += next(first)
        engine.close() if newer == "close" else getattr(engine, newer)([5, 6])
        for _ in range(2):
            with pytest.raises(QwenRawError, match="closed before" if newer == "close" else "ended by a newer request"):
                next(first)
        done = first.completion()
        assert done.finish_reason == "interrupted" and done.text.startswith(begun)


def test_an_interrupted_or_finished_stream_ends_quietly(engine: Engine) -> None:
    first = engine.stream("KING", SamplingParams(max_tokens=8))
    next(first)
    first.interrupt()
    finished = engine.stream("KING", SamplingParams(max_tokens=2))
    assert list(finished)
    engine.generate("KING", SamplingParams(max_tokens=1))
    assert list(first) == list(finished) == []


def test_a_second_thread_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()
    params = SamplingParams(max_tokens=3)

    def slow(*_: object, **__: object) -> int:
        inside.set()
        assert leave.wait(60)
        return 5

    monkeypatch.setattr(qwen_raw.reference, "choose", slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(engine.generate, "KING", params)
        assert inside.wait(60)
        try:
            with pytest.raises(QwenRawError, match="at work in another thread"):
                engine.generate("KING", params)
        finally:
            leave.set()
        assert other.result(60).token_ids == [5, 5, 5]


def test_either_eos_ends_a_generation(copy: Path) -> None:
    """config.json names 4095; generation_config.json and the tokenizer add 4093 and any end of turn."""
    first = int(GOLDEN["greedy0"][2])
    edit(copy / "generation_config.json", eos_token_id=[4093, first])
    with load(str(copy), device="cpu") as engine:
        assert {4093, 4095, first} <= engine.eos_ids
        done = engine.generate(GOLDEN["prompt0"].tolist(), SamplingParams(max_tokens=48))
        want = GOLDEN["greedy0"].tolist()
        assert done.token_ids == want[: want.index(first) + 1]
        assert done.finish_reason == "stop"


@pytest.mark.parametrize(
    ("length", "max_tokens", "generated"), [(16, 5, 0), (15, 5, 1), (12, 100, 4), (12, None, 4), (12, 4, 4), (12, 3, 3)]
)
def test_the_context_ends_cleanly(length: int, max_tokens: int | None, generated: int) -> None:
    """Prompt and generated tokens together never pass max_model_len; filling it is a "length" finish."""
    with load(device="cpu", max_model_len=16) as engine:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        done = engine.generate([5] * length, params)
        assert (len(done.token_ids), done.finish_reason) == (generated, "length")
        assert engine.generate([5] * 3, params).token_ids  # still usable


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 4096], r"token id 4096 is outside 0…4095"),
        ([-1], r"token id -1 is outside 0…4095"),
        ([1] * 2049, "the prompt has 2049 tokens, more than the 2048 of max_model_len"),
        ("\ud800", "not valid Unicode"),
        (5, "a prompt is a text or a list of token ids, not int"),
        (None, "a prompt is a text or a list of token ids, not NoneType"),
        (b"abc", "expected token ids, not bytes"),
        (["a"], "a token id is 'a' \\(str\\), expected an integer"),
        ([True], "a token id is True \\(bool\\), expected an integer"),
        ([1.0], "a token id is 1.0 \\(float\\), expected an integer"),
        ([[1, 2]], r"a token id is \[1, 2\] \(list\), expected an integer"),
    ],
)
def test_wrong_prompts_are_refused_at_once(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.stream(prompt)
    if not isinstance(prompt, str):
        with pytest.raises(UsageError, match=message):
            engine.logits(prompt)


def test_values_of_a_wrong_type_are_refused(engine: Engine) -> None:
    """Each with what would be right, none with an error from inside."""
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: engine.generate("a", {"max_tokens": 3}), "params is a dict, expected qwen_raw.SamplingParams"),  # type: ignore[arg-type]
        (lambda: engine.generate("a", 0), "params is a int, expected qwen_raw.SamplingParams"),  # type: ignore[arg-type]
        (lambda: engine.logits("abc"), "expected token ids, not str: encode"),  # type: ignore[arg-type]
        (lambda: engine.encode(5), "the prompt is 5 \\(int\\), expected a str"),  # type: ignore[arg-type]
        (lambda: engine.encode_chat(b"a"), "the prompt is b'a' \\(bytes\\), expected a str"),  # type: ignore[arg-type]
        (lambda: engine.encode_chat("a", 1), "the system message is 1 \\(int\\), expected a str"),  # type: ignore[arg-type]
    ]
    for call, message in wrong:
        with pytest.raises(UsageError, match=message):
            call()


def test_a_model_may_be_a_path(copy: Path) -> None:
    """A Path is always a folder, whatever its name."""
    with load(copy, device="cpu", max_model_len=8) as engine:
        assert engine.generate("a", SamplingParams(max_tokens=1)).token_ids
    with pytest.raises(UsageError, match="model 'tiny-shakespeare' is not a folder"):
        load(Path("tiny-shakespeare"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device 'tpu' is not one of auto, cuda, cpu, sim"),
        ({"dtype": "int3"}, "dtype 'int3' is not one of auto, bf16, fp8"),
        ({"tp": 3}, "tp 3 does not fit tiny-shakespeare's 4 query and 2 KV heads: use 1, 2 or 4"),
        ({"tp": 0}, "tp 0 does not fit"),
        ({"tp": 2}, "tp 2 needs GPUs: the NumPy reference of device cpu is one rank"),
        ({"model": "random:0.5b", "tp": 4}, "tp 4 does not fit random:0.5b's 14 query and 2 KV heads: use 1 or 2"),
        ({"model": "random:72b", "tp": 6}, "tp 6 does not fit random:72b's 64 query and 8 KV heads: use 1, 2, 4 or 8"),
        ({"devices": [0, 1], "tp": 1}, "tp 1 with 2 devices: name one GPU a rank"),
        ({"devices": []}, "devices names no GPU"),
        ({"devices": ["0"]}, "an element of devices is '0' \\(str\\), expected an integer"),
        ({"devices": 0}, "devices is 0 \\(int\\), expected a list of integers"),
        ({"devices": "0,1"}, "devices is '0,1' \\(str\\), expected a list of integers"),
        ({"devices": [0], "device": "sim"}, "names GPUs: it does not go with --device sim"),
        ({"comm": "smoke"}, "comm 'smoke' is not one of auto, host, flag, lamport, twoshot, inline"),
        ({"tp": 1.0}, "tp is 1.0 \\(float\\), expected an integer"),
        ({"tp": True}, "tp is True \\(bool\\), expected an integer"),
        ({"max_model_len": "4k"}, "max_model_len is '4k' \\(str\\), expected an integer"),
        ({"device": None}, "device None is not one of"),
        ({"dtype": ["fp8"]}, "dtype \\['fp8'\\] is not one of"),
        ({"model": 5}, "model is 5 \\(int\\), expected a str or a Path, or None"),
        ({"model": b"tiny-shakespeare"}, "\\(bytes\\), expected a str or a Path"),
        ({"progress": "bar"}, "progress is 'bar', expected a function"),
        ({"max_model_len": 0}, "max_model_len 0 is not from 1 to 2048"),
        ({"max_model_len": 2049}, "max_model_len 2049 is not from 1 to 2048"),
        ({"model": "random:7b:1", "dtype": "fp8", "max_model_len": 40000}, "not from 1 to 32768"),
    ],
)
def test_wrong_options_are_refused_before_loading(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(**{"device": "cpu", **options})


def test_defaults_come_from_the_checkpoint(copy: Path) -> None:
    with load(str(copy), device="cpu", max_model_len=8) as engine:
        assert engine.default_params().temperature == 0
    edit(copy / "generation_config.json", do_sample=True, temperature=0.7)
    with load(str(copy), device="cpu", max_model_len=8) as engine:
        assert engine.default_params().temperature == 0.7
        assert engine.stream("a").request.params.temperature == 0.7
    edit(copy / "generation_config.json", do_sample=True, temperature=1e300)
    with load(str(copy), device="cpu", max_model_len=8) as engine:
        with pytest.raises(QwenRawError, match=r"generation_config.json: temperature 1e\+300 is too high"):
            engine.stream("a")
        assert engine.generate("a", SamplingParams(max_tokens=1)).token_ids
    edit(copy / "generation_config.json", do_sample=False, temperature=0.7)
    with load(str(copy), device="cpu", max_model_len=8) as engine:
        assert engine.default_params().temperature == 0


def test_default_context_is_bounded(copy: Path) -> None:
    edit(copy / "config.json", max_position_embeddings=131072)
    with load(str(copy), device="cpu") as engine:
        assert engine.runner.max_model_len == 32768
    with load(str(copy), device="cpu", max_model_len=100_000) as engine:
        assert engine.runner.max_model_len == 100_000


def test_fp8_rounds_the_weights(engine: Engine) -> None:
    with load(device="cpu", dtype="fp8") as rounded:
        assert rounded.runner.dtype == "fp8"
        ids = GOLDEN["prompt0"].tolist()
        off = np.abs(rounded.logits(ids) - engine.logits(ids)).max()
        assert 1e-2 < off < 5


def test_an_fp8_checkpoint_is_not_run_as_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(open_model().config, L=1, name="small-fp8")
    monkeypatch.setattr(qwen_raw.engine, "open_model", lambda spec, dtype: random_checkpoint(small, "fp8", 0))
    with pytest.raises(UsageError, match="small-fp8 is stored as fp8: dtype bf16 would restore nothing"):
        load(device="cpu", dtype="bf16")
    for dtype in ("auto", "fp8"):
        with load(device="cpu", dtype=dtype, max_model_len=8) as engine:
            assert engine.runner.dtype == "fp8"


def test_chat_ids_carry_the_turns(engine: Engine) -> None:
    start, end = (engine.tokenizer.special_tokens[f"<|im_{which}|>"] for which in ("start", "end"))
    ids = engine.encode_chat("a<|im_end|>b", system="Be brief.")
    assert ids.count(start) == 3 and ids.count(end) == 2  # the user's own <|im_end|> is text
    assert engine.tokenizer.decode(ids[ids.index(start) + 1 : ids.index(end)]) == "system\nBe brief."
    with pytest.raises(UsageError, match="the prompt is empty"):
        engine.encode_chat("")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", None])
def test_chat_template_is_found(copy: Path, where: str | None) -> None:
    template = "{{ messages[0].content }}"
    if where == "chat_template.jinja":
        (copy / where).write_text(template, encoding="utf-8")
    elif where is not None:
        (copy / where).write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    with load(str(copy), device="cpu", max_model_len=64) as engine:
        assert engine.has_chat_template == (where is not None)
        plain = engine.encode_chat("Hello") == engine.encode("Hello")
        assert plain == (where is not None)


def test_a_closed_engine_refuses() -> None:
    with load(device="cpu", max_model_len=8) as engine:
        stream = engine.stream("a")
        next(stream)
    assert stream.completion().finish_reason == "interrupted"
    with pytest.raises(QwenRawError, match="closed"):
        engine.generate("a")


def test_the_first_failure_is_the_one_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise QwenRawError("closing failed too")

    with pytest.raises(QwenRawError, match="closing failed too"), load(device="cpu", max_model_len=8) as engine:
        monkeypatch.setattr(engine.runner, "close", fail)
    with pytest.raises(ValueError, match="first"), load(device="cpu", max_model_len=8) as engine:
        monkeypatch.setattr(engine.runner, "close", fail)
        raise ValueError("first")


def test_what_one_rank_has_no_use_for_is_named() -> None:
    with load(device="cpu", max_model_len=8, comm="flag") as engine:
        assert engine.notes == ("comm flag has no effect: one rank has nothing to sum",)


def test_a_draft_model_of_another_tokenizer_is_refused(copy: Path) -> None:
    """Of as many ids, two of which are swapped."""
    file = copy / "tokenizer.json"
    content = read_json(file)
    vocab = content["model"]["vocab"]
    one, other = (next(text for text, number in vocab.items() if number == n) for n in (300, 301))
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load(device="sim", speculation=qwen_raw.Speculation(draft=copy))
    assert f"has another tokenizer: token 300 is {other!r} there and {one!r} in the model" in str(caught.value)


def test_a_broken_draft_folder_is_called_the_drafts(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(UsageError, match=r"^draft model: .*config\.json"):
        load(device="sim", speculation=qwen_raw.Speculation(draft=copy))


def test_progress_reaches_its_total() -> None:
    seen: list[tuple[str, int, int]] = []
    load(device="cpu", progress=lambda *step: seen.append(step)).close()
    assert seen[0][1] == 0 and seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_cuda_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And "auto" goes to the CPU: silently where there is no GPU, with a note where one is broken."""
    from qwen_raw.driver import device

    def absent(ordinal: int) -> None:
        raise UsageError("no NVIDIA driver was found on this machine")

    def broken(ordinal: int) -> None:
        raise QwenRawError("cuCtxCreate failed: CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(device, "CudaDevice", absent)
    for gpus in (None, [0]):
        with pytest.raises(UsageError, match="no NVIDIA driver was found on this machine: use --device cpu"):
            load(device="cuda", devices=gpus)
    with pytest.raises(UsageError, match="on this machine: --device sim simulates several ranks"):
        load(devices=[0, 0])  # no advice to do what was just done
    with load(device="auto", max_model_len=8) as engine:
        assert (engine.device, engine.notes) == ("cpu", ())
    monkeypatch.setattr(device, "CudaDevice", broken)
    with pytest.raises(QwenRawError, match="cuCtxCreate"):
        load(device="cuda")
    with load(device="auto", max_model_len=8) as engine:
        assert engine.device == "cpu" and "CUDA_ERROR_UNKNOWN" in engine.notes[0]
