"""Functions that are known by what they compute, so that they need not be traced in each call.

An activation may close over anything, which may be another thing by the next call, or a model. Of
these the value is known: functions of JAX, and Python functions that read nothing but arguments,
numbers and other functions that are known. Two of them are equal where all of that is.
"""

import builtins
import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class KnownFunction:
    """A function of one array, equal to each that computes the same, by `key`."""

    key: Any
    function: Callable = dataclasses.field(compare=False, repr=False)

    def __call__(self, x: jax.Array) -> Any:
        return self.function(x)


def known(function: Callable) -> KnownFunction | None:
    """The function, where what it computes is known; else `None`."""
    try:
        return KnownFunction(_key(function), function)
    except (_UnknownError, RecursionError):
        return None


class _UnknownError(Exception):
    """A value may change, or is not to be kept alive."""


@functools.cache
def _functions_of_jax() -> dict[int, Any]:
    modules = (jax.nn, jnp, jax.lax, jax.scipy.special)
    found = (value for module in modules for value in vars(module).values())
    return {id(value): value for value in found if callable(value)}


# Their attributes are constants, but for these.
_MODULES = frozenset({"jax", "math", "numpy"})
_VARIABLES = frozenset({"config", "random"})

_PLAIN = (bool, int, float, complex, str, type(None))
_BUILTINS = (abs, bool, float, int, len, max, min, pow, range, round, sum, tuple)
_JITTED = type(jax.jit(lambda x: x))


def _key(value: Any) -> Any:
    """What stands for a value where two of them are compared.

    **Raises:**

    `_UnknownError` for what may change.
    """
    if id(value) in _functions_of_jax():
        return value
    if type(value) in _PLAIN:
        return type(value), repr(value)  # 1 is not 1.0, and 0.0 not -0.0
    if type(value) is tuple:
        return tuple(map(_key, value))
    if type(value) is types.ModuleType and value.__name__.partition(".")[0] in _MODULES:
        return value.__name__
    if any(value is one for one in _BUILTINS):
        return value
    if type(value) is functools.partial:
        keywords = tuple(sorted(value.keywords.items()))
        return functools.partial, _key(value.func), _key(value.args), _key(keywords)
    if type(value) is _JITTED:
        return _JITTED, _key(inspect.unwrap(value, stop=lambda one: type(one) is not _JITTED))
    if type(value) is types.FunctionType and not vars(value):
        return _key_of_function(value)
    raise _UnknownError


def _key_of_function(function: types.FunctionType) -> Any:
    scope, absent = function.__globals__, object()
    read = [scope.get(name, getattr(builtins, name, absent)) for name in _names(function.__code__)]
    try:
        read += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is empty yet
        raise _UnknownError from None
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
    return function.__code__, _key(tuple(read)), _key(defaults)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function reads, and those in it.

    **Raises:**

    `_UnknownError` where it does more than to read and to compute.
    """
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        operation, argument = instruction.opname, instruction.argval
        if operation.startswith(("IMPORT", "STORE_GLOBAL", "STORE_ATTR", "DELETE")) or (
            operation == "STORE_DEREF" and argument in code.co_freevars
        ):
            raise _UnknownError
        if operation.startswith("LOAD") and argument in _VARIABLES:
            raise _UnknownError
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[argument] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(dict.fromkeys(_names(inner)))
    return tuple(names)
