"""A tokenizer of our own for engines without a model: one token per byte, and three markers."""

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
"""Tokens 256, 257 and 258; tokens 0 to 255 are the bytes."""


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = dict.fromkeys(range(256), "")
    table.update({byte: chr(byte) for byte in printable})
    others = (byte for byte in range(256) if not table[byte])
    table.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Every text is its UTF-8 bytes; markers are special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (START, END, END_OF_TEXT)])
    return tokenizer
