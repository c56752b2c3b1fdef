"""What a hostile client writes into attributes: each attribute of each op gets each bad number, and ends as
a typed error or as a node that runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from backend_graphs import nothing_left, run
from op_cases import SEED, Case
from op_cases_all import as_it_is, cases_of, made_of

from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import HeliographError, InvalidGraphError, OutOfRangeError
from heliograph_proto.ops.table import OPS, Attribute, infer
from heliograph_proto.types import DTYPES, TensorType, dtype, shape_problem

INTEGERS = (-(2**63), -(2**31), -2, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1)
REALS = (
    math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 5e-324, 1e-300, -1e300, 1.5, 2.0**63, 1.7e308, *INTEGERS,
)  # fmt: skip
#: Of no kind at all, or past 64 bits.
NEVER = (2**63, -(2**63) - 1, 10**30, "1", b"1", 1j, {}, object())
#: Results of at most so many bytes are computed.
SMALL = 2**20

#: Ops an attribute of which says what an index may be.
NAMES_INDICES = ("get_rows_back",)
WITH_ATTRIBUTES = [op for op, row in OPS.items() if row.attributes]


def bad_values(attribute: Attribute, good: Any) -> Iterator[Any]:
    """Values of the attribute's kind, and of others."""
    yield from NEVER
    match attribute.kind:
        case "integer":
            yield from (*INTEGERS, 1.0, math.nan, True, (1,))
        case "real":
            yield from (*REALS, True, (1.0,))
        case "boolean":
            yield from (True, False, 0, 1, 2**62, math.nan, "false")
        case "dtype":
            yield from (*DTYPES.values(), "f32", 1, np.float32)
        case "integers":
            yield from bad_tuples(tuple(good or (1, 1)))


def bad_tuples(good: tuple[int, ...]) -> Iterator[Any]:
    """One number exchanged, all of them, more and fewer of them, and numbers of other kinds."""
    yield from ((), good[:-1], (*good, 1), (0,) * 9, [1] * 10**5, 1, "11", (1.0,), (True,), ((1,),), (None,))
    for value in INTEGERS:
        yield (value,) * len(good)
        for place in range(len(good)):
            yield (*good[:place], value, *good[place + 1 :])


def bases(op: str) -> list[Case]:
    """Cases of f32 with different attributes, or of any type if there is none."""
    cases = list(itertools.islice(cases_of(op, np.random.default_rng(SEED)), 400))
    wanted = [case for case in cases if all(array.dtype.kind != "f" or array.dtype == np.float32
                                            for array in case.operands)]  # fmt: skip
    by_shapes = {tuple(array.shape for array in case.operands): case for case in wanted or cases}
    return list(by_shapes.values())[:3]


def types_of(case: Case) -> list[TensorType]:
    return [TensorType(dtype(array.dtype), array.shape) for array in case.operands]


@pytest.fixture(scope="module", params=[False, True], ids=["definition", "native"])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**28, native=request.param)) as device:
        yield device


@pytest.mark.parametrize("op", WITH_ATTRIBUTES)
def test_every_attribute_takes_every_bad_number_to_a_typed_error_or_a_node_that_runs(
    op: str, device: CpuDevice
) -> None:
    for case in bases(op):
        for attribute in OPS[op].attributes:
            for value in bad_values(attribute, case.attributes.get(attribute.name)):
                attributes = {**case.attributes, attribute.name: value}
                about = f"{op} of {types_of(case)} with {attribute.name}={value!r:.200}"
                try:
                    found, complete = infer(op, types_of(case), attributes)
                except InvalidGraphError as error:
                    assert len(str(error)) < 4000, about
                    continue
                assert shape_problem(found) == "", about
                assert infer(op, types_of(case), complete) == (found, complete), about
                if found.nbytes <= SMALL and not device.supports_op(op, complete, types_of(case), found):
                    runs(device, Case(op, case.operands, np.zeros(()), attributes), about)


def runs(device: CpuDevice, case: Case, about: str) -> None:
    """Nothing but a typed error may come of it; of finite operands, not even that."""
    try:
        run(device, made_of(case, as_it_is))
    except OutOfRangeError:
        assert case.op in NAMES_INDICES, about
    except HeliographError as error:
        raise AssertionError(f"{about}: {error}") from error


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_number_of_operands_and_an_attribute_too_many_are_refused(op: str) -> None:
    row, (case, *_) = OPS[op], bases(op)
    types = types_of(case)
    with pytest.raises(InvalidGraphError, match="has no attribute"):
        infer(op, types, {**case.attributes, "nb1": -16})
    with pytest.raises(InvalidGraphError, match="takes the operands"):
        infer(op, [TensorType(DTYPES["f32"], (1,))] * (row.most_operands + 1), case.attributes)
    if row.least_operands:
        with pytest.raises(InvalidGraphError, match="takes the operands"):
            infer(op, types[: row.least_operands - 1], case.attributes)
    for attribute in row.attributes:
        if attribute.default is None:
            rest = {name: value for name, value in case.attributes.items() if name != attribute.name}
            with pytest.raises(InvalidGraphError, match=f"needs the attribute '{attribute.name}'"):
                infer(op, types, rest)


#: Of operands: what the wire can say, and no memory can hold.
HUGE_SHAPES = ((2**61,), (2**31, 2**30), (1, 2**61), (2**20,) * 3, (2**61, 0), (0, 2**61), (2**58, 2, 2, 2))


@pytest.mark.parametrize("op", [op for op, row in OPS.items() if row.operands])
def test_operands_of_huge_sizes_give_a_typed_error_or_a_type_that_can_be(op: str) -> None:
    """Sizes that overflow 64 bits when they are multiplied, added or stretched."""
    for case, shape in itertools.product(bases(op), HUGE_SHAPES):
        for place in range(len(case.operands)):
            types = types_of(case)
            types[place] = TensorType(types[place].dtype, shape)
            for found in (types, [types[place]] * len(types)):
                try:
                    result, _ = infer(op, found, case.attributes)
                except InvalidGraphError:
                    continue
                assert shape_problem(result) == ""
