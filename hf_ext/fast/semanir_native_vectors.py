"""Vectors of 16 numbers for SemanIR's kernels on the CPU, in LLVM's words. Needs numba."""

# The only code of this package that is written for the compiler and not for a reader, and why it is here. Plain loops
# of numba were tried in its place, with matrix products by torch (MKL) and four keys or rows at a time where numba
# should keep sums in registers. They gave the same numbers, and the stage of `examples/benchmarks/semanir_stage.py`
# took 1.4, 1.5, 1.6 and 1.5 times as long (forward, k = 64, 128, 256, 512) and 1.5 times (training step), in CPU time
# of interleaved runs, with vectors of 256 and of 512 bits alike. What a loop of numba cannot say:
# - sums of a tile of 12 x 32 that stay in registers while the depth is walked (`tile32`, `update32`), so that each
#   loaded number is used many times;
# - 16 dot products whose sums change places at the end, instead of 16 sums across a vector (`dots`);
# - store only the lanes of a mask, one behind the other, which makes a list out of bits (`compress`).
#
# How it works: `_function` makes a function of numba out of one that writes LLVM instructions. Vectors are two types
# of numba, FLOATS and INTS; LLVM cuts them to the width of the machine. A mask is the low 16 bits of an integer, the
# first lane lowest. Addresses are integers, offsets count numbers of 32 bits, and nothing checks them: the arrays
# belong to the kernels, which fill them up to whole vectors. How we know that it is right: the tests compare values
# and gradients of every kernel with loops over float64.
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
# Rows of the left matrix whose products a tile computes at once: with two vectors each, 24 of 32 registers.
TILE_ROWS = 12
_FLOAT = ir.FloatType()
_SHORT, _INT, _LONG = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS, _BYTES, _BITS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT, ir.IntType(8), ir.IntType(1)))


class Vector(types.Type):
    """16 numbers of 32 bits."""

    def __init__(self, name: str, llvm: Any):
        self.llvm = llvm
        super().__init__(name=f"semanir_{name}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector):
        super().__init__(manager, kind, kind.llvm)


FLOATS, INTS = Vector("floats", _FLOATS), Vector("ints", _INTS)


def _function(
    emit: Callable[..., Any], result: types.Type, *arguments: types.Type, widths: tuple[str, ...] = ()
) -> Any:
    """A function of numba that does what `emit(builder, *values)` writes. With `widths`, a name, it takes a tuple too,
    as long as a row has vectors, and `emit` is given that number first: the code depends on it."""
    count = len(arguments)

    def body(context, builder, signature, values):
        emitted = emit(*map(len, signature.args[count:]), builder, *values[:count])
        return context.get_dummy_value() if result is types.void else emitted

    def typing(context, *given):
        return result(*arguments, *given[count:]), body

    # Numba reads from the signature how many arguments there are.
    names = ("context", *(f"argument{index}" for index in range(count)), *widths)
    typing.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typing)


def _lanes(numbers):
    return ir.Constant(_INTS, list(numbers))


def _constant(kind, number):
    return ir.Constant(kind, [number] * LANES)


def _place(builder, kind, address, offset=0):
    """Pointer to a vector, `offset` numbers of 32 bits behind an address."""
    if isinstance(offset, int):
        offset = ir.Constant(_LONG, offset)
    return builder.inttoptr(builder.add(address, builder.shl(offset, ir.Constant(_LONG, 2))), kind.as_pointer())


def _in_every_lane(builder, number, kind):
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), _lanes([0] * LANES))


def _number_in_every_lane(builder, address, offset):
    return _in_every_lane(builder, builder.load(_place(builder, _FLOAT, address, offset), align=4), _FLOATS)


