"""`hg.onnx.load` and `Model`: an ONNX model, its inputs and outputs, and graphs of it by shapes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TypeProto, ValueInfoProto

import heliograph as hg
from heliograph.lowerings.importers import check_options, check_session
from heliograph.onnx import checks
from heliograph.onnx.elements import name_of, numpy_dtype, storage_of
from heliograph.onnx.errors import NeedsValue
from heliograph.onnx.importing import Program, build
from heliograph.onnx.plans import OnnxPlan, batches_of
from heliograph.onnx.ports import Spec, TensorSpec, spec_of
from heliograph.onnx.tensors import Tensors

#: The most elements of an input whose values a graph is made for.
MOST_FIXED = 4096
Shapes = Mapping[str, Sequence[int] | int]


@dataclass(frozen=True, slots=True)
class Argument:
    """An input or output of a model, as the model declares it."""

    name: str
    #: As onnxruntime writes it, such as "tensor(float)" or "seq(tensor(int64))".
    type: str
    #: Sizes; a name is a symbol, None is unknown. Empty where the model declares no shape.
    shape: tuple[int | str | None, ...]


class Model:
    """An ONNX model. Made by `hg.onnx.load`; any number of sessions can compile it."""

    def __init__(self, proto: ModelProto, folder: Path | None) -> None:
        self._tensors = Tensors(folder)
        self._proto = proto = self._tensors.take(proto)
        constants = {one.name for one in proto.graph.initializer}
        self._inputs = {one.name: one for one in proto.graph.input if one.name not in constants}

    def __repr__(self) -> str:
        names = ", ".join(self._inputs)
        return f"<Model ({names:.80}) -> ({', '.join(one.name for one in self._proto.graph.output):.80})>"

    @property
    def proto(self) -> ModelProto:
        """The model's message, without the bytes of its large constants."""
        return self._proto

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """The inputs that a run takes."""
        return tuple(_argument(one) for one in self._inputs.values())

    @property
    def outputs(self) -> tuple[Argument, ...]:
        """The outputs that a run gives."""
        return tuple(_argument(one) for one in self._proto.graph.output)

    def graph(self, shapes: Shapes | None = None, values: Mapping[str, Any] | None = None) -> hg.Graph:
        """Return the model as a graph for inputs of these shapes; see `compile`.

        Names that a graph cannot have are replaced.
        """
        specs = self._declared(shapes or {}, values or {})
        try:
            return self.program(specs, values or {}, is_one=True).stages[0].graph
        except NeedsValue as need:
            raise hg.UnsupportedError(
                f"{need.node} needs the elements of {need.name!r:.80} before a run",
                advice=f"give them: values={{name: array}} for {', '.join(sorted(need.inputs)):.200}",
            ) from None

    def compile(
        self,
        session: hg.Session,
        shapes: Shapes | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        batch: Sequence[int] | int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> OnnxPlan:
        """Compile the model for a session.

        Where all shapes are known, the plan is made now, and the weights are uploaded. Otherwise
        the first run with inputs of some shapes makes the plan for them.

        Args:
            shapes: Sizes of symbols by name, as {"batch": 8}, or shapes by the input's name.
            values: Values of inputs that decide shapes, such as the second input of Reshape. A run
                gives them too, and compiles again when they change.
            batch: Sizes that a batch is padded to, such as (1, 8, 32), or one, for models that
                compute each row by itself. The batch is the symbol in dimension 0 of the inputs.
                Runs then share the plans of these sizes; a batch beyond the largest has a plan of
                its own.
            seed: The seed of random numbers of nodes without one of their own, from 0 to 2^63 - 1.
                With it, the n-th run of each plan gives the same numbers. None draws one.
            options: Arguments of `session.compile`, such as devices and memory.

        Raises UnsupportedError and InvalidModelError, naming the node, InvalidArgumentError,
        InvalidInputError for shapes or values that the model cannot have, and the errors of
        `session.compile`.
        """
        check_session(session, "model.compile()")
        check_options(options)
        if seed is not None and not (isinstance(seed, (int, np.integer)) and 0 <= seed < 2**63):
            raise hg.InvalidArgumentError(f"seed is {seed!r:.80}; it must be from 0 to 2^63 - 1")
        batches, is_strict = None, bool(shapes)
        if batch is not None:
            declared = {name: checks.sizes_of(info) for name, info in self._inputs.items()}
            batches = batches_of(batch, declared)
            if batches.symbol is not None:
                shapes = {batches.symbol: batches.sizes[0], **(shapes or {})}
        plan = OnnxPlan(self, session, dict(options), seed, batches)
        specs = self._declared(shapes or {}, values or {}, strict=is_strict)
        if all(name in specs for name in self._inputs):
            try:
                plan.prepare(specs, values or {})
            except NeedsValue as need:
                # The first run has the values.
                self._check_decidable(need, specs, values or {})
        return plan

    # For plans

    def spec(self, feeds: Mapping[str, Any]) -> dict[str, Spec]:
        """Return the specs of a run's inputs. Raises InvalidInputError."""
        if unknown := [name for name in feeds if name not in self._inputs]:
            raise hg.InvalidInputError(
                f"there is no input {unknown[0]!r:.80}", advice=f"inputs: {', '.join(self._inputs):.400}"
            )
        found: dict[str, Spec] = {}
        symbols: dict[str, int] = {}
        for name, info in self._inputs.items():
            if name not in feeds and not info.type.HasField("optional_type"):
                raise hg.InvalidInputError(
                    f"input {name!r:.80} is missing",
                    advice=f"give {_described(info)} for it; given are: {', '.join(feeds) or 'none'}",
                )
            found[name] = spec_of(feeds.get(name), name)
            _check_fit(info, found[name], symbols)
        return found

    def program(
        self, specs: Mapping[str, Spec], values: Mapping[str, Any], *, is_one: bool = False
    ) -> Program:
        """Make the graphs, or only one. Raises NeedsValue for an input that decides a shape."""
        fixed = {name: np.asarray(value) for name, value in values.items()}
        try:
            return build(self._proto, self._tensors, specs, fixed, is_one=is_one)
        except hg.HeliographError:
            raise
        except (TypeError, AttributeError, ValueError, LookupError) as error:
            raise hg.InvalidModelError(f"the model is damaged: {error}") from error

    def build(self, feeds: Mapping[str, Any], fixed: set[str], *, is_one: bool) -> Program:
        """As `program`, for a run. Adds to `fixed` the inputs whose values decide shapes."""
        specs = self.spec(feeds)
        while True:
            values = {name: np.asarray(feeds[name]) for name in fixed}
            try:
                return self.program(specs, values, is_one=is_one)
            except NeedsValue as need:
                fixed.update(self._check_decidable(need, specs, values))

    def _check_decidable(
        self, need: NeedsValue, specs: Mapping[str, Spec], values: Mapping[str, Any]
    ) -> list[str]:
        """Return the inputs whose values decide a shape. Raises UnsupportedError unless they are
        small."""
        missing = sorted(name for name in need.inputs if name not in values)
        if missing and all(_is_small(specs.get(name)) for name in missing):
            return missing
        inputs = ", ".join(map(repr, missing))
        decided = f", and the inputs {inputs} are too large to be fixed" if inputs else ""
        raise hg.UnsupportedError(
            f"{need.node} needs the elements of {need.name!r:.80} before a run{decided}",
            advice="hg.onnx.supported(path) lists the nodes that cannot be run",
        )

    def _declared(self, shapes: Shapes, values: Mapping[str, Any], *, strict: bool = True) -> dict[str, Spec]:
        """Return the specs of the inputs whose shapes are known. Raises InvalidArgumentError, and
        InvalidInputError for one that the model cannot have."""
        for what, given in (("shapes", shapes), ("values", values)):
            if not isinstance(given, Mapping):
                raise hg.InvalidArgumentError(
                    f"{what} must be a mapping by name, not of type {type(given).__name__}"
                )
        symbols = {
            size
            for info in self._inputs.values()
            for size in checks.sizes_of(info) or ()
            if isinstance(size, str)
        }
        if wrong := [
            name
            for name in (*shapes, *values)
            if name not in self._inputs and (name not in symbols or name in values)
        ]:
            known = ", ".join((*self._inputs, *sorted(symbols)))
            raise hg.InvalidArgumentError(
                f"there is no input or symbol {wrong[0]!r:.80}", advice=f"there are: {known:.400}"
            )
        found: dict[str, Spec] = {}
        bound: dict[str, int] = {}
        for name, info in self._inputs.items():
            if name in values:
                found[name] = spec_of(np.asarray(values[name]), name)
                _check_fit(info, found[name], bound)
                continue
            shape = _shape_of(info, shapes)
            element = info.type.tensor_type.elem_type
            if shape is not None and storage_of(element) is not None:
                found[name] = TensorSpec(element, shape)
                _check_fit(info, found[name], bound)
            elif strict:
                raise hg.InvalidArgumentError(
                    f"the shape of input {name!r:.80} is not known: {_argument(info).shape}",
                    advice="give its shape, or the sizes of its symbols: shapes={NAME: SIZES}; on the "
                    "command line --shape NAME=SIZES, or --input NAME=FILE.npy",
                )
        return found


def _shape_of(info: ValueInfoProto, shapes: Shapes) -> tuple[int, ...] | None:
    given = shapes.get(info.name)
    if given is not None:
        sizes = given if isinstance(given, Iterable) else (given,)
        return tuple(_size(one, f"the shape of input {info.name!r:.80}") for one in sizes)
    declared = checks.sizes_of(info)
    if declared is None:
        return None
    found: list[int] = []
    for size in declared:
        number = shapes.get(size) if isinstance(size, str) else size
        if number is None:
            return None
        found.append(_size(number, f"{size!r:.80}"))
    return tuple(found)


def _size(given: Any, what: str) -> int:
    try:
        size = operator.index(given)
    except TypeError:
        size = -1
    if size < 0:
        raise hg.InvalidArgumentError(f"{what} has the size {given!r:.80}; sizes are integers, 0 or more")
    return size


def _described(info: ValueInfoProto) -> str:
    shape = checks.sizes_of(info)
    return f"{_type_text(info.type)} {'of any shape' if shape is None else list(shape)}"


def _is_small(spec: Spec) -> bool:
    return isinstance(spec, TensorSpec) and int(np.prod(spec.shape, dtype=object)) <= MOST_FIXED


def _check_fit(info: ValueInfoProto, spec: Spec, symbols: dict[str, int]) -> None:
    """Check that what a run is given has the declared type. Raises InvalidInputError."""
    if not info.type.HasField("tensor_type"):
        return
    if not isinstance(spec, TensorSpec):
        raise hg.InvalidInputError(
            f"input {info.name!r:.80} is a tensor, and {'None' if spec is None else 'a list'} is given",
            advice=f"give an array of {_described(info)}, as np.asarray(list, dtype) makes one",
        )
    element = info.type.tensor_type.elem_type
    if element and spec.element != element:
        raise hg.InvalidInputError(
            f"input {info.name!r:.80} is of {name_of(element)}, and {name_of(spec.element)} is given",
            advice=f"convert it: array.astype({_numpy_name(element)})" if storage_of(element) else "",
        )
    declared = checks.sizes_of(info)
    if declared is None:
        return
    fits = len(declared) == len(spec.shape)
    for want, size in zip(declared, spec.shape, strict=False):
        wanted = symbols.setdefault(want, size) if isinstance(want, str) else want
        fits = fits and (wanted is None or wanted == size)
    if not fits:
        raise hg.InvalidInputError(
            f"input {info.name!r:.80} has shape {list(declared)}, and {list(spec.shape)} is given"
        )


def _numpy_name(element: int) -> str:
    dtype = numpy_dtype(element)
    return f"{'np' if dtype.isbuiltin == 1 else 'ml_dtypes'}.{dtype.name}"


def _argument(info: ValueInfoProto) -> Argument:
    return Argument(info.name, _type_text(info.type), checks.sizes_of(info) or ())


def _type_text(of: TypeProto) -> str:
    if of.HasField("sequence_type"):
        return f"seq({_type_text(of.sequence_type.elem_type)})"
    if of.HasField("optional_type"):
        return f"optional({_type_text(of.optional_type.elem_type)})"
    if of.HasField("map_type"):
        return f"map({name_of(of.map_type.key_type)},{_type_text(of.map_type.value_type)})"
    if of.HasField("tensor_type"):
        return f"tensor({name_of(of.tensor_type.elem_type)})"
    return "unknown"


def load(source: checks.Source) -> Model:
    """Read an ONNX model from a file, from bytes, or from an `onnx.ModelProto`, which is copied.

    Weights in other files must lie in the model's folder. They are mapped, not copied. Raises
    InvalidModelError, and UnsupportedError for another opset.
    """
    return Model(*checks.read(source))
