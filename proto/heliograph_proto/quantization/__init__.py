"""ggml's block-quantized types and bf16: rows of floats to stored bytes and back.

Imports types and errors.
"""
