"""How a generation is told: status lines for people before and after it, one object for machines."""

from __future__ import annotations

from typing import Any

from qwen_raw import __version__
from qwen_raw.cli.status import Status
from qwen_raw.engine import Completion, Engine
from qwen_raw.generation.stream import Request
from qwen_raw.observe.stats import counted


def describe(engine: Engine, request: Request, status: Status, *, chat: bool) -> None:
    """What is about to run: the model, and the sampling values in effect, wherever they came from."""
    config, runner = engine.config, engine.runner
    cache = " · fp8 KV cache" if runner.kv_dtype == "fp8" else ""
    status.line(f"{config.name} · {runner.dtype}{cache} · {runner.device_name} · loaded in {engine.load_s:.1f} s")
    status.detail(
        f"L {config.L}, D {config.D}, H {config.H}, KV {config.KV}, HD {config.HD}, I {config.I}, V {config.V} "
        f"({runner.text_vocab} with text) · EOS ids {sorted(engine.eos_ids)} · context {runner.max_model_len}"
    )
    status.detail(
        f"weights read per token {runner.bytes_per_token / 1e6:.1f} MB · "
        f"keys and values of a position {runner.kv_bytes_per_token / 1e3:.1f} kB · {runner.driver}"
    )
    for note in engine.notes:
        status.line(f"note: {note}")
    for note in _not_applied(engine, request):
        status.line(f"note: {note}")
    if request.params.seed is not None and request.seed is None:
        status.line(f"note: greedy draws nothing, so seed {request.params.seed} has no effect; --temp 1 would draw")
    template = " in the chat template" if chat else ""
    status.line(f"prompt {counted(len(request.ids))}{template} · {_sampling(request)}")
    if request.max_tokens == 0:
        status.line(f"note: the prompt fills the context of {runner.max_model_len}, there is no room to generate")


def _sampling(request: Request) -> str:
    params = request.params
    parts = ["greedy"] if params.temperature == 0 else [f"temperature {params.temperature:g}", f"seed {request.seed}"]
    parts.append(f"at most {request.max_tokens} new")
    parts += [f"stop {text!r}" for text in params.stop]
    if params.ignore_eos:
        parts.append("EOS ignored")
    return ", ".join(parts)


def _not_applied(engine: Engine, request: Request) -> list[str]:
    """Sampling defaults of the checkpoint that this version does not know how to follow."""
    said = engine.checkpoint.generation
    left_out: list[str] = []
    if request.params.temperature > 0:
        left_out += [f"top_k {said.top_k}"] if said.top_k else []
        left_out += [f"top_p {said.top_p:g}"] if said.top_p is not None and said.top_p < 1 else []
    if said.do_sample and said.repetition_penalty not in (None, 1.0):
        left_out.append(f"repetition_penalty {said.repetition_penalty:g}")
    if not left_out:
        return []
    return [f"generation_config.json also asks for {', '.join(left_out)}, which this version does not apply"]


def summary(completion: Completion) -> str:
    """The stats line."""
    return f"{completion.stats.line()} · {completion.finish_reason}"


def report(engine: Engine, request: Request, completion: Completion) -> dict[str, Any]:
    """The JSON report. Times in seconds, sizes in bytes, None where there was nothing to measure."""
    params = request.params
    return {
        "version": __version__,
        "model": engine.config.name,
        "dtype": engine.runner.dtype,
        "kv_cache_dtype": engine.runner.kv_dtype,
        "quant": _quant(engine),
        "tp": engine.tp,
        "device": engine.device,
        "device_name": engine.runner.device_name,
        "driver": engine.runner.driver,
        "max_model_len": engine.runner.max_model_len,
        "load_s": engine.load_s,
        **completion.stats.as_dict(),
        "seed": request.seed,
        "sampling": {
            "temperature": params.temperature,
            "max_tokens": request.max_tokens,
            "stop": list(params.stop),
            "ignore_eos": params.ignore_eos,
        },
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "text": completion.text,
    }


def _quant(engine: Engine) -> str | None:
    """Where fp8 weights come from: the checkpoint's own quant_method, or rounded on loading."""
    if engine.runner.dtype != "fp8":
        return None
    return "made on loading" if engine.checkpoint.quant is None else engine.checkpoint.quant.method
