"""What the TPU compiler takes and refuses: every kernel variant, on every generation.

Interpret mode passes what hardware refuses. Many kernels go into one program, which the compiler
takes as a whole or not at all; its error names the kernel.
"""

import dataclasses
import functools
import itertools
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_ops as po
from pallas_ops._hardware import GENERATIONS
from pallas_ops.compiler import compile_for_tpu
from pallas_ops.kernels import pallas_matmul


LAYOUTS = list(itertools.product([False, True], repeat=2))
DTYPES = {
    "f32": ("float32", "float32", "float32"),
    "bf16": ("bfloat16", "bfloat16", "bfloat16"),
    "bf16 to f32": ("bfloat16", "bfloat16", "float32"),
    "bf16 x f32": ("bfloat16", "float32", "float32"),
    "f32 x bf16": ("float32", "bfloat16", "bfloat16"),
    "int8": ("int8", "int8", "int8"),
    "int8 to int32": ("int8", "int8", "int32"),
    "bf16 x int8": ("bfloat16", "int8", "bfloat16"),
    "int8 x bf16": ("int8", "bfloat16", "bfloat16"),
    "f32 x int8": ("float32", "int8", "float32"),
    "int8 x f32": ("int8", "float32", "float32"),
}
# (m, k, n) and the blocks: divisible; ragged on every axis; axes shorter than any tile.
SIZES = [
    ((512, 512, 512), (256, 256, 256)),
    ((300, 300, 300), (128, 128, 128)),
    ((7, 300, 9), (7, 128, 9)),
    ((1, 200, 1), (1, 128, 1)),
    ((1, 1, 1), (1, 1, 1)),
]


def _marks(generation):
    """Plain `pytest` compiles most for a v5e, and CI for all."""
    return () if generation == "v5e" else pytest.mark.slow


MARKED_GENERATIONS = [pytest.param(name, marks=_marks(name)) for name in GENERATIONS]


def _array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def _operands(sizes, dtypes, layout, lhs_leading=(), rhs_leading=()):
    m, k, n = sizes
    lhs = (*lhs_leading, *((k, m) if layout[0] else (m, k)))
    rhs = (*rhs_leading, *((n, k) if layout[1] else (k, n)))
    return _array(lhs, dtypes[0]), _array(rhs, dtypes[1])


def _compile_products(products, device):
    """Compiles one program of many products, each `(lhs, rhs, keywords)`."""

    def program(operands):
        return [
            po.matmul(lhs, rhs, implementation="mosaic", **keywords)
            for (lhs, rhs), (_, _, keywords) in zip(operands, products, strict=True)
        ]

    compiled = compile_for_tpu(program, [(lhs, rhs) for lhs, rhs, _ in products], device=device)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == len(products)


def _all_layouts_and_sizes(dtypes, **keywords):
    return [
        (
            *_operands(sizes, dtypes, layout),
            dict(
                transpose_lhs=layout[0],
                transpose_rhs=layout[1],
                preferred_element_type=dtypes[2],
                tiles=po.TileConfig(*blocks),
                **keywords,
            ),
        )
        for layout in LAYOUTS
        for sizes, blocks in SIZES
    ]


def _takes(generation, dtypes):
    return not (generation == "v4" and dtypes[:2] == ("int8", "int8"))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_layout_dtype_and_edge(generation, dtypes):
    products = _all_layouts_and_sizes(dtypes)
    if _takes(generation, dtypes):
        _compile_products(products, generation)
    else:
        with pytest.raises(po.UnsupportedCallError, match="TPU v4 has no int8 products"):
            _compile_products(products, generation)


# Few rows of a packed dtype with a masked edge of k, a single column, and rows longer than blocks.
AWKWARD = [
    (4, 2500, 4),
    (1, 1100, 1100),
    (2, 1025, 5),
    (15, 2500, 2),
    (129, 9, 1),
    (2500, 2500, 1),
    (17, 1, 1),
    (3, 100_000, 5),
    (1, 8960, 1536),
]


