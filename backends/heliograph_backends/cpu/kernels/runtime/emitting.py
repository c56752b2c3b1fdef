"""Compiles entries to object code, with numba.

This is the only module of the runtime that imports numba. It runs in processes of its own, so a
daemon has no compiler in its memory, and its threads do not wait for one.

The object of an entry has two functions: `heliograph_NAME`, which other entries call by its
address, and `python_NAME`, which Python calls. The latter takes and returns Python's integers, and
releases the GIL meanwhile.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from heliograph_backends.cpu.kernels.runtime.objects import (
    MODULES,
    ObjectFolder,
    machine_digest,
    native_name,
    python_name,
)

#: Untyped on purpose: the typed parts of numba differ between its versions.
_compiler: Any = compiler
_types: Any = types
_target: Any = cpu_target
_locked: Any = global_compiler_lock

#: Objects that are made before Python looks for cycles: a tenth of the time is saved.
GC_THRESHOLD = 100_000
_I64, _I32 = ir.IntType(64), ir.IntType(32)
_POINTER = ir.IntType(8).as_pointer()


def compile_entry(name: str) -> bytes:
    """Return the object code of an entry."""
    module = importlib.import_module(f"heliograph_backends.cpu.kernels.{MODULES[name]}")
    code: bytes = _locked(_compiled)(getattr(module, name))
    return code


def _compiled(entry: Any) -> bytes:
    flags = _compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    result = _types.int64 if entry.returns else _types.void
    arguments = (_types.int64,) * entry.arguments
    context = _target.target_context
    found = _compiler.compile_extra(
        _target.typing_context, context, entry.function, arguments, result, flags, {}
    )
    library, inner = found.library, found.fndesc.llvm_func_name
    library.add_ir_module(_wrappers(context, entry, inner, result, arguments))
    library._final_module.get_function(inner).linkage = "internal"
    library.finalize()
    outer = {native_name(entry.name), python_name(entry.name)}
    for each in library._final_module.functions:
        if not each.is_declaration and each.name not in outer:
            each.linkage = "internal"
    for each in library._final_module.global_variables:
        if not each.is_declaration:
            each.linkage = "internal"
    code: bytes = library._codegen._tm.emit_object(library._final_module)
    return code


def _wrappers(context: Any, entry: Any, inner: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Return a module with the two functions of an entry."""
    module = context.create_module(entry.name)
    callee = ir.Function(module, context.call_conv.get_function_type(result, arguments), inner)
    kind = ir.FunctionType(_I64 if entry.returns else ir.VoidType(), [_I64] * entry.arguments)
    native = ir.Function(module, kind, native_name(entry.name))
    builder = ir.IRBuilder(native.append_basic_block("entry"))
    # Kernels raise nothing, so their status is that of success.
    _, value = context.call_conv.call_function(builder, callee, result, arguments, native.args)
    if entry.returns:
        builder.ret(value)
    else:
        builder.ret_void()
    _add_python(module, entry, native)
    return module


def _add_python(module: Any, entry: Any, native: Any) -> None:
    """Add a function of METH_FASTCALL."""

    def declared(name: str, result: ir.Type, *arguments: ir.Type) -> Any:
        return ir.Function(module, ir.FunctionType(result, arguments), name)

    as_int = declared("PyLong_AsLongLong", _I64, _POINTER)
    of_int = declared("PyLong_FromLongLong", _POINTER, _I64)
    save = declared("PyEval_SaveThread", _POINTER)
    restore = declared("PyEval_RestoreThread", ir.VoidType(), _POINTER)
    occurred = declared("PyErr_Occurred", _POINTER)
    count_error = declared("PyErr_BadArgument", _I32)
    kind = ir.FunctionType(_POINTER, [_POINTER, _POINTER.as_pointer(), _I64])
    function = ir.Function(module, kind, python_name(entry.name))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _, given, count = function.args
    nothing = ir.Constant(_POINTER, None)
    with builder.if_then(builder.icmp_signed("!=", count, _I64(entry.arguments)), likely=False):
        builder.call(count_error, [])
        builder.ret(nothing)
    values = [
        builder.call(as_int, [builder.load(builder.gep(given, [_I64(number)]))])
        for number in range(entry.arguments)
    ]
    failed = builder.icmp_unsigned("!=", builder.call(occurred, []), nothing)
    with builder.if_then(failed, likely=False):
        builder.ret(nothing)
    state = builder.call(save, [])
    value = builder.call(native, values)
    builder.call(restore, [state])
    builder.ret(builder.call(of_int, [value if entry.returns else _I64(0)]))


def compile_into(folder: ObjectFolder, names: Iterable[str]) -> None:
    """Compile entries into a folder, and print the name of each."""
    # Compiling makes many objects and few cycles.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    for name in names:
        folder.write(name, compile_entry(name))
        print(name, flush=True)


def main() -> None:
    """Compile the entries whose names come as lines into the folder in `sys.argv`."""
    compile_into(ObjectFolder(Path(sys.argv[1]), machine_digest()), map(str.strip, sys.stdin))
