"""Messages → prompt text → token ids, by the checkpoint's own Jinja template or by Qwen2.5's default format.

A template comes with a download, so it runs in Jinja's immutable sandbox. The text of a message comes from a user, so
the text of a control token inside it (`<|im_end|>`) must not become that token: see `encode_chat`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loaders.config_json import read_json, read_text
from loaders.tokenizer import Tokenizer
from qwen_raw.errors import UsageError

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]
"""{"role": one of ROLES, "content": str or [{"type": "text", "text": str}, …]}; assistants may have "tool_calls"."""

# Qwen2.5's format: ChatML, a system prompt where the chat has none, tool results as one user turn.
DEFAULT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- else -%}
{{ '<|im_start|>' + message.role }}
{{- '\\n' + message.content if message.content or not message.tool_calls }}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{ '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""


def render_chat(path: Path | str | None, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """The prompt text of a chat. `path` is the checkpoint's folder, None for Qwen2.5's default template.

    UsageError for messages that are none or that the template refuses, and for a broken template.
    """
    return _render(path, _checked(messages), add_generation_prompt)


def encode_chat(
    tokenizer: Tokenizer, path: Path | str | None, messages: Sequence[Message], add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a chat. Control tokens come from the template alone, never from a message's text.

    Otherwise equal to `tokenizer.encode(render_chat(…))`: pieces between control tokens are encoded whole, wherever
    their text came from.
    """
    checked, specials = _checked(messages), sorted(tokenizer.special_tokens, key=len, reverse=True)
    if not specials:
        return tokenizer.encode(_render(path, checked, add_generation_prompt))
    guard = _Guard(specials, checked)
    text = _render(path, guard.cover(checked), add_generation_prompt)
    ids: list[int] = []
    for piece in re.split(f"({guard.pattern.pattern})", text):
        if piece in tokenizer.special_tokens:
            ids.append(tokenizer.special_tokens[piece])
        elif piece:
            ids += tokenizer.encode_content(guard.uncover(piece))
    return ids


class _Guard:
    """Hides control tokens' text in messages while a template runs, so that what it prints of them is its own.

    A whole one becomes its number between two marks. A message that begins or ends with a part of one gets an edge mark
    there, lest the template's text complete it. Marks are Unicode noncharacters that the messages do not contain.
    """

    def __init__(self, specials: Sequence[str], messages: Any) -> None:
        self.specials = specials
        self.pattern = re.compile("|".join(map(re.escape, specials)))
        taken = set("".join(_strings(messages)))
        free = [chr(c) for c in range(0xFDD0, 0xFDF0) if chr(c) not in taken]
        if len(free) < 2:
            raise UsageError("the messages contain every Unicode noncharacter from U+FDD0 to U+FDEF")
        self.mark, self.edge = free[:2]

    def cover(self, value: Any, key: str = "") -> Any:
        """`value` with every string in it covered, but for roles."""
        if isinstance(value, Mapping):
            return {self.cover(k): self.cover(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover(item) for item in value]
        return self._cover_text(value) if isinstance(value, str) and key != "role" else value

    def _cover_text(self, text: str) -> str:
        covered = self.pattern.sub(lambda m: f"{self.mark}{self.specials.index(m[0])}{self.mark}", text)
        parts = [(special[:n], special[n:]) for special in self.specials for n in range(1, len(special))]
        before = self.edge if any(covered.startswith(tail) for _, tail in parts) else ""
        after = self.edge if any(covered.endswith(head) for head, _ in parts) else ""
        return before + covered + after

    def uncover(self, text: str) -> str:
        number = re.compile(f"{self.mark}([0-9]+){self.mark}")
        return number.sub(lambda m: self.specials[int(m[1])], text.replace(self.edge, ""))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.keys()))
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages with `content` as one string. UsageError says which message is wrong, and how."""
    if not messages:
        raise UsageError("a chat needs at least one message")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise UsageError(f"message {i} has the role {role!r}, expected one of {', '.join(ROLES)}")
        checked.append({**message, "content": _content(i, message)})
    return checked


def _content(i: int, message: Message) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"message {i} has a content that is not text: expected a string or parts of type 'text'")
    return "".join(str(text) for text in texts)


def _render(path: Path | str | None, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    folder = None if path is None else Path(path)
    source, variables = _template(folder)
    where = "the default chat template" if folder is None else f"{folder}: the chat template"
    try:
        return _compile(source).render(
            variables | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        )
    except UsageError:
        raise
    except Exception as error:  # a template is a program from a file: it can raise anything
        raise UsageError(f"{where} failed: {type(error).__name__}: {error}") from error


def _template(folder: Path | None) -> tuple[str, dict[str, str]]:
    """(template text, the special tokens' names as the template's variables) of a folder."""
    config = folder / "tokenizer_config.json" if folder else None
    values = read_json(config) if config and config.exists() else {}
    variables = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = values.get(name)
        variables[name] = (token.get("content") if isinstance(token, dict) else token) or ""
    if folder and (folder / "chat_template.jinja").exists():  # newer, and first in transformers too
        return read_text(folder / "chat_template.jinja"), variables
    source = values.get("chat_template") or DEFAULT_TEMPLATE
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise UsageError(f"{config}: chat_template is neither text nor a list with a template named 'default'")
    return source, variables


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """Compile with what transformers gives templates: trimmed blocks, loop controls, plain JSON, raise_exception."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own tojson sorts keys and escapes HTML; models were trained on neither."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise UsageError(f"the chat template refuses the messages: {message}")
