"""The rules of ATen's ops, by what they do; importing this registers them."""

from heliograph.torch.ops import (
    activations,
    convolutions,
    creation,
    elementwise,
    indexing,
    normalization,
    pools,
    products,
    randomness,
    reductions,
    shapes,
)

__all__ = [
    "activations",
    "convolutions",
    "creation",
    "elementwise",
    "indexing",
    "normalization",
    "pools",
    "products",
    "randomness",
    "reductions",
    "shapes",
]
