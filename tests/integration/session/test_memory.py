"""Buffers, tensors placed in them, lists of tensors and memory of this process, over every transport."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from guarded import guarded
from waiting import until

import heliograph as hg

X = np.arange(12, dtype=np.float32).reshape(4, 3)
BIG = np.random.default_rng(3).random((900, 1000)).astype(np.float32)


def free_bytes(session: hg.Session) -> int:
    session.synchronize(timeout=30)
    return session.devices[0].memory(timeout=10).free_bytes


def wait_for_memory(session: hg.Session, wanted: int) -> None:
    """Frees are sent in batches, a moment later."""
    deadline = time.monotonic() + 10
    while free_bytes(session) != wanted:
        assert time.monotonic() < deadline, f"{free_bytes(session)} bytes are free, not {wanted}"


# Buffers


def test_a_buffer_says_what_it_is(session: hg.Session) -> None:
    device = session.devices[0]
    buffer = session.buffer(4096, usage="weights")
    assert (buffer.size_bytes, buffer.device, buffer.usage) == (4096, device.name, hg.Usage.WEIGHTS)
    assert buffer.buffer_type == device.buffer_types[0].name
    assert "4,096 bytes" in repr(buffer) and "weights" in repr(buffer)
    buffer.set_usage(hg.Usage.COMPUTE)
    assert buffer.usage is hg.Usage.COMPUTE
    buffer.free()
    buffer.free()
    assert "freed" in repr(buffer)
    with pytest.raises(hg.UnknownHandleError, match="buffer was freed"):
        buffer.place(1, "f32")
    session.synchronize(timeout=10)


def test_tensors_are_placed_in_a_buffer(session: hg.Session) -> None:
    buffer = session.buffer(1024)
    first, second = buffer.place((4, 3), "f32"), buffer.place((2, 8), "i64", 512)
    assert first.buffer is buffer and not first.get().any()
    first.set(X)
    second.set(np.full((2, 8), 7))
    assert np.array_equal(first.get(), X) and np.array_equal(second.get(), np.full((2, 8), 7))
    assert np.array_equal(buffer.place((1024,), "u8").get()[:48].view(np.float32), X.ravel())
    assert first[1:].buffer is buffer and session.put(X).buffer is None


def test_tensors_that_overlap_share_their_bytes_in_order(session: hg.Session) -> None:
    buffer = session.buffer(BIG.nbytes)
    whole, again = buffer.place(BIG.shape, "f32"), buffer.place(BIG.size, "f32")
    for step in range(4):
        whole.set(BIG + step)
        again[:16].set(np.full(16, step, np.float32))
        found = whole.get().ravel()
        assert found[:16].tolist() == [step] * 16 and np.array_equal(found[16:], (BIG + step).ravel()[16:])


def test_work_on_other_streams_waits_for_what_overlaps(session: hg.Session) -> None:
    buffer, other = session.buffer(BIG.nbytes), session.stream()
    one, two = buffer.place(BIG.shape, "f32"), buffer.place(BIG.shape, "f32")
    g = hg.Graph()
    g.output("y", g.input("x", BIG.shape, "f32") + 1.0)
    plan, source = session.compile(g), session.put(BIG)
    plan.submit(x=source, out={"y": one}, stream=other)
    found = plan.run(x=two)["y"]
    assert np.array_equal(found, BIG + 1 + 1)


def test_clear_and_reset(session: hg.Session) -> None:
    buffer = session.buffer(256)
    t = buffer.place((256,), "u8")
    buffer.clear(9)
    assert t.get().tolist() == [9] * 256
    buffer.reset()
    assert t.get().tolist() == [9] * 256
    buffer.clear()
    assert not t.get().any()


@pytest.mark.parametrize(
    ("use", "kind", "words"),
    [
        (lambda b: b.place((64,), "f32", 64), hg.OutOfRangeError, "64 takes bytes to 320"),
        (lambda b: b.place((1,), "f32", -64), hg.OutOfRangeError, "-64"),
        (lambda b: b.place((65,), "f32"), hg.OutOfRangeError, "device.placement"),
        (lambda b: b.place((1,), "f32", 4), hg.InvalidArgumentError, "not a multiple of 64"),
        (lambda b: b.place((-1,), "f32"), hg.InvalidArgumentError, "negative"),
        (lambda b: b.place((1,), "float"), hg.InvalidArgumentError, "dtype"),
        (lambda b: b.clear(256), hg.InvalidArgumentError, "0 to 255"),
        (lambda b: b.set_usage("all"), hg.InvalidArgumentError, "any, weights, compute"),
    ],
)
def test_what_a_buffer_does_not_take(
    session: hg.Session, use: Callable[[hg.Buffer], object], kind: type[Exception], words: str
) -> None:
    buffer = session.buffer(256)
    with pytest.raises(kind, match=words):
        use(buffer)
    session.synchronize(timeout=10)


@pytest.mark.parametrize("size", [-1, 2**63])
def test_sizes_that_no_buffer_has(session: hg.Session, size: int) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="a buffer of"):
        session.buffer(size)


def test_an_empty_buffer_holds_empty_tensors(session: hg.Session) -> None:
    assert session.buffer(0).place((3, 0), "f32").get().shape == (3, 0)


def test_a_buffer_too_large_for_the_device_poisons_what_is_placed_in_it(session: hg.Session) -> None:
    buffer = session.buffer(2**45)
    t = buffer.place((4,), "f32", 64)
    with pytest.raises(hg.OutOfMemoryError):
        t.get()
    session.synchronize(timeout=10)


def test_a_buffer_lives_as_long_as_its_tensors(session: hg.Session) -> None:
    before = free_bytes(session)
    buffer = session.buffer(BIG.nbytes + 4096)
    t = buffer.place(BIG.shape, "f32", 4096)
    t.set(BIG)
    buffer.free()
    assert np.array_equal(t.get(), BIG) and free_bytes(session) < before
    t.free()
    wait_for_memory(session, before)


def test_buffers_are_freed_when_they_are_collected(session: hg.Session) -> None:
    before = free_bytes(session)
    for _ in range(5):
        session.buffer(BIG.nbytes).place(BIG.shape, "f32").set(BIG)
    gc.collect()
    wait_for_memory(session, before)


# Lists of tensors


def test_a_list_of_tensors_has_one_buffer(session: hg.Session) -> None:
    before = free_bytes(session)
    types = [((4, 3), "f32"), ((), "i64"), ((2, 0), "u8"), (5, "bool"), ((2, 64), "q4_0")]
    tensors = session.empty_many(types, usage="compute")
    assert [(t.shape, t.dtype.name) for t in tensors] == [
        ((4, 3), "f32"), ((), "i64"), ((2, 0), "u8"), ((5,), "bool"), ((2, 64), "q4_0"),
    ]  # fmt: skip
    buffer = tensors[0].buffer
    assert buffer is not None and all(t.buffer is buffer for t in tensors)
    assert (buffer.usage, buffer.size_bytes) == (hg.Usage.COMPUTE, sum(t.nbytes for t in tensors))
    assert not any(t.get().any() for t in tensors)
    tensors[0].set(X)
    tensors[1].set(7)
    assert np.array_equal(tensors[0].get(), X) and tensors[1].get() == 7 and not tensors[3].get().any()
    buffer.clear(1)
    assert tensors[3].get().all() and tensors[1].get() == 0x0101010101010101
    del tensors, buffer
    gc.collect()
    wait_for_memory(session, before)


def test_an_empty_list_takes_nothing(session: hg.Session) -> None:
    assert session.empty_many([]) == []


def test_a_list_that_does_not_fit_poisons_all_of_its_tensors(session: hg.Session) -> None:
    before = free_bytes(session)
    small, large = session.empty_many([((4,), "f32"), ((2**45,), "f64")])
    for t in (small, large[:4]):
        with pytest.raises(hg.OutOfMemoryError):
            t.get()
    with pytest.raises(hg.OutOfMemoryError):
        small.buffer.place((1,), "f32").get()
    session.synchronize(timeout=10)
    assert free_bytes(session) == before


@pytest.mark.parametrize("wrong", [5, [(4,)], [((4,), "f32", 1)], [("f32", (4,))], ["f32"]])
def test_what_is_no_list_of_tensors(session: hg.Session, wrong: object) -> None:
    with pytest.raises(hg.InvalidArgumentError):
        session.empty_many(wrong)


def test_more_tensors_than_a_message_holds_are_refused_here(session: hg.Session) -> None:
    with pytest.raises(hg.LimitExceededError, match="several lists"):
        session.empty_many([((1,), "u8")] * (session.info.limits.graph_nodes + 1))


# Buffer types and usage


def test_buffer_types_are_named_or_given(session: hg.Session) -> None:
    (first, *_) = session.devices[0].buffer_types
    for one in (first, first.name):
        assert not session.empty((4,), "f32", buffer_type=one, usage="weights").get().any()
        assert session.buffer(64, buffer_type=one).buffer_type == first.name
    for make in (lambda **how: session.empty(4, "f32", **how), lambda **how: session.buffer(4, **how)):
        with pytest.raises(hg.InvalidArgumentError, match=f"no buffer type 'other'(.|\n)*{first.name}"):
            make(buffer_type="other")
        with pytest.raises(hg.InvalidArgumentError, match="any, weights, compute"):
            make(usage="nothing")
        with pytest.raises(hg.UnknownDeviceError, match="no device is named 'none'"):
            make(device="none")


# Memory of this process


def test_an_array_is_used_in_place_where_the_devices_are_here(session: hg.Session, url: str) -> None:
    mine = hg.aligned_empty((4, 3), "f32")
    mine[:] = X
    if url != "local:":
        with pytest.raises(hg.UnsupportedError, match=r"session\.put"):
            session.wrap(mine)
        return
    t = session.wrap(mine)
    mine[0] = 5
    assert np.array_equal(t.get(), mine)
    t[1].set(np.full(3, 9, np.float32))
    session.synchronize(timeout=10)
    assert mine[1].tolist() == [9, 9, 9]
    g = hg.Graph()
    g.output("y", g.input("x", (4, 3), "f32") + 1.0)
    assert np.array_equal(session.compute(g, x=t)["y"], mine + 1)


def test_a_wrapped_array_lives_as_long_as_its_tensor() -> None:
    with hg.connect("local:") as session:
        t = session.wrap(hg.aligned_empty(4096, "u8"))
        t.memset(7)
        gc.collect()
        assert t.get().tolist() == [7] * 4096
        t.free()
        session.synchronize(timeout=10)


def test_a_wrapped_array_is_let_go_with_its_tensor_although_a_plan_has_used_it() -> None:
    with hg.connect("local:") as session:
        g = hg.Graph()
        g.output("y", -g.input("x", (4, 3), "f32"))
        plan = session.compile(g)
        arrays = [hg.aligned_empty((4, 3), "f32") for _ in range(2)]
        arrays[0][:] = X
        x, y = map(session.wrap, arrays)
        for _ in range(2):
            plan.run(x=x, out={"y": y}, fetch=False)
        assert np.array_equal(arrays[1], -X)
        kept = [weakref.ref(each.base) for each in arrays]
        x.free()
        y.free()
        session.synchronize(timeout=10)
        del x, y, arrays
        until(lambda: gc.collect() >= 0 and all(each() is None for each in kept), "the arrays are gone")
        assert np.array_equal(plan.run(x=X)["y"], -X)


@pytest.mark.parametrize("name", ["float32", "float16", "int64", "int32", "int16", "uint8"])
def test_a_wrapped_array_may_end_where_mapped_memory_does(name: str) -> None:
    """Arrays start at a multiple of 64 bytes: these rows of an odd length end at a page's end."""
    rows, kind = 64 // np.dtype(name).itemsize, np.dtype(name)
    x = guarded((np.arange(rows * 17) % 5).astype(kind).reshape(rows, 17))
    with hg.connect("local:") as session:
        g = hg.Graph()
        mine = g.input("x", x.shape, kind)
        last = mine[-1]
        g.output("less", mine < last)
        g.output("sum", last + last)
        if kind.kind == "f":
            g.output("softmax", hg.softmax(mine))
            g.output("last", hg.softmax(last))
            g.output("mean", hg.mean(mine))
        found = session.compute(g, x=session.wrap(x))
    assert np.array_equal(found["less"], x < x[-1]) and np.array_equal(found["sum"], 2 * x[-1])
    if kind.kind == "f":
        assert np.array_equal(found["softmax"][-1], found["last"])
        assert np.allclose(found["mean"], x.mean(), rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda a: [1.0, 2.0], "not an array"),
        (lambda a: a[:, ::2], "gaps"),
        (lambda a: np.broadcast_to(a[:1], (4, 32)), "read-only"),
        (lambda a: a.reshape(-1)[1:], "aligned_empty"),
        (lambda a: a.view("datetime64[s]"), "dtype"),
    ],
)
def test_arrays_that_cannot_be_used_in_place(make: Callable[[np.ndarray], object], words: str) -> None:
    with hg.connect("local:") as session, pytest.raises(hg.InvalidArgumentError, match=words):
        session.wrap(make(hg.aligned_empty((4, 32), "f32")))


