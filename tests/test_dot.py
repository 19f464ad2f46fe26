"""Contract of ``fp4jax.dot``: the three GEMMs of a recipe, and nothing else.

The model is ``tests/oracle.py``: operands bit by bit, products in float64. Both
sides multiply the same numbers and the products are exact in FP32, so they may
differ by the FP32 accumulation alone: of k products, k - 1 additions, one
multiplication by the tensor scales and, for BF16 outputs, one cast, each within
2^-24 (2^-8 for the cast) of a magnitude that the oracle gives. Whatever is not
a sum is compared bit for bit: layouts that flatten to the same operands,
padding, keys, zeros, NaN.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import Gemm
from fp4jax import Operand
from fp4jax import Recipe
from fp4jax import Rht
from fp4jax import _jax
from fp4jax import recipes
from fp4jax import rounding
from tests import oracle

KERNEL_RECIPES = ("nvfp4", "nvfp4_fp8_exact")
MATMUL = (((1,), (0,)), ((), ()))
KEY = np.array([3, 4], np.uint32)


def rne(format="nvfp4", block=16, square=16, rht=None):
  """Every operand rounded to nearest: no key, few operations to compile."""
  x = Operand(format=format, block=(1, block))
  square = 1 if format.startswith("fp8") else square
  w = Operand(format=format, block=(square, block))
  g = dataclasses.replace(x, rht=rht)
  return Recipe(
    name=f"{format} rne",
    fprop=Gemm(lhs=x, rhs=w),
    dgrad=Gemm(lhs=x, rhs=w),
    wgrad=Gemm(lhs=g, rhs=g),
  )


def stochastic(format="fp8_e4m3"):
  """Gradients rounded stochastically, the cheapest recipe that needs a key."""
  x = Operand(format=format)
  g = Operand(format=format, rounding="sr")
  return Recipe(
    name=f"{format} sr",
    fprop=Gemm(lhs=x, rhs=x),
    dgrad=Gemm(lhs=g, rhs=x),
    wgrad=Gemm(lhs=x, rhs=g),
  )


def _variant(**changes):
  """``nvfp4`` with all operands of 1x16 blocks and some fields changed."""
  x = Operand(**{k: v for k, v in changes.items() if k == "four_over_six"})
  fields = {k: v for k, v in changes.items() if k != "four_over_six"}
  g = Operand(rounding="sr", **fields)
  return Recipe(
    name=f"nvfp4 {changes}",
    fprop=Gemm(lhs=x, rhs=x),
    dgrad=Gemm(lhs=g, rhs=x),
    wgrad=Gemm(
      lhs=dataclasses.replace(x, rht=Rht(size=32)),
      rhs=dataclasses.replace(g, rht=Rht(size=32)),
    ),
  )


RECIPES = {
  "nvfp4": recipes.nvfp4(),
  "nvfp4_fp8_exact": recipes.nvfp4_fp8_exact(),
  "mxfp4": recipes.mxfp4(),
  "mxfp8": recipes.mxfp8(),
  "fp8": recipes.fp8(),
  "fp8_e4m3": recipes.fp8("fp8_e4m3"),
  "1x16 weights, guard, 8 bits": _variant(scale_guard=16 / 17, sr_bits=8),
  "four over six, 32-wide rotation": _variant(four_over_six=True),
  "row_scale": recipes.row_scale(),
  "ms_eden": recipes.ms_eden(),
}


def normal(seed, *shape, dtype=jnp.float32):
  """Reproducible normal numbers with a few large ones."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) / 2)
  return jnp.asarray(x, dtype)


def assert_same(a, b):
  """Bit for bit, dtypes and structure included."""
  jax.tree.map(
    lambda u, v: (
      np.testing.assert_array_equal(np.asarray(u), np.asarray(v)),
      np.testing.assert_equal(u.dtype, v.dtype),
    ),
    a,
    b,
  )


def three_gemms(x, w, g, dims=MATMUL, key=KEY, **kwargs):
  """y, dx, dw of one quantised product."""
  product = lambda x, w: fp4jax.dot(x, w, dims, key=key, **kwargs)
  y, vjp = jax.vjp(product, x, w)
  return y, *vjp(g.astype(y.dtype))


# One compilation for each recipe and shape, whichever test asks for it.
jitted = jax.jit(
  three_gemms,
  static_argnames=("dims", "recipe", "weight", "preferred_element_type"),
)


def oracle_recipe(recipe):
  """The recipe in the words of the oracle."""

  def options(operand):
    return {
      "fmt": operand.format,
      "block": operand.block,
      "rounding": operand.rounding,
      "rotate": operand.rht and (operand.rht.size, operand.rht.signs),
      "scale_guard": operand.scale_guard,
      "four_over_six": operand.four_over_six,
      "sr_bits": operand.sr_bits,
      "row_scale": operand.row_scale,
    }

  three = {
    name: tuple(map(options, (gemm.lhs, gemm.rhs)))
    for name in recipes.GEMMS
    for gemm in [getattr(recipe, name)]
  }
  if three["dgrad"][1]["block"][0] > 1:  # The same codes, transposed.
    three["dgrad"] = (three["dgrad"][0], None)
  return three


def f32(x):
  return np.asarray(x, np.float32)


