"""Random nodes: cases of the op table with other types, sizes and attributes, in every storage. Each is
refused by its rule, or runs on both kinds of CPU device and ends with a result or a typed error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, Maker, nothing_left, run
from op_cases import SEED, Case
from op_cases_all import cases_of

from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import InvalidGraphError, OutOfRangeError
from heliograph_proto.ops.table import OPS, AttributeKind, infer
from heliograph_proto.types import DTYPES, TensorType, dtype, shape_problem

NODES = 60
#: Results of at most so many bytes are computed.
SMALL = 2**16
DTYPE_NAMES = ("f32", "f64", "f16", "bf16", "q8_0", "q4_0", "q5_1", "q4_k", "i32", "i64", "u8", "bool")
SIZES = (0, 1, 2, 3, 4, 32, 64, 256)
INTEGERS = (-(2**63), -2, -1, 0, 1, 2, 3, 4, 32, 64, 2**31, 2**62, 2**63 - 1)
REALS = (math.nan, math.inf, 0.0, 1.0, 0.5, -1.0, 1e-5, 1e308)


@dataclass
class Mutation:
    """Turns cases into other nodes, most of which are a little wrong."""

    random: np.random.Generator

    def often(self, chance: float) -> bool:
        return bool(self.random.random() < chance)

    def one(self, choices: tuple[Any, ...]) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def types(self, case: Case) -> list[TensorType]:
        """All floats as one other type, single operands as others, and sizes exchanged throughout."""
        common, sizes = self.one(DTYPE_NAMES), self._exchanged_sizes(case)
        found = []
        for array in case.operands:
            name = dtype(array.dtype).name
            if dtype(name).is_float and self.often(0.7):
                name = common
            if self.often(0.15):
                name = self.one(DTYPE_NAMES)
            shape = tuple(sizes.get(size, size) for size in array.shape)
            if shape and self.often(0.1):
                shape = self.one((shape[1:], (1, *shape), (*shape[:-1], self.one(SIZES))))
            found.append(TensorType(DTYPES[name], shape))
        return found

    def _exchanged_sizes(self, case: Case) -> dict[int, int]:
        known = {size for array in case.operands for size in array.shape}
        blocks = {array.shape[-1]: self.one((32, 64, 256)) for array in case.operands if array.ndim}
        exchanged = {size: self.one(SIZES) for size in known if self.often(0.2)}
        return {**(blocks if self.often(0.5) else {}), **exchanged}

    def attributes(self, case: Case) -> dict[str, Any]:
        """The case's, each exchanged now and then."""
        found = dict(case.attributes)
        for attribute in OPS[case.op].attributes:
            if self.often(0.2):
                found[attribute.name] = self._value(attribute.kind, found.get(attribute.name))
        return found

    def _value(self, kind: AttributeKind, good: Any) -> Any:
        match kind:
            case "integer":
                return self.one(INTEGERS)
            case "real":
                return self.one(REALS)
            case "boolean":
                return self.often(0.5)
            case "dtype":
                return DTYPES[self.one(DTYPE_NAMES)]
        numbers = list(good or (1, 1))
        numbers[int(self.random.integers(len(numbers)))] = self.one(INTEGERS)
        return tuple(numbers)

    def array(self, type: TensorType) -> Array:
        """Any bits, or small ones."""
        most = 256 if self.often(0.3) else 2
        raw = self.random.integers(0, most if type.dtype.kind != "bool" else 2, type.nbytes, np.uint8)
        found = raw.view(type.dtype.storage).reshape(type.storage_shape)
        return found % 2 if type.dtype.is_integer and self.often(0.7) else found


@pytest.fixture(scope="module")
def devices() -> Iterator[list[CpuDevice]]:
    plain = CpuDevice(threads=1, memory_bytes=2**28, native=False)
    with nothing_left(plain), nothing_left(CpuDevice(threads=1, memory_bytes=2**28)) as native:
        yield [plain, native]


@pytest.mark.parametrize("op", OPS)
def test_a_random_node_is_refused_or_runs(op: str, devices: list[CpuDevice]) -> None:
    print(f"seed {SEED}")
    mutation = Mutation(np.random.default_rng(SEED))
    cases = list(islice(cases_of(op, np.random.default_rng(SEED)), 200))
    for _ in range(NODES):
        case = mutation.one(tuple(cases))
        types, attributes = mutation.types(case), mutation.attributes(case)
        if any(map(shape_problem, types)) or sum(type.nbytes for type in types) > SMALL:
            continue
        try:
            result, complete = infer(op, types, attributes)
        except InvalidGraphError:
            continue
        assert shape_problem(result) == ""
        for device in devices:
            if result.nbytes <= SMALL and not device.supports_op(op, complete, types, result):
                runs(device, op, types, attributes, mutation)


def runs(
    device: CpuDevice, op: str, types: list[TensorType], attributes: dict[str, Any], mutation: Mutation
) -> None:
    """Nothing but an index outside may end it."""
    made = Maker()
    arrays = [mutation.array(type) for type in types]
    values = [made.input(array, type.dtype.name) for array, type in zip(arrays, types, strict=True)]
    if op == "assign":
        values[0] = made.variable(arrays[0], types[0].dtype.name)
    made.output(made.node(op, *values, **attributes))
    try:
        run(device, made)
    except OutOfRangeError as error:
        assert {"indices", "ids"} & set(OPS[op].operands), error
