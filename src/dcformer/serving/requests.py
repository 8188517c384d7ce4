"""Requests that ``dcformer-serve`` refuses before the library's server (Transformers 5.23) sees them.

The server answers bad values with an internal error, and silently ignores unknown fields. Refusals are errors in
OpenAI's form.
"""

import json
from collections.abc import Callable, Collection
from typing import Any

from transformers.utils import logging

from ..errors import raise_bug

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
        "n": (1,),
        "prediction": (),
        "presence_penalty": (0,),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "top_logprobs": (0,),
        "web_search_options": (),
    },
    TEXT: {"best_of": (1,), "echo": (False,), "logprobs": (), "n": (1,), "presence_penalty": (0,)},
    RESPONSES: {
        "background": (False,),
        "include": ([],),
        "max_tool_calls": (),
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
_NUMBERS: dict[str, tuple[Any, float, float, str]] = {
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "max_output_tokens": _LENGTH,
    "temperature": ((int, float), 0, float("inf"), "a number of at least 0"),
    "top_p": ((int, float), 0, 1, "a number from 0 to 1"),
    "frequency_penalty": ((int, float), -0.99, 2, "a number above -1, and at most 2"),
    "seed": (int, -(2**63), 2**63 - 1, "a whole number of 64 bits"),
}


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
    if path == CHAT and (fault := _messages_fault(body.get("messages"))):
        return "messages", fault
    if path == TEXT and (not isinstance(body.get("prompt"), str) or not body["prompt"]):
        return "prompt", f"prompt={body.get('prompt')!r} must be a non-empty text."
    if path == RESPONSES and not body.get("input"):
        return "input", f"input={body.get('input')!r} must not be empty."
    for name, (kind, low, high, expected) in _NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            return name, f"{name}={value!r} must be {expected}."
    for name, harmless in (_IGNORED[path] | dict.fromkeys(ignored, ())).items():
        value = body.get(name)
        if value is not None and value not in harmless:
            return name, f"{name}={value!r} is not supported by this server: leave it out."
    return None


def _messages_fault(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"messages={messages!r} must be a list of at least one message."
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"messages[{i}]={message!r} must be an object with a role."
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            return f"messages[{i}].content={content!r} must be a text, or a list of parts."
        for part in content:
            is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not is_text:  # the server would drop it
                return f"messages[{i}].content has a part {part!r}: expected a type 'text' and a text, nothing else."
    return None


class RequestChecks:
    """ASGI middleware: status 400 for faulty requests, and for values that the server itself refuses later."""

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
            fault = find_fault(scope["path"], json.loads(content), self.ignored)
        except ValueError:
            fault = None  # not JSON: the server reports it
        if fault is not None:
            await _refuse(send, *fault)
            return

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
        except ValueError as error:
            if is_started:
                raise
            raise_bug(error, (Exception,))
            logger.warning(f"{scope['path']}: {error}")
            logger.debug("refused here", exc_info=True)
            await _refuse(send, None, str(error))


async def _refuse(send: Callable, field: str | None, sentence: str) -> None:
    error = {"message": sentence, "type": "invalid_request_error", "param": field, "code": None}
    content = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": content})
