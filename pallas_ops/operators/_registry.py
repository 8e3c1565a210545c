"""The registry: operators by name, each with its typed signature and its implementations."""

import dataclasses
import functools
import importlib.metadata
import inspect
import itertools
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import jaxtyped

from ._refuse import refuse


ENTRY_POINT_GROUP = "pallas_ops.operators"
"""Where other packages announce their operators."""


class UnsupportedCallError(NotImplementedError):
    """No implementation can compute a call; the message lists each with its reason."""


def _supports_everything(*arrays, **static) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    **Arguments:**

    - `name`: what `implementation=` calls it.
    - `function`: computes it: `function(*arrays, **static)`. Arrays are positional and are what
        is differentiated; everything else is passed by keyword and is not.
    - `supports`: called as `function` is; returns `None` where it can compute the call, else the
        reason why it cannot, for the error message. It must read nothing but shapes and dtypes.
    - `platforms`: the platforms that it runs on, such as `("tpu",)`; `"gpu"` stands for `"cuda"`
        and `"rocm"`, which are JAX's names. `None` is every platform.
    """

    name: str
    function: Callable
    supports: Callable[..., str | None] = _supports_everything
    platforms: tuple[str, ...] | None = None
    _vjp: tuple[Callable, Callable] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        if isinstance(self.platforms, str):
            raise TypeError(
                f"Implementation {self.name!r}: `platforms` is a tuple such as "
                f"({self.platforms!r},), got the string {self.platforms!r}."
            )
        if self.platforms is not None:
            names = (("cuda", "rocm") if name == "gpu" else (name,) for name in self.platforms)
            object.__setattr__(self, "platforms", tuple(itertools.chain.from_iterable(names)))

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        """Computes the operator, differentiably where the operator has derivative rules."""
        if self._vjp is None:
            return self.function(*arrays, **static)
        forward, backward = (self._with_static(rule, static) for rule in self._vjp)
        call = jax.custom_vjp(lambda *arrays: self.function(*arrays, **static))
        call.defvjp(forward, backward)
        return call(*arrays)

    def _with_static(self, rule: Callable, static: Mapping[str, Any]) -> Callable:
        extra = dict(static)
        if "implementation" in inspect.signature(rule).parameters:
            extra["implementation"] = self
        return lambda *arguments: rule(*arguments, **extra)

    def why_not(self, arrays: Iterable[Any], static: Mapping[str, Any]) -> str | None:
        """Why it cannot compute this call on any platform, or `None` where it can."""
        return self.supports(*arrays, **static)


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


class Operator:
    """A named, typed operation with one or more implementations.

    Calling an operator checks the arguments against the signature, takes the first implementation
    that supports the call on the platform that the program is compiled for, and checks the result.

    **Arguments:**

    - `name`: its name in the registry.
    - `signature`: a function whose parameters and return value are annotated with jaxtyping types.
        It is never called. Positional parameters are arrays; keyword-only ones are static.
    - `implementations`: in order of preference.
    - `vjp`: the derivative rules `(fwd, bwd)`, as for `jax.custom_vjp.defvjp`: `fwd(*arrays,
        **static)` returns the result and what `bwd` needs; `bwd(residuals, cotangent, **static)`
        returns a tuple with one cotangent for each array. Every implementation gets them. A rule
        with a keyword parameter `implementation` is also given the implementation that is being
        differentiated, to call it. `None` leaves differentiation to JAX.
    - `entry`: what a call runs in place of the choice described above, for an operator that is a
        JAX primitive of its own. It is given `implementation=` too.

    **Raises:**

    `ValueError` for no implementation or two of one name, `TypeError` for rules that are not a
    pair of functions.
    """

    def __init__(
        self,
        name: str,
        signature: Callable,
        implementations: Iterable[Implementation],
        *,
        vjp: tuple[Callable, Callable] | None = None,
        entry: Callable | None = None,
    ):
        implementations = tuple(implementations)
        if not isinstance(name, str):
            raise TypeError(f"The name of an operator is a string, got {name!r}.")
        for implementation in implementations:
            if not isinstance(implementation, Implementation):
                raise TypeError(
                    f"Operator {name!r}: each of `implementations` is an Implementation(name, "
                    f"function), got {implementation!r}."
                )
        names = [implementation.name for implementation in implementations]
        if not names:
            raise ValueError(f"Operator {name!r} needs at least one implementation.")
        if len(set(names)) < len(names):
            raise ValueError(f"Operator {name!r} has two implementations of one name: {names}.")
        if vjp is not None and not (
            isinstance(vjp, tuple) and len(vjp) == 2 and all(map(callable, vjp))
        ):
            raise TypeError(f"Operator {name!r}: `vjp` is a pair of functions (fwd, bwd).")
        self.name = name
        self.signature = inspect.signature(signature, eval_str=True)
        self.vjp = vjp
        self.implementations: Mapping[str, Implementation] = types.MappingProxyType(
            {
                implementation.name: dataclasses.replace(implementation, _vjp=vjp)
                for implementation in implementations
            }
        )
        self._entry = entry

    def __repr__(self) -> str:
        return f"Operator({self.name!r}, implementations={list(self.implementations)})"

    def __call__(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        """Computes the operator.

        **Arguments:**

        - `*args`, `**kwargs`: as the signature has them.
        - `implementation`: the name of the implementation to use; `None` chooses.

        **Raises:**

        `TypeError` where an argument or the result does not fit the signature, `ValueError` for an
        unknown implementation, [`pallas_ops.UnsupportedCallError`][] where none can compute it.
        """
        from beartype.door import is_bearable  # as long to import as all of this package

        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None
        given = {
            # JAX's functions take NumPy's arrays, which jaxtyping's `Array` is not.
            name: jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value
            for name, value in bound.arguments.items()
        }
        bound.arguments.update(given)
        bound.apply_defaults()  # or a positional argument given by name might count as static
        static = {name: value for name, value in bound.kwargs.items() if name in given}
        if implementation is not None:
            self.check_implementation(implementation)
        # `n` is the same number in every argument and in the result, as long as each check runs in
        # this very frame: a function of its own would start afresh wherever jaxtyping's import
        # hook is on.
        with jaxtyped("context"):
            for name, value in given.items():
                annotation = self._annotation(self.signature.parameters[name].annotation)
                if not is_bearable(value, annotation):
                    raise self._mismatch(f"argument `{name}`", value, annotation)
            if self._entry is not None:
                result = self._entry(*bound.args, **static, implementation=implementation)
            else:
                result = self._run(bound.args, static, implementation)
            annotation = self._annotation(self.signature.return_annotation)
            if not is_bearable(result, annotation):
                raise self._mismatch("the result", result, annotation)
        return result

    @staticmethod
    def _annotation(annotation: Any) -> Any:
        return Any if annotation is inspect.Parameter.empty else annotation

    def _mismatch(self, what: str, value: Any, annotation: Any) -> TypeError:
        expected = getattr(annotation, "__name__", None) or str(annotation)
        return TypeError(
            f"{self.name}: {what} is {_describe(value)}, expected {expected} (sizes of one name "
            f"must agree). Signature: {self.name}{self.signature}"
        )

    def _run(self, arrays: tuple, static: dict[str, Any], name: str | None) -> Any:
        """Chooses for each platform; `jax.lax` decides when the program is lowered."""
        if name is not None:
            return self.select(arrays, static, name=name)(*arrays, **static)
        named = {
            platform
            for implementation in self.implementations.values()
            for platform in implementation.platforms or ()
        }
        branches: dict[str, Callable] = {}
        errors = []
        for platform in (*sorted(named), None):
            try:
                implementation = self.select(arrays, static, platform=platform)
            except UnsupportedCallError as error:
                errors.append(error)
            else:
                branches[platform or "default"] = functools.partial(implementation, **static)
        if not branches:
            raise errors[-1]
        if "default" not in branches:
            # Known only when the program is compiled: one for another platform must still trace.
            some = next(iter(branches.values()))
            branches["default"] = lambda *arrays: some(*refuse(errors[-1], *arrays))
        return jax.lax.platform_dependent(*arrays, **branches)

    def check_implementation(self, name: str) -> None:
        """Raises `ValueError` where there is no implementation of this name."""
        if not isinstance(name, str) or name not in self.implementations:
            raise ValueError(
                f"{self.name} has no implementation {name!r}. It has: "
                f"{', '.join(map(repr, self.implementations))}."
            )

    def select(
        self,
        arrays: Iterable[Any],
        static: Mapping[str, Any],
        *,
        name: str | None = None,
        platform: str | None = None,
    ) -> Implementation:
        """The implementation for one call.

        **Arguments:**

        - `arrays`: the arrays, or anything with their shapes and dtypes.
        - `static`: the keyword arguments.
        - `name`: the implementation that was asked for, on whatever platform; `None` chooses.
        - `platform`: the platform that the call is lowered for; `None` is one that no
            implementation names.

        **Raises:**

        [`pallas_ops.UnsupportedCallError`][] with the reason of each implementation.
        """
        arrays = tuple(arrays)
        reasons = {}
        for candidate in self.implementations.values():
            if name is not None and candidate.name != name:
                continue
            platforms = candidate.platforms
            if name is None and platforms is not None and platform not in platforms:
                where = platform or "another platform"
                reasons[candidate.name] = f"runs on {', '.join(platforms)}, not on {where}"
                continue
            reason = candidate.why_not(arrays, static)
            if reason is None:
                return candidate
            reasons[candidate.name] = reason
        given = ", ".join(map(_describe, arrays))
        listed = "\n".join(f"  - {name}: {reason}" for name, reason in reasons.items())
        if name is None:
            what, hint = f"no implementation supports ({given})", ""
        else:
            what = f"implementation {name!r} does not support ({given})"
            hint = "\nLeave `implementation` out to use the first one that does."
        raise UnsupportedCallError(f"{self.name}: {what}:\n{listed}{hint}")


_lock = threading.RLock()
_operators: dict[str, Operator] = {}
_plugins_loaded = False


def register_operator(operator: Operator, *, replace: bool = False) -> Operator:
    """Adds an operator to the registry.

    **Arguments:**

    - `operator`: the [`pallas_ops.Operator`][].
    - `replace`: whether it may take the place of one of the same name.

    **Returns:**

    The operator.

    **Raises:**

    `ValueError` for a name that is taken; the registry then stays as it was.
    """
    if not isinstance(operator, Operator):
        raise TypeError(f"register_operator takes an Operator, got {operator!r}.")
    with _lock:
        if operator.name in _operators and not replace:
            raise ValueError(
                f"An operator {operator.name!r} is registered already. Choose another name, or "
                f"pass `replace=True` to take its place."
            )
        _operators[operator.name] = operator
    return operator


def _load_plugins() -> None:
    """Imports what other packages announce, once, on the first question that it could answer."""
    global _plugins_loaded
    with _lock:
        if _plugins_loaded:
            return
        _plugins_loaded = True
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            try:
                loaded = entry_point.load()
                if callable(loaded) and not isinstance(loaded, Operator):
                    loaded = loaded()
                for operator in [loaded] if isinstance(loaded, Operator) else loaded:
                    register_operator(operator)
            except Exception as error:
                package = entry_point.dist.name if entry_point.dist is not None else "a package"
                warnings.warn(
                    f"pallas_ops: the operators of {package} (entry point {entry_point.name!r} = "
                    f"{entry_point.value!r}) could not be loaded and are left out: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=3,
                )


def get_operator(name: str) -> Operator:
    """The operator of this name.

    **Raises:**

    `KeyError` for an unknown name, listing those that exist.
    """
    if name not in _operators:
        _load_plugins()
    with _lock:
        if name not in _operators:
            raise KeyError(f"No operator {name!r}. There are: {', '.join(sorted(_operators))}.")
        return _operators[name]


def list_operators() -> list[str]:
    """The names of all operators, those of other packages among them, in alphabetical order."""
    _load_plugins()
    with _lock:
        return sorted(_operators)
