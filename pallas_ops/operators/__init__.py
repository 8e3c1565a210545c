from ._matmul import matmul as matmul
from ._options import options as options
from ._quantized import quantize_int8 as quantize_int8, quantized_matmul as quantized_matmul
from ._registry import (
    get_operator as get_operator,
    Implementation as Implementation,
    list_operators as list_operators,
    Operator as Operator,
    register_operator as register_operator,
    UnsupportedCallError as UnsupportedCallError,
)
