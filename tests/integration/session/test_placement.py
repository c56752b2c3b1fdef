"""Plans over several devices: memory limits, pins, what is copied, and explanations, over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several_devices_fixtures
from daemon_urls import DaemonUrls
from several_devices_fixtures import give_local

import heliograph as hg
from heliograph.demo import find_model
from heliograph.models.minilm import Embedder

#: The last one has memory that no other device reaches.
DEVICES = ("cpu:threads=1", "cpu:threads=1", "cpu:threads=1", "fake:host=0,memory=1MiB")
CPUS = ["cpu0", "cpu1", "cpu2"]
LAYERS = 6
X = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)

daemon_of_several = several_devices_fixtures.daemon_of_several
url = several_devices_fixtures.url
session = several_devices_fixtures.session


def layered(layers: int = LAYERS, rows: int = 8) -> hg.Graph:
    """x through matrix products and softmax, with a weight a layer."""
    g, random = hg.Graph(), np.random.default_rng(7)
    x = g.input("x", (rows, 64), "f32")
    for number in range(layers):
        with g.scope(f"layer{number}"):
            w = g.weight("w", random.standard_normal((64, 64)).astype(np.float32))
            x = hg.ops.soft_max(hg.ops.matmul(x, w, name="product"), name="soft")
    g.output("y", x)
    return g


def device_of(plan: hg.Plan, name: str) -> str:
    return next(node.device for node in plan.explain(10).nodes if node.name == name)


# Where


def test_a_limit_of_memory_spreads_a_graph_and_the_results_are_the_same(session: hg.Session) -> None:
    expected = session.compute(layered(), x=X)["y"]
    plan = session.compile(layered(), CPUS, memory={"cpu0": "70KiB", session.device("cpu1"): 2**16})
    for _ in range(2):
        np.testing.assert_array_equal(plan.run(x=X)["y"], expected)
    assert (
        plan.devices[0] == "cpu0" and plan.device == plan.devices[-1] and plan.splits == len(plan.devices) > 1
    )
    assert f"on {', '.join(plan.devices)}, " in repr(plan)
    assert plan.copied_bytes == 0, "processors read each other's memory"


def test_an_estimate_tells_the_splits_that_a_plan_would_have(session: hg.Session) -> None:
    pins = {"layer0/*": "cpu2", "layer2/*": "cpu1"}
    found = session.estimate(layered(), CPUS, pins=pins).splits
    plan = session.compile(layered(), CPUS, pins=pins)
    explained = plan.explain(10)
    assert [one.device for one in found] == [one.device for one in explained.splits]
    numbers = [tuple(node.number for node in one.nodes) for one in explained.splits]
    assert [one.nodes for one in found] == numbers
    assert sum(one.copied_bytes for one in found) == plan.copied_bytes
    assert len(found) == plan.splits > 1
    (alone,) = session.estimate(layered(), "cpu0").splits
    assert (alone.device, len(alone.nodes)) == ("cpu0", 2 * LAYERS)


def test_pins_are_by_patterns_of_names_or_by_functions_of_nodes(session: hg.Session) -> None:
    def is_last(node: hg.Value) -> bool:
        return node.name.startswith(f"layer{LAYERS - 1}/") and node.op == "matmul"

    plan = session.compile(
        layered(), CPUS, pins={"layer0/*": "cpu2", "layer[12]/*": session.device("cpu1"), is_last: "cpu2"}
    )
    found = [(node.device, node.why) for node in plan.explain().nodes]
    assert found[:6] == [("cpu2", "user")] * 2 + [("cpu1", "user")] * 4 and found[-2] == ("cpu2", "user")
    np.testing.assert_array_equal(plan.run(x=X)["y"], session.compute(layered(), x=X)["y"])


def test_what_is_copied_between_devices_is_told(session: hg.Session) -> None:
    plan = session.compile(layered(), ["cpu0", "fake0"], pins={"layer2/*": "fake0"})
    found = plan.explain()
    assert plan.splits == 3 == len(found.splits) and plan.devices == ("cpu0", "fake0")
    there, back = found.splits[1:]
    assert [(one.name, one.source, one.size_bytes) for one in there.copies] == [
        ("layer1/soft", "cpu0", X.nbytes)
    ]
    assert [(one.name, one.source) for one in back.copies] == [("layer2/soft", "fake0")]
    assert plan.copied_bytes == found.copied_bytes == 2 * X.nbytes
    assert [one.name for one in found.devices] == ["cpu0", "fake0"]
    assert [one.weights_bytes for one in found.devices] == [(LAYERS - 1) * 2**14, 2**14]
    assert found.run_us == 0.0


def test_the_last_run_was_measured(session: hg.Session, tmp_path: Path) -> None:
    plan = session.compile(layered(), ["cpu0", "fake0"], pins={"layer2/*": "fake0"})
    # The fake device computes with other kernels.
    np.testing.assert_allclose(plan.run(x=X)["y"], session.compute(layered(), x=X)["y"], rtol=1e-5)
    found = plan.explain()
    assert all(split.compute_us > 0 for split in found.splits)
    assert all(split.copy_us > 0 for split in found.splits if split.copies)
    # Each reads what the one before it made.
    assert all(one.began_us > before.began_us + before.compute_us for before, one in pairwise(found.splits))
    assert found.run_us == found.splits[-1].ended_us
    found.trace(tmp_path / "trace.json")
    assert '"copies for split 1"' in (tmp_path / "trace.json").read_text()


def test_a_plan_of_one_device_is_explained_too(session: hg.Session) -> None:
    plan = session.compile(layered())
    assert (plan.devices, plan.splits, plan.copied_bytes) == (("cpu0",), 1, 0)
    plan.run(x=X)
    (split,) = plan.explain().splits
    assert len(split.nodes) == 2 * LAYERS and split.compute_us > 0 and split.steps == plan.steps


def test_an_update_keeps_the_devices_and_takes_pins_anew(session: hg.Session) -> None:
    plan = session.compile(layered(), CPUS, pins={"layer0/*": "cpu2"})
    plan.update(layered(3), pins={"layer1/*": "cpu1"}, memory={"cpu2": "1MiB"})
    assert device_of(plan, "layer0/product") == "cpu0" and device_of(plan, "layer1/product") == "cpu1"
    np.testing.assert_array_equal(plan.run(x=X)["y"], session.compute(layered(3), x=X)["y"])
    with pytest.raises(hg.InvalidArgumentError, match="no node matches"):
        plan.update(layered(), pins={"layer9/*": "cpu1"})
    assert len(plan.explain().nodes) == 6


def test_large_inputs_and_outputs_reach_every_device(session: hg.Session) -> None:
    """Larger than what rides in a message."""
    rows = 4096
    x = np.random.default_rng(2).standard_normal((rows, 64)).astype(np.float32)
    g = hg.Graph()
    y = hg.ops.soft_max(g.input("x", x.shape, "f32"), name="soft")
    g.output("y", hg.ops.sum_rows(y, name="sum"))
    g.output("same", y)
    plan = session.compile(g, ["cpu0", "cpu1"], pins={"soft": "cpu1", "sum": "cpu0"})
    expected = session.compute(g, x=x)
    for name, found in plan.run(x=x).items():
        np.testing.assert_array_equal(found, expected[name])


def test_a_freed_plan_and_one_of_a_closed_session_are_not_explained(session: hg.Session) -> None:
    plan = session.compile(layered(1))
    plan.free()
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        plan.explain()
    other = session.compile(layered(1))
    session.close()
    with pytest.raises(hg.SessionClosedError):
        other.explain(10)


def test_asyncio_has_the_same(url: str) -> None:
    async def run() -> tuple[Any, hg.Explanation]:
        async with hg.aio.connect(url) as session:
            devices = [session.device("cpu0"), "fake0"]
            plan = await session.compile(
                layered(), devices, pins={"layer0/*": "fake0"}, memory={devices[1]: "512KiB"}
            )
            assert plan.splits == 2 and plan.copied_bytes == X.nbytes and plan.devices == ("cpu0", "fake0")
            await plan.run(x=X)
            first = await plan.explain(timeout=10)
            await plan.update(layered(), pins={"layer5/*": "fake0"}, memory={"cpu0": "2GiB"})
            return first, await plan.explain()

    first, second = asyncio.run(run())
    assert first.nodes[0].device == second.nodes[-1].device == "fake0" and first.run_us > 0


TEXTS = (
    "",
    "Graphs over several devices.",
    "Of two devices the first is filled; what is left goes to the next.",
)


@pytest.mark.parametrize("limits", [("60MiB", "60MiB"), ("50MiB", "30MiB", "60MiB")])
def test_a_model_over_several_devices_embeds_with_the_same_bits(
    daemon_of_several: DaemonUrls, limits: tuple[str, ...]
) -> None:
    """MiniLM has 90 MB of weights."""
    memory = dict(zip(CPUS, limits, strict=False))
    with hg.connect(daemon_of_several.unix) as session:
        spread = Embedder(session, find_model(), devices=list(memory), memory=memory)
        embeddings = spread.embed(TEXTS)
        assert spread.plan(4, 32).devices == tuple(memory)
    with hg.connect(daemon_of_several.unix) as session:
        np.testing.assert_array_equal(embeddings, Embedder(session, find_model()).embed(TEXTS))


# What is refused


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[hg.Session]:
    give_local(monkeypatch, DEVICES)
    with hg.connect("local:") as made:
        yield made


def nothing(node: hg.Value) -> bool:
    return False


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"layr0/*": "cpu0"}, r"no node matches 'layr0/\*'(.|\n)*near names: 'layer0/"),
        ({"Layer0/*": "cpu0"}, r"no node matches 'Layer0/\*'(.|\n)*'layer0/"),
        ({"layer0/w": "cpu0"}, r"no node matches 'layer0/w'(.|\n)*matches only leaves"),
        ({"~": "cpu0"}, r"no node matches '~'(.|\n)*names are such as"),
        ({"": "cpu0"}, "no node matches ''"),
        ({nothing: "cpu0"}, "no node matches nothing"),
        (
            {"layer0/*": "cpu0", "*/soft": "cpu1"},
            r"'layer0/soft' is pinned to cpu0 by 'layer0/\*' and to cpu1",
        ),
        ({"layer0/*": "cpu2"}, r"cpu2, which is not among(.|\n)*devices=\['cpu0', 'cpu1', 'cpu2'\]"),
        ({"layer0/*": None}, r"pins\['layer0/\*'\] is None"),
        ({3: "cpu0"}, "a key of pins is a pattern, not 3"),
        ([("layer0/*", "cpu0")], "pins is list"),
    ],
)
def test_pins_that_do_not_fit(local: hg.Session, pins: Any, words: str) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=words):
        local.compile(layered(), ["cpu0", "cpu1"], pins=pins)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"cpu0": "1GB"}, r"memory\['cpu0'\] is '1GB'(.|\n)*512MiB"),
        ({"cpu0": -1}, "is -1"),
        ({"cpu0": 2**63}, "is 9223372036854775808"),
        ({"cpu0": 1e9}, "is 1000000000.0"),
        ({"cpu0": True}, "is True"),
        ({"cpu2": 1}, "cpu2, which is not among"),
        ({0: 1}, "a key of memory is 0"),
        ("1GiB", "memory is str"),
    ],
)
def test_limits_that_do_not_fit(local: hg.Session, memory: Any, words: str) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=words):
        local.compile(layered(), ["cpu0", "cpu1"], memory=memory)
    with pytest.raises(hg.InvalidArgumentError, match="names cpu0 twice"):
        local.compile(layered(), "cpu0", memory={"cpu0": 1, local.device("cpu0"): 1})


def test_a_device_that_the_server_lacks_is_an_unknown_device(local: hg.Session) -> None:
    for options in ({"pins": {"*": "gpu7"}}, {"memory": {"gpu7": 1}}):
        with pytest.raises(hg.UnknownDeviceError, match="no device is named 'gpu7'"):
            local.compile(layered(), **options)


def test_the_same_node_may_be_pinned_to_a_device_twice(local: hg.Session) -> None:
    plan = local.compile(layered(), CPUS, pins={"layer0/*": "cpu1", "*/soft": "cpu1"})
    assert device_of(plan, "layer0/soft") == "cpu1"


def test_too_little_memory_is_a_typed_error_and_leaves_nothing(session: hg.Session) -> None:
    free = []
    for _ in range(3):
        with pytest.raises(hg.OutOfMemoryError):
            session.compile(layered(), ["cpu0", "cpu1"], memory={"cpu0": 1000, "cpu1": "10KiB"})
        free.append([device.memory().free_bytes for device in session.devices])
    # The session keeps the contents, which were uploaded with the first.
    assert free[0] == free[1] == free[2]
