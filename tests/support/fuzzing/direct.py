"""Mutated conversations on direct connections: requests, transfers, and the pieces of packed ones."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from blake3 import blake3

import heliograph as hg
from heliograph_proto.codec.frames import framed
from heliograph_proto.codec.packing import HEADER, Encoding, pack
from heliograph_proto.sessions import DirectOffer
from heliograph_proto.v1 import direct_pb2

#: The bytes of a content, and the most that are read of an answer.
CONTENT_BYTES, MOST_READ = 24 * 1024, 2**20
#: The bound of each wait. A daemon that answers later hangs.
SECONDS = 20.0
#: How long a whole conversation may wait for more of the daemon, since a torn one may be owed nothing.
PATIENCE_SECONDS = 0.02
#: Conversations of one session.
OF_A_SESSION = 25


def play_direct(url: str, token: str, chance: random.Random, count: int) -> list[str]:
    """Play conversations, in sessions of their own, and return what must never be."""
    faults: list[str] = []
    for first in range(0, count, OF_A_SESSION):
        with hg.connect(url, token=token, shared_memory=False, direct=False) as session:
            offer = session.info.direct
            if offer is None:
                return ["the daemon offers no direct connections"]
            for _ in range(min(OF_A_SESSION, count - first)):
                faults += _play(offer, _mutated(_conversation(offer, chance), chance), chance)
    return faults


def _conversation(offer: DirectOffer, chance: random.Random) -> bytearray:
    """A conversation without a fault: contents, plain or in pieces, and transfers of any number."""
    request = direct_pb2.DirectRequest(ticket=offer.ticket, transfers=direct_pb2.TransferConnection())
    talk = bytearray(framed(request.SerializeToString()))
    for _ in range(chance.randrange(1, 4)):
        data = chance.randbytes(16) * (chance.randrange(1, CONTENT_BYTES) // 16 + 1)
        digest, size = blake3(data).digest(), len(data)
        match chance.randrange(4):
            case 0:
                talk += _transfer(content=digest, size_bytes=size) + data
            case 1:
                talk += _transfer(content=digest, size_bytes=size, is_packed=True)
                for at in range(0, size, 4096):
                    talk += _piece(data[at : at + 4096], chance)
            case 2:
                talk += _transfer(upload=chance.randrange(2**20), size_bytes=size) + data
            case _:
                number = chance.randrange(2**20)
                talk += _transfer(download=number, size_bytes=size, encodings=[1, 2], bytes_per_second=1)
    return talk


def _transfer(**what: object) -> bytes:
    return framed(direct_pb2.DirectTransfer(**what).SerializeToString())  # type: ignore[arg-type]


def _piece(data: bytes, chance: random.Random) -> bytes:
    encoding = chance.choice([Encoding.PLAIN, Encoding.PLANES_ZSTD])
    packed = pack(encoding, memoryview(data)) if encoding else None
    if packed is None:
        return HEADER.pack(Encoding.PLAIN, len(data), len(data)) + data
    return HEADER.pack(encoding, len(data), len(packed)) + bytes(packed)


def _mutated(talk: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        at = chance.choice([chance.randrange(80), chance.randrange(len(talk) + 1)])
        match chance.randrange(5):
            case 0:
                talk[at : at + 1] = chance.randbytes(1)
            case 1:
                del talk[at : at + chance.randrange(1, 64)]
            case 2:
                talk[at:at] = chance.randbytes(chance.randrange(1, 64))
            case 3:
                talk[at : at + 4] = chance.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x80"))
            case _:
                del talk[at:]
                talk += b"\0"
    return talk


def _play(offer: DirectOffer, talk: bytearray, chance: random.Random) -> list[str]:
    """Send a conversation, in parts, and read what comes."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", offer.port), SECONDS) as made:
        try:
            while talk:
                size = chance.choice((1, 7, 64, 4096, 2**20))
                made.sendall(talk[:size])
                del talk[:size]
            if is_half := chance.random() < 0.5:
                made.shutdown(socket.SHUT_WR)
            made.settimeout(SECONDS if is_half else PATIENCE_SECONDS)
            received = 0
            while received < MOST_READ and (data := made.recv(2**16)):
                received += len(data)
        except TimeoutError:
            if made.gettimeout() == SECONDS:
                return ["a direct connection whose client had ended did not end"]
    return []
