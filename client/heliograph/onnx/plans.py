"""`OnnxPlan`: an ONNX model compiled for a session, with a plan for each of the last shapes."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import heliograph as hg
from heliograph._base.kept_plans import MOST_PLANS, KeptPlans
from heliograph.onnx import stages
from heliograph.onnx.elements import Array
from heliograph.onnx.importing import Program
from heliograph.onnx.ports import Known, Port, Spec, TensorSpec, Wire, feed_into, result_of

if TYPE_CHECKING:
    from heliograph.onnx.model import Model

_Key: TypeAlias = tuple[Any, ...]
_Form: TypeAlias = tuple[Any, ...] | None
#: The most forms of arrays that are known.
MOST_FORMS = 1024
#: For each output with a batch, its axis and how many of its places belong to a row.
Cuts: TypeAlias = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The graphs of a model for some shapes, and their plans."""

    program: Program
    #: By stage; None of one without outputs.
    plans: tuple[hg.Plan | None, ...]
    #: Where the outputs have the batch, if it may be padded.
    cuts: Cuts
    #: The variables of the stages, which are freed with the plans.
    stacks: tuple[hg.Tensor, ...] = ()
    #: Held by a run of several stages: stacked results of loops are variables.
    lock: threading.Lock = field(default_factory=threading.Lock)


