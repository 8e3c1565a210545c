from ._chip import Chip as Chip, chip as chip
from ._jobs import CompileJob as CompileJob, Verdict as Verdict
from ._judge import (
    judge as judge,
    Judgement as Judgement,
    lower_bound_seconds as lower_bound_seconds,
    peak_operations_per_second as peak_operations_per_second,
    roofline_seconds as roofline_seconds,
    xla_estimate_seconds as xla_estimate_seconds,
    xla_time as xla_time,
    XlaTime as XlaTime,
)
from ._model import predict as predict, Prediction as Prediction
from ._pool import CompilePool as CompilePool, kept_pool as kept_pool
from ._topology import (
    compile_for_tpu as compile_for_tpu,
    compile_only_device as compile_only_device,
    CompilerUnavailableError as CompilerUnavailableError,
    quiet_libtpu as quiet_libtpu,
)
