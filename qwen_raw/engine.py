"""The engine: a checkpoint, a tokenizer and a runner behind one small interface. Start at `load`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from loaders.chat_template import encode_chat
from loaders.checkpoint import Checkpoint
from loaders.config_json import read_json
from loaders.resolve import open_model, open_tokenizer
from loaders.tokenizer import Tokenizer
from qwen_raw import checks
from qwen_raw.config import ModelConfig
from qwen_raw.device import Device
from qwen_raw.errors import QwenRawError, UsageError, close_all
from qwen_raw.generation.runner import Progress, Runner
from qwen_raw.generation.sampling import SamplingParams
from qwen_raw.generation.speculation import Speculation
from qwen_raw.generation.stream import Completion, Request, TextStream
from qwen_raw.observe.stats import Stats, Stopwatch
from qwen_raw.placement import DeviceName, Kind, Placement, degree, place
from qwen_raw.reference import ReferenceRunner

__all__ = ["Completion", "Engine", "SamplingParams", "Speculation", "TextStream", "load"]

DType = Literal["auto", "bf16", "fp8"]
KVCacheDType = Literal["auto", "bf16", "fp8"]
Comm = Literal["auto", "host", "flag", "lamport", "twoshot", "inline"]
Gemm = Literal["auto", "own", "cublaslt"]
Prompt = str | Sequence[int]

_SUPERSEDED = "this generation was ended by a newer request: an engine runs one at a time, finish one before the next"
DEFAULT_MAX_MODEL_LEN = 32768  # bounds the KV cache of models with a longer context, unless more is asked for


def load(
    model: str | os.PathLike[str] | None = None,
    device: str = "auto",
    tp: int | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    progress: Progress | None = None,
    devices: Sequence[int] | None = None,
    comm: str = "auto",
    speculation: Speculation | None = None,
    kv_cache_dtype: str = "auto",
    gemm: str = "auto",
) -> Engine:
    """Load a model and make it ready to generate.

    model: a folder in Hugging Face layout (str or Path), "random:7b" (or another size: synthetic weights), a built-in
      model's name, or None for the built-in tiny-shakespeare.
    device: "cuda"; "cpu", the NumPy reference; "sim", the GPU's kernels simulated on the CPU; "auto" is "cuda" where
      there is a usable GPU and "cpu" elsewhere.
    tp: tensor-parallel degree: how many ranks the model is split over; by default 1, or one for each of `devices`.
    dtype: of the layers' linears. "auto": as stored (fp16 and fp32 become bf16); "fp8" rounds a bf16 checkpoint to
      e4m3 on loading. "bf16" of an fp8 checkpoint is refused: it would double the memory and restore nothing.
    max_model_len: the longest sequence, prompt included; by default the model's context, at most 32768.
    progress: called with (stage, done, total) while weights are loaded.
    devices: numbers of the GPUs, one a rank; by default 0, 1, … A GPU that is named twice has two ranks: for tests.
    comm: how ranks sum a token's shares, a path of qwen_raw/comm/reduce.py; "auto" takes what is fastest.
    speculation: guess several ids and verify them in one pass (docs/speculation.md); on GPUs, or device "sim".
    gemm: what multiplies prompts: "own" kernels, "cublaslt" where it is installed, "auto" by measured times.
    kv_cache_dtype: "fp8" keeps keys and values as e4m3 (docs/decode.md), in half the memory; "auto" is "bf16".

    Raises UsageError for a request that cannot be met, or a model that cannot be run, QwenRawError for a failure on the
    way.
    """
    begin = perf_counter()
    tp = None if tp is None else checks.integer("tp", tp)
    gpus = None if devices is None else checks.integers("devices", devices)
    max_model_len = None if max_model_len is None else checks.integer("max_model_len", max_model_len)
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is {progress!r}, expected a function of (stage, done, total)")
    _check_choice("device", device, get_args(DeviceName))
    _check_choice("dtype", dtype, get_args(DType))
    _check_choice("comm", comm, get_args(Comm))
    _check_choice("gemm", gemm, get_args(Gemm))
    _check_choice("kv_cache_dtype", kv_cache_dtype, get_args(KVCacheDType))
    kv: Literal["bf16", "fp8"] = "fp8" if kv_cache_dtype == "fp8" else "bf16"
    if speculation is not None and not isinstance(speculation, Speculation):
        raise UsageError(f"speculation is a {type(speculation).__name__}, expected qwen_raw.Speculation")
    checkpoint = open_model(model, cast(DType, dtype))
    stored = checkpoint.dtype
    held = stored if dtype == "auto" else dtype
    ranks = degree(tp, gpus, checkpoint.config, fp8=held == "fp8")
    if dtype == "bf16" and stored == "fp8":
        raise UsageError(
            f"{checkpoint.config.name} is stored as fp8: dtype bf16 would restore nothing, use auto or fp8"
        )
    length = _context(max_model_len, checkpoint.config)
    tokenizer = open_tokenizer(checkpoint)
    draft = None if speculation is None else _draft(speculation, tokenizer)
    placement = place(cast(DeviceName, device), ranks, gpus, None if speculation is None else speculation.draft_device)
    text_vocab = min(tokenizer.vocab_size, checkpoint.config.V)
    runner = _runner(placement, checkpoint, held, length, text_vocab, progress, comm, speculation, draft, kv, gemm)
    return Engine(
        runner,
        checkpoint,
        tokenizer,
        device=placement.kind,
        tp=ranks,
        load_s=perf_counter() - begin,
        notes=(*checkpoint.notes, *placement.notes, *_sums(comm, placement.devices, checkpoint.config.D)),
    )


class Engine:
    """One loaded model. A context manager: leaving it frees everything it took.

    It runs one generation at a time, in one thread: a new request ends one that is still under way, whose iterator then
    raises QwenRawError.
    """

    def __init__(
        self,
        runner: Runner,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        *,
        device: Kind,
        tp: int,
        load_s: float,
        notes: tuple[str, ...] = (),
    ) -> None:
        """`notes`: lines that a user should see. Engines are made by `load`."""
        self.runner = runner
        self.config = checkpoint.config
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.device = device
        self.tp = tp
        self.load_s = load_s
        self.notes = (*notes, *runner.notes)
        end = tokenizer.special_tokens.get("<|im_end|>")  # ends a turn, whatever the config calls EOS
        self.eos_ids = frozenset(checkpoint.config.eos_ids) | ({end} if end is not None else frozenset())
        self.has_chat_template = _has_chat_template(checkpoint)
        self._active: TextStream | None = None

    def default_params(self) -> SamplingParams:
        """Sampling as generation_config.json has it: its temperature if it says do_sample, else greedy."""
        said = self.checkpoint.generation
        temperature = (1.0 if said.temperature is None else said.temperature) if said.do_sample else 0.0
        try:
            return SamplingParams(temperature=temperature)
        except UsageError as error:
            raise UsageError(f"generation_config.json: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text to complete; control tokens written out in it count as such."""
        if not checks.text("the prompt", text):
            raise UsageError("the prompt is empty")
        return self.tokenizer.encode(text)

    def encode_chat(self, prompt: str, system: str | None = None) -> list[int]:
        """Token ids of one user message in the chat template; `system` None leaves that turn to the template."""
        if not checks.text("the prompt", prompt):
            raise UsageError("the prompt is empty")
        if system is not None:
            checks.text("the system message", system)
        messages: list[Mapping[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        path = self.checkpoint.path if self.has_chat_template else None
        return encode_chat(self.tokenizer, path, [*messages, {"role": "user", "content": prompt}])

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [T, V] float32 after each of the T ids, teacher-forced."""
        ids = self._checked(ids)
        self._end_active(_SUPERSEDED)
        return self.runner.logits(ids)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TextStream:
        """Start a generation; iterate over the result for pieces of text. `params` None: `default_params()`.

        A wrong prompt is refused here, not at the first piece.
        """
        watch = Stopwatch()
        request = self._request(prompt, params)
        self._end_active(_SUPERSEDED)
        runner, syncs, guessed = self.runner, self.runner.host_syncs, self.runner.speculated
        ids = runner.generate(
            request.ids,
            max_tokens=request.max_tokens,
            temperature=request.params.temperature,
            seed=request.seed or 0,
        )

        def measure(tokens: int) -> Stats:
            return Stats(
                prompt_tokens=len(request.ids),
                completion_tokens=tokens,
                prompt_s=watch.prompt_s,
                decode_s=watch.decode_s,
                bytes_per_token=runner.bytes_per_token,
                kv_bytes_per_token=runner.kv_bytes_per_token,
                read_ceiling=runner.read_ceiling,
                host_syncs=runner.host_syncs - syncs,
                peak_bytes=runner.peak_bytes,
                logits_hash=runner.logits_hash if tokens else None,
                speculated=runner.speculated.since(guessed) if guessed and runner.speculated else None,
            )

        self._active = TextStream(
            request,
            ids,
            decoder=self.tokenizer.stream(),
            eos_ids=frozenset() if request.params.ignore_eos else self.eos_ids,
            watch=watch,
            measure=measure,
        )
        return self._active

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Generate to the end. An exception on the way (Ctrl-C too) propagates."""
        stream = self.stream(prompt, params)
        for _ in stream:
            pass
        return stream.completion()

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        params = self.default_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params is a {type(params).__name__}, expected qwen_raw.SamplingParams")
        ids = self._checked(self.encode(prompt) if isinstance(prompt, str) else prompt)
        room = self.runner.max_model_len - len(ids)
        seed = None
        if params.temperature > 0:
            seed = secrets.randbits(32) if params.seed is None else params.seed
        return Request(ids, params, room if params.max_tokens is None else min(params.max_tokens, room), seed)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """`ids` as a list of plain integers; UsageError if there is none, too many, or one without text."""
        if isinstance(ids, str | bytes):
            raise UsageError(f"expected token ids, not {type(ids).__name__}: encode(text) makes them of a text")
        if not isinstance(ids, Iterable):
            raise UsageError(f"a prompt is a text or a list of token ids, not {type(ids).__name__}")
        ids = [checks.integer("a token id", token) for token in ids]
        if len(ids) == 0:
            raise UsageError("the prompt is empty")
        limit = self.runner.max_model_len
        if len(ids) > limit:
            raise UsageError(f"the prompt has {len(ids)} tokens, more than the {limit} of max_model_len")
        for token in ids:
            if not 0 <= token < self.runner.text_vocab:
                raise UsageError(f"token id {token} is outside 0…{self.runner.text_vocab - 1}")
        return ids

    def _end_active(self, because: str) -> None:
        """End a generation under way: its KV cache is about to be another's, or nobody's."""
        if self._active is not None:
            self._active.end(because)
            self._active = None

    def close(self) -> None:
        """Free the device; closing twice is harmless."""
        self._end_active("the engine was closed before this generation had ended")
        self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except QwenRawError:
            if error is None:
                raise  # else a device that failed fails again on closing, and the first failure is the one to report


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name} {value!r} is not one of {', '.join(choices)}")


def _sums(comm: str, devices: Sequence[Device], D: int) -> tuple[str, ...]:
    """What there is to say of the sums over ranks: the path that was chosen, and by which times."""
    if len(devices) < 2:
        return (f"comm {comm} has no effect: one rank has nothing to sum",) if comm != "auto" else ()
    from qwen_raw.comm.measure import measure_token

    measured = measure_token(devices, D) if comm == "auto" else None  # made when the ranks were connected
    return () if measured is None else (f"ranks sum by {measured.fastest}: {measured.line()}",)


def _context(wanted: int | None, config: ModelConfig) -> int:
    """Positions to make room for. The config's max_position has YaRN's factor in it already."""
    if wanted is None:
        return min(config.max_position, DEFAULT_MAX_MODEL_LEN)
    if not 1 <= wanted <= config.max_position:
        raise UsageError(f"max_model_len {wanted} is not from 1 to {config.max_position}, the context of {config.name}")
    return wanted


def _runner(
    placement: Placement,
    checkpoint: Checkpoint,
    dtype: str,
    max_model_len: int,
    text_vocab: int,
    progress: Progress | None,
    comm: str,
    speculation: Speculation | None,
    draft: Checkpoint | None,
    kv: Literal["bf16", "fp8"],
    gemm: str,
) -> Runner:
    """Move the weights to where they will be used. Devices whose runner cannot be made are closed."""
    if not placement.devices:
        if speculation is not None:
            raise UsageError(
                "speculation needs a GPU, or --device sim, which simulates its kernels: device cpu computes in NumPy"
            )
        if gemm == "cublaslt":
            raise UsageError("gemm cublaslt needs a GPU: device cpu computes in NumPy")
        return ReferenceRunner(
            checkpoint, dtype=dtype, max_model_len=max_model_len, text_vocab=text_vocab, kv=kv, progress=progress
        )
    from qwen_raw.model.runner import DeviceRunner
    from qwen_raw.model.speculative import SpeculativeRunner

    try:
        if speculation is not None:
            return SpeculativeRunner(
                placement.devices,
                checkpoint,
                guesses=speculation.guesses,
                draft=draft,
                draft_fp8=draft is not None and draft.dtype == "fp8",
                draft_device=placement.draft,
                ngram=speculation.ngram,
                loop=speculation.loop,
                verify=speculation.verify,
                dtype=dtype,
                max_model_len=max_model_len,
                text_vocab=text_vocab,
                progress=progress,
                comm=comm,
                kv=kv,
                gemm=gemm,
            )
        return DeviceRunner(
            placement.devices,
            checkpoint,
            dtype=dtype,
            max_model_len=max_model_len,
            text_vocab=text_vocab,
            progress=progress,
            comm=comm,
            kv=kv,
            gemm=gemm,
        )
    except BaseException:
        with suppress(QwenRawError):  # what failed fails again on closing
            close_all([device.close for device in placement.opened])
        raise


def _draft(speculation: Speculation, tokenizer: Tokenizer) -> Checkpoint | None:
    """The draft model of a speculation that has one. UsageError for one whose ids mean something else."""
    if speculation.draft is None:
        return None
    try:
        draft = open_model(speculation.draft, what="draft model")
        other = open_tokenizer(draft)
    except UsageError as error:
        said = str(error)
        raise UsageError(said if said.startswith("draft model") else f"draft model: {said}") from error
    differing = tokenizer.first_difference(other)
    if differing is not None:
        mine, theirs = tokenizer.token_text(differing), other.token_text(differing)
        raise UsageError(
            f"the draft model {draft.config.name} has another tokenizer: token {differing} is {theirs!r} there and "
            f"{mine!r} in the model; they must share one"
        )
    return draft


def _has_chat_template(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's folder brings a chat template, as models that were taught to chat do."""
    folder = checkpoint.path
    if folder is None:
        return False
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").exists() or (
        config.exists() and bool(read_json(config).get("chat_template"))
    )
