"""`/v1/messages` and `/v1/messages/count_tokens`: from a body to a running request, or to a number."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.api.answer import AnswerResponse
from services.router.api.anthropic_request import (
    MessagesRequest,
    conversation,
    refuse_structured,
    template_arguments,
    tools_of,
)
from services.router.api.anthropic_response import MessageShape
from services.router.api.body import convert
from services.router.api.errors import ApiError
from services.router.api.generate import Chat, Generation, Wanted
from services.router.api.sampling import check_ranges, stops_of
from services.router.api.shape import Head
from services.router.core.failure import invalid


class Anthropic:
    """Anthropic's Messages API."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._intake = generation, generation.intake

    async def messages(self, request: Request) -> AnswerResponse:
        """`POST /v1/messages`. `max_tokens` is a bound: what the context leaves may be less."""
        asker = await self._intake.ask(request)
        asked = self._checked(asker.raw)
        if asked.max_tokens is None:
            raise ApiError(invalid("max_tokens: a number from 1 on is needed", "max_tokens"))
        chat = self._chat(asker.raw, asked)
        wanted = Wanted(
            asked,
            asked.max_tokens,
            asked.max_tokens,
            stops_of(asked.stop_sequences, "stop_sequences"),
            stream=bool(asked.stream),
            clamp=True,
            tools=chat.tools,
        )
        prompt = await self._generation.prompt(chat)
        count, limit = prompt.tokens, self._intake.max_context_tokens()
        if count >= limit > 0:
            text = f"prompt is too long: {count} tokens > {limit} maximum"
            raise ApiError(invalid(text, "messages", "context_length_exceeded"))
        shape = MessageShape(Head(f"msg_{asker.id}", asker.created, self._intake.model_name()), count)
        return await self._generation.answer(asker, wanted, prompt, shape)

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`: the tokens of the prompt as `/v1/messages` would see it."""
        self._intake.caller(request)
        raw = self._intake.without_volatile(await self._intake.body(request))
        prompt = await self._generation.prompt(self._chat(raw, self._checked(raw)))
        return JSONResponse({"input_tokens": prompt.tokens})

    def _checked(self, raw: dict[str, Any]) -> MessagesRequest:
        asked = convert(raw, MessagesRequest)
        refuse_structured(raw)
        check_ranges(asked)
        self._intake.check_model(asked.model)
        return asked

    def _chat(self, raw: dict[str, Any], asked: MessagesRequest) -> Chat:
        images = self._intake.images()
        messages, begun = conversation(asked, images)
        arguments = template_arguments(asked)
        return Chat(messages, tools_of(raw), begun=begun, template_arguments=arguments, images=images)