@pytest.mark.parametrize(
    ("generation", "dtypes"),
    [
        pytest.param(
            generation,
            dtypes,
            id=f"{generation}-{name}",
            marks=_marks(generation),
        )
        for generation in GENERATIONS
        for name, dtypes in DTYPES.items()
        if _takes(generation, dtypes)
    ],
)
def test_awkward_shapes_at_the_default_tile(generation, dtypes):
    products = [
        (
            *_operands(sizes, dtypes, layout),
            dict(
                transpose_lhs=layout[0],
                transpose_rhs=layout[1],
                preferred_element_type=dtypes[2],
            ),
        )
        for layout in LAYOUTS
        for sizes in AWKWARD
    ]
    _compile_products(products, generation)


@pytest.mark.parametrize("precision", [lax.Precision.HIGH, lax.Precision.HIGHEST])
@pytest.mark.parametrize("dtypes", ["f32", "bf16", "bf16 x f32", "f32 x bf16", "f32 x int8"])
@pytest.mark.parametrize("generation", ["v4", "v5e", "tpu7x"])
def test_higher_precision(generation, dtypes, precision):
    products = _all_layouts_and_sizes(DTYPES[dtypes], precision=precision)
    _compile_products(products[:2], generation)


@pytest.mark.parametrize("dtypes", ["f32", "bf16", "int8 to int32"])
def test_every_role_of_a_leading_axis(dtypes):
    """Batch, shared on either side and, by the gradients of these, summed."""
    dtypes = DTYPES[dtypes]
    leading = [((3,), (3,)), ((3,), (1,)), ((1,), (3,)), ((2, 1, 3), (2, 4, 1))]
    pairs = [_operands((40, 140, 300), dtypes, (True, False), *axes) for axes in leading]

    def program(operands):
        def loss(operands):
            return sum(
                po.matmul(
                    lhs,
                    rhs,
                    transpose_lhs=True,
                    preferred_element_type=dtypes[2],
                    implementation="mosaic",
                ).sum()
                for lhs, rhs in operands
            )

        return loss(operands) if dtypes[0] == "int8" else jax.grad(loss)(operands)

    calls = compile_for_tpu(program, pairs).as_text().count('target="tpu_custom_call"')
    # A product of ones from a plain sum is not needed: two gradients for each product.
    assert calls == (len(pairs) if dtypes[0] == "int8" else 2 * len(pairs))


EPILOGUES = [
    (jax.nn.gelu, "bfloat16"),
    (functools.partial(jax.nn.gelu, approximate=False), "float32"),
    (None, "float32"),
]


@pytest.mark.parametrize("dtypes", ["f32", "bf16", "bf16 to f32", "bf16 x f32", "f32 x bf16"])
@pytest.mark.parametrize("generation", MARKED_GENERATIONS)
def test_every_layout_and_edge_with_an_epilogue(generation, dtypes):
    """Values and derivatives of activations, in one step of k and in several, with leading axes."""
    lhs_dtype, rhs_dtype, out_dtype = DTYPES[dtypes]
    sizes = [
        ((300, 300, 300), (128, 128, 128), ()),
        ((7, 300, 9), (7, 300, 9), ()),
        ((1, 200, 1), (1, 128, 1), ()),
        ((300, 500, 1), (128, 500, 1), ()),
        ((40, 140, 300), (40, 128, 128), (3,)),
    ]
    cases = [
        (*_operands(mkn, (lhs_dtype, rhs_dtype), layout, leading, leading),
         _array((*leading, mkn[2]), bias_dtype), layout, blocks, activation)
        for number, layout in enumerate(LAYOUTS)
        for mkn, blocks, leading in sizes
        for activation, bias_dtype in (EPILOGUES[number % len(EPILOGUES)],)
    ]  # fmt: skip

    def program(operands):
        outs = []
        for (lhs, rhs, bias), (*_, layout, blocks, activation) in zip(operands, cases, strict=True):
            call = functools.partial(
                po.matmul,
                transpose_lhs=layout[0],
                transpose_rhs=layout[1],
                preferred_element_type=out_dtype,
                activation=activation,
                implementation="mosaic",
                tiles=po.TileConfig(*blocks),
            )

            def fused(lhs, rhs, bias, call=call):
                return call(lhs, rhs, bias=bias)

            run = fused if lhs.ndim == 2 else jax.vmap(fused)
            # With its residuals: the kernel returns the activation's derivative too.
            outs.append(jax.vjp(run, lhs, rhs, bias))
        return outs

    with jax.numpy_dtype_promotion("standard"):  # biases are of other dtypes
        compiled = compile_for_tpu(program, [case[:3] for case in cases], device=generation)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == len(cases)


