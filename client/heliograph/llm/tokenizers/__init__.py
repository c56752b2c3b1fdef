"""Tokenizers of GGUF files: text to a model's tokens, and back."""

from heliograph.llm.tokenizers.tokenizer import DecodeStream, Tokenizer, read_tokenizer

__all__ = ["DecodeStream", "Tokenizer", "read_tokenizer"]
