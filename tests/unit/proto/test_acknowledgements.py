"""Acknowledgements of a client whose session has a lease, on the wire."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineRun, RunForm
from heliograph_proto.codec.inline_runs import (
    CommandReader,
    CompletionReader,
    First,
    decode_first,
    encode_commands,
    encode_first,
    encode_results,
    received_only,
)
from heliograph_proto.v1 import command_pb2

FREE = c.Command(3, c.Free((4,)))
TOLD = c.Acknowledged(300, (7, 2**40))


def parts(data: bytes) -> list[object]:
    return [one if isinstance(one, c.Acknowledged) else one.sequence for one in CommandReader().read(data)]


def told(data: bytes) -> list[c.Acknowledged]:
    """The acknowledgements of a batch."""
    return [one for one in CommandReader().read(data) if isinstance(one, c.Acknowledged)]


def test_an_acknowledgement_is_a_part_of_its_batch() -> None:
    data = encode_commands([FREE], TOLD)
    message = command_pb2.CommandBatch.FromString(data)
    assert (message.received, list(message.downloaded)) == (300, [7, 2**40])
    assert parts(data) == [c.Acknowledged(300), c.Acknowledged(0, (7, 2**40)), 3]


def test_it_is_found_wherever_it_is() -> None:
    plain = command_pb2.CommandBatch(received=5, downloaded=[6]).SerializeToString()
    data = encode_commands([FREE]) + plain + encode_commands([FREE], c.Acknowledged(9))
    assert parts(data) == [3, c.Acknowledged(5), c.Acknowledged(0, (6,)), c.Acknowledged(9), 3]
    assert told(data) == [c.Acknowledged(5), c.Acknowledged(0, (6,)), c.Acknowledged(9)]


def test_it_is_found_behind_fields_that_only_protobuf_reads() -> None:
    first = command_pb2.CommandBatch(session=b"s" * 16, received=5).SerializeToString()
    assert told(first) == [c.Acknowledged(5)]
    assert parts(first) == [c.Acknowledged(5)]


@pytest.mark.parametrize("number", [1, 127, 128, 16_384, 2**40])
def test_a_batch_that_only_acknowledges_is_recognised(number: int) -> None:
    assert received_only(encode_commands([], c.Acknowledged(number))) == number


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x28",
        b"\x28\x80",
        b"\x28\x05\x0a",
        encode_commands([FREE], c.Acknowledged(5)),
        encode_commands([FREE]),
    ],
)
def test_other_batches_are_not_mistaken_for_one(data: bytes) -> None:
    assert received_only(data) == 0


@pytest.mark.parametrize("data", [b"\x28\x80", b"\x32\x05\x01", b"\x32\x01\x80", b"\x32\x02\x01"])
def test_a_torn_acknowledgement_cannot_be_decoded(data: bytes) -> None:
    with pytest.raises(DecodeError):
        told(data)
    with pytest.raises(DecodeError):
        list(CommandReader().read(data))


def test_small_runs_are_still_recognised_beside_one() -> None:
    run = InlineRun(RunForm(1, [(0, 4)], [0]), [b"1234"], 5)
    reader = CommandReader()
    list(reader.read(encode_commands([run])))
    found = list(reader.read(encode_commands([run], c.Acknowledged(64))))
    assert isinstance(found[1], InlineRun) and found[1].inputs == [b"1234"]


def test_a_first_batch_says_whether_it_attaches() -> None:
    assert decode_first(encode_first(b"s")) == First(b"s")
    attach = c.Attach(12, b"daemon")
    assert decode_first(encode_first(b"s", True, attach)) == First(b"s", True, attach)


def test_the_answer_to_an_attach_has_nothing_else() -> None:
    batch = c.CompletionBatch(0, attached=c.Attached(7, 3, True))
    assert CompletionReader().read(encode_results(batch)) == batch
    durable = c.CompletionBatch(4, durable_through=3)
    assert CompletionReader().read(encode_results(durable)) == durable
