# ruff: noqa: E501
"""Reading the text of a schedule."""

import pytest

from pallas_ops.compiler._bundles import (
    Definition,
    Predicate,
    read_program,
    region_starts,
    UnreadableScheduleError,
)
from pallas_ops.compiler._schedule import read_schedule


# A loop of two steps' worth of guarded parts, as libtpu 0.0.50 writes one for a v5e; shortened. It
# runs eight times, and %s6_s1 goes from 0 to 3 twice.
TEXT = """\
= control target key start
LH: loop header
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: bf16[256,256]]  ;;  %s9_s3 = smov.u32 0 /* copy */ }
   0x1   :  { %7 = vsyncpa [#allocation5], 0  ;;  %s8_s4 = smov 0 } /* Start region 89 :: End region 89 */
   0x2 LB: > { %s24_s2 = sphi %s9_s3, %s21_s2  ;;  %s6_s1 = sphi %s8_s4, %s5_s1 /* phi, copy */  ;;  %p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0 } /* Start region 90 */
   0x3   : > { %871 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s155_s8 /*
base_bounds: (128, 8)
strides: (16, 1) */  ;;  %s4_s5 = sadd.s32 1, %s6_s1 } /* Start region 38 */
   0x4   : > { %242 = sbr.rel (%p1_p0) target = $region40  ;;  %p3_p2 = scmp.ge.s32.totalorder %s4_s5, 4 }
   0x5   : > { %s5_s1 = smov.u32 (%p3_p2, %s4_s5), 0 /* copy for cssa */ }
   0x6   :  {} /* End region 38 */
   0x7   : > { %243 = vst [vmem:[#allocation3] sm:$0xff] /*vst_source=*/%v1_v0 } /* Start region 39 */
   0x8   : > { %244 = vst [vmem:[#allocation3 + $0x8] sm:$0xff] /*vst_source=*/%v1_v0 } /* End region 39 */
   0x9 PF: > { %403 = vmatpush.bf16.msra.mxu0 %v787_v1  ;;  %838 = vmatpush.bf16.xpose.msra.mxu1 %v2_v2 } /* Start/End empty region 40 */
   0xa   : > { %411 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v7_v9  ;;  %421 = vmatmul.f32.gmra.mxu1 %v7_v1 }
   0xb   : > { %416 = vmatmul.bf16.gmra.mxu0 %v3_v3  ;;  %1 = vst [vmem:[#allocation9_spill]] %v3_v3  ;;  %s21_s2 = sadd.s32 1, %s24_s2 }
   0xc   : > { %p2_p1 = scmp.ge.s32.totalorder %s21_s2, 8 /* loop exit test */ }
   0xd   : > { %20 = sbr.rel (!%p2_p1) target = $region90 } /* Start region 3 */
   0xe   :  {}
   0xf   :  {} /* End region 3 */
  0x10   :  { %574 = vsyncpa [#allocation5], 1 } /* exit bundle: %matmul = custom-call(%lhs) */
"""
RATES = {8: 1.0, 16: 1.0, 32: 2.0, 64: 4.0}


def test_what_is_in_a_bundle():
    program = read_program(TEXT)
    bundles = program.bundles
    assert len(bundles) == 17
    assert bundles[9].weight_pushes == 2
    assert bundles[9].transposes == 1
    assert bundles[10].matmuls == ((0, 16), (1, 8))
    assert (bundles[11].matmuls, bundles[11].spills) == (((0, 16),), 1)
    assert bundles[4].branch == (Predicate("%p1_p0"), 40)
    assert bundles[13].branch == (Predicate("%p2_p1", negated=True), 90)
    assert program.definitions["%p1_p0"] == Definition(2, "scmp.ne.s32", ("%s6_s1", "0"))
    assert region_starts(bundles)[40] == 9
    assert program.delay_slots == 2