def model(x, w, g, recipe):
  """The oracle's three products for 2-D operands."""
  return oracle.linear(
    f32(x), f32(w), f32(g), recipe=oracle_recipe(recipe), key=KEY
  )


def assert_accumulated(actual, product, k, cast=0.0):
  """``actual`` equals the exact sum up to FP32 accumulation of k products."""
  tolerance = (k + 1) * 2.0**-24 * product.magnitude
  tolerance = tolerance + cast * (np.abs(product.value) + tolerance)
  error = np.abs(np.asarray(actual, np.float64) - product.value)
  assert error.shape == tolerance.shape
  assert (error <= tolerance).all(), (error - tolerance).max()


def assert_three(actual, expected, x, w, cast=0.0):
  (m, k), n = x.shape, w.shape[1]
  for out, product, terms in zip(actual, expected, (k, n, m), strict=True):
    assert_accumulated(out, product, terms, cast)


# The three GEMMs against float64


@pytest.mark.parametrize("name", RECIPES)
def test_three_gemms_are_the_oracles(name):
  x, w, g = normal(0, 24, 40), normal(1, 40, 33), normal(2, 24, 33)
  got = jitted(x, w, g, recipe=RECIPES[name])
  assert_three(got, model(x, w, g, RECIPES[name]), x, w)
  plain = jax.vjp(jnp.matmul, x, w)
  for quantised, exact in zip(
    got, (plain[0], *plain[1](g)), strict=True
  ):  # 4 or 8 bits are visible, and no more than that.
    gap = np.linalg.norm(quantised - exact) / np.linalg.norm(exact)
    assert 0.005 < gap < 0.4, gap


def test_bf16_recipe_is_the_plain_product():
  x, w, g = normal(0, 24, 40), normal(1, 40, 33), normal(2, 24, 33)
  y, vjp = jax.vjp(jnp.matmul, x, w)
  got = jitted(x, w, g, recipe=recipes.bf16())
  for actual, exact, a, b, k in zip(
    got, (y, *vjp(g)), (x, g, x.T), (w, w.T, g), (40, 33, 24), strict=True
  ):
    size = np.abs(f32(a)).astype(np.float64) @ np.abs(f32(b))
    assert (np.abs(actual - exact) <= 2 * k * 2.0**-24 * size).all()


def test_eager_and_jitted_give_the_same_bits():
  x, w, g = (normal(i, 16, 16) for i in range(3))  # Few shapes, few compiles.
  assert_same(three_gemms(x, w, g, recipe=rne()), jitted(x, w, g, recipe=rne()))


@pytest.mark.parametrize(
  "x_dtype, w_dtype, preferred",
  [
    ("bfloat16", "float32", None),
    ("float32", "bfloat16", None),
    ("bfloat16", "bfloat16", None),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "bfloat16", None),
  ],
)
def test_dtypes_of_outputs_and_cotangents(x_dtype, w_dtype, preferred):
  """Output as dot_general's, cotangents as their primals'."""
  x, w = normal(0, 8, 32, dtype=x_dtype), normal(1, 32, 16, dtype=w_dtype)
  g = normal(2, 8, 16)
  recipe = rne("fp8_e4m3")
  plain = jax.eval_shape(
    lambda x, w: lax.dot_general(
      x, w, MATMUL, preferred_element_type=preferred
    ),
    x,
    w,
  )
  y, dx, dw = jitted(x, w, g, recipe=recipe, preferred_element_type=preferred)
  assert (y.dtype, dx.dtype, dw.dtype) == (plain.dtype, x.dtype, w.dtype)
  expected = model(x, w, g.astype(y.dtype), recipe)
  for out, product, k in zip((y, dx, dw), expected, (32, 16, 8), strict=True):
    # float16 keeps more bits than bfloat16: one bound serves both.
    cast = 0.0 if out.dtype == jnp.float32 else 2.0**-8
    assert_accumulated(out, product, k, cast)


def test_float64_operands_and_cotangents():
  with jax.enable_x64(True):
    x, w = (normal(i, 32, 32, dtype="float64") for i in (0, 1))
    got = jitted(x, w, x, recipe=rne("fp8_e4m3"))
    assert [a.dtype for a in got] == 3 * [jnp.float64]
    assert_three(got, model(x, w, x, rne("fp8_e4m3")), x, w, cast=2.0**-23)


# Dimension numbers: (lhs, rhs, dimension_numbers, weight side)

LAYOUTS = {
  "weight left": ((33, 20), (20, 9), (((1,), (0,)), ((), ())), "lhs"),
  "batch": ((3, 9, 20), (3, 20, 7), (((2,), (1,)), ((0,), (0,))), "rhs"),
  "two batch axes, crossed": (
    (2, 9, 3, 20),
    (3, 20, 2, 7),
    (((3,), (1,)), ((0, 2), (2, 0))),
    "rhs",
  ),
  "contracted axes in any order": (
    (5, 4, 2, 6),
    (6, 5, 4, 3),
    (((3, 1), (0, 2)), ((), ())),
    "rhs",
  ),
  "batch, weight left, two contracted": (
    (4, 3, 6, 5),
    (6, 2, 4, 5, 3),
    (((0, 2), (2, 0)), ((1,), (4,))),
    "lhs",
  ),
  "free axes on both sides": (
    (2, 20, 3, 2),
    (2, 3, 20),
    (((1,), (2,)), ((), ())),
    "rhs",
  ),
}


