"""Training on the daemon: weights and moments stay there; batches go, and losses come back.

A small network learns to tell two spirals apart. The same step then runs in a loop on the daemon,
which takes its batches from points that it holds: one message starts 300 steps.

    python train.py [URL]
"""

import sys
from itertools import pairwise

import numpy as np

import heliograph as hg

POINTS, BATCH, HIDDEN = 512, 64, 64


def spirals() -> tuple[np.ndarray, np.ndarray]:
    """Return points of two spirals, and the spiral of each."""
    random = np.random.default_rng(5)
    which = np.arange(POINTS) % 2
    angle = np.sqrt(random.random(POINTS)) * 3 * np.pi
    turned = angle + which * np.pi
    points = np.stack([angle * np.cos(turned), angle * np.sin(turned)], 1) / (3 * np.pi)
    return points.astype(np.float32), which.astype(np.int32)


def parameters(g: hg.Graph) -> list[tuple[hg.Value, hg.Value]]:
    """Return the variables of three layers."""
    random = np.random.default_rng(6)
    sizes = [2, HIDDEN, HIDDEN, 2]
    return [
        (
            g.variable(f"w{n}", (rows, columns), "f32", init=random.normal(0, rows**-0.5, (rows, columns))),
            g.variable(f"b{n}", (columns,), "f32"),
        )
        for n, (rows, columns) in enumerate(pairwise(sizes))
    ]


def logits(layers: list[tuple[hg.Value, hg.Value]], x: hg.Value) -> hg.Value:
    for w, b in layers[:-1]:
        x = hg.tanh(x @ w * 2.0 + b)
    w, b = layers[-1]
    return x @ w + b


def train(g: hg.Graph, x: hg.Value, labels: hg.Value) -> hg.Value:
    """Add a step of training to a graph, and return its loss."""
    layers = parameters(g)
    wanted = hg.astype(hg.expand_dims(labels, axis=1) == np.arange(2, dtype=np.int32), "f32")
    loss = hg.ops.cross_entropy_loss(logits(layers, x), wanted)
    hg.optim.adamw(layers, hg.grad(loss, layers), 0.01)
    return loss


def one_batch() -> hg.Graph:
    """Return a step whose batch is an input."""
    g = hg.Graph()
    g.output("loss", train(g, g.input("x", (BATCH, 2), "f32"), g.input("labels", (BATCH,), "i32")))
    return g


def many_batches(points: np.ndarray, which: np.ndarray) -> hg.Graph:
    """Return a step that draws its batch from points on the daemon."""
    g = hg.Graph()
    step = g.input("step", (), "i64")
    drawn = hg.astype(hg.random.uniform((BATCH,), 1, step) * POINTS, "i32")
    x, labels = (
        hg.take(g.weight(name, array), drawn, axis=0)
        for name, array in (("points", points), ("which", which))
    )
    g.output("loss", train(g, x, labels))
    g.output("following", step + 1)
    return g


def answers() -> hg.Graph:
    """Return the trained network, which reads the same variables."""
    g = hg.Graph()
    g.output("spiral", hg.argmax(logits(parameters(g), g.input("x", (POINTS, 2), "f32")), axis=1))
    return g


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "local:"
    points, which = spirals()
    with hg.connect(url) as session:
        step = session.compile(one_batch())
        random = np.random.default_rng(7)
        for number in range(100):
            batch = random.integers(0, POINTS, BATCH)
            loss = step.run(x=points[batch], labels=which[batch])["loss"]
            if number % 25 == 0:
                print(f"step {number}: loss {loss:.3f}")

        loop = session.compile(many_batches(points, which)).loop(
            step=np.int64(0), steps=300, carry={"following": "step"}
        )
        loss = loop.result()["loss"]
        print(f"{loop.steps} steps on the daemon: loss {loss:.3f}")

        found = session.compile(answers()).run(x=points)["spiral"]
        print(f"{(found == which).mean():.0%} of the points are told apart")
