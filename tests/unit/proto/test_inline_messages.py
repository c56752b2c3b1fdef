"""Small runs as bytes: what is written by joining and read by comparing is what protobuf writes and reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from heliograph_proto import commands as c
from heliograph_proto.codec import decode_command, decode_completions, encode_command, encode_completions
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun, ResultForm, RunForm, varint
from heliograph_proto.codec.inline_runs import (
    KNOWN_FORMS,
    CommandReader,
    CompletionReader,
    encode_commands,
    encode_first,
    encode_result,
    encode_results,
)
from heliograph_proto.errors import ComputeFailedError, HeliographError
from heliograph_proto.trace_context import parent_of
from heliograph_proto.v1 import command_pb2

NUMBERS = (1, 5, 127, 128, 300, 16_383, 16_384, 2**21, 2**32, 2**62)
SIZES = (1, 4, 64, 127, 128, 1000, 20_000)


@pytest.fixture(params=range(20))
def dice(request: pytest.FixtureRequest) -> random.Random:
    print("seed", request.param)
    return random.Random(request.param)


def some_run(dice: random.Random) -> InlineRun:
    inputs = [(place, dice.choice((0, *SIZES))) for place in range(dice.randrange(4))]
    dice.shuffle(inputs)
    outputs = dice.sample(range(300), dice.randrange(1, 4))
    is_traced = dice.random() < 0.5
    form = RunForm(dice.choice(NUMBERS), inputs, outputs, dice.choice((0, 1, 30_000)), is_traced)
    data = [dice.randbytes(size) for _, size in inputs]
    return InlineRun(form, data, dice.choice(NUMBERS), some_trace(dice) if is_traced else "")


def some_trace(dice: random.Random) -> str:
    trace, span = dice.randrange(1, 2**128), dice.randrange(1, 2**64)
    return parent_of(f"{trace:032x}", f"{span:016x}")


def some_result(dice: random.Random) -> InlineResult:
    form = ResultForm(
        [(place, dice.choice(SIZES)) for place in dice.sample(range(300), dice.randrange(1, 4))]
    )
    data = [dice.randbytes(size) for _, size in form.outputs]
    return InlineResult(form, dice.choice(NUMBERS), data, dice.random() * 1e3 + 1e-9)


def as_completion(result: InlineResult) -> c.Completion:
    return c.Completion(result.sequence, None, b"", result.outputs, result.device_us)


def as_commands(received: Any) -> list[c.Command]:
    # All of them are read before what one means is looked at.
    commands = [one for one in list(received) if not isinstance(one, c.Acknowledged)]
    return [one.command() if isinstance(one, InlineRun) else decode_command(one) for one in commands]


def plainly_read(data: bytes) -> list[c.Command]:
    return [decode_command(one) for one in command_pb2.CommandBatch.FromString(data).commands]


def plainly_completed(data: bytes) -> c.CompletionBatch:
    return decode_completions(command_pb2.CompletionBatch.FromString(data))


def or_refused(function: Callable[[bytes], Any], data: bytes) -> Any:
    """What it gives, or that it refuses."""
    try:
        return function(data)
    except DecodeError:
        return DecodeError
    except (HeliographError, ValueError) as error:
        return type(error)


def test_numbers_are_written_as_protobuf_writes_them() -> None:
    for number in (0, *NUMBERS, 2**64 - 1):
        message = command_pb2.Wait(event=number).SerializeToString()
        assert message == (b"\x08" + varint(number) if number else b"")


def test_a_run_has_the_bytes_that_protobuf_gives_it(dice: random.Random) -> None:
    runs = [some_run(dice) for _ in range(5)]
    expected = command_pb2.CommandBatch(
        session=b"me", commands=[encode_command(one.command()) for one in runs]
    ).SerializeToString()
    assert encode_first(b"me") + encode_commands(runs) == expected


def test_a_result_has_the_bytes_that_protobuf_gives_it(dice: random.Random) -> None:
    results = [some_result(dice) for _ in range(5)]
    batch = c.CompletionBatch(7, tuple(map(as_completion, results)))
    expected = encode_completions(batch).SerializeToString()
    assert encode_results(c.CompletionBatch(7, tuple(results))) == expected
    one = c.CompletionBatch(results[0].sequence, (as_completion(results[0]),))
    assert encode_result(results[0]) == encode_completions(one).SerializeToString()


def test_completions_of_both_kinds_stay_in_their_order(dice: random.Random) -> None:
    results = [some_result(dice) for _ in range(3)]
    failed = c.Completion(5, ComputeFailedError("no"))
    mixed = (results[0], failed, results[1], c.Completion(6, data=b"x"), results[2])
    taps = (c.TapPiece(7, 1, 0, b"abc", True),)
    plain = tuple(as_completion(one) if isinstance(one, InlineResult) else one for one in mixed)
    found = CompletionReader().read(encode_results(c.CompletionBatch(4, mixed, taps)))
    assert repr(found) == repr(c.CompletionBatch(4, plain, taps))


def test_runs_and_other_commands_come_in_their_order() -> None:
    form = RunForm(9, [(0, 3)], [0])
    sent: list[c.Command | InlineRun] = [
        InlineRun(form, [b"abc"], 1),
        c.Command(2, c.Free((1, 2))),
        InlineRun(form, [b"def"], 3),
        c.Command(4, c.RunCommand(9, (c.InputBinding(0, b"ghi"),), ()), timeout_ms=5),
        InlineRun(form, [b"jkl"], 5),
    ]
    reader, data = CommandReader(), encode_commands(sent)
    expected = [decode_command(one) for one in command_pb2.CommandBatch.FromString(data).commands]
    assert as_commands(reader.read(data)) == expected
    again = list(reader.read(data))
    assert [type(one) is InlineRun for one in again] == [True, False, True, False, True]
    assert as_commands(again) == expected


def test_a_form_is_known_from_the_second_message_on(dice: random.Random) -> None:
    reader, run = CommandReader(), some_run(dice)
    data = encode_commands([run])
    assert reader.single(data) is None
    (first,) = reader.read(data)
    assert isinstance(first, command_pb2.Command)
    data_of_other = [dice.randbytes(len(one)) for one in run.inputs]
    trace = some_trace(dice) if run.form.is_traced else ""
    other = InlineRun(run.form, data_of_other, dice.choice(NUMBERS), trace)
    found = reader.single(encode_commands([other]))
    assert found is not None and found.command() == other.command()
    assert reader.single(encode_commands([other, other])) is None


def test_a_stranger_cannot_make_a_reader_keep_many_forms() -> None:
    reader = CommandReader()
    for plan in range(1, 10 * KNOWN_FORMS):
        list(reader.read(encode_commands([InlineRun(RunForm(plan, [], [0]), [], 1)])))
    assert sum(map(len, reader._forms._forms.values())) <= KNOWN_FORMS


def test_results_are_read_as_protobuf_reads_them(dice: random.Random) -> None:
    reader, results = CompletionReader(), [some_result(dice) for _ in range(3)]
    data = encode_results(c.CompletionBatch(9, tuple(results)))
    expected = decode_completions(command_pb2.CompletionBatch.FromString(data))
    assert reader.read(data) == expected
    again = reader.read(data)
    assert all(isinstance(one, InlineResult) for one in again.completions)
    assert [as_completion(one) for one in again.completions if isinstance(one, InlineResult)] == list(
        expected.completions
    )
    assert again.completed_through == 9


# Odd encodings


def odd_commands(run: InlineRun) -> Iterator[bytes]:
    """Messages that mean a run, or more than that, and are not what we would write."""
    message = encode_command(run.command())
    plain = message.SerializeToString()
    yield plain + b"\xf8\x3f\x01"  # a field of a newer client
    yield plain[len(varint(run.sequence)) + 1 :] + b"\x08" + varint(run.sequence)  # another order of fields
    yield b"\x08" + bytes((run.sequence & 0x7F | 0x80,)) + b"\x00" + plain[len(varint(run.sequence)) + 1 :]
    yield plain + plain  # a message merged with itself: twice the inputs
    message.run.outputs[0].into = 0
    yield message.SerializeToString() + b"\x20\x00"  # a default that is written out
    message.timeout_ms = 7
    yield message.SerializeToString()
    message.timeout_ms, message.stream = 0, 3
    yield message.SerializeToString()
    message.stream, message.run.pause = 0, True
    yield message.SerializeToString()
    message.run.pause = False
    right = some_trace(random.Random(0))
    for trace in ("nonsense", "x" * 55, "\u00e9" * 27 + "x", "0" * 55, right, right + "-more"):
        message.run.trace_parent = trace
        yield message.SerializeToString()


def test_odd_encodings_mean_what_protobuf_says(dice: random.Random) -> None:
    run = some_run(dice)
    run.sequence = dice.randrange(1, 100)
    reader = CommandReader()
    for _ in range(2):
        list(reader.read(encode_commands([run])))
        for odd in odd_commands(run):
            data = b"\x12" + varint(len(odd)) + odd
            expected = [decode_command(one) for one in command_pb2.CommandBatch.FromString(data).commands]
            assert as_commands(reader.read(data)) == expected


def damaged(dice: random.Random, data: bytes) -> bytes:
    """One or two bytes are others, or some are missing, or come twice."""
    changed = bytearray(data)
    for _ in range(dice.randrange(1, 3)):
        place = dice.randrange(len(changed))
        match dice.randrange(3):
            case 0:
                changed[place] = dice.randrange(256)
            case 1:
                del changed[place : place + dice.randrange(1, 4)]
            case _:
                changed[place:place] = changed[place : place + dice.randrange(1, 9)]
        if not changed:
            return b"\x12"
    return bytes(changed)


def small_runs(dice: random.Random) -> list[InlineRun]:
    is_traced = dice.random() < 0.5
    form = RunForm(dice.randrange(1, 300), [(0, 3), (1, 2)], [1, 0], dice.choice((0, 200)), is_traced)
    trace = some_trace(dice) if is_traced else ""
    data = [[dice.randbytes(3), dice.randbytes(2)] for _ in range(3)]
    return [InlineRun(form, one, number, trace) for one, number in zip(data, (126, 127, 128), strict=True)]


def test_damaged_commands_mean_what_protobuf_says(dice: random.Random) -> None:
    reader, data = CommandReader(), encode_commands(small_runs(dice))
    list(reader.read(data))
    for _ in range(400):
        broken = damaged(dice, data)
        expected = or_refused(plainly_read, broken)
        assert or_refused(lambda data: as_commands(reader.read(data)), broken) == expected
        single = reader.single(broken)
        assert single is None or [single.command()] == expected


def test_damaged_completions_mean_what_protobuf_says(dice: random.Random) -> None:
    form = ResultForm([(0, 3), (2, 2)])
    results = [InlineResult(form, number, [b"abc", dice.randbytes(2)], 1.5) for number in (127, 128)]
    reader, data = CompletionReader(), encode_results(c.CompletionBatch(128, tuple(results)))
    reader.read(data)

    def read(data: bytes) -> c.CompletionBatch:
        batch = reader.read(data)
        plain = (as_completion(one) if isinstance(one, InlineResult) else one for one in batch.completions)
        return c.CompletionBatch(batch.completed_through, tuple(plain), batch.taps)

    for _ in range(400):
        broken = damaged(dice, data)
        expected = or_refused(plainly_completed, broken)
        assert repr(or_refused(read, broken)) == repr(expected)
