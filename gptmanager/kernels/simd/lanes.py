"""SIMD intrinsics for Numba: sixteen float32 lanes at a time, at raw addresses.

In Numba's own loops over arrays, LLVM decides what is vectorized and in which order sums are added.
Here every lane's arithmetic, fused multiply-adds included, is written out, so that the bits of a
result do not depend on the lane that computes it. An address is an int64, an index counts elements,
and nothing is checked.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, extending, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from gptmanager.kernels.simd.inner_functions import compiled_inside

Function = TypeVar("Function", bound=Callable[..., Any])

LANES = 16
FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, INDICES = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
ROUND = 12582912.0  # 1.5 * 2^23: the low bits of x + ROUND hold the integer nearest to x
EXP2_TERMS = (
    1.0,
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398876180872321,
    0.00015353376511484385,
)


class Vector(types.Type):
    """The Numba type of sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__("Vector(16 x float32)")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


vector = Vector()
long, real, nothing = types.int64, types.float32, types.void


def intrinsic(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes `emit(builder, *values) -> value` an intrinsic for Numba code.

    `result` is the Numba type of the intrinsic's value, `arguments` are the types of its arguments.
    """

    def make(emit: Callable[..., Any]) -> Any:
        def type_it(*_: Any) -> Any:
            def generate(context: Any, builder: Any, _: Any, values: Sequence[Any]) -> Any:
                emitted = emit(builder, *values)
                return context.get_dummy_value() if result is nothing else emitted

            return result(*arguments), generate

        type_it.__name__ = emit.__name__
        type_it.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return extending.intrinsic(type_it)

    return make


def loop(function: Function) -> Function:
    """Compile a function that only compiled code calls; division by zero is not checked."""
    return cast("Function", compiled_inside(function))


def loop_named(name: str) -> Callable[[Function], Function]:
    """Return a decorator like `loop` for a function that is defined several times.

    Machine code that is loaded from disk is linked by function name alone. If different processes
    compiled two functions with the same name, one would be called in place of both.
    """

    def compile_it(function: Function) -> Function:
        function.__name__ = function.__qualname__ = name
        return loop(function)

    return compile_it


def at(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """Return a pointer to a `kind`, `index` elements of 4 bytes (8 for LONG) after `address`."""
    size = ir.Constant(LONG, 8 if kind is LONG else 4)
    return builder.inttoptr(builder.add(address, builder.mul(index, size)), kind.as_pointer())


def plus(builder: Any, address: Any, offset: int) -> Any:
    """Return `address` plus a constant."""
    return builder.add(address, ir.Constant(LONG, offset))


def times(builder: Any, index: Any, size: int) -> Any:
    """Return `index` times a constant."""
    return builder.mul(index, ir.Constant(LONG, size))


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def spread(builder: Any, value: Any) -> Any:
    """Return a vector with `value` in each lane."""
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(INDICES, [0] * LANES))


def float_lanes(value: float) -> Any:
    """Return a constant vector with `value` in each lane."""
    return ir.Constant(VECTOR, [value] * LANES)


def int_lanes(value: int) -> Any:
    """Return a constant vector with `value` in each lane."""
    return ir.Constant(INDICES, [value] * LANES)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", VECTOR, a, b, c)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


def lanes_from(builder: Any, comparison: str, bound: Any) -> Any:
    """Return a mask of the lanes i for which `i comparison bound` is true; `bound` is int64."""
    lanes = ir.Constant(INDICES, list(range(LANES)))
    return builder.icmp_signed(comparison, lanes, spread(builder, builder.trunc(bound, INT)))


def load_masked(builder: Any, pointer: Any, count: Any) -> Any:
    mask, align = lanes_from(builder, "<", count), ir.Constant(INT, 4)
    name = "llvm.masked.load.v16f32.p0"
    return call(builder, name, VECTOR, pointer, align, mask, ir.Constant(VECTOR, None))


def _is_full(builder: Any, count: Any) -> Any:
    return builder.icmp_signed(">=", count, ir.Constant(LONG, LANES))


def load_either(builder: Any, count: Any, load_lanes: Callable[[Any], Any]) -> Any:
    """Return `load_lanes(None)` if `count` is at least LANES, else `load_lanes(count)`."""
    with builder.if_else(_is_full(builder, count)) as (full, part):
        with full:
            whole, full_block = load_lanes(None), builder.block
        with part:
            masked, part_block = load_lanes(count), builder.block
    value = builder.phi(VECTOR)
    value.add_incoming(whole, full_block)
    value.add_incoming(masked, part_block)
    return value


def store_either(builder: Any, count: Any, value: Any, pointer: Any, size: int, kind: str) -> None:
    """Store the first `count` lanes. `size`: bytes of a lane. `kind`: LLVM type of `value`."""
    with builder.if_else(_is_full(builder, count)) as (full, part):
        with full:
            builder.store(value, pointer, align=size)
        with part:
            mask, align = lanes_from(builder, "<", count), ir.Constant(INT, size)
            name = f"llvm.masked.store.{kind}.p0"
            call(builder, name, ir.VoidType(), value, pointer, align, mask)


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):

    def _emit(_: Any, builder: Any, __: Any, values: Any, name: str = _instruction) -> Any:
        return getattr(builder, name)(*values)

    _cases = {"cases": [signature(vector, vector, vector)]}
    infer_global(_operator)(type(f"Vector_{_instruction}", (ConcreteTemplate,), _cases))
    lower_builtin(_operator, vector, vector)(_emit)


@intrinsic(vector, long, long)
def load(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(at(builder, address, index, VECTOR), align=4)


@intrinsic(vector, long, long, long)
def load_part(builder: Any, address: Any, index: Any, count: Any) -> Any:
    """Load the first `count` lanes; the rest are zero and their memory is not touched."""
    pointer = at(builder, address, index, VECTOR)

    def load_lanes(masked_to: Any) -> Any:
        whole = masked_to is None
        return builder.load(pointer, align=4) if whole else load_masked(builder, pointer, count)

    return load_either(builder, count, load_lanes)


@intrinsic(nothing, long, long, vector)
def store(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, at(builder, address, index, VECTOR), align=4)


@intrinsic(nothing, long, long, vector, long)
def store_part(builder: Any, address: Any, index: Any, value: Any, count: Any) -> None:
    """Store the first `count` lanes; the memory of the others is not touched."""
    store_either(builder, count, value, at(builder, address, index, VECTOR), 4, "v16f32")


@intrinsic(real, long, long)
def get(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(at(builder, address, index, FLOAT))


@intrinsic(nothing, long, long, real)
def put(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, at(builder, address, index, FLOAT))


@intrinsic(long, long, long)
def get_int(builder: Any, address: Any, index: Any) -> Any:
    return builder.sext(builder.load(at(builder, address, index, INT)), LONG)


@intrinsic(nothing, long, long, long)
def put_int(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(builder.trunc(value, INT), at(builder, address, index, INT))


@intrinsic(long, long, long)
def get_long(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(at(builder, address, index, LONG))


@intrinsic(nothing, long, long, long)
def put_long(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, at(builder, address, index, LONG))


@intrinsic(nothing, long, long)
def call_body(builder: Any, body: Any, address: Any) -> None:
    """Call machine code that `compiled` returned, with the address of a task."""
    function = ir.FunctionType(ir.VoidType(), [LONG]).as_pointer()
    builder.call(builder.inttoptr(body, function), [address])


@intrinsic(nothing, long, long, long, long)
def call_in_threads(builder: Any, parallel: Any, body: Any, address: Any, size: Any) -> None:
    """Call `body` with the address of a task in `size` threads of OpenMP.

    `parallel`: the address of the runtime's `GOMP_parallel`.
    """
    kind = ir.FunctionType(ir.VoidType(), [LONG, LONG, INT, INT]).as_pointer()
    threads, flags = builder.trunc(size, INT), ir.Constant(INT, 0)
    builder.call(builder.inttoptr(parallel, kind), [body, address, threads, flags])


@intrinsic(long, long, long)
def claim(builder: Any, address: Any, index: Any) -> Any:
    """Atomically add one to an int64; return its old value."""
    pointer = at(builder, address, index, LONG)
    return builder.atomic_rmw("add", pointer, ir.Constant(LONG, 1), "monotonic")


@intrinsic(types.voidptr, long)
def pointer_to(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@intrinsic(nothing, long, long)
def prefetch(builder: Any, address: Any, index: Any) -> None:
    pointer = at(builder, address, index, FLOAT)
    read, second_level, data = (ir.Constant(INT, x) for x in (0, 2, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, second_level, data)


@loop
def task_at(address: int, kind: Any) -> Any:
    """Return the record of NumPy type `kind` at `address`."""
    return carray(pointer_to(address), 1, kind)[0]


@intrinsic(vector, real)
def splat(builder: Any, value: Any) -> Any:
    return spread(builder, value)


@intrinsic(vector, vector, vector, vector)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once."""
    return multiply_add(builder, a, b, c)


@intrinsic(vector, vector, vector)
def larger(builder: Any, a: Any, b: Any) -> Any:
    return _larger(builder, a, b)


@intrinsic(vector, vector, vector, vector)
def where_above(builder: Any, x: Any, bound: Any, value: Any) -> Any:
    """`value` in the lanes where x > bound, 0 in the others (also where x is NaN)."""
    return builder.select(builder.fcmp_ordered(">", x, bound), value, ir.Constant(VECTOR, None))


@intrinsic(vector, vector, vector, vector)
def where_at_least(builder: Any, x: Any, bound: Any, value: Any) -> Any:
    """`value` in the lanes where x >= bound, 0 in the others (also where x is NaN)."""
    return builder.select(builder.fcmp_ordered(">=", x, bound), value, ir.Constant(VECTOR, None))


@intrinsic(vector, vector, vector)
def mark_nan(builder: Any, marks: Any, value: Any) -> Any:
    """`marks`, but NaN in the lanes where `value` is NaN."""
    is_nan = builder.sext(builder.fcmp_unordered("uno", value, value), INDICES)
    return builder.bitcast(builder.or_(builder.bitcast(marks, INDICES), is_nan), VECTOR)


@intrinsic(vector, vector, long, long, real)
def keep_lanes(builder: Any, value: Any, low: Any, high: Any, other: Any) -> Any:
    """`value` in the lanes low <= i < high, `other` in the rest, even where `value` is NaN."""
    inside = builder.and_(lanes_from(builder, ">=", low), lanes_from(builder, "<", high))
    return builder.select(inside, value, spread(builder, other))


@intrinsic(vector, vector)
def exp2(builder: Any, x: Any) -> Any:
    """2^x with a relative error of 7e-8, at least 2^-126; inf from x = 127.5, and NaN stays NaN."""
    x = builder.select(builder.fcmp_ordered("<", x, float_lanes(-126.0)), float_lanes(-126.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, float_lanes(128.0)), float_lanes(128.0), x)
    shifted = builder.fadd(x, float_lanes(ROUND))
    rest = builder.fsub(x, builder.fsub(shifted, float_lanes(ROUND)))
    result = float_lanes(EXP2_TERMS[-1])
    for term in reversed(EXP2_TERMS[:-1]):
        result = multiply_add(builder, result, rest, float_lanes(term))
    exponent = builder.shl(builder.bitcast(shifted, INDICES), ir.Constant(INDICES, [23] * LANES))
    power = builder.bitcast(
        builder.add(exponent, ir.Constant(INDICES, [0x3F800000] * LANES)), VECTOR
    )
    return builder.fmul(result, power)


def _across(builder: Any, value: Any, combine: Callable[..., Any]) -> Any:
    """Reduce all lanes to one float32, by halves, in an order that never varies."""
    width = LANES
    while width > 1:
        width //= 2
        kind = ir.VectorType(INT, width)
        empty = ir.Constant(value.type, ir.Undefined)
        low = ir.Constant(kind, list(range(width)))
        high = ir.Constant(kind, list(range(width, 2 * width)))
        value = combine(
            builder,
            builder.shuffle_vector(value, empty, low),
            builder.shuffle_vector(value, empty, high),
        )
    return builder.extract_element(value, ir.Constant(INT, 0))


@intrinsic(real, vector)
def sum_lanes(builder: Any, value: Any) -> Any:
    return _across(builder, value, lambda b, low, high: b.fadd(low, high))


@intrinsic(real, vector)
def max_lanes(builder: Any, value: Any) -> Any:
    return _across(builder, value, _larger)


@intrinsic(nothing)
def compact(builder: Any) -> None:
    """Compile the calling function for size, neither unrolled nor inlined.

    Hot loops are unrolled by hand.
    """
    builder.function.attributes.add("optsize")
    builder.function.attributes.add("noinline")
