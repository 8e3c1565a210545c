"""`options`: defaults for a block of code, seen by `jax.jit`."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from .._hardware import known_generation
from ..tiles import as_tile_choice, environment_resolver, TileChoice, Tiles
from ._registry import get_operator


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """How a call wants to be computed, as one hashable value. `None` leaves a thing open."""

    implementation: str | None = None
    tiles: TileChoice | None = None
    device: str | None = None

    def or_else(self, other: "CallOptions") -> "CallOptions":
        """These options, and those of `other` where these are silent."""
        if self == _NOTHING:
            return other
        own = {name: value for name, value in vars(self).items() if value is not None}
        if self.tiles is not None and other.tiles is not None:
            own["tiles"] = self.tiles.or_else(other.tiles)
        return dataclasses.replace(other, **own)


_NOTHING = CallOptions()

# A user context is part of the key of `jax.jit`: to change it is to trace again.
_ambient = jax.make_user_context(default_value=_NOTHING)


def ambient_options() -> CallOptions:
    """The options of the `with` blocks that are open now."""
    return _ambient.value


def read_options(implementation: str | None, tiles: Tiles) -> CallOptions:
    """What holds for a call: what it says itself, else `options`, else the environment.

    **Raises:**

    `ValueError` for an unknown implementation, or a resolver that the environment names and that
    is none; what `as_tile_choice` raises.
    """
    call = CallOptions(implementation, as_tile_choice(tiles)).or_else(ambient_options())
    if call.implementation is not None:
        get_operator("matmul").check_implementation(call.implementation)
    resolver = environment_resolver()
    return call if resolver is None else call.or_else(CallOptions(tiles=as_tile_choice(resolver)))


@contextlib.contextmanager
def options(
    *, implementation: str | None = None, tiles: Tiles = None, device: str | None = None
) -> Iterator[None]:
    """Defaults for every call in a `with` block that does not say otherwise itself.

    What holds where a call is *traced* is what counts, and it is part of `jax.jit`'s cache key: a
    jitted function called under other options is compiled again for them, and found again after.
    The gradient of a call keeps the options of that call, wherever it is computed. Blocks nest; an
    inner one that leaves a thing out keeps the outer one's. They hold for the thread that opened
    them alone, as those of `jax.default_matmul_precision` do; do not `yield` or `await` inside one.

    ```python
    with pallas_ops.options(implementation="interpret"):
        loss, gradients = step(model, x, y)
    ```

    **Arguments:**

    - `implementation`: the name of an implementation of `matmul`: `"mosaic"`, `"interpret"`,
        `"tpu_interpret"` or `"xla"`.
    - `tiles`: as in [`pallas_ops.matmul`][].
    - `device`: the TPU to choose tiles for where JAX does not know it, as under `jax.export`: a
        generation such as `"v5e"`, or a device kind such as `"TPU v5 lite"`.

    **Returns:**

    A context manager.

    **Raises:**

    `ValueError` for an unknown implementation or device, before anything is changed.
    """
    if implementation is not None:
        get_operator("matmul").check_implementation(implementation)
    if device is not None:
        known_generation(device)
    new = CallOptions(implementation, as_tile_choice(tiles), device)
    with _ambient(new.or_else(_ambient.value)):
        yield