@pytest.mark.parametrize("dtypes", ["f32", "bf16", "bf16 to f32", "bf16 x f32", "f32 x bf16"])
@pytest.mark.parametrize("generation", MARKED_GENERATIONS)
def test_column_sums(generation, dtypes):
    """Each form of the loop over a block's rows, edges, leading axes, and first blocks in parts."""
    names = DTYPES[dtypes]
    cases = [
        ((256, 512, 256), (128, 256, 128), (), (), 1),  # whole rounds of the loop
        ((256, 1104, 300), (128, 1104, 128), (), (), 1),  # and a rest
        ((300, 1000, 300), (128, 560, 128), (), (), 1),  # and an edge
        ((2000, 300, 140), (1024, 128, 128), (), (), 1),
        ((5000, 40, 16), (4224, 32, 16), (), (), 1),
        ((7, 3, 9), (7, 3, 9), (), (), 1),
        ((140, 1, 1), (128, 1, 1), (), (), 1),
        ((300, 100, 300), (128, 48, 128), (3, 2), (True, False), 1),
        ((512, 512, 512), (256, 512, 256), (), (), 4),
    ]
    dtype_of = [np.dtype(jnp.dtype(name)) for name in names]
    kernels, operands = [], []
    for (m, k, n), blocks, leading, summed, parts in cases:
        for transpose_rhs in (False, True):
            rhs = (n, k) if transpose_rhs else (k, n)
            problem = po.MatmulProblem(
                (*leading, k, m),
                (*leading, *rhs),
                *dtype_of,
                transpose_lhs=True,
                transpose_rhs=transpose_rhs,
                sum_leading=summed,
            )
            if transpose_rhs and (blocks[1] < k and blocks[1] % 128):
                continue
            kernel = pallas_matmul(
                problem,
                *blocks,
                prologue_parts=1 if transpose_rhs else parts,
                vmem_limit_bytes=32 * 1024 * 1024,
                column_sums=True,
            )
            kernels.append(kernel)
            operands.append(tuple(map(_array, (problem.lhs_shape, problem.rhs_shape), names)))

    def program(operands):
        return [kernel(*pair) for kernel, pair in zip(kernels, operands, strict=True)]

    compiled = compile_for_tpu(program, operands, device=generation)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == len(kernels)


