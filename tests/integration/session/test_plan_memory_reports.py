"""Where results lie in memory, as explanations tell it: over every transport, on several devices, divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import several_devices_fixtures

import heliograph as hg

#: The last one has memory that no other device reaches.
DEVICES = ("cpu:threads=1", "cpu:threads=2", "fake:host=0,memory=1MiB")
X = np.ones((32, 64), np.float32)

daemon_of_several = several_devices_fixtures.daemon_of_several
url = several_devices_fixtures.url
session = several_devices_fixtures.session


def layered(layers: int = 3) -> hg.Graph:
    """Products, and sines, which share no kernel with them."""
    g = hg.Graph()
    x = g.input("x", X.shape, "f32")
    for number in range(layers):
        with g.scope(f"layer{number}"):
            w = g.weight("w", np.eye(64, dtype=np.float32))
            x = hg.ops.sin(hg.ops.matmul(x, w, name="product"), name="sine")
    g.output("y", x)
    return g


def check(found: hg.Explanation) -> None:
    """No two values lie on common bytes in a common step, and all lie in their blocks."""
    for place, one in enumerate(found.stored):
        assert one.offset_bytes + one.size_bytes <= found.blocks[one.block].size_bytes
        for other in found.stored[:place]:
            apart = one.block != other.block or (
                one.offset_bytes + one.size_bytes <= other.offset_bytes
                or other.offset_bytes + other.size_bytes <= one.offset_bytes
                or one.last_step < other.first_step
                or other.last_step < one.first_step
            )
            assert apart, (one, other)


def test_a_plan_on_one_device_tells_its_memory(session: hg.Session) -> None:
    plan = session.compile(layered(), fusion=False)
    found = plan.explain()
    check(found)
    assert sum(block.size_bytes for block in found.blocks) == found.devices[0].compute_bytes
    # The last sine is an output, which has memory of its own.
    names = [one.name for one in found.stored]
    assert names == ["layer0/product", "layer0/sine", "layer1/product", "layer1/sine", "layer2/product"]
    assert [split.memory_steps for split in found.splits] == [6]


def test_splits_follow_each_other_and_have_memory_between_them(session: hg.Session, tmp_path: Path) -> None:
    pins = {"layer1/*": "fake0"}
    plan = session.compile(layered(), ["cpu0", "fake0"], pins=pins, fusion=False)
    plan.run(x=X)
    found = plan.explain()
    check(found)
    assert [split.memory_steps for split in found.splits] == [2, 2, 2]
    used = {
        (found.blocks[one.block].device, str(found.blocks[one.block].use), one.name) for one in found.stored
    }
    assert ("fake0", "results", "layer1/product") in used
    # What leaves a split, and its copy on the other device.
    assert {("cpu0", "between splits", "layer0/sine"), ("fake0", "between splits", "layer0/sine")} <= used
    product = next(one for one in found.stored if one.name == "layer1/product")
    assert 2 <= product.first_step <= product.last_step <= 3
    found.memory_svg(tmp_path / "memory.svg")
    found.trace(tmp_path / "trace.json")
    assert "memory of fake0" in (tmp_path / "trace.json").read_text()


def test_parts_of_divided_weights_have_their_memory(session: hg.Session) -> None:
    split = {"layer0/w": hg.SplitBufferType("cpu0", {"cpu0": 0.5, "cpu1": 0.5})}
    plan = session.compile(layered(), ["cpu0", "cpu1"], split=split)
    plan.run(x=X)
    found = plan.explain()
    check(found)
    assert found.stored and max(one.last_step for one in found.stored) < sum(
        split.memory_steps for split in found.splits
    )


def test_a_plan_without_intermediate_results_has_an_empty_picture(
    session: hg.Session, tmp_path: Path
) -> None:
    g = hg.Graph()
    g.output("y", hg.ops.sin(g.input("x", (4,), "f32")))
    found = session.compile(g).explain()
    assert found.blocks == found.stored == ()
    found.memory_svg(tmp_path / "memory.svg")
