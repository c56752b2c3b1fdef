"""Weights as they are stored, for the tests of the CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from backend_graphs import Maker, loaded
from kernel_runs import normal

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import Stored
from heliograph_backends.cpu.kernels.program.stored_types import FORMS
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.quantization import blocks as bfloat16
from heliograph_proto.quantization.blocks import quantize

KINDS = tuple(Stored)
#: Finding the nearest points of their grids takes seconds, and the blocks may be any.
GRIDS = (
    Stored.IQ1_S,
    Stored.IQ1_M,
    Stored.IQ2_XXS,
    Stored.IQ2_XS,
    Stored.IQ2_S,
    Stored.IQ3_XXS,
    Stored.IQ3_S,
)
#: Where the f16 scales of a block are; any byte is a scale of mxfp4 and nvfp4.
SCALES = {
    Stored.Q4_0: (0, 2),
    Stored.Q4_1: (0, 4),
    Stored.Q5_0: (0, 2),
    Stored.Q5_1: (0, 4),
    Stored.Q8_0: (0, 2),
    Stored.Q2_K: (80, 84),
    Stored.Q3_K: (108, 110),
    Stored.Q4_K: (0, 4),
    Stored.Q5_K: (0, 4),
    Stored.Q6_K: (208, 210),
    Stored.IQ4_NL: (0, 2),
    Stored.IQ4_XS: (0, 2),
    Stored.MXFP4: (0, 0),
    Stored.TQ1_0: (52, 54),
    Stored.TQ2_0: (64, 66),
    **dict.fromkeys(GRIDS, (0, 2)),
    Stored.IQ1_M: (0, 0),
    Stored.NVFP4: (0, 0),
    Stored.Q8_1: (0, 4),
    Stored.Q1_0: (0, 2),
    Stored.Q2_0: (0, 2),
    Stored.Q8_K: (0, 0),
}


def times(kind: Stored) -> int:
    """By how much rows are longer than those of blocks of 32."""
    return max(1, FORMS[kind].block_size // 32)


def blocks(kind: Stored, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Blocks of any bytes, with finite scales."""
    form = FORMS[kind]
    found = random.integers(0, 256, (*shape[:-1], shape[-1] // form.block_size, form.block_bytes), np.uint8)
    first, last = SCALES[kind]
    scales = random.standard_normal((*found.shape[:-1], (last - first) // 2)).astype(np.float16) / 64
    found[..., first:last] = scales.view(np.uint8)
    if kind is Stored.IQ1_M:
        # The uppermost bits of the scale are in the last byte.
        found[..., 55] &= 0x3F
    if kind is Stored.Q8_K:
        found[..., :4] = scales_of_32_bits(random, found.shape[:-1])
    return found.reshape(*shape[:-1], found.shape[-2] * form.block_bytes)


def scales_of_32_bits(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return random.standard_normal((*shape, 1), np.float32).view(np.uint8)


def stored(kind: Stored, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random weights of this shape, as they are stored."""
    values = normal(random, *shape)
    if kind is Stored.F32:
        return values
    if kind is Stored.BF16:
        return np.asarray(bfloat16.to_bits(values))
    if kind is Stored.F16:
        return values.astype(np.float16)
    if kind in GRIDS:
        return blocks(kind, shape, random)
    return quantize(values, kind.name.lower())


def stored_name(kind: Stored) -> str:
    """The type of a leaf whose array does not have it."""
    return "" if kind in (Stored.F32, Stored.F16) else kind.name.lower()


def native_steps(device: CpuDevice, made: Maker) -> int:
    """How many native steps run the whole graph; 0 where the definition takes part."""
    with loaded(device, made) as it:
        assert isinstance(it.plan, CpuPlan)
        return it.plan.steps if len(it.plan._steps) == len(it.plan._native) == 1 else 0
