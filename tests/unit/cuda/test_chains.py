"""Chains of many elements on the CUDA backend: kernels of their own compute, bit for bit, what the
interpreter does; what is compiled is made of our words alone, and is bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import cuda_fixtures
import numpy as np
import nvrtc_library
import pytest
from backend_graphs import Loaded, Maker, run
from chain_graphs import CASTS, FIVES, READINGS, casting, computing, graphs, numbers, reading_it
from cuda_emulation import EmulatedDriver, why_not
from cuda_emulation.compiling import compiled_chain

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor, access, host_bytes
from heliograph_backends.cuda import CudaDevice, plan_kernels
from heliograph_backends.cuda.driver.driver import NOT_COMPILED
from heliograph_backends.cuda.driver.operations import CudaOperation
from heliograph_backends.cuda.driver.sources import CHAIN, options_of, text_of_chain
from heliograph_backends.cuda.lowering.chains import GATED
from heliograph_backends.cuda.lowering.code_generation import generated
from heliograph_backends.cuda.lowering.interpreter import interpreted
from heliograph_backends.cuda.lowering.launch import Launch, Located
from heliograph_backends.cuda.lowering.lowering import CudaLowering, CudaTarget
from heliograph_backends.cuda.lowering.programs import ChainInstruction, pieces
from heliograph_backends.cuda.lowering.target import LEAST_GENERATED, OwnSlots
from heliograph_backends.planning.fusion import group_nodes
from heliograph_backends.planning.layout import place_values
from heliograph_backends.planning.storage import plan_storage
from heliograph_proto.errors import DeviceLostError
from heliograph_proto.types import DTYPES, TensorType

emulated = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
Types = pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])


rng = cuda_fixtures.rng


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    """One on which every chain is a large one."""
    yield from cuda_fixtures.closing(CudaDevice("cuda0", EmulatedDriver(), least_generated=1))


@pytest.fixture
def interpreter() -> Iterator[CudaDevice]:
    """One on which every chain of these tests is a small one."""
    made = CudaDevice("cuda0", EmulatedDriver())
    yield made
    made.close()


def same_bits(device: CudaDevice, interpreter: CudaDevice, made: Maker) -> None:
    """Runs a graph of one chain on both."""
    (found,), (wanted,) = run(device, made), run(interpreter, made)
    assert device.driver.launched == [CHAIN]
    assert interpreter.driver.launched[0].startswith("elementwise")
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


# The same bits


@emulated
@Types
@pytest.mark.parametrize("ops", FIVES, ids="-".join)
def test_every_operation_has_the_bits_of_the_interpreter(
    ops: Sequence[str], dtype: str, device: CudaDevice, interpreter: CudaDevice, rng: np.random.Generator
) -> None:
    same_bits(device, interpreter, computing(ops, dtype, rng))


@emulated
@Types
@pytest.mark.parametrize("reading", READINGS)
def test_every_way_to_read_an_operand_has_the_bits_of_the_interpreter(
    reading: str, dtype: str, device: CudaDevice, interpreter: CudaDevice, rng: np.random.Generator
) -> None:
    same_bits(device, interpreter, reading_it(reading, dtype, rng))


@emulated
@Types
@pytest.mark.parametrize("op", GATED)
def test_gated_units_read_the_halves_of_rows(
    op: str, dtype: str, device: CudaDevice, interpreter: CudaDevice, rng: np.random.Generator
) -> None:
    """Of rows whose second half begins on no multiple of a vector, too."""
    made = Maker()
    made.output(made.node(op, made.input(numbers(rng, dtype, 7, 2 * (36 if op == "swiglu" else 35)), dtype)))
    same_bits(device, interpreter, made)


@emulated
@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_have_the_bits_of_the_interpreter(
    source: str, target: str, device: CudaDevice, interpreter: CudaDevice, rng: np.random.Generator
) -> None:
    same_bits(device, interpreter, casting(source, target, rng))


@emulated
@Types
def test_a_result_with_gaps_in_pieces_has_the_bits_of_the_interpreter(
    dtype: str, rng: np.random.Generator
) -> None:
    """Rows of a wider matrix, columns, and columns that are copied in several launches."""
    driver, item = EmulatedDriver(), DTYPES[dtype].block_bytes
    for strides, most in (((32 * item, item), 10**9), ((item, 16 * item), 10**9), ((item, 16 * item), 100)):
        source = numbers(rng, dtype, 13, 24)
        results = [np.zeros(24 * 40, source.dtype) for _ in range(2)]
        type = TensorType(DTYPES[dtype], (13, 24))
        operands = Located(type, 0, 0, strides), Located(type, 1, 0, type.strides)
        program = (ChainInstruction(CudaOperation.SCALE, (1,), (1.5, -0.25), True),)
        for piece in pieces(operands, most):
            plain = interpreted(piece, program)
            own = generated(piece, program, 4, plain)
            _launch(driver, plain, plain.kernel, (results[0], source))
            _launch(driver, own, driver.build(own.source), (results[1], source))
        assert results[0].any() and results[0].tobytes() == results[1].tobytes()


def _launch(driver: EmulatedDriver, launch: Launch, kernel: Any, memory: Sequence[np.ndarray]) -> None:
    words = launch.parameters.view(np.uint64)
    for word, slot, offset in launch.patches:
        words[word] = memory[slot].ctypes.data + offset
    queue = driver.default_queue
    driver.launch(kernel, launch.grid, launch.threads, launch.parameters, queue, launch.shared_bytes)


@pytest.mark.parametrize("most", [1, 7, 100, 10**6])
def test_pieces_have_every_element_once(most: int) -> None:
    type, row = TensorType(DTYPES["f32"], (3, 5, 8)), TensorType(DTYPES["f32"], (8,))
    seen: list[int] = []
    for piece in pieces((Located(type, 0, 0, (160, 32, 4)), Located(row, 1, 0, (4,))), most):
        assert piece.elements <= most
        result, step = piece.operands[0], piece.steps[0]
        grid = np.indices(piece.sizes).reshape(len(piece.sizes), -1)
        places = result.offset + sum(
            (a * b for a, b in zip(grid, step, strict=True)), np.zeros(piece.elements, int)
        )
        seen += places.tolist()
    assert sorted(seen) == list(range(0, 3 * 5 * 8 * 4, 4))


# What is compiled


def launches_of(made: Maker) -> list[Launch]:
    """Those of a graph's groups, every chain being a large one."""
    graph = made.graph()
    places = place_values(graph)
    lowering = CudaLowering(graph, places, CudaTarget(2**16, 132, 1))
    groups = group_nodes(graph, places, lowering, fusion=True)
    storage = plan_storage(graph, places, groups, 2**40)
    work = [one for group in groups for one in lowering.work(group, storage, OwnSlots(0, 0)) or ()]
    return [one for one in work if isinstance(one, Launch)]


