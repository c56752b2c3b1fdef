"""ggml's RPC backend as a peer: its own server and its own client, in C++, through ctypes.

`server [THREADS]` offers the CPU and says its port. `client PORT` answers lines "upload|download BYTES RUNS",
"graph BYTES RUNS" (a tensor is set, a graph of one op computed, its result got), "get BYTES RUNS" and
"pipelined BYTES RUNS" (graphs sent one after the other, seconds of each on average). ggml's client does not
wait for a tensor that it sends, so an upload here gets a few bytes of it afterwards: what is timed is until
the server has it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import partial
from typing import Any

from peer_lines import Bytes, Timed, answer, end_with_parent, say, warm
from peer_process import PEERS

FOLDER = PEERS / "ggml-rpc" / "llama_cpp" / "lib"
CPU_DEVICE = 0
TYPE_F32 = 0
START_SECONDS = 20.0
WARMUP = 50

#: Results and parameters of the functions that are called; of pointers only that they are some.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_new_tensor_1d": (c_void_p, c_void_p, c_int, c_int64),
    "ggml_add": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_free": (None, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_dev_by_type": (c_void_p, c_int),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_graph_compute_async": (c_int, c_void_p, c_void_p),
    "ggml_backend_rpc_buffer_type": (c_void_p, c_char_p, c_uint32),
    "ggml_backend_rpc_init": (c_void_p, c_char_p, c_uint32),
    "ggml_backend_rpc_start_server": (None, c_char_p, c_char_p, c_size_t, c_size_t, c_void_p),
    "ggml_backend_synchronize": (None, c_void_p),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Library:
    """The functions, each looked up in the libraries that ggml consists of."""

    def __init__(self) -> None:
        names = ("base", "cpu", "rpc", "")
        files = [FOLDER / f"libggml{'-' * bool(name)}{name}.so" for name in names]
        loaded = [ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL) for file in files]
        for name, (result, *parameters) in {**SIGNATURES, "ggml_init": (c_void_p, InitParams)}.items():
            function = next(getattr(one, name) for one in loaded if hasattr(one, name))
            function.restype, function.argtypes = result, parameters
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} has no signature here")


def serve(threads: int = 1) -> None:
    """One thread is the fastest for few numbers: ggml's threads spin to meet."""
    end_with_parent()
    library = Library()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    say(port)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ggml's server prints
    devices = (c_void_p * 1)(library.ggml_backend_dev_by_type(CPU_DEVICE))
    library.ggml_backend_rpc_start_server(f"127.0.0.1:{port}".encode(), None, threads, 1, devices)


def wait_for(port: int) -> None:
    """Until the server accepts; it says nothing when it does, and serves one client at a time."""
    deadline = time.perf_counter() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.perf_counter() > deadline:
                raise
            time.sleep(0.05)


class Allocated:
    """Tensors of one size in a buffer of the server, and their sum."""

    def __init__(self, library: Library, buffer_type: int, nbytes: int, *, summed: bool) -> None:
        self._library = library
        size = 8 * library.ggml_tensor_overhead() + library.ggml_graph_overhead()
        self._context = library.ggml_init(InitParams(size, None, True))
        self.tensor = library.ggml_new_tensor_1d(self._context, TYPE_F32, nbytes // 4)
        if summed:
            self.result = library.ggml_add(self._context, self.tensor, self.tensor)
            self.graph = library.ggml_new_graph(self._context)
            library.ggml_build_forward_expand(self.graph, self.result)
        self._buffer = library.ggml_backend_alloc_ctx_tensors_from_buft(self._context, buffer_type)
        assert self._buffer, f"ggml-rpc has no {nbytes} bytes"

    def free(self) -> None:
        self._library.ggml_backend_buffer_free(self._buffer)
        self._library.ggml_free(self._context)


class Client:
    def __init__(self, port: int) -> None:
        wait_for(port)
        self._library = Library()
        endpoint = f"127.0.0.1:{port}".encode()
        self._backend = self._library.ggml_backend_rpc_init(endpoint, 0)
        self._buffer_type = self._library.ggml_backend_rpc_buffer_type(endpoint, 0)
        assert self._backend and self._buffer_type, "no connection to ggml-rpc's server"
        self._allocated: Allocated | None = None
        self._few = warm(4)

    def prepare(self, nbytes: int) -> None:
        if self._allocated:
            self._allocated.free()
        self._allocated = Allocated(self._library, self._buffer_type, nbytes, summed=False)

    def upload(self, array: Bytes) -> None:
        assert self._allocated
        self._set(self._allocated.tensor, array)
        self._get(self._allocated.tensor, self._few)

    def download(self, array: Bytes) -> None:
        assert self._allocated
        self._get(self._allocated.tensor, array)

    def graph(self, nbytes: int, runs: int) -> list[float]:
        found = Allocated(self._library, self._buffer_type, nbytes, summed=True)
        given, result = warm(nbytes), warm(nbytes)

        def run() -> None:
            self._set(found.tensor, given)
            self._library.ggml_backend_graph_compute(self._backend, found.graph)
            self._get(found.result, result)

        return self._seconds(run, runs, found)

    def get(self, nbytes: int, runs: int) -> list[float]:
        found = Allocated(self._library, self._buffer_type, nbytes, summed=False)
        return self._seconds(partial(self._get, found.tensor, warm(nbytes)), runs, found)

    def pipelined(self, nbytes: int, runs: int) -> list[float]:
        found = Allocated(self._library, self._buffer_type, nbytes, summed=True)

        def run() -> None:
            for _ in range(runs):
                self._library.ggml_backend_graph_compute_async(self._backend, found.graph)
            self._library.ggml_backend_synchronize(self._backend)
            self._get(found.result, self._few)  # the server has computed all of them

        return [seconds / runs for seconds in self._seconds(run, 1, found, warmup=1)]

    def _seconds(self, call: Any, runs: int, allocated: Allocated, warmup: int = WARMUP) -> list[float]:
        seconds = []
        for _ in range(runs + warmup):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        allocated.free()
        return seconds[warmup:]

    def _set(self, tensor: int, array: Bytes) -> None:
        self._library.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)

    def _get(self, tensor: int, array: Bytes) -> None:
        self._library.ggml_backend_tensor_get(tensor, array.ctypes.data, 0, array.nbytes)


def main() -> None:
    if sys.argv[1] == "server":
        serve(*map(int, sys.argv[2:]))
        return
    client = Client(int(sys.argv[2]))
    timed = Timed(client)
    others = {"graph": client.graph, "get": client.get, "pipelined": client.pipelined}
    answer(lambda name, *numbers: others[name](*numbers) if name in others else timed(name, *numbers))


if __name__ == "__main__":
    main()
