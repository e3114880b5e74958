"""Text to tokens and back: tokenizers, chat templates, streams of text with stop strings."""
