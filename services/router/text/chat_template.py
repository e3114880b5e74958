"""Chat templates as models ship them: Jinja in a sandbox, with what the Hugging Face library gives them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.router.text.default_tools import in_plain_messages

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '')"
    " + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What a model without a template of its own gets."""


class TemplateFailed(ValueError):
    """The template refused these messages, or cannot be used; the text says why."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is all there is to it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. `special` are the names it may use, such as `bos_token`.

    `takes_tools`: it says tools in its own way; the others get the project's default. `takes_late_system`: a system
    message may stand anywhere. `takes_strings`: a message's content may be a string; else all are lists of parts.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"chat template: {error}") from error
        self.source = source
        self._special = dict(special or {})
        self.takes_strings = self.takes_late_system = True
        self.takes_strings = self._takes_strings()
        self.takes_late_system = self._takes_late_system()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        **more: Any,
    ) -> str:
        """The prompt for `messages`; TemplateFailed with the template's own words when it refuses them."""
        if not self.takes_late_system:
            messages = [_late(message) if index else message for index, message in enumerate(messages)]
        more = {"tools": list(tools) if self.takes_tools and tools else None, "documents": None} | more
        if not self.takes_tools and (tools or any(_of_tools(message) for message in messages)):
            messages = in_plain_messages(messages, tools)
        if not self.takes_strings:
            messages = [_in_parts(message) for message in messages]
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special, **more
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateFailed(f"chat template: {error}") from error

    def _takes_late_system(self) -> bool:
        """Whether a system message after the first shows up in the prompt."""
        said = "a late word of the system"
        roles = [("system", "a"), ("user", "b"), ("assistant", "c"), ("system", said), ("user", "d")]
        try:
            return said in self.render([{"role": role, "content": text} for role, text in roles])
        except TemplateFailed:
            return False

    def _takes_strings(self) -> bool:
        """Whether a content that is a string shows up in the prompt, or a list of parts does not either."""
        said = "a word of the user"
        return self._shows(said, said) or not self._shows([{"type": "text", "text": said}], said)

    def _shows(self, content: object, said: str) -> bool:
        try:
            return said in self.render([{"role": "user", "content": content}])
        except TemplateFailed:
            return False


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _late(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A system message after the first, as a user would say it."""
    return {**message, "role": "user"} if message.get("role") == "system" else message


def _of_tools(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))
