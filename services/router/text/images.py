"""The router's side of the process that lays out images, and the layouts it remembers."""

import importlib.util
from collections import OrderedDict
from collections.abc import Sequence

from schemas.block_key import TOKEN_BYTES
from services.router.text.layout import Image, Layout, Shown
from services.router.text.worker_process import WorkerProcess

CACHE_BYTES = 64 << 20
"""What remembered layouts may take."""
_ENTRY_BYTES = 400
"""What one takes beside its text and tokens, about."""


def processors_installed() -> bool:
    """Whether the library of processors is installed here (extra `engine`)."""
    return importlib.util.find_spec("transformers") is not None


class ImageRefused(ValueError):
    """An image that is not taken; `where` names the part of the request, the text says why."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")
        self.where = where


class ImageProcessor(WorkerProcess):
    """One process per router, for one model folder. A layout follows from the image alone, so it is made once."""

    module = "services.router.text.image_worker"

    def __init__(self, most_pixels: int) -> None:
        super().__init__()
        self._most_pixels = most_pixels
        self._known: OrderedDict[tuple[str, bytes], Layout] = OrderedDict()
        self._bytes = 0

    async def load(self, folder: str) -> None:
        """Have the processor of `folder` ready. WorkerFailed."""
        await self.ask("load", folder, None)

    async def shown(self, folder: str, images: Sequence[Image]) -> list[Shown]:
        """Images with their layouts by the processor of `folder`. ImageRefused, WorkerFailed."""
        return [Shown(image, await self._layout(folder, image)) for image in images]

    async def _layout(self, folder: str, image: Image) -> Layout:
        key = (folder, image.sha256)
        found = self._known.get(key)
        if found is None:
            made = await self.ask("layout", folder, {"data": image.data, "pixels": self._most_pixels})
            if "refused" in made:
                raise ImageRefused(image.where, made["refused"])
            found = Layout(made["text"], made["ids"], made["placeholder"], made["id"])
            self._remember(key, found)
        else:
            self._known.move_to_end(key)
        return found

    def _remember(self, key: tuple[str, bytes], layout: Layout) -> None:
        if key not in self._known:
            self._known[key] = layout
            self._bytes += _size(layout)
        while self._bytes > CACHE_BYTES:
            self._bytes -= _size(self._known.popitem(last=False)[1])


def _size(layout: Layout) -> int:
    return len(layout.text) + layout.tokens * TOKEN_BYTES + _ENTRY_BYTES
