"""Where results lie in memory, as explanations tell it: over every transport, on several devices, divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import several_devices_fixtures
from forked_daemons import running_daemon

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


@pytest.mark.parametrize("is_daemon", [True, False], ids=["head", "own process"])
def test_each_device_of_each_member_has_its_memory(tmp_path: Path, *, is_daemon: bool) -> None:
    devices = ("--device", "cpu:threads=1", "--device", "fake:host=0,memory=1MiB")
    with running_daemon(*devices) as left, running_daemon(*devices) as right:
        remote = [word for url in (left, right) for word in ("--device", f"remote:url={url}")]
        with running_daemon("--device", "cpu:threads=1", *remote) as head:
            check_members(head if is_daemon else [left, right], tmp_path)


def check_members(where: str | list[str], folder: Path) -> None:
    """A plan over two members with two devices each tells the memory of all four."""
    with hg.connect(where) as session:
        names = [one.name for one in session.devices if "/" in one.name]
        assert len(names) == 4
        pins = {f"layer{number}/*": name for number, name in enumerate(names)}
        plan = session.compile(layered(4), names, pins=pins, fusion=False)
        plan.run(x=X)
        found = plan.explain()
        check(found)
        assert {found.blocks[one.block].device for one in found.stored} == set(names)
        lies = {(found.blocks[one.block].device, one.name): one for one in found.stored}
        steps = []
        for number, name in enumerate(names):
            product = lies[name, f"layer{number}/product"]
            steps.append(product.first_step)
            assert product.size_bytes == X.nbytes
            if number:
                # The value from the device before, be it of another host or of the same one.
                before = lies[name, f"layer{number - 1}/sine"]
                assert before.first_step <= product.first_step
        assert steps == sorted(set(steps))
        # Each split has steps of its own, and each device the bytes of its blocks.
        assert [split.memory_steps for split in found.splits] == [2, 2, 2, 2]
        for one in found.devices:
            blocks = sum(block.size_bytes for block in found.blocks if block.device == one.name)
            assert blocks == one.compute_bytes
        found.memory_svg(folder / "memory.svg")
        svg = (folder / "memory.svg").read_text()
        assert all(f"{name}, between splits" in svg or f"{name}, results" in svg for name in names)
        found.html(folder / "plan.html")
        assert "does not tell" not in (folder / "plan.html").read_text()


def test_a_plan_without_intermediate_results_has_an_empty_picture(
    session: hg.Session, tmp_path: Path
) -> None:
    g = hg.Graph()
    g.output("y", hg.ops.sin(g.input("x", (4,), "f32")))
    found = session.compile(g).explain()
    assert found.blocks == found.stored == ()
    found.memory_svg(tmp_path / "memory.svg")
