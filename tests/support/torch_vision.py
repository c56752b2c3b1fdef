"""Networks for images, of the forms of ResNet50 and MobileNetV3, with random weights."""

from __future__ import annotations

import torch
from torch import nn


def _norm(channels: int) -> nn.BatchNorm2d:
    """A norm with statistics as after training."""
    made = nn.BatchNorm2d(channels)
    with torch.no_grad():
        made.running_mean.normal_(0, 0.1)
        made.running_var.uniform_(0.5, 1.5)
        made.weight.uniform_(0.5, 1.5)
        made.bias.normal_(0, 0.1)
    return made


class Bottleneck(nn.Module):
    """Three convolutions around which the input goes as well."""

    def __init__(self, inner: int, width: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False),
            _norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            _norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outer, 1, bias=False),
            _norm(outer),
        )
        self.skip: nn.Module = nn.Identity()
        if inner != outer or stride != 1:
            self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), _norm(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class ResNet(nn.Module):
    """ResNet50's layers: 3, 4, 6 and 3 bottlenecks."""

    def __init__(self, base: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, base, 7, 2, 3, bias=False), _norm(base), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks = []
        inner = base
        for level, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if level and not number else 1
                blocks.append(Bottleneck(inner, base << level, base << (level + 2), stride))
                inner = base << (level + 2)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


class Squeeze(nn.Module):
    """Channels weighed by their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels // 4, 1),
            nn.ReLU(),
            nn.Conv2d(channels // 4, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weigh(x)


class Inverted(nn.Module):
    """A wide depthwise convolution between two narrow layers."""

    def __init__(self, inner: int, wide: int, outer: int, kernel: int, stride: int, squeezes: bool) -> None:
        super().__init__()
        layers = [
            nn.Conv2d(inner, wide, 1, bias=False),
            _norm(wide),
            nn.Hardswish(),
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            _norm(wide),
            *([Squeeze(wide)] if squeezes else []),
            nn.Hardswish(),
            nn.Conv2d(wide, outer, 1, bias=False),
            _norm(outer),
        ]
        self.body = nn.Sequential(*layers)
        self.adds = stride == 1 and inner == outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(x)
        return x + found if self.adds else found


def resnet50() -> nn.Module:
    """ResNet50's layers, an eighth as wide."""
    return ResNet(8).eval()


def mobilenet() -> nn.Module:
    """The layers of MobileNetV3 (small)."""
    rows = (
        (16, 16, 16, 3, 2, True),
        (16, 72, 24, 3, 2, False),
        (24, 88, 24, 3, 1, False),
        (24, 96, 40, 5, 2, True),
        (40, 240, 40, 5, 1, True),
        (40, 120, 48, 5, 1, True),
        (48, 288, 96, 5, 2, True),
        (96, 576, 96, 5, 1, True),
    )
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        _norm(16),
        nn.Hardswish(),
        *(Inverted(*row) for row in rows),
        nn.Conv2d(96, 576, 1, bias=False),
        _norm(576),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(576, 128),
        nn.Hardswish(),
        nn.Linear(128, 10),
    ).eval()