# Other ways to write the same.
FORMS = {
    "as it is": TEXT,
    "the flag kept as a number": TEXT.replace(
        "%p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0 }",
        "%p9_p9 = scmp.ne.s32.totalorder %s6_s1, 0 }",
    ).replace(
        "strides: (16, 1) */  ;;  ",
        "strides: (16, 1) */  ;;  %s77_s7 = scalar_select /*predicate=*/%p9_p9, /*on_true=*/1, "
        "/*on_false=*/0  ;;  %p1_p0 = scmp.ne.s32.totalorder %s77_s7, 0  ;;  ",
    ),
    "its contrary, and negated": TEXT.replace("sbr.rel (%p1_p0)", "sbr.rel (!%p8_p3)").replace(
        "%s4_s5 = sadd", "%p8_p3 = scmp.lt.s32.totalorder %s6_s1, 1  ;;  %s4_s5 = sadd"
    ),
    "logic": TEXT.replace("sbr.rel (%p1_p0)", "sbr.rel (%p8_p3)").replace(
        "%s4_s5 = sadd",
        "%p7_p4 = por %p6_p5, %p1_p0  ;;  %p6_p5 = pneg %p5_p6  ;;  "
        "%p5_p6 = scmp.lt.s32.totalorder %s24_s2, 100  ;;  %p4_p7 = pnand %p7_p4, %p5_p6  ;;  "
        "%p8_p3 = pneg %p4_p7  ;;  %s4_s5 = sadd",
    ),
    "spilled scalars": TEXT.replace(
        "%s4_s5 = sadd.s32 1, %s6_s1",
        "%5 = sst [smem:[#allocation13_spill]] %s6_s1  ;;  %s4_s5 = sadd.s32 1, %s6_s1",
    )
    .replace("%p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0 }", "%9 = nop }")
    .replace(
        "%p3_p2 = scmp.ge",
        "%s66_s6 = sld [smem:[#allocation13_spill]] /* phi copy */  ;;  "
        "%p1_p0 = scmp.ne.s32.totalorder %s66_s6, 0  ;;  %p3_p2 = scmp.ge",
    ),
    # The slot of what a round takes over from the one before is another scalar's meanwhile.
    "spilled from one round to the next": TEXT.replace(
        "%s8_s4 = smov 0 }", "%s8_s4 = smov 0  ;;  %3 = sst [smem:[#allocation13_spill]] %s8_s4 }"
    )
    .replace("%s6_s1 = sphi %s8_s4, %s5_s1 /* phi, copy */", "%9 = nop")
    .replace("%p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0 }", "%8 = nop }")
    .replace(
        "strides: (16, 1) */  ;;  ",
        "strides: (16, 1) */  ;;  %s6_s1 = sld [smem:[#allocation13_spill]]  ;;  "
        "%5 = sst [smem:[#allocation13_spill]] %s24_s2  ;;  "
        "%p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0  ;;  ",
    )
    .replace("loop exit test */ }", "*/  ;;  %6 = sst [smem:[#allocation13_spill]] %s5_s1 }"),
    "the place of the round before": TEXT.replace(
        "%p1_p0 = scmp.ne.s32.totalorder %s6_s1, 0 }",
        "%s55_s7 = sphi %s8_s4, %s5_s1  ;;  %s54_s8 = sadd.s32 4294967295, %s55_s7  ;;  "
        "%p1_p0 = scmp.ne.s32.totalorder %s54_s8, 4294967295 }",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_steps_of_a_loop(form):
    found = read_schedule(read_program(FORMS[form]), RATES, 4)
    # All bundles of the loop; outside of the first step, without the two that clear.
    assert (found.first.bundles, found.middle.bundles, found.last.bundles) == (14, 12, 12)
    assert (found.prologue_bundles, found.epilogue_bundles) == (2, 1)
    assert (found.middle.matmuls, found.middle.weight_pushes, found.middle.spills) == (3, 2, 1)
    # The second multiplication of MXU 0 waits until the first one has taken its 16 rows.
    assert found.middle.mxu_cycles == 32
    assert found.middle.cycles == found.middle.bundles + 15


def test_a_constant_that_is_no_place_in_the_sum():
    """The rounds are counted, and what is compared is computed: its constant says nothing."""
    outer = TEXT.replace(
        "scmp.ne.s32.totalorder %s6_s1, 0 }", "scmp.ne.s32.totalorder %s24_s2, 0 }"
    )
    found = read_schedule(read_program(outer), RATES, 4)
    assert found.first.bundles == found.middle.bundles == found.last.bundles == 12
    other = TEXT.replace("scmp.ne.s32.totalorder %s6_s1, 0 }", "scmp.ne.s32.totalorder %s6_s1, 2 }")
    found = read_schedule(read_program(other), RATES, 4)
    assert (found.first.bundles, found.middle.bundles, found.last.bundles) == (12, 12, 12)


def test_steps_that_do_not_fill_the_sums_are_an_error():
    with pytest.raises(
        UnreadableScheduleError, match="8 steps multiply, in place of a multiple of 3"
    ):
        read_schedule(read_program(TEXT), RATES, 3)


def test_an_unknown_condition_of_what_multiplies_is_an_error():
    """Of what does not multiply it is none: that is run."""
    unknown = TEXT.replace(
        "scmp.ne.s32.totalorder %s6_s1, 0 }", "scmp.ne.s32.totalorder %s99_s1, 0 }"
    )
    found = read_schedule(read_program(unknown), RATES, 4)
    assert found.first.bundles == found.middle.bundles == found.last.bundles == 14
    at_stake = unknown.replace(
        "} /* End region 39 */",
        " ;;  %401 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v7_v9 } /* End region 39 */",
    )
    with pytest.raises(UnreadableScheduleError, match="depends on what is not known"):
        read_schedule(read_program(at_stake), RATES, 4)


def test_where_nothing_is_known_of_the_sum_all_is_run():
    found = read_schedule(read_program(TEXT), RATES)
    assert found.first == found.middle == found.last
    assert found.first.bundles == 14


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 bundles"),
        (TEXT[: len(TEXT) // 2], "end without an exit bundle"),
        (TEXT.replace("   0x6 ", "   0x7 "), "bundle 0x7 follows 6 bundles"),
        (TEXT.replace("vmatmul.f32.", "vmatmul.f12."), "of unknown dtype"),
        (
            TEXT.replace(
                "   0x5   : > {",
                "   0x5   : > { %1 = sbr.rel target = $region3  ;;  "
                "%2 = sbr.rel target = $region40  ;; ",
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
        read_schedule(read_program(inner), RATES, 4)
