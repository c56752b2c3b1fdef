"""NVRTC, CUDA's compiler as a library, from the package that has nothing else in it. It needs no GPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import threading
from functools import cache
from pathlib import Path

from paths import kept_folder


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
    compiler's log. What this compiler made before of the same source is taken from the disk."""
    key = hashlib.sha256(json.dumps([text, name, options, made, *_compiler()]).encode()).hexdigest()
    kept = kept_folder("nvrtc") / f"{name}-{key[:32]}"
    if kept.exists():
        return kept.read_bytes()
    code = _compiled(text, name, options, made)
    writing = kept.with_name(f"{kept.name}-{os.getpid()}-{threading.get_ident()}")
    writing.write_bytes(code)
    writing.rename(kept)
    return code


def _compiler() -> tuple[str, int]:
    """What tells its versions apart, and is the same in every checkout."""
    path = _path()
    assert path is not None
    return path.name, path.stat().st_size


def _compiled(text: str, name: str, options: tuple[str, ...], made: str) -> bytes:
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
