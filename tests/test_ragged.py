"""ragged_dot (experts): quantised per expert, empty experts get zero gradient.

Contract: under every recipe the result equals a loop of ``fp4jax.dot`` over the
experts, computed from the same operands; what differs is the tensor scale that
all tokens share, which the loop is given by an extra row. Rows beyond the last
expert are zero. Bound where values are compared with float32: the recipe's own
error on N(0,1), numerics.md section 4 of the design, times 1.5.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import policies
from fp4jax import ragged
from fp4jax import recipes

EMPTY_PATTERNS = (
  (8, 0, 8, 0),
  (0, 8, 0, 8),
  (0, 0, 0, 16),
  (16, 0, 0, 0),
  (0, 16, 0, 0),
  (5, 0, 11, 0),
  (0, 0, 0, 0),
)


def data(m=16, g=4, k=64, n=32):
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (m, k))
  w = jax.random.normal(keys[1], (g, k, n))
  ct = jax.random.normal(keys[2], (m, n))
  return x, w, ct


def run(recipe):
  """Jitted value and gradients of the quantised product."""

  @jax.jit
  def f(x, w, sizes, ct):
    def product(x, w):
      return ragged.ragged_dot(
        x, w, sizes, recipe=recipe, key=jax.random.key(3)
      )

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(ct)

  return f


def relative(a, b):
  return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_b04_empty_groups_have_exactly_zero_gradients():
  x, w, ct = data()
  f = run(recipes.nvfp4())
  for sizes in EMPTY_PATTERNS:
    sizes = jnp.array(sizes)
    y, dx, dw = f(x, w, sizes, ct)
    y0, vjp = jax.vjp(lambda x, w, s=sizes: lax.ragged_dot(x, w, s), x, w)
    dx0, dw0 = vjp(ct)
    empty = np.asarray(sizes) == 0
    assert np.all(np.asarray(dw)[empty] == 0)
    total = int(sizes.sum())
    assert np.all(np.asarray(y)[total:] == 0)
    if total:
      assert 0 < relative(y, y0) < 0.22
      assert 0 < relative(dx, dx0) < 0.27
      assert 0 < relative(dw, dw0) < 0.3


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "mxfp8", "mxfp4"])
def test_one_expert_equals_dot_bitwise(name):
  """With one expert and a full group the product is a plain dot."""
  recipe = getattr(recipes, name)()
  x, w, _ = data(m=32, g=1)
  y = ragged.ragged_dot(x, w, jnp.array([32]), recipe=recipe)
  want = fp4jax.dot(x, w[0], (((1,), (0,)), ((), ())), recipe=recipe)
  np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-5)


def wgrad_only(operand):
  gemm = fp4jax.Gemm(lhs=operand, rhs=operand)
  return fp4jax.Recipe(name="wgrad", wgrad=gemm)


def test_no_block_holds_tokens_of_two_experts():
  """Permuting the tokens of expert 1 does not change expert 0's gradient.

  Without rotation the amax of the operands stays, so expert 0's codes must.
  """
  x, w, ct = data(m=24, g=2)
  sizes = jnp.array([5, 19])
  swap = jnp.concatenate([jnp.arange(5), jnp.arange(5, 24)[::-1]])
  f = run(wgrad_only(fp4jax.Operand()))
  _, _, a = f(x, w, sizes, ct)
  _, _, b = f(x[swap], w, sizes, ct[swap])
  np.testing.assert_array_equal(a[0], b[0])
  assert not np.array_equal(a[1], b[1])


def test_no_rotation_mixes_two_experts():
  """A rotation over two experts would not cancel: an error of order 1.

  MXFP8's own error on N(0,1) is below 6 % (E4M3: 2.7 % an operand).
  """
  x, w, ct = data(m=24, g=2)
  sizes = jnp.array([5, 19])
  operand = fp4jax.Operand(format="mxfp8", block=(1, 32), rht=fp4jax.Rht())
  _, _, dw = run(wgrad_only(operand))(x, w, sizes, ct)
  _, vjp = jax.vjp(lambda w: lax.ragged_dot(x, w, sizes), w)
  assert 0 < relative(dw, vjp(ct)[0]) < 0.06


def test_both_operands_of_a_gemm_draw_the_same_signs():
  """Recipe ``ms_eden``, whose rotations of 128 cancel in each expert's share.

  Errors on N(0,1): .1365 (dgrad, wgrad), an order of 1 if they did not.
  """
  x, w, ct = data(m=512, g=3, k=128, n=128)
  sizes = jnp.array([131, 0, 381])
  _, dx, dw = run(recipes.ms_eden())(x, w, sizes, ct)
  _, vjp = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
  for got, want in zip((dx, dw), vjp(ct), strict=True):
    assert 0.12 < relative(got, want) < 1.5 * 0.1365
  assert not dw[1].any()


def test_transform_quantises_experts():
  x, w, _ = data()
  sizes = jnp.array([4, 4, 0, 8])

  def model(params, x, sizes):
    return lax.ragged_dot(jnp.tanh(x), params["experts"], sizes)

  f = fp4jax.quantize(model, policies.all_linear())
  params = {"experts": w}
  (row,) = fp4jax.coverage(f, params, x, sizes).rows
  assert row.path == "experts" and row.quantised
  assert row.kind == "ragged_dot_general"
  want = ragged.ragged_dot(jnp.tanh(x), w, sizes, recipe=recipes.nvfp4())
  np.testing.assert_array_equal(f(params, x, sizes), want)
  assert not np.array_equal(want, model(params, x, sizes))


def test_non_finite_token_reaches_the_output():
  x, w, _ = data()
  y = ragged.ragged_dot(
    x.at[0, 0].set(jnp.nan),
    w,
    jnp.array([4, 4, 4, 4]),
    recipe=recipes.nvfp4(),
  )
  assert np.all(np.isnan(y))


def test_a_product_of_tensor_scales_may_be_subnormal():
  """As of ``dot``: results scale exactly with powers of two."""
  x, w, ct = data()
  sizes = jnp.asarray((5, 0, 11, 0), jnp.int32)
  f = run(recipes.nvfp4())
  tiny = f(x * 2.0**-60, w * 2.0**-60, sizes, ct * 2.0**-60)
  for got, plain in zip(tiny, f(x, w, sizes, ct), strict=True):
    expected = np.asarray(plain, np.float64) * 2.0**-120
    normals = np.abs(expected) >= 2.0**-126
    assert normals.any()
    np.testing.assert_array_equal(np.asarray(got)[normals], expected[normals])