@pytest.mark.parametrize("dtype", ["f32", "i64", "u8", "bool", "q4_0"])
@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_aligned_arrays(dtype: str, alignment: int) -> None:
    for shape in [(), (0,), (3, 64), (7, 2, 32)]:
        if dtype == "q4_0" and not (shape and shape[-1] % 32 == 0):
            continue
        found = hg.aligned_empty(shape, dtype, alignment)
        assert found.shape[:-1] == shape[:-1] and found.flags.c_contiguous and found.flags.writeable
        assert found.size == 0 or found.ctypes.data % alignment == 0
    with pytest.raises(hg.InvalidArgumentError, match="power of two"):
        hg.aligned_empty(4, "u8", 3)


def test_reading_writing_and_copying_go_in_the_order_of_a_stream(session: hg.Session) -> None:
    stream = session.stream()
    one, two = session.empty((4,), "f32"), session.empty((4,), "f32")
    one.set(np.ones(4, np.float32), stream=stream)
    one.memset(0, 0, 4, stream=stream)
    one.copy_to(two, stream=stream)
    assert two.get(stream=stream).tolist() == [0, 1, 1, 1]
    two.set_2d(np.full((1, 1), 5, np.float32), 4, stream=stream)
    assert two.get_2d(1, 8, stream=stream).view("f4").tolist() == [[0, 5]]
    assert two.copy_and_wait(one, stream=stream) is hg.CopyPath.DESTINATION
    stream.record().result(10)
    with hg.connect("local:") as other, pytest.raises(hg.UnknownHandleError):
        one.set(np.ones(4, np.float32), stream=other.stream())
