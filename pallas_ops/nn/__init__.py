from ._linear import PallasLinear as PallasLinear
from ._quantized import QuantizedPallasLinear as QuantizedPallasLinear
from ._swap import restore_linear as restore_linear, swap_linear as swap_linear
