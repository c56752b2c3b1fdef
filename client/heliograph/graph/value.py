"""`hg.Value`: a tensor of a graph under construction.

A value has a shape and a data type but no elements; operators add nodes to its graph.

Basic indexing, x[...]: integers, slices, None and Ellipsis.

The same normal form serves values of a graph (a slice, then a reshape) and tensors on a server (an
offset and strides). A slice with a negative step is one with a positive step, read backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from heliograph.graph import lowering as lowering
from heliograph.graph.indexing import gathered, has_arrays
from heliograph.graph.lowering import Axis, Operand
from heliograph.graph.names import method_advice, numpy_advice
from heliograph.graph.source_lines import invalid
from heliograph.graph.symbol import Symbol
from heliograph_proto.errors import HeliographError, InvalidArgumentError, OutOfRangeError
from heliograph_proto.types import DTypeArgument, dtype

_ADVICE = "an index is made of ints, slices, None and ...; to gather, use hg.take(x, [2, 0], axis=0)"


@dataclass(frozen=True, slots=True)
class BasicIndex:
    """A start, stop and positive step for every dimension, and the shape without the dropped
    ones."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    step: tuple[int, ...]
    #: For each dimension of the result: the source's dimension, or None for a new one of size 1.
    kept: tuple[int | None, ...]
    #: The source's dimensions whose chosen elements come in the opposite order.
    backwards: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length along each of the source's dimensions."""
        triples = zip(self.start, self.stop, self.step, strict=True)
        return tuple(len(range(*triple)) for triple in triples)

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape."""
        sizes = self.sizes
        return tuple(1 if place is None else sizes[place] for place in self.kept)


def basic_index(shape: tuple[int, ...], key: Any) -> BasicIndex:
    """The normal form of x[key]. Raises OutOfRangeError or InvalidArgumentError, without origin."""
    parts = _spread(shape, key if isinstance(key, tuple) else (key,))
    ranges: list[tuple[int, int, int]] = []
    kept: list[int | None] = []
    backwards: list[int] = []
    for part in parts:
        if part is None:
            kept.append(None)
            continue
        dimension = len(ranges)
        if isinstance(part, slice):
            chosen = _slice(part, shape[dimension])
            if chosen.step < 0:
                backwards += [dimension] if len(chosen) > 1 else []
                chosen = range(chosen[-1], chosen[0] + 1, -chosen.step)
            ranges.append((chosen.start, max(chosen.start, chosen.stop), chosen.step))
            kept.append(dimension)
        else:
            place = _integer(part, shape[dimension], dimension)
            ranges.append((place, place + 1, 1))
    start, stop, step = zip(*ranges, strict=True) if ranges else ((), (), ())
    return BasicIndex(start, stop, step, tuple(kept), tuple(backwards))


def _spread(shape: tuple[int, ...], key: tuple[Any, ...]) -> list[Any]:
    """The key with a part for every dimension."""
    ellipses = sum(part is Ellipsis for part in key)
    if ellipses > 1:
        raise InvalidArgumentError("an index has at most one ...", advice=_ADVICE)
    used = sum(part is not None and part is not Ellipsis for part in key)
    if used > len(shape):
        raise OutOfRangeError(f"{used} indices for a shape of {len(shape)} dimensions: {shape}")
    rest = [slice(None)] * (len(shape) - used)
    if not ellipses:
        return [*key, *rest]
    place = next(place for place, part in enumerate(key) if part is Ellipsis)
    return [*key[:place], *rest, *key[place + 1 :]]


def _slice(part: slice, size: int) -> range:
    try:
        found = range(size)[part]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"slice {part}: {error}", advice=_ADVICE) from None
    # An empty range may begin below 0.
    return found if len(found) else range(0)


def _integer(part: Any, size: int, dimension: int) -> int:
    try:
        place = index(part)
        if isinstance(part, bool):
            raise TypeError
    except TypeError:
        raise InvalidArgumentError(f"{type(part).__name__} is no index", advice=_ADVICE) from None
    if not -size <= place < size:
        raise OutOfRangeError(f"index {place} is outside dimension {dimension}, which has {size} elements")
    return place % size


def with_origin(
    shape: tuple[int, ...], key: Any, blame: Callable[[str, str, type[HeliographError]], HeliographError]
) -> BasicIndex:
    """As basic_index; errors get an origin by `blame(message, advice, kind)`."""
    try:
        return basic_index(shape, key)
    except HeliographError as error:
        raise blame(error.message, error.advice, type(error)) from None


class Value(Symbol):
    """A tensor to be computed. Made by `hg.Graph` and by functions under `hg.`, never directly.

    Operators follow the array API: Python scalars take the other operand's data type, NumPy arrays
    become constants of the graph, operands of one kind promote, shapes broadcast.
    """

    __slots__ = ()

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Value:
        """NumPy asks here for `array + value` and for np.exp(value): operators work, functions are
        hg's."""
        operator = _OPERATORS.get(ufunc.__name__)
        if operator is None or method != "__call__" or options:
            name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
            raise TypeError(f"np.{name} computes arrays, not {self!r}; {numpy_advice(ufunc.__name__)}")
        return operator(*operands)

    def __array_function__(
        self, function: Callable[..., Any], kinds: Any, operands: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """NumPy asks here for its other functions, such as np.sum(value): those of shapes work."""
        if function in (np.shape, np.ndim, np.size):
            options = {name: one for name, one in options.items() if name != "a"}
            return function(np.broadcast_to(False, self.shape), *operands[1:], **options)
        name = function.__name__
        raise TypeError(f"np.{name} computes arrays, not {self!r}; {numpy_advice(name)}")

    def __repr__(self) -> str:
        return f"<Value {self.op} {self.name!r} shape={self.shape} dtype={self.dtype}>"

    def __add__(self, other: Operand) -> Value:
        return lowering.elementwise("add", self, other)

    def __radd__(self, other: Operand) -> Value:
        return lowering.elementwise("add", other, self)

    def __sub__(self, other: Operand) -> Value:
        return lowering.elementwise("sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return lowering.elementwise("sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return lowering.elementwise("mul", self, other)

    def __rmul__(self, other: Operand) -> Value:
        return lowering.elementwise("mul", other, self)

    def __truediv__(self, other: Operand) -> Value:
        return lowering.elementwise("div", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return lowering.elementwise("div", other, self)

    def __floordiv__(self, other: Operand) -> Value:
        return lowering.elementwise("floor_divide", self, other)

    def __rfloordiv__(self, other: Operand) -> Value:
        return lowering.elementwise("floor_divide", other, self)

    def __mod__(self, other: Operand) -> Value:
        return lowering.elementwise("remainder", self, other)

    def __rmod__(self, other: Operand) -> Value:
        return lowering.elementwise("remainder", other, self)

    def __pow__(self, other: Operand) -> Value:
        return lowering.power(self, other)

    def __rpow__(self, other: Operand) -> Value:
        return lowering.power(other, self)

    def __matmul__(self, other: Operand) -> Value:
        return lowering.matmul(self, other)

    def __rmatmul__(self, other: Operand) -> Value:
        return lowering.matmul(other, self)

    def __neg__(self) -> Value:
        return lowering.apply("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return lowering.apply("abs", self)

    def __invert__(self) -> Value:
        return lowering.invert(self)

    def __and__(self, other: Operand) -> Value:
        return lowering.bitwise("and", self, other)

    def __rand__(self, other: Operand) -> Value:
        return lowering.bitwise("and", other, self)

    def __or__(self, other: Operand) -> Value:
        return lowering.bitwise("or", self, other)

    def __ror__(self, other: Operand) -> Value:
        return lowering.bitwise("or", other, self)

    def __xor__(self, other: Operand) -> Value:
        return lowering.bitwise("xor", self, other)

    def __rxor__(self, other: Operand) -> Value:
        return lowering.bitwise("xor", other, self)

    def __lshift__(self, other: Operand) -> Value:
        return lowering.elementwise("bitwise_left_shift", self, other)

    def __rlshift__(self, other: Operand) -> Value:
        return lowering.elementwise("bitwise_left_shift", other, self)

    def __rshift__(self, other: Operand) -> Value:
        return lowering.elementwise("bitwise_right_shift", self, other)

    def __rrshift__(self, other: Operand) -> Value:
        return lowering.elementwise("bitwise_right_shift", other, self)

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return lowering.elementwise("equal", self, other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return lowering.elementwise("not_equal", self, other)

    def __lt__(self, other: Operand) -> Value:
        return lowering.elementwise("less", self, other)

    def __le__(self, other: Operand) -> Value:
        return lowering.elementwise("less_equal", self, other)

    def __gt__(self, other: Operand) -> Value:
        return lowering.elementwise("greater", self, other)

    def __ge__(self, other: Operand) -> Value:
        return lowering.elementwise("greater_equal", self, other)

    # Two values are equal only in a run, so that == cannot serve dictionaries.
    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Value:
        """As NumPy: ints, slices, None, Ellipsis, and arrays of integers or bools.

        Lists count as arrays. Indices may be values of the graph; masks are arrays, whose count is
        known (see hg.take_masked).
        """
        if has_arrays(key):
            return gathered(self, key)
        found = with_origin(self.shape, key, invalid)
        part = self
        if found.sizes != self.shape:
            part = lowering.apply("slice", self, start=found.start, stop=found.stop, step=found.step)
        return lowering.reshape(lowering.reverse(part, found.backwards), found.shape)

    def __bool__(self) -> NoReturn:
        self._refuse("truth value", "use hg.where, or & | ~ instead of and, or, not")

    def __iter__(self) -> NoReturn:
        self._refuse("elements to iterate over", "index it: [x[i] for i in range(x.shape[0])]")

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be written to, since values never change; use hg.where for another value with "
            "some elements replaced, or hg.assign for a variable"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a value of shape () has no length")
        return self.shape[0]

    if not TYPE_CHECKING:  # to checkers any name would be there, and `array + value` an array

        def __getattr__(self, name: str) -> NoReturn:
            advice = method_advice(name, dir(type(self)))
            # With `obj=None` Python does not append a suggestion of its own.
            raise AttributeError(f"a value has no attribute {name!r}{advice}", name=name, obj=None)

        def __array__(self, *arguments: Any, **options: Any) -> NoReturn:
            self._refuse("elements", "name it as an output, compile the graph and run the plan")

    def __float__(self) -> NoReturn:
        self._refuse("elements", "name it as an output, compile the graph and run the plan")

    __int__ = __index__ = __complex__ = __float__

    def _refuse(self, what: str, advice: str) -> NoReturn:
        raise TypeError(f"{self!r} has no {what} while the graph is being built; {advice}")

    @property
    def T(self) -> Value:
        """The transpose of a matrix: two dimensions."""
        if self.ndim != 2:
            raise invalid(f".T is for matrices, not {self.type}", "use .mT or hg.permute_dims")
        return lowering.permute(self, (1, 0))

    @property
    def mT(self) -> Value:
        """The last two dimensions exchanged."""
        if self.ndim < 2:
            raise invalid(f".mT needs two dimensions, not {self.type}")
        return lowering.swap_axes(self, self.ndim - 2, self.ndim - 1)

    def reshape(self, *shape: Any) -> Value:
        """The same elements in another shape: x.reshape(2, -1) or x.reshape((2, -1))."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return lowering.reshape(self, sizes)

    def astype(self, target: DTypeArgument) -> Value:
        """The elements as another data type."""
        return lowering.cast(self, dtype(target))

    def sum(self, axis: Axis = None, *, keepdims: bool = False) -> Value:
        """As hg.sum."""
        return lowering.reduce("reduce_sum", lowering.accumulator(self), axis, keepdims)

    def mean(self, axis: Axis = None, *, keepdims: bool = False) -> Value:
        """As hg.mean."""
        return lowering.mean(self, axis, keepdims)

    def max(self, axis: Axis = None, *, keepdims: bool = False) -> Value:
        """As hg.max."""
        return lowering.reduce("reduce_max", self, axis, keepdims)

    def min(self, axis: Axis = None, *, keepdims: bool = False) -> Value:
        """As hg.min."""
        return lowering.reduce("reduce_min", self, axis, keepdims)


#: The operators for an array on the left, by the name of NumPy's ufunc.
_OPERATORS: dict[str, Callable[..., Value]] = {
    "power": lowering.power,
    "matmul": lowering.matmul,
    **{f"bitwise_{name}": partial(lowering.bitwise, name) for name in ("and", "or", "xor")},
    **{
        ufunc: partial(lowering.elementwise, op)
        for ufunc, op in (
            ("add", "add"),
            ("subtract", "sub"),
            ("multiply", "mul"),
            ("divide", "div"),
            ("floor_divide", "floor_divide"),
            ("remainder", "remainder"),
            ("left_shift", "bitwise_left_shift"),
            ("right_shift", "bitwise_right_shift"),
            ("equal", "equal"),
            ("not_equal", "not_equal"),
            ("less", "less"),
            ("less_equal", "less_equal"),
            ("greater", "greater"),
            ("greater_equal", "greater_equal"),
        )
    },
}
