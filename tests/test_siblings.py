"""Contract: linear layers that read one operand quantise and keep it once.

Values and gradients are, bit for bit, those of products quantised apart, the
order in which JAX adds the gradients of the shared operand included.
"""

from flax import linen
import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import Gemm
from fp4jax import Operand
from fp4jax import Recipe
from fp4jax import _jax
from fp4jax import policies
from fp4jax import recipes
from fp4jax import rounding
from fp4jax import siblings

NUMBERS = (((1,), (0,)), ((), ()))
M, K, N = 32, 64, 48
KEY = jax.random.key(5)
BYTES = 0.5 + 1 / 16  # codes and scales, an element


def params(count, dtype=jnp.bfloat16):
  keys = jax.random.split(jax.random.key(0), count)
  return [jax.random.normal(key, (K, N), dtype) for key in keys]


def inputs(dtype=jnp.bfloat16):
  return jax.random.normal(jax.random.key(1), (M, K), dtype)


def apart(x, w, site, recipe):
  """A product as a site of its own, its input kept by itself."""
  words = rounding.site_keys(KEY, *np.indices((8, 6), np.uint32))
  streams = rounding.Streams(words, jnp.uint32(site), jnp.uint32(0))
  return fp4jax.dot(
    x, w, NUMBERS, recipe=recipe, key=streams, preferred_element_type=x.dtype
  )


def model(mm):
  """Three layers that cast their input each, as Flax's do, and a fourth."""

  def run(ws, x):
    y = [
      mm(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), i)
      for i, w in enumerate(ws[:3])
    ]
    hidden = jnp.tanh(y[0]) * y[1] + y[2]
    return mm(hidden, jnp.tanh(ws[3]).T.astype(jnp.bfloat16), 3)

  return run


@pytest.mark.parametrize(
  "name",
  ["nvfp4", "fp8", pytest.param("nvfp4_fp8_exact", marks=pytest.mark.slow)],
)
def test_bits_are_those_of_products_apart(name):
  recipe = getattr(recipes, name)()
  ws, x = params(4, jnp.float32), inputs(jnp.float32)
  by_hand = model(lambda x, w, i: apart(x, w, i, recipe))
  plain = model(lambda x, w, i: x @ w)
  quantised = fp4jax.quantize(plain, policies.all_linear(recipe))

  def loss(f, *args, **kwargs):
    return jnp.sum(f(*args, **kwargs).astype(jnp.float32) ** 2)

  got = jax.jit(
    jax.value_and_grad(
      lambda ws, x: loss(quantised, ws, x, fp4_key=KEY), argnums=(0, 1)
    )
  )(ws, x)
  want = jax.jit(
    jax.value_and_grad(lambda ws, x: loss(by_hand, ws, x), argnums=(0, 1))
  )(ws, x)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)


def kept(f, *args):
  """Bytes of codes, scales and tensor scales that the backward pass keeps."""
  _, vjp = jax.vjp(lambda *args: f(*args, fp4_key=KEY), *args)
  leaves = jax.tree.leaves(vjp)
  codes = sum(leaf.nbytes for leaf in leaves if leaf.dtype == jnp.uint8)
  scales = [x for x in leaves if x.dtype == jnp.float32 and x.size == 1]
  return codes + sum(scale.nbytes for scale in scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_input_is_kept_once(dtype):
  """dw reads x, blocks along its rows; dx reads w, 16x16 blocks."""

  def run(ws, x):
    return [x.astype(jnp.bfloat16) @ w for w in ws]

  f = fp4jax.quantize(run, policies.all_linear(recipes.nvfp4()))
  weight = K * N * (0.5 + 1 / 256) + 4
  assert kept(f, params(3), inputs(dtype)) == M * K * BYTES + 4 + 3 * weight


def test_projections_of_attention_share_their_input():
  net = linen.MultiHeadDotProductAttention(4, dtype=jnp.bfloat16)
  x = jax.random.normal(jax.random.key(2), (2, 16, 64))
  variables = net.init(jax.random.key(0), x)
  f = fp4jax.quantize(net.apply, policies.all_linear(recipes.nvfp4()))
  kept_bytes = kept(lambda v, fp4_key: f(v, x, fp4_key=fp4_key), variables)
  # Of query, key and value one input; of the output projection another.
  weight = 64 * 64 * (0.5 + 1 / 256) + 4
  assert kept_bytes == 2 * (x.size * BYTES + 4) + 4 * weight


def test_stochastic_inputs_have_streams_of_their_own():
  x, other = Operand(rounding="sr"), Operand()
  recipe = Recipe(name="sr_x", fprop=Gemm(lhs=x, rhs=other))
  ws = params(2)
  f = fp4jax.quantize(
    lambda ws, x: [x @ w for w in ws], policies.all_linear(recipe)
  )
  got = f(ws, inputs(), fp4_key=KEY)
  for i, y in enumerate(got):
    np.testing.assert_array_equal(y, apart(inputs(), ws[i], i, recipe))
  twice = f([ws[0], ws[0]], inputs(), fp4_key=KEY)
  assert np.any(twice[0] != twice[1])


def scheduled(function, *args):
  """How many products each group of products has, in order."""
  jaxpr, _ = _jax.open_jaxpr(jax.make_jaxpr(function)(*args))
  names = siblings.names(jaxpr)
  operands = {
    i: names.get(eqn.invars[0], eqn.invars[0])
    for i, eqn in enumerate(jaxpr.eqns)
    if eqn.primitive.name == "dot_general"
  }
  order = siblings.schedule(jaxpr, operands)
  assert sorted(i for group in order for i in group) == [
    *range(len(jaxpr.eqns))
  ]
  done: set = {*jaxpr.invars, *jaxpr.constvars}
  for group in order:  # whatever an equation reads has been computed
    for i in group:
      read = [a for a in jaxpr.eqns[i].invars if not _jax.is_literal(a)]
      assert done.issuperset(read)
    done.update(*(jaxpr.eqns[i].outvars for i in group))
  return [len(g) for g in order if g[0] in operands]


def test_what_siblings_need_comes_before_them():
  ws = params(3)
  x = inputs()
  assert scheduled(lambda x, a, b, c: (x @ a, x @ b.T.T, x @ c), x, *ws) == [3]


def test_a_product_of_the_other_s_result_stays_apart():
  w = jnp.ones((K, K))
  x = jnp.ones((M, K))

  def dependent(x, w):
    y = x @ w
    return x @ (w * jnp.mean(y))

  assert scheduled(dependent, x, w) == [1, 1]


def test_effects_are_not_moved():
  x = jnp.ones((M, K))

  def printing(x, w):
    y = x @ w
    jax.debug.print("{}", y[0, 0])
    v = jax.pure_callback(lambda w: w, w, w)
    return y, x @ v

  def ordered(x, w):
    y = x @ w
    v = io_callback(lambda w: w, w, w, ordered=True)
    return y, x @ v

  assert scheduled(printing, x, jnp.ones((K, K))) == [2]
  assert scheduled(ordered, x, jnp.ones((K, K))) == [1, 1]


def test_other_inputs_are_no_siblings():
  x = jnp.ones((M, K))
  w = jnp.ones((K, K))
  assert scheduled(lambda x, w: (x @ w, (2 * x) @ w), x, w) == [1, 1]
  half = jnp.bfloat16
  cast = lambda x, w: (x @ w, x.astype(half) @ w.astype(half))
  assert scheduled(cast, x, w) == [1, 1]
