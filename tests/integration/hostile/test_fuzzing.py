"""Mutated conversations: the daemon answers each call with a typed error, and is as before afterwards."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from fuzzing.__main__ import fuzz
from fuzzing.conversations import METHODS, Conversation, Step, request_class
from fuzzing.mutation import Mutator
from fuzzing.playing import Player

CASES = 100


def test_no_mutated_conversation_harms_a_daemon() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    report = fuzz(CASES, seed)
    assert report.faults == []
    assert report.cases == CASES and report.kept > 10


def test_a_seed_gives_the_same_cases_again() -> None:
    made = [[one.invented(method).to_json() for method in METHODS] for one in map(Mutator, _same(2))]
    assert made[0] == made[1]


@pytest.mark.parametrize("method", METHODS)
def test_invented_messages_have_the_type_of_their_method(method: str) -> None:
    for one in map(Mutator, _same(3)):
        for step in one.invented(method).steps:
            if step.message is not None:
                request_class(method)().ParseFromString(step.message)


@pytest.mark.parametrize("fault", ["UNKNOWN", "INTERNAL", "untyped"])
def test_a_bad_answer_is_a_fault(fault: str) -> None:
    class Bad(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(answer)

    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        code = grpc.StatusCode.NOT_FOUND if fault == "untyped" else grpc.StatusCode[fault]
        context.abort(code, "no")
        yield b""

    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=(Bad(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        player = Player(f"127.0.0.1:{port}")
        try:
            method = "/heliograph.v1.ModelService/ListModels"
            verdict = player.play(Conversation("one", [method], [Step(0, b""), Step(0, None)]))
        finally:
            player.close()
            server.stop(0).wait(10)
    assert len(verdict.faults) == 1 and method in verdict.faults[0]


def _same(count: int) -> list[random.Random]:
    return [random.Random(20250314) for _ in range(count)]