def _call(builder, name, result, values):
    """Call an intrinsic of LLVM."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, values)


def _fused(builder, a, b, c):
    return _call(builder, "llvm.fmuladd.v16f32", _FLOATS, [a, b, c])


def _mask(builder, bits):
    """Mask of a vector of bits, and back."""
    if bits.type == _BITS:
        return builder.zext(builder.bitcast(bits, _SHORT), _LONG)
    return builder.bitcast(builder.trunc(bits, _SHORT), _BITS)


def _exp(builder, x):
    """exp(x) for x <= 0, to 2 units in the last place; 0 where that is below the normal numbers."""

    def number(value):
        return _constant(_FLOATS, value)

    power = _call(builder, "llvm.rint.v16f32", _FLOATS, [builder.fmul(x, number(1.4426950408889634))])
    # ln 2 in two parts, the first with few enough bits that its product is exact.
    rest = _fused(builder, power, number(-0.693359375), x)
    rest = _fused(builder, power, number(2.12194440054690583e-4), rest)
    value = number(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        value = _fused(builder, value, rest, number(1 / divisor))
    exponent = builder.shl(builder.fptosi(power, _INTS), _constant(_INTS, 23))
    value = builder.bitcast(builder.add(builder.bitcast(value, _INTS), exponent), _FLOATS)
    return builder.select(builder.fcmp_ordered("<", x, number(-87.0)), number(0.0), value)


def _ordered(builder, value):
    """Integers in the order of the floats; zero has one, and the least integer is not used."""
    word = builder.bitcast(value, _INTS)
    sign = builder.ashr(word, _constant(_INTS, 31))
    key = builder.xor(word, builder.and_(sign, _constant(_INTS, 0x7FFFFFFF)))
    negative_zero = builder.icmp_signed("==", key, _constant(_INTS, -1))
    key = builder.select(negative_zero, _constant(_INTS, 0), key)
    return _call(builder, "llvm.smax.v16i32", _INTS, [key, _constant(_INTS, 1 - 2**31)])


def _rows(builder, base, numbers, vectors):
    """Addresses of the rows, `16 * vectors` floats each, that 16 stored integers name."""
    for lane in range(LANES):
        number = builder.load(_place(builder, _INT, numbers, lane), align=4)
        yield builder.add(base, builder.mul(builder.zext(number, _LONG), ir.Constant(_LONG, 64 * vectors)))


def _row_places(builder, row, vectors):
    """Offsets of the vectors of a row that begins at an offset."""
    return [builder.add(row, ir.Constant(_LONG, LANES * v)) for v in range(vectors)]


def _load_row(builder, address, places):
    return [builder.load(_place(builder, _FLOATS, address, place), align=64) for place in places]


def _dots(vectors, builder, query, keys, numbers):
    parts = _load_row(builder, query, range(0, LANES * vectors, LANES))
    sums = []
    for row in _rows(builder, keys, numbers, vectors):
        total = None
        for v, part in enumerate(parts):
            loaded = builder.load(_place(builder, _FLOATS, row, LANES * v), align=64)
            total = builder.fmul(part, loaded) if total is None else _fused(builder, part, loaded, total)
        sums.append(total)
    # Halve the vectors and double the sums in each, until lane i of one vector has the sum of row i.
    width = LANES // 2
    while width:
        half = len(sums) // 2
        kept = [i if i % (2 * width) < width else LANES + i for i in range(LANES)]
        moved = [i + width if i % (2 * width) < width else LANES + i - width for i in range(LANES)]
        sums = [
            builder.fadd(*(builder.shuffle_vector(sums[i], sums[i + half], _lanes(lanes)) for lanes in (kept, moved)))
            for i in range(half)
        ]
        width //= 2
    return sums[0]


def _weighted_sum(vectors, builder, sums, weights, values, numbers):
    # Two sums each: one alone would wait for itself.
    totals = _load_row(builder, sums, range(0, 2 * LANES * vectors, LANES))
    for lane, row in enumerate(_rows(builder, values, numbers, vectors)):
        weight = _number_in_every_lane(builder, weights, lane)
        for v in range(vectors):
            loaded = builder.load(_place(builder, _FLOATS, row, LANES * v), align=64)
            slot = 2 * v + lane % 2
            totals[slot] = _fused(builder, weight, loaded, totals[slot])
    for i, total in enumerate(totals):
        builder.store(total, _place(builder, _FLOATS, sums, LANES * i), align=64)


def _tile(vectors, builder, left, stride, right, width, depth, out, out_stride):
    sums = [cgutils.alloca_once_value(builder, _constant(_FLOATS, 0.0)) for _ in range(TILE_ROWS * vectors)]
    for slot in sums:
        builder.store(_constant(_FLOATS, 0.0), slot)
    with cgutils.for_range(builder, depth) as loop:
        columns = _load_row(builder, right, _row_places(builder, builder.mul(loop.index, width), vectors))
        place = loop.index
        for i in range(TILE_ROWS):
            number = _number_in_every_lane(builder, left, place)
            place = builder.add(place, stride)
            for v, column in enumerate(columns):
                slot = sums[vectors * i + v]
                builder.store(_fused(builder, number, column, builder.load(slot)), slot)
    place = ir.Constant(_LONG, 0)
    for i in range(TILE_ROWS):
        for v, offset in enumerate(_row_places(builder, place, vectors)):
            builder.store(builder.load(sums[vectors * i + v]), _place(builder, _FLOATS, out, offset), align=64)
        place = builder.add(place, out_stride)


def _update(vectors, builder, left, stride, right, width, depth, out):
    begins = [builder.mul(width, ir.Constant(_LONG, i)) for i in range(TILE_ROWS)]
    rows = [_load_row(builder, right, _row_places(builder, begin, vectors)) for begin in begins]
    with cgutils.for_range(builder, depth) as loop:
        places = _row_places(builder, builder.mul(loop.index, width), vectors)
        sums, column = _load_row(builder, out, places), loop.index
        for parts in rows:
            number = _number_in_every_lane(builder, left, column)
            column = builder.add(column, stride)
            sums = [_fused(builder, number, part, old) for part, old in zip(parts, sums, strict=True)]
        for value, place in zip(sums, places, strict=True):
            builder.store(value, _place(builder, _FLOATS, out, place), align=64)


def _compress(builder, address, offset, value, mask):
    values = [value, _place(builder, _INT, address, offset), _mask(builder, mask)]
    _call(builder, "llvm.masked.compressstore.v16i32", ir.VoidType(), values)


def _load_some(builder, address, offset, count):
    """The first `count` floats, zeros behind."""
    first = builder.icmp_signed("<", _lanes(range(LANES)), _in_every_lane(builder, builder.trunc(count, _INT), _INTS))
    place = _place(builder, _FLOATS, address, offset)
    align = ir.Constant(_INT, 4)
    return _call(builder, "llvm.masked.load.v16f32.p0", _FLOATS, [place, align, first, _constant(_FLOATS, 0.0)])


def _store_some(builder, address, offset, value, count):
    first = builder.icmp_signed("<", _lanes(range(LANES)), _in_every_lane(builder, builder.trunc(count, _INT), _INTS))
    place = _place(builder, _FLOATS, address, offset)
    _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), [value, place, ir.Constant(_INT, 4), first])


def _look_up(builder, address, base, back):
    """Floats at `base - back` behind an address."""
    index = builder.sub(_in_every_lane(builder, builder.trunc(base, _INT), _INTS), back)
    result = ir.Constant(_FLOATS, ir.Undefined)
    places = builder.gep(builder.inttoptr(address, _FLOAT.as_pointer()), [ir.Constant(_LONG, 0)])
    for lane in range(LANES):
        number = builder.sext(builder.extract_element(index, ir.Constant(_INT, lane)), _LONG)
        loaded = builder.load(builder.gep(places, [number]), align=4)
        result = builder.insert_element(result, loaded, ir.Constant(_INT, lane))
    return result


def _same(builder, address, offset, number):
    """A mask of those of 16 bytes that equal a number."""
    loaded = builder.load(builder.inttoptr(builder.add(address, offset), _BYTES.as_pointer()), align=1)
    return _mask(builder, builder.icmp_signed("==", loaded, _in_every_lane(builder, number, _BYTES)))


def _sum(builder, value):
    """Sum of the lanes, in no particular order."""
    call = _call(builder, "llvm.vector.reduce.fadd.v16f32", _FLOAT, [ir.Constant(_FLOAT, 0.0), value])
    call.fastmath.add("reassoc")
    return call


def _loader(kind):
    return lambda builder, address, offset: builder.load(_place(builder, kind, address, offset), align=4)


def _store(builder, address, offset, value, align=64):
    builder.store(value, _place(builder, value.type, address, offset), align=align)


def _copy_number(builder, source, index, target, place):
    number = builder.load(_place(builder, _INT, source, index), align=4)
    builder.store(number, _place(builder, _INT, target, place), align=4)


def _add_number(builder, source, index, target, place):
    slot = _place(builder, _FLOAT, target, place)
    number = builder.load(_place(builder, _FLOAT, source, index), align=4)
    builder.store(builder.fadd(builder.load(slot, align=4), number), slot, align=4)


def _compare(sign):
    return lambda builder, a, b: _mask(builder, builder.icmp_signed(sign, a, b))


def _reduce(name, result):
    return lambda builder, value: _call(builder, f"llvm.vector.reduce.{name}", result, [value])


def _spread(kind):
    return lambda builder, number: _in_every_lane(builder, number, kind)


_address, _offset = types.int64, types.int64
load = _function(_loader(_FLOATS), FLOATS, _address, _offset)
load_ints = _function(_loader(_INTS), INTS, _address, _offset)
copy_number = _function(_copy_number, types.void, _address, _offset, _address, _offset)
add_number = _function(_add_number, types.void, _address, _offset, _address, _offset)
store_anywhere = _function(partial(_store, align=4), types.void, _address, _offset, FLOATS)
store = _function(_store, types.void, _address, _offset, FLOATS)
store_ints = _function(_store, types.void, _address, _offset, INTS)
load_some = _function(_load_some, FLOATS, _address, _offset, types.int64)
store_some = _function(_store_some, types.void, _address, _offset, FLOATS, types.int64)
compress = _function(_compress, types.void, _address, _offset, INTS, types.int64)
look_up = _function(_look_up, FLOATS, _address, types.int64, INTS)
same = _function(_same, types.int64, _address, types.int64, types.uint8)

spread = _function(_spread(_FLOATS), FLOATS, types.float32)
spread_int = _function(_spread(_INTS), INTS, types.int32)
add = _function(ir.IRBuilder.fadd, FLOATS, FLOATS, FLOATS)
subtract = _function(ir.IRBuilder.fsub, FLOATS, FLOATS, FLOATS)
multiply = _function(ir.IRBuilder.fmul, FLOATS, FLOATS, FLOATS)
multiply_add = _function(_fused, FLOATS, FLOATS, FLOATS, FLOATS)
larger = _function(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y), FLOATS, FLOATS, FLOATS)
exp = _function(_exp, FLOATS, FLOATS)
total = _function(_sum, types.float32, FLOATS)
largest = _function(_reduce("fmax.v16f32", _FLOAT), types.float32, FLOATS)
choose = _function(lambda b, m, x, y: b.select(_mask(b, m), x, y), FLOATS, types.int64, FLOATS, FLOATS)

ordered = _function(_ordered, INTS, FLOATS)
at_least = _function(_compare(">="), types.int64, INTS, INTS)
equal = _function(_compare("=="), types.int64, INTS, INTS)
choose_ints = _function(lambda b, m, x, y: b.select(_mask(b, m), x, y), INTS, types.int64, INTS, INTS)
smaller_ints = _function(lambda b, x, y: b.select(b.icmp_signed("<", x, y), x, y), INTS, INTS, INTS)
larger_ints = _function(lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y), INTS, INTS, INTS)
smallest_int = _function(_reduce("smin.v16i32", _INT), types.int32, INTS)
largest_int = _function(_reduce("smax.v16i32", _INT), types.int32, INTS)
ones = _function(lambda builder, word: _call(builder, "llvm.ctpop.i64", _LONG, [word]), types.int64, types.int64)

# Products of one query with 16 keys, and sums of 16 weighted values.
dots = _function(_dots, FLOATS, *[types.int64] * 3, widths=("parts",))
weighted = _function(_weighted_sum, types.void, *[types.int64] * 4, widths=("parts",))
# Product of 12 rows, `stride` floats apart, with a matrix of `depth` rows, `width` floats apart, of 16 or 32 columns.
tile16, tile32 = (_function(partial(_tile, vectors), types.void, *[types.int64] * 7) for vectors in (1, 2))
# Adds to `depth` rows, of 16 or 32 columns, the product of 12 rows, turned, with 12 rows of the right matrix.
update16, update32 = (_function(partial(_update, vectors), types.void, *[types.int64] * 6) for vectors in (1, 2))
