"""The rules of ATen's ops, by what they do; importing this registers them."""

from heliograph.torch.ops import (
    activations,
    convolutions,
    creation,
    elementwise,
    gradients,
    indexing,
    normalization,
    pools,
    products,
    random_numbers,
    reductions,
    shapes,
    window_gradients,
)

__all__ = [
    "activations",
    "convolutions",
    "creation",
    "elementwise",
    "gradients",
    "indexing",
    "normalization",
    "pools",
    "products",
    "random_numbers",
    "reductions",
    "shapes",
    "window_gradients",
]
