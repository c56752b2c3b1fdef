"""The headers of GGUF files, here and on the server."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path

from heliograph import InvalidModelError, ServerWeights
from heliograph_proto import gguf
from heliograph_proto.gguf import GgufHeader


def read_header(file: str | PathLike[str] | ServerWeights) -> GgufHeader:
    """Read the header of a GGUF file: its metadata, and where its tensors lie.

    Args:
        file: A path, or a file on the server: `session.server_weights("model.gguf")`. Of a model
            that is split into several files, any part; the others lie beside it.

    Raises InvalidModelError for a file that is missing, malformed or of another format.
    """
    if isinstance(file, ServerWeights):
        if file.header is None:
            raise InvalidModelError(f"{file.file} is no GGUF file", advice="session.models() lists the files")
        return file.header
    return gguf.joined(read_parts(Path(fspath(file))))


def read_parts(path: Path) -> tuple[GgufHeader, ...]:
    """Read the headers of all files of a model, of which this is one. Raises as `read_header`."""
    header = _read(path, "name a file that ends in .gguf")
    advice = f"it belongs to the model of {header.name}: all parts lie in one folder"
    return gguf.read_parts(header, lambda name: _read(path.with_name(name), advice))


def _read(path: Path, advice: str) -> GgufHeader:
    try:
        with path.open("rb") as opened:
            return gguf.read_header(opened, path.name)
    except OSError as error:
        raise InvalidModelError(f"cannot read {path}: {error.strerror}", advice=advice) from None
