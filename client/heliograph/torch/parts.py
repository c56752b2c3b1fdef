"""Parts of a module that AOTAutograd gives, forward and backward, as plans.

Parameters and buffers that need no gradient become weights, which are uploaded once. One that needs
a gradient, or that changes, becomes a tensor of the session, which is written again after each
change; the backward pass reads the same one. The tensors that a forward part saves for the backward
pass stay on the server, each as a `SavedTensor`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx
from torch.utils.weak import WeakIdKeyDictionary

import heliograph as hg
from heliograph._base.kept_plans import MOST_PLANS, KeptPlans
from heliograph.torch.elements import as_tensor, dtype_name, feed_of, new_seed
from heliograph.torch.errors import refusal
from heliograph.torch.lowering import SEED, Lowering, missing_of
from heliograph.torch.saved import SavedTensor

#: Returns the session of a graph: another one after it was lost, where it can be opened again.
Open: TypeAlias = Callable[[], hg.Session]
#: Errors after which a session cannot be used again.
LOST = (hg.DrainingError, hg.SessionClosedError, hg.UnavailableError)


@dataclass(slots=True, weakref_slot=True)
class _Kept:
    """A parameter as the server has it."""

    #: An alias, so that no other tensor can have the memory, and a change of `.data` is seen.
    alias: torch.Tensor
    version: int
    #: The tensor of the session; None for a weight of the plans.
    remote: hg.Tensor | None = None

    def is_now(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is this one, unchanged."""
        return self.version == _version(tensor) and _place(self.alias) == _place(tensor)


