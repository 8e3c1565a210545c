"""`PALLAS_OPS_TILES`: the resolver of everything that says nothing else."""

import os

from ._autotune import AutotuneResolver
from ._cached import DEFAULT_RESOLVER
from ._compiler import CompilerResolver
from ._resolver import TileResolver
from ._static import StaticResolver


TILES_VARIABLE = "PALLAS_OPS_TILES"
"""The environment variable that names a resolver."""

RESOLVERS: dict[str, TileResolver] = {
    "static": StaticResolver(),
    "cached": DEFAULT_RESOLVER,
    "autotune": AutotuneResolver(),
    "compiler": CompilerResolver(),
}
"""The resolvers that have a name."""


def environment_resolver() -> TileResolver | None:
    """The resolver that the environment names, or `None` where it names none.

    **Raises:**

    `ValueError` for a name that is none.
    """
    name = os.environ.get(TILES_VARIABLE)
    if not name:
        return None
    if name not in RESOLVERS:
        raise ValueError(
            f"{TILES_VARIABLE}={name!r} names no tile resolver. There are: {', '.join(RESOLVERS)}."
        )
    return RESOLVERS[name]
