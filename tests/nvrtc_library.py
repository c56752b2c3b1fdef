"""NVRTC, CUDA's compiler as a library, from the package that has nothing else in it. It needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path


class CompilingFailedError(Exception):
    """What the compiler said."""


@cache
def why_not() -> str:
    """Why it cannot be used here; empty if it can."""
    path = _path()
    if path is None:
        return "NVRTC is not installed: pip install 'heliograph[nvrtc]'"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"NVRTC cannot be loaded: {error}"
    return ""


@cache
def _path() -> Path | None:
    try:
        found = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return None
    folders = found.submodule_search_locations if found is not None else None
    libraries = [path for folder in folders or () for path in Path(folder, "lib").glob("libnvrtc.so.*")]
    return min(libraries, key=lambda path: len(path.name), default=None)


def compiled(text: str, name: str, options: tuple[str, ...], made: str = "CUBIN") -> bytes:
    """What a source is compiled to: CUBIN, machine code, or PTX. Raises CompilingFailedError with the
    compiler's log."""
    library = ctypes.CDLL(str(_path()))
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None),
    )
    try:
        encoded = [one.encode() for one in options]
        status = library.nvrtcCompileProgram(
            program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
        if status:
            raise CompilingFailedError(_text(library, program, "ProgramLog").decode(errors="replace"))
        return _text(library, program, made)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompilingFailedError(library.nvrtcGetErrorString(status).decode())