class OnnxPlan:
    """A model compiled for a session. Made by `model.compile`; thread-safe.

    There is a plan for each combination of shapes. The last `MOST_PLANS` are kept.
    """

    def __init__(
        self,
        model: Model,
        session: hg.Session,
        options: dict[str, Any],
        seed: int | None,
        batches: Batches | None,
    ) -> None:
        self._model = model
        self._session = session
        self._options = options
        self._batches = batches
        #: Runs that are repeated when a device is lost take arrays alone, so a loop is no stage.
        self._is_one = options.get("on_loss") == "rebuild"
        self._lock = threading.Lock()
        #: Of random numbers: the seed, and the numbers of the runs.
        self._seed = secrets.randbits(63) if seed is None else seed
        self._runs = itertools.count()
        self._plans: KeptPlans[Compiled] = KeptPlans(MOST_PLANS)
        #: The inputs whose values decide shapes, as far as that is known.
        self._fixed: set[str] = set()
        #: The key of the plan, its batch and that of the run, by the form of the run's arrays.
        self._forms: dict[_Form, tuple[_Key, int, int]] = {}

    def __repr__(self) -> str:
        return f"<OnnxPlan of {self._model!r}, {len(self._plans)} shapes>"

    @property
    def plans(self) -> tuple[hg.Plan, ...]:
        """The plans that are kept, the last used one at the end."""
        return tuple(plan for one in self._plans.all() for plan in one.plans if plan is not None)

    def run(
        self, feeds: Mapping[str, Any] | None = None, /, *, timeout: float | None = None, **named: Any
    ) -> dict[str, Any]:
        """Run the model and wait for its outputs.

        Args:
            feeds: Arrays by the names of the inputs, here or as keywords. A sequence is a list.
            timeout: Seconds to wait for the run; None means no limit.

        Returns arrays by the names of the outputs. Raises InvalidInputError, UnsupportedError,
        InvalidModelError, and the errors of `session.compile` and of the run.
        """
        if feeds is not None and not isinstance(feeds, Mapping):
            raise hg.InvalidInputError(
                f"the inputs are of type {type(feeds).__name__}",
                advice="give arrays by name: run({name: array})",
            )
        given = {name: _as_arrays(feed) for name, feed in {**(feeds or {}), **named}.items()}
        compiled, given, count = self._prepared(given)
        program = compiled.program
        wires: dict[str, Array] = {}
        for name, port in program.inputs.items():
            feed_into(port, given.get(name), wires)
        if program.random_state is not None:
            wires[program.random_state] = np.array([self._seed, next(self._runs)], np.int64)
        with compiled.lock if len(compiled.plans) > 1 else nullcontext():
            results = stages.run(program.stages, compiled.plans, wires, timeout)
        found = {name: result_of(port, results) for name, port in program.outputs.items()}
        for name, (axis, each) in compiled.cuts.items():
            found[name] = found[name][(slice(None),) * axis + (slice(count * each),)]
        return found

    def prepare(self, specs: Mapping[str, Spec], values: Mapping[str, Any]) -> None:
        """Make the plan for inputs of these specs."""
        program = self._model.program(specs, values, is_one=self._is_one)
        key = _key(specs, {name: np.asarray(value) for name, value in values.items()})
        with self._lock:
            self._fixed.update(values)
        self._keep(key, program, self._cuts(program, specs))

    def _prepared(self, given: dict[str, Any]) -> tuple[Compiled, dict[str, Any], int]:
        """Return the plan for the inputs of a run, these as it takes them, and their batch."""
        # Arrays of a form that was checked before need no check.
        form = None if self._fixed else _form(given)
        if (known := self._forms.get(form)) is not None:
            key, size, count = known
            if (found := self._plans.find(key)) is not None:
                return found, given if self._batches is None else self._batches.longer(given, size), count
        count = size = 0
        if self._batches is not None:
            self._model.spec(given)
            count, size = self._batches.sizes_for(given)
            given = self._batches.longer(given, size)
        key, found = self._compiled(given)
        if form is not None and not self._fixed:
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            self._forms[form] = key, size, count
        return found, given, count

    def _compiled(self, feeds: Mapping[str, Any]) -> tuple[_Key, Compiled]:
        specs = self._model.spec(feeds)
        with self._lock:
            fixed = set(self._fixed)
        key = _key(specs, {name: feeds[name] for name in fixed})
        if (found := self._plans.find(key)) is not None:
            return key, found
        program = self._model.build(feeds, fixed, is_one=self._is_one)
        with self._lock:
            self._fixed |= fixed
            key = _key(specs, {name: feeds[name] for name in self._fixed})
        return key, self._keep(key, program, self._cuts(program, specs))

    def _cuts(self, program: Program, specs: Mapping[str, Spec]) -> Cuts:
        """Find the batch in the outputs, from a second import with one row more."""
        if self._batches is None:
            return {}
        larger, size = dict(specs), 0
        for name in self._batches.inputs - program.fixed.keys():
            spec = specs[name]
            assert isinstance(spec, TensorSpec)
            size = spec.shape[0]
            larger[name] = TensorSpec(spec.element, (size + 1, *spec.shape[1:]))
        return cuts_of(program, self._model.program(larger, program.fixed, is_one=self._is_one), size)

    def _keep(self, key: _Key, program: Program, cuts: Cuts) -> Compiled:
        # A graph needs an output: without one, the host has computed everything.
        stacks: dict[str, hg.Tensor] = {}
        devices = self._options.get("devices")
        device = devices[0] if isinstance(devices, (list, tuple)) else devices
        plans: list[hg.Plan | None] = []
        for one in program.stages:
            for name, (shape, dtype) in one.stacks.items():
                if name not in stacks:
                    stacks[name] = self._session.empty(shape, dtype, device)
            own = {"variables": {name: stacks[name] for name in one.stacks}} if one.stacks else {}
            options = {**self._options, **own}
            plans.append(self._session.compile(one.graph, **options) if one.graph.outputs else None)
        return self._plans.keep(key, Compiled(program, tuple(plans), cuts, tuple(stacks.values())))


def _as_arrays(feed: Any) -> Any:
    if feed is None or isinstance(feed, np.ndarray):
        return feed
    if isinstance(feed, (list, tuple)):
        return [_as_arrays(one) for one in feed]
    return np.asarray(feed)


def _form(feeds: Mapping[str, Any]) -> _Form:
    """Return the data types and shapes of arrays by name; None where these alone do not tell the
    specs."""
    found = []
    for name, feed in feeds.items():
        if not isinstance(feed, np.ndarray) or feed.dtype.hasobject:
            return None
        found.append((name, feed.dtype, feed.shape))
    return tuple(found)


def _key(specs: Mapping[str, Spec], values: Mapping[str, Array]) -> _Key:
    shapes = tuple((name, specs[name]) for name in sorted(specs) if name not in values)
    fixed = tuple(sorted((name, str(one.dtype), one.shape, one.tobytes()) for name, one in values.items()))
    return shapes, fixed


# Padding buckets: runs of any batch use the plans of a few sizes.

