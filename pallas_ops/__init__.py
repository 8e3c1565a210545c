from .kernels import MatmulProblem as MatmulProblem
from .nn import (
    PallasLinear as PallasLinear,
    QuantizedPallasLinear as QuantizedPallasLinear,
    restore_linear as restore_linear,
    swap_linear as swap_linear,
)
from .operators import (
    get_operator as get_operator,
    Implementation as Implementation,
    list_operators as list_operators,
    matmul as matmul,
    Operator as Operator,
    options as options,
    quantize_int8 as quantize_int8,
    quantized_matmul as quantized_matmul,
    register_operator as register_operator,
    UnsupportedCallError as UnsupportedCallError,
)
from .tiles import (
    AutotuneResolver as AutotuneResolver,
    CachedResolver as CachedResolver,
    CompilerResolver as CompilerResolver,
    Resolution as Resolution,
    StaticResolver as StaticResolver,
    TileConfig as TileConfig,
    TileProblem as TileProblem,
    TileResolver as TileResolver,
)


__version__ = "0.1.0"
