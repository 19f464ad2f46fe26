"""Contract: the hand-written comparison rounds as NVFP4 does, in all GEMMs.

Relative errors of y, dx and dw are those of the library's ``nvfp4`` on the same
N(0,1) data within 8 %: the recipes are equal but for signs and random bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import handwritten
from experiments.models import transformer
import fp4jax
from fp4jax import recipes
from tests import oracle

KEY = np.array([1, 2], np.uint32)
M, K, N = 256, 128, 192


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def three(product):
  """y, dx and dw in float64, compiled: a compiler may delete casts."""

  @jax.jit
  def gemms(x, w, g):
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(g)

  arrays = gemms(normal(0, M, K), normal(1, K, N), normal(2, M, N))
  return [np.asarray(a, np.float64) for a in arrays]


def test_errors_are_those_of_nvfp4():
  plain = three(lambda x, w: x @ w)
  by_hand = three(lambda x, w: handwritten.linear(x, w, KEY))
  library = three(
    lambda x, w: fp4jax.dot(
      x, w, (((1,), (0,)), ((), ())), recipe=recipes.nvfp4(), key=KEY
    )
  )
  for exact, a, b in zip(plain, by_hand, library, strict=True):
    ours, theirs = (
      np.linalg.norm(c - exact) / np.linalg.norm(exact) for c in (a, b)
    )
    assert 0.1 < ours < 0.2 and ours == pytest.approx(theirs, rel=0.08)
  # Nothing is random forward: one BF16 rounding apart.
  np.testing.assert_allclose(by_hand[0], library[0], rtol=2.0**-7, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 16])
def test_nearest_rounding_is_the_oracles(rows):
  """All values are E2M1 codes times E4M3 scales, of the blocks' amax."""
  x = normal(3, 32, 64).astype(jnp.float32) * 3
  quantize = jax.jit(handwritten.quantize, static_argnames="rows")
  values, scale = quantize(x, rows=rows)
  grids = np.outer(oracle.grid("E4M3"), oracle.grid("E2M1")).ravel()
  assert np.isin(np.abs(np.asarray(values, np.float64)), grids).all()
  operand = fp4jax.Operand(block=(rows, 16))
  expected = fp4jax.quantize_array(x, operand).dequantize()
  np.testing.assert_allclose(
    values.astype(jnp.float32) * scale, expected, rtol=1e-5
  )


def test_stochastic_rounding_is_right_on_average():
  """The mean over keys is x, which its exact scale lets nothing saturate."""
  x = jnp.linspace(-6, 6, 16)[None] * jnp.ones((2, 1))
  keys = jax.random.split(jax.random.key(4), 4000)
  draw = lambda key: jnp.multiply(*handwritten.quantize(x, key=key))
  mean = jax.vmap(draw)(keys).mean(0)
  # A step is at most 2, its variance at most 1: 5 standard deviations.
  np.testing.assert_allclose(mean, x, atol=5 / 4000**0.5)


@pytest.mark.slow  # nightly: a benchmark's yardstick
def test_a_scanned_model_rounds_by_its_stream():
  """Another key, other gradients; evaluation needs none."""
  net = transformer.Transformer(
    vocab=64,
    layers=2,
    d=32,
    heads=1,
    kv_heads=1,
    ffn=32,
    scan=True,
    attention=None,
    dot_general_cls=handwritten.DotGeneral,
  )
  tokens = jnp.arange(32).reshape(2, 16)
  variables = net.init(jax.random.key(0), tokens)

  def gradient(key):
    def loss(variables):
      return net.apply(variables, tokens, rngs={"rounding": key}).sum()

    return jax.grad(loss)(variables)

  a, b = (gradient(jax.random.key(i)) for i in (0, 1))
  up = lambda grads: grads["params"]["blocks"]["ffn"]["up"]["kernel"]
  assert (up(a) != up(b)).mean() > 0.3