def flattened(lhs, rhs, dims, weight):
  """x [*b, m, k], w [*b, k, n] as the page flattens them, in NumPy."""
  (lc, rc), (lb, rb) = dims
  if weight == "lhs":
    lhs, rhs, lc, rc, lb, rb = rhs, lhs, rc, lc, rb, lb
  by_weight = sorted(zip(rc, lc, strict=True))
  free = lambda a, *used: [i for i in range(a.ndim) if i not in sum(used, ())]
  lf, rf = free(lhs, lc, lb), free(rhs, rc, rb)
  x = f32(lhs).transpose(*lb, *lf, *(i for _, i in by_weight))
  w = f32(rhs).transpose(*rb, *(i for i, _ in by_weight), *rf)
  b = x.shape[: len(lb)]
  k = int(np.prod(w.shape[len(rb) : len(rb) + len(rc)]))
  return x.reshape(*b, -1, k), w.reshape(*b, k, -1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_dimension_numbers(name):
  """Values and gradients are those of the flattened, K-major operands."""
  lhs_shape, rhs_shape, dims, weight = LAYOUTS[name]
  lhs, rhs = normal(0, *lhs_shape), normal(1, *rhs_shape)
  recipe = rne(rht=Rht())
  plain = jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), lhs, rhs)
  g = normal(2, *plain.shape)
  y, dl, dr = jitted(lhs, rhs, g, dims, recipe=recipe, weight=weight)
  assert (y.shape, dl.shape, dr.shape) == (plain.shape, lhs_shape, rhs_shape)
  x, w = flattened(lhs, rhs, dims, weight)
  (_, _), (lb, rb) = dims
  batch = x.shape[:-2]
  m, k, n = x.shape[-2], x.shape[-1], w.shape[-1]
  across = lambda a: np.swapaxes(a, -1, -2) if weight == "lhs" else a
  g2 = f32(g).reshape(*batch, *((n, m) if weight == "lhs" else (m, n)))
  y2 = f32(y).reshape(g2.shape)
  g2, y2 = across(g2), across(y2)
  # Cotangents have their primals' layout: flattened like them.
  dx, dw = flattened(dl, dr, dims, weight)
  for b in np.ndindex(batch):
    products = oracle.linear(
      x[b], w[b], g2[b], recipe=oracle_recipe(recipe), key=KEY
    )
    for out, product, terms in zip(
      (y2[b], dx[b], dw[b]), products, (k, n, m), strict=True
    ):
      assert_accumulated(out, product, terms)


