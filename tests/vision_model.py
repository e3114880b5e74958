"""A model folder with an image processor, made here: nothing is downloaded. An image takes nine tokens, a large one its
tiles too."""

import base64
import io
from pathlib import Path

from services.router.text.byte_tokenizer import byte_tokenizer

IMAGE, AROUND = "<image>", "<fake_token_around_image>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(folder: Path) -> Path:
    """The processor of Idefics 3 over one token a byte, in `folder`."""
    from tokenizers import AddedToken
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    library = byte_tokenizer()
    names = [IMAGE, AROUND, "<global-img>", "<end_of_utterance>"]
    library.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    images = Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=9).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def picture(red: int, width: int = 64, height: int = 64, *, right: int | None = None) -> bytes:
    """A PNG of one colour, or of another one in its right half."""
    from PIL import Image

    target = io.BytesIO()
    image = Image.new("RGB", (width, height), (red, 0, 0))
    image.paste((red if right is None else right, 0, 0), (width // 2, 0, width, height))
    image.save(target, "PNG")
    return target.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
