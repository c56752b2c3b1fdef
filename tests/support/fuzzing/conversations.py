"""A conversation with a daemon: the bytes that a client sends, call by call, in their order."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from heliograph_proto.v1 import (
    admin_pb2,
    bulk_pb2,
    command_pb2,
    device_pb2,
    model_pb2,
    peer_pb2,
    plan_pb2,
    session_pb2,
)

FILES = (admin_pb2, bulk_pb2, command_pb2, device_pb2, model_pb2, peer_pb2, plan_pb2, session_pb2)
#: Every method of the contract, by its path.
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
#: In recorded messages, in place of the session's secret.
SECRET = b"\x00session-secret\x00"


def request_class(method: str) -> type[Message]:
    """The class of a method's requests."""
    return GetMessageClass(METHODS[method].input_type)


@dataclass(frozen=True)
class Step:
    """A message of a call; None ends the client's side of it."""

    call: int
    message: bytes | None


@dataclass
class Conversation:
    """The methods of the calls, and their messages in order."""

    name: str
    methods: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def to_json(self) -> str:
        steps = [
            [one.call, None if one.message is None else b64encode(one.message).decode()] for one in self.steps
        ]
        return json.dumps({"name": self.name, "methods": self.methods, "steps": steps})

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        found: dict[str, Any] = json.loads(text)
        steps = [Step(call, None if data is None else b64decode(data)) for call, data in found["steps"]]
        return cls(found["name"], found["methods"], steps)
