"""`torch.compile(module, backend="heliograph")`: each part of a traced module is a plan.

AOTAutograd gives each part as a graph of Core ATen whose inputs are the tensors of a call, the
parameters and buffers among them. These become weights, which are uploaded once. One that changes
becomes a tensor of the session, which is written again after each change.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx

import heliograph as hg
from heliograph._base.kept_plans import MOST_PLANS, KeptPlans
from heliograph.torch.elements import as_tensor, dtype_name, feed_of, new_seed
from heliograph.torch.errors import refusal
from heliograph.torch.exporting import decompositions
from heliograph.torch.lowering import SEED, Lowering, missing_of

Compiled: TypeAlias = Callable[..., Any]

_lock = threading.Lock()
_sessions: dict[str | None, hg.Session] = {}


def backend(session: hg.Session, **options: Any) -> Compiled:
    """Return a backend for torch.compile that runs on a session's devices.

        compiled = torch.compile(module, backend=hg.torch.backend(session))

    `options`: arguments of `session.compile`, such as devices and memory. Parameters and buffers
    are uploaded once, and again after a change. Gradients are computed on the devices too, where
    all ops of the backward pass have rules; else torch computes them here, with a warning.
    """
    from torch._dynamo.backends.common import aot_autograd

    def forward(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        return _boxed(_Part(module, session, options, _stay(module, examples)))

    def backward(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        try:
            return _boxed(_Part(module, session, options, frozenset()))
        except hg.UnsupportedError as error:
            warnings.warn(f"torch computes the gradients here: {error.message}", stacklevel=2)
            return _boxed(lambda inputs: list(module(*inputs)))

    made: Compiled = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=forward, decompositions=decompositions
    )
    return made


def compile_part(
    module: torch.fx.GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Compiled:
    """The backend "heliograph" of torch.compile.

    `options`: "server" is the URL of a server, as for `hg.connect`; without it, HELIOGRAPH_SERVER
    counts. The others are arguments of `session.compile`.
    """
    given = dict(options or {})
    made: Compiled = backend(session_of(given.pop("server", None)), **given)(module, examples)
    return made


def session_of(url: str | None) -> hg.Session:
    """Return the session of this process with a server, which is closed when the process ends.

    None: the server that HELIOGRAPH_SERVER names.
    """
    with _lock:
        if url not in _sessions:
            if not _sessions:
                atexit.register(_close)
            _sessions[url] = hg.connect() if url is None else hg.connect(url)
        return _sessions[url]


def _close() -> None:
    for session in _sessions.values():
        session.close()
    _sessions.clear()


def _stay(module: torch.fx.GraphModule, examples: Sequence[Any]) -> frozenset[int]:
    """Return which inputs are parameters and buffers."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    return frozenset(getattr(metadata, "static_input_indices", ()) or ())


def _boxed(part: Callable[[Sequence[Any]], list[Any]]) -> Compiled:
    """Return a part as a function of a list, which it empties so that torch can free the tensors."""

    def call(inputs: list[Any]) -> list[Any]:
        given = list(inputs)
        inputs.clear()
        return part(given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@dataclass(slots=True)
class _Kept:
    """A parameter as the server has it."""

    #: Kept, so that no other tensor can have its memory.
    tensor: torch.Tensor
    version: int
    #: The tensor of the session, of one that has changed.
    remote: hg.Tensor | None = None

    def is_same(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is this one, at any version."""
        return _place(self.tensor) == _place(tensor)


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan of a part for some shapes."""

    plan: hg.Plan | None
    #: The inputs that a run sends or names, by their number.
    inputs: tuple[int, ...]
    #: For each result the name of an output, or what was known before.
    outputs: tuple[Any, ...]
    computed: frozenset[str]
    is_random: bool


class _Part:
    """A part of a module; thread-safe. Raises UnsupportedError for a node without a rule."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        session: hg.Session,
        options: Mapping[str, Any],
        stay: frozenset[int],
    ) -> None:
        for node in module.graph.nodes:
            if reason := missing_of(node):
                raise refusal(node, reason)
        self._module = module
        self._session = session
        self._options = options
        self._stay = set(stay)
        self._kept: dict[int, _Kept] = {}
        self._lock = threading.RLock()
        self._plans: KeptPlans[_Made] = KeptPlans(MOST_PLANS)
        #: The device of the plans, once there is one.
        self._device: str | None = None

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        with self._lock:
            weights = self._refresh(inputs)
            key = (*map(_form, inputs), weights)
            made = self._plans.find(key) or self._plans.keep(key, self._make(inputs, weights))
            remotes = {number: self._kept[number].remote for number in self._stay - weights}
        results: dict[str, Any] = {}
        if made.plan is not None:
            feeds = {
                f"input_{number}": remotes[number] if number in remotes else feed_of(inputs[number])
                for number in made.inputs
            }
            if made.is_random:
                feeds[SEED] = new_seed()
            results = made.plan.run(feeds)
        return [
            as_tensor(results[one]) if isinstance(one, str) and one in made.computed else one
            for one in made.outputs
        ]

    def _refresh(self, inputs: Sequence[Any]) -> frozenset[int]:
        """Bring changed parameters to the server. Returns those that have never changed."""
        for number in self._stay:
            tensor = inputs[number]
            version = _version(tensor)
            kept = self._kept.get(number)
            if kept is None:
                self._kept[number] = _Kept(tensor, version)
            elif not kept.is_same(tensor) or kept.version != version:
                self._change(number, kept, tensor, version)
        return frozenset(number for number in self._stay if self._kept[number].remote is None)

    def _change(self, number: int, kept: _Kept, tensor: torch.Tensor, version: int) -> None:
        if kept.remote is None:
            kept.remote = self._session.put(feed_of(tensor), self._device)
            # The plans so far have it as a weight.
            self._plans.clear()
        else:
            kept.remote.set(feed_of(tensor))
        kept.tensor, kept.version = tensor, version

    def _make(self, inputs: Sequence[Any], weights: frozenset[int]) -> _Made:
        graph = hg.Graph()
        lowering = Lowering(graph)
        names = [node.name for node in self._module.graph.nodes if node.op == "placeholder"]
        items: list[Any] = []
        sent: list[int] = []
        for number, one in enumerate(inputs):
            if not isinstance(one, torch.Tensor):
                items.append(one)
            elif number in weights:
                items.append(lowering.weight(names[number], one))
            else:
                items.append(graph.input(f"input_{number}", tuple(one.shape), dtype_name(one.dtype)))
                sent.append(number)
        results = lowering.run(self._module, items)
        outputs: list[Any] = []
        for number, result in enumerate(results):
            if isinstance(result, hg.Value):
                graph.output(f"output_{number}", result)
                outputs.append(f"output_{number}")
            else:
                outputs.append(result)
        computed = frozenset(graph.outputs)
        plan = self._session.compile(graph, **self._options) if computed else None
        self._device = self._device if plan is None else plan.device
        return _Made(plan, tuple(sent), tuple(outputs), computed, SEED in graph.inputs)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _version(tensor: torch.Tensor) -> int:
    # Tensors of the inference mode never change.
    return 0 if tensor.is_inference() else int(tensor._version)


def _form(one: Any) -> Any:
    return (tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one
