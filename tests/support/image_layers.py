"""Layers of models of images, and rows of models of language, whose kernels a GPU checks and
measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from heliograph_proto.types import DTYPES, TensorType


@dataclass(frozen=True)
class Layer:
    """One node: its op, the shapes of its operands, and its attributes."""

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    def types(self, name: str) -> list[TensorType]:
        """Return the types of its operands in a data type."""
        return [TensorType(DTYPES[name], shape) for shape in self.shapes]

    @property
    def images(self) -> int:
        return self.shapes[-1][0]


def _conv(
    name: str, outputs: int, inputs: int, taps: int, side: int, stride: int = 1, groups: int = 1
) -> tuple[str, tuple[int, ...], int, int, dict[str, Any]]:
    attributes = {"stride": (stride,) * 2, "padding": (taps // 2,) * 2, "groups": groups}
    return name, (outputs, inputs // groups, taps, taps), inputs, side, attributes


#: Each shape once, from the first layer to the last.
RESNET50 = (
    _conv("stem", 64, 3, 7, 224, 2), _conv("64-1x1", 64, 256, 1, 56), _conv("64-3x3", 64, 64, 3, 56),
    _conv("256-1x1", 256, 64, 1, 56), _conv("128-3x3-half", 128, 128, 3, 56, 2),
    _conv("512-1x1-half", 512, 256, 1, 56, 2), _conv("128-3x3", 128, 128, 3, 28),
    _conv("256-3x3", 256, 256, 3, 14), _conv("1024-1x1", 1024, 256, 1, 14), _conv("512-3x3", 512, 512, 3, 7),
    _conv("2048-1x1", 2048, 512, 1, 7),
)  # fmt: skip
MOBILENET = (
    _conv("stem", 32, 3, 3, 224, 2), _conv("dw-32", 32, 32, 3, 112, 1, 32),
    _conv("dw-96", 96, 96, 3, 112, 2, 96), _conv("dw-144", 144, 144, 3, 56, 1, 144),
    _conv("dw-384", 384, 384, 3, 14, 1, 384),
    _conv("dw-960", 960, 960, 3, 7, 1, 960), _conv("dw5-240", 240, 240, 5, 28, 1, 240),
    _conv("320-1x1", 320, 960, 1, 7),
)  # fmt: skip


def convolutions(images: int) -> Iterator[Layer]:
    """The convolutions of ResNet50 and MobileNet, for as many images."""
    for model, layers in (("resnet50", RESNET50), ("mobilenet", MOBILENET)):
        for name, kernel, channels, side, attributes in layers:
            data = (images, channels, side, side)
            yield Layer(f"{model}-{name}", "conv_2d", (kernel, data), attributes)


def others(images: int) -> Iterator[Layer]:
    """Windows, places and rows in order."""
    half = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    image = (images, 64, 112, 112)
    yield Layer("max-pool", "pool_2d", (image,), half)
    yield Layer("max-pool-back", "pool_2d_back", ((images, 64, 56, 56), image), half)
    yield Layer("mean-pool", "pool_2d", ((images, 2048, 7, 7),), {"kernel": (7, 7), "average": True})
    yield Layer("group-norm", "group_norm", ((images, 320, 32, 32),), {"groups": 32})
    yield Layer("upscale", "upscale", ((images, 64, 56, 56),), {"shape": (images, 64, 112, 112), "mode": 1})
    yield Layer("transposed", "conv_transpose_2d", ((128, 64, 4, 4), (images, 128, 28, 28)), {"stride": 2})
    yield Layer("pad", "pad", ((images, 64, 56, 56),), {"left": (0, 0, 1, 1), "right": (0, 0, 1, 1)})
    yield Layer("top-k", "top_k", ((images, 151_936),), {"k": 50})
    yield Layer("argsort", "argsort", ((images, 4096),))
    yield Layer("argmax", "argmax", ((images, 151_936),))
    yield Layer("cumsum", "cumsum", ((images, 151_936),))
