"""A first graph: build it, compile it, run it, and keep a tensor on the daemon.

python first_graph.py                          # in this process
python first_graph.py grpc://127.0.0.1:7070    # on a daemon: heliograph serve
"""

import sys

import numpy as np

import heliograph as hg

url = sys.argv[1] if len(sys.argv) > 1 else "local:"

graph = hg.Graph()
x = graph.input("x", (4, 3), "f32")
w = graph.weight("w", np.ones((3, 2), np.float32))
graph.output("y", hg.softmax(x @ w + 1.0, axis=-1))

with hg.connect(url) as session:
    plan = session.compile(graph)  # validate, place, upload the weights
    y = plan.run(x=np.zeros((4, 3), np.float32))["y"]  # one message each way
    print("y =", y[0])

    kept = session.put(np.ones((4, 3), np.float32))  # this tensor stays on the daemon
    print("kept:", plan.run(x=kept)["y"].shape, "on", session.devices[0].name)
    print(plan.explain())
