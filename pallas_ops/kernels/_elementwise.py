"""Functions of one array, entry by entry, as values: to compare, to store, and to run in a kernel.

A kernel applies an activation to one block at a time, which is right only where no entry depends
on another. And the compiler is asked in another process, whereto a function of somebody's cannot
be sent. So an activation is traced, and becomes a `ElementwiseProgram`: a list of operations.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core


def _expm1(x: jax.Array) -> jax.Array:
    """`exp(x) - 1`, as XLA has it where it is small: no digits cancel. Mosaic has none."""
    if x.dtype == jnp.float64:
        return lax.expm1(x)
    small = jnp.tanh(x * 0.5) * (jnp.exp(x) + 1)
    return jnp.where(jnp.abs(x) < 0.5, small, jnp.exp(x) - 1)


# Press et al., Numerical Recipes in C, 2nd edition, section 6.2 (`erfcc`): a relative error below
# 1.2e-7 everywhere. One formula for all sizes, where XLA's has three, costs half as much in a
# kernel, which computes all that it chooses from.
_ERFC = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)


def _erfc(x: jax.Array) -> jax.Array:
    """The complementary error function, as exact where it is small. Mosaic has none."""
    if x.dtype == jnp.float64:  # which no kernel has, and which deserves more digits
        return lax.erfc(x)
    size = jnp.abs(x)
    t = 1 / (1 + 0.5 * size)
    positive = t * jnp.exp(_polynomial(t, *_ERFC) - size * size)
    # At infinity the formula has 0 * exp(-inf), and is right.
    return jnp.where(x < 0, 2 - positive, positive)


# Giles, Approximating the erfinv function, GPU Computing Gems 2 (2011), single precision: where
# `w = -log(1 - x * x)` is below 5, in `w - 2.5`, and in `sqrt(w) - 3` elsewhere.
_ERF_INV = (
    1.50140941,
    0.246640727,
    -0.00417768164,
    -0.00125372503,
    0.00021858087,
    -4.39150654e-06,
    -3.5233877e-06,
    3.43273939e-07,
    2.81022636e-08,
)
_ERF_INV_TAIL = (
    2.83297682,
    1.00167406,
    0.00943887047,
    -0.0076224613,
    0.00573950773,
    -0.00367342844,
    0.00134934322,
    0.000100950558,
    -0.000200214257,
)


def _erf_inv(x: jax.Array) -> jax.Array:
    """The inverse error function. Mosaic's own asks for NaN as `_not_equal` says (jax 0.12.1)."""
    if x.dtype == jnp.float64:
        return lax.erf_inv(x)
    w = -jnp.log1p(-x * x)
    factor = jnp.where(
        w < 5, _polynomial(w - 2.5, *_ERF_INV), _polynomial(jnp.sqrt(w) - 3, *_ERF_INV_TAIL)
    )
    return jnp.where(jnp.abs(x) == 1, x * jnp.inf, factor * x)


def _polynomial(x: jax.Array, *coefficients: Any) -> jax.Array:
    """By Horner's rule; the coefficients begin with that of the lowest power."""
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def _sign(x: jax.Array) -> jax.Array:
    """Mosaic's own asks which TPU it is, and `jax.export` cannot say."""
    one = jnp.ones_like(x)
    return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


