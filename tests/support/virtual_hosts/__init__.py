"""Hosts for tests: network namespaces that a bridge joins, with wires that take time, have a rate and lose.

    with Network(server=Wire(), client=Wire(delay_seconds=0.005, loss=0.01)) as network:
        url = f"grpc://{network['server'].address}:7070"
        daemon = network["server"].popen(["heliograph", "serve", "--insecure", "--listen", url])
        network["client"].run([sys.executable, "client.py"], timeout=30)
        network["client"].cut()

No namespace has a name, and no file stands for one: descriptors of this process hold them, and what runs in
them. Processes there end with the thread that started them, whatever ends it, and the kernel takes the
namespaces away. So nothing is left behind, not even after SIGKILL, and any number of networks may exist at
once, all with the same addresses. Who is not root has them in a user namespace, as with `make test-hosts`.

`rights()` tells why this machine cannot do it; empty if it can. Linux, iproute2 and util-linux are needed,
and nftables for `Host.reject` alone.
"""

from virtual_hosts.namespaces import NetworkError, processes_in, rights
from virtual_hosts.network import Host, Network
from virtual_hosts.wire import Counts, Wire

__all__ = ["Counts", "Host", "Network", "NetworkError", "Wire", "processes_in", "rights"]
