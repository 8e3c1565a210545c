"""What is read out of the compiler's refusals; in the words of libtpu 0.0.50.1."""

from pallas_ops.compiler import _worker as worker


# `pallas-ops predict 8192 8192 8192 --device tpu7x --tile 2048,2048,2048`
OF_ALL_VMEM = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory \
space vmem. Used 75.93M of 63.94M vmem. Exceeded vmem capacity by 11.99M.

Program vmem requirement 75.93M:
    scoped           75.93M

  Largest program allocations in vmem:

  1. Size: 16.00M
     Operator: op_name="jit(product)/pallas_ops_matmul_nt/pallas_call"
     Shape: f32[2048,2048]{1,0:T(8,128)}
     Unpadded size: 16.00M
     Tag: scratch operand
"""


def test_a_refusal_for_all_of_vmem():
    assert worker.one_line(RuntimeError(OF_ALL_VMEM)) == (
        "Ran out of memory in memory space vmem. Used 75.93M of 63.94M vmem"
    )
    assert worker.vmem_of_error(OF_ALL_VMEM) == round(75.93 * 2**20)


def test_a_refusal_for_another_memory():
    text = "Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm."
    assert worker.vmem_of_error(text) is None
    assert worker.one_line(RuntimeError(text)) == f"RuntimeError: {text}"


def test_a_long_refusal_is_cut_between_words():
    words = [f"word{number}" for number in range(100)]
    line = worker.one_line(RuntimeError(" ".join(words)))
    kept = line.removeprefix("RuntimeError: ").removesuffix(" ...").split(" ")
    assert line.endswith(" ...")
    assert kept == words[: len(kept)]
    assert 30 < len(kept) < 60
