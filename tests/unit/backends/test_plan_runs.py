"""Runs of plans on the CPU: errors, aborts, streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import plan_fixtures
import pytest
from backend_graphs import (
    Array,
    Loaded,
    Maker,
    loaded,
    place,
    remove,
    run,
    same_bits,
)
from random_graphs import (
    floats,
    long_graph,
    product_with,
    some_outputs,
)

from heliograph_backends.contract import Abort
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto.errors import CancelledError, ComputeFailedError, OutOfRangeError, UnknownHandleError

device = plan_fixtures.device
fake = plan_fixtures.fake
needs_native = plan_fixtures.needs_native


# Errors


def rows_graph(index: int) -> Maker:
    made = Maker()
    rows, at = made.weight(floats(5, 3)), made.input(np.array([0, index], np.int32))
    made.output(made.node("neg", made.node("get_rows", rows, at)))
    return made


@pytest.mark.parametrize("index", [5, -1, 2**31 - 1])
def test_an_index_outside_is_an_error_with_the_node_as_origin(index: int, device: CpuDevice) -> None:
    made = rows_graph(index)
    with loaded(device, made) as it:
        with pytest.raises(OutOfRangeError, match=f"index {index} is not one of 5 rows") as caught:
            it.run()
        assert (caught.value.origin.op, caught.value.origin.node_name) == ("get_rows", "node0")
        it.inputs[0].array[...] = made.arrays[1][...] = 1
        assert it.run()[0] is not None


def test_what_a_script_fails_with_is_what_the_run_raises_and_the_next_succeeds(fake: FakeDevice) -> None:
    with loaded(fake, some_outputs()) as it:
        fake.script.fail("compute", ComputeFailedError("the fan stopped"))
        with pytest.raises(ComputeFailedError, match="the fan stopped"):
            it.run()
        it.run()


def test_a_plan_that_was_freed_does_not_run(device: CpuDevice) -> None:
    it = Loaded(device, some_outputs())
    it.free()
    it.plan.free()
    with pytest.raises(UnknownHandleError, match="freed"):
        it.plan.compute([], [], Abort())


# Abort


class AnnouncedAbort(Abort):
    """Tells when a run has begun to watch it."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = threading.Event()

    @contextmanager
    def watch(self, hook: Callable[[], None]) -> Iterator[None]:
        with super().watch(hook):
            self.watched.set()
            yield


def test_an_abort_before_a_run_cancels_it_and_the_plan_stays_usable(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        abort = Abort()
        abort.set()
        for _ in range(2):
            with pytest.raises(CancelledError):
                it.run(abort)
        it.run()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_abort_during_a_run_cancels_it_and_the_plan_stays_usable(dtype: type, device: CpuDevice) -> None:
    with loaded(device, long_graph(dtype, nodes=4000), fusion=False) as it:
        abort = AnnouncedAbort()
        thread = threading.Thread(target=lambda: abort.watched.wait(30) and abort.set())
        thread.start()
        with pytest.raises(CancelledError):
            it.run(abort)
        thread.join()
        assert it.run()[0] is not None


def test_an_abort_at_a_gate_lets_the_run_end_at_once(fake: FakeDevice) -> None:
    with loaded(fake, some_outputs()) as it:
        abort, errors = Abort(), []
        gate = fake.script.hold("compute")

        def compute() -> None:
            try:
                it.plan.compute(it.inputs, [None] * 4, abort)
            except CancelledError as error:
                errors.append(error)

        thread = threading.Thread(target=compute)
        thread.start()
        assert gate.entered.wait(10)
        abort.set()
        thread.join(10)
        assert len(errors) == 1
        it.run()


def test_an_abort_after_a_run_does_not_touch_the_next(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        abort = Abort()
        it.run(abort)
        abort.set()
        it.run()


# Streams


def test_one_plan_on_two_streams_runs_one_after_the_other_and_right(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(np.zeros(64, np.float32))
    made.node("assign", v, made.node("add", v, made.input(np.ones(64, np.float32))))
    made.output(v)
    failures: list[BaseException | None] = []
    with loaded(device, made) as it:
        streams = [device.stream(), device.stream()]
        for _ in range(200):
            for stream in streams:
                stream.submit(lambda: it.plan.compute(it.inputs, [None], Abort()), failures.append)
        for stream in streams:
            stream.synchronize(30)
            stream.close()
        assert it.tensors[v].array.tolist() == [400.0] * 64
    assert failures == [None] * 400


@needs_native
def test_two_plans_on_two_streams_give_the_bits_that_they_give_alone(device: CpuDevice) -> None:
    made = [product_with(floats(384, 384, seed=seed)) for seed in range(2)]
    alone = [run(device, each)[0] for each in made]
    found: list[list[Array]] = [[], []]
    with loaded(device, made[0]) as first, loaded(device, made[1]) as second:
        streams = [device.stream(), device.stream()]
        for _ in range(20):
            for number, it in enumerate((first, second)):

                def work(it: Loaded = it, number: int = number) -> None:
                    (array,) = it.run()
                    assert array is not None
                    found[number].append(array)

                streams[number].submit(work, lambda error: None)
        for stream in streams:
            stream.synchronize(30)
            stream.close()
    for right, arrays in zip(alone, found, strict=True):
        assert len(arrays) == 20
        assert all(same_bits(right, array) for array in arrays)


# Estimates


def wide_windows() -> Maker:
    """Few results of windows that are spread over large images."""
    made = Maker()
    image = made.node("broadcast_to", made.weight(floats(1, 1, 300, 300)), shape=(1, 64, 300, 300))
    kernel = made.weight(floats(64, 1, 2, 2))
    made.output(made.node("conv_2d_dw", kernel, image, dilation=(299, 299), stride=(), padding=()))
    return made


def deep_windows() -> Maker:
    """A convolution with one result of many channels."""
    made = Maker()
    image = made.node("broadcast_to", made.weight(floats(1, 1, 3, 3)), shape=(1, 2**15, 3, 3))
    kernel = made.node("broadcast_to", made.weight(floats(1, 2**15, 3, 3)), shape=(1, 2**15, 3, 3))
    attributes = {"dilation": (), "stride": (), "padding": ()}
    made.output(made.node("conv_2d", kernel, image, groups=1, **attributes))
    return made


def deep_product() -> Maker:
    """A product with few results, and so of one tile."""
    made = Maker()
    row = made.node("broadcast_to", made.weight(floats(1, 1)), shape=(40, 2**18))
    made.output(made.node("matmul", row, made.weight(floats(2**18, 1))))
    return made


@needs_native
@pytest.mark.parametrize("make", [wide_windows, deep_windows, deep_product])
def test_a_run_with_few_results_of_many_numbers_is_not_estimated_to_be_short(
    make: Callable[[], Maker], device: CpuDevice
) -> None:
    """A server runs short ones where their messages arrive."""
    with loaded(device, make()) as it:
        types = [it.graph.type_of(output.value) for output in it.graph.outputs]
        results = [place(device, np.zeros(type.shape, np.float32)) for type in types]
        short = it.plan.short_run(it.inputs, results)
        assert short is None or short[1] > 100
        for each in results:
            remove(each)
