"""Weights for the examples: random ones, kept as safetensors files as a trained model's would
be."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def load_or_make(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read the weights from a file, which is made with random f32 weights of these shapes first."""
    if not path.exists():
        random = np.random.default_rng(0)
        save_file(
            {
                name: (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
                for name, shape in shapes.items()
            },
            path,
        )
    found = load_file(path)
    for name, shape in shapes.items():
        assert found[name].shape == shape, f"{path}: {name} is {found[name].shape}, expected {shape}"
    return found
