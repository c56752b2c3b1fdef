"""Two daemons as one pool: a model over both, and a result that is the same bit for bit.

The daemons run on this machine here. On machines of yours, run `heliograph serve` on each, and pass
their addresses: python pool.py grpc://one:7070 grpc://two:7070
"""

import sys
from contextlib import ExitStack

import numpy as np

import heliograph as hg
from heliograph.testing import running_daemon


def model() -> hg.Graph:
    """Return a graph of four layers, from `x`, f32 [1, 64], to `y`."""
    random = np.random.default_rng(0)
    graph = hg.Graph()
    x = graph.input("x", (1, 64), "f32")
    for number in range(4):
        with graph.scope(f"layer{number}"):
            x = hg.gelu(x @ graph.weight("w", random.standard_normal((64, 64)).astype(np.float32) / 8))
    graph.output("y", x)
    return graph


if __name__ == "__main__":
    x = np.ones((1, 64), np.float32)
    with ExitStack() as stack:
        urls = sys.argv[1:] or [stack.enter_context(running_daemon()) for _ in range(2)]
        pool = stack.enter_context(hg.connect(urls))
        first, *_, last = [device.name for device in pool.devices]
        plan = pool.compile(model(), [first, last], pins={"layer0/*": first, "layer3/*": last})
        y = plan.run(x=x)["y"]
        print(plan.explain())
        with hg.connect("local:") as here:
            assert np.array_equal(y, here.compile(model()).run(x=x)["y"])
        print("the same bits as in one process")