@pytest.mark.parametrize(
  "shape, dims",
  [
    ((64, 4, 16), (((3,), (0,)), ((), ()))),
    ((3, 8, 40), (((2, 3), (0, 1)), ((), ()))),
  ],
)
def test_b15_dense_general_equals_the_flattened_form(shape, dims):
  """DenseGeneral's and 3-D kernels: the bits of the 2-D product."""
  contracted = len(dims[0][1])
  x_shape = (2, 3, 5, 64) if contracted == 1 else (2, 5, 3, 8)
  lead = x_shape[: 4 - contracted]
  x, w = normal(0, *x_shape), normal(1, *shape)
  g = normal(2, *lead, *shape[contracted:])
  recipe = recipes.nvfp4()
  k = int(np.prod(shape[:contracted]))
  y, dx, dw = jitted(x, w, g, dims, recipe=recipe)
  flat = jitted(
    x.reshape(-1, k),
    w.reshape(k, -1),
    g.reshape(-1, w.size // k),
    recipe=recipe,
  )
  assert_same(
    (y, dx, dw),
    (
      flat[0].reshape(y.shape),
      *(a.reshape(b.shape) for a, b in zip(flat[1:], (dx, dw), strict=True)),
    ),
  )


# Sizes


@pytest.mark.parametrize(
  "k",
  [1, 15, 16, 17, 33, 63]
  + [pytest.param(k, marks=pytest.mark.slow) for k in (2, 31, 48, 60, 65)],
)
def test_b01_any_contraction_equals_explicit_zero_padding(k):
  """In-features that are no multiple of 16: values and both gradients.

  The padded product has the same operands, stochastic bits included, and
  zeros; sums of other lengths may be accumulated in another order.
  """
  m, n = 8, 32
  recipe = dataclasses.replace(stochastic(), fprop=rne().fprop)
  x, w, g = normal(0, m, k), normal(1, k, n), normal(2, m, n)
  padded = jitted(
    jnp.pad(x, ((0, 0), (0, 80 - k))),
    jnp.pad(w, ((0, 80 - k), (0, 0))),
    g,
    recipe=recipe,
  )
  got = jitted(x, w, g, recipe=recipe)
  expected = (padded[0], padded[1][:, :k], padded[2][:k])
  sizes = ((x, w, k), (g, w.T, n), (x.T, g, m))
  for a, b, (left, right, terms) in zip(got, expected, sizes, strict=True):
    assert a.shape == b.shape
    # Quantised operands are within 2x of these.
    size = 4 * np.abs(f32(left)).astype(np.float64) @ np.abs(f32(right))
    assert (np.abs(a - b) <= 2 * (terms + 1) * 2.0**-24 * size).all()
  assert_three(got, model(x, w, g, recipe), x, w)


@pytest.mark.parametrize("m, k, n", [(4, 0, 8), (0, 24, 8), (4, 24, 0)])
def test_b03_zero_sizes_give_zeros(m, k, n):
  x, w, g = jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones((m, n))
  got = jitted(x, w, g, recipe=recipes.nvfp4())
  full = [((m, n), k), ((m, k), n), ((k, n), m)]
  for out, (shape, contracted) in zip(got, full, strict=True):
    assert out.shape == shape
    if contracted == 0:
      assert_same(out, jnp.zeros(shape))
    else:
      assert np.isfinite(out).all()


@pytest.mark.parametrize("m, n", [(32, 1), (1, 32), (1, 1), (3, 8)])
def test_b13_matrix_vector(m, n):
  x, w, g = normal(0, m, 32), normal(1, 32, n), normal(2, m, n)
  got = jitted(x, w, g, recipe=rne(rht=Rht()))
  assert_three(got, model(x, w, g, rne(rht=Rht())), x, w)


def test_b13_vectors_without_free_axes():
  """x [k] and w [k, n], x [m, k] and w [k]: as with an axis of size one."""
  x, w, g = normal(0, 32), normal(1, 32, 8), normal(2, 8)
  dims = (((0,), (0,)), ((), ()))
  recipe = recipes.nvfp4()
  y, dx, dw = jitted(x, w, g, dims, recipe=recipe)
  flat = jitted(x[None], w, g[None], recipe=recipe)
  assert_same((y, dx, dw), (flat[0][0], flat[1][0], flat[2]))


# Which numbers are quantised, and along which axis


def identity_probe(x, w, g, recipe):
  """All six operands of square GEMMs as the products with one show them."""
  eye = jnp.eye(len(x))
  run = lambda x, w, g: jitted(x, w, g, recipe=recipe)
  return {
    ("fprop", "lhs"): run(x, eye, g)[0],
    ("fprop", "rhs"): run(eye, w, g)[0],
    ("dgrad", "lhs"): run(x, eye, g)[1],
    ("dgrad", "rhs"): run(x, w, eye)[1],
    ("wgrad", "lhs"): run(x, w, eye)[2],
    ("wgrad", "rhs"): run(eye, w, g)[2],
  }


@pytest.mark.parametrize("gemm", recipes.GEMMS)
def test_j09_exactly_the_named_gemm_is_quantised(gemm):
  """An operand shows quantisation error where its GEMM asks for it.

  One times the operand is the operand: 1 quantises to 1 within 2^-23 (the
  tensor scale is 1/2688), so the product shows the other operand alone.
  """
  full = rne()
  recipe = Recipe(name=gemm, **{gemm: getattr(full, gemm)})
  x, w, g = (normal(i, 32, 32) for i in range(3))
  exact = {"x": x, "w": w, "wT": w.T, "g": g, "xT": x.T}
  shown = {
    ("fprop", "lhs"): ("x", lambda q: q(x)),
    ("fprop", "rhs"): ("w", lambda q: q(w.T).T),
    ("dgrad", "lhs"): ("g", lambda q: q(g)),
    ("dgrad", "rhs"): ("wT", lambda q: q(w.T)),
    ("wgrad", "lhs"): ("xT", lambda q: q(x.T)),
    ("wgrad", "rhs"): ("g", lambda q: q(g.T).T),
  }
  for (name, side), value in identity_probe(x, w, g, recipe).items():
    plain, dequantised = shown[name, side]
    if name != gemm:
      assert_same(value, exact[plain])
      continue
    block = getattr(getattr(full, gemm), side).block
    expected = dequantised(
      lambda a, block=block: oracle.quantize(f32(a), block=block).dequantize()
    )
    np.testing.assert_allclose(value, expected, rtol=2.0**-21, atol=0)
    assert (np.asarray(value) != np.asarray(exact[plain])).mean() > 0.9


def test_b07_blocks_run_along_the_contracted_axis():
  """'BTD,NDH->BTNH': a 1000x outlier at one d flushes its own 16 and no other.

  An element's error is at most half the widest gap of codes (1 of 6) of its
  own block's amax, and a little for the block scale's own rounding (1/16).
  """
  recipe = rne()
  dims = (((2,), (1,)), ((), ()))
  eye = jnp.eye(48).reshape(3, 16, 48)
  w = normal(0, 4, 48, 16)
  w = w.at[:, 3].multiply(1000 / jnp.abs(w[:, 3]))
  run = jax.jit(lambda x, w: fp4jax.dot(x, w, dims, recipe=recipe))
  shown = run(eye, w).reshape(48, 4, 16).transpose(1, 0, 2)
  small = [d for d in range(16) if d != 3]
  assert_same(shown[:, small], jnp.zeros((4, 15, 16)))
  tiles = lambda a: np.abs(f32(a)).reshape(4, 3, 16, 16)
  amax = tiles(w).max((2, 3), keepdims=True)
  assert (tiles(shown - w) <= amax / 6 * 17 / 16)[:, 1:].all()
  # An outlier in one head is in other blocks than the other heads' weights.
  w = normal(0, 4, 48, 16)
  shown = run(eye, w.at[2].multiply(50)).reshape(48, 4, 16).transpose(1, 0, 2)
  amax = tiles(w).max((2, 3), keepdims=True)
  heads = np.array([0, 1, 3])
  assert (tiles(shown - w) <= amax / 6 * 17 / 16)[heads].all()
  # The activation: w picks d, so the output shows the quantised x.
  x = normal(1, 2, 5, 48)
  x = x.at[..., 3].set(1000)
  pick = jnp.eye(48).reshape(48, 3, 16).transpose(1, 0, 2)
  shown = run(x, pick).reshape(2, 5, 48)
  assert_same(shown[..., small], jnp.zeros((2, 5, 15)))
  assert (shown[..., 16:] != 0).mean() > 0.8


# Zeros, tiny and non-finite numbers


@pytest.mark.parametrize(
  "name",
  [pytest.param("nvfp4", marks=pytest.mark.slow), "nvfp4_fp8_exact", "fp8"],
)
@pytest.mark.parametrize("powers", [(-60, -60, -60), (-30, -85, -35)])
def test_a_product_of_tensor_scales_may_be_subnormal(name, powers):
  """Powers of two change no code: every result scales exactly, down to the
  smallest normal numbers, though the product of two tensor scales is smaller
  still."""
  x, w, g = normal(0, 64, 32), normal(1, 32, 48), normal(2, 64, 48)
  recipe = getattr(recipes, name)()
  run = jax.jit(lambda *xwg: three_gemms(*xwg, recipe=recipe))
  scaled = [a * 2.0**p for a, p in zip((x, w, g), powers, strict=True)]
  px, pw, pg = powers
  together = (px + pw, pg + pw, px + pg)
  for got, plain, p in zip(run(*scaled), run(x, w, g), together, strict=True):
    expected = np.asarray(plain, np.float64) * 2.0**p
    normals = np.abs(expected) >= 2.0**-126
    assert normals.mean() > 0.9
    np.testing.assert_array_equal(f32(got)[normals], expected[normals])


def test_a01_zeros_give_exact_zeros():
  x, w, g = jnp.zeros((4, 32), "bfloat16"), normal(1, 32, 16), normal(2, 4, 16)
  run = jax.jit(lambda x, w, g: three_gemms(x, w, g, recipe=recipes.nvfp4()))
  y, dx, dw = run(x, w, g)
  assert_same(y, jnp.zeros((4, 16)))
  assert_same(dw, jnp.zeros((32, 16)))
  assert np.isfinite(f32(dx)).all() and (f32(dx) != 0).any()
  y, dx, dw = run(x + 1, w * 0, g)
  assert not y.any() and not dx.any() and np.isfinite(dw).all()
  y, dx, dw = run(x + 1, w, g * 0)
  assert not dx.any() and not dw.any()
  kept = jax.jit(
    lambda x: jax.vjp(lambda x: fp4jax.dot(x, w, MATMUL, recipe=rne()), x)[1]
  )(x)
  for leaf in jax.tree.leaves(kept):
    assert leaf.dtype != jnp.float32 or (np.isfinite(leaf) & (leaf > 0)).all()


def test_a01_dead_relu_layer_gives_the_bias():
  x, b = -jnp.abs(normal(0, 4, 32)), normal(3, 16)

  def layer(w, x):
    hidden = jax.nn.relu(x)
    return fp4jax.dot(hidden, w, MATMUL, recipe=recipes.nvfp4(), key=KEY) + b

  def loss(w, x):
    y = layer(w, x)
    return (y**2).sum(), y

  (_, y), (dw, dx) = jax.jit(
    jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  )(normal(1, 32, 16), x)
  assert_same(y, jnp.broadcast_to(b, (4, 16)))
  assert not dw.any() and not dx.any()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8"])
def test_a17_nan_and_inf_reach_everything(name):
  """One bad number: NaN in the whole of each GEMM that reads its operand."""
  x, w, g = normal(0, 8, 32), normal(1, 32, 16), normal(2, 8, 16)
  run = jax.jit(lambda x, w, g: three_gemms(x, w, g, recipe=RECIPES[name]))
  nan = lambda *arrays: [bool(np.isnan(a).all()) for a in arrays]
  finite = lambda *arrays: [bool(np.isfinite(a).all()) for a in arrays]
  for bad in (np.nan, np.inf, -np.inf):
    y, dx, dw = run(x.at[3, 5].set(bad), w, g)
    assert nan(y, dw) == [True, True] and finite(dx) == [True]
    y, dx, dw = run(x, w.at[31, 0].set(bad), g)
    assert nan(y, dx) == [True, True] and finite(dw) == [True]
    y, dx, dw = run(x, w, g.at[7, 15].set(bad))
    assert nan(dx, dw) == [True, True] and finite(y) == [True]


def test_a17_nan_input_makes_every_gradient_nan():
  def loss(x, w):
    y = fp4jax.dot(x, w, MATMUL, recipe=recipes.nvfp4(), key=KEY)
    return (y**2).sum()

  x, w = normal(0, 8, 32), normal(1, 32, 16)
  grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(x.at[0, 0].set(np.nan), w)
  assert all(np.isnan(g).all() for g in grads)


# Randomness


def test_same_key_same_bits_other_key_site_or_loop_other_bits():
  x, w, g = normal(0, 16, 32), normal(1, 32, 16), normal(2, 16, 16)
  run = lambda key: jitted(x, w, g, recipe=stochastic(), key=key)

  def streams(key=KEY, site=0, loop=0):
    words = [rounding.site_stream(key, site, i)[:2] for i in range(6)]
    return rounding.Streams(
      jnp.stack(words)[None], jnp.uint32(0), jnp.uint32(loop)
    )

  first = run(streams())
  assert_same(first, run(streams()))
  assert_same(first, run(KEY))  # A key is the streams of site 0, loop 0.
  for other in (
    streams(key=KEY + 1),
    streams(site=1),
    streams(loop=1),
  ):
    y, dx, dw = run(other)
    assert_same(y, first[0])  # The forward pass rounds to nearest.
    assert (dx != first[1]).mean() > 0.9 and (dw != first[2]).mean() > 0.9


def test_a_constant_gradient_rounds_like_any_other():
  """A compiler that knows the operand must not add its constants first."""
  g = normal(2, 16, 16)
  quantised = lambda g: (
    fp4jax.quantize_array(g, Operand(rounding="sr"), KEY, packed=False).codes
  )
  expected = oracle.quantize(
    f32(g), rounding="sr", stream=oracle.site_stream(KEY, 0, 0)
  ).codes
  assert_same(jax.jit(quantised)(g), expected)
  constant = jax.jit(
    lambda key: (
      fp4jax.quantize_array(g, Operand(rounding="sr"), key, packed=False).codes
    )
  )
  assert_same(constant(KEY), expected)


def test_e01_dgrad_and_wgrad_draw_different_bits():
  """Two copies of one gradient, shown by products with the identity."""
  eye, g = jnp.eye(64), normal(2, 64, 64)
  recipe = stochastic()
  _, shown, _ = jitted(g, eye, g, recipe=recipe)
  _, _, also = jitted(eye, eye, g, recipe=recipe)
  differs = f32(shown) != f32(also)
  lower = np.minimum(np.abs(shown), np.abs(also))
  undecided = lower < np.abs(f32(g)) * (1 - 1e-5)
  # Two independent decisions differ with probability 2 p (1 - p), 1/3 on
  # average over uniform fractions; 4096 elements: standard error 0.008.
  assert 0.28 < differs.mean() < 0.38
  assert undecided.any()
  up = lambda a: (np.abs(f32(a)) > np.abs(f32(g))).astype(float).ravel()
  rows = (np.abs(f32(shown)) > np.abs(f32(g))).astype(float)
  # The fractions themselves correlate the copies; neighbouring rows nothing.
  row_pairs = np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]
  blocks = np.corrcoef(rows[:32].ravel(), rows[32:].ravel())[0, 1]
  assert abs(row_pairs) < 0.05 and abs(blocks) < 0.07
  assert 0.4 < up(shown).mean() < 0.6


