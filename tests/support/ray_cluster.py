"""A Ray cluster of several nodes on this machine, as a program: Ray stays out of the process of the tests.

It writes where the cluster is, as a JSON object with the id of each node's main process, and does what its
input says, a line each: `add` a node, `remove ID` of its main process, as if its power had failed. It ends
with its input.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80 * 2**20
CLIENT_PORT = 10001


class Nodes:
    """A head node without processors, so that no member is placed there, and others with one each."""

    def __init__(self, count: int, folder: str) -> None:
        options = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        options |= {"object_store_memory": OBJECT_STORE_BYTES, "ray_client_server_port": CLIENT_PORT}
        self.cluster = Cluster(initialize_head=True, head_node_args=options)
        self.nodes: dict[int, Any] = {}
        for _ in range(count):
            self.add()

    def add(self) -> int:
        node = self.cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        (raylet,) = node.all_processes["raylet"]
        self.nodes[raylet.process.pid] = node
        return int(raylet.process.pid)

    def remove(self, pid: int) -> int:
        self.cluster.remove_node(self.nodes.pop(pid), allow_graceful=False)
        return pid


def main() -> None:
    # Ray makes sockets there, whose paths must be short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    # There it notes which cluster is the current one; somebody who works here may have another.
    os.environ["RAY_TMPDIR"] = folder
    os.mkdir(os.path.join(folder, "ray"))
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        nodes = Nodes(int(sys.argv[1]), folder)
        told = {"address": nodes.cluster.address, "nodes": list(nodes.nodes), "client_port": CLIENT_PORT}
        print(json.dumps(told), file=kept)
        for line in sys.stdin:
            what, *pid = line.split()
            print(json.dumps(nodes.remove(int(pid[0])) if what == "remove" else nodes.add()), file=kept)
        nodes.cluster.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
