"""The process that runs a model's own processor of images, for one router.

Started as `python -m services.router.text.image_worker`. The verb `load` makes the processor of a model folder (its
key) ready. `layout`, with `data` and `pixels` as its payload, answers what it makes of one image: `ids`, their `text`,
and the template's own `placeholder` with its `id`; or `refused`, why the bytes are no image that is taken.
"""

import io
import sys
from array import array
from typing import Any

from services.router.text.worker_frames import run, without_gpu_packages

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class Processor:
    """One model's processor, as the Hugging Face library loads it from the model's folder.

    `pil`: images are resized by Pillow although the library believes that torchvision is there, which is a stand-in.
    """

    def __init__(self, folder: str, *, pil: bool = False) -> None:
        from transformers import AutoImageProcessor, AutoProcessor

        self._processor: Any = AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call] # the library's
        if pil and getattr(getattr(self._processor, "image_processor", None), "backend", "pil") != "pil":
            images: Any = AutoImageProcessor
            self._processor.image_processor = images.from_pretrained(folder, backend="pil")
        self._tokenizer: Any = getattr(self._processor, "tokenizer", None)
        self._placeholder = str(getattr(self._processor, "image_token", ""))
        if self._tokenizer is None or not self._placeholder:
            raise ValueError(f"{type(self._processor).__name__} of {folder} has no token that stands for an image")
        self._id = int(self._tokenizer.convert_tokens_to_ids(self._placeholder))

    def layout(self, data: bytes, pixels: int) -> dict[str, Any]:
        """What stands for one image of at most `pixels` pixels in a prompt."""
        from PIL import Image, ImageOps

        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > pixels:
                return {"refused": f"has {image.width} x {image.height} pixels, the limit is {pixels} pixels"}
            shown = ImageOps.exif_transpose(image).convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return {"refused": f"is no {', '.join(FORMATS)} image: {error}"}
        made = self._processor(text=[self._placeholder], images=[shown], add_special_tokens=False)
        ids = [int(number) for number in made["input_ids"][0]]
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise ValueError(f"{type(self._processor).__name__} makes tokens of an image that no text stands for")
        packed = array("I", ids).tobytes()
        return {"text": text, "ids": packed, "placeholder": self._placeholder, "id": self._id}


class Worker:
    """Answers requests one after the other."""

    def __init__(self, *, pil: bool) -> None:
        self._pil = pil
        self._processors: dict[str, Processor] = {}

    def handle(self, verb: str, key: str, payload: Any) -> Any:
        """The result of one request."""
        if key not in self._processors:
            self._processors[key] = Processor(key, pil=self._pil)
        if verb == "load":
            return None
        if verb != "layout":
            raise ValueError(f"verb {verb!r} is neither load nor layout")
        return self._processors[key].layout(payload["data"], payload["pixels"])


if __name__ == "__main__":
    sys.exit(run(Worker(pil=without_gpu_packages()).handle))
