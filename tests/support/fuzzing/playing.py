"""Plays a conversation against a daemon, and judges what comes back."""

from __future__ import annotations

import queue
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import grpc

from fuzzing.conversations import METHODS, SECRET, Conversation
from fuzzing.recording import OPEN, OPTIONS
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.v1 import session_pb2

#: The bound of every call. A daemon that answers later hangs.
CALL_SECONDS = 20.0
#: The time for an answer before the conversation goes on without it, and that for completions at the end.
ANSWER_SECONDS = 0.5
PATIENCE_SECONDS = 0.02
EXECUTE = "/heliograph.v1.CommandService/Execute"
#: Calls that go on until their client has enough.
ENDLESS = frozenset(
    f"/heliograph.v1.{name}"
    for name in ("AdminService/Watch", "SessionService/FollowLog", "BulkService/Admit")
)
_NUMBER = re.compile(r"[0-9]+|'[^']*'|0x[0-9a-f]+")


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    method: str
    code: str
    #: The name of the typed error, and its text without numbers; "": none.
    error: str = ""
    shape: str = ""


@dataclass
class Verdict:
    """What a conversation led to. `faults` are what must never be."""

    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class _Call:
    """One call: its messages go by a queue, and a thread of gRPC's takes them."""

    def __init__(
        self, channel: grpc.Channel, method: str, metadata: Any, answered: threading.Condition
    ) -> None:
        self.method = method
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answered = answered
        self.answers: list[bytes] = []
        self.error: grpc.RpcError | None = None
        self.is_over = False
        self.was_cancelled = False
        self.sent = 0
        self._is_closed = False
        handle = channel.stream_stream(method)
        self._call = handle(iter(self._messages.get, None), timeout=CALL_SECONDS, metadata=metadata)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, message: bytes | None) -> bool:
        """Send a message, or end the client's side. False if that was ended before."""
        if self._is_closed:
            return False
        self._is_closed = message is None
        self._messages.put(message)
        self.sent += message is not None
        return True

    def cancel(self) -> None:
        if not self.is_over:
            self.was_cancelled = True
            self._call.cancel()

    def join(self) -> bool:
        """Wait for the end. False: it hangs."""
        self._reader.join(CALL_SECONDS + 5)
        return self.is_over

    def _read(self) -> None:
        try:
            for answer in self._call:
                with self._answered:
                    self.answers.append(answer)
                    self._answered.notify_all()
        except grpc.RpcError as error:
            self.error = error
        with self._answered:
            self.is_over = True
            self._answered.notify_all()
        self._messages.put(None)


class Player:
    """Plays conversations on one channel."""

    def __init__(self, target: str, token: str = "") -> None:
        self._channel = grpc.insecure_channel(
            target, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        )
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def close(self) -> None:
        self._channel.close()

    def play(self, said: Conversation) -> Verdict:
        """Play a conversation in a session of its own, and end every session that it opened."""
        verdict, calls = Verdict(), dict[int, _Call]()
        secrets: list[bytes] = []
        answered = threading.Condition()
        for step in said.steps:
            call = calls.get(step.call)
            if call is None:
                call = calls[step.call] = _Call(
                    self._channel, said.methods[step.call], self._metadata, answered
                )
            if step.message is None:
                call.send(None)
                continue
            if not call.send(step.message.replace(SECRET, secrets[-1]) if secrets else step.message):
                continue
            if not METHODS[call.method].client_streaming:
                call.send(None)
                # A download may wait for a command that comes later.
                most = CALL_SECONDS if call.method == OPEN else ANSWER_SECONDS
                with answered:
                    answered.wait_for(lambda call=call: call.answers or call.is_over, most)
                if call.method == OPEN and call.answers:
                    secrets.append(session_pb2.OpenResponse.FromString(call.answers[0]).session)
        self._end(calls, secrets, answered, verdict)
        return verdict

    def _end(
        self, calls: dict[int, _Call], secrets: list[bytes], answered: threading.Condition, verdict: Verdict
    ) -> None:
        """Let the calls finish, cancel those that wait for more, and judge them."""
        streams = [call for call in calls.values() if call.method == EXECUTE]
        for call in streams:
            call.send(None)
        with answered:
            answered.wait_for(lambda: all(call.is_over for call in streams), PATIENCE_SECONDS)
        for secret in secrets:
            message = session_pb2.CloseRequest(session=secret).SerializeToString()
            close = self._channel.unary_unary("/heliograph.v1.SessionService/Close")
            try:
                close(message, timeout=CALL_SECONDS, metadata=self._metadata)
            except grpc.RpcError as error:
                self._judge_error("/heliograph.v1.SessionService/Close", error, verdict)
        for call in calls.values():
            call.send(None)
        for call in calls.values():
            # A call without a message ends only after a minute, and some never end by themselves.
            if call.method in ENDLESS or not call.sent or not secrets:
                call.cancel()
        for call in calls.values():
            if not call.join():
                verdict.faults.append(f"{call.method} hangs")
                call.cancel()
            self._judge(call, verdict)

    def _judge(self, call: _Call, verdict: Verdict) -> None:
        if call.error is None:
            verdict.outcomes.append(Outcome(call.method, "OK"))
        elif not call.was_cancelled:
            self._judge_error(call.method, call.error, verdict)

    def _judge_error(self, method: str, error: Any, verdict: Verdict) -> None:
        code = error.code().name
        typed = error_from_metadata(tuple(error.trailing_metadata() or ()))
        text = str(error.details())
        if code in ("UNKNOWN", "INTERNAL") or typed is None:
            verdict.faults.append(
                f"{method} ends with {code}, {'no' if typed is None else 'a'} typed error: {text[:200]}"
            )
        name = "" if typed is None else type(typed).__name__
        verdict.outcomes.append(Outcome(method, code, name, _NUMBER.sub("_", text)[:80]))
