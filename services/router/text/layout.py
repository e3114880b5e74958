"""Where images stand in a prompt: what the model's processor makes of each, in the place of the template's token."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schemas.block_key import TOKEN_BYTES
from schemas.media import Medium, placeholder_ids


class NotLaidOut(ValueError):
    """The images of a conversation do not come out of the chat template as they went in; the text says how."""


@dataclass(frozen=True, slots=True)
class Image:
    """The bytes of one image and their sha256; `where` names the part of the request."""

    data: bytes
    sha256: bytes
    where: str


@dataclass(frozen=True, slots=True)
class Layout:
    """What stands for one image: `text`, its tokens (packed), and the template's `placeholder`, token `number`."""

    text: str
    packed: bytes
    placeholder: str
    number: int

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Shown:
    """An image with its layout."""

    image: Image
    layout: Layout


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens (packed) as they are hashed, and the media that some of them stand for, with their bytes."""

    packed: bytes
    media: tuple[Medium, ...] = ()
    data: tuple[bytes, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES


def expanded(text: str, shown: Sequence[Shown]) -> str:
    """A rendered prompt with each placeholder replaced by what the processor makes of its image; NotLaidOut."""
    if not shown:
        return text
    placeholder = shown[0].layout.placeholder
    parts = text.split(placeholder)
    if len(parts) != len(shown) + 1:
        raise NotLaidOut(
            f"the chat template writes {placeholder} {len(parts) - 1} times for {len(shown)} images: it shows none in "
            f"such a message, or a text says {placeholder}"
        )
    layouts = [each.layout.text for each in shown]
    return "".join(part for pair in zip(parts, [*layouts, ""], strict=True) for part in pair)


def laid_out(packed: bytes, shown: Sequence[Shown]) -> Prompt:
    """The tokens of an expanded prompt with the ids that its images are hashed as; NotLaidOut."""
    if not shown:
        return Prompt(packed)
    tokens = array("I", packed)
    media: list[Medium] = []
    at = 0
    for image, layout in ((each.image, each.layout) for each in shown):
        own = array("I", layout.packed)
        try:
            first = tokens.index(layout.number, at) - own.index(layout.number)
        except ValueError:
            raise NotLaidOut(f"{image.where} has no token {layout.placeholder} in the prompt") from None
        at = first + len(own)
        if tokens[max(0, first) : at] != own:
            raise NotLaidOut(f"{image.where} is not laid out in the prompt as its processor does it")
        for start, count in _runs(own, layout.number):
            ids = array("I", placeholder_ids(image.sha256, count))
            tokens[first + start : first + start + count] = ids
        media.append(Medium(first, len(own), image.sha256, len(image.data), layout.number))
    return Prompt(tokens.tobytes(), tuple(media), tuple(each.image.data for each in shown))


def _runs(tokens: "array[int]", number: int) -> Iterator[tuple[int, int]]:
    """(start, length) of each run of `number`."""
    start = 0
    while start < len(tokens):
        if tokens[start] != number:
            start += 1
            continue
        end = start
        while end < len(tokens) and tokens[end] == number:
            end += 1
        yield start, end - start
        start = end
