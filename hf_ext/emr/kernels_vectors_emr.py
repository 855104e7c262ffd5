# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Vectors of LLVM as types of numba, for the kernels of EMR-Merging: 16 lanes of fp32, 8 of fp64, 16 bits.

LLVM cuts them to the width of the machine. The lanes are spelled out: the order of every sum is the same everywhere.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import gc
import operator
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from numba import njit, types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

try:
    from llvmlite import binding, ir
except ImportError as error:
    raise ImportError("numba is there without llvmlite, its compiler: install numba again") from error

if binding.get_process_triple().startswith("x86") and not binding.get_host_cpu_features().get("f16c"):
    # LLVM would end the process.
    raise ImportError("this processor has no instruction for float16 (F16C): torch computes instead")

_INT = ir.IntType(64)
# The bits of 16 numbers of fp32.
_WORDS = ir.VectorType(ir.IntType(32), 16)
_ELEMENTS = {"f4": ir.FloatType(), "f8": ir.DoubleType(), "bit": ir.IntType(1)}
# How a pointer's elements lie in memory, and how many are one vector of it.
_STORED = {
    "float32": (ir.FloatType(), 16),
    "float16": (ir.HalfType(), 16),
    "bfloat16": (ir.IntType(16), 16),
    "float64": (ir.DoubleType(), 8),
    "bits": (ir.IntType(16), 1),
    "words": (_INT, 1),
}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "bits": 2, "words": 8}


class Vector(types.Type):
    """A vector of LLVM."""

    def __init__(self, element: str, lanes: int):
        self.llvm = ir.VectorType(_ELEMENTS[element], lanes)
        super().__init__(name=f"vector_{element}x{lanes}")


class Pointer(types.Type):
    """An address; whatever is stored there is loaded as fp32, fp64 or bits."""

    def __init__(self, stored: str):
        self.stored = stored
        super().__init__(name=f"pointer_{stored}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector):
        super().__init__(manager, kind, kind.llvm)


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Pointer):
        super().__init__(manager, kind, _INT)


F4, F8, BITS, HALF = Vector("f4", 16), Vector("f8", 8), Vector("bit", 16), Vector("bit", 8)
_LOADED = {"float64": F8, "bits": BITS}


def _operator(function: Callable[..., Any], kind: Vector, result: Vector, emit: Callable[..., Any]) -> None:
    """`function` of two vectors of a kind is what `emit(builder, a, b)` writes."""

    @type_callable(function)
    def typing(context):
        return lambda a, b: result if a == kind and b == kind else None

    @lower_builtin(function, kind, kind)
    def lower(context, builder, signature, values):
        return emit(builder, *values)


for _kind in (F4, F8):
    _operator(operator.add, _kind, _kind, ir.IRBuilder.fadd)
    _operator(operator.sub, _kind, _kind, ir.IRBuilder.fsub)
    _operator(operator.mul, _kind, _kind, ir.IRBuilder.fmul)
_operator(operator.lt, F4, BITS, lambda builder, a, b: builder.fcmp_ordered("<", a, b))
_operator(operator.gt, F4, BITS, lambda builder, a, b: builder.fcmp_ordered(">", a, b))
_operator(operator.eq, F4, BITS, lambda builder, a, b: builder.fcmp_ordered("==", a, b))
_operator(operator.ne, F4, BITS, lambda builder, a, b: builder.fcmp_unordered("!=", a, b))
_operator(operator.and_, BITS, BITS, ir.IRBuilder.and_)
_operator(operator.or_, BITS, BITS, ir.IRBuilder.or_)


def _pointer(stored: str) -> Any:
    @intrinsic
    def pointer(context, address):
        return Pointer(stored)(types.int64), lambda context, builder, signature, values: values[0]

    return pointer


float32, float16, bfloat16, float64, bits16, bits64 = (_pointer(stored) for stored in _STORED)


def _place(builder: Any, stored: str, address: Any, index: Any) -> Any:
    element, lanes = _STORED[stored]
    kind = element if lanes == 1 else ir.VectorType(element, lanes)
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _constant(value):
    return ir.Constant(_WORDS, [value] * 16)


