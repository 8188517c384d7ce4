"""Requests that ``dcformer-serve`` refuses before the library's server (Transformers 5.23) sees them.

The server answers bad values with an internal error, and silently ignores unknown fields. Refusals are errors in
OpenAI's form.
"""

import json
import sys
from collections.abc import Callable, Collection
from typing import Any

from transformers.utils import logging

from ..errors import DCFormerError, raise_bug

logger = logging.get_logger(__name__)

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

# Fields that the server ignores, each with the values for which this makes no difference; None always is one.
_IGNORED: dict[str, dict[str, tuple[Any, ...]]] = {
    CHAT: {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logprobs": (False,),
        "modalities": (["text"],),
        "moderation": (),
        "n": (1,),
        "prediction": (),
        "presence_penalty": (0,),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "top_logprobs": (0,),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    TEXT: {
        "best_of": (1,),
        "echo": (False,),
        "logit_bias": ({},),
        "logprobs": (),
        "n": (1,),
        "presence_penalty": (0,),
    },
    RESPONSES: {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "text": ({"format": {"type": "text"}},),
        "tool_choice": ("auto", "none"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
}
# Ignored by the server in Transformers 5.21, but not in 5.23.
SOMETIMES_IGNORED = frozenset({"max_completion_tokens"})
# Numbers: (type, lowest, highest, what was expected). JSON's true and false do not count.
_LENGTH = (int, 1, float("inf"), "a whole number of at least 1")
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SETTINGS = ("max_new_tokens", "max_length")  # the same, in `generation_config`
_NUMBERS: dict[str, tuple[Any, float, float, str]] = {
    **dict.fromkeys(_LENGTHS, _LENGTH),
    "temperature": ((int, float), 0, sys.float_info.max, "a number of at least 0"),
    "top_p": ((int, float), 0, 1, "a number from 0 to 1"),
    "frequency_penalty": ((int, float), -0.99, 2, "a number from -0.99 to 2"),
    "seed": (int, -(2**63), 2**63 - 1, "a whole number of 64 bits"),
}
# Other values: (types, types of the elements if it is a list, what was expected).
_KINDS: dict[str, tuple[Any, Any, str]] = {
    "chat_template_kwargs": (dict, None, "an object"),
    "instructions": (str, None, "a text"),
    "logit_bias": (dict, None, "an object of token ids and numbers"),
    "model": (str, None, "a text, the model's name"),
    "stop": ((str, list), str, "a text or a list of texts"),
    "stream": (bool, None, "true or false"),
    "suffix": (str, None, "a text"),
    "tools": (list, dict, "a list of objects"),
}
# Parts of text in `input`, and the texts that an item about a tool has.
_TEXTS = ("input_text", "output_text", "text")
_TOOL_ITEMS = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
# What the server itself tells the chat template.
_OF_TEMPLATES = frozenset(
    {"add_generation_prompt", "load_audio_from_video", "return_dict", "return_tensors", "tokenize", "tools"}
)
# In `generation_config`: settings whose results the server cannot return, and the harmless value.
_ONE_ANSWER = {"num_return_sequences": 1, "return_dict_in_generate": False}


def find_fault(path: str, body: Any, ignored: Collection[str] = ()) -> tuple[str, str] | None:
    """What is wrong with a request, judged by its fields.

    Args:
        path: of the URL.
        body: decoded JSON.
        ignored: fields that only some versions of the server ignore, this one among them.

    Returns:
        the field and a sentence for the error, or None.
    """
    if path not in _IGNORED or not isinstance(body, dict):
        return None
    for name, value in body.items():
        if (character := _surrogate(value)) is not None:
            return name, f"{name} holds {character!r}, half of a surrogate pair and not a character: leave it out."
    if path == CHAT and (fault := _messages_fault(body.get("messages"))):
        return "messages", fault
    if path == TEXT and (not isinstance(body.get("prompt"), str) or not body["prompt"]):
        return "prompt", f"prompt={body.get('prompt')!r} must be a non-empty text."
    if path == RESPONSES and (fault := _input_fault(body.get("input"))):
        return "input", fault
    for name, (kind, low, high, expected) in _NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            return name, f"{name}={value!r} must be {expected}."
    for name, (kind, elements, expected) in _KINDS.items():
        value = body.get(name)
        if value is not None and not _is_a(value, kind, elements):
            return name, f"{name}={value!r} must be {expected}."
    for token, bias in (body.get("logit_bias") or {}).items():
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not abs(bias) <= sys.float_info.max:
            return "logit_bias", f"logit_bias={{{token!r}: {bias!r}}} must have finite numbers."
    if taken := sorted(_OF_TEMPLATES & (body.get("chat_template_kwargs") or {}).keys()):
        name, what = "chat_template_kwargs", taken[0]
        return name, f"{name} has {what!r}, which this server sets itself: leave it out."
    if (fault := _generation_fault(body.get("generation_config"))) is not None:
        return "generation_config", fault
    for name, harmless in (_IGNORED[path] | dict.fromkeys(ignored, ())).items():
        value = body.get(name)
        if value is not None and value not in harmless:
            return name, f"{name}={value!r} is not supported by this server: leave it out."
    return None


def find_misfit(
    path: str, body: dict[str, Any], config: Any, tokenizer: Any, has_cache: bool = True
) -> tuple[str, str] | None:
    """What is wrong with a request that `find_fault` passes, judged by the model that is to answer it.

    Args:
        path: of the URL.
        body: decoded JSON.
        config: the model's. Without `max_position_embeddings`, lengths are not judged.
        tokenizer: the model's.
        has_cache: whether the model can generate with a cache.

    Returns:
        the field and a sentence for the error, or None.
    """
    if path == TEXT and not len(tokenizer(body["prompt"])["input_ids"]):
        return "prompt", f"prompt={body['prompt']!r} has no tokens for this model: expected a text of at least one."
    settings = json.loads(body.get("generation_config") or "{}")
    if not has_cache and settings.get("use_cache"):
        return "generation_config", (
            f"generation_config has use_cache={settings['use_cache']!r}, but this model generates without a cache, "
            "which has no room for its key-wise composition weights: leave it out."
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return None
    lengths = [(name, name, body.get(name)) for name in _LENGTHS]
    lengths += [("generation_config", f"generation_config has {name}", settings.get(name)) for name in _SETTINGS]
    for field, what, value in lengths:
        if isinstance(value, int | float) and value > longest:
            return field, f"{what}={value}, expected at most {longest}, the model's max_position_embeddings."
    return None


def _surrogate(value: Any) -> str | None:
    """The first lone surrogate within decoded JSON; texts with one cannot be encoded, and tokenizers refuse them."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return error.object[error.start]
    return None


def _is_a(value: Any, kind: Any, elements: Any = None) -> bool:
    return isinstance(value, kind) and not (isinstance(value, list) and any(not isinstance(v, elements) for v in value))


def _generation_fault(text: Any) -> str | None:
    if text is None:
        return None
    try:
        settings = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError) as error:
        return f"generation_config={text[:200]!r} is not JSON: {error}."
    if not isinstance(settings, dict):
        return f"generation_config={text!r} must be a text that holds a JSON object."
    for name, harmless in _ONE_ANSWER.items():
        if settings.get(name) not in (None, harmless):
            return f"generation_config has {name}={settings[name]!r}, but an answer is one text: leave it out."
    return None


def _messages_fault(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"messages={messages!r} must be a list of at least one message."
    for i, message in enumerate(messages):
        if fault := _message_fault(f"messages[{i}]", message, ("text",)):
            return fault
        if (calls := message.get("tool_calls")) is not None and (fault := _calls_fault(f"messages[{i}]", calls)):
            return fault
    return None


def _message_fault(name: str, message: Any, kinds: tuple[str, ...]) -> str | None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return f"{name}={message!r} must be an object with a role."
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None
    return _content_fault(f"{name}.content", content, kinds)


def _content_fault(name: str, content: Any, kinds: tuple[str, ...]) -> str | None:
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"{name}={content!r} must be a text, or a list of parts."
    return _parts_fault(name, content, kinds)


def _parts_fault(name: str, parts: Any, kinds: tuple[str, ...]) -> str | None:
    if not isinstance(parts, list):
        return f"{name}={parts!r} must be a list of parts."
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)):
            types = " or ".join(map(repr, kinds))  # the server would drop others
            return f"{name} has a part {part!r}: expected a type {types} and a text, nothing else."
    return None


def _calls_fault(name: str, calls: Any) -> str | None:
    if not _is_a(calls, list, dict):
        return f"{name}.tool_calls={calls!r} must be a list of objects."
    for call in calls:
        function = call.get("function") or call
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str | dict):
            return f"{name}.tool_calls has a call {call!r}: expected a function with arguments."
    return None


def _input_fault(given: Any) -> str | None:
    """What is wrong with the input of a response: a text, the parts of one message, or messages and calls of tools."""
    if not isinstance(given, str | list) or not given:
        return f"input={given!r} must be a text or a list, and not empty."
    if isinstance(given, str):
        return None
    if not isinstance(given[0], dict) or "role" not in given[0]:
        return _parts_fault("input", given, _TEXTS)
    return next(filter(None, (_item_fault(f"input[{i}]", item) for i, item in enumerate(given))), None)


def _item_fault(name: str, item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "reasoning":
        return _parts_fault(f"{name}.content", item.get("content") or [], ("reasoning_text",))
    if kind not in _TOOL_ITEMS or "role" in item:
        return _message_fault(name, item, _TEXTS)
    for field in _TOOL_ITEMS[kind]:
        if not isinstance(item.get(field), str):
            return f"{name}.{field}={item.get(field)!r} must be a text."
    return None


def without_empty(path: str, body: Any) -> Any:
    """A faultless body without what asks for nothing: the server fails on it, or drops the text beside it."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if isinstance(body.get("stop"), list):
        body["stop"] = [text for text in body["stop"] if text]
    optional = [(body, name) for name in ("stop", "logit_bias", "chat_template_kwargs")]
    optional += [(message, "tool_calls") for message in (body["messages"] if path == CHAT else ())]
    for owner, name in optional:
        if not owner.get(name):
            owner.pop(name, None)
    return body


class BadRequestError(DCFormerError):
    """A request that the served model cannot answer.

    Args:
        field: at fault.
        sentence: for the error.
    """

    def __init__(self, field: str, sentence: str):
        super().__init__(sentence)
        self.field = field


class RequestChecks:
    """ASGI middleware: status 400 for faulty requests, and for values that the server itself refuses later.

    Of the others, what asks for nothing is left out (`without_empty`).
    """

    def __init__(self, app: Callable, ignored: Collection[str] = ()):
        self.app, self.ignored = app, ignored

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Handles one ASGI request."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _IGNORED:
            await self.app(scope, receive, send)
            return
        content, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            content += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            body = json.loads(content)
        except ValueError:
            pass  # not JSON: the server reports it
        except RecursionError:
            await _refuse(send, None, "the body is nested too deeply to be read.")
            return
        else:
            if fault := find_fault(scope["path"], body, self.ignored):
                await _refuse(send, *fault)
                return
            content = json.dumps(without_empty(scope["path"], body)).encode()

        is_replayed = is_started = False

        async def replay() -> dict:
            nonlocal is_replayed
            if is_replayed:
                return await receive()
            is_replayed = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def watch(message: dict) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self.app(scope, replay, watch)
        except Exception as error:
            is_of_template = type(error).__module__.startswith("jinja2.")  # which the server brings
            if is_started or not (is_of_template or isinstance(error, ValueError)):
                raise
            raise_bug(error, (Exception,))
            logger.warning(f"{scope['path']}: {error}")
            logger.debug("refused here", exc_info=True)
            await _refuse(send, getattr(error, "field", None), str(error))


async def _refuse(send: Callable, field: str | None, sentence: str) -> None:
    error = {"message": sentence, "type": "invalid_request_error", "param": field, "code": None}
    content = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": content})
