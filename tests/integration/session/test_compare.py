"""One graph on two devices: a wrong op is found and named, and nothing is left behind."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_graphs import RandomGraph

import heliograph as hg
from heliograph.cli import main
from heliograph.cli.compare import node_progress
from heliograph.comparison.differences import difference
from heliograph.comparison.units import without_variables
from heliograph.graph.frozen import thaw
from heliograph_backends.contract import Device
from heliograph_backends.registry import open_registry
from heliograph_proto.digests import digest_of
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import DTYPES
from heliograph_server.inprocess import blocking
from heliograph_server.runtime.host import Host

SEED = 20251121
ROWS, WIDTH = 4, 8
Side = tuple[hg.Session, str]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[Device]]:
    """What local: has while a test runs: a right device and a wrong one, of a plugin."""
    registry = open_registry(["cpu:threads=1", "wrong"], ["wrong_backend"])
    key = blocking._Key("")
    shared = blocking._SharedHost(key)
    shared._host, shared.users = Host(registry), 1
    monkeypatch.setitem(blocking._SHARED._hosts, key, shared)
    yield registry.devices
    assert shared.users == 1
    shared.close()


@pytest.fixture
def sides(devices: Sequence[Device]) -> Iterator[tuple[Side, Side]]:
    """The right device and the wrong one, in a session that leaves nothing on either."""
    before = [device.memory().free_bytes for device in devices]
    with hg.connect("local:") as session:
        yield (session, "cpu0"), (session, "wrong0")
        gc.collect()
        session.synchronize(10)
        assert session.statistics().in_flight_bytes == 0
    assert [device.memory().free_bytes for device in devices] == before


def layers(count: int, function: Callable[[hg.Value], hg.Value] = hg.tanh) -> hg.Graph:
    """Equal layers, with views, a variable and a lookup."""
    g, random = hg.Graph(), np.random.default_rng(SEED)
    ids = g.input("ids", (ROWS,), "i32")
    table = g.weight("table", random.standard_normal((5, WIDTH)).astype(np.float32))
    x = hg.ops.get_rows(table, ids, name="embedding")
    state = g.variable("state", (ROWS, WIDTH), "f32")
    for number in range(count):
        with g.scope(f"layer{number}"):
            w = g.weight("w", random.standard_normal((WIDTH, WIDTH)).astype(np.float32))
            x = function(hg.ops.matmul(x, w, name="product").T.reshape(ROWS, WIDTH) + state)
            hg.assign(state, x)
    g.output("y", x * 2.0)
    return g


def verdicts(found: hg.Comparison) -> dict[str, str]:
    return {row.name: row.verdict.value for row in found.rows}


# Node by node


def test_a_device_agrees_with_itself(sides: tuple[Side, Side]) -> None:
    found = hg.compare(layers(2), sides[0], sides[0])
    assert found.ok and found.count(hg.Verdict.OK) == len(found.rows) > 6
    assert {row.difference.different for row in found.rows if row.difference} == {0}


def test_the_wrong_op_is_found_and_named_and_nothing_else(sides: tuple[Side, Side]) -> None:
    found = hg.compare(layers(3), *sides)
    wrong = [row for row in found.rows if row.verdict is hg.Verdict.DIFFERS]
    assert [row.op for row in wrong] == ["tanh"] * 3 and not found.ok
    assert [row.name.partition("/")[0] for row in wrong] == ["layer0", "layer1", "layer2"]
    assert found.count(hg.Verdict.OK) == len(found.rows) - 3
    worst = found.worst(1)[0]
    assert worst.op == "tanh" and worst.difference is not None and worst.difference.nmse > worst.tolerance
    assert "differs" in str(worst) and worst.name in str(worst)


def test_views_and_assignments_are_not_rows(sides: tuple[Side, Side]) -> None:
    ops = {row.op for row in hg.compare(layers(1), *sides).rows}
    assert ops == {"get_rows", "matmul", "add", "tanh", "fill", "mul"}


def test_equal_layers_are_compiled_once(devices: Sequence[Device], sides: tuple[Side, Side]) -> None:
    assert len(hg.compare(layers(9), *sides).rows) == 1 + 9 * 3 + 2
    # The lookup, the product, the sum with a view, tanh, the fill, and the product with it.
    assert devices[1].compiled == 6  # type: ignore[attr-defined]


def test_an_unsupported_op_is_its_own_verdict_and_the_rest_goes_on(sides: tuple[Side, Side]) -> None:
    for pair in (sides, sides[::-1]):
        found = hg.compare(layers(2, hg.cos), *pair)
        rows = [row for row in found.rows if row.verdict is hg.Verdict.UNSUPPORTED]
        assert [row.op for row in rows] == ["cos", "cos"] and found.ok
        assert "no cosine" in rows[0].note and "wrong0" in rows[0].note
        assert found.count(hg.Verdict.OK) == len(found.rows) - 2


def test_what_no_device_computed_is_skipped_behind_it(sides: tuple[Side, Side]) -> None:
    found = hg.compare(layers(1, hg.cos), sides[1], sides[1])
    assert [row.verdict.value for row in found.rows if row.op in ("cos", "mul")] == ["unsupported", "skipped"]


def test_an_op_that_fails_is_its_own_verdict(sides: tuple[Side, Side]) -> None:
    g = hg.Graph()
    g.output("y", hg.ops.get_rows(g.input("x", (3, 2), "f32"), g.input("ids", (1,), "i32")))
    found = hg.compare(g, *sides, inputs={"ids": [7]})
    assert [row.verdict for row in found.rows] == [hg.Verdict.FAILED] and not found.ok
    assert "7" in found.rows[0].note


def test_nan_and_infinities_in_other_places_are_differences(sides: tuple[Side, Side]) -> None:
    x = np.array([np.inf, np.nan, 1.0], np.float32)
    g = hg.Graph()
    g.output("y", hg.tanh(g.input("x", (3,), "f32")))
    (row,) = hg.compare(g, *sides, inputs={"x": x}).rows
    # tanh is 1 and NaN there; a sine is NaN and NaN.
    assert row.difference is not None and row.difference.nan_mismatches == 1


def test_a_tolerance_can_be_given(sides: tuple[Side, Side]) -> None:
    assert hg.compare(layers(2), *sides, tolerance=10.0).ok


def test_the_callback_sees_every_row_and_may_stop(sides: tuple[Side, Side]) -> None:
    seen: list[str] = []

    def on_node(row: hg.ComparedNode) -> bool:
        seen.append(row.name)
        return row.verdict is hg.Verdict.OK

    found = hg.compare(layers(3), *sides, on_node=on_node)
    assert found.stopped and [row.name for row in found.rows] == seen
    assert found.rows[-1].op == "tanh" and found.rows[-1].name.startswith("layer0/")


def test_variables_begin_as_zeros_or_as_given_and_the_sessions_keep_their_own(
    sides: tuple[Side, Side],
) -> None:
    session = sides[0][0]
    g = layers(1)
    with hg.connect("local:") as own:
        plan = own.compile(g, "cpu0")
        plan.run(ids=np.arange(ROWS, dtype=np.int32))
        before = plan.checkpoint()
        assert hg.compare(g, (own, "cpu0"), (session, "cpu0")).ok
        np.testing.assert_array_equal(plan.checkpoint()["state"], before["state"])
    nan = np.full((ROWS, WIDTH), np.nan, np.float32)
    found = hg.compare(g, *sides, variables={"state": nan})
    assert found.ok, "where everything is NaN, a sine is as good"


def test_later_reads_of_a_variable_see_what_was_assigned(sides: tuple[Side, Side]) -> None:
    g = hg.Graph()
    v, x = g.variable("v", (3,), "f32"), g.input("x", (3,), "f32")
    g.output("before", hg.ops.cont(v, name="before"))
    hg.assign(v, x)
    g.output("after", hg.ops.div(x, v, name="after"))
    found = hg.compare(g, *sides, inputs={"x": np.zeros(3, np.float32)}, variables={"v": np.ones(3, "f4")})
    # 0 / 0 is NaN, and 0 / 1 would not be.
    assert found.ok and [row.name for row in found.rows] == ["before", "after"]
    found = hg.compare(g, *sides, nodes="after", inputs={"x": np.zeros(3, np.float32)})
    assert found.ok and found.rows[0].difference is not None


def test_values_that_nothing_needs_any_more_make_room() -> None:
    """Thirty values of a mebibyte, on devices of twelve."""
    g = hg.Graph()
    x = g.input("x", (2**18,), "f32")
    for number in range(30):
        x = hg.tanh(x) if number % 2 else x * g.weight(f"w{number}", np.ones(2**18, np.float32))
    g.output("y", x)
    with hg.connect("local:#cpu:threads=1,memory=12MiB") as session:
        assert session.devices[0].memory().total_bytes == 12 * 2**20
        found = hg.compare(g, session, session)
        assert found.ok and found.count(hg.Verdict.OK) == 30, [str(row) for row in found.worst(3)]


def test_narrow_and_quantized_values_pass_from_node_to_node(sides: tuple[Side, Side]) -> None:
    random = np.random.default_rng(SEED)
    g = hg.Graph()
    blocks = hg.quantize(random.standard_normal((32, 32)).astype(np.float32), "q8_0")
    x, y = g.input("x", (2, 32), "bf16"), g.input("y", (2, 32), "q4_0")
    product = hg.ops.mul_mat(g.weight("w", blocks, dtype="q8_0"), x)
    narrow = hg.ops.cast(hg.tanh(product + hg.ops.cast(y, dtype="f32")), dtype="bf16")
    stored = hg.ops.cast(hg.ops.cast(narrow, dtype="f32"), dtype="q8_0")
    g.output("stored", stored)
    g.output("again", hg.ops.cast(stored, dtype="f32"))
    found = hg.compare(g, *sides)
    assert [row.op for row in found.rows if row.verdict is not hg.Verdict.OK] == ["tanh"]
    types = {row.type.dtype.name for row in found.rows}
    assert types == {"f32", "bf16", "q8_0"} and len(found.rows) == 8
    whole = hg.compare(g, *sides, nodes=lambda value: value.dtype.name == "q8_0")
    (row,) = whole.rows
    assert row.verdict is hg.Verdict.DIFFERS and row.difference is not None and row.difference.nmse < 1


# The whole graph


def test_chosen_nodes_of_the_whole_graph_are_compared(sides: tuple[Side, Side]) -> None:
    found = hg.compare(layers(2), *sides, nodes=["layer1/product", "embedding"])
    assert verdicts(found) == {"embedding": "ok", "layer1/product": "differs"}
    assert hg.compare(layers(2), sides[0], sides[0], nodes="*").ok


def test_nodes_can_be_chosen_by_a_function(sides: tuple[Side, Side]) -> None:
    found = hg.compare(layers(2), *sides, nodes=lambda value: value.op == "tanh")
    assert [row.op for row in found.rows] == ["tanh", "tanh"] and not found.ok


def test_a_pattern_that_matches_nothing_is_refused_with_near_names(sides: tuple[Side, Side]) -> None:
    with pytest.raises(hg.InvalidArgumentError) as caught:
        hg.compare(layers(1), *sides, nodes="layer7/product")
    assert "layer0/product" in caught.value.advice


# Inputs


def test_seeded_inputs_are_the_same_again_and_indices_are_in_range(sides: tuple[Side, Side]) -> None:
    """Four ids into five rows; and each of the ops that look up."""
    rows = [hg.compare(layers(1), *sides, seed=seed).rows for seed in (3, 3, 4)]
    assert rows[0] == rows[1] != rows[2]
    g = hg.Graph()
    x, ids = g.input("x", (2, 3, 4), "f32"), g.input("ids", (2, 2), "i64")
    experts, chosen = g.input("experts", (3, 5, 4), "f32"), g.input("chosen", (2, 2), "i32")
    g.output("taken", hg.ops.get_rows(x, ids.reshape(2, 2)))
    g.output("put", hg.ops.set_rows(x, g.input("rows", (2, 2, 4), "f32"), ids))
    g.output("routed", hg.ops.mul_mat_id(experts, x[:, :1], chosen))
    g.output("biased", hg.ops.add_id(g.input("a", (2, 2, 4), "f32"), x[0], chosen.astype("i32")))
    for seed in range(5):
        found = hg.compare(g, *sides, seed=seed)
        assert found.ok, f"seed {seed}: {[str(row) for row in found.worst(3)]}"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"idz": [0] * ROWS}, "did you mean 'ids'"),
        ({"ids": np.zeros(ROWS, np.float32)}, "i32"),
        ({"ids": np.zeros(ROWS + 1, np.int32)}, "shape"),
    ],
)
def test_wrong_inputs_are_refused(inputs: dict[str, Any], words: str, sides: tuple[Side, Side]) -> None:
    with pytest.raises(hg.InvalidInputError, match=words):
        hg.compare(layers(1), *sides, inputs=inputs)


def test_what_is_no_device_is_refused(sides: tuple[Side, Side]) -> None:
    session = sides[0][0]
    with pytest.raises(hg.UnknownDeviceError, match="cpu7"):
        hg.compare(layers(1), session, (session, "cpu7"))
    with pytest.raises(hg.InvalidArgumentError, match="no device to compare on"):
        hg.compare(layers(1), session, "local:")  # type: ignore[arg-type]
    with pytest.raises(hg.InvalidArgumentError, match="is no graph"):
        hg.compare(None, *sides)  # type: ignore[arg-type]


# Over the wire


def test_a_daemon_agrees_with_this_process(url: str) -> None:
    """Every device here is a CPU: bit by bit."""
    with hg.connect(url) as there, hg.connect("local:") as here:
        found = hg.compare(layers(2), here, there)
        assert found.ok, [str(row) for row in found.worst(3)]
        assert hg.compare(layers(2), here, there, nodes=["*"]).ok


# Without state


@pytest.mark.parametrize("seed", range(12))
def test_a_graph_without_its_variables_computes_the_same(seed: int) -> None:
    """And its units, one after another, as well: random graphs, with assignments and views before them."""
    made = RandomGraph(seed)
    leaves = [
        replace(leaf, digest=digest_of(array.tobytes()) if leaf.digest else b"")
        for leaf, array in zip(made.leaves, made.arrays, strict=True)
    ]
    frozen = replace(made.graph(), leaves=tuple(leaves))
    contents = {leaf.digest: array for leaf, array in zip(leaves, made.arrays, strict=True) if leaf.digest}
    given = {
        kind: {one.name: array for one, array in zip(leaves, made.arrays, strict=True) if one.kind is kind}
        for kind in LeafKind
    }
    inputs, variables = given[LeafKind.INPUT], given[LeafKind.VARIABLE]
    with hg.connect("local:#cpu:threads=1") as session:
        plan = session.compile(thaw(frozen, contents))
        for name, tensor in plan.variables.items():
            tensor.set(variables[name])
        expected = plan.run(inputs)
        found = session.compile(thaw(without_variables(frozen), contents)).run({**inputs, **variables})
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], f"seed {seed}, output {name}")
        again = hg.compare(thaw(frozen, contents), session, session, inputs, variables=variables)
        assert again.ok and not again.count(hg.Verdict.SKIPPED), f"seed {seed}: {again}"


# Numbers


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16", "i64", "u8", "bool", "q8_0"])
def test_equal_elements_have_no_difference(name: str) -> None:
    dtype = DTYPES[name]
    raw = np.random.default_rng(SEED).integers(0, 2, 8 * dtype.block_bytes, np.uint8).view(dtype.storage)
    found = difference(raw, raw.copy(), dtype)
    assert found.within(0.0) and found.nmse == found.max_difference == found.different == 0


def test_differences_are_what_they_are() -> None:
    a = np.array([1.0, 2.0, np.nan, np.inf, -np.inf, 3.0])
    b = np.array([1.0, 2.5, np.nan, np.inf, np.inf, np.nan])
    found = difference(a, b, DTYPES["f64"])
    assert found.nmse == 0.25 / 5 and found.max_difference == 0.5
    assert (found.different, found.nan_mismatches, found.infinity_mismatches) == (3, 1, 1)
    assert not found.within(1.0)
    large = np.array([2**53], np.int64)
    assert not difference(large, large + 1, DTYPES["i64"]).within(0.0)
    assert not difference(np.array([1e300]), np.array([-1e300]), DTYPES["f64"]).within(1e3)


# The command line


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.hgraph"
    hg.save(layers(2), path)
    return str(path)


def test_the_command_finds_and_names_the_wrong_op(
    file: str, devices: Sequence[Device], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--a", "local:#cpu0", "--b", "local:#wrong0", file]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "tanh" in printed[1] and "differs" in printed[1] and "tanh" in printed[2]
    assert printed[-1] == "local:#cpu0 and local:#wrong0: 7 ok, 2 differs"
    assert main(["compare", "--a", "local:", "--b", "local:#cpu0", "-v", file]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 9 + 1


def test_the_command_prints_json(
    file: str, devices: Sequence[Device], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "--a", "local:#cpu0", "--b", "local:#wrong0", file, "--json"]
    assert main([*command, "--nodes", "layer1/*"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and {row["name"].partition("/")[0] for row in found["nodes"]} == {"layer1"}
    assert main([*command, "--nodes", "nothing"]) == 1
    assert "no node matches 'nothing'" in capsys.readouterr().err


def test_progress_shows_how_far_it_is(sides: tuple[Side, Side]) -> None:
    console = pytest.importorskip("rich.console")
    shown = io.StringIO()
    with node_progress(3, console.Console(file=shown, force_terminal=True, width=80)) as on_node:
        found = hg.compare(layers(1), sides[0], sides[0], on_node=on_node)
    assert "comparing" in shown.getvalue() and "3/3" in shown.getvalue()
    assert found.rows[-1].name in shown.getvalue()
