"""`/v1/responses`, without a store: from a body to a running request."""

from typing import Any

from starlette.requests import Request

from services.router.api.answer import AnswerResponse
from services.router.api.body import convert
from services.router.api.generate import Chat, Generation, Wanted
from services.router.api.responses_request import ResponsesRequest, conversation, refuse_unsupported, tools_of
from services.router.api.responses_response import ResponseShape
from services.router.api.sampling import check_ranges
from services.router.api.shape import Head

ANSWER_TOKENS = 16_384
"""Length of an answer whose request names none: agents that use this API never do."""
_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}
"""What a response repeats of its request, with what is meant where the request says nothing."""


class Responses:
    """OpenAI's Responses API, stateless."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._intake = generation, generation.intake

    async def create(self, request: Request) -> AnswerResponse:
        """`POST /v1/responses`. `max_output_tokens` is a bound: what the context leaves may be less."""
        asker = await self._intake.ask(request)
        asked = convert(asker.raw, ResponsesRequest)
        refuse_unsupported(asker.raw)
        check_ranges(asked)
        self._intake.check_model(asked.model)
        images = self._intake.images()
        tools = tools_of(asker.raw)
        chat = Chat(conversation(asked, images, tools.kinds), tools, where="input", images=images)
        wanted = Wanted(
            asked,
            asked.max_output_tokens,
            ANSWER_TOKENS,
            stream=bool(asked.stream),
            clamp=True,
            tools=chat.tools,
            where="input",
        )
        prompt = await self._generation.prompt(chat)
        head = Head(f"resp_{asker.id}", asker.created, self._intake.model_name())
        echo = {key: asker.raw[key] if asker.raw.get(key) is not None else value for key, value in _DEFAULTS.items()}
        return await self._generation.answer(asker, wanted, prompt, ResponseShape(head, chat.tools.kinds, echo))