def test_stochastic_gradients_are_unbiased():
  """The mean over 1024 keys is the gradient, within 5 standard errors.

  With scale_guard 16/17 no element saturates: every value lies between two
  codes whatever the block scale rounds to.
  """
  g, w = normal(0, 4, 32), jnp.eye(32)
  sr = Operand(rounding="sr", scale_guard=16 / 17)
  recipe = Recipe(name="dgrad", dgrad=Gemm(lhs=sr, rhs=Operand()))
  keys = jax.random.split(jax.random.key(0), 1024)
  dx = jax.jit(
    jax.vmap(
      lambda key: three_gemms(jnp.zeros((4, 32)), w, g, recipe=recipe, key=key)[
        1
      ]
    )
  )(keys)
  dx = np.asarray(dx, np.float64)
  error = dx.std(0) / 32
  assert (np.abs(dx.mean(0) - g) <= 5 * error + 1e-6 * np.abs(g)).all()
  assert (error > 0).mean() > 0.8


def test_missing_key_is_an_error_only_when_differentiating():
  x, w = normal(0, 4, 32), normal(1, 32, 8)
  product = lambda x, w: fp4jax.dot(
    x, w, MATMUL, recipe=recipes.nvfp4(), site="blocks_3/up"
  )
  assert jax.eval_shape(product, x, w).shape == (4, 8)
  for transformed in (
    jax.grad(lambda x: product(x, w).sum()),
    jax.jit(jax.grad(lambda x: product(x, w).sum())),
    lambda x: jax.vjp(product, x, w),
  ):
    with pytest.raises(
      fp4jax.MissingKeyError,
      match=r"(?s)blocks_3/up.*dgrad, wgrad.*fp4_key=",
    ):
      transformed(x)
  # A forward pass that rounds stochastically needs one too.
  sr = Operand(rounding="sr")
  recipe = Recipe(name="forward", fprop=Gemm(lhs=sr, rhs=sr))
  with pytest.raises(fp4jax.MissingKeyError, match="fprop"):
    fp4jax.dot(x, w, MATMUL, recipe=recipe)