def _not_equal(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x != y`, as what is not equal: so NaN differs from all, itself included.

    jax 0.12.1 asks Mosaic for "une" (unordered or not equal), which the TPU compiler did not know
    up to libtpu 0.0.52; jax before asks for "one", which is no word for NaN.
    """
    return lax.bitwise_not(lax.eq(x, y))


def _convert(x: jax.Array, *, new_dtype: np.dtype) -> jax.Array:
    return x.astype(new_dtype)


def _same(x: jax.Array) -> jax.Array:
    return x


# By the names of JAX's primitives. What is not here is not taken for a function of single entries;
# together they hold the derivatives of all of them (`test_elementwise.py`).
_OPERATIONS: Mapping[str, Callable[..., jax.Array]] = {
    "abs": lax.abs,
    "add": lax.add,
    "add_any": lax.add,
    "and": lax.bitwise_and,
    "atan2": lax.atan2,
    "bitcast_convert_type": lax.bitcast_convert_type,
    "ceil": lax.ceil,
    "clamp": lax.clamp,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "cos": lax.cos,
    "div": lax.div,
    "eq": lax.eq,
    "erf": lax.erf,
    "erf_inv": _erf_inv,
    "erfc": _erfc,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": _expm1,
    "floor": lax.floor,
    "ge": lax.ge,
    "gt": lax.gt,
    "integer_pow": lax.integer_pow,
    "is_finite": lax.is_finite,
    "le": lax.le,
    "log": lax.log,
    "log1p": lax.log1p,
    "logistic": lax.logistic,
    "lt": lax.lt,
    "max": lax.max,
    "min": lax.min,
    "mul": lax.mul,
    "ne": _not_equal,
    "neg": lax.neg,
    "not": lax.bitwise_not,
    "one_minus_square": lambda x: 1 - x * x,
    "or": lax.bitwise_or,
    "polynomial": _polynomial,
    "pow": lax.pow,
    "rem": lax.rem,
    "round": lax.round,
    "rsqrt": lax.rsqrt,
    "select_n": lax.select_n,
    "sign": _sign,
    "sin": lax.sin,
    "sqrt": lax.sqrt,
    "square": lax.square,
    "stop_gradient": _same,
    "sub": lax.sub,
    "tan": lax.tan,
    "tanh": lax.tanh,
    "xor": lax.bitwise_xor,
}

# The parameters that say what is computed. The others say how exactly (`accuracy`, which Mosaic
# refuses), or what only arrays have.
_PARAMETERS = frozenset({"new_dtype", "y", "rounding_method"})

# JAX's primitives that run a program once, and where they keep it. A loop keeps one too, and runs
# it more often.
_CALLS = frozenset(
    {
        "call",
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "jit",
        "pjit",
        "remat",
        "remat2",
    }
)
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class _NotElementwiseError(Exception):
    """A function is no `ElementwiseProgram`; it is applied to the whole array instead."""


@dataclasses.dataclass(frozen=True)
class _Constant:
    """A number, by its bytes: two NaNs of the same bits are the same constant."""

    dtype: np.dtype
    content: bytes

    @property
    def value(self) -> Any:
        return np.frombuffer(self.content, self.dtype)[0]

    def full(self, shape: tuple[int, ...]) -> jax.Array:
        return jnp.full(shape, self.value)


@dataclasses.dataclass(frozen=True)
class _Operation:
    """One operation of a program; operands are constants, or numbers of earlier values."""

    name: str
    operands: tuple[int | _Constant, ...]
    parameters: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class ElementwiseProgram:
    """A function of one array, entry by entry, written out.

    **Arguments:**

    - `operations`: in order. Value 0 is the argument, and each operation makes one more.
    - `result`: which value is returned, or a constant.
    """

    operations: tuple[_Operation, ...]
    result: int | _Constant

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applied to each entry of `x`, with what Mosaic lacks made of what it has."""
        values = [x]

        def value(operand: int | _Constant) -> jax.Array:
            return operand.full(x.shape) if isinstance(operand, _Constant) else values[operand]

        for operation in self.operations:
            operands = [value(operand) for operand in operation.operands]
            values.append(_OPERATIONS[operation.name](*operands, **dict(operation.parameters)))
        return value(self.result)


def _literal(value: Any) -> _Constant:
    if isinstance(value, jax.core.Tracer):
        raise _NotElementwiseError("it holds a value that is not known yet")
    array = np.asarray(value)
    if array.shape != ():
        raise _NotElementwiseError(f"it holds an array of shape {array.shape}")
    return _Constant(array.dtype, array.tobytes())


class _Writer:
    """Writes a program from a jaxpr of one argument of `shape`."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.operations: list[_Operation] = []

    def write(self, jaxpr: Any, consts: Any, arguments: list[int | _Constant]) -> list:
        known: dict[Any, int | _Constant] = {}
        known.update(zip(jaxpr.constvars, map(_literal, consts), strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> int | _Constant:
            is_literal = isinstance(variable, jex_core.Literal)
            return _literal(variable.val) if is_literal else known[variable]

        for equation in jaxpr.eqns:
            operands = [read(variable) for variable in equation.invars]
            known.update(zip(equation.outvars, self._results(equation, operands), strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _results(self, equation: Any, operands: list[int | _Constant]) -> list:
        name = equation.primitive.name
        shapes = {variable.aval.shape for variable in (*equation.invars, *equation.outvars)}
        if not shapes <= {self.shape, ()}:
            raise _NotElementwiseError(f"{name} makes another shape")
        for called in _CALLED:
            if name in _CALLS and called in equation.params:
                inner = equation.params[called]
                consts = getattr(inner, "consts", ())
                return self.write(getattr(inner, "jaxpr", inner), consts, operands)
        if name == "broadcast_in_dim":
            return operands[:1]  # of a constant, since all values have one shape
        if name not in _OPERATIONS:
            raise _NotElementwiseError(f"{name} is none of the known functions of single entries")
        if equation.params.get("new_dtype") == jnp.float16:
            raise _NotElementwiseError("Mosaic has no conversion to float16")
        parameters = tuple(
            (key, value) for key, value in sorted(equation.params.items()) if key in _PARAMETERS
        )
        self.operations.append(_Operation(name, tuple(operands), parameters))
        return [len(self.operations)]


def _traced(function: Callable, shape: tuple[int, ...], dtype: Any) -> Any:
    # JAX keeps what it traced by the function, whatever became of what that closes over.
    return jax.make_jaxpr(lambda x: function(x))(jax.ShapeDtypeStruct(shape, dtype))


def _program(function: Callable, shape: tuple[int, ...], dtype: Any) -> ElementwiseProgram:
    closed = _traced(function, shape, dtype)
    if len(closed.out_avals) != 1:
        raise _NotElementwiseError("it returns several arrays")
    writer = _Writer(shape)
    (result,) = writer.write(closed.jaxpr, closed.consts, [0])
    return ElementwiseProgram(tuple(writer.operations), result)


def _alike(wide: ElementwiseProgram, other: ElementwiseProgram) -> bool:
    """Whether two programs are one, but for how exact the numbers are that it computes with."""
    mine, result = _without_conversions(wide)
    others, other_result = _without_conversions(other)
    forms = [
        [(one.name, one.parameters, len(one.operands)) for one in operations]
        for operations in (mine, others)
    ]
    if forms[0] != forms[1]:
        return False
    numbers, other_numbers = (
        [operand for one in operations for operand in one.operands] for operations in (mine, others)
    )
    pairs = zip([*numbers, result], [*other_numbers, other_result], strict=True)
    return all(_same_number(*pair) for pair in pairs)


def _without_conversions(program: ElementwiseProgram) -> tuple[list[_Operation], int | _Constant]:
    """The operations and the result, without conversions to a floating-point dtype."""
    number: list[int | _Constant] = [0]  # of each value, among those that are left
    left: list[_Operation] = []

    def renumbered(operand: int | _Constant) -> int | _Constant:
        return operand if isinstance(operand, _Constant) else number[operand]

    for operation in program.operations:
        operands = tuple(map(renumbered, operation.operands))
        wanted = dict(operation.parameters).get("new_dtype")
        if wanted is not None and jnp.issubdtype(wanted, jnp.floating):
            number.append(operands[0])
        else:
            left.append(_Operation(operation.name, operands, operation.parameters))
            number.append(len(left))
    return left, renumbered(program.result)


def _same_number(one: int | _Constant, other: int | _Constant) -> bool:
    """Whether a constant is another as exact as its dtype is: the least float32 is no bfloat16."""
    if not isinstance(one, _Constant) or not isinstance(other, _Constant):
        return one == other
    with np.errstate(over="ignore"):
        rounded = one.value.astype(other.dtype)
    return rounded.tobytes() == other.content or bool(rounded == other.value)


def _derivative(function: Callable) -> Callable:
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivatives.

    Two are equal where the function and its first two derivatives are the same programs.

    **Arguments:**

    - `programs`: the function, and its first and second derivative.
    - `function`: of a scalar, with its own derivative rules.
    """

    programs: tuple[ElementwiseProgram, ...]
    function: Callable = dataclasses.field(compare=False, repr=False)

    @staticmethod
    def of(
        function: Callable, dtype: Any, given: jax.ShapeDtypeStruct | None = None
    ) -> "Activation | None":
        """`function` for arrays of `dtype`, or `None` where it cannot run in a kernel.

        It may depend on other entries, hold arrays (a learned parameter, say), or have no
        derivative; then it is applied to the whole result.

        **Arguments:**

        - `given`: what it would be applied to otherwise, of which it may ask the shape and the
            dtype: a kernel has other ones.
        """
        try:
            # Of two sizes that nothing else has: a sum over one of them is seen.
            whole = _program(function, (3, 5), dtype)
            if given is not None and not _alike(
                whole, _program(function, given.shape, given.dtype)
            ):
                return None
            # The function as it is now, whatever becomes of what it closes over.
            closed = _traced(function, (), dtype)
            scalar = jex_core.jaxpr_as_fun(closed)

            def frozen(x: jax.Array) -> jax.Array:
                return scalar(x)[0]

            programs = [_program(frozen, (), dtype)]
            derivative: Callable = frozen
            for _ in range(2):
                derivative = _derivative(derivative)
                programs.append(_program(derivative, (), dtype))
        except Exception:
            # Whatever it is that the function does not take, it is asked again with its own input.
            return None
        return Activation(tuple(programs), frozen) if programs[0] == whole else None

    def derivative(self, order: int) -> Callable:
        """The derivative of this order, of arrays of any shape, by JAX's own operations."""
        function: Callable = self.function
        for _ in range(order):
            function = _derivative(function)
        return lambda x: jax.vmap(function)(x.reshape(-1)).reshape(x.shape)

    def program(self, order: int, dtype: Any) -> ElementwiseProgram | None:
        """The derivative of this order as a program; `None` where it is none."""
        if order < len(self.programs):
            return self.programs[order]
        function: Callable = self.function
        for _ in range(order):
            function = _derivative(function)
        try:
            return _program(function, (), dtype)
        except Exception:  # such as a rule that JAX does not have
            return None
