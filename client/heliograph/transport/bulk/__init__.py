"""Bytes of tensors and contents for both gRPC shells, and the choice of their way."""
