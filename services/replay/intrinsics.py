"""What numba's own language cannot say: copies between addresses, prefetches, sixteen comparisons at once.

Each becomes a few instructions of whatever machine it is compiled for. Addresses are not checked: only
`kernels.py` and `slot_kernels.py` call these, with places inside arrays that they were given.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FAN_OUT = 16

_BYTE = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)
_DOUBLES = ir.VectorType(ir.DoubleType(), FAN_OUT)
_FLOATS = ir.VectorType(ir.FloatType(), FAN_OUT)
_PLACES = ir.VectorType(_INT32, FAN_OUT)


@intrinsic
def _copy_bytes(_context: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy: numba's own loops over bytes are ten times slower."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, of, size = arguments
        cgutils.raw_memcpy(  # type: ignore[no-untyped-call]
            builder, builder.inttoptr(to, _BYTE), builder.inttoptr(of, _BYTE), size, 1
        )
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), generate


@intrinsic
def _zero_bytes(_context: Any, target: Any, count: Any) -> Any:
    """memset to 0."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, size = arguments
        cgutils.memset(builder, builder.inttoptr(to, _BYTE), size, 0)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(types.uintp, types.intp), generate


def _prefetch_with(builder: Any, address: Any, locality: int) -> None:
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module,
        ir.FunctionType(ir.VoidType(), [_BYTE, _INT32, _INT32, _INT32]),
        "llvm.prefetch.p0",
    )
    read, kept, data = (ir.Constant(_INT32, value) for value in (0, locality, 1))
    builder.call(function, [builder.inttoptr(address, _BYTE), read, kept, data])


@intrinsic
def _prefetch(_context: Any, address: Any) -> Any:
    """Asks for the cache line at this address; no value, no fault."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _prefetch_with(builder, arguments[0], 3)
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@intrinsic
def _prefetch_once(_context: Any, address: Any) -> Any:
    """The same for what is read once: it does not push out what the caches hold."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _prefetch_with(builder, arguments[0], 0)
        return context.get_dummy_value()

    return types.void(types.uintp), generate


def _loader(dtype: Any, width: Any) -> Any:
    """Reads one number from any address, aligned or not."""

    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], width.as_pointer()), align=1)

        return dtype(types.uintp), generate

    return load


def _storer(dtype: Any, width: Any, align: int) -> Any:
    """Writes one number at an address that is a multiple of `align`; eight bytes so are written at once."""

    @intrinsic
    def store(_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            at, number = arguments
            builder.store(number, builder.inttoptr(at, width.as_pointer()), align=align)
            return context.get_dummy_value()

        return types.void(types.uintp, dtype), generate

    return store


@intrinsic
def _fence(_context: Any) -> Any:
    """No store below this line is made before those above it, by the compiler or the processor."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _at_address(_context: Any, address: Any) -> Any:
    """The address as a pointer, of which `numba.carray` makes an array."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTE)

    return types.voidptr(types.uintp), generate


@intrinsic
def _clear_word(_context: Any, address: Any) -> Any:
    """Sets the 64 bits at this address to 0, after everything that this thread did before."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        place = builder.inttoptr(arguments[0], word.as_pointer())
        builder.store_atomic(ir.Constant(word, 0), place, "release", 8)
        return context.get_dummy_value()

    return types.void(types.uintp), generate


def _everywhere(builder: Any, value: Any) -> Any:
    """A vector with `value` at all sixteen places."""
    one = builder.insert_element(ir.Constant(_DOUBLES, ir.Undefined), value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(
        one, ir.Constant(_DOUBLES, ir.Undefined), ir.Constant(_PLACES, [0] * FAN_OUT)
    )


def _count_true(builder: Any, flags: Any) -> Any:
    return builder.ctpop(builder.zext(builder.bitcast(flags, ir.IntType(FAN_OUT)), ir.IntType(64)))


@intrinsic
def _count_at_most(_context: Any, address: Any, bound: Any) -> Any:
    """How many of the sixteen float64 at this address (a multiple of 64) are at most `bound`."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = builder.load(builder.inttoptr(arguments[0], _DOUBLES.as_pointer()), align=64)
        return _count_true(builder, builder.fcmp_ordered("<=", values, _everywhere(builder, arguments[1])))

    return types.intp(types.uintp, types.float64), generate


@intrinsic
def _count_sums_at_most(_context: Any, address: Any, bound: Any) -> Any:
    """How many of the sixteen running sums of the float32 at this address (a multiple of 64) are at most
    `bound`. The sums are float64, added in pairs, so not bit for bit those of a loop."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = builder.load(builder.inttoptr(arguments[0], _FLOATS.as_pointer()), align=64)
        sums, zeros = builder.fpext(values, _DOUBLES), ir.Constant(_DOUBLES, [0.0] * FAN_OUT)
        for step in (1, 2, 4, 8):  # each place adds what lies `step` places before it
            moved = [place - step if place >= step else FAN_OUT for place in range(FAN_OUT)]
            sums = builder.fadd(sums, builder.shuffle_vector(sums, zeros, ir.Constant(_PLACES, moved)))
        return _count_true(builder, builder.fcmp_ordered("<=", sums, _everywhere(builder, arguments[1])))

    return types.intp(types.uintp, types.float64), generate


@intrinsic
def _sum_floats(_context: Any, address: Any) -> Any:
    """The sum of the sixteen float32 at this address (a multiple of 64), in float64, added in pairs."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = builder.load(builder.inttoptr(arguments[0], _FLOATS.as_pointer()), align=64)
        sums = builder.fpext(values, _DOUBLES)
        for width in (8, 4, 2, 1):  # the upper half onto the lower half
            moved = [place + width if place < width else place for place in range(FAN_OUT)]
            sums = builder.fadd(sums, builder.shuffle_vector(sums, sums, ir.Constant(_PLACES, moved)))
        return builder.extract_element(sums, ir.Constant(_INT32, 0))

    return types.float64(types.uintp), generate


@intrinsic
def _sum_running(_context: Any, source: Any, target: Any) -> Any:
    """Writes the running sums of the sixteen float64 at `source` to `target` and returns the last of them.

    One after another, so that they never fall and stay the same where a value is 0.
    """

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        double = ir.DoubleType()
        of, to = (builder.inttoptr(address, double.as_pointer()) for address in arguments)
        total = ir.Constant(double, 0.0)
        for place in range(FAN_OUT):
            at = [ir.Constant(_INT32, place)]
            total = builder.fadd(total, builder.load(builder.gep(of, at)))
            builder.store(total, builder.gep(to, at))
        return total

    return types.float64(types.uintp, types.uintp), generate


# Compiled code calls them without the context that numba adds while compiling; their types cannot say that.
copy_bytes: Any = _copy_bytes
zero_bytes: Any = _zero_bytes
load_int: Any = _loader(types.int64, ir.IntType(64))
load_float: Any = _loader(types.float32, ir.FloatType())
load_byte: Any = _loader(types.uint8, ir.IntType(8))
store_word: Any = _storer(types.uint64, ir.IntType(64), align=8)
store_float: Any = _storer(types.float32, ir.FloatType(), align=4)
store_double: Any = _storer(types.float64, ir.DoubleType(), align=8)
fence: Any = _fence
prefetch: Any = _prefetch
prefetch_once: Any = _prefetch_once
at_address: Any = _at_address
clear_word: Any = _clear_word
count_at_most: Any = _count_at_most
count_sums_at_most: Any = _count_sums_at_most
sum_floats: Any = _sum_floats
sum_running: Any = _sum_running
