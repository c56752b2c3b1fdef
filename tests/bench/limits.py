"""The limits of the machine: what no program of its kind gets past, in the same run as the figures.

Rates are the best of several turns, since whatever else the machine does only slows them down. The
loops are compiled here, so that neither Python nor a library stands between them and the processor.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from figures import Figure
from peer_process import PeerProcess

#: More than caches hold.
BUFFER_BYTES = 256 * 2**20
TURNS = 15
#: Multiply-adds in one iteration of a loop, and what a loop runs.
CHAINS, ITERATIONS = 12, 1_000_000
SYSTEM_CALLS = 100_000
ECHO_BYTES, ECHO_ROUNDS, ECHOES = 64, 3, 300
NO_BAR = float("inf")

_CODE = """
declare {v} @llvm.fma.{name}({v}, {v}, {v})
declare i32 @getppid()

define i32 @read(i64 %address, i64 %bytes) {{
entry:
  %start = inttoptr i64 %address to <16 x i32>*
  %count = lshr i64 %bytes, 8
  br label %next
next:
  %index = phi i64 [0, %entry], [%more, %next]
{read_cells}
  %at = mul i64 %index, 4
  %first = getelementptr <16 x i32>, <16 x i32>* %start, i64 %at
{reads}
  %more = add i64 %index, 1
  %go = icmp ult i64 %more, %count
  br i1 %go, label %next, label %end
end:
  %a = xor <16 x i32> %r0, %r1
  %b = xor <16 x i32> %r2, %r3
  %c = xor <16 x i32> %a, %b
  %found = extractelement <16 x i32> %c, i32 0
  ret i32 %found
}}

define i32 @multiply(i64 %given, i64 %count) {{
entry:
  %single = sitofp i64 %given to float
  %one = insertelement {v} undef, float %single, i32 0
  %x = shufflevector {v} %one, {v} undef, <{lanes} x i32> zeroinitializer
  br label %next
next:
  %index = phi i64 [0, %entry], [%more, %next]
{cells}
{steps}
  %more = add i64 %index, 1
  %go = icmp ult i64 %more, %count
  br i1 %go, label %next, label %end
end:
{sums}
  %lane = extractelement {v} %s{last}, i32 0
  %found = fptosi float %lane to i32
  ret i32 %found
}}

define i32 @ask(i64 %none, i64 %count) {{
entry:
  br label %next
next:
  %index = phi i64 [0, %entry], [%more, %next]
  %found = call i32 @getppid()
  %more = add i64 %index, 1
  %go = icmp ult i64 %more, %count
  br i1 %go, label %next, label %end
end:
  ret i32 %found
}}
"""


@dataclass(frozen=True)
class Limits:
    """Rates in GB/s and GFLOP/s, of one thread and of all."""

    threads: int
    copy: tuple[float, float]
    read: tuple[float, float]
    multiply: tuple[float, float]
    system_call_ns: float

    def least(self, read_bytes: float = 0.0, operations: float = 0.0) -> tuple[float, str]:
        """Return the fewest seconds for so much work on all threads, and the limit's name."""
        times = {
            f"reading at {self.read[1]:.0f} GB/s": read_bytes / self.read[1] / 1e9,
            f"{self.multiply[1]:.0f} GFLOP/s": operations / self.multiply[1] / 1e9,
        }
        name = max(times, key=lambda name: times[name])
        return times[name], name

    def beside(self, seconds: float, *, read_bytes: float = 0.0, operations: float = 0.0) -> str:
        """Return a note that has a figure's time beside the limit for its work."""
        least, name = self.least(read_bytes, operations)
        return f"{seconds / least:.2f} of {least * 1e3:.3f} ms by {name}"


class Code:
    """The compiled loops."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        lanes = 16 if features.get("avx512f") else 8 if features.get("avx2") else 4
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True
        )
        #: Operations in an iteration of `multiply`.
        self.operations = 2 * lanes * CHAINS
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(_code(lanes)), target)
        self._engine.finalize_object()

    def function(self, name: str) -> Callable[[int, int], int]:
        """Return a loop; it runs without the GIL."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
        found: Callable[[int, int], int] = kind(self._engine.get_function_address(name))
        return found


