"""Between the messages of the contract and the dataclasses that live inside client and server.

Decoding trusts nothing but checks little: what a graph or a command means is checked where it is
used. What is checked here is what a dataclass cannot express, such as an unknown data type.
"""

from __future__ import annotations

from typing import Any

from heliograph_proto import commands as c
from heliograph_proto.description import (
    Capabilities,
    DeviceInfo,
    DeviceList,
    DeviceType,
    Memory,
    PlanInfo,
    Port,
    SessionInfo,
    UnavailableBackend,
    VariablePort,
)
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    InvalidGraphError,
    Origin,
    ProtocolError,
    Reason,
    class_for,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.limits import Limits
from heliograph_proto.types import DType, TensorType, dtype_from_number, shape_problem
from heliograph_proto.v1 import (
    command_pb2,
    device_pb2,
    error_pb2,
    graph_pb2,
    plan_pb2,
    session_pb2,
    tensor_pb2,
)

# Tensor types


def encode_type(found: TensorType) -> tensor_pb2.TensorType:
    return tensor_pb2.TensorType(data_type=found.dtype.number, shape=found.shape)


def decode_dtype(number: int) -> DType:
    """Raises InvalidArgumentError for a number that is none, also one of a newer peer."""
    found = dtype_from_number(number)
    if found is None:
        raise InvalidArgumentError(f"data type number {number} is unknown here")
    return found


def decode_type(message: tensor_pb2.TensorType) -> TensorType:
    return TensorType(decode_dtype(message.data_type), tuple(message.shape))


def decode_checked_type(message: tensor_pb2.TensorType) -> TensorType:
    """As decode_type, for a tensor that is to be made. Raises InvalidArgumentError."""
    found = decode_type(message)
    if problem := shape_problem(found):
        raise InvalidArgumentError(problem)
    return found


# Errors


def encode_error(error: HeliographError) -> error_pb2.Error:
    origin = error.origin
    message = error_pb2.Error(reason=error.reason, message=error.message, advice=error.advice)
    if origin.op or origin.sequence:
        message.origin.op = origin.op
        message.origin.node = origin.node
        message.origin.node_name = origin.node_name
        message.origin.operands.extend(map(encode_type, origin.operands))
        message.origin.sequence = origin.sequence
    return message


def decode_error(message: error_pb2.Error) -> HeliographError:
    kind = class_for(message.reason)
    known = [one for one in message.origin.operands if dtype_from_number(one.data_type)]
    origin = Origin(
        op=message.origin.op,
        node=message.origin.node,
        node_name=message.origin.node_name,
        operands=tuple(map(decode_type, known)),
        sequence=message.origin.sequence,
    )
    return kind(message.message or Reason.Name(kind.reason), advice=message.advice, origin=origin)


# Graphs

_LEAF_KINDS = {
    LeafKind.INPUT: graph_pb2.LEAF_KIND_INPUT,
    LeafKind.WEIGHT: graph_pb2.LEAF_KIND_WEIGHT,
    LeafKind.VARIABLE: graph_pb2.LEAF_KIND_VARIABLE,
}
_LEAF_KINDS_BACK = {number: kind for kind, number in _LEAF_KINDS.items()}


def encode_graph(graph: Graph) -> graph_pb2.Graph:
    return graph_pb2.Graph(
        leaves=[
            graph_pb2.Leaf(
                kind=_LEAF_KINDS[leaf.kind],
                name=leaf.name,
                type=encode_type(leaf.type),
                digest=leaf.digest,
            )
            for leaf in graph.leaves
        ],
        nodes=[
            graph_pb2.Node(
                op=node.op,
                operands=node.operands,
                attributes=[_encode_attribute(*item) for item in node.attributes.items()],
                result=encode_type(node.type),
                name=node.name,
            )
            for node in graph.nodes
        ],
        outputs=[graph_pb2.Output(name=one.name, value=one.value) for one in graph.outputs],
    )


def _encode_attribute(name: str, value: Any) -> graph_pb2.Attribute:
    match value:
        case bool():
            return graph_pb2.Attribute(name=name, boolean=value)
        case int():
            return graph_pb2.Attribute(name=name, integer=value)
        case float():
            return graph_pb2.Attribute(name=name, real=value)
        case DType():
            return graph_pb2.Attribute(name=name, data_type=value.number)
    return graph_pb2.Attribute(name=name, integers=graph_pb2.IntegerList(values=value))