@pytest.mark.parametrize(
    ("generation", "lhs_dtype"),
    [
        pytest.param(generation, dtype, marks=_marks(generation))
        for generation in GENERATIONS
        for dtype in ("float32", "bfloat16", "int8")
        if _takes(generation, (dtype, "int8"))
    ],
)
def test_quantized_products(generation, lhs_dtype):
    """With scales, in one step of k and in several, with leading axes, and all their gradients."""
    sizes = [
        ((300, 300, 300), (128, 128, 128), ()),
        ((7, 300, 9), (7, 300, 9), ()),
        ((1, 200, 1), (1, 128, 1), ()),
        ((32, 256, 300), (32, 128, 128), (3,)),
    ]
    cases = [
        (*_operands(mkn, (lhs_dtype, "int8"), layout, leading, leading),
         _array((*leading, mkn[2]), jnp.float32), layout, blocks)
        for layout in LAYOUTS
        for mkn, blocks, leading in sizes
    ]  # fmt: skip

    def program(operands):
        outs = []
        for (lhs, rhs, scale), (*_, layout, blocks) in zip(operands, cases, strict=True):

            def product(lhs, scale, rhs=rhs, layout=layout, blocks=blocks):
                return po.quantized_matmul(
                    lhs,
                    rhs,
                    scale,
                    transpose_lhs=layout[0],
                    transpose_rhs=layout[1],
                    activation=jax.nn.silu,
                    preferred_element_type=jnp.bfloat16,
                    implementation="mosaic",
                    tiles=po.TileConfig(*blocks),
                )

            if lhs_dtype == "int8":
                out, vjp = jax.vjp(functools.partial(product, lhs), scale)
            else:
                out, vjp = jax.vjp(product, lhs, scale)
            outs.append((out, vjp(jnp.cos(out))))
        return outs

    text = compile_for_tpu(program, [case[:3] for case in cases], device=generation).as_text()
    # Each result; for the scales the product again; and the gradient of a floating-point lhs.
    kernels = 2 if lhs_dtype == "int8" else 3
    # Of a vector the first is the product alone as well (`run_kernel`): XLA computes it once.
    shared = sum(layout == (False, True) and blocks[2] == 1 for *_, layout, blocks in cases)
    assert shared == 1
    assert text.count('custom_call_target="tpu_custom_call"') == kernels * len(cases) - shared


