"""How tokens are to be chosen: the fields of a request, their ranges, and what the engines are told."""

from collections.abc import Sequence

import msgspec

from schemas.serve import Sampling
from services.router.api.errors import ApiError, shown
from services.router.core.failure import invalid

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 16, 1024, 64
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
    ("repetition_penalty", 0, 10),
    ("max_tokens", 1, 1 << 31),
    ("max_completion_tokens", 1, 1 << 31),
    ("max_output_tokens", 1, 1 << 31),
    ("min_tokens", 0, 1 << 31),
    ("seed", -(1 << 63), (1 << 63) - 1),
    ("top_k", -1, 1 << 31),
)


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that choose tokens, in every dialect under the same names. Unknown ones are accepted and ignored."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None


def check_ranges(request: SamplingFields) -> None:
    """400 for a number outside its range, naming field, value and range."""
    for field, low, high in _RANGES:
        value = getattr(request, field, None)
        if value is not None and not low <= value <= high:
            raise ApiError(invalid(f"{field} must be from {low} to {high}, got {shown(value)}", field))
    for field in ("top_p", "repetition_penalty", "top_k"):
        if getattr(request, field) == 0:
            raise ApiError(invalid(f"{field} must not be 0", field))
    _check_stop_ids(request.stop_token_ids or [])


def sampling_of(request: SamplingFields, new_tokens: int, stop_ids: tuple[int, ...]) -> Sampling:
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


def stops_of(stop: str | Sequence[str] | None, field: str = "stop") -> list[str]:
    """The stop strings, within their limits."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MAX_STOPS:
        raise ApiError(invalid(f"{field} has {len(stops)} strings, the limit is {MAX_STOPS}", field))
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            limits = f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, one has {len(text)}"
            raise ApiError(invalid(limits, field))
    return stops


def _check_stop_ids(ids: list[int]) -> None:
    if len(ids) > MAX_STOP_IDS:
        text = f"stop_token_ids has {len(ids)} entries, the limit is {MAX_STOP_IDS}"
        raise ApiError(invalid(text, "stop_token_ids"))
    wrong = next((number for number in ids if not 0 <= number < 1 << 32), None)
    if wrong is not None:
        raise ApiError(invalid(f"stop_token_ids: {shown(wrong)} is not a token id", "stop_token_ids"))


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