def decode_graph(message: graph_pb2.Graph) -> Graph:
    """Not validated yet. Raises InvalidGraphError for what a Graph cannot express."""
    return Graph(
        leaves=tuple(map(_decode_leaf, message.leaves)),
        nodes=tuple(
            Node(
                op=node.op,
                operands=tuple(node.operands),
                type=decode_type(node.result),
                attributes=_decode_attributes(node),
                name=node.name,
            )
            for node in message.nodes
        ),
        outputs=tuple(Output(one.name, one.value) for one in message.outputs),
    )


def _decode_leaf(leaf: graph_pb2.Leaf) -> Leaf:
    if leaf.kind not in _LEAF_KINDS_BACK:
        raise InvalidGraphError(f"leaf {leaf.name[:40]!r} has no known kind")
    return Leaf(_LEAF_KINDS_BACK[leaf.kind], leaf.name, decode_type(leaf.type), leaf.digest)


def _decode_attributes(node: graph_pb2.Node) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for one in node.attributes:
        if one.name in attributes:
            raise InvalidGraphError(f"op {node.op[:40]!r} has attribute {one.name[:40]!r} twice")
        match one.WhichOneof("value"):
            case "integers":
                attributes[one.name] = tuple(one.integers.values)
            case "data_type":
                attributes[one.name] = decode_dtype(one.data_type)
            case "real" | "integer" | "boolean" as field:
                attributes[one.name] = getattr(one, field)
            case _:
                raise InvalidGraphError(f"op {node.op[:40]!r}: {one.name[:40]!r} has no value")
    return attributes


# Devices, sessions, plans


def encode_device(device: DeviceInfo) -> device_pb2.Device:
    return device_pb2.Device(
        name=device.name,
        description=device.description,
        type=device_pb2.DeviceType.ValueType(device.type.value),
        backend=device.backend,
        capabilities=device_pb2.Capabilities(
            **{"async": device.capabilities.async_},  # a keyword in Python
            host_buffer=device.capabilities.host_buffer,
            buffer_from_host=device.capabilities.buffer_from_host,
            events=device.capabilities.events,
        ),
        memory=encode_memory(device.memory),
    )


def encode_memory(memory: Memory) -> device_pb2.Memory:
    return device_pb2.Memory(free_bytes=memory.free_bytes, total_bytes=memory.total_bytes)


def decode_memory(message: device_pb2.Memory) -> Memory:
    return Memory(message.free_bytes, message.total_bytes)


def decode_device(message: device_pb2.Device) -> DeviceInfo:
    known = {kind.value for kind in DeviceType}
    can = message.capabilities
    return DeviceInfo(
        name=message.name,
        description=message.description,
        type=DeviceType(message.type) if message.type in known else DeviceType.ACCELERATOR,
        backend=message.backend,
        capabilities=Capabilities(getattr(can, "async"), can.host_buffer, can.buffer_from_host, can.events),
        memory=decode_memory(message.memory),
    )


def encode_device_list(found: DeviceList) -> device_pb2.ListDevicesResponse:
    return device_pb2.ListDevicesResponse(
        devices=map(encode_device, found.devices),
        unavailable_backends=[
            device_pb2.UnavailableBackend(backend=one.backend, why=one.why)
            for one in found.unavailable_backends
        ],
        server=found.server,
    )


def decode_device_list(message: device_pb2.ListDevicesResponse) -> DeviceList:
    return DeviceList(
        devices=tuple(map(decode_device, message.devices)),
        unavailable_backends=tuple(
            UnavailableBackend(one.backend, one.why) for one in message.unavailable_backends
        ),
        server=message.server,
    )


_LIMITS = tuple(Limits.__dataclass_fields__)


def encode_session(info: SessionInfo) -> session_pb2.OpenResponse:
    return session_pb2.OpenResponse(
        session=info.session,
        version=info.version,
        features=info.features,
        limits=session_pb2.Limits(**{name: getattr(info.limits, name) for name in _LIMITS}),
        incarnation=info.incarnation,
        server=info.server,
        devices=map(encode_device, info.devices),
        lease_ms=info.lease_ms,
    )


def decode_session(message: session_pb2.OpenResponse) -> SessionInfo:
    return SessionInfo(
        session=message.session,
        version=message.version,
        features=tuple(message.features),
        limits=Limits(**{name: getattr(message.limits, name) for name in _LIMITS}),
        incarnation=message.incarnation,
        server=message.server,
        devices=tuple(map(decode_device, message.devices)),
        lease_ms=message.lease_ms,
    )


def _encode_port(port: Port) -> plan_pb2.Port:
    return plan_pb2.Port(name=port.name, type=encode_type(port.type))


