"""`/tokenize`, `/detokenize`: what the router makes of a prompt."""

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.block_key import token_list
from services.router.api.body import convert
from services.router.api.conversation import chat_messages
from services.router.api.errors import ApiError
from services.router.api.errors import shown as quoted
from services.router.api.tools import chat_tools
from services.router.core.failure import invalid
from services.router.intake import Intake
from services.router.text.chat_template import TemplateFailed
from services.router.text.layout import NotLaidOut
from services.router.text.tokenizer import NotText


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class Tokens:
    """Both directions, as requests that generate would see them."""

    def __init__(self, intake: Intake, max_tokens: Callable[[], int]) -> None:
        self._intake, self._max_tokens = intake, max_tokens

    async def tokenize(self, request: Request) -> Response:
        """Token ids, their number, and how many a request may have."""
        self._intake.caller(request)
        body = convert(await self._intake.body(request), TokenizeBody)
        self._intake.check_model(body.model)
        tokens = token_list(await self._encoded(body))
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._max_tokens()})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones included."""
        self._intake.caller(request)
        body = convert(await self._intake.body(request), DetokenizeBody)
        self._intake.check_model(body.model)
        wrong = next((token for token in body.tokens if not 0 <= token < 1 << 32), None)
        if wrong is not None:
            raise ApiError(invalid(f"tokens: {quoted(wrong)} is not a token id", "tokens"))
        return JSONResponse({"text": self._intake.tokenizer().decode(body.tokens)})

    async def _encoded(self, body: TokenizeBody) -> bytes:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(invalid("give one of prompt and messages", "prompt"))
        tokenizer = self._intake.tokenizer()
        try:
            if body.prompt is not None:
                return await tokenizer.encode(body.prompt, special=body.add_special_tokens)
            images = self._intake.images()
            messages = chat_messages(body.messages or [], images)
            tools, shown = chat_tools({"tools": body.tools}).functions, await self._intake.shown(images)
            made = await tokenizer.encode_chat(messages, shown=shown, prompt=body.add_generation_prompt, tools=tools)
            return made.packed
        except (TemplateFailed, NotText, NotLaidOut) as error:
            raise ApiError(invalid(str(error), "messages" if body.prompt is None else "prompt")) from error
