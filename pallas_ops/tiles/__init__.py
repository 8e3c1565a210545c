from ._config import (
    block_granules as block_granules,
    TileConfig as TileConfig,
    why_illegal as why_illegal,
)
from ._resolve import resolve_tile as resolve_tile
from ._resolver import (
    as_tile_choice as as_tile_choice,
    Resolution as Resolution,
    TileChoice as TileChoice,
    TileResolver as TileResolver,
    Tiles as Tiles,
)
from ._static import StaticResolver as StaticResolver
from ._vmem import (
    estimate_vmem_bytes as estimate_vmem_bytes,
    vmem_budget_bytes as vmem_budget_bytes,
)
