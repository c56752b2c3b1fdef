"""Loads object code into this process, by LLVM's linker and without numba."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

from heliograph_backends.cpu.kernels.runtime.objects import native_name, python_name

_FASTCALL = 0x0080


class _MethodDefinition(ctypes.Structure):
    """PyMethodDef of Python's C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


class Linker:
    """The code of entries in this process; it is never unloaded."""

    def __init__(self) -> None:
        binding: Any = importlib.import_module("llvmlite.binding")
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_default_triple().create_target_machine(jit=True)
        self._binding = binding
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        self._definitions: list[_MethodDefinition] = []

    def load(self, entry: str, code: bytes) -> tuple[int, Callable[..., Any]]:
        """Load an entry; return the address for compiled code, and the function for Python."""
        self._engine.add_object_file(self._binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        address = self._engine.get_function_address(native_name(entry))
        return address, self._function(entry, self._engine.get_function_address(python_name(entry)))

    def _function(self, entry: str, address: int) -> Callable[..., Any]:
        definition = _MethodDefinition(entry.encode(), address, _FASTCALL, None)
        # The function refers to its definition.
        self._definitions.append(definition)
        create = ctypes.pythonapi.PyCFunction_NewEx
        create.restype = ctypes.py_object
        create.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        made: Callable[..., Any] = create(ctypes.addressof(definition), None, None)
        return made
