"""Commands and completions as messages."""

from __future__ import annotations

from heliograph_proto import commands as c
from heliograph_proto.codec.fields import decode, decode_all, encode, encode_all
from heliograph_proto.codec.types import decode_checked_type, decode_error, encode_error, encode_type
from heliograph_proto.devices import CopyPath, DeviceChange, Usage
from heliograph_proto.errors import ProtocolError
from heliograph_proto.plans import Edge, PeerSource
from heliograph_proto.trace_context import sampled
from heliograph_proto.v1 import command_pb2, device_pb2


def encode_command(command: c.Command) -> command_pb2.Command:
    message = command_pb2.Command(
        sequence=command.sequence,
        stream=command.stream,
        notify=command.notify,
        timeout_ms=command.timeout_ms,
    )
    match command.kind:
        case c.RunCommand():
            _encode_run(message.run, command.kind)
        case c.SetTensor():
            _encode_set(message.set_tensor, command.kind)
        case c.GetTensor(tensor, offset, size, transfer, chunks, shared):
            message.get_tensor.tensor = tensor
            message.get_tensor.offset_bytes = offset
            message.get_tensor.size_bytes = size
            message.get_tensor.transfer = transfer
            if shared is not None:
                message.get_tensor.shared.offset_bytes = shared
                message.get_tensor.shared.SetInParent()
            _encode_chunks(message.get_tensor, chunks)
        case c.CreateStream(stream, device):
            message.create_stream.stream = stream
            message.create_stream.device = device
        case c.Memset(tensor, offset, size, value):
            message.memset.tensor = tensor
            message.memset.offset_bytes = offset
            message.memset.size_bytes = size
            message.memset.value = value
        case c.CopyTensor(source, destination):
            message.copy_tensor.source = source
            message.copy_tensor.destination = destination
        case c.Record(event):
            message.record.event = event
        case c.WaitCommand(event):
            message.wait.event = event
        case c.Free(handles):
            message.free.handles.extend(handles)
        case c.Synchronize():
            message.synchronize.SetInParent()
        case c.Cancel(sequence, after_step):
            message.cancel.sequence, message.cancel.after_step = sequence, after_step
        case c.Continue(sequence, taken_bytes):
            proceeding = getattr(message, "continue")
            proceeding.sequence, proceeding.taken_bytes = sequence, taken_bytes
        case c.FeedLoop():
            _encode_feed(message.feed_loop, command.kind)
        case _:
            _encode_memory_command(message, command.kind)
    return message


def _encode_feed(message: command_pb2.FeedLoop, kind: c.FeedLoop) -> None:
    message.sequence, message.number, message.apart_from = kind.sequence, kind.number, kind.apart_from
    message.rows.extend(kind.rows)
    for place, data in kind.values:
        message.values.add(input=place, data=bytes(data))


def _encode_set(message: command_pb2.SetTensor, kind: c.SetTensor) -> None:
    message.tensor, message.offset_bytes = kind.tensor, kind.offset_bytes
    if kind.data is not None:
        message.data = bytes(kind.data)
    else:
        message.size_bytes = kind.size_bytes
        if kind.shared is not None:
            message.shared.offset_bytes = kind.shared
            # Marks the field as present even for offset 0.
            message.shared.SetInParent()
        else:
            message.transfer = kind.transfer
    _encode_chunks(message, kind.chunks)


def _encode_run(message: command_pb2.Run, run: c.RunCommand) -> None:
    message.plan, message.pause, message.exchange_run = run.plan, run.pause, run.exchange_run
    message.trace_parent = run.trace_parent
    message.inputs.extend(map(_encode_input, run.inputs))
    message.outputs.extend(
        command_pb2.OutputBinding(output=one.output, tensor=one.tensor, fetch=one.fetch, into=one.into)
        for one in run.outputs
    )
    if run.loop is not None:
        _encode_loop(message.loop, run.loop)


def _encode_loop(message: command_pb2.Loop, loop: c.Loop) -> None:
    message.steps, message.unread_bytes = loop.steps, loop.unread_bytes
    message.carries.extend(command_pb2.Carry(output=one.output, input=one.input) for one in loop.carries)
    message.taps.extend(loop.taps)
    message.fed_inputs.extend(loop.fed_inputs)
    message.fed_bytes = loop.fed_bytes
    message.counts_steps, message.gather_ms = loop.counts_steps, loop.gather_ms
    if loop.until is not None:
        message.until = loop.until
    if loop.exchange is not None:
        _encode_loop_exchange(message.exchange, loop.exchange)