@pytest.mark.long
@pytest.mark.skipif(bool(nvrtc_library.why_not()), reason=nvrtc_library.why_not() or "-")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_chains_compile_to_machine_code_without_a_gpu(architecture: str, rng: np.random.Generator) -> None:
    options = (*options_of(CHAIN), f"--gpu-architecture={architecture}")
    sources = {launch.source for made in graphs(rng) for launch in launches_of(made)}
    assert len(sources) >= 20
    for source in sources:
        code = nvrtc_library.compiled(text_of_chain(source), f"{CHAIN}.cu", options)
        assert f".text.{CHAIN}\0".encode() in code, source


@emulated
def test_parameters_have_the_size_that_a_chains_kernel_reads(rng: np.random.Generator) -> None:
    for made in graphs(rng):
        for launch in launches_of(made):
            assert compiled_chain(launch.source).chain_size() == launch.parameters.nbytes <= 4096


def test_sources_have_our_words_alone(rng: np.random.Generator) -> None:
    """Names of operations and data types, and those of our own text; no name and no number of a client's."""
    ours = set(re.findall(r"[A-Za-z_]\w*", text_of_chain("")))
    # What the two files count on, and values by number.
    ours |= {
        "enum",
        "typedef",
        "template",
        "explicit",
        "Once",
        "Inputs",
        "chained",
        "put",
        "in",
        "made",
        "y",
        "x",
    }
    for made in graphs(rng):
        for launch in launches_of(made):
            words = set(re.findall(r"[A-Za-z_]\w*", launch.source))
            unknown = {word for word in words - ours if not re.fullmatch(r"[xv]\d+|op_[A-Z0-9_]+|f", word)}
            assert not unknown
            assert not set(re.findall(r"\d+\.\d+", launch.source)) - {"0.0"}


