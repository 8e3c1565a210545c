from ._autotune import AutotuneResolver as AutotuneResolver
from ._cached import CachedResolver as CachedResolver
from ._candidates import candidates as candidates
from ._collect import collect as collect
from ._compiler import CompilerResolver as CompilerResolver
from ._config import (
    block_granules as block_granules,
    TileConfig as TileConfig,
    why_illegal as why_illegal,
)
from ._environment import environment_resolver as environment_resolver
from ._estimate import estimate_seconds as estimate_seconds
from ._key import problem_key as problem_key, versions as versions
from ._legal import (
    nearest_legal as nearest_legal,
    vmem_limit_bytes as vmem_limit_bytes,
    why_too_large as why_too_large,
)
from ._memory import forget as forget
from ._problem import TileProblem as TileProblem
from ._resolve import resolve_tile as resolve_tile
from ._resolver import (
    as_tile_choice as as_tile_choice,
    Resolution as Resolution,
    TileChoice as TileChoice,
    TileResolver as TileResolver,
    Tiles as Tiles,
)
from ._static import StaticResolver as StaticResolver
from ._store import (
    Entry as Entry,
    InvalidEntryError as InvalidEntryError,
    TileStore as TileStore,
)
from ._tables import read_table as read_table, table_json as table_json
from ._vmem import (
    estimate_vmem_bytes as estimate_vmem_bytes,
    most_added_bytes as most_added_bytes,
)
