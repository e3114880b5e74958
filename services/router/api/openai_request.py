"""OpenAI requests as they come: typed fields, and what is not built here refused by name."""

from typing import Any

import msgspec

from schemas.block_key import token_bytes
from services.router.api.errors import ApiError, shown
from services.router.api.sampling import SamplingFields
from services.router.core.failure import invalid


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Shared(SamplingFields, kw_only=True):
    """Fields of both dialects. Unknown ones are accepted and ignored."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Shared, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Shared, kw_only=True):
    """`POST /v1/completions`: text, or token ids."""

    prompt: str | list[int | str | list[int]]


_ONLY_ONE = ("n", "best_of")
_NOT_BUILT: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
}
"""Fields that would change the answer and are not supported, with the values that ask for nothing."""
_WHY = {
    "logprobs": ": the engines give none",
    "response_format": ": structured output is not built yet",
}


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """400 for a field that asks for what is not built here, naming it and its value."""
    for field in _ONLY_ONE:
        value = raw.get(field)
        if value is not None and (value != 1 or type(value) is not int):
            raise ApiError(invalid(f"{field} must be 1, got {shown(value)}", field, "unsupported_parameter"))
    for field, harmless in _NOT_BUILT.items():
        value = raw.get(field)
        if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
            text = f"{field} {shown(value, 60)} is not supported here{_WHY.get(field, '')}"
            raise ApiError(invalid(text, field, "unsupported_parameter"))


def prompt_ids(prompt: list[int | str | list[int]], vocabulary: int) -> bytes | str:
    """A prompt given as a list: token ids (packed), or a single string or list of ids in it."""
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        only = prompt[0]
        return only if isinstance(only, str) else _checked_ids(only, vocabulary)
    if not set(map(type, prompt)) <= {int}:
        text = f"prompt has {len(prompt)} prompts, the limit is 1 per request"
        raise ApiError(invalid(text, "prompt", "unsupported_parameter"))
    return _checked_ids(prompt, vocabulary)


def _checked_ids(ids: list[Any], vocabulary: int) -> bytes:
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ApiError(invalid(f"prompt: token id {shown(wrong)} is not in 0 to {vocabulary - 1}", "prompt"))
    return token_bytes(ids)