def keys(kind, count=3):
  if kind == "raw":
    return jax.vmap(jax.random.PRNGKey)(jnp.arange(count))
  impl = "rbg" if kind == "rbg" else "threefry2x32"
  return jax.vmap(lambda i: jax.random.key(i, impl=impl))(jnp.arange(count))


@pytest.mark.parametrize(
  "kind", ["typed", "raw", pytest.param("rbg", marks=pytest.mark.slow)]
)
def test_c01_keys_are_ordinary_arguments(kind):
  """jit(grad), grad(jit), grad(scan of 3 keys), remat, vmap: the same bits."""
  x, w = normal(0, 8, 16), normal(1, 16, 16)
  three = keys(kind)

  def loss(w, key):
    y = fp4jax.dot(x, w, MATMUL, recipe=stochastic(), key=key)
    return (y**2).sum()

  grad = jax.jit(jax.grad(loss))
  each = [grad(w, key) for key in three]
  assert all((a != b).any() for a, b in zip(each, each[1:], strict=False))
  assert_same(jax.grad(jax.jit(loss))(w, three[0]), each[0])
  assert_same(jax.jit(jax.grad(jax.checkpoint(loss)))(w, three[0]), each[0])
  mapped = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, three)
  for i, one in enumerate(each):
    # A batched product may accumulate in another order.
    np.testing.assert_allclose(mapped[i], one, rtol=1e-4, atol=1e-4)

  def scanned(w):
    body = lambda total, key: (total + loss(w, key), key)
    return lax.scan(body, 0.0, three)[0]

  total = jax.jit(jax.grad(scanned))(w)
  np.testing.assert_allclose(total, sum(each), rtol=1e-5, atol=1e-4)


