"""Taps over every transport: nodes and their order, pauses, early ends, and variants of plans."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from asyncio_tests import run_with_plan

import heliograph as hg
from heliograph.core.methods import COMPILE
from heliograph.procedures.taps import MOST_VARIANTS, TappedNode
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry, open_registry
from heliograph_proto.errors import ComputeFailedError

X = np.random.default_rng(5).standard_normal((4, 8)).astype(np.float32)
LAYERS = 4
SECONDS = 10.0

Array = np.ndarray[Any, Any]


def layered() -> hg.Graph:
    """x through layers of a product, a sum and an activation, which share kernels without
    taps."""
    g, random = hg.Graph(), np.random.default_rng(7)
    x = g.input("x", (4, 8), "f32")
    for number in range(LAYERS):
        with g.scope(f"layer{number}"):
            w = g.weight("w", random.standard_normal((8, 8)).astype(np.float32) / 3)
            x = hg.gelu(x @ w + 0.5)
    g.output("y", x)
    return g


def names_of(graph: hg.Graph) -> list[str]:
    return [one.name for one in graph.find("*") if one.op not in ("input", "weight", "variable")]


def values_alone(session: hg.Session, graph: hg.Graph, x: Array) -> dict[str, Array]:
    """Every node as an output of its own plan, without fusion."""
    for name in names_of(graph):
        graph.output(name, graph.find(name)[0])
    return dict(session.compile(graph, fusion=False).run(x=x))


@pytest.fixture
def plan(session: hg.Session) -> hg.Plan:
    return session.compile(layered())


# Values


def test_the_values_of_named_nodes_come_while_the_run_goes_on(session: hg.Session, plan: hg.Plan) -> None:
    expected = values_alone(session, layered(), X)
    run = plan.submit(x=X, taps=["layer1/*", "layer3/gelu*"])
    taps = list(run.taps(SECONDS))
    names = [one for one in names_of(layered()) if one.startswith(("layer1/", "layer3/gelu"))]
    assert [tap.name for tap in taps] == names and len(names) > 3
    for tap in taps:
        assert np.array_equal(tap.value, expected[tap.name]), tap.name
        assert tap.value.flags.owndata and tap.value.flags.writeable
        assert tap.name == names_of(layered())[tap.number] and tap.op in tap.name
    assert np.array_equal(run.result()["y"], plan.run(x=X)["y"])


def test_values_of_the_compiled_graph_are_observed_as_their_names_are(session: hg.Session) -> None:
    g = layered()
    (node,) = g.find("layer2/gelu*")
    run = session.compile(g).submit(x=X, taps=[node, "layer1/gelu*"])
    assert [tap.name for tap in run.taps(SECONDS)] == [g.find("layer1/gelu*")[0].name, node.name]
    assert [tap.name for tap in session.compile(g).submit(x=X, taps=node).taps(SECONDS)] == [node.name]


def test_values_that_are_no_nodes_of_the_compiled_graph_cannot_be_observed(plan: hg.Plan) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="is a leaf"):
        plan.submit(x=X, taps=layered().inputs["x"])
    other = hg.Graph()
    with pytest.raises(hg.InvalidArgumentError, match="no node of the plan's graph"):
        plan.submit(x=X, taps=[other.input("x", (2,), "f32") + 1.0])


@pytest.mark.parametrize(("option", "method"), [("taps", "submit"), ("pause", "submit"), ("steps", "loop")])
def test_an_option_of_another_method_is_answered_with_that_method(
    plan: hg.Plan, option: str, method: str
) -> None:
    with pytest.raises(hg.InvalidInputError) as caught:
        plan.run(x=X, **{option: ["layer1/*"]})
    assert f"plan.{method}(..., {option}=...)" in caught.value.advice


def test_all_nodes_can_be_observed_and_change_nothing(session: hg.Session, plan: hg.Plan) -> None:
    expected, alone = plan.run(x=X)["y"], values_alone(session, layered(), X)
    run = plan.submit(x=X, taps="*")
    assert run.result(SECONDS)["y"].tobytes() == expected.tobytes()
    found = {tap.name: tap.value for tap in run.taps()}
    assert found.keys() == set(names_of(layered()))
    assert all(found[name].tobytes() == alone[name].tobytes() for name in found)


def test_a_function_of_the_node_says_whether_to_observe(plan: hg.Plan) -> None:
    asked: list[TappedNode] = []

    def wants(node: TappedNode) -> bool:
        asked.append(node)
        return node.op == "matmul" or (node.shape == (4, 8) and node.name.startswith("layer2/add"))

    taps = list(plan.submit(x=X, taps=wants).taps(SECONDS))
    assert [one.number for one in asked] == list(range(len(names_of(layered()))))
    assert sum(tap.op == "mul_mat" or tap.op == "matmul" for tap in taps) == sum(
        one.op == "matmul" for one in asked
    )
    assert any(tap.name.startswith("layer2/add") for tap in taps)


def test_views_and_nodes_that_nothing_needs_can_be_observed(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (4, 8), "f32")
    x.T[2:5] * 1.0
    g.output("y", x.reshape((8, 4)) + 1.0)
    found = {tap.op: tap.value for tap in session.compile(g).submit(x=X, taps="*").taps(SECONDS)}
    assert np.array_equal(found["slice"], X.T[2:5])
    assert np.array_equal(found["reshape"], X.reshape(8, 4))


def test_every_data_type_can_be_observed(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (2, 32), "f32")
    for dtype in ("f64", "f16", "bf16", "i8", "u16", "i64", "bool"):
        g.output(dtype, hg.astype(x, dtype))
    g.output("q8_0", hg.ops.cpy(x, g.variable("q", (2, 32), "q8_0")))
    plan, given = session.compile(g), np.arange(64, dtype=np.float32).reshape(2, 32)
    run = plan.submit(x=given, taps="*")
    expected = run.result(SECONDS)
    taps = {tap.value.dtype: tap.value for tap in run.taps()}
    for name in ("f64", "f16", "bf16", "i8", "u16", "i64", "bool", "q8_0"):
        assert np.array_equal(taps[expected[name].dtype], expected[name]), name


def test_a_value_larger_than_a_message_comes_whole(session: hg.Session) -> None:
    g = hg.Graph()
    g.output("y", -g.input("x", (700, 1001), "f32"))
    large = np.random.default_rng(1).random((700, 1001)).astype(np.float32)
    run = session.compile(g).submit(x=large, taps="*")
    (tap,) = run.taps(SECONDS)
    assert np.array_equal(tap.value, -large) and np.array_equal(run.result()["y"], -large)


def test_variables_are_told_as_they_are_at_that_moment(session: hg.Session) -> None:
    g = hg.Graph()
    v = g.variable("v", (4, 8), "f32")
    before = v * 1.0
    g.output("y", hg.assign(v, before + g.input("x", (4, 8), "f32")))
    plan = session.compile(g)
    for count in range(3):
        run = plan.submit(x=X, taps="*")
        taps = {tap.op: tap.value for tap in run.taps(SECONDS)}
        assert np.allclose(taps["mul"], X * count, atol=1e-5)
        assert np.array_equal(taps["assign"], run.result()["y"])


def test_what_nobody_takes_does_not_hold_the_run_up(plan: hg.Plan) -> None:
    runs = [plan.submit(x=X * number, taps="*") for number in range(20)]
    for number, run in enumerate(runs):
        assert np.array_equal(run.result(SECONDS)["y"], plan.run(x=X * number)["y"])
        assert len(list(run.taps())) == len(names_of(layered()))
        assert list(run.taps()) == []


def test_outputs_go_where_they_go_without_taps(session: hg.Session, plan: hg.Plan) -> None:
    t, expected = session.empty((4, 8), "f32"), plan.run(x=X)["y"]
    run = plan.submit(x=session.put(X), taps="layer0/*", out={"y": t})
    assert run.result(SECONDS)["y"] is t and np.array_equal(t.get(), expected)
    kept = plan.submit(x=X, taps="layer0/*", fetch=False).result(SECONDS)["y"]
    assert isinstance(kept, hg.Tensor) and np.array_equal(kept.get(), expected)


# Refusals


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        ("layr1/*", "no node matches 'layr1/.', which is tapped(.|\n)*near names: 'layer1/"),
        (["layer1/*", "zzz"], "'zzz'(.|\n)*names are such as"),
        ("x", "matches only leaves"),
        ("*/w", "matches only leaves"),
        (lambda node: False, "no node matches <lambda>"),
        (7, "taps is int"),
        ([7], "a tap is a pattern, not 7"),
        ({"layer1/*": "cpu0"}, "taps is dict"),
    ],
)
def test_patterns_that_mean_nothing_are_refused_before_anything_is_sent(
    session: hg.Session, plan: hg.Plan, taps: Any, words: str
) -> None:
    before = session.statistics().sent_commands
    with pytest.raises(hg.InvalidArgumentError, match=words):
        plan.submit(x=X, taps=taps)
    assert session.statistics().sent_commands == before


def test_what_a_function_raises_is_raised(plan: hg.Plan) -> None:
    with pytest.raises(ZeroDivisionError):
        plan.submit(x=X, taps=lambda node: 1 // 0)


def test_a_run_that_observes_nothing_has_no_taps(plan: hg.Plan) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="nothing of the run is observed"):
        plan.submit(x=X).taps()
    with pytest.raises(hg.InvalidArgumentError, match="pause=True needs observed nodes"):
        plan.submit(x=X, pause=True)
    assert list(plan.submit(x=X, taps=[]).taps(SECONDS)) == []


def test_runs_that_pause_hold_room_and_others_wait_for_it_only_where_it_comes_by_itself(
    session: hg.Session,
) -> None:
    g = hg.Graph()
    x = g.input("x", (1,), "f32")
    g.output("y", hg.max(hg.broadcast_to(x, (25 * 2**20,)) * 2.0))
    plan, given = session.compile(g), {"x": np.ones(1, np.float32), "taps": "mul*", "timeout": 60}
    assert [run.result(60)["y"] for run in [plan.submit(**given) for _ in range(3)]] == [2.0] * 3
    paused = plan.submit(**given, pause=True)
    with pytest.raises(hg.LimitExceededError, match="in progress hold(.|\n)*read their taps, or cancel them"):
        plan.submit(**given)
    assert [tap.value[-1] for tap in paused.taps(SECONDS)] == [2.0]
    assert plan.submit(**given).result(60)["y"] == 2.0


def test_more_than_the_server_holds_is_refused(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (1,), "f32")
    g.output("y", hg.sum(hg.broadcast_to(x, (session.info.limits.in_flight_bytes // 4 + 1,)) * 1.0))
    with pytest.raises(hg.LimitExceededError, match="tap fewer"):
        session.compile(g).submit(x=np.ones(1, np.float32), taps="mul*")


def test_inputs_named_taps_and_pause_go_in_a_mapping(session: hg.Session) -> None:
    g = hg.Graph()
    g.output("y", g.input("taps", (2,), "f32") + g.input("pause", (2,), "f32"))
    ones = np.ones(2, np.float32)
    run = session.compile(g).submit({"taps": ones, "pause": ones}, taps="*")
    assert [tap.value.tolist() for tap in run.taps(SECONDS)] == [[2.0, 2.0]]


# Pauses and ends


def test_a_run_that_pauses_goes_on_when_the_next_is_asked_for(plan: hg.Plan) -> None:
    run = plan.submit(x=X, taps="layer*/gelu*", pause=True)
    taps = run.taps(SECONDS)
    for _ in range(LAYERS):
        next(taps)
        assert not run.done()
    with pytest.raises(StopIteration):
        next(taps)
    assert run.done() and np.array_equal(run.result()["y"], plan.run(x=X)["y"])


def test_a_loop_that_cancels_ends_the_run(plan: hg.Plan) -> None:
    run = plan.submit(x=X, taps="*", pause=True)
    for tap in run.taps(SECONDS):
        if tap.name.startswith("layer1/"):
            assert run.cancel()
            break
    with pytest.raises(hg.CancelledError, match="was cancelled"):
        run.result(SECONDS)
    with pytest.raises(hg.CancelledError, match="was cancelled"):
        list(run.taps())
    # The plan is as good as before.
    assert np.array_equal(plan.submit(x=X, taps="*").result()["y"], plan.run(x=X)["y"])


def test_whoever_waits_for_the_end_lets_a_paused_run_go_on(plan: hg.Plan) -> None:
    expected = plan.run(x=X)["y"]
    run = plan.submit(x=X, taps="*", pause=True)
    first = next(run.taps(SECONDS))
    assert np.array_equal(run.result(SECONDS)["y"], expected)
    assert [first.name, *(tap.name for tap in run.taps())] == names_of(layered())
    assert plan.submit(x=X, taps="*", pause=True).exception(SECONDS) is None


def test_leaving_the_loop_or_dropping_the_future_lets_it_go_on(session: hg.Session, plan: hg.Plan) -> None:
    run = plan.submit(x=X, taps="*", pause=True)
    for _ in run.taps(SECONDS):
        break
    gc.collect()
    assert run.exception(SECONDS) is None
    plan.submit(x=X, taps="*", pause=True)
    run = plan.submit(x=X, taps="*", pause=True)
    next(run.taps(SECONDS))
    del run
    gc.collect()
    session.synchronize(SECONDS)


def test_the_time_of_a_paused_run_counts(plan: hg.Plan) -> None:
    plan.submit(x=X, taps="*").result(SECONDS)
    run = plan.submit(x=X, taps="*", pause=True, timeout=0.1)
    taps, ended = run.taps(), threading.Event()
    run.add_done_callback(lambda _: ended.set())
    next(taps)
    assert ended.wait(SECONDS)
    with pytest.raises(hg.DeadlineExceededError, match=r"was not done within 0\.1 s"):
        list(taps)


def test_closing_the_session_ends_a_paused_run(url: str) -> None:
    with hg.connect(url) as session:
        run = session.compile(layered()).submit(x=X, taps="*", pause=True)
        next(run.taps(SECONDS))
    with pytest.raises(hg.SessionClosedError):
        list(run.taps(SECONDS))


def test_another_stream_goes_on_while_a_run_pauses(session: hg.Session, plan: hg.Plan) -> None:
    other, run = session.stream(), plan.submit(x=X, taps="*", pause=True)
    taps = run.taps(SECONDS)
    next(taps)
    assert "y" in plan.run(x=X, stream=other, timeout=SECONDS)
    assert not run.done() and run.cancel()


def test_many_commands_behind_a_paused_run_do_not_keep_it(session: hg.Session, plan: hg.Plan) -> None:
    run = plan.submit(x=X, taps="*", pause=True)
    later = [plan.submit(x=X) for _ in range(200)]
    assert len(list(run.taps(SECONDS))) == len(names_of(layered()))
    assert all(one.exception(SECONDS) is None for one in later)


# Variants


def test_other_taps_are_compiled_once_and_freed_with_the_plan(session: hg.Session, plan: hg.Plan) -> None:
    for _ in range(3):
        plan.submit(x=X, taps="layer0/*").result(SECONDS)
        plan.submit(x=X, taps=lambda node: node.name.startswith("layer0/")).result(SECONDS)
        plan.submit(x=X, taps=["layer1/*"]).result(SECONDS)
    assert len(plan._variants._known) == 2
    plan.free()
    assert not plan._variants._known
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        plan.submit(x=X, taps="layer0/*")
    session.synchronize(SECONDS)


def test_the_last_few_variants_are_kept(plan: hg.Plan) -> None:
    names = names_of(layered())
    for name in names:
        assert plan.submit(x=X, taps=name).exception(SECONDS) is None
    assert len(plan._variants._known) == MOST_VARIANTS < len(names)
    assert [tap.name for tap in plan.submit(x=X, taps=names[0]).taps(SECONDS)] == [names[0]]


def test_several_threads_compile_one_variant(plan: hg.Plan) -> None:
    together, found = threading.Barrier(4), []

    def observe() -> None:
        together.wait(SECONDS)
        found.append([tap.name for tap in plan.submit(x=X, taps="layer2/*").taps(SECONDS)])

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(found) == 4 and found[0] and all(one == found[0] for one in found)
    assert len(plan._variants._known) == 1


def test_an_updated_plan_observes_its_new_graph(session: hg.Session, plan: hg.Plan) -> None:
    plan.submit(x=X, taps="layer0/*").result(SECONDS)
    g = hg.Graph()
    g.output("y", hg.tanh(g.input("x", (4, 8), "f32")))
    plan.update(g)
    (tap,) = plan.submit(x=X, taps="tanh*").taps(SECONDS)
    assert tap.op == "tanh" and np.allclose(tap.value, np.tanh(X), atol=1e-6)
    with pytest.raises(hg.InvalidArgumentError, match="no node matches"):
        plan.submit(x=X, taps="layer0/*")


def test_leaves_that_are_tensors_stay_as_long_as_the_plan_may_need_them(session: hg.Session) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (4, 8), "f32") * g.bound_weight("w", (4, 8), "f32"))
    plan = session.compile(g, weights={"w": session.put(np.full((4, 8), 3, np.float32))})
    gc.collect()
    (tap,) = plan.submit(x=X, taps="*").taps(SECONDS)
    assert np.array_equal(tap.value, X * 3)
    w = session.put(np.full((4, 8), 2, np.float32))
    plan.update(g, weights={"w": w})
    w.free()
    assert np.array_equal(plan.run(x=X)["y"], X * 2)
    with pytest.raises(hg.UnknownHandleError, match="was freed"):
        plan.submit(x=X, taps="*")


def test_a_copied_plan_can_be_observed(session: hg.Session, plan: hg.Plan, url: str) -> None:
    with hg.connect(url) as other:
        taps = list(hg.copy_plan(plan, other).submit(x=X, taps="layer1/*").taps(SECONDS))
    assert taps and all(tap.name.startswith("layer1/") for tap in taps)


def test_options_of_the_plan_are_those_of_its_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    devices = ("cpu:threads=2", "cpu:threads=1")
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: open_registry(devices))
    with hg.connect("local:") as session:
        shell: Any = session._shell
        call = shell._transport.call
        shell._transport.call = lambda one: (asked.append(one), call(one))[1]
        options: Any = {"threads": 1, "pins": {"layer2/*": "cpu1"}, "memory": {"cpu0": "1GiB"}}
        plan = session.compile(layered(), ["cpu0", "cpu1"], fusion=False, **options)
        expected = plan.run(x=X)["y"]
        run = plan.submit(x=X, taps=["layer1/*", "layer2/*"])
        assert np.array_equal(run.result(SECONDS)["y"], expected) and len(list(run.taps())) > 4
    first, second = (one.request for one in asked if one.method is COMPILE)
    assert (first.graph, first.bindings) == (second.graph, second.bindings)
    for name in ("devices", "fusion", "threads", "pins", "memory"):
        assert getattr(first.options, name) == getattr(second.options, name), name
    assert first.options.taps == () and second.options.taps and second.options.pins


# Failures


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[hg.Session, FakeDevice]]:
    device = FakeDevice(memory_bytes=2**22)
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(device))
    with hg.connect("local:") as session:
        yield session, device


def test_values_come_before_the_run_is_done(scripted: tuple[hg.Session, FakeDevice]) -> None:
    session, device = scripted
    plan = session.compile(layered())
    plan.submit(x=X, taps="layer0/*").result(SECONDS)
    count = len([one for one in names_of(layered()) if one.startswith("layer0/")])
    gates = [device.script.hold("compute") for _ in range(count + 1)]
    run = plan.submit(x=X, taps="layer0/*")
    taps = run.taps(SECONDS)
    for gate in gates[:-1]:
        gate.open()
        assert next(taps).name.startswith("layer0/") and not run.done()
    gates[-1].open()
    assert list(taps) == []


def test_a_device_that_fails_in_the_midst_has_told_what_came_before(
    scripted: tuple[hg.Session, FakeDevice],
) -> None:
    session, device = scripted
    plan = session.compile(layered())
    plan.submit(x=X, taps="layer*/gelu*").result(SECONDS)
    gate = device.script.hold("compute")
    device.script.fail("compute", ComputeFailedError("the fan stopped"))
    run, told = plan.submit(x=X, taps="layer*/gelu*"), []
    gate.open()
    with pytest.raises(hg.ComputeFailedError, match="the fan stopped"):
        for tap in run.taps(SECONDS):
            told.append(tap.name)
    assert len(told) == 1
    assert len(list(plan.submit(x=X, taps="layer*/gelu*").taps(SECONDS))) == LAYERS


def test_a_variant_that_cannot_be_compiled_is_tried_again(scripted: tuple[hg.Session, FakeDevice]) -> None:
    session, device = scripted
    plan = session.compile(layered())
    device.script.fail("compile", ComputeFailedError("not now"))
    with pytest.raises(hg.HeliographError, match="not now"):
        plan.submit(x=X, taps="*")
    assert list(plan.submit(x=X, taps="*").taps(SECONDS))


def test_a_plan_that_is_freed_while_a_variant_is_compiled_leaves_nothing(
    scripted: tuple[hg.Session, FakeDevice],
) -> None:
    session, device = scripted
    plan, failures = session.compile(layered()), []
    session.synchronize(SECONDS)
    gate = device.script.hold("compile")

    def observe() -> None:
        try:
            plan.submit(x=X, taps="*")
        except hg.HeliographError as error:
            failures.append(error)

    thread = threading.Thread(target=observe)
    thread.start()
    assert gate.entered.wait(SECONDS)
    plan.free()
    gate.open()
    thread.join(SECONDS)
    assert isinstance(failures[0], hg.UnknownHandleError) and "before the run was sent" in str(failures[0])
    session.synchronize(SECONDS)
    assert session._shell._transport.session.statistics().plans == 0  # type: ignore[attr-defined]


def test_ctrl_c_while_waiting_for_a_value_cancels_the_run(scripted: tuple[hg.Session, FakeDevice]) -> None:
    session, device = scripted
    plan = session.compile(layered())
    plan.submit(x=X, taps="*").result(SECONDS)
    gate = device.script.hold("compute")
    run = plan.submit(x=X, taps="*")
    assert gate.entered.wait(SECONDS)
    shell: Any = session._shell
    perform = shell._perform

    def interrupted(effect: object, deadline: object) -> None:
        raise KeyboardInterrupt

    shell._perform = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(run.taps())
    shell._perform = perform
    with pytest.raises(hg.CancelledError):
        run.result(SECONDS)


# asyncio


def test_the_same_names_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        expected = (await plan.run(x=X))["y"]
        for pause in (False, True):
            run = plan.submit(x=X, taps=["layer1/*"], pause=pause)
            taps = [tap async for tap in run.taps(SECONDS)]
            assert [tap.name for tap in taps] == [one for one in names_of(layered()) if "layer1/" in one]
            assert np.array_equal((await run)["y"], expected)
        with pytest.raises(hg.InvalidArgumentError, match="no node matches"):
            plan.submit(x=X, taps="layr*")
        with pytest.raises(hg.InvalidArgumentError, match="nothing of the run is observed"):
            plan.submit(x=X).taps()

    run_with_plan(url, layered(), test)


def test_a_run_for_new_taps_keeps_its_place_and_its_arrays_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        given, expected = X.copy(), (await plan.run(x=X))["y"]
        t = session.empty((4, 8), "f32")
        run = plan.submit(x=given, taps="*", out={"y": t})
        given[:] = 0
        # Sent after the run, so it sees what the run has written.
        assert np.array_equal(await t.get(), expected)
        assert len([tap async for tap in run.taps(SECONDS)]) == len(names_of(layered()))

    run_with_plan(url, layered(), test)


def test_leaves_that_are_tensors_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, _: hg.aio.Plan) -> None:
        g = hg.Graph()
        g.output("y", g.input("x", (4, 8), "f32") * g.bound_weight("w", (4, 8), "f32"))
        plan = await session.compile(g, weights={"w": await session.put(np.full((4, 8), 3, np.float32))})
        run = plan.submit(x=X, taps="*")
        assert np.array_equal((await run.result(SECONDS))["y"], X * 3)

    run_with_plan(url, layered(), test)


def test_ends_with_asyncio(url: str) -> None:
    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        run = plan.submit(x=X, taps="*", pause=True)
        async for _ in run.taps(SECONDS):
            assert run.cancel()
            break
        assert isinstance(await run.exception(SECONDS), hg.CancelledError)
        # Waiting for the end, leaving the loop or dropping the future lets it go on.
        assert await plan.submit(x=X, taps="*", pause=True).exception(SECONDS) is None
        run = plan.submit(x=X, taps="*", pause=True)
        async for _ in run.taps(SECONDS):
            break
        gc.collect()
        assert await run.exception(SECONDS) is None
        run = plan.submit(x=X, taps="*", pause=True)
        async for _ in run.taps(SECONDS):
            break
        del run
        gc.collect()
        await session.synchronize(SECONDS)

    run_with_plan(url, layered(), test)


def test_cancelling_the_task_that_waits_cancels_the_run_with_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(memory_bytes=2**22)
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(device))

    async def test(session: hg.aio.Session, plan: hg.aio.Plan) -> None:
        await plan.submit(x=X, taps="*")
        gate = device.script.hold("compute")
        run = plan.submit(x=X, taps="*")
        task = asyncio.ensure_future(anext(run.taps()))
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and isinstance(await run.exception(SECONDS), hg.CancelledError)

    run_with_plan("local:", layered(), test)


@pytest.mark.parametrize("fractions", [{"cpu0": 1.0, "cpu1": 1.0}, {"cpu0": 1.0}])
def test_products_whose_weights_lie_over_devices_are_observed_whole(
    monkeypatch: pytest.MonkeyPatch, fractions: dict[str, float]
) -> None:
    devices = ("cpu:threads=1", "cpu:threads=1")
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: open_registry(devices))
    with hg.connect("local:") as session:
        whole = session.compile(layered(), ["cpu0", "cpu1"])
        divided = hg.SplitBufferType("cpu0", fractions)
        plan = session.compile(layered(), ["cpu0", "cpu1"], split={"*/w": divided})
        expected = {tap.number: tap for tap in whole.submit(x=X, taps="*").taps(SECONDS)}
        for pause in (False, True):
            run = plan.submit(x=X, taps="*", pause=pause)
            found = {tap.number: tap for tap in run.taps(SECONDS)}
            assert found.keys() == expected.keys()
            for number, tap in found.items():
                assert tap.name == expected[number].name
                assert np.array_equal(tap.value, expected[number].value), tap.name
            assert np.array_equal(run.result()["y"], whole.run(x=X)["y"])
