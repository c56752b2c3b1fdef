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
        file: A path, or a file on the server: `session.server_weights("model.gguf")`.

    Raises InvalidModelError for a file that is missing, malformed or of another format.
    """
    if isinstance(file, ServerWeights):
        if file.header is None:
            raise InvalidModelError(f"{file.file} is no GGUF file", advice="session.models() lists the files")
        return file.header
    path = Path(fspath(file))
    try:
        with path.open("rb") as opened:
            return gguf.read_header(opened, path.name)
    except OSError as error:
        raise InvalidModelError(
            f"cannot read {path}: {error.strerror}", advice="name a file that ends in .gguf"
        ) from None