def test_c01_key_cotangents_are_float0():
  def product(x, w, key):
    return fp4jax.dot(x, w, MATMUL, recipe=stochastic(), key=key)

  x, w = normal(0, 8, 16), normal(1, 16, 16)
  grads = jax.eval_shape(
    lambda: jax.vjp(product, x, w, KEY)[1](jnp.ones((8, 16)))
  )
  assert grads[2].dtype == jax.dtypes.float0 and grads[2].shape == (2,)


@pytest.mark.parametrize(
  "key",
  [np.zeros((3,), np.uint32), np.zeros((2,), np.int32), np.float32(0)],
  ids=["shape", "dtype", "scalar"],
)
def test_a_bad_key_names_the_fix(key):
  x, w = normal(0, 4, 16), normal(1, 16, 8)
  with pytest.raises(ValueError, match="jax.random.key"):
    fp4jax.dot(x, w, MATMUL, recipe=stochastic(), key=key)


# What differentiation sees and keeps


def avals(jaxpr):
  """Every array type in a jaxpr and in the jaxprs inside it."""
  for eqn in jaxpr.eqns:
    yield from (v.aval for v in (*eqn.invars, *eqn.outvars))
    for inner in inside(eqn):
      yield from avals(inner)


def inside(eqn):
  """The jaxprs that an equation holds."""
  for value in eqn.params.values():
    for item in value if isinstance(value, (tuple, list)) else [value]:
      item = getattr(item, "jaxpr", item)
      if hasattr(item, "eqns"):
        yield item


def count(jaxpr, test):
  """Equations that pass a test, at any depth."""
  return sum(
    test(eqn) + sum(count(inner, test) for inner in inside(eqn))
    for eqn in jaxpr.eqns
  )


def is_dot(eqn):
  return eqn.primitive.name == "dot_general"


def is_quantise(eqn):
  return eqn.params.get("name") in ("_quantize", "_quantize_joined")


def test_c03_gradients_are_straight_through():
  """No 4- or 8-bit float exists, so no cotangent can be rounded to one."""
  x, w = jnp.zeros((1, 3)), jnp.eye(3)
  g = jnp.array([[0.1, 0.3, 2.2]])
  recipe = Recipe(name="forward", fprop=rne().fprop)
  _, dx, _ = jitted(x, w, g, recipe=recipe)
  assert_same(dx, g)
  _, dx, _ = jitted(x, w, g, recipe=recipes.fp8())
  np.testing.assert_allclose(dx, g, rtol=2.0**-3)
  for recipe in (recipes.nvfp4(), recipes.mxfp8()):
    jaxpr = jax.make_jaxpr(
      lambda x, w, g, r=recipe: three_gemms(x, w, g, recipe=r)
    )(x, w, g)
    dtypes = {str(a.dtype) for a in avals(jaxpr.jaxpr) if hasattr(a, "dtype")}
    assert "uint8" in dtypes
    assert not [d for d in dtypes if "float8" in d or "float4" in d], dtypes


def residuals(function, *args):
  """What the backward pass of a function keeps, as shapes and dtypes."""
  kept = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
  return jax.tree.leaves(kept)


