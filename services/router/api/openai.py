"""`/v1/chat/completions` and `/v1/completions`: from a body to a running request."""

from typing import Any

from starlette.requests import Request

from services.router.api.answer import AnswerResponse, Job
from services.router.api.body import convert
from services.router.api.errors import ApiError
from services.router.api.openai_request import (
    ChatRequest,
    CompletionRequest,
    Shared,
    chat_messages,
    check_ranges,
    prompt_ids,
    refuse_unsupported,
    sampling_of,
    stops_of,
)
from services.router.api.openai_response import ChatShape, CompletionShape, Head, Shape
from services.router.core.failure import invalid
from services.router.core.spec import Spec
from services.router.intake import Asker, Intake
from services.router.text.chat_template import TemplateFailed
from services.router.text.stream import TextStream
from services.router.text.tokenizer import NotText, Tokenizer

COMPLETION_TOKENS = 16
"""Length of a plain completion whose request names none, as OpenAI has it."""


class OpenAI:
    """Both OpenAI dialects that generate."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def chat(self, request: Request) -> AnswerResponse:
        """`POST /v1/chat/completions`."""
        asker = await self._intake.ask(request)
        asked = convert(asker.raw, ChatRequest)
        self._check(asker.raw, asked)
        messages = chat_messages(asked)
        tokenizer = self._intake.tokenizer()
        try:
            opening = asked.add_generation_prompt is not False
            packed = await tokenizer.encode_chat(messages, prompt=opening)
        except (TemplateFailed, NotText) as error:
            raise ApiError(invalid(str(error), "messages")) from error
        limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        head = Head(f"chatcmpl-{asker.id}", asker.created, self._intake.model_name())
        return await self._answer(asker, asked, packed, limit, self._intake.default_max_tokens, ChatShape(head))

    async def completions(self, request: Request) -> AnswerResponse:
        """`POST /v1/completions`."""
        asker = await self._intake.ask(request)
        asked = convert(asker.raw, CompletionRequest)
        self._check(asker.raw, asked)
        packed = await self._prompt(asked, self._intake.tokenizer())
        head = Head(f"cmpl-{asker.id}", asker.created, self._intake.model_name())
        return await self._answer(asker, asked, packed, asked.max_tokens, COMPLETION_TOKENS, CompletionShape(head))

    def _check(self, raw: dict[str, Any], asked: Shared) -> None:
        refuse_unsupported(raw)
        check_ranges(asked)
        self._intake.check_model(asked.model)

    async def _prompt(self, asked: CompletionRequest, tokenizer: Tokenizer) -> bytes:
        prompt = asked.prompt if isinstance(asked.prompt, str) else prompt_ids(asked.prompt, tokenizer.vocabulary)
        if isinstance(prompt, bytes):
            return prompt
        try:
            return await tokenizer.encode(prompt, special=True)
        except NotText as error:
            raise ApiError(invalid(str(error), "prompt")) from error

    async def _answer(
        self, asker: Asker, asked: Shared, packed: bytes, limit: int | None, default: int, shape: Shape
    ) -> AnswerResponse:
        intake, tokenizer = self._intake, self._intake.tokenizer()
        stops = stops_of(asked)
        new_tokens = await intake.admit(asker, len(packed) // 4, limit, default)
        sampling = sampling_of(asked, new_tokens, tokenizer.stop_ids)
        context = intake.context(asker, packed)
        spec = Spec(asker.id, asker.identity, context, sampling, intake.timeout_s, asker.traceparent)
        call = intake.open(spec)
        options = asked.stream_options
        job = Job(
            call,
            shape,
            TextStream(tokenizer.library, stops, skip_special=asked.skip_special_tokens is not False),
            stream=bool(asked.stream),
            request_id=asker.request_id,
            include_usage=bool(options and options.include_usage),
            return_token_ids=bool(asked.return_token_ids),
            stop_ids=frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids),
        )
        return AnswerResponse(job, intake, intake.patience)