#: The most sizes: each may have a plan.
MOST_SIZES = 16


@dataclass(frozen=True, slots=True)
class Batches:
    """The sizes that a batch is padded to, rising, the inputs that have the batch as dimension 0,
    and its symbol, if it has one."""

    sizes: tuple[int, ...]
    inputs: frozenset[str]
    symbol: str | None

    def sizes_for(self, feeds: Mapping[str, Any]) -> tuple[int, int]:
        """Return the batch of the feeds, and the one of the sizes that it is padded to.

        A batch beyond the largest size, or without rows, stays. Raises InvalidInputError.
        """
        counts = {
            name: len(feed) if isinstance(feed, np.ndarray) and feed.ndim else -1
            for name, feed in feeds.items()
            if name in self.inputs
        }
        if len(set(counts.values())) != 1 or -1 in counts.values():
            raise hg.InvalidInputError(
                f"the inputs have batches of {', '.join(f'{n} ({name:.40})' for name, n in counts.items())}",
                advice="all inputs with the batch as dimension 0 need the same one",
            )
        (count,) = set(counts.values())
        return count, next((one for one in self.sizes if one >= count), count) if count else 0

    def longer(self, feeds: dict[str, Any], size: int) -> dict[str, Any]:
        """Return the feeds with their last rows repeated up to a size."""
        return {
            name: _longer(feed, size) if name in self.inputs and len(feed) < size else feed
            for name, feed in feeds.items()
        }


def batches_of(batch: object, shapes: Mapping[str, tuple[int | str | None, ...] | None]) -> Batches:
    """Return the batches of a model whose inputs declare these shapes. `batch`: one size or some.
    Raises InvalidArgumentError."""
    sizes = tuple(batch) if isinstance(batch, (Sequence, Set)) else (batch,)
    if not 0 < len(sizes) <= MOST_SIZES or not all(type(one) is int and one > 0 for one in sizes):
        raise hg.InvalidArgumentError(f"batch is {batch!r:.80}; it must be 1 to {MOST_SIZES} sizes above 0")
    firsts = {name: shape[0] for name, shape in shapes.items() if shape and not isinstance(shape[0], int)}
    symbols = {one for one in firsts.values() if isinstance(one, str)}
    if not firsts or len(symbols) > 1:
        declared = ", ".join(f"{name:.40}: {list(shape or ())}" for name, shape in shapes.items())
        raise hg.InvalidArgumentError(
            f"there is no one batch: no symbol, or several, are dimension 0 of the inputs ({declared:.400})",
            advice="leave batch out: each shape then has a plan of its own",
        )
    return Batches(tuple(sorted(set(sizes))), frozenset(firsts), next(iter(symbols), None))


def _longer(array: Array, size: int) -> Array:
    return np.concatenate([array, np.broadcast_to(array[-1:], (size - len(array), *array.shape[1:]))])


def cuts_of(program: Program, larger: Program, size: int) -> Cuts:
    """Find the batch in the outputs by the shapes for a batch of `size` and for one row more.

    Raises UnsupportedError for an output that a batch decides in another way.
    """
    found: Cuts = {}
    for name, port in program.outputs.items():
        cut = _cut(port, larger.outputs[name], size)
        if cut is None:
            raise hg.UnsupportedError(
                f"output {name!r:.80} depends on the size of the batch, so a padded batch changes it",
                advice="compile the model without batch=...",
            )
        if cut[1]:
            found[name] = cut
    return found


def _cut(port: Port, other: Port, size: int) -> tuple[int, int] | None:
    """Return an output's axis and its places of a row, 0 without a batch; None if that is not
    all."""
    if isinstance(port, Wire) and isinstance(other, Wire):
        pairs = zip(port.spec.shape, other.spec.shape, strict=True)
        changed = [(axis, have, more) for axis, (have, more) in enumerate(pairs) if have != more]
        if not changed:
            return 0, 0
        ((axis, have, more), *rest) = changed
        each = more - have
        return (axis, each) if not rest and each > 0 and have == each * size else None
    if isinstance(port, Known) and isinstance(other, Known):
        return (0, 0) if np.array_equal(port.array, other.array) else None
    return (0, 0) if port is None and other is None else None