def _training_step(implementation=None, dtype=jnp.float32):
    model = eqx.nn.MLP(200, 10, 300, 2, key=jax.random.key(0), dtype=dtype)
    model = po.swap_linear(model, implementation=implementation)
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)

    def step(parameters, x, y):
        def loss(parameters):
            logits = jax.vmap(eqx.combine(parameters, rest))(x)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
            return -chosen.mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        rate = jnp.asarray(0.1, dtype)
        return value, jax.tree.map(lambda p, g: p - rate * g, parameters, gradients)

    return step, (parameters, _array((100, 200), dtype), _array((100,), jnp.int32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_whole_training_step(generation, dtype):
    step, arguments = _training_step(dtype=dtype)
    text = compile_for_tpu(step, *arguments, device=generation).as_text()
    # Three layers forward; their weights' gradients; the inputs' gradients of all but the first.
    assert text.count('custom_call_target="tpu_custom_call"') == 3 + 3 + 2


@pytest.mark.parametrize("platforms", [["tpu"], ["tpu", "cpu"]])
def test_export_from_a_cpu_holds_the_mosaic_call(platforms):
    step, arguments = _training_step()
    exported = jax.export.export(jax.jit(step), platforms=platforms)(*arguments)
    assert exported.mlir_module().count("@tpu_custom_call") == 8


def test_export_for_a_cpu_alone_holds_none():
    step, arguments = _training_step()
    exported = jax.export.export(jax.jit(step), platforms=["cpu"])(*arguments)
    assert "tpu_custom_call" not in exported.mlir_module()


def test_export_for_both_runs_on_the_cpu():
    x = jnp.arange(12.0).reshape(3, 4)
    exported = jax.export.export(jax.jit(po.matmul), platforms=["tpu", "cpu"])(x, x.T)
    np.testing.assert_allclose(exported.call(x, x.T), x @ x.T)


# In a process of its own: jaxtyping's import hook, on here, takes a symbolic size for no `int`.
SYMBOLIC = """
import jax, jax.numpy as jnp, pallas_ops as po

(rows,) = jax.export.symbolic_shape("rows")
x = jax.ShapeDtypeStruct((rows, 3, 4), jnp.float32)
for platform in ("cpu", "tpu"):
    function = jax.jit(lambda x: po.matmul(x, jnp.ones((4, 5))))
    exported = jax.export.export(function, platforms=[platform])(x)
    assert "tpu_custom_call" not in exported.mlir_module()
    assert exported.out_avals[0].shape == (rows, 3, 5)
try:
    jax.export.export(jax.jit(lambda x: po.matmul(x, x.mT, implementation="interpret")))(x)
except po.UnsupportedCallError as error:
    assert "blocks need sizes that are numbers" in str(error)
else:
    raise AssertionError("the kernel took a symbolic size")
"""


def test_a_symbolic_size_is_exported_by_xla():
    done = subprocess.run([sys.executable, "-c", SYMBOLIC], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_name_the_device_where_export_does_not_know_it():
    x = _array((32, 32), jnp.int8)

    def product(x):
        return po.matmul(x, x, implementation="mosaic")

    jax.export.export(jax.jit(product), platforms=["tpu"])(x)
    with (
        po.options(device="v4"),
        pytest.raises(po.UnsupportedCallError, match="TPU v4 has no int8 products"),
    ):
        jax.export.export(jax.jit(product), platforms=["tpu"])(x)


def test_unnamed_falls_back_to_xla_where_the_kernel_has_no_such_dtype():
    int8, float16 = (_array((64, 64), dtype) for dtype in (jnp.int8, jnp.float16))
    for x, device in ((int8, "v4"), (float16, "v5e")):
        text = compile_for_tpu(lambda x: po.matmul(x, x), x, device=device).as_text()
        assert "tpu_custom_call" not in text
    assert "tpu_custom_call" in compile_for_tpu(lambda x: po.matmul(x, x), int8).as_text()


def test_float16_is_our_error_before_mosaics():
    x = _array((64, 64), jnp.float16)
    with pytest.raises(po.UnsupportedCallError, match="was given float16 with float16"):
        compile_for_tpu(lambda x: po.matmul(x, x, implementation="mosaic"), x)


def test_the_compiler_refuses_what_the_legality_rule_refuses():
    """A block of 100 columns: our error; and without our check, Pallas' or Mosaic's."""
    f32 = np.dtype(np.float32)
    problem = po.MatmulProblem((300, 300), (300, 300), f32, f32, f32)
    x = _array((300, 300), f32)
    with pytest.raises(ValueError, match="block_n=100 is neither a multiple of 128"):
        compile_for_tpu(
            lambda x: po.matmul(x, x, tiles=po.TileConfig(8, 128, 100), implementation="mosaic"),
            x,
        )
    with pytest.raises(Exception, match="divisible by"):
        compile_for_tpu(pallas_matmul(problem, 8, 128, 100), x, x)


@dataclasses.dataclass(frozen=True)
class _TooLittle:
    """A resolver that gives a large tile, and no more VMEM than the compiler's default."""

    def resolve(self, problem):
        tile = po.TileConfig(2048, 2048, 512)
        return po.Resolution(tile, "test", vmem_limit_bytes=16 * 1024 * 1024)


def test_the_compiler_has_the_last_word_on_vmem():
    x = _array((4096, 4096), np.dtype(jnp.bfloat16))
    with pytest.raises(Exception, match=r"E1001|RESOURCE_EXHAUSTED"):
        compile_for_tpu(lambda x: po.matmul(x, x, tiles=_TooLittle(), implementation="mosaic"), x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "dtypes", "precision"),
    [
        pytest.param(generation, dtypes, precision, id=f"{generation}-{name}-{precision.name}")
        for generation in GENERATIONS
        for name, dtypes in DTYPES.items()
        # Of all precisions HIGHEST needs most VMEM; without float32 there is but one.
        for precision in (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
        if _takes(generation, dtypes)
        and ("float32" in dtypes[:2] or precision == lax.Precision.DEFAULT)
    ],
)
def test_static_tiles_fit_on_every_generation(generation, dtypes, precision):
    """The blocks that `StaticResolver` picks for large products, of the layouts of a layer."""
    products = [
        (
            *_operands(sizes, dtypes, layout),
            dict(
                transpose_lhs=layout[0],
                transpose_rhs=layout[1],
                preferred_element_type=dtypes[2],
                precision=precision,
            ),
        )
        for sizes, layout in [
            ((3000, 3000, 3000), (False, True)),
            ((2048, 4095, 14336), (True, False)),
        ]
    ]
    _compile_products(products, generation)
