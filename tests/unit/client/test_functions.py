"""Every function under `hg.` against NumPy, through a plan on the CPU in this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import heliograph as hg
from heliograph.graph.promotion import promote
from heliograph_proto.types import DTYPES

Array = np.ndarray[Any, Any]


def compute(session: hg.Session, build: Callable[..., Any], *arrays: Array) -> Array:
    """What a function of values gives for arrays."""
    g = hg.Graph()
    inputs = [g.input(f"x{place}", one.shape, one.dtype) for place, one in enumerate(arrays)]
    g.output("y", build(*inputs))
    found: Array = session.compile(g).run({f"x{place}": one for place, one in enumerate(arrays)})["y"]
    return found


def check(session: hg.Session, build: Callable[..., Any], numpy: Callable[..., Any], *arrays: Array) -> None:
    """The function and NumPy's agree: shape, data type, and elements to a few units in the last place."""
    found, expected = compute(session, build, *arrays), np.asarray(numpy(*arrays))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6, equal_nan=True)
    else:
        assert np.array_equal(found, expected)


RNG = np.random.default_rng(7)
F = RNG.normal(size=(3, 4)).astype(np.float32)
G = RNG.normal(size=(3, 4)).astype(np.float32)
POSITIVE = np.abs(F) + 0.1
WIDE = RNG.normal(size=(2, 3, 4)).astype(np.float32)
INTS = np.array([[7, -7, 0, 3], [5, 2, -1, 9], [1, 1, 2, -4]], np.int32)
BOOLS = np.array([[True, False, True, False]] * 3)
SPECIAL = np.array([[np.nan, np.inf, -np.inf, 0.0]], np.float32)


def erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Array, ...]]] = {
    "einsum": (lambda x, y: hg.einsum("ij,kj->ki", x, y), lambda x, y: np.einsum("ij,kj->ki", x, y), (F, G)),
    "take_masked": (lambda x: hg.take_masked(x, BOOLS, count=int(BOOLS.sum())), lambda x: x[BOOLS], (F,)),
    "add": (hg.add, np.add, (F, G)),
    "subtract": (hg.subtract, np.subtract, (F, G)),
    "multiply": (hg.multiply, np.multiply, (F, G)),
    "divide": (hg.divide, np.divide, (F, G)),
    "floor_divide": (hg.floor_divide, np.floor_divide, (F, G)),
    "remainder": (hg.remainder, np.remainder, (F, G)),
    "remainder of ints": (lambda x: x % 3, lambda x: x % 3, (INTS,)),
    "pow": (hg.pow, np.power, (POSITIVE, G)),
    "square by **": (lambda x: x**2, lambda x: x**2, (F,)),
    "cube of ints": (lambda x: x**3, lambda x: x**3, (INTS,)),
    "ints to the power of 0": (lambda x: x**0, lambda x: x**0, (INTS,)),
    "maximum": (hg.maximum, np.maximum, (F, G)),
    "minimum": (hg.minimum, np.minimum, (F, G)),
    "maximum with a scalar first": (lambda x: hg.maximum(0.0, x), lambda x: np.maximum(0, x), (F,)),
    "equal": (hg.equal, np.equal, (INTS, INTS.copy())),
    "not_equal": (hg.not_equal, np.not_equal, (F, G)),
    "less": (hg.less, np.less, (F, G)),
    "less_equal": (hg.less_equal, np.less_equal, (F, G)),
    "greater": (hg.greater, np.greater, (F, G)),
    "greater_equal": (hg.greater_equal, np.greater_equal, (F, G)),
    "logical_and": (hg.logical_and, np.logical_and, (BOOLS, ~BOOLS)),
    "logical_or": (hg.logical_or, np.logical_or, (BOOLS, ~BOOLS)),
    "logical_xor": (hg.logical_xor, np.logical_xor, (BOOLS, BOOLS.copy())),
    "logical_not": (hg.logical_not, np.logical_not, (BOOLS,)),
    "negative": (hg.negative, np.negative, (F,)),
    "positive": (hg.positive, np.positive, (F,)),
    "abs": (hg.abs, np.abs, (INTS,)),
    "sign": (hg.sign, np.sign, (F,)),
    "square": (hg.square, np.square, (F,)),
    "sqrt": (hg.sqrt, np.sqrt, (POSITIVE,)),
    "rsqrt": (hg.rsqrt, lambda x: 1 / np.sqrt(x), (POSITIVE,)),
    "reciprocal": (hg.reciprocal, np.reciprocal, (POSITIVE,)),
    "exp": (hg.exp, np.exp, (F,)),
    "expm1": (hg.expm1, np.expm1, (F,)),
    "log": (hg.log, np.log, (POSITIVE,)),
    "log1p": (hg.log1p, np.log1p, (POSITIVE,)),
    "sin": (hg.sin, np.sin, (F,)),
    "cos": (hg.cos, np.cos, (F,)),
    "tanh": (hg.tanh, np.tanh, (F,)),
    "erf": (hg.erf, erf, (F,)),
    "sigmoid": (hg.sigmoid, lambda x: 1 / (1 + np.exp(-x)), (F,)),
    "relu": (hg.relu, lambda x: np.maximum(x, 0), (F,)),
    "silu": (hg.silu, lambda x: x / (1 + np.exp(-x)), (F,)),
    "softplus": (hg.softplus, lambda x: np.log1p(np.exp(x)), (F,)),
    "gelu": (hg.gelu, lambda x: x * (1 + erf(x / np.float32(np.sqrt(2)))) / 2, (F,)),
    "gelu by tanh": (
        lambda x: hg.gelu(x, approximate="tanh"),
        lambda x: (x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2).astype(np.float32),
        (F,),
    ),
    "floor": (hg.floor, np.floor, (F * 3,)),
    "ceil": (hg.ceil, np.ceil, (F * 3,)),
    "round": (hg.round, np.round, (np.array([0.5, 1.5, -2.5, 2.6], np.float32),)),
    "trunc": (hg.trunc, np.trunc, (F * 3,)),
    "floor of ints": (hg.floor, lambda x: x, (INTS,)),
    "acos": (hg.acos, np.arccos, (F / 4,)),
    "acosh": (hg.acosh, np.arccosh, (POSITIVE + 1,)),
    "asin": (hg.asin, np.arcsin, (F / 4,)),
    "asinh": (hg.asinh, np.arcsinh, (F,)),
    "atan": (hg.atan, np.arctan, (F,)),
    "atanh": (hg.atanh, np.arctanh, (F / 4,)),
    "atan2": (hg.atan2, np.arctan2, (F, G)),
    "atan2 of a scalar": (lambda x: hg.atan2(1, x), lambda x: np.arctan2(np.float32(1), x), (F,)),
    "hypot": (hg.hypot, np.hypot, (F, G[0])),
    "logaddexp": (hg.logaddexp, np.logaddexp, (F, G)),
    "copysign": (hg.copysign, np.copysign, (F, G)),
    "nextafter": (hg.nextafter, np.nextafter, (F, G)),
    "signbit": (hg.signbit, np.signbit, (F,)),
    "conj": (hg.conj, np.conj, (F,)),
    "real": (hg.real, np.real, (INTS,)),
    "bitwise_and": (hg.bitwise_and, np.bitwise_and, (INTS, INTS.T[:3, :1].copy())),
    "bitwise_or": (hg.bitwise_or, np.bitwise_or, (INTS, INTS + 5)),
    "bitwise_xor": (hg.bitwise_xor, np.bitwise_xor, (INTS, INTS + 5)),
    "bitwise_invert": (hg.bitwise_invert, np.invert, (INTS,)),
    "bitwise_left_shift": (hg.bitwise_left_shift, np.left_shift, (INTS, np.abs(INTS))),
    "bitwise_right_shift": (hg.bitwise_right_shift, np.right_shift, (INTS, np.abs(INTS))),
    "bitwise_and of bools": (hg.bitwise_and, np.bitwise_and, (BOOLS, ~BOOLS)),
    "bitwise_invert of bools": (hg.bitwise_invert, np.invert, (BOOLS,)),
    "bit operators": (
        lambda x: ~(x & 12 | 5 ^ x) << 2 >> 1,
        lambda x: ~(x & 12 | 5 ^ x) << 2 >> 1,
        (INTS,),
    ),
    "bit operators of mixed widths": (
        lambda x, y: (x | y, x << y, 1 << y)[1],
        lambda x, y: x << y,
        (INTS, np.arange(4, dtype=np.uint8)),
    ),
    "an array on the left of bits": (
        lambda x: (INTS & x) | (INTS << x) | (INTS >> x),
        lambda x: (INTS & x) | (INTS << x) | (INTS >> x),
        (np.abs(INTS),),
    ),
    "an int on the left of bits": (
        lambda x: (6 & x) | (1 << x) | (-9 >> x) | (3 ^ x),
        lambda x: (6 & x) | (1 << x) | (-9 >> x) | (3 ^ x),
        (np.abs(INTS),),
    ),
    "powers of ints": (lambda x: 2**x, lambda x: 2**x, (np.abs(INTS),)),
    "powers of ints below 0": (lambda x: hg.pow(2, -x), lambda x: np.where(x == 0, 1, 0), (np.arange(4),)),
    "a reshape to one size": (lambda x: hg.reshape(x, 12), lambda x: np.reshape(x, 12), (F,)),
    "a tile of one number": (lambda x: hg.tile(x, 2), lambda x: np.tile(x, 2), (F,)),
    "differences more often than there are elements": (
        lambda x: hg.diff(x, n=10**12),
        lambda x: np.diff(x, n=x.shape[-1]),
        (F,),
    ),
    "isnan": (hg.isnan, np.isnan, (SPECIAL,)),
    "isinf": (hg.isinf, np.isinf, (SPECIAL,)),
    "isfinite": (hg.isfinite, np.isfinite, (SPECIAL,)),
    "isnan of ints": (hg.isnan, np.isnan, (INTS,)),
    "isfinite of ints": (hg.isfinite, np.isfinite, (INTS,)),
    "clip": (lambda x: hg.clip(x, -0.5, 0.5), lambda x: np.clip(x, -0.5, 0.5), (F,)),
    "clip below": (lambda x: hg.clip(x, min=0), lambda x: np.clip(x, 0, None), (F,)),
    "clip of ints": (lambda x: hg.clip(x, -1, 3), lambda x: np.clip(x, -1, 3), (INTS,)),
    "clip by values": (lambda x, y: hg.clip(x, min=y), lambda x, y: np.maximum(x, y), (F, G)),
    "where": (hg.where, np.where, (BOOLS, F, G)),
    "where of scalars": (
        lambda c: hg.where(c, 1.0, 0.0),
        lambda c: np.where(c, np.float32(1), np.float32(0)),
        (BOOLS,),
    ),
    "where with one scalar": (
        lambda c, x: hg.where(c, x, 0),
        lambda c, x: np.where(c, x, np.float32(0)),
        (BOOLS, F),
    ),
    "astype": (lambda x: hg.astype(x, "i32"), lambda x: x.astype(np.int32), (F * 9,)),
    "astype bool": (lambda x: x.astype(bool), lambda x: x.astype(bool), (INTS,)),
    "sum": (hg.sum, np.sum, (F,)),
    "sum along an axis": (lambda x: x.sum(axis=0), lambda x: x.sum(axis=0), (F,)),
    "sum keeping dimensions": (
        lambda x: hg.sum(x, axis=(0, -1), keepdims=True),
        lambda x: np.sum(x, axis=(0, -1), keepdims=True),
        (WIDE,),
    ),
    "sum along nothing": (lambda x: hg.sum(x, axis=()), lambda x: np.sum(x, axis=()), (F,)),
    "sum of small ints": (hg.sum, np.sum, (INTS.astype(np.int8),)),
    "sum of unsigned": (hg.sum, np.sum, (np.arange(9, dtype=np.uint8),)),
    "sum of bools": (hg.sum, np.sum, (BOOLS,)),
    "sum in another type": (
        lambda x: hg.sum(x, axis=0, dtype="f64"),
        lambda x: np.sum(x, axis=0, dtype=np.float64),
        (F,),
    ),
    "prod in a narrow type": (
        lambda x: hg.prod(x, dtype="i32", keepdims=True),
        lambda x: np.prod(x, dtype=np.int32, keepdims=True),
        (np.array([[3, 7], [-5, 2]], np.int8),),
    ),
    "mean of nothing": (lambda x: hg.mean(x, axis=0), lambda x: np.full(3, np.nan, np.float32), (F[:0, :3],)),
    "var with too large a correction": (
        lambda x: hg.var(x, axis=0, correction=3),
        lambda x: np.full(4, np.nan, np.float32),
        (F,),
    ),
    "prod": (lambda x: hg.prod(x, axis=1), lambda x: np.prod(x, axis=1), (F,)),
    "mean": (lambda x: x.mean(axis=-1), lambda x: x.mean(axis=-1), (WIDE,)),
    "max": (lambda x: x.max(axis=1), lambda x: x.max(axis=1), (INTS,)),
    "min": (lambda x: x.min(), lambda x: x.min(), (F,)),
    "var": (lambda x: hg.var(x, axis=1), lambda x: np.var(x, axis=1), (F,)),
    "var with a correction": (lambda x: hg.var(x, correction=1), lambda x: np.var(x, ddof=1), (F,)),
    "std": (lambda x: hg.std(x, axis=0, keepdims=True), lambda x: np.std(x, axis=0, keepdims=True), (F,)),
    "all": (lambda x: hg.all(x, axis=0), lambda x: np.all(x, axis=0), (BOOLS,)),
    "any": (lambda x: hg.any(x), lambda x: np.any(x), (INTS,)),
    "argmax": (hg.argmax, np.argmax, (F,)),
    "argmax along an axis": (lambda x: hg.argmax(x, axis=0), lambda x: np.argmax(x, axis=0), (WIDE,)),
    "argmax keeping dimensions": (
        lambda x: hg.argmax(x, axis=1, keepdims=True),
        lambda x: np.argmax(x, axis=1, keepdims=True),
        (WIDE,),
    ),
    "argmin": (lambda x: hg.argmin(x, axis=1), lambda x: np.argmin(x, axis=1), (F,)),
    "argmin of the least ints": (hg.argmin, np.argmin, (np.array([3, -128, 127], np.int8),)),
    "argmin of unsigned": (hg.argmin, np.argmin, (np.array([3, 0, 255], np.uint8),)),
    "matmul": (hg.matmul, np.matmul, (F, G.T.copy())),
    "matmul of ints": (hg.matmul, np.matmul, (INTS, INTS.T.copy())),
    "tensordot of ints": (
        lambda a, b: hg.tensordot(a, b, axes=1),
        lambda a, b: np.tensordot(a, b, 1),
        (INTS, INTS.T.astype(np.int64)),
    ),
    "matmul in batches": (hg.matmul, np.matmul, (WIDE, G.T.copy())),
    "a vector times a matrix": (hg.matmul, np.matmul, (F[0], G.T.copy())),
    "a matrix times a vector": (lambda a, b: a @ b, np.matmul, (WIDE, F[0])),
    "a vector times a vector": (hg.matmul, np.matmul, (F[0], G[0])),
    "vecdot": (hg.vecdot, lambda a, b: (a * b).sum(-1), (F, G)),
    "tensordot": (
        lambda a, b: hg.tensordot(a, b, axes=1),
        lambda a, b: np.tensordot(a, b, 1),
        (WIDE, G.T.copy()),
    ),
    "tensordot along named axes": (
        lambda a, b: hg.tensordot(a, b, axes=((0, 2), (1, 0))),
        lambda a, b: np.tensordot(a, b, ((0, 2), (1, 0))),
        (WIDE, RNG.normal(size=(4, 2, 5)).astype(np.float32)),
    ),
    "tensordot along no axis": (
        lambda a, b: hg.tensordot(a, b, axes=0),
        lambda a, b: np.tensordot(a, b, 0),
        (F, G),
    ),
    "matrix_transpose": (hg.matrix_transpose, lambda x: np.swapaxes(x, -1, -2), (WIDE,)),
    "permute_dims": (lambda x: hg.permute_dims(x, (2, 0, 1)), lambda x: x.transpose(2, 0, 1), (WIDE,)),
    "reshape": (lambda x: hg.reshape(x, (4, -1)), lambda x: x.reshape(4, -1), (WIDE,)),
    "flatten": (hg.flatten, np.ravel, (WIDE,)),
    "expand_dims": (lambda x: hg.expand_dims(x, axis=-1), lambda x: x[..., None], (F,)),
    "squeeze": (lambda x: hg.squeeze(x, 1), lambda x: x[:, 0], (F[:, :1].copy(),)),
    "broadcast_to": (lambda x: hg.broadcast_to(x, (2, 3, 4)), lambda x: np.broadcast_to(x, (2, 3, 4)), (F,)),
    "concat": (lambda x, y: hg.concat([x, y], axis=1), lambda x, y: np.concatenate([x, y], 1), (F, G)),
    "concat flattened": (
        lambda x, y: hg.concat([x, y], axis=None),
        lambda x, y: np.concatenate([x, y], None),
        (F, WIDE),
    ),
    "stack": (lambda x, y: hg.stack([x, y], axis=-1), lambda x, y: np.stack([x, y], -1), (F, G)),
    "split": (lambda x: hg.split(x, 2, axis=1)[1], lambda x: np.split(x, 2, 1)[1], (F,)),
    "split at places": (lambda x: hg.split(x, [1, 3], axis=1)[1], lambda x: np.split(x, [1, 3], 1)[1], (F,)),
    "tile": (lambda x: hg.tile(x, (2, 1, 3)), lambda x: np.tile(x, (2, 1, 3)), (F,)),
    "dynamic_slice": (
        lambda x, i: hg.dynamic_slice(x, i, (2, 1)),
        lambda x, i: x[1:3, 2:3],
        (F[:3, :3], np.array([9, 2], np.int32)),
    ),
    "dynamic_update_slice": (
        lambda x, y, i: hg.dynamic_update_slice(x, y, i),
        lambda x, y, i: np.concatenate([x[:1], np.concatenate([y, x[1:2, 1:]], 1), x[2:]]),
        (F[:3, :3], G[:1, :1], np.array([1, -5], np.int32)),
    ),
    "take": (
        lambda x, i: hg.take(x, i, axis=0),
        lambda x, i: np.take(x, i, 0),
        (F, np.array([2, 0], np.int32)),
    ),
    "take by a matrix": (
        lambda x, i: hg.take(x, i, axis=1),
        lambda x, i: np.take(x, i, 1),
        (WIDE, np.array([[2, 0], [1, 1]])),
    ),
    "take along the last axis": (
        lambda x, i: hg.take(x, i, axis=-1),
        lambda x, i: np.take(x, i, -1),
        (WIDE, np.array([3, 1])),
    ),
    "take of f16": (
        lambda x, i: hg.take(x, i, axis=0),
        lambda x, i: np.take(x, i, 0),
        (F.astype(np.float16), np.array([1], np.uint8)),
    ),
    "take from a vector": (hg.take, np.take, (F[0], np.array([1, 1, 3]))),
    "take from the end": (
        lambda x: hg.take(x, np.array([-1, 0, -3]), axis=0),
        lambda x: np.take(x, [-1, 0, -3], 0),
        (F,),
    ),
    "take from the end by small integers": (
        lambda x: hg.take(x, np.array([-1], np.int8)),
        lambda x: x[-1:],
        (np.arange(300),),
    ),
    "moveaxis": (lambda x: hg.moveaxis(x, 0, -1), lambda x: np.moveaxis(x, 0, -1), (WIDE,)),
    "moveaxis of several": (
        lambda x: hg.moveaxis(x, (0, 1), (2, 0)),
        lambda x: np.moveaxis(x, (0, 1), (2, 0)),
        (WIDE,),
    ),
    "unstack": (lambda x: hg.unstack(x, axis=1)[1], lambda x: x[:, 1], (WIDE,)),
    "broadcast_arrays": (
        lambda x, y: hg.broadcast_arrays(x, y)[1],
        lambda x, y: np.broadcast_arrays(x, y)[1],
        (WIDE, F[0]),
    ),
    "flip": (lambda x: hg.flip(x), np.flip, (F,)),
    "flip along an axis": (lambda x: hg.flip(x, axis=1), lambda x: np.flip(x, 1), (WIDE,)),
    "flip of integers": (lambda x: hg.flip(x), np.flip, (INTS,)),
    "roll": (lambda x: hg.roll(x, 3), lambda x: np.roll(x, 3), (F,)),
    "roll along axes": (
        lambda x: hg.roll(x, (1, -2), axis=(0, 2)),
        lambda x: np.roll(x, (1, -2), (0, 2)),
        (WIDE,),
    ),
    "repeat": (lambda x: hg.repeat(x, 3, axis=1), lambda x: np.repeat(x, 3, 1), (WIDE,)),
    "repeat by an array": (
        lambda x: hg.repeat(x, np.array([0, 3, 1]), axis=0),
        lambda x: np.repeat(x, [0, 3, 1], 0),
        (F,),
    ),
    "repeat by one number": (lambda x: hg.repeat(x, [2], axis=1), lambda x: np.repeat(x, [2], 1), (INTS,)),
    "repeat flattened": (lambda x: hg.repeat(x, 2), lambda x: np.repeat(x, 2), (F,)),
    "count_nonzero": (hg.count_nonzero, np.count_nonzero, (INTS,)),
    "count_nonzero along an axis": (
        lambda x: hg.count_nonzero(x, axis=0),
        lambda x: np.count_nonzero(x, axis=0),
        (F,),
    ),
    "diff": (lambda x: hg.diff(x), np.diff, (F,)),
    "diff twice along the first axis": (
        lambda x: hg.diff(x, axis=0, n=2),
        lambda x: np.diff(x, n=2, axis=0),
        (F,),
    ),
    "diff between ends": (
        lambda x, y: hg.diff(x, axis=0, prepend=y, append=y),
        lambda x, y: np.diff(x, axis=0, prepend=y, append=y),
        (F, G[:2]),
    ),
    "log2": (lambda x: hg.log2(hg.abs(x)), lambda x: np.log2(np.abs(x)), (F,)),
    "log2 of powers of two": (hg.log2, np.log2, (np.float32(2) ** np.arange(-20, 21, dtype=np.float32),)),
    "log10": (lambda x: hg.log10(hg.abs(x)), lambda x: np.log10(np.abs(x)), (F,)),
    "sinh": (hg.sinh, np.sinh, (F,)),
    "cosh": (hg.cosh, np.cosh, (F,)),
    "tan": (hg.tan, np.tan, (F,)),
    "argsort": (hg.argsort, lambda x: np.argsort(x, -1, kind="stable"), (F,)),
    "argsort falling, of equals": (
        lambda x: hg.argsort(x, descending=True),
        lambda x: np.argsort(-x, kind="stable"),
        (np.array([1, 3, 1, 2, 3], np.float32),),
    ),
    "sort": (hg.sort, np.sort, (WIDE,)),
    "sort along the first axis": (lambda x: hg.sort(x, axis=0), lambda x: np.sort(x, 0), (WIDE,)),
    "sort of integers": (hg.sort, np.sort, (INTS,)),
    "take_along_axis from the end": (
        lambda x, i: hg.take_along_axis(x, i, axis=0),
        lambda x, i: np.take_along_axis(x, i, 0),
        (F, np.array([[-1, 0, -3, 2]])),
    ),
    "take_along_axis of rows that broadcast": (
        lambda x, i: hg.take_along_axis(x, i),
        lambda x, i: np.take_along_axis(x, i, -1),
        (WIDE[:, :1].copy(), np.array([[[3, 0], [1, 1], [2, 2]]], np.uint8)),
    ),
    "take_along_axis": (
        lambda x, i: hg.take_along_axis(x, i, axis=1),
        lambda x, i: np.take_along_axis(x, i, 1),
        (F, np.array([[0, 1], [3, 3], [2, 0]])),
    ),
    "cumulative_sum": (
        lambda x: hg.cumulative_sum(x, axis=1),
        lambda x: np.cumsum(x, 1),
        (WIDE,),
    ),
    "cumulative_sum of small integers": (
        lambda x: hg.cumulative_sum(x, axis=-1),
        lambda x: np.cumsum(x, -1, dtype=np.int64),
        (INTS,),
    ),
    "cumulative_sum in another type with 0": (
        lambda x: hg.cumulative_sum(x, axis=0, dtype="f32", include_initial=True),
        lambda x: np.concatenate([np.zeros((1, 4)), np.cumsum(x, 0)]).astype(np.float32),
        (INTS,),
    ),
    "cumulative_prod": (lambda x: hg.cumulative_prod(x, axis=1), lambda x: np.cumprod(x, 1), (WIDE,)),
    "cumulative_prod of small integers with 1": (
        lambda x: hg.cumulative_prod(x, include_initial=True),
        lambda x: np.concatenate([[1], np.cumprod(x, dtype=np.int64)]),
        (np.array([3, 100, -7], np.int8),),
    ),
    "searchsorted": (hg.searchsorted, np.searchsorted, (np.sort(F[0]), WIDE)),
    "searchsorted on the right": (
        lambda x, y: hg.searchsorted(x, y, side="right"),
        lambda x, y: np.searchsorted(x, y, side="right"),
        (np.sort(INTS.ravel()), INTS),
    ),
    "searchsorted by a sorter": (
        lambda x, y, i: hg.searchsorted(x, y, sorter=i),
        lambda x, y, i: np.searchsorted(x, y, sorter=i),
        (F[0], G, np.argsort(F[0])),
    ),
    "searchsorted for a scalar": (
        lambda x: hg.searchsorted(x, 2),
        lambda x: np.asarray(np.searchsorted(x, 2)),
        (np.arange(5),),
    ),
    "softmax": (hg.softmax, lambda x: softmax(x, -1), (F,)),
    "softmax along the first axis": (lambda x: hg.softmax(x, axis=0), lambda x: softmax(x, 0), (WIDE,)),
    "log_softmax": (lambda x: hg.log_softmax(x, axis=1), lambda x: np.log(softmax(x, 1)), (WIDE,)),
    "layer_norm": (
        lambda x, w, b: hg.layer_norm(x, w, b),
        lambda x, w, b: (
            (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + np.float32(1e-5)) * w + b
        ),
        (F, G[0], G[1]),
    ),
    "rms_norm": (
        lambda x, w: hg.rms_norm(x, w, eps=1e-6),
        lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6)) * w,
        (F, G[0]),
    ),
    "l2_normalize": (lambda x: hg.l2_normalize(x, axis=0), lambda x: x / np.linalg.norm(x, axis=0), (F,)),
    "attention": (
        hg.scaled_dot_product_attention,
        lambda q, k, v: softmax(q @ k.swapaxes(-1, -2) / np.float32(2), -1) @ v,
        (WIDE, WIDE + 1, WIDE * 2),
    ),
    "attention causal": (
        lambda q, k, v: hg.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: (
            softmax(
                q @ k.swapaxes(-1, -2) / np.float32(2)
                + np.triu(np.full((q.shape[-2], k.shape[-2]), -np.inf, np.float32), 1),
                -1,
            )
            @ v
        ),
        (WIDE, WIDE + 1, WIDE * 2),
    ),
    "full_like": (lambda x: hg.full_like(x, 2), lambda x: np.full_like(x, 2), (F,)),
    "zeros_like": (lambda x: hg.zeros_like(x, "bool"), lambda x: np.zeros_like(x, bool), (F,)),
    "ones_like": (hg.ones_like, np.ones_like, (INTS,)),
    "full": (lambda x: hg.full((2, 2), 7, graph=x.graph), lambda x: np.full((2, 2), 7), (F,)),
    "zeros": (lambda x: hg.zeros((3,), graph=x.graph), lambda x: np.zeros(3, np.float32), (F,)),
    "ones": (lambda x: hg.ones((3,), "i8", graph=x.graph), lambda x: np.ones(3, np.int8), (F,)),
    "arange": (lambda x: hg.arange(5, graph=x.graph), lambda x: np.arange(5), (F,)),
    "arange of floats": (
        lambda x: hg.arange(0.5, 3, 0.5, graph=x.graph),
        lambda x: np.arange(0.5, 3, 0.5, np.float32),
        (F,),
    ),
    "arange far out": (
        lambda x: hg.arange(2**25 + 1, 2**25 + 3, graph=x.graph),
        lambda x: np.arange(2**25 + 1, 2**25 + 3),
        (F,),
    ),
    "arange of f64": (
        lambda x: hg.arange(0, 1, 0.1, dtype="f64", graph=x.graph),
        lambda x: np.arange(0, 1, 0.1),
        (F,),
    ),
    "asarray": (
        lambda x: hg.asarray([[1, 2], [3, 4]], graph=x.graph),
        lambda x: np.array([[1, 2], [3, 4]]),
        (F,),
    ),
    "asarray of a value": (lambda x: hg.asarray(x, dtype="f64"), lambda x: x.astype(np.float64), (F,)),
    "asarray of floats": (
        lambda x: hg.asarray([0.5, 2], graph=x.graph),
        lambda x: np.array([0.5, 2], np.float32),
        (F,),
    ),
    "from_dlpack": (lambda x: hg.from_dlpack(INTS, graph=x.graph), lambda x: INTS, (F,)),
    "empty": (lambda x: hg.empty((2, 0), graph=x.graph), lambda x: np.empty((2, 0), np.float32), (F,)),
    "empty_like": (lambda x: hg.empty_like(x), lambda x: np.zeros_like(x), (INTS,)),
    "eye": (lambda x: hg.eye(3, graph=x.graph), lambda x: np.eye(3, dtype=np.float32), (F,)),
    "eye off the diagonal": (
        lambda x: hg.eye(3, 5, k=-1, dtype="i64", graph=x.graph),
        lambda x: np.eye(3, 5, k=-1, dtype=np.int64),
        (F,),
    ),
    "linspace": (
        lambda x: hg.linspace(-1, 2.5, 7, graph=x.graph),
        lambda x: np.linspace(-1, 2.5, 7, dtype=np.float32),
        (F,),
    ),
    "linspace without its end": (
        lambda x: hg.linspace(1, 0, 9, endpoint=False, dtype="f64", graph=x.graph),
        lambda x: np.linspace(1, 0, 9, endpoint=False),
        (F,),
    ),
    "linspace of ints": (
        lambda x: hg.linspace(-3, 3, 5, dtype="i32", graph=x.graph),
        lambda x: np.linspace(-3, 3, 5, dtype=np.int32),
        (F,),
    ),
    "linspace of nothing": (
        lambda x: hg.linspace(0, 1, 0, graph=x.graph),
        lambda x: np.linspace(0, 1, 0, dtype=np.float32),
        (F,),
    ),
    "meshgrid": (lambda x, y: hg.meshgrid(x, y)[0], lambda x, y: np.meshgrid(x, y)[0], (F[0], INTS[0, :3])),
    "meshgrid of three": (
        lambda x, y, z: hg.meshgrid(x, y, z)[1],
        lambda x, y, z: np.meshgrid(x, y, z)[1],
        (F[0], INTS[0, :3], G[0, :2]),
    ),
    "meshgrid in the order of matrices": (
        lambda x, y, z: hg.meshgrid(x, y, z, indexing="ij")[2],
        lambda x, y, z: np.meshgrid(x, y, z, indexing="ij")[2],
        (F[0], INTS[0, :3], G[0, :2]),
    ),
    "tril": (hg.tril, np.tril, (WIDE,)),
    "triu above the diagonal": (lambda x: hg.triu(x, k=1), lambda x: np.triu(x, 1), (INTS,)),
    "slices": (lambda x: x[:, 1:, ::2], lambda x: x[:, 1:, ::2], (WIDE,)),
    "indices": (lambda x: x[1, None, ..., -1], lambda x: x[1, None, ..., -1], (WIDE,)),
    "a matrix and its transpose": (lambda x: x @ x.T, lambda x: x @ x.T, (F,)),
    "an array on the left": (lambda x: G - x, lambda x: G - x, (F,)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_equals_numpys(local: hg.Session, name: str) -> None:
    build, numpy, arrays = CASES[name]
    check(local, build, numpy, *arrays)


def test_every_function_has_a_case() -> None:
    import heliograph.functions as package

    names = {
        word for name in CASES for word in name.replace("attention", "scaled_dot_product_attention").split()
    }
    for one in set(hg.__all__) - {"can_cast", "finfo", "iinfo", "isdtype", "result_type"}:
        found = getattr(hg, one)
        if getattr(found, "__module__", "").startswith(package.__name__):
            assert one in names, f"hg.{one} has no case"


SHAPES = [(), (1,), (3,), (4, 1), (4, 3), (2, 1, 3), (2, 4, 3), (0, 3)]
NUMBERS = ["i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f32", "f64"]


@seed(20240917)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(shapes=st.tuples(st.sampled_from(SHAPES), st.sampled_from(SHAPES)))
def test_shapes_broadcast_as_in_numpy(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    g = hg.Graph()
    values = [g.input(f"x{place}", shape, "f32") for place, shape in enumerate(shapes)]
    try:
        expected = np.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(hg.InvalidGraphError):
            values[0] + values[1]
        return
    assert (values[0] + values[1]).shape == expected


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(left=st.sampled_from(NUMBERS), right=st.sampled_from(NUMBERS))
def test_types_of_one_kind_promote_as_in_numpy(left: str, right: str) -> None:
    expected = np.promote_types(DTYPES[left].numpy, DTYPES[right].numpy)
    mixed = (left[0] == "f") != (right[0] == "f")
    if mixed or (expected.kind == "f" and left[0] != "f"):
        with pytest.raises(hg.InvalidGraphError):
            promote(DTYPES[left], DTYPES[right])
    else:
        assert promote(DTYPES[left], DTYPES[right]).numpy == expected


def test_half_types_meet_in_f32() -> None:
    assert promote(DTYPES["f16"], DTYPES["bf16"]).name == "f32"
    assert promote(DTYPES["bf16"], DTYPES["f32"]).name == "f32"


@pytest.mark.parametrize("name", NUMBERS)
def test_python_scalars_are_weak(name: str) -> None:
    x = hg.Graph().input("x", (2,), name)
    assert (x + 1).dtype.name == (1 - x).dtype.name == name


def test_numpys_scalars_are_strong() -> None:
    x = hg.Graph().input("x", (2,), "f32")
    assert (x * np.float64(2)).dtype.name == "f64"
    assert (x * np.float32(2)).dtype.name == "f32"
