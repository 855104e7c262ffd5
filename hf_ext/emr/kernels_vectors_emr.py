# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Vectors of LLVM as types of numba, for `kernels_emr`: 16 lanes of fp32, 8 of fp64, 16 bits.

LLVM cuts them to the width of the machine. The lanes are spelled out, so the order of every sum is the same everywhere.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

_INT = ir.IntType(64)
_ELEMENTS = {"f4": ir.FloatType(), "f8": ir.DoubleType(), "i4": ir.IntType(32), "bit": ir.IntType(1)}
# How a pointer's elements lie in memory, and how many are one vector of it.
_STORED = {
    "float32": (ir.FloatType(), 16),
    "float16": (ir.HalfType(), 16),
    "bfloat16": (ir.IntType(16), 16),
    "float64": (ir.DoubleType(), 8),
    "bits": (ir.IntType(16), 1),
}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "bits": 2}


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


F4, F8, I4, BITS, HALF = Vector("f4", 16), Vector("f8", 8), Vector("i4", 16), Vector("bit", 16), Vector("bit", 8)
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


float32, float16, bfloat16, float64, bits16 = (_pointer(stored) for stored in _STORED)


def _place(builder: Any, stored: str, address: Any, index: Any) -> Any:
    element, lanes = _STORED[stored]
    kind = element if lanes == 1 else ir.VectorType(element, lanes)
    offset = builder.mul(index, ir.Constant(_INT, _BYTES[stored] * lanes))
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _constant(vector: Any, value: int) -> ir.Constant:
    kind = ir.VectorType(ir.IntType(32), 16)
    return ir.Constant(kind, [value] * 16)


def _integers(builder, value):
    return builder.bitcast(value, I4.llvm)


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
            wide = builder.shl(builder.zext(value, I4.llvm), _constant(I4, 16))
            return builder.bitcast(wide, F4.llvm)
        return builder.bitcast(value, BITS.llvm) if stored == "bits" else value

    return _LOADED.get(stored, F4)(pointer, types.int64), emit


@intrinsic
def store(context, pointer, index, value):
    """Undo `load`: weights are rounded to nearest, ties to even."""
    stored = pointer.stored

    def emit(context, builder, signature, values):
        address, index, value = values
        if stored == "float16":
            value = builder.fptrunc(value, ir.VectorType(ir.HalfType(), 16))
        elif stored == "bfloat16":
            word, one = _integers(builder, value), _constant(I4, 1)
            odd = builder.and_(builder.lshr(word, _constant(I4, 16)), one)
            rounded = builder.add(word, builder.add(odd, _constant(I4, 0x7FFF)))
            number = builder.fcmp_ordered("ord", value, value)
            rounded = builder.select(number, rounded, _constant(I4, 0x7FC00000))
            value = builder.trunc(builder.lshr(rounded, _constant(I4, 16)), ir.VectorType(ir.IntType(16), 16))
        elif stored == "bits":
            value = builder.bitcast(value, ir.IntType(16))
        align = 1 if stored == "bits" else _BYTES[stored]
        builder.store(value, _place(builder, stored, address, index), align=align)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value), emit


@intrinsic
def spread(context, number):
    """One number in every lane: of fp32, fp64 or int32."""
    kind = {types.float32: F4, types.float64: F8, types.int32: I4}[number]

    def emit(context, builder, signature, values):
        first = builder.insert_element(ir.Constant(kind.llvm, ir.Undefined), values[0], ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), kind.llvm.count), [0] * kind.llvm.count)
        return builder.shuffle_vector(first, ir.Constant(kind.llvm, ir.Undefined), lanes)

    return kind(number), emit


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
        word, sign = (_integers(builder, part) for part in values)
        flipped = builder.xor(word, builder.and_(sign, _constant(I4, 0x80000000)))
        return builder.bitcast(flipped, F4.llvm)

    return F4(F4, F4), emit


@intrinsic
def count(context, counter, bits):
    """Add each bit to its lane's counter."""

    def emit(context, builder, signature, values):
        return builder.add(values[0], builder.zext(values[1], I4.llvm))

    return I4(I4, BITS), emit


@intrinsic
def counted(context, counter):
    """The sum of all counters."""

    def emit(context, builder, signature, values):
        return _call(builder, "llvm.vector.reduce.add.v16i32", ir.IntType(32), values)

    return types.int32(I4), emit
