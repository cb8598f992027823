"""`qwen-raw generate`: complete a prompt, or answer one through the chat template."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from qwen_raw.cli.arguments import (
    Parser,
    add_model_arguments,
    add_output_arguments,
    add_speculation_arguments,
    count,
    speculation,
    unicode,
)
from qwen_raw.cli.process import EXIT_DONE, EXIT_INTERRUPTED, discard
from qwen_raw.cli.report import describe, report, summary
from qwen_raw.cli.status import Status
from qwen_raw.engine import SamplingParams, TextStream, load
from qwen_raw.errors import UsageError

DESCRIPTION = """Complete a prompt. The text goes to stdout as it is made, everything else to stderr."""

NO_CHAT = "--system needs --chat: without the chat template there is no place for a system message"


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to `qwen-raw`."""
    parser = commands.add_parser("generate", help="complete a prompt", description=DESCRIPTION)
    parser.set_defaults(run=run)
    prompt = parser.add_argument_group("prompt (one of these)")
    prompt.add_argument("text", nargs="?", type=unicode, metavar="PROMPT", help="the prompt; - reads standard input")
    prompt.add_argument("-p", "--prompt", type=unicode, metavar="TEXT", help="the same as a flag")
    prompt.add_argument(
        "-f", "--prompt-file", "--file", metavar="FILE", help="read it from a file, without the newline at its end"
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put the prompt through the chat template; default: if the checkpoint has one",
    )
    chat.add_argument("--system", type=unicode, metavar="TEXT", help="system message, for --chat")
    sampling = parser.add_argument_group("sampling (defaults: the checkpoint's generation_config.json, else greedy)")
    sampling.add_argument(
        "-n",
        "--max-tokens",
        type=_limit,
        default=128,
        metavar="N",
        help="generate at most N tokens (default 128; -1: as many as the context holds)",
    )
    sampling.add_argument("--temp", "--temperature", dest="temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument(
        "-s", "--seed", type=int, metavar="N", help="of the random draws; default: a fresh one, which is printed"
    )
    sampling.add_argument(
        "--stop",
        action="append",
        type=unicode,
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    add_model_arguments(parser)
    add_speculation_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load, generate, report; 0, or 130 if interrupted."""
    status = Status(quiet=args.quiet, verbose=args.verbose)
    prompt = _prompt(args)
    # What makes no sense whatever the model is refused before one is loaded for it.
    if not prompt:
        raise UsageError("the prompt is empty")
    if args.system is not None and args.chat is False:
        raise UsageError(NO_CHAT)
    _override(SamplingParams(), args)
    guessing = speculation(args)
    with status.loading() as progress:
        engine = load(
            args.model,
            device=args.device,
            tp=args.tp,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            progress=progress,
            devices=args.devices,
            comm=args.comm,
            gemm=args.gemm,
            speculation=guessing,
            kv_cache_dtype=args.kv_cache_dtype,
        )
    with engine:
        chat = engine.has_chat_template if args.chat is None else args.chat
        if args.system is not None and not chat:
            raise UsageError(NO_CHAT)
        ids = engine.encode_chat(prompt, args.system) if chat else engine.encode(prompt)
        defaults = engine.default_params() if args.temperature is None else SamplingParams()
        stream = engine.stream(ids, _override(defaults, args))
        describe(engine, stream.request, status, chat=chat)
        code = _write(stream, show=not args.json)
        completion = stream.completion()
        if args.json:
            print(json.dumps(report(engine, stream.request, completion), ensure_ascii=False), flush=True)
        status.line(summary(completion), force=args.stats)
    return code


def _limit(text: str) -> int | None:
    """-n: a `count` of at least 1; None for -1."""
    value = count(text)
    if value < 1 and value != -1:
        raise argparse.ArgumentTypeError(f"at least 1, or -1 for as many as the context holds; not {text}")
    return None if value == -1 else value


def _override(defaults: SamplingParams, args: argparse.Namespace) -> SamplingParams:
    """`defaults` with what the command line says."""
    return replace(
        defaults,
        max_tokens=args.max_tokens,
        temperature=defaults.temperature if args.temperature is None else args.temperature,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def _prompt(args: argparse.Namespace) -> str:
    """The prompt, from the one place that the command line names."""
    sources = [source for source in (args.text, args.prompt, args.prompt_file) if source is not None]
    if not sources:
        raise UsageError('no prompt: give -p "TEXT", -f FILE, or - to read standard input')
    if len(sources) > 1:
        raise UsageError("more than one prompt: give only one of PROMPT, -p and -f")
    if sources[0] == "-":
        return _text(_stdin(), "standard input")
    if args.prompt_file is None:
        return str(sources[0])
    try:
        return _text(Path(args.prompt_file).read_bytes(), args.prompt_file)
    except OSError as error:
        raise UsageError(f"cannot read the prompt file {args.prompt_file}: {error.strerror}") from error


def _stdin() -> bytes:
    """All of standard input."""
    if sys.stdin is None:
        raise UsageError("standard input is closed: there is no prompt to read")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror}") from error


def _text(data: bytes, where: str) -> str:
    """UTF-8 without its last newline, which the writer of a file or of `echo` did not mean as part of the prompt."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt in {where} is not UTF-8 (byte {error.start})") from error
    return text.removesuffix("\n").removesuffix("\r")


def _write(stream: TextStream, *, show: bool) -> int:
    """Run the generation, printing pieces as they come if `show`, on lines of their own; the exit code.

    Ctrl-C ends it early, and so does a reader of our output that has seen enough (`| head`), which is no failure.
    """
    last = "\n"

    def put(piece: str) -> None:
        nonlocal last
        if show and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()
            last = piece[-1]

    code = EXIT_DONE
    try:
        try:
            for piece in stream:
                put(piece)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
            put(stream.interrupt())
        finally:
            if last != "\n":
                put("\n")  # what comes next in a terminal or a log, status lines too, begins a line
    except BrokenPipeError:
        discard(sys.stdout)
        stream.interrupt()
    return code
