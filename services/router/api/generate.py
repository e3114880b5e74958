"""From a checked request of any dialect to a running one: prompt, admission, and who reads the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.router.api.answer import AnswerResponse, Job
from services.router.api.errors import ApiError
from services.router.api.images import Images
from services.router.api.reader import ParsedReader, PlainReader, Reader
from services.router.api.sampling import SamplingFields, sampling_of
from services.router.api.shape import Shape
from services.router.api.tools import Tools
from services.router.core.failure import invalid
from services.router.core.spec import Spec
from services.router.intake import Asker, Intake
from services.router.text.chat_template import TemplateFailed
from services.router.text.layout import NotLaidOut, Prompt
from services.router.text.parsers import Formats
from services.router.text.stream import TextStream
from services.router.text.tokenizer import NotText, Tokenizer


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to render. `begun`: the answer's first words, given by the client."""

    messages: Sequence[dict[str, Any]]
    tools: Tools = field(default_factory=Tools)
    opening: bool = True
    begun: str = ""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    where: str = "messages"
    images: Images = field(default_factory=Images)


@dataclass(frozen=True, slots=True)
class Wanted:
    """How to answer: `limit` of tokens (None: `default`), clamped to what the context leaves if `clamp`.

    `stops` end the text; `where` names the field with the prompt. `parsed`: thoughts and calls are taken off the text.
    """

    fields: SamplingFields
    limit: int | None
    default: int
    stops: Sequence[str] = ()
    stream: bool = False
    clamp: bool = False
    tools: Tools = field(default_factory=Tools)
    where: str = "messages"
    parsed: bool = True
    return_token_ids: bool = False


class Generation:
    """What all dialects that generate share."""

    def __init__(self, intake: Intake) -> None:
        self.intake = intake

    async def prompt(self, chat: Chat) -> Prompt:
        """The tokens of a conversation; 400 in the template's own words when it refuses it."""
        tokenizer = self.intake.tokenizer()
        if chat.tools:
            await self.intake.formats.for_tools(tokenizer)
        shown = await self.intake.shown(chat.images)
        try:
            return await tokenizer.encode_chat(
                chat.messages,
                shown=shown,
                prompt=chat.opening,
                begun=chat.begun,
                tools=chat.tools.functions,
                **chat.template_arguments,
            )
        except (TemplateFailed, NotText, NotLaidOut) as error:
            raise ApiError(invalid(str(error), chat.where)) from error

    async def answer(self, asker: Asker, wanted: Wanted, prompt: Prompt, shape: Shape) -> AnswerResponse:
        """Admit and begin; the response writes what comes."""
        intake, tokenizer, count = self.intake, self.intake.tokenizer(), prompt.tokens
        limit = wanted.limit
        if limit is not None and wanted.clamp:
            limit = max(1, min(limit, intake.max_context_tokens() - count))
        new_tokens = await intake.admit(asker, count, limit, wanted.default, wanted.where)
        sampling = sampling_of(wanted.fields, new_tokens, tokenizer.stop_ids)
        stop_ids = frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids)
        context = intake.context(asker, prompt)
        reader = await self._reader(asker, wanted, tokenizer, stop_ids)
        spec = Spec(asker.id, asker.identity, context, sampling, intake.timeout_s, asker.traceparent, prompt.data)
        job = Job(
            intake.open(spec),
            shape,
            reader,
            stream=wanted.stream,
            request_id=asker.request_id,
            return_token_ids=wanted.return_token_ids,
            on_answer=lambda tokens: intake.answered(asker, context, tokens),
        )
        return AnswerResponse(job, intake, intake.patience)

    async def _reader(self, asker: Asker, wanted: Wanted, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> Reader:
        """Text alone needs no parser; calls and thoughts do."""
        formats = self.intake.formats
        if not wanted.parsed:
            found = Formats()
        else:
            found = await (formats.for_tools(tokenizer) if wanted.tools else formats.for_text(tokenizer))
        parsed = bool(wanted.tools) or bool(found.reasoning_parser)
        skip = wanted.fields.skip_special_tokens is not False and not parsed
        plain = PlainReader(TextStream(tokenizer.library, wanted.stops, skip_special=skip), stop_ids)
        if not parsed:
            return plain
        parsing = await formats.open(asker.id, found, list(wanted.tools.functions))
        return ParsedReader(plain, parsing, streaming=wanted.stream, one_call=wanted.tools.one_call)
