"""Clipping of gradients in a graph, as torch.nn.utils does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import heliograph as hg
from heliograph.lowerings.arrays import cast

#: The input of a run that has the bound.
BOUND = "clip"


@dataclass(frozen=True, slots=True)
class Clip:
    """A bound of gradients, which a step applies before the optimizer's update.

    Args:
        norm: The most that the norm of all gradients together may be; larger ones are scaled down,
            as by `torch.nn.utils.clip_grad_norm_`.
        value: The most that the size of an element may be, as by
            `torch.nn.utils.clip_grad_value_`.
        norm_type: 2, or `math.inf` for the size of the largest element.

    Raises InvalidArgumentError unless one of norm and value is given, 0 or more.
    """

    norm: float | None = None
    value: float | None = None
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        given = [one for one in (self.norm, self.value) if one is not None]
        if len(given) != 1 or not _is_number(given[0]) or not given[0] >= 0:
            raise hg.InvalidArgumentError(
                f"gradients are clipped by norm={self.norm!r:.40} and value={self.value!r:.40}",
                advice="one of them is a number, 0 or more: Clip(norm=1.0)",
            )
        if self.norm_type not in (2.0, math.inf):
            raise hg.InvalidArgumentError(f"norm_type is {self.norm_type!r:.40}", advice="2 or math.inf")

    @property
    def bound(self) -> float:
        """The bound, which is an input of each run."""
        return float(self.value if self.norm is None else self.norm)  # type: ignore[arg-type]

    @property
    def form(self) -> tuple[str, float]:
        """The part that decides which nodes there are."""
        return ("value" if self.norm is None else "norm", self.norm_type)


def checked_clip(given: Any) -> Clip | None:
    """Return a bound from what a trainer is given: a number is a norm."""
    if given is None or isinstance(given, Clip):
        return given
    if _is_number(given):
        return Clip(norm=float(given))
    raise hg.InvalidArgumentError(
        f"clip is {type(given).__name__}", advice="a norm, or hg.torch.Clip(value=0.5)"
    )


def clipped(
    gradients: Mapping[str, hg.Value], form: tuple[str, float], graph: hg.Graph
) -> dict[str, hg.Value]:
    """Return gradients within the bound that the graph's input `BOUND` has."""
    kind, norm_type = form
    bound = graph.input(BOUND, (), "f64")
    if kind == "value":
        return {
            name: hg.minimum(hg.maximum(one, -cast(bound, one.dtype)), cast(bound, one.dtype))
            for name, one in gradients.items()
        }
    total = _norm(list(gradients.values()), norm_type)
    # The small number is torch's; a norm that is NaN makes all gradients NaN.
    factor = hg.minimum(bound / (total + 1e-6), 1.0)
    return {name: one * cast(factor, one.dtype) for name, one in gradients.items()}


def _norm(gradients: list[hg.Value], norm_type: float) -> hg.Value:
    """Return the norm of all gradients together, in f64."""
    if norm_type == math.inf:
        sizes = [cast(hg.max(hg.abs(one)), "f64") for one in gradients]
        return hg.max(hg.stack(sizes))
    wide = [one if one.dtype.name == "f64" else cast(one, "f32") for one in gradients]
    return hg.sqrt(hg.sum(hg.stack([cast(hg.sum(one * one), "f64") for one in wide])))


def _is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)
