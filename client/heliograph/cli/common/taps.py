"""Observed nodes on the command line: a line for each as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

import heliograph as hg
from heliograph import raw
from heliograph.procedures.taps import TappedNode
from heliograph_proto.quantization import blocks
from heliograph_proto.types import TensorType

Array: TypeAlias = np.ndarray[Any, Any]


def observed(run: hg.RunFuture, timeout: float, *, quiet: bool) -> list[dict[str, Any]]:
    """What is observed of a run: name, type, shape and figures of each node. Unless `quiet`, prints each as
    it comes. Raises the run's error."""
    rows = []
    for node, array in raw.taps(run, timeout):
        found = figures(array, node.type)
        rows.append({"name": node.name, "type": node.dtype.name, "shape": node.shape, **found})
        if not quiet:
            print(line(node, found), flush=True)
    return rows


def figures(array: Array, type_: TensorType) -> dict[str, float]:
    """Least, mean and greatest of raw elements; none of no elements, or of blocks."""
    if type_.dtype.kind == "quantized" or not array.size:
        return {}
    floats = (blocks.from_bits(array) if type_.dtype.name == "bf16" else array).astype(np.float64)
    return {"min": float(floats.min()), "mean": float(floats.mean()), "max": float(floats.max())}


def line(node: TappedNode, found: Mapping[str, float]) -> str:
    """A node in words."""
    return "  ".join([node.name, str(node.type), *(f"{name} {value:.6g}" for name, value in found.items())])
