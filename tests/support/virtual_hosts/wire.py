"""A wire between two interfaces of one namespace, as a process of the standard library alone.

    python wire.py INTERFACE INTERFACE '{"delay_seconds": 0.005}'

Frames are read from packet sockets and sent on the other side when their time has come. No frame overtakes
another. A line with fields of `Wire` on standard input changes the wire, and each line, an empty one too, is
answered by one with the counts so far. The end of standard input ends the process, so it never outlives who
started it.

The kernel hands over what it would have segmented later: a frame of up to 64 KiB with a header that says so.
It travels whole, takes the time of its segments, and is lost whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

# From linux/if_ether.h, linux/if_packet.h, asm-generic/socket.h and linux/prctl.h.
ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_STATISTICS, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 6, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PR_SET_TIMERSLACK = 29

#: struct virtio_net_hdr: flags, kind of segments, bytes of headers and of a segment, two about the checksum.
OFFLOAD_HEADER = struct.Struct("=BBHHHH")
LARGEST_FRAME = 65_536 + 64 + OFFLOAD_HEADER.size
SOCKET_BYTES = 32 * 2**20
#: So many frames of one side are read before those of the other get their turn.
FRAMES_A_TURN = 32


@dataclass(frozen=True)
class Wire:
    """What a wire is like, the same in both directions. The default is a wire that takes no time."""

    #: From the end of sending a frame to its arrival.
    delay_seconds: float = 0.0
    #: 0: without bound.
    rate_bits_per_second: float = 0.0
    #: The fraction of frames that is lost, 0 to 1.
    loss: float = 0.0
    #: Which ones are lost: the same traffic with the same seed loses the same frames.
    seed: int = 0
    #: How much may wait for being sent in a direction, beside what is on its way; more is dropped.
    queue_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.delay_seconds < 0 or self.rate_bits_per_second < 0 or not 0 <= self.loss <= 1:
            raise ValueError(f"no wire is like this: {self}")

    @property
    def room_bytes(self) -> float:
        """The most that a direction holds."""
        return self.queue_bytes + self.rate_bits_per_second * self.delay_seconds / 8


@dataclass
class Counts:
    """Frames of one direction since the wire began."""

    received: int = 0
    sent: int = 0
    #: By the wire's own dice.
    lost: int = 0
    #: For want of room in the wire's queue, or in the kernel's before it.
    dropped: int = 0
    #: Because the interface on the other side was down, or refused them.
    refused: int = 0


class Line:
    """One direction of a wire: when each frame arrives. Pure; the caller tells the time, in seconds."""

    def __init__(self, wire: Wire, name: str) -> None:
        self.wire = wire
        self.counts = Counts()
        self._name = name
        self._dice = random.Random(f"{wire.seed}/{name}")
        #: (when it arrives, the frame), in order.
        self._frames: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0
        #: When the last frame has been sent, and when it arrives.
        self._idle_at = self._last_arrival = 0.0

    def change(self, wire: Wire) -> None:
        """From the next frame on the wire is another; what is on its way arrives as it would have."""
        if wire.seed != self.wire.seed:
            self._dice = random.Random(f"{wire.seed}/{self._name}")
        self.wire = wire

    def put(self, now: float, frame: bytes, size_bytes: int) -> None:
        """A frame enters, which takes so many bytes of the wire's rate; perhaps it is lost or dropped."""
        self.counts.received += 1
        if self.wire.loss and self._dice.random() < self.wire.loss:
            self.counts.lost += 1
        elif self._held_bytes + len(frame) > self.wire.room_bytes:
            self.counts.dropped += 1
        else:
            self._idle_at = max(now, self._idle_at)
            if self.wire.rate_bits_per_second:
                self._idle_at += size_bytes * 8 / self.wire.rate_bits_per_second
            self._last_arrival = max(self._last_arrival, self._idle_at + self.wire.delay_seconds)
            self._frames.append((self._last_arrival, frame))
            self._held_bytes += len(frame)

    def arrived(self, now: float) -> Iterator[bytes]:
        """The frames whose time has come, in order; they leave the line."""
        while self._frames and self._frames[0][0] <= now:
            _, frame = self._frames.popleft()
            self._held_bytes -= len(frame)
            yield frame

    def told(self, sent: bool) -> None:
        """Whether a frame that arrived could be sent on."""
        self.counts.sent += sent
        self.counts.refused += not sent

    def lacked(self, dropped: int) -> None:
        """So many frames never came to this process."""
        self.counts.dropped += dropped

    @property
    def next_arrival(self) -> float:
        """When the next frame arrives; infinity if none is on its way."""
        return self._frames[0][0] if self._frames else float("inf")


