"""OpenAI requests as they come: typed fields, limits, and what is not built here refused by name."""

from typing import Any

import msgspec

from schemas.block_key import token_bytes
from schemas.serve import Sampling
from services.router.api.errors import ApiError
from services.router.core.failure import invalid

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 16, 1024, 64
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Shared(msgspec.Struct, kw_only=True):
    """Fields of both dialects. Unknown ones are accepted and ignored."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None


class ChatRequest(Shared, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(Shared, kw_only=True):
    """`POST /v1/completions`: text, or token ids."""

    prompt: str | list[int | str | list[int]]


_NOT_BUILT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
}
"""Fields that would change the answer and are not supported, with the values that ask for nothing."""


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """400 for a field that asks for what is not built here, naming it."""
    for field, harmless in _NOT_BUILT.items():
        value = raw.get(field)
        if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
            raise ApiError(invalid(f"{field} is not supported here", field, "unsupported_parameter"))


def sampling_of(request: Shared, new_tokens: int, stop_ids: tuple[int, ...]) -> Sampling:
    """The sampling of a checked request; `stop_ids` are the model's own ends of an answer."""
    ids = [*(request.stop_token_ids or ()), *stop_ids]
    return Sampling(
        max_new_tokens=new_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=None if request.top_k == -1 else request.top_k,
        min_p=_or(request.min_p, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=request.seed,
        stop_token_ids=list(dict.fromkeys(ids)),
        ignore_eos=bool(request.ignore_eos),
        min_new_tokens=min(request.min_tokens or 0, new_tokens),
    )


def check_ranges(request: Shared) -> None:
    """400 for a number outside its range, naming field, value and range."""
    for field, low, high in (
        ("temperature", 0, 2),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("frequency_penalty", -2, 2),
        ("presence_penalty", -2, 2),
        ("repetition_penalty", 0, 10),
        ("max_tokens", 1, 1 << 31),
        ("max_completion_tokens", 1, 1 << 31),
        ("min_tokens", 0, 1 << 31),
        ("seed", -(1 << 63), (1 << 63) - 1),
        ("top_k", -1, 1 << 31),
    ):
        value = getattr(request, field, None)
        if value is not None and not low <= value <= high:
            raise ApiError(invalid(f"{field} must be from {low} to {high}, got {value}", field))
    for field in ("top_p", "repetition_penalty", "top_k"):
        if getattr(request, field) == 0:
            raise ApiError(invalid(f"{field} must not be 0", field))
    _check_stop_ids(request.stop_token_ids or [])


def stops_of(request: Shared) -> list[str]:
    """The stop strings, within their limits."""
    stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
    if len(stops) > MAX_STOPS:
        raise ApiError(invalid(f"stop has {len(stops)} strings, the limit is {MAX_STOPS}", "stop"))
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            text = f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, one has {len(stop)}"
            raise ApiError(invalid(text, "stop"))
    return stops


def chat_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Messages as a template takes them: content as one string, `developer` said as `system`."""
    if not request.messages:
        raise ApiError(invalid("messages has 0 entries, at least 1 is needed", "messages"))
    return [_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)]


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
        raise ApiError(invalid(f"prompt: token id {wrong} is not in 0 to {vocabulary - 1}", "prompt"))
    return token_bytes(ids)


def _check_stop_ids(ids: list[int]) -> None:
    if len(ids) > MAX_STOP_IDS:
        text = f"stop_token_ids has {len(ids)} entries, the limit is {MAX_STOP_IDS}"
        raise ApiError(invalid(text, "stop_token_ids"))
    wrong = next((number for number in ids if not 0 <= number < 1 << 32), None)
    if wrong is not None:
        raise ApiError(invalid(f"stop_token_ids: {wrong} is not a token id", "stop_token_ids"))


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(invalid(f"{where}.role must be one of {', '.join(sorted(_ROLES))}", f"{where}.role"))
    return message | {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{where}.content"),
    }


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(invalid(f"{where} must be a string or a list of parts", where))
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise ApiError(invalid(f"{where} must be an object", where))
    text = part.get("text")
    if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(text, str):
        kind = str(part.get("type"))[:40]
        raise ApiError(invalid(f"{where}.type {kind!r} is not supported here, text is", where, "unsupported_parameter"))
    return text


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