class Shared:
    """The state of the parts of one traced graph: session, options, and parameters.

    Modules of one class may share a graph, so a parameter of the graph may be several tensors, each
    with one of the session. Thread-safe.
    """

    def __init__(self, open_session: Open, options: Mapping[str, Any]) -> None:
        self._open_session = open_session
        self.session = open_session()
        self.options = options
        self.lock = threading.RLock()
        #: False once torch computes the gradients here, where tensors that are saved then belong.
        self.saves = True
        #: The parameters that the server has, each until its tensor is gone.
        self._kept: Any = WeakIdKeyDictionary()
        #: By the name of a parameter the tensor that is, or was, a weight of the plans.
        self._weights: dict[str, weakref.ref[_Kept]] = {}
        #: The device of the plans, once there is one.
        self._device: str | None = None

    def keep_here(self) -> None:
        """Let forward parts return the elements of tensors that they save."""
        self.saves = False

    def reopen(self, lost: hg.Session) -> bool:
        """Take another session in the place of one that is lost; False if there is none.

        Raises the errors of `hg.connect`.
        """
        with self.lock:
            if self.session is lost:
                self.session = self._open_session()
                self._kept.clear()
                self._weights.clear()
                self._device = None
            return self.session is not lost

    def compile(self, graph: hg.Graph) -> hg.Plan:
        """Compile a graph with the options."""
        plan = self.session.compile(graph, **self.options)
        self._device = plan.device
        return plan

    def refresh(self, name: str, tensor: torch.Tensor, *, will_change: bool) -> _Kept:
        """Bring a parameter to the server if it is new or has changed.

        `will_change`: whether a new one is a tensor of the session from the beginning.
        """
        kept: _Kept | None = self._kept.get(tensor)
        if kept is None:
            kept = _Kept(tensor.detach(), _version(tensor))
            if not will_change and name not in self._weights:
                self._weights[name] = weakref.ref(kept)
            else:
                self._put(kept, tensor)
                weight = self._weights[name]() if name in self._weights else None
                if weight is not None and weight.remote is None:
                    # Of several tensors none is a weight, so that all have the same plans.
                    self._put(weight, weight.alias)
            self._kept[tensor] = kept
        elif not kept.is_now(tensor):
            self._put(kept, tensor)
        return kept

    def find(self, tensor: torch.Tensor) -> _Kept | None:
        """Return a parameter that the server has as it is."""
        kept: _Kept | None = self._kept.get(tensor)
        return kept if kept is not None and kept.is_now(tensor) else None

    def _put(self, kept: _Kept, tensor: torch.Tensor) -> None:
        version, feed = _version(tensor), feed_of(tensor)
        if kept.remote is None:
            kept.remote = self.session.put(feed, self._device)
        else:
            kept.remote.set(feed)
        kept.alias, kept.version = tensor.detach(), version


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan of a part for some shapes."""

    plan: hg.Plan | None
    #: The inputs that a run sends or names, by their number.
    inputs: tuple[int, ...]
    #: For each result the name of an output, or what was known before.
    outputs: tuple[Any, ...]
    #: The outputs whose elements the client gets.
    fetched: tuple[str, ...]
    #: The outputs that stay on the server.
    saved: tuple[str, ...]
    #: The results that are an input, by their numbers.
    passed: Mapping[int, int]
    is_random: bool


class Part:
    """A part of a module; thread-safe. Raises UnsupportedError for a node without a rule.

    Args:
        module: The graph.
        shared: The state of the graph's parts.
        stay: The inputs that are parameters and buffers. None: a backward part, whose inputs are
            compared with the forward part's parameters.
        saved: The results that the backward part reads; None for a part without gradients.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        shared: Shared,
        stay: frozenset[str] | None = None,
        saved: range | None = None,
    ) -> None:
        for node in module.graph.nodes:
            if reason := missing_of(node):
                raise refusal(node, reason)
        self._module = module
        self._shared = shared
        self._names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        self._stay = stay
        self._saved = saved
        #: The session of the plans.
        self._session = shared.session
        self._plans: KeptPlans[_Made] = KeptPlans(MOST_PLANS)
        #: The inputs that are weights of the last plan.
        self._weights: frozenset[int] = frozenset()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the part. One that reads no saved tensors runs again if the session was lost."""
        session = self._shared.session
        try:
            return self._call(inputs)
        except LOST:
            has_saved = any(isinstance(one, SavedTensor) for one in inputs)
            if has_saved or not self._shared.reopen(session):
                raise
        except hg.UnknownHandleError:
            raise hg.SessionClosedError(
                "the tensors saved for this backward pass are gone with the session that had them",
                advice="compute the loss again, then call backward()",
            ) from None
        return self._call(inputs)

    def _call(self, inputs: Sequence[Any]) -> list[Any]:
        shared = self._shared
        with shared.lock:
            if self._session is not shared.session:
                self._session, self._weights = shared.session, frozenset()
                self._plans.clear()
            remotes, weights = self._known(inputs)
            if not weights >= self._weights:
                # A weight has changed: the plans so far have its old elements.
                self._plans.clear()
            self._weights = weights
            saved = self._saved if self._saved is not None and shared.saves else range(0)
            key = (*map(_form, inputs), weights, len(saved))
            made = self._plans.find(key) or self._plans.keep(key, self._make(inputs, weights, saved))
            session = self._session
        results = self._run(made, inputs, remotes, session) if made.plan is not None else {}
        outputs = [results.get(one, one) if isinstance(one, str) else one for one in made.outputs]
        for place, number in made.passed.items():
            outputs[place] = inputs[number]
        return outputs

    def _known(self, inputs: Sequence[Any]) -> tuple[dict[int, hg.Tensor], frozenset[int]]:
        """Return the inputs that are tensors of the session, and those that are weights."""
        remotes: dict[int, hg.Tensor] = {}
        weights = set()
        for number, (name, one) in enumerate(zip(self._names, inputs, strict=True)):
            if isinstance(one, SavedTensor):
                remotes[number] = one.remote
                continue
            kept = None
            if isinstance(one, torch.Tensor):
                if self._stay is None:
                    kept = self._shared.find(one)
                elif name in self._stay:
                    will_change = self._saved is not None and one.requires_grad
                    kept = self._shared.refresh(name, one, will_change=will_change)
            if kept is not None and kept.remote is not None:
                remotes[number] = kept.remote
            elif kept is not None:
                weights.add(number)
        return remotes, frozenset(weights)

    def _run(
        self, made: _Made, inputs: Sequence[Any], remotes: Mapping[int, hg.Tensor], session: hg.Session
    ) -> dict[str, torch.Tensor]:
        plan = made.plan
        assert plan is not None
        feeds = {
            f"input_{number}": remotes[number] if number in remotes else feed_of(inputs[number])
            for number in made.inputs
        }
        if made.is_random:
            feeds[SEED] = new_seed()
        if not made.saved:
            return {name: as_tensor(array) for name, array in plan.run(feeds).items()}
        types = [plan.outputs[name] for name in made.saved]
        room = session.empty_many([(one.shape, one.dtype) for one in types], plan.device)
        kept = dict(zip(made.saved, room, strict=True))
        arrays: Any = plan.run(feeds, fetch=made.fetched, out=kept)
        found = {name: as_tensor(arrays[name]) for name in made.fetched}
        return {**found, **{name: SavedTensor(one) for name, one in kept.items()}}

    def _make(self, inputs: Sequence[Any], weights: frozenset[int], saved: range) -> _Made:
        graph = hg.Graph()
        lowering = Lowering(graph)
        items: list[Any] = []
        sent: list[int] = []
        for number, one in enumerate(inputs):
            if not isinstance(one, torch.Tensor):
                items.append(one)
            elif number in weights:
                items.append(lowering.weight(self._names[number], one))
            else:
                items.append(graph.input(f"input_{number}", tuple(one.shape), dtype_name(one.dtype)))
                sent.append(number)
        outputs: list[Any] = lowering.run(self._module, items)
        passed = self._passed(items, outputs, saved)
        kept: dict[int, str] = {}
        fetched: list[str] = []
        for place, result in enumerate(outputs):
            if not isinstance(result, hg.Value) or place in passed:
                continue
            name = f"output_{place}"
            if place in saved:
                # Of several saved results with the same elements one is written.
                outputs[place] = kept.setdefault(result.reference, name)
            else:
                outputs[place] = name
                fetched.append(name)
            if outputs[place] == name:
                graph.output(name, result)
        plan = self._shared.compile(graph) if kept or fetched else None
        is_random = SEED in graph.inputs
        return _Made(
            plan, tuple(sent), tuple(outputs), tuple(fetched), tuple(kept.values()), passed, is_random
        )

    def _passed(self, items: Sequence[Any], outputs: Sequence[Any], saved: range) -> dict[int, int]:
        """Return the saved results that are parameters, of which autograd checks the version."""
        numbers = {
            id(item): number
            for number, item in enumerate(items)
            if isinstance(item, hg.Value) and self._names[number] in (self._stay or ())
        }
        return {place: numbers[id(outputs[place])] for place in saved if id(outputs[place]) in numbers}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _version(tensor: torch.Tensor) -> int:
    # Tensors of the inference mode never change.
    return 0 if tensor.is_inference() else int(tensor._version)


def _form(one: Any) -> Any:
    return (tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one
