"""Modules of PyTorch with random weights, for tests; each with inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[Any, ...]]


def perceptron() -> Made:
    """Two layers, with a norm between them."""
    layers = (nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(-1))
    return nn.Sequential(*layers).eval(), (torch.randn(3, 8),)


def convolutional() -> Made:
    """Convolutions, one of them depthwise, norms, pools and a head."""
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    module = nn.Sequential(*layers)
    with torch.no_grad():
        module[1].running_mean.uniform_(-1, 1)
        module[1].running_var.uniform_(0.5, 2)
    return module.eval(), (torch.randn(2, 3, 16, 16),)


class Block(nn.Module):
    """A transformer block between an embedding and a head that share their weight."""

    def __init__(self, words: int = 50, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(64, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        batch, length, width = x.shape
        split = (
            one.view(batch, length, self.heads, -1).transpose(1, 2)
            for one in self.mix(self.norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return self.head(x + self.feed(x))


def block() -> Made:
    """A small GPT of one block."""
    return Block().eval(), (torch.randint(0, 50, (2, 10)),)