@pytest.mark.parametrize("m, k, n", [(64, 128, 96), (50, 40, 33)])
@pytest.mark.parametrize("jit", [False, True])
def test_g03_residuals_are_packed(m, k, n, jit):
  """xᵀ: half a byte and 1/16 an element; w: half a byte and 1/256.

  With a float32 tensor scale each: an array, or the last four bytes of one.
  """
  up = lambda size: -(-size // 16) * 16
  x = jnp.zeros((m, k), "bfloat16")
  w = jnp.zeros((k, n), "bfloat16")

  def product(x, w):
    return fp4jax.dot(x, w, MATMUL, recipe=recipes.nvfp4(), key=KEY)

  kept = residuals(jax.jit(product) if jit else product, x, w)
  assert {str(a.dtype) for a in kept} <= {"uint8", "uint32", "float32"}
  sizes = [a.size for a in kept if a.dtype == jnp.float32]
  assert len(sizes) <= 2 and all(size == 1 for size in sizes)
  codes = sum(a.size for a in kept if a.dtype == jnp.uint8)
  most = k * up(m) * (0.5 + 1 / 16) + n * up(k) / 2 + up(n) * up(k) / 256
  assert codes + 4 * len(sizes) <= most + 8
  assert sum(a.size for a in kept if a.dtype == jnp.uint32) <= 18


def test_g07_a_remat_policy_keeps_the_packed_residuals():
  """Numbers of GEMMs and quantisations in the gradient's jaxpr.

  Two layers: 6 GEMMs, 10 quantisations (x, xᵀ, w of each; g, gᵀ of each).
  Under jax.checkpoint everything but the last product is done again; the
  policy that keeps RESIDUAL does nothing again.
  """
  x, w = jnp.zeros((32, 32)), (jnp.zeros((32, 32)), jnp.zeros((32, 48)))

  def model(w, x):
    for one in w:
      x = fp4jax.dot(x, one, MATMUL, recipe=recipes.nvfp4(), key=KEY)
    return x

  def numbers(function):
    jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: function(w, x).sum()))(w, x)
    return count(jaxpr.jaxpr, is_dot), count(jaxpr.jaxpr, is_quantise)

  keep = jax.checkpoint_policies.save_only_these_names(fp4jax.RESIDUAL)
  kept = jax.checkpoint(model, policy=keep)
  assert numbers(model) == (6, 10)
  assert numbers(jax.checkpoint(model))[0] == 7
  assert numbers(kept)[0] == 6
  saved = residuals(kept, w, x)
  big = [a for a in saved if a.dtype != jnp.uint8 and a.size > 18]
  arguments = [(32, 32), (32, 32), (32, 48)]
  assert sorted(a.shape for a in big) <= sorted(arguments)
  # Of x and w of each layer: codes and scales, or both in one array.
  each = 1 if _jax.compiles_units() else 2
  assert sum(a.dtype == jnp.uint8 for a in saved) == 4 * each


# Errors


def test_integers_are_refused_by_name():
  with pytest.raises(ValueError, match="up/kernel.*int32.*Rule"):
    fp4jax.dot(
      jnp.ones((4, 16), int),
      jnp.ones((16, 4)),
      MATMUL,
      recipe=rne(),
      site="up/kernel",
    )


def test_unknown_sides_and_backends_are_refused():
  x, w = jnp.ones((4, 16)), jnp.ones((16, 4))
  with pytest.raises(ValueError, match="'lhs' or 'rhs'"):
    fp4jax.dot(x, w, MATMUL, recipe=rne(), weight="left")
  with pytest.raises(fp4jax.UnsupportedError, match="reference"):
    fp4jax.dot(x, w, MATMUL, recipe=rne(), backend="pallas")
  with pytest.raises(ValueError, match="reference"):
    fp4jax.dot(x, w, MATMUL, recipe=rne(), backend="cuda")
  with pytest.raises(ValueError, match=r"no Recipe.*recipes.nvfp4\(\)"):
    fp4jax.backends.check(recipes.nvfp4)


def test_second_derivatives_are_refused_not_zero():
  """Codes have no slope: grad of grad would be zero, silently."""
  w, x = normal(0, 16, 16), normal(1, 8, 16)
  dims = (((1,), (0,)), ((), ()))
  key = jax.random.key(0)

  def loss(w):
    y = fp4jax.dot(x, w, dims, recipe=recipes.nvfp4(), key=key, site="up")
    return (y**2).sum()

  norm = lambda w: (jax.grad(loss)(w) ** 2).sum()
  assert np.isfinite(norm(w))
  with pytest.raises(fp4jax.UnsupportedError, match="site up.*second deriv"):
    jax.grad(norm)(w)
  with pytest.raises((TypeError, fp4jax.UnsupportedError)):
    jax.jvp(jax.grad(loss), (w,), (w,))


@pytest.mark.parametrize(
  "strict",
  [
    lambda: jax.numpy_rank_promotion("raise"),
    lambda: jax.numpy_dtype_promotion("strict"),
  ],
  ids=["rank", "dtype"],
)
@pytest.mark.parametrize(
  "name, backend",
  [(name, "reference") for name in ("fp8", "mxfp4", *KERNEL_RECIPES)]
  + [(name, "pallas_interpret") for name in KERNEL_RECIPES],
)
def test_strict_promotion_changes_nothing(name, backend, strict):
  """Users who let JAX refuse implicit promotions get the same program."""
  recipe = getattr(recipes, name)()
  run = lambda *xwg: three_gemms(*xwg, recipe=recipe, backend=backend)
  operands = normal(0, 32, 32), normal(1, 32, 48), normal(2, 32, 48)
  with strict():
    got = str(jax.make_jaxpr(run)(*operands))
  assert got == str(jax.make_jaxpr(run)(*operands))
