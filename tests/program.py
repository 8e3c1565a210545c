"""Reading programs: what tests of structure ask of a jaxpr."""

import jax


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
    names = ("pallas_ops_matmul", "pallas_ops_fused_matmul", "pallas_ops_matmul_with_sums")
    return [e for e in equations(function, *args) if e.primitive.name in names]
