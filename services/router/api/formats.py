"""Which of SGLang's parsers the answers of this model need, and the process that runs them."""

import re
from typing import TYPE_CHECKING

from services.router.api.errors import ApiError
from services.router.core.failure import INTERNAL, Failure, invalid
from services.router.text.default_tools import PARSER
from services.router.text.parsers import Formats, Parsers, Parsing, installed
from services.router.text.tokenizer import Tokenizer
from services.router.text.worker_process import WorkerFailed

if TYPE_CHECKING:
    from services.router.settings import RouterSettings

_NOT_INSTALLED = "tools need SGLang's parsers, which are not installed here (extra `engine`)"
_THINKING = re.compile(r"<think|thinking|reasoning_content", re.IGNORECASE)
"""What shows in the template of a model that thinks before it answers."""
_UNKNOWN = "tools: no parser is known for this model's chat template; the setting tool_parser names one"


class ModelFormats:
    """Found once per router, with the first chat that needs them: one with tools, or any if the model thinks aloud.

    That starts the parser process, which takes seconds; `warm` does so before anybody waits for it.
    """

    def __init__(self, settings: "RouterSettings", parsers: Parsers) -> None:
        self._settings, self._parsers = settings, parsers
        self.installed = installed()
        self._found: Formats | None = None

    def known(self) -> Formats:
        """What is known by now."""
        return self._found or Formats(self._settings.tool_parser, self._settings.reasoning_parser)

    async def for_text(self, tokenizer: Tokenizer) -> Formats:
        """The formats of an answer without calls, which a thought may precede; where none is parsed, it stays text."""
        if not self.installed:
            return Formats()
        if self._found is None and (self._settings.reasoning_parser or _THINKING.search(tokenizer.template.source)):
            self._found = await self._find(tokenizer)
        return Formats("", self._found.reasoning_parser, self._found.thinking) if self._found else Formats()

    async def for_tools(self, tokenizer: Tokenizer) -> Formats:
        """The formats of this model's answers; 400 where calls cannot be parsed."""
        if not self.installed:
            raise ApiError(invalid(_NOT_INSTALLED, "tools", "unsupported_parameter"))
        if self._found is None:
            self._found = await self._find(tokenizer)
        if not self._found.tool_parser:
            raise ApiError(invalid(_UNKNOWN, "tools", "unsupported_parameter"))
        return self._found

    async def warm(self, tokenizer: Tokenizer) -> None:
        """Have parsers ready for this model's answers with calls."""
        (await self.open("warm", await self.for_tools(tokenizer), [])).close()

    async def open(self, request: str, formats: Formats, functions: list[dict[str, object]]) -> Parsing:
        """Parsers for one answer."""
        try:
            return await self._parsers.open(request, formats, functions)
        except WorkerFailed as error:
            raise ApiError(Failure(500, INTERNAL, f"the parser of tool calls failed: {error}")) from error

    async def _find(self, tokenizer: Tokenizer) -> Formats:
        template, settings = tokenizer.template, self._settings
        try:
            found = await self._parsers.detect(template.source, tokenizer.special_tokens())
        except WorkerFailed as error:
            raise ApiError(Failure(500, INTERNAL, f"the parser of tool calls did not start: {error}")) from error
        tool_parser = found.tool_parser if template.takes_tools else PARSER
        reasoning_parser = settings.reasoning_parser or found.reasoning_parser
        return Formats(settings.tool_parser or tool_parser, reasoning_parser, found.thinking)
