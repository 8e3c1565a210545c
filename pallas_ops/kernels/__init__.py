from ._elementwise import Activation as Activation, ElementwiseProgram as ElementwiseProgram
from ._epilogue import (
    Columns as Columns,
    Epilogue as Epilogue,
    IDENTITY as IDENTITY,
    scale_and_shift as scale_and_shift,
)
from ._pallas import (
    is_matrix_vector as is_matrix_vector,
    kernel_name as kernel_name,
    KERNEL_VERSION as KERNEL_VERSION,
    multiplied_dtype as multiplied_dtype,
    pallas_matmul as pallas_matmul,
    step_size as step_size,
)
from ._pieces import (
    mxu_passes as mxu_passes,
    piece_counts as piece_counts,
    product_of_pieces as product_of_pieces,
)
from ._problem import (
    MatmulProblem as MatmulProblem,
    problem_of as problem_of,
    promoted_dtype as promoted_dtype,
)
from ._prologue import (
    grid_steps as grid_steps,
    operand_buffers as operand_buffers,
    why_no_parts as why_no_parts,
)
from ._run import run_kernel as run_kernel
from ._sums import column_sums_type as column_sums_type, sum_columns as sum_columns
from ._xla import xla_matmul as xla_matmul
