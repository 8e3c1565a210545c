# ruff: noqa: E501
"""Reading the text of a schedule."""

import pytest

from pallas_ops.compiler._bundles import (
    Predicate,
    read_program,
    region_starts,
    UnreadableScheduleError,
)
from pallas_ops.compiler._schedule import read_schedule


# A loop of two guarded parts, as libtpu 0.0.50 writes one for a v5e; shortened.
TEXT = """\
= control target key start
LH: loop header
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: bf16[256,256]] }
   0x1   :  { %7 = vsyncpa [#allocation5], 0 } /* Start region 89 */
   0x2 LB: > { %s24_s2 = sphi %s9_s3, %s21_s2  ;;  %p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0 }
   0x3   : > { %871 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s155_s8 /*
base_bounds: (128, 8)
strides: (16, 1) */ } /* Start region 38 */
   0x4   : > { %242 = sbr.rel (%p1_p0) target = $region40 }
   0x5   :  {}
   0x6   :  {} /* End region 38 */
   0x7   : > { %243 = vst [vmem:[#allocation3] sm:$0xff] /*vst_source=*/%v1_v0 } /* Start region 39 */
   0x8   : > { %244 = vst [vmem:[#allocation3 + $0x8] sm:$0xff] /*vst_source=*/%v1_v0 } /* End region 39 */
   0x9 PF: > { %403 = vmatpush.bf16.msra.mxu0 %v787_v1  ;;  %838 = vmatpush.bf16.xpose.msra.mxu1 %v2_v2 } /* Start/End empty region 40 */
   0xa   : > { %411 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v7_v9  ;;  %421 = vmatmul.f32.gmra.mxu1 %v7_v1 }
   0xb   : > { %416 = vmatmul.bf16.gmra.mxu0 %v3_v3  ;;  %1 = vst [vmem:[#allocation9_spill]] %v3_v3 }
   0xc   : > { %p2_p1 = scmp.ge.s32.totalorder %s21_s2, 66 /* loop exit test */ }
   0xd   : > { %20 = sbr.rel (!%p2_p1) target = $region90 } /* Start region 3 */
   0xe   :  {}
   0xf   :  {} /* End region 3 */
  0x10   :  { %574 = vsyncpa [#allocation5], 1 } /* exit bundle: %matmul = custom-call(%lhs) */
""".replace("Start region 89 */\n   0x2", "Start region 89 :: End region 89 */\n   0x2").replace(
    "%s21_s2  ;;  %p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0 }",
    "%s21_s2  ;;  %p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0 } /* Start region 90 */",
)
RATES = {8: 1.0, 16: 1.0, 32: 2.0, 64: 4.0}


def test_what_is_in_a_bundle():
    program = read_program(TEXT)
    bundles = program.bundles
    assert len(bundles) == 17
    assert bundles[9].weight_pushes == 2
    assert bundles[9].transposes == 1
    assert bundles[10].matmuls == ((0, 16), (1, 8))
    assert (bundles[11].matmuls, bundles[11].spills) == (((0, 16),), 1)
    assert bundles[4].branch == (Predicate("p1_p0"), 40)
    assert bundles[13].branch == (Predicate("p2_p1", negated=True), 90)
    assert program.definitions["p1_p0"] == ("scmp.ne.s32.totalorder", "%s6_s1", "0")
    assert region_starts(bundles)[40] == 9
    assert program.delay_slots == 2


def test_the_steps_of_a_loop():
    found = read_schedule(read_program(TEXT), RATES, frozenset({3}))
    # All bundles of the loop; outside of the first step, without the two that clear.
    assert (found.first.bundles, found.middle.bundles, found.last.bundles) == (14, 12, 12)
    assert (found.prologue_bundles, found.epilogue_bundles) == (2, 1)
    assert (found.middle.matmuls, found.middle.weight_pushes, found.middle.spills) == (3, 2, 1)
    # The second multiplication of MXU 0 waits until the first one has taken its 16 rows.
    assert found.middle.mxu_cycles == 32
    assert found.middle.cycles == found.middle.bundles + 15


def test_where_nothing_is_summed_in_steps_nothing_is_taken_for_the_sum():
    found = read_schedule(read_program(TEXT), RATES, frozenset())
    assert found.first == found.middle == found.last


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 bundles"),
        (TEXT[: len(TEXT) // 2], "end without an exit bundle"),
        (TEXT.replace("   0x6 ", "   0x7 "), "bundle 0x7 follows 6 bundles"),
        (TEXT.replace("vmatmul.f32.", "vmatmul.f12."), "of unknown dtype"),
        (
            TEXT.replace(
                "   0x5   :  {}",
                "   0x5   :  { %1 = sbr.rel target = $region3  ;;  "
                "%2 = sbr.rel target = $region40 }",
            ),
            "two branches in one bundle",
        ),
    ],
)
def test_what_is_not_understood_is_an_error(text, message):
    with pytest.raises(UnreadableScheduleError, match=message):
        read_program(text)


def test_a_loop_inside_that_multiplies_is_an_error():
    inner = TEXT.replace(
        "   0xb   : >", "   0xb   : > { %9 = sbr.rel (%p9_p9) target = $region40 }  ;; "
    ).replace("0x9 PF: >", "0x9 PF: > ")
    with pytest.raises(UnreadableScheduleError, match="1 loops inside the grid's multiply"):
        read_schedule(read_program(inner), RATES, frozenset({3}))
