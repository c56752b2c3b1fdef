"""Random graphs with random weights over random devices: the results are those of the graph as it was."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry

BATCHES, BATCH = 5, 25
NAMES = ("a", "b", "c", "d")
SIZES = (1, 7, 32, 50)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[hg.Session]:
    """Devices with memories of their own, but for two that share the host's."""
    devices = [FakeDevice(name, 2**26, is_host=name in "ab") for name in NAMES]
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*devices))
    with hg.connect("local:") as made:
        yield made


class Maker:
    """Builds a graph of small whole numbers, so that no sum is rounded, whoever adds it up."""

    def __init__(self, random: Random, name: str) -> None:
        self.random, self.graph = random, hg.Graph()
        self.arrays = np.random.default_rng(random.randrange(2**32))
        self.values = {size: self.graph.input(f"x{size}", (6, size), "f32") for size in SIZES}
        self.rows = [(size, value) for size, value in self.values.items()]
        self.weights: list[tuple[int, int, hg.Value]] = []
        #: Names of weights that products read.
        self.divisible: set[str] = set()
        self.state = self.graph.variable(f"state {name}", (6, 7), "f32")
        for number in range(random.randint(1, 14)):
            random.choice(
                (self.product, self.product, self.product, self.columns, self.sum, self.assign, self.look_up)
            )(number)
        for number in range(random.randint(1, 3)):
            self.graph.output(f"y{number}", random.choice(self.rows)[1])
        self.graph.output("last", self.rows[-1][1])
        if self.weights and random.random() < 0.2:
            self.graph.output("weight", random.choice(self.weights)[2])

    def any(self) -> tuple[int, hg.Value]:
        """A value with rows of some size: often a late one."""
        return self.rows[-1] if self.random.random() < 0.5 else self.random.choice(self.rows)

    def weight(self, rows: int, columns: int) -> hg.Value:
        """A new one, or one that something reads already."""
        known = [value for n, k, value in self.weights if (n, k) == (rows, columns)]
        if known and self.random.random() < 0.5:
            return self.random.choice(known)
        array = self.arrays.integers(-1, 2, (rows, columns)).astype(np.float32)
        made = self.graph.weight(f"w{len(self.weights)}", array)
        self.weights.append((rows, columns, made))
        return made

    def add(self, size: int, value: hg.Value) -> None:
        self.rows.append((size, hg.clip(value, -2.0, 2.0)))

    def product(self, number: int) -> None:
        size, x = self.any()
        rows = self.random.choice(SIZES)
        weight = self.weight(rows, size)
        self.divisible.add(weight.name)
        self.add(rows, hg.ops.mul_mat(weight, x, name=f"product{number}"))

    def columns(self, number: int) -> None:
        size, x = self.any()
        columns = self.random.choice(SIZES)
        weight = self.weight(size, columns)
        self.divisible.add(weight.name)
        self.add(columns, hg.ops.matmul(x, weight, name=f"columns{number}"))

    def sum(self, number: int) -> None:
        size, x = self.any()
        self.add(size, x + self.random.choice([value for n, value in self.rows if n == size]))

    def assign(self, number: int) -> None:
        self.rows.append((7, self.state + 0.0))
        self.rows.append((7, self.state))
        hg.assign(self.state, self.random.choice([value for n, value in self.rows if n == 7]))

    def look_up(self, number: int) -> None:
        size = self.random.choice(SIZES)
        ids = self.graph.constant(self.arrays.integers(0, 7, 6).astype(np.int32))
        self.add(size, hg.ops.get_rows(self.weight(7, size), ids, name=f"found{number}"))

    def splits(self) -> dict[str, hg.SplitBufferType]:
        """For most of the weights that products read, and hardly any other."""
        names = [value.name for *_, value in self.weights]
        share = {name: 0.8 if name in self.divisible else 0.05 for name in names}
        return {name: self.split() for name in names if self.random.random() < share[name]}

    def split(self) -> hg.SplitBufferType:
        devices = self.random.sample(NAMES, self.random.randint(1, 4))
        fractions = {device: self.random.choice((0, 1, 1, 2.5, 1e-3)) for device in devices[1:]}
        return hg.SplitBufferType(self.random.choice(NAMES), {devices[0]: 1, **fractions})


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_weights_over_random_devices(session: hg.Session, batch: int) -> None:
    refused = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        made, twin = Maker(Random(seed), f"{seed}"), Maker(Random(seed), f"{seed} as it was")
        x = {f"x{size}": made.arrays.integers(-2, 3, (6, size)).astype(np.float32) for size in SIZES}
        splits = made.splits()
        try:
            plan = session.compile(made.graph, NAMES, split=splits)
        except hg.InvalidArgumentError as error:
            assert "no product does" in str(error) or "no node reads" in str(error), f"seed {seed}: {error}"
            refused += 1
            continue
        whole = session.compile(twin.graph)
        for run in range(2):
            given = {name: array for name, array in x.items() if name in plan.inputs}
            expected, found = whole.run(given), plan.run(given)
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array, f"seed {seed}, run {run}, {name}, {splits}")
        plan.free()
        whole.free()
    assert refused < BATCH / 2, "too few are checked"
