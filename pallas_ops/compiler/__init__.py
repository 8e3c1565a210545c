from ._topology import (
    compile_for_tpu as compile_for_tpu,
    compile_only_device as compile_only_device,
    CompilerUnavailableError as CompilerUnavailableError,
    quiet_libtpu as quiet_libtpu,
)