def _encode_loop_exchange(message: command_pb2.LoopExchange, exchange: c.LoopExchange) -> None:
    # Marks the field as present even if all of it is empty.
    message.SetInParent()
    message.gives.extend(command_pb2.LoopGive(departure=one, output=two) for one, two in exchange.gives)
    message.takes.extend(command_pb2.LoopTake(arrival=one, input=two) for one, two in exchange.takes)
    message.tells.extend(exchange.tells)
    message.signals.extend(exchange.signals)
    message.awaits.extend(exchange.awaits)
    message.fed = exchange.fed
    message.tells_with.extend(
        command_pb2.LoopGive(departure=one, output=two) for one, two in exchange.tells_with
    )
    message.told_with.extend(exchange.told_with)
    if exchange.told is not None:
        message.told = exchange.told


def _encode_memory_command(message: command_pb2.Command, kind: c.CommandKind) -> None:
    """Encode a command that creates a tensor or buffer, or names a buffer."""
    match kind:
        case c.FreeVariable(name):
            message.free_variable.name = name
            message.free_variable.SetInParent()
        case c.Skip(through, error, lost):
            message.skip.through = through
            message.skip.lost.extend(lost)
            if error is not None:
                message.skip.error.CopyFrom(encode_error(error))
        case c.OfferTensor(tensor, edge, run):
            offer = message.offer_tensor
            offer.tensor, offer.edge, offer.secret, offer.run = tensor, edge.name, edge.secret, run
        case c.FetchTensor(tensor, edge, run, source):
            fetch = message.fetch_tensor
            fetch.tensor, fetch.edge, fetch.secret, fetch.run = tensor, edge.name, edge.secret, run
            fetch.source, fetch.incarnation = source.address, source.incarnation
        case c.Allocate(tensor, type_, device, buffer_type, usage):
            message.allocate.tensor = tensor
            message.allocate.device = device
            message.allocate.type.CopyFrom(encode_type(type_))
            message.allocate.buffer_type = buffer_type
            message.allocate.usage = _usage(usage)
        case c.View(tensor, source, offset, type_, strides):
            message.view.tensor = tensor
            message.view.source = source
            message.view.offset_bytes = offset
            message.view.type.CopyFrom(encode_type(type_))
            message.view.strides_bytes.extend(strides)
        case c.AllocateBuffer():
            made = message.allocate_buffer
            made.buffer, made.size_bytes, made.usage = kind.buffer, kind.size_bytes, _usage(kind.usage)
            made.device, made.buffer_type = kind.device, kind.buffer_type
        case c.AllocateTensors():
            several = message.allocate_tensors
            several.buffer, several.usage = kind.buffer, _usage(kind.usage)
            several.device, several.buffer_type = kind.device, kind.buffer_type
            several.tensors.extend(
                command_pb2.NewTensor(tensor=tensor, type=encode_type(type_))
                for tensor, type_ in kind.tensors
            )
        case c.PlaceTensor():
            message.place_tensor.tensor = kind.tensor
            message.place_tensor.buffer = kind.buffer
            message.place_tensor.offset_bytes = kind.offset_bytes
            message.place_tensor.type.CopyFrom(encode_type(kind.type))
        case c.SetUsage(buffer, usage):
            message.set_usage.buffer, message.set_usage.usage = buffer, _usage(usage)
        case c.ClearBuffer(buffer, value):
            message.clear_buffer.buffer, message.clear_buffer.value = buffer, value
        case c.ResetBuffer(buffer):
            message.reset_buffer.buffer = buffer


def _usage(usage: Usage) -> command_pb2.Usage.ValueType:
    return command_pb2.Usage.ValueType(usage.value)


def _encode_chunks(message: command_pb2.SetTensor | command_pb2.GetTensor, chunks: c.Chunks | None) -> None:
    if chunks is not None:
        message.chunks.size_bytes = chunks.size_bytes
        message.chunks.count = chunks.count
        message.chunks.stride_bytes = chunks.stride_bytes


def _encode_input(binding: c.InputBinding) -> command_pb2.InputBinding:
    if binding.data is not None:
        return command_pb2.InputBinding(input=binding.input, data=bytes(binding.data))
    return command_pb2.InputBinding(input=binding.input, tensor=binding.tensor)


def decode_command(message: command_pb2.Command) -> c.Command:
    """Raise InvalidArgumentError or ProtocolError; the message's sequence number stays readable."""
    return c.Command(
        sequence=message.sequence,
        kind=_decode_kind(message),
        stream=message.stream,
        notify=message.notify,
        timeout_ms=message.timeout_ms,
    )


