"""Compiling and frees as effects and commands, without any transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph.core.effects import Call, Compute, StartUpload, WaitFor
from heliograph.core.methods import COMPILE, FIND_MISSING
from heliograph.core.protocol import ClientCore
from heliograph.core.shell import Handle
from heliograph.core.sizes import size_of
from heliograph.procedures.compile import Compilation, compile_graph
from heliograph_proto import commands as c
from heliograph_proto.plans import CompileRequest, PlanInfo, PlanOptions
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type

INFO = PlanInfo((), (), (), "d0", 0, 0)


@pytest.fixture
def core() -> ClientCore:
    return ClientCore(Limits())


def bound_graph() -> hg.Graph:
    g = hg.Graph()
    total = g.weight("mine", np.ones(3, np.float32)) + g.bound_weight("theirs", (3,), "f32")
    g.output("y", hg.assign(g.variable("v", (3,), "f32"), total))
    return g


def compilation(bound: dict[int, int] | None = None, **options: Any) -> Compilation:
    """On one device. `bound`: handles of tensors by leaf."""
    tensors = {leaf: Handle(None, handle, owned=False) for leaf, handle in (bound or {}).items()}  # type: ignore[arg-type]
    mine = {name: options.pop(name) for name in ("doubt", "updates") if name in options}
    return Compilation(PlanOptions(("d0",), **options), tensors, **mine)


class Compiling:
    """A compile up to its call, with every command before it answered."""

    def __init__(self, core: ClientCore, graph: hg.Graph, **options: Any) -> None:
        self.core = core
        self.doubts = 0
        how = compilation(doubt=self._doubt, **options)
        self.procedure = compile_graph(core, graph, how, None)
        self.sent: list[c.CommandKind] = []
        self.found: tuple[bytes, ...] = ()
        self.call = self._run_to_the_call()

    def _doubt(self) -> None:
        self.doubts += 1

    def _run_to_the_call(self) -> CompileRequest:
        effect = next(self.procedure)
        while not (isinstance(effect, Call) and effect.method is COMPILE):
            effect = self.procedure.send(self._perform(effect))
        request: CompileRequest = effect.request
        return request

    def _perform(self, effect: object) -> Any:
        match effect:
            case Compute(function):
                return function()
            case Call(method, request) if method is FIND_MISSING:
                self.found = request.digests
                return ()
            case WaitFor():
                taken = self.core.take(10**6)
                self.sent += [one.kind for one in taken]
                self.core.apply(c.CompletionBatch(taken[-1].sequence if taken else 0))
                return None
            case StartUpload():
                raise AssertionError("nothing is missing")
        raise AssertionError(effect)


def test_a_plain_graph_is_compiled_without_a_command(core: ClientCore) -> None:
    g = hg.Graph()
    g.output("y", g.weight("w", np.ones(3, np.float32)) + 1.0)
    compiling = Compiling(core, g, threads=3, fusion=False)
    assert compiling.sent == [] and len(compiling.found) == 1
    assert (compiling.call.options.threads, compiling.call.options.fusion) == (3, False)
    assert (compiling.call.bindings, compiling.call.updates) == ({}, 0)


def test_bound_leaves_are_waited_for_and_not_uploaded(core: ClientCore) -> None:
    compiling = Compiling(core, bound_graph(), bound={1: 70, 2: 71})
    assert compiling.call.bindings == {1: 70, 2: 71} and len(compiling.found) == 1
    assert compiling.sent == [c.GetTensor(70, 0, 0), c.Cancel(0)]
    assert [leaf.digest != b"" for leaf in compiling.call.graph.leaves] == [True, False, False]
    with pytest.raises(StopIteration) as stop:
        compiling.procedure.send(INFO)
    assert stop.value.value.handle == compiling.call.plan and not compiling.doubts


@pytest.mark.parametrize(
    ("error", "doubts"),
    [
        (hg.OutOfMemoryError("no"), 0),
        (hg.InvalidGraphError("no"), 0),
        (hg.DeadlineExceededError("late"), 1),
        (hg.UnavailableError("gone"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_only_an_update_without_an_answer_is_in_doubt(
    core: ClientCore, error: BaseException, doubts: int
) -> None:
    for updates in (0, 5):
        compiling = Compiling(core, bound_graph(), bound={1: 70}, updates=updates)
        with pytest.raises(type(error)):
            compiling.procedure.throw(error)
        assert compiling.doubts == (doubts if updates else 0)


def test_frees_that_matter_come_before_the_next_command(core: ClientCore) -> None:
    core.send(c.Synchronize())
    core.release(5)
    core.release(6)
    core.order_frees()
    core.release(7)
    core.send(c.Memset(9, 0, 1, 0))
    core.release(8)
    kinds = [one.kind for one in core.take(10**6)]
    assert kinds == [c.Synchronize(), c.Free((5, 6, 7)), c.Memset(9, 0, 1, 0), c.Free((8,))]


@pytest.mark.parametrize("ndim", [0, 1, 8])
def test_a_list_of_tensors_is_never_larger_than_it_is_counted(ndim: int) -> None:
    from heliograph_proto.codec import encode_command

    type_ = tensor_type("f32", (2,) * ndim)
    for count in (1, 50):
        tensors = tuple((2**62 + number, type_) for number in range(count))
        kind = c.AllocateTensors(2**62, tensors, "device" * 5, "buffer type" * 5)
        assert encode_command(c.Command(2**62, kind, 2**62)).ByteSize() <= size_of(kind)
