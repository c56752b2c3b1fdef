"""`torch.compile(module, backend="heliograph")`: each part of a traced module is a plan.

AOTAutograd gives each part as a graph of Core ATen, forward and backward, whose inputs are the
tensors of a call. `parts` runs them.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.fx

import heliograph as hg
from heliograph.lowerings.importers import check_options, check_session
from heliograph.torch.exporting import decompositions
from heliograph.torch.parts import LOST, Open, Part, Shared
from heliograph.torch.saved import SavedTensor, saved_outputs

Compiled: TypeAlias = Callable[..., Any]

_lock = threading.Lock()
_sessions: dict[str | None, hg.Session] = {}


def backend(session: hg.Session, **options: Any) -> Compiled:
    """Return a backend for torch.compile that runs on a session's devices.

        compiled = torch.compile(module, backend=hg.torch.backend(session))

    `options`: arguments of `session.compile`, such as devices and memory. Parameters and buffers
    are uploaded once, and again after a change. Gradients are computed on the devices too, where
    all ops of the backward pass have rules; else torch computes them here, with a warning. Tensors
    that are saved for the backward pass stay on the server until the autograd graph is freed; with
    on_loss="rebuild" they come back and are sent again, so that runs can be repeated.
    """
    check_session(session, "hg.torch.backend()")
    return _backend(lambda: session, options)


def _backend(open_session: Open, options: Mapping[str, Any]) -> Compiled:
    check_options(options)

    def compiled(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        passes = _Passes(open_session, options)
        made: Compiled = aot_autograd(
            fw_compiler=passes.forward,
            bw_compiler=passes.backward,
            inference_compiler=passes.inference,
            # It saves fewer tensors than the default: parameters in place of their transposed copies.
            partition_fn=min_cut_rematerialization_partition,
            decompositions=decompositions,
        )(module, examples)
        return made

    return compiled


class _Passes:
    """The passes of one graph of Dynamo's, which share parameters on the server."""

    def __init__(self, open_session: Open, options: Mapping[str, Any]) -> None:
        self._shared = Shared(open_session, options)
        self._is_kept = options.get("on_loss") != "rebuild"

    def inference(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        return _boxed(Part(module, self._shared, _stay(module)))

    def forward(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        saved = saved_outputs(_outputs(module)) if self._is_kept else range(0)
        return _boxed(Part(module, self._shared, _stay(module), saved))

    def backward(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        try:
            return _boxed(Part(module, self._shared))
        except hg.UnsupportedError as error:
            warnings.warn(f"torch computes the gradients here: {error.message}", stacklevel=2)
        self._shared.keep_here()

        def run(inputs: Sequence[Any]) -> list[Any]:
            return list(module(*(one.elements() if isinstance(one, SavedTensor) else one for one in inputs)))

        return _boxed(run)


def compile_part(
    module: torch.fx.GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Compiled:
    """The backend "heliograph" of torch.compile.

    `options`: "server" is the URL of a server, as for `hg.connect`; without it, HELIOGRAPH_SERVER
    counts. The others are arguments of `session.compile`. A session that is lost is opened again,
    once for each call, and the parameters are uploaded again.
    """
    given = dict(options or {})
    url = given.pop("server", None)
    made: Compiled = _backend(partial(session_of, url), given)(module, examples)
    return made


def session_of(url: str | None) -> hg.Session:
    """Return the session of this process with a server, which is closed when the process ends.

    None: the server that HELIOGRAPH_SERVER names. A session that is lost is opened again. Raises
    the errors of `hg.connect`.
    """
    with _lock:
        kept = _sessions.get(url)
        if kept is not None and _is_alive(kept):
            return kept
        if kept is not None:
            with suppress(hg.HeliographError):
                kept.close()
        elif not _sessions:
            atexit.register(_close)
        _sessions[url] = hg.connect() if url is None else hg.connect(url)
        return _sessions[url]


def _is_alive(session: hg.Session) -> bool:
    try:
        session.server_traffic()
    except LOST:
        return False
    return True


def _close() -> None:
    for session in _sessions.values():
        session.close()
    _sessions.clear()


def _stay(module: torch.fx.GraphModule) -> frozenset[str]:
    """Return the names of the inputs that are parameters and buffers."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    numbers = frozenset(getattr(metadata, "static_input_indices", ()) or ())
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(name for number, name in enumerate(names) if number in numbers)


def _outputs(module: torch.fx.GraphModule) -> int:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return len(output.args[0])


def _boxed(part: Callable[[Sequence[Any]], list[Any]]) -> Compiled:
    """Return a part as a function of a list, which it empties so that torch can free the tensors."""

    def call(inputs: list[Any]) -> list[Any]:
        given = list(inputs)
        inputs.clear()
        return part(given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
