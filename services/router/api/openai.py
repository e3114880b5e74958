"""`/v1/chat/completions` and `/v1/completions`: from a body to a running request."""

from typing import Any

from starlette.requests import Request

from services.router.api.answer import AnswerResponse
from services.router.api.body import convert
from services.router.api.conversation import chat_messages
from services.router.api.errors import ApiError
from services.router.api.generate import Chat, Generation, Wanted
from services.router.api.openai_request import (
    ChatRequest,
    CompletionRequest,
    Shared,
    prompt_ids,
    refuse_unsupported,
)
from services.router.api.openai_response import ChatShape, CompletionShape
from services.router.api.sampling import check_ranges, stops_of
from services.router.api.shape import Head
from services.router.api.tools import chat_tools
from services.router.core.failure import invalid
from services.router.text.layout import Prompt
from services.router.text.tokenizer import NotText, Tokenizer

COMPLETION_TOKENS = 16
"""Length of a plain completion whose request names none, as OpenAI has it."""


class OpenAI:
    """Both OpenAI dialects that generate."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._intake = generation, generation.intake

    async def chat(self, request: Request) -> AnswerResponse:
        """`POST /v1/chat/completions`."""
        asker = await self._intake.ask(request)
        asked = convert(asker.raw, ChatRequest)
        self._check(asker.raw, asked)
        tools = chat_tools(asker.raw)
        wanted = Wanted(
            asked,
            asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens,
            self._intake.default_max_tokens,
            stops_of(asked.stop),
            stream=bool(asked.stream),
            tools=tools,
            return_token_ids=bool(asked.return_token_ids),
        )
        images = self._intake.images()
        chat = Chat(
            chat_messages(asked.messages, images),
            tools,
            opening=asked.add_generation_prompt is not False,
            template_arguments=template_arguments(asked.chat_template_kwargs),
            images=images,
        )
        prompt = await self._generation.prompt(chat)
        head = Head(f"chatcmpl-{asker.id}", asker.created, self._intake.model_name())
        shape = ChatShape(head, include_usage=asked.include_usage)
        return await self._generation.answer(asker, wanted, prompt, shape)

    async def completions(self, request: Request) -> AnswerResponse:
        """`POST /v1/completions`."""
        asker = await self._intake.ask(request)
        asked = convert(asker.raw, CompletionRequest)
        self._check(asker.raw, asked)
        wanted = Wanted(
            asked,
            asked.max_tokens,
            COMPLETION_TOKENS,
            stops_of(asked.stop),
            stream=bool(asked.stream),
            where="prompt",
            parsed=False,
            return_token_ids=bool(asked.return_token_ids),
        )
        prompt = Prompt(await self._prompt(asked, self._intake.tokenizer()))
        head = Head(f"cmpl-{asker.id}", asker.created, self._intake.model_name())
        shape = CompletionShape(head, include_usage=asked.include_usage)
        return await self._generation.answer(asker, wanted, prompt, shape)

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


RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "prompt", "begun", "shown"})


def template_arguments(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`: what the client tells the template itself; 400 for names that are the router's."""
    wrong = next((name for name in given or () if name in RESERVED), None)
    if wrong is not None:
        raise ApiError(invalid(f"chat_template_kwargs must not set {wrong!r}", "chat_template_kwargs"))
    return dict(given or {})
