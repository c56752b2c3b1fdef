"""Descriptions of the server and its models in the protocol's JSON form. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from heliograph_server.gateways.kserve.loaded import LoadedModel
from heliograph_server.gateways.kserve.statistics import Duration, Figures
from heliograph_server.gateways.kserve.tensors import BYTES, TensorPort

SERVER = "heliograph"
_EXTENSIONS = (
    "binary_tensor_data", "generate", "model_configuration", "model_repository", "sequence", "statistics",
)  # fmt: skip
_PHASES = {"input": "compute_input", "compute": "compute_infer", "output": "compute_output"}
_Made = TypeVar("_Made", bound=Message)


def message_of(message: _Made, table: Mapping[str, Any]) -> _Made:
    """Fill a message with the fields of its JSON form."""
    return ParseDict(dict(table), message)


def extensions(*, has_regions: bool) -> list[str]:
    """The names of the extensions of the protocol."""
    return [*_EXTENSIONS, *(["system_shared_memory"] if has_regions else [])]


def metadata(model: LoadedModel, versions: Sequence[str]) -> dict[str, Any]:
    """The inputs and outputs of a model."""
    return {
        "name": model.name,
        "versions": list(versions),
        "platform": model.ports.platform,
        "inputs": list(map(_tensor, model.ports.inputs)),
        "outputs": list(map(_tensor, model.ports.outputs)),
    }


def _tensor(port: TensorPort) -> dict[str, Any]:
    return {"name": port.name, "datatype": port.datatype, "shape": list(port.shape)}


def config(model: LoadedModel) -> dict[str, Any]:
    """The settings of a model."""
    ports, policy = model.ports, model.policy
    start = 1 if ports.most_rows else 0
    found: dict[str, Any] = {
        "name": model.name,
        "platform": ports.platform,
        "backend": SERVER,
        "max_batch_size": ports.most_rows,
        "input": [_configured(port, start) for port in ports.inputs],
        "output": [_configured(port, start) for port in ports.outputs],
        "instance_group": [{"name": model.name, "count": model.settings.instances}],
        "default_model_filename": ports.file,
    }
    if model.writes:
        found["model_transaction_policy"] = {"decoupled": True}
    if model.settings.sequences:
        idle = round(model.settings.sequence_idle_seconds * 1e6)
        found["sequence_batching"] = {"max_sequence_idle_microseconds": idle}
    if ports.most_rows:
        found["dynamic_batching"] = {
            "preferred_batch_size": list(policy.sizes),
            "max_queue_delay_microseconds": round(policy.window_seconds * 1e6),
            "priority_levels": policy.priorities,
            "default_priority_level": policy.default_priority,
        }
    return found


def _configured(port: TensorPort, start: int) -> dict[str, Any]:
    datatype = "STRING" if port.datatype == BYTES else port.datatype
    found = {"name": port.name, "data_type": f"DATA_TYPE_{datatype}", "dims": list(port.shape[start:])}
    return {**found, "optional": True} if port.is_optional else found


def config_json(model: LoadedModel) -> dict[str, Any]:
    """The settings of a model for REST, where data types have Triton's words."""
    found = config(model)
    for one in (*found["input"], *found["output"]):
        one["data_type"] = one["data_type"].removeprefix("DATA_")
    return found


def statistics(models: Iterable[LoadedModel]) -> dict[str, Any]:
    """The statistics of models."""
    return {"model_stats": [_of_model(one, one.statistics.read()) for one in models]}


def _of_model(model: LoadedModel, figures: Figures) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": figures.last_ms,
        "inference_count": figures.rows,
        "execution_count": figures.runs,
        "inference_stats": {
            "success": _duration(figures.success),
            "fail": _duration(figures.fail),
            "queue": _duration(figures.phases["queue"]),
            **{theirs: _duration(figures.phases[ours]) for ours, theirs in _PHASES.items()},
        },
        "batch_stats": [
            {
                "batch_size": rows,
                **{theirs: _duration(phases[ours]) for ours, theirs in _PHASES.items()},
            }
            for rows, phases in sorted(figures.by_rows.items())
        ],
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.nanoseconds}
