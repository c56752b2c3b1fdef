"""What one host sends to see how the way to another is: a program of the standard library alone.

    python probes.py answer PORT                       # the other side of all others; says "ready" first
    python probes.py round-trips ADDRESS PORT COUNT    # seconds of each, a byte there and back over TCP
    python probes.py datagrams ADDRESS PORT COUNT      # how many of so many came back
    python probes.py bulk ADDRESS PORT BYTES           # seconds until so many bytes were known to be there
    python probes.py reach ADDRESS PORT                # "answer", "reset" or "silence"

What is found is a line of JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

#: How long to wait for what may be lost.
PATIENCE_SECONDS = 1.0
#: For what must not be lost.
LONG_SECONDS = 60.0
ECHO, SINK = b"e", b"s"
DATAGRAM = bytes(100)


def answer(port: int) -> None:
    """Serves until it is killed."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("", port))
    listener = socket.create_server(("", port))
    threading.Thread(target=return_datagrams, args=(datagrams,), daemon=True).start()
    print(json.dumps("ready"), flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def return_datagrams(datagrams: socket.socket) -> None:
    while True:
        data, sender = datagrams.recvfrom(2048)
        datagrams.sendto(data, sender)


def serve(connection: socket.socket) -> None:
    """Returns every byte, or takes all and tells how many there were."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        if connection.recv(1) == ECHO:
            while data := connection.recv(4096):
                connection.sendall(data)
        else:
            taken = 0
            while data := connection.recv(2**20):
                taken += len(data)
            connection.sendall(str(taken).encode())


def connected(address: str, port: int, mode: bytes, patience: float = LONG_SECONDS) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=patience)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(mode)
    return connection


def round_trips(address: str, port: int, count: int) -> list[float]:
    found = []
    with connected(address, port, ECHO) as connection:
        for _ in range(count):
            begun = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            found.append(time.perf_counter() - begun)
    return found


def datagrams(address: str, port: int, count: int) -> int:
    """As many as were answered before a second of silence."""
    returned = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.settimeout(PATIENCE_SECONDS)
        for _ in range(count):
            sender.sendto(DATAGRAM, (address, port))
        try:
            while returned < count:
                sender.recv(2048)
                returned += 1
        except TimeoutError:
            pass
    return returned


def bulk(address: str, port: int, size_bytes: int) -> float:
    with connected(address, port, SINK) as connection:
        begun = time.perf_counter()
        connection.sendall(bytes(size_bytes))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(64) == str(size_bytes).encode()
        return time.perf_counter() - begun


def reach(address: str, port: int) -> str:
    try:
        with connected(address, port, ECHO, PATIENCE_SECONDS) as connection:
            connection.sendall(b"x")
            return "answer" if connection.recv(1) == b"x" else "reset"
    except TimeoutError:
        return "silence"
    except ConnectionError:
        return "reset"


def main() -> None:
    what, *given = sys.argv[1:]
    match what, given:
        case "answer", [port]:
            answer(int(port))
        case "reach", [address, port]:
            print(json.dumps(reach(address, int(port))))
        case (("round-trips" | "datagrams" | "bulk"), [address, port, number]):
            probe = {"round-trips": round_trips, "datagrams": datagrams, "bulk": bulk}[what]
            print(json.dumps(probe(address, int(port), int(number))))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
