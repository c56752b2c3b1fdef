"""Modules to train, and training them by eager torch, for tests; each with batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, ...]
Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """A module, its loss and batches."""

    module: nn.Module
    loss: Callable[..., torch.Tensor]
    batches: Sequence[Batch]


def of_tokens(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy of sequences of tokens."""
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def perceptron(count: int = 50) -> Case:
    """Three layers and classes."""
    module = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    batches = [(torch.randn(32, 20), torch.randint(0, 10, (32,))) for _ in range(count)]
    return Case(module, functional.cross_entropy, batches)


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.around = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.first(x)), inplace=True)
        return functional.relu(self.norm2(self.second(y)) + self.around(x))


def residual(count: int = 50, width: int = 8, size: int = 16, batch: int = 8) -> Case:
    """A small ResNet with batch norm and a pool."""
    module = nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )
    batches = [(torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))) for _ in range(count)]
    return Case(module, functional.cross_entropy, batches)


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            one.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for one in self.mix(self.norm1(x)).split(width, 2)
        )
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + functional.dropout(self.feed(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(
        self, layers: int = 6, width: int = 32, heads: int = 4, words: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        found: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return found


def gpt(count: int = 50, **options: Any) -> Case:
    """Six layers and tokens."""
    batches = []
    for _ in range(count):
        tokens = torch.randint(0, 64, (4, 17))
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return Case(GPT(**options), of_tokens, batches)


@dataclass
class Trained:
    """A case trained by eager torch."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]


def eager(case: Case, make: Optimizer, dtype: torch.dtype = torch.float32, schedule: Any = None) -> Trained:
    """Train a copy of a module by eager torch."""
    module = copy.deepcopy(case.module).to(dtype)
    optimizer = make(module.parameters())
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for batch in case.batches:
        *inputs, target = (one.to(dtype) if one.is_floating_point() else one for one in batch)
        optimizer.zero_grad()
        loss = case.loss(module(*inputs), target)
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(float(loss.detach()))
    return Trained(module, optimizer, losses)


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The distance of two states of a module."""
    total = sum(float((found[name].double() - one.double()).square().sum()) for name, one in wanted.items())
    return float(total**0.5)
