"""Reading programs: what tests of structure ask of a jaxpr."""

import jax

from pallas_ops.tiles._collect import PRIMITIVES


def equations(function, *args):
    """Every equation of a function's program, those of inner programs included."""
    waiting = [jax.make_jaxpr(function)(*args).jaxpr]
    while waiting:
        jaxpr = waiting.pop()
        for equation in jaxpr.eqns:
            yield equation
            waiting.extend(jax.extend.core.jaxprs_in_params(equation.params))


def operator_calls(function, *args):
    """The equations that are calls of the operator."""
    return [e for e in equations(function, *args) if e.primitive.name in PRIMITIVES]


def described(function, *args):
    """What each of these calls says of itself, in the order of the program."""
    return [equation.params["call"] for equation in operator_calls(function, *args)]


def forms(function, *args):
    """Each of these calls in words: its layout, and what its kernel does beside the product."""
    return [_form(equation) for equation in operator_calls(function, *args)]


def _form(equation):
    call = equation.params["call"]
    arrays = {"scale": call.epilogue.scale, "bias": call.epilogue.bias}
    read = [name for name, array in arrays.items() if array is not None]
    assert len(equation.invars) == 2 + len(read)
    parts = [call.problem.layout, *read]
    parts += ["activation"] if call.activation is not None else []
    parts += ["sums"] if call.sums else []
    return " + ".join(parts)