def _code(lanes: int) -> str:
    v = f"<{lanes} x float>"
    fma = f"call {v} @llvm.fma.v{lanes}f32({v} %x, {v} %x, {v}"
    zero = "zeroinitializer"
    lines = {
        "read_cells": [f"  %o{n} = phi <16 x i32> [{zero}, %entry], [%r{n}, %next]" for n in range(4)],
        "reads": [
            f"  %p{n} = getelementptr <16 x i32>, <16 x i32>* %first, i64 {n}\n"
            f"  %w{n} = load <16 x i32>, <16 x i32>* %p{n}, align 64\n"
            f"  %r{n} = xor <16 x i32> %o{n}, %w{n}"
            for n in range(4)
        ],
        "cells": [f"  %o{n} = phi {v} [{zero}, %entry], [%r{n}, %next]" for n in range(CHAINS)],
        "steps": [f"  %r{n} = {fma} %o{n})" for n in range(CHAINS)],
        "sums": [f"  %s{n} = fadd {v} %r{n}, {f'%s{n - 1}' if n else '%x'}" for n in range(CHAINS)],
    }
    joined = {name: "\n".join(each) for name, each in lines.items()}
    return _CODE.format(v=v, name=f"v{lanes}f32", lanes=lanes, last=CHAINS - 1, **joined)


@cache
def limits() -> Limits:
    """Measure the machine; once in a process."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    code = Code()
    source, target = (np.ones(BUFFER_BYTES // 4, np.int32) for _ in range(2))
    start, part = -(-source.ctypes.data // 64) * 64, (BUFFER_BYTES - 64) // threads // 256 * 256
    pieces = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    read, multiply, ask = (code.function(name) for name in ("read", "multiply", "ask"))
    with ThreadPoolExecutor(threads) as pool:

        def seconds(call: Callable[[int], object], workers: int) -> float:
            found = []
            for _ in range(TURNS):
                begun = time.perf_counter()
                list(pool.map(call, range(workers)))
                found.append(time.perf_counter() - begun)
            return min(found)

        def rates(amount: float, call: Callable[[int], object]) -> tuple[float, float]:
            """Return the rate of one worker and that of all, each of which does an amount."""
            one, all_ = (workers * amount / seconds(call, workers) / 1e9 for workers in (1, threads))
            return one, max(one, all_)

        return Limits(
            threads,
            rates(2 * BUFFER_BYTES / threads, lambda number: np.copyto(*pieces[number])),
            rates(part, lambda number: read(start + number * part, part)),
            rates(code.operations * ITERATIONS, lambda _: multiply(0, ITERATIONS)),
            seconds(lambda _: ask(0, SYSTEM_CALLS), 1) / SYSTEM_CALLS * 1e9,
        )


def figures() -> Iterator[Figure]:
    """The limits as figures without a bar; the peer of a rate of all threads is that of one."""
    found = limits()
    for name, unit, (one, many) in (
        ("copy", "GB/s", found.copy),
        ("read", "GB/s", found.read),
        ("multiply-add", "GFLOP/s", found.multiply),
    ):
        yield Figure(f"limits/{name}", many, one, NO_BAR, unit, "one thread", f"{found.threads} threads")
    call = found.system_call_ns
    yield Figure("limits/system-call", call, call, NO_BAR, "ns", "itself", "getppid")
    with PeerProcess("peer_grpc.py", "server", "aio") as server:
        for name, client in (("blocking", "client"), ("aio", "aio")):
            with PeerProcess("peer_grpc.py", client, server.ready) as peer:
                rounds = [peer.seconds("echo", ECHO_BYTES, ECHOES) for _ in range(ECHO_ROUNDS)]
            echo = statistics.median([each for found in rounds for each in found]) * 1e6
            yield Figure(f"limits/echo-{name}", echo, echo, NO_BAR, "us", "itself", "64 B, bare gRPC")
