"""Arrow Flight as a transport for an array: do_put and do_get of record batches with one column of bytes.

Run with an interpreter that has pyarrow. `server` says its port; `client PORT` answers lines
"upload|download BYTES RUNS CHUNK". What comes is copied into a warm array, on either side.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
from peer_lines import Bytes, Timed, Warm, answer, end_with_parent, say

SCHEMA = pa.schema([("data", pa.uint8())])


def batches(array: Bytes, chunk: int):  # type: ignore[no-untyped-def]
    for start in range(0, array.nbytes, chunk):
        piece = array[start : start + chunk]
        column = pa.Array.from_buffers(pa.uint8(), piece.nbytes, [None, pa.py_buffer(piece)])
        yield pa.record_batch([column], schema=SCHEMA)


def fill(array: Bytes, reader) -> None:  # type: ignore[no-untyped-def]
    at = 0
    for chunk in reader:
        piece = chunk.data.column(0).to_numpy()
        np.copyto(array[at : at + piece.nbytes], piece)
        at += piece.nbytes
    assert at == array.nbytes


class Server(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._memory = Warm()

    def do_put(self, context, descriptor, reader, writer) -> None:  # type: ignore[no-untyped-def]
        fill(self._memory.of(int(descriptor.command)), reader)

    def do_get(self, context, ticket):  # type: ignore[no-untyped-def]
        nbytes, chunk = map(int, ticket.ticket.split())
        return flight.GeneratorStream(SCHEMA, batches(self._memory.of(nbytes), chunk))


class Client:
    def __init__(self, port: int) -> None:
        self._client = flight.connect(f"grpc://127.0.0.1:{port}")

    def prepare(self, nbytes: int) -> None:
        pass

    def upload(self, array: Bytes, chunk: int) -> None:
        descriptor = flight.FlightDescriptor.for_command(str(array.nbytes))
        writer, _ = self._client.do_put(descriptor, SCHEMA)
        for batch in batches(array, chunk):
            writer.write_batch(batch)
        writer.close()  # waits for the server

    def download(self, array: Bytes, chunk: int) -> None:
        fill(array, self._client.do_get(flight.Ticket(f"{array.nbytes} {chunk}")))


if __name__ == "__main__":
    if sys.argv[1] == "server":
        end_with_parent()
        server = Server()
        say(server.port)
        server.serve()
    else:
        answer(Timed(Client(int(sys.argv[2]))))