def _decode_kind(message: command_pb2.Command) -> c.CommandKind:
    match message.WhichOneof("kind"):
        case "run":
            return _decode_run(message.run)
        case "set_tensor":
            return _decode_set(message.set_tensor)
        case "get_tensor":
            get = message.get_tensor
            chunks, shared = _decode_chunks(get), _decode_shared(get)
            return c.GetTensor(get.tensor, get.offset_bytes, get.size_bytes, get.transfer, chunks, shared)
        case "allocate":
            made = message.allocate
            type_ = decode_checked_type(made.type)
            return c.Allocate(made.tensor, type_, made.device, made.buffer_type, _decode_usage(made.usage))
        case "view":
            view = message.view
            strides = tuple(view.strides_bytes)
            type_ = decode_checked_type(view.type)
            return c.View(view.tensor, view.source, view.offset_bytes, type_, strides)
        case "create_stream":
            return c.CreateStream(message.create_stream.stream, message.create_stream.device)
        case "memset":
            fill = message.memset
            return c.Memset(fill.tensor, fill.offset_bytes, fill.size_bytes, fill.value)
        case "copy_tensor":
            return c.CopyTensor(message.copy_tensor.source, message.copy_tensor.destination)
        case "record":
            return c.Record(message.record.event)
        case "wait":
            return c.WaitCommand(message.wait.event)
        case "free":
            return c.Free(tuple(message.free.handles))
        case "free_variable":
            return c.FreeVariable(message.free_variable.name)
        case "skip":
            error = decode_error(message.skip.error) if message.skip.HasField("error") else None
            return c.Skip(message.skip.through, error, tuple(message.skip.lost))
        case "synchronize":
            return c.Synchronize()
        case "cancel":
            return c.Cancel(message.cancel.sequence, message.cancel.after_step)
        case "continue":
            proceeding = getattr(message, "continue")
            return c.Continue(proceeding.sequence, proceeding.taken_bytes)
        case "feed_loop":
            fed = message.feed_loop
            values = tuple((one.input, one.data) for one in fed.values)
            return c.FeedLoop(fed.sequence, values, tuple(fed.rows), fed.number, fed.apart_from)
    return _decode_memory_command(message)


def _decode_memory_command(message: command_pb2.Command) -> c.CommandKind:
    match message.WhichOneof("kind"):
        case "offer_tensor":
            offer = message.offer_tensor
            return c.OfferTensor(offer.tensor, Edge(offer.edge, offer.secret), offer.run)
        case "fetch_tensor":
            fetch = message.fetch_tensor
            source = PeerSource(fetch.source, fetch.incarnation)
            return c.FetchTensor(fetch.tensor, Edge(fetch.edge, fetch.secret), fetch.run, source)
        case "allocate_buffer":
            made = message.allocate_buffer
            usage = _decode_usage(made.usage)
            return c.AllocateBuffer(made.buffer, made.size_bytes, made.device, made.buffer_type, usage)
        case "allocate_tensors":
            several = message.allocate_tensors
            tensors = tuple((one.tensor, decode_checked_type(one.type)) for one in several.tensors)
            usage = _decode_usage(several.usage)
            return c.AllocateTensors(several.buffer, tensors, several.device, several.buffer_type, usage)
        case "place_tensor":
            placed = message.place_tensor
            type_ = decode_checked_type(placed.type)
            return c.PlaceTensor(placed.tensor, placed.buffer, placed.offset_bytes, type_)
        case "set_usage":
            return c.SetUsage(message.set_usage.buffer, _decode_usage(message.set_usage.usage))
        case "clear_buffer":
            return c.ClearBuffer(message.clear_buffer.buffer, message.clear_buffer.value)
        case "reset_buffer":
            return c.ResetBuffer(message.reset_buffer.buffer)
    raise ProtocolError(f"command {message.sequence} has an unknown kind, or none")


def _decode_usage(number: int) -> Usage:
    """Decode a usage; an unknown hint of a newer peer is Usage.ANY."""
    return Usage(number) if number in {one.value for one in Usage} else Usage.ANY


def _decode_chunks(message: command_pb2.SetTensor | command_pb2.GetTensor) -> c.Chunks | None:
    if not message.HasField("chunks"):
        return None
    return c.Chunks(message.chunks.size_bytes, message.chunks.count, message.chunks.stride_bytes)


def _decode_shared(message: command_pb2.SetTensor | command_pb2.GetTensor) -> int | None:
    return message.shared.offset_bytes if message.HasField("shared") else None