def _call(builder, name, result, values):
    """Call an intrinsic of LLVM."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, values)


@intrinsic
def load(context, pointer, index):
    """Vector number `index` behind a pointer: 16 weights as fp32, 8 numbers of fp64, 16 bits."""
    stored = pointer.stored

    def emit(context, builder, signature, values):
        align = 1 if stored == "bits" else _BYTES[stored]
        value = builder.load(_place(builder, stored, *values), align=align)
        if stored == "float16":
            return builder.fpext(value, F4.llvm)
        if stored == "bfloat16":
            wide = builder.shl(builder.zext(value, _WORDS), _constant(16))
            return builder.bitcast(wide, F4.llvm)
        return builder.bitcast(value, BITS.llvm) if stored == "bits" else value

    return _LOADED.get(stored, F4)(pointer, types.int64), emit


def _rounded(builder, value, stored):
    """fp32 as it is stored: to nearest, ties to even."""
    if stored == "float16":
        return builder.fptrunc(value, ir.VectorType(ir.HalfType(), 16))
    if stored == "bfloat16":
        word = builder.bitcast(value, _WORDS)
        odd = builder.and_(builder.lshr(word, _constant(16)), _constant(1))
        rounded = builder.add(word, builder.add(odd, _constant(0x7FFF)))
        number = builder.fcmp_ordered("ord", value, value)
        rounded = builder.select(number, rounded, _constant(0x7FC00000))
        return builder.trunc(builder.lshr(rounded, _constant(16)), ir.VectorType(ir.IntType(16), 16))
    return builder.bitcast(value, ir.IntType(16)) if stored == "bits" else value


def _writer(past_caches: bool) -> Any:
    @intrinsic
    def write(context, pointer, index, value):
        """Undo `load`."""
        stored = pointer.stored

        def emit(context, builder, signature, values):
            place, value = _place(builder, stored, *values[:2]), _rounded(builder, values[2], stored)
            if past_caches:
                written = builder.store(value, place, align=_BYTES[stored] * 16)
                one = ir.Constant(ir.IntType(32), 1)
                written.set_metadata("nontemporal", builder.module.add_metadata([one]))
            else:
                builder.store(value, place, align=1 if stored == "bits" else _BYTES[stored])
            return context.get_dummy_value()

        return types.void(pointer, types.int64, value), emit

    return write


# `stream` writes past the caches; its addresses must be multiples of 64. `settle` must follow.
store, stream = _writer(False), _writer(True)


@intrinsic
def settle(context):
    """What was streamed is seen by other threads from here."""

    def emit(context, builder, signature, values):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


def _in_every_lane(builder, number, vector):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), lanes)


@intrinsic
def spread(context, number):
    """One number in every lane."""
    kind = {types.float32: F4, types.float64: F8}[number]

    def emit(context, builder, signature, values):
        return _in_every_lane(builder, values[0], kind.llvm)

    return kind(number), emit


@intrinsic
def element(context, pointer, index):
    """One number of fp32 in every lane."""

    def emit(context, builder, signature, values):
        address = builder.inttoptr(values[0], ir.FloatType().as_pointer())
        return _in_every_lane(builder, builder.load(builder.gep(address, [values[1]]), align=4), F4.llvm)

    return F4(pointer, types.int64), emit


def _half(start: int) -> Any:
    @intrinsic
    def half(context, vector):
        """Eight lanes: fp32 widened to fp64, bits as they are."""
        result = F8 if vector == F4 else HALF

        def emit(context, builder, signature, values):
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), 8), list(range(start, start + 8)))
            part = builder.shuffle_vector(values[0], ir.Constant(vector.llvm, ir.Undefined), lanes)
            return builder.fpext(part, F8.llvm) if vector == F4 else part

        return result(vector), emit

    return half


low, high = _half(0), _half(8)


@intrinsic
def choose(context, bits, a, b):
    """`a` where the bits are set, else `b`."""
    return a(bits, a, b), lambda context, builder, signature, values: builder.select(*values)


@intrinsic
def multiply_add(context, a, b, c):
    """a·b + c, fused where the machine can; the products here are exact, so that it makes no difference."""

    def emit(context, builder, signature, values):
        return _call(builder, "llvm.fmuladd.v8f64", F8.llvm, values)

    return F8(F8, F8, F8), emit


@intrinsic
def absolute(context, value):
    """|x|"""

    def emit(context, builder, signature, values):
        return _call(builder, "llvm.fabs.v8f64", F8.llvm, values)

    return F8(F8), emit


@intrinsic
def turn(context, value, sign):
    """x where the other number's sign bit is clear, else -x."""

    def emit(context, builder, signature, values):
        word, sign = (builder.bitcast(part, _WORDS) for part in values)
        flipped = builder.xor(word, builder.and_(sign, _constant(0x80000000)))
        return builder.bitcast(flipped, F4.llvm)

    return F4(F4, F4), emit


@intrinsic
def word(context, pointer, index):
    """Stored bits as an integer: 16 or 64."""

    def emit(context, builder, signature, values):
        value = builder.load(_place(builder, pointer.stored, *values), align=1)
        return builder.zext(value, _INT) if pointer.stored == "bits" else value

    return types.int64(pointer, types.int64), emit


@intrinsic
def ones(context, word):
    """Number of bits that are set."""

    def emit(context, builder, signature, values):
        return _call(builder, "llvm.ctpop.i64", _INT, values)

    return types.int64(types.int64), emit


# What the kernels share: weights of any stored dtype as tiles of fp32, and how a kernel is compiled.

LANES = 16
# Elements that stay in the first-level cache, with all that is computed from them.
TILE = 1024
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_compiling = Lock()


def compile_kernel(function: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """Machine code of a kernel: from numba's cache, or compiled and put there, or only compiled."""
    with _compiling:
        # numba makes objects that stay: looking for garbage among them took longer than the loading of a kernel.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except Exception:
            # No folder can be written, the disk is full, a file of the cache is damaged: do without. What is wrong
            # with the kernel itself is raised again.
            return njit(signature, nogil=True)(function)
        finally:
            if collecting:
                gc.enable()


@njit
def size_of(kind):
    return 4 if kind == 0 else 2


@njit
def copy_vectors(source, out, vectors):
    for i in range(vectors):
        store(out, i, load(source, i))


@njit
def as_float32(address, kind, scratch, vectors):
    """Address of weights as fp32: where they are, or widened into `scratch`."""
    if kind == 0:
        return address
    if kind == 1:
        copy_vectors(float16(address), float32(scratch), vectors)
    else:
        copy_vectors(bfloat16(address), float32(scratch), vectors)
    return scratch


@njit
def round_float32(source, address, kind, vectors):
    """Write fp32 as the stored dtype."""
    if kind == 0:
        copy_vectors(float32(source), float32(address), vectors)
    elif kind == 1:
        copy_vectors(float32(source), float16(address), vectors)
    else:
        copy_vectors(float32(source), bfloat16(address), vectors)