class Port:
    """One interface, as a packet socket that neither waits nor sees what it has sent itself."""

    def __init__(self, interface: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        for forced, bounded in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            self._enlarge(forced, bounded)
        self.socket.bind((interface, ETH_P_ALL))
        self.socket.setblocking(False)
        self._buffer = bytearray(LARGEST_FRAME)

    def _enlarge(self, forced: int, bounded: int) -> None:
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BYTES)
        except PermissionError:
            # In a user namespace the system's bound holds.
            self.socket.setsockopt(socket.SOL_SOCKET, bounded, SOCKET_BYTES)

    def received(self) -> Iterator[tuple[bytes, int]]:
        """Frames that have come, with their offload header, and what each takes on a wire; a turn's worth."""
        for _ in range(FRAMES_A_TURN):
            try:
                length = self.socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                # Said once of an interface that was set down; the socket goes on when it is up again.
                if error.errno != errno.ENETDOWN:
                    raise
                return
            yield bytes(memoryview(self._buffer)[:length]), self._size_on_wire(length)

    def _size_on_wire(self, length: int) -> int:
        """Each segment of a large frame has the headers that the frame has once."""
        header_bytes: int
        segment_bytes: int
        _, _, header_bytes, segment_bytes, _, _ = OFFLOAD_HEADER.unpack_from(self._buffer)
        frame_bytes = length - OFFLOAD_HEADER.size
        if not segment_bytes:
            return frame_bytes
        segments = -(-(frame_bytes - header_bytes) // segment_bytes)
        return frame_bytes + (segments - 1) * header_bytes

    def send(self, frame: bytes) -> bool:
        """Whether the interface took it."""
        try:
            self.socket.send(frame)
        except OSError:
            return False
        return True

    def dropped(self) -> int:
        """How many frames found no room in the socket since this was last asked."""
        return int(struct.unpack("II", self.socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1])


class Control:
    """Standard input and output: lines that change the wire, answers with counts."""

    def __init__(self, lines: tuple[Line, Line], ports: tuple[Port, Port]) -> None:
        self._lines, self._ports = lines, ports
        self._pending = b""

    def read(self) -> bool:
        """Does what standard input says; False at its end."""
        given = os.read(sys.stdin.fileno(), 65_536)
        *whole, self._pending = (self._pending + given).split(b"\n")
        for text in whole:
            if text.strip():
                for line in self._lines:
                    line.change(Wire(**json.loads(text)))
            self.tell()
        return bool(given)

    def tell(self) -> None:
        """One line: the counts of both directions."""
        for line, port in zip(self._lines, self._ports, strict=True):
            line.lacked(port.dropped())
        # Nobody may be there to read the last one.
        with contextlib.suppress(BrokenPipeError):
            os.write(
                sys.stdout.fileno(), json.dumps([asdict(one.counts) for one in self._lines]).encode() + b"\n"
            )


def carry(ports: tuple[Port, Port], lines: tuple[Line, Line], control: Control) -> None:
    """Carries frames until standard input ends. Sending comes first, since what is due must not wait."""
    near, far = ports
    transports = ((near, lines[0], far), (far, lines[1], near))
    sources = [near.socket, far.socket, sys.stdin]
    while True:
        for _, line, out in transports:
            for frame in line.arrived(time.monotonic()):
                line.told(out.send(frame))
        wait = min(line.next_arrival for line in lines) - time.monotonic()
        # select counts microseconds; epoll would round up to milliseconds.
        ready = select.select(sources, [], [], min(max(wait, 0.0), 10.0))[0]
        for into, line, _ in transports:
            if into.socket in ready:
                for frame, size_bytes in into.received():
                    line.put(time.monotonic(), frame, size_bytes)
        if sys.stdin in ready and not control.read():
            return


def be_punctual() -> None:
    """Timers to the microsecond, and in front of other processes where that is allowed."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def main() -> None:
    """Tells the counts, all zero, once it carries; and once more at the end."""
    near, far, described = sys.argv[1:]
    wire = Wire(**json.loads(described))
    ports = (Port(near), Port(far))
    lines = (Line(wire, "there"), Line(wire, "back"))
    be_punctual()
    control = Control(lines, ports)
    control.tell()
    carry(ports, lines, control)
    control.tell()


if __name__ == "__main__":
    main()
