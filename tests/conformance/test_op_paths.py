"""By which path a device computes a node: what it says is what its plans do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from backend_graphs import Loaded, Maker, loaded, nothing_left, op_path
from op_cases_all import as_it_is, cases_of, made_of

import heliograph as hg
from heliograph_backends.contract import Device
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import available
from heliograph_backends.cpu.plan import CpuPlan, _DefinitionStep
from heliograph_backends.fake import FakeDevice
from heliograph_backends.reference import PRODUCTS, define
from heliograph_backends.registry import Registry
from heliograph_proto.devices import OpPath
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import DTYPES, TensorType

SEED = 20251121
#: Of each op.
MOST_CASES = 25
KERNEL = OpPath.KERNEL if available() else OpPath.DEFINITION
X, TURNED = TensorType(DTYPES["f32"], (4, 16)), TensorType(DTYPES["f32"], (16, 4))
HALVES = TensorType(DTYPES["f16"], (16, 16))
QUERIES = [
    hg.OpQuery("exp", (X,), X, op_path=True),
    hg.OpQuery("sin", (X,), X, op_path=True),
    hg.OpQuery("matmul", (HALVES, HALVES), HALVES, op_path=True),
    hg.OpQuery("permute", (X,), TURNED, {"axes": (1, 0)}, op_path=True),
    hg.OpQuery("exp", (X,), X),
]
PATHS = [KERNEL, OpPath.DEFINITION, OpPath.BLAS, OpPath.VIEW, OpPath.UNKNOWN]


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**28)) as made:
        yield made


def cases(op: str) -> list[Maker]:
    """Graphs of one node."""
    print(f"seed {SEED}")
    found = list(cases_of(op, np.random.default_rng(SEED)))
    return [made_of(case, as_it_is) for case in found[:: -(-len(found) // MOST_CASES)]]


def taken(it: Loaded) -> OpPath:
    """What a plan of the node does."""
    assert isinstance(it.plan, CpuPlan)
    if it.plan._native:
        return OpPath.KERNEL
    return (
        OpPath.DEFINITION
        if any(isinstance(each, _DefinitionStep) for each in it.plan._steps)
        else OpPath.VIEW
    )


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].group != "source"])
def test_the_path_is_the_one_that_a_plan_takes(op: str, device: CpuDevice) -> None:
    for made in cases(op):
        said = op_path(device, made)
        if 0 in made.graph().nodes[0].type.shape:
            continue  # Nothing is computed, by whatever path.
        with loaded(device, made) as it:
            assert taken(it) is (OpPath.DEFINITION if said is OpPath.BLAS else said), str(
                made.graph().origin(0)
            )


class Recorder:
    """NumPy, and whether it was asked for a product of matrices of floats."""

    def __init__(self) -> None:
        self.multiplied = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if name in ("dot", "inner", "matmul", "tensordot", "vdot"):
            self.multiplied = True
        return found


@pytest.mark.parametrize("op", [op for op in OPS if op != "assign"])
def test_the_definition_takes_products_of_matrices_where_it_says_so(op: str) -> None:
    seen = False
    for made in cases(op):
        graph = made.graph()
        node, result = graph.nodes[0], graph.nodes[0].type
        recorder, out = Recorder(), np.zeros(result.shape, result.dtype.numpy)
        with np.errstate(all="ignore"):
            define(op, node.attributes, recorder)(*made.arrays, out)
        seen = seen or recorder.multiplied
    assert seen is (op in PRODUCTS)


def test_a_client_asks_for_paths(session: hg.Session) -> None:
    assert [one.op_path for one in session.devices[0].query(QUERIES, timeout=10)] == PATHS


def test_a_client_asks_for_paths_with_asyncio(url: str) -> None:
    async def ask() -> list[OpPath]:
        async with hg.aio.connect(url) as session:
            return [one.op_path for one in await session.devices[0].query(QUERIES, timeout=10)]

    assert asyncio.run(ask()) == PATHS


def test_a_device_of_a_member_takes_the_member_s_paths(daemon: Any) -> None:
    with hg.connect(f"local:#remote:url={daemon.tcp.removeprefix('grpc://')}") as session:
        assert [one.op_path for one in session.devices[0].query(QUERIES, timeout=10)] == PATHS


class Without(FakeDevice):
    """A device that lacks an op."""

    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        return "no kernel" if op == "exp" else super().supports_op(op, attributes, operands, result)


def test_what_a_device_cannot_run_has_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(Without()))
    some = TensorType(DTYPES["f32"], (4,))
    queries = [hg.OpQuery(op, (some,), some, op_path=True) for op in ("exp", "neg")]
    with hg.connect("local:") as session:
        refused, taken = session.devices[0].query(queries)
    assert (refused.why_not, refused.op_path) == ("no kernel", OpPath.UNKNOWN)
    assert not taken.why_not and taken.op_path is not OpPath.UNKNOWN


def test_without_kernels_everything_runs_on_the_definition() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**28, native=False)) as device:
        for op in ("exp", "mul_mat", "get_rows"):
            found = {op_path(device, made) for made in cases(op)}
            assert found <= {OpPath.DEFINITION, OpPath.BLAS}


def test_a_device_need_not_tell() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**20, native=False)) as device:
        assert Device.op_path(device, "exp", {}, [X], X) is OpPath.UNKNOWN
