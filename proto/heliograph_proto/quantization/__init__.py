"""Conversion of floats to ggml's block-quantized types and bf16, and back.

Within the package it imports only the types and the errors.
"""