def two_steps(rng: np.random.Generator, rows: int, scale: float) -> Maker:
    """A chain of one op, and a norm."""
    made = Maker()
    x = made.input(rng.standard_normal((rows, 24), np.float32))
    made.output(made.node("soft_max", made.node("scale", x, scale=scale, bias=0.5)))
    return made


@emulated
def test_chains_that_differ_in_sizes_and_numbers_share_a_kernel(
    device: CudaDevice, rng: np.random.Generator
) -> None:
    for rows, scale in ((3, 2.0), (9, 2.0), (3, 4.0)):
        run(device, two_steps(rng, rows, scale))
    assert len(device.driver.built) == 1


@emulated
def test_a_plan_says_what_its_large_chains_run_on_and_is_replayed(
    device: CudaDevice, rng: np.random.Generator
) -> None:
    it = Loaded(device, two_steps(rng, 3, 2.0))
    found = [it.run()[0] for _ in range(3)]
    assert device.driver.captures == 1 and np.array_equal(found[0], found[2])
    assert re.search(r"; 1 large chain\(s\) with kernels of their own, in \d+\.\d\d s$", it.plan.note)
    it.free()


@emulated
def test_small_chains_are_interpreted_and_compile_nothing(
    interpreter: CudaDevice, rng: np.random.Generator
) -> None:
    it = Loaded(interpreter, two_steps(rng, 3, 2.0))
    it.run()
    assert interpreter.driver.built == [] and "chain" not in it.plan.note
    assert interpreter.target.least_generated == LEAST_GENERATED
    it.free()


@emulated
def test_a_chain_that_the_compiler_refuses_is_interpreted_and_said_to_be(
    device: CudaDevice, rng: np.random.Generator
) -> None:
    device.driver.fail("build", NOT_COMPILED)
    for _ in range(2):  # nor is it tried again
        it = Loaded(device, two_steps(rng, 3, 2.0))
        (found,) = it.run()
        assert np.allclose(found.sum(-1), 1) and "elementwise_few" in device.driver.launched
        assert it.plan.note.endswith("1 large chain(s) interpreted: the compiler refused it")
        it.free()
    assert device.driver.built == []


@emulated
def test_a_device_that_fails_while_it_loads_a_kernel_is_lost(rng: np.random.Generator) -> None:
    driver = EmulatedDriver()
    device = CudaDevice("cuda0", driver, least_generated=1)
    driver.fail("build", 700)
    with pytest.raises(DeviceLostError, match="illegal address"):
        Loaded(device, two_steps(rng, 3, 2.0))
    device.close()


@emulated
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MOST_KERNELS", 0, "0 chains have kernels already"),
        ("MOST_SECONDS", 0.0, "compiling others took 0 s"),
    ],
)
def test_what_is_compiled_is_bounded(
    name: str, value: float, why: str, device: CudaDevice, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan_kernels, name, value)
    it = Loaded(device, two_steps(rng, 3, 2.0))
    it.run()
    assert device.driver.built == [] and f"interpreted: {why}" in it.plan.note
    it.free()


@emulated
def test_memory_that_is_not_aligned_for_vectors_is_interpreted(
    device: CudaDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    values = rng.standard_normal(64, np.float32)
    made.output(made.node("neg", made.weight(values)))
    graph, type = made.graph(), TensorType(DTYPES["f32"], (64,))
    buffer, output = (device.buffer_type.allocate(size) for size in (4 + 256, 256))
    for offset, kernel in ((4, "elementwise_few"), (0, CHAIN)):
        weight = Tensor(type, buffer, offset)
        access.write(weight, 0, host_bytes(values))
        plan = device.compile(graph, LeafBindings({0: weight}, {}), DeviceCompileOptions())
        plan.compute([], [Tensor(type, output)], Abort())
        assert device.driver.launched[-1] == kernel
        assert np.array_equal(Tensor(type, output).array.get(), -values)
        plan.free()
    for one in (buffer, output):
        one.free()