def _decode_port(message: plan_pb2.Port) -> Port:
    return Port(message.name, decode_type(message.type))


def encode_plan(info: PlanInfo) -> plan_pb2.CompileResponse:
    return plan_pb2.CompileResponse(
        inputs=map(_encode_port, info.inputs),
        outputs=map(_encode_port, info.outputs),
        variables=[
            plan_pb2.VariablePort(port=_encode_port(one.port), tensor=one.tensor) for one in info.variables
        ],
        device=info.device,
        compute_bytes=info.compute_bytes,
        steps=info.steps,
        duration_ms=info.duration_ms,
    )


def decode_plan(message: plan_pb2.CompileResponse) -> PlanInfo:
    return PlanInfo(
        inputs=tuple(map(_decode_port, message.inputs)),
        outputs=tuple(map(_decode_port, message.outputs)),
        variables=tuple(VariablePort(_decode_port(one.port), one.tensor) for one in message.variables),
        device=message.device,
        compute_bytes=message.compute_bytes,
        steps=message.steps,
        duration_ms=message.duration_ms,
    )


# Commands


def encode_command(command: c.Command) -> command_pb2.Command:
    message = command_pb2.Command(
        sequence=command.sequence,
        stream=command.stream,
        notify=command.notify,
        timeout_ms=command.timeout_ms,
    )
    match command.kind:
        case c.Run(plan, inputs, outputs):
            message.run.plan = plan
            message.run.inputs.extend(map(_encode_input, inputs))
            message.run.outputs.extend(
                command_pb2.OutputBinding(output=one.output, tensor=one.tensor, fetch=one.fetch)
                for one in outputs
            )
        case c.SetTensor(tensor, offset, data, transfer, size):
            message.set_tensor.tensor = tensor
            message.set_tensor.offset_bytes = offset
            if data is not None:
                message.set_tensor.data = bytes(data)
            else:
                message.set_tensor.transfer = transfer
                message.set_tensor.size_bytes = size
        case c.GetTensor(tensor, offset, size, transfer):
            message.get_tensor.tensor = tensor
            message.get_tensor.offset_bytes = offset
            message.get_tensor.size_bytes = size
            message.get_tensor.transfer = transfer
        case c.Allocate(tensor, type_, device):
            message.allocate.tensor = tensor
            message.allocate.device = device
            message.allocate.type.CopyFrom(encode_type(type_))
        case c.View(tensor, source, offset, type_, strides):
            message.view.tensor = tensor
            message.view.source = source
            message.view.offset_bytes = offset
            message.view.type.CopyFrom(encode_type(type_))
            message.view.strides_bytes.extend(strides)
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
        case c.Wait(event):
            message.wait.event = event
        case c.Free(handles):
            message.free.handles.extend(handles)
        case c.Synchronize():
            message.synchronize.SetInParent()
        case c.Cancel(sequence):
            message.cancel.sequence = sequence
    return message


def _encode_input(binding: c.InputBinding) -> command_pb2.InputBinding:
    if binding.data is not None:
        return command_pb2.InputBinding(input=binding.input, data=bytes(binding.data))
    return command_pb2.InputBinding(input=binding.input, tensor=binding.tensor)


def decode_command(message: command_pb2.Command) -> c.Command:
    """Raises InvalidArgumentError or ProtocolError; the sequence number can be read all the same."""
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
            return c.GetTensor(get.tensor, get.offset_bytes, get.size_bytes, get.transfer)
        case "allocate":
            made = message.allocate
            return c.Allocate(made.tensor, decode_checked_type(made.type), made.device)
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
            return c.Wait(message.wait.event)
        case "free":
            return c.Free(tuple(message.free.handles))
        case "synchronize":
            return c.Synchronize()
        case "cancel":
            return c.Cancel(message.cancel.sequence)
    raise ProtocolError(f"command {message.sequence} has no kind that is known here")


def _decode_run(run: command_pb2.Run) -> c.Run:
    return c.Run(
        plan=run.plan,
        inputs=tuple(
            c.InputBinding(one.input, one.data if one.HasField("data") else None, one.tensor)
            for one in run.inputs
        ),
        outputs=tuple(c.OutputBinding(one.output, one.tensor, one.fetch) for one in run.outputs),
    )


def _decode_set(message: command_pb2.SetTensor) -> c.SetTensor:
    data = message.data if message.HasField("data") else None
    return c.SetTensor(message.tensor, message.offset_bytes, data, message.transfer, message.size_bytes)


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
            )
            for one in batch.completions
        ],
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
            )
            for one in message.completions
        ),
    )