def _decode_run(run: command_pb2.Run) -> c.RunCommand:
    return c.RunCommand(
        plan=run.plan,
        inputs=tuple(
            c.InputBinding(one.input, one.data if one.HasField("data") else None, one.tensor)
            for one in run.inputs
        ),
        outputs=tuple(c.OutputBinding(one.output, one.tensor, one.fetch, one.into) for one in run.outputs),
        pause=run.pause,
        loop=_decode_loop(run.loop) if run.HasField("loop") else None,
        exchange_run=run.exchange_run,
        trace_parent=sampled(run.trace_parent),
    )


def _decode_loop(loop: command_pb2.Loop) -> c.Loop:
    return c.Loop(
        steps=loop.steps,
        carries=tuple(c.Carry(one.output, one.input) for one in loop.carries),
        until=loop.until if loop.HasField("until") else None,
        taps=tuple(loop.taps),
        unread_bytes=loop.unread_bytes,
        fed_inputs=tuple(loop.fed_inputs),
        fed_bytes=loop.fed_bytes,
        exchange=_decode_loop_exchange(loop.exchange) if loop.HasField("exchange") else None,
        counts_steps=loop.counts_steps,
        gather_ms=loop.gather_ms,
    )


def _decode_loop_exchange(message: command_pb2.LoopExchange) -> c.LoopExchange:
    return c.LoopExchange(
        gives=tuple((one.departure, one.output) for one in message.gives),
        takes=tuple((one.arrival, one.input) for one in message.takes),
        tells=tuple(message.tells),
        told=message.told if message.HasField("told") else None,
        signals=tuple(message.signals),
        awaits=tuple(message.awaits),
        fed=message.fed,
        tells_with=tuple((one.departure, one.output) for one in message.tells_with),
        told_with=tuple(message.told_with),
    )


def _decode_set(message: command_pb2.SetTensor) -> c.SetTensor:
    data = message.data if message.HasField("data") else None
    chunks, shared = _decode_chunks(message), _decode_shared(message)
    return c.SetTensor(
        message.tensor, message.offset_bytes, data, message.transfer, message.size_bytes, chunks, shared
    )


_PATHS = {copy_path.value: copy_path for copy_path in CopyPath}


def encode_completions(batch: c.CompletionBatch) -> command_pb2.CompletionBatch:
    return command_pb2.CompletionBatch(
        completed_through=batch.completed_through,
        completions=[
            command_pb2.Completion(
                sequence=one.sequence,
                error=encode_error(one.error) if one.error else None,
                data=bytes(one.data),
                outputs=[
                    command_pb2.OutputValue(output=place, data=bytes(data)) for place, data in one.outputs
                ],
                device_us=one.device_us,
                copy_path=command_pb2.CopyPath.ValueType(one.copy_path.value if one.copy_path else 0),
                steps=one.steps,
            )
            for one in batch.completions
        ],
        taps=[
            command_pb2.TapPiece(
                sequence=one.sequence,
                node=one.node,
                offset_bytes=one.offset_bytes,
                data=bytes(one.data),
                last=one.last,
                step=one.step,
                output=one.output,
            )
            for one in batch.taps
        ],
        changes=encode_all(batch.changes, device_pb2.DeviceChange),
        attached=None if batch.attached is None else encode(batch.attached, command_pb2.Attached),
        durable_through=batch.durable_through,
        move_to=batch.move_to,
        steps=[command_pb2.LoopSteps(sequence=one, steps=steps) for one, steps in batch.steps],
    )


def decode_completions(message: command_pb2.CompletionBatch) -> c.CompletionBatch:
    return c.CompletionBatch(
        completed_through=message.completed_through,
        completions=tuple(
            c.Completion(
                sequence=one.sequence,
                error=decode_error(one.error) if one.HasField("error") else None,
                data=one.data,
                outputs=tuple((value.output, value.data) for value in one.outputs),
                device_us=one.device_us,
                copy_path=_PATHS.get(one.copy_path),
                steps=one.steps,
            )
            for one in message.completions
        ),
        taps=tuple(map(_decode_piece, message.taps)),
        changes=decode_all(message.changes, DeviceChange),
        attached=decode(message.attached, c.Attached) if message.HasField("attached") else None,
        durable_through=message.durable_through,
        move_to=message.move_to,
        steps=tuple((one.sequence, one.steps) for one in message.steps),
    )


def _decode_piece(piece: command_pb2.TapPiece) -> c.TapPiece:
    output = piece.output if piece.HasField("output") else None
    return c.TapPiece(
        piece.sequence, piece.node, piece.offset_bytes, piece.data, piece.last, piece.step, output
    )
