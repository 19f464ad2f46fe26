"""Contract: residual bytes are what jax.vjp keeps beyond its arguments."""

import jax
import jax.numpy as jnp

from experiments import memory

W = jax.ShapeDtypeStruct((16, 32), jnp.float32)
X = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)


def test_linear_layer_keeps_its_cast_weight():
  """y = x w: for dw it needs x, an argument; for dx, w in BF16, and no more."""
  f = lambda p, x: (x @ p["w"].astype(jnp.bfloat16)).sum()
  assert memory.residual_bytes(f, {"w": W}, X) == {}
  g = lambda p: f(p[0], p[1])
  assert memory.residual_bytes(g, ({"w": W}, X)) == {"bfloat16": 16 * 32 * 2}


def test_activations_are_counted_once_by_dtype():
  """tanh keeps one thing in BF16; two readers of it do not double it."""

  def f(w, x):
    h = jnp.tanh(x @ w.astype(jnp.bfloat16))
    return (h @ jnp.ones((32, 4), h.dtype)).sum() + (
      h @ jnp.zeros((32, 2), h.dtype)
    ).sum()

  kept = memory.residual_bytes(f, W, X)
  assert kept == {"bfloat16": 8 * 32 * 2}


def test_constants_are_not_counted():
  mask = jnp.tril(jnp.ones((16, 32), bool))
  zero = jnp.zeros((16, 32))
  f = lambda w: jax.lax.select(mask, w, zero).sum()
  assert memory.residual_bytes(f, W) == {}
  g = lambda w: jax.lax.select(w > 0, w, zero).sum()
  assert memory.residual_bytes(g, W) == {"bool": 16 * 32}


def test_remat_keeps_nothing():
  f = lambda w, x: jnp.tanh(x @ w.astype(jnp.bfloat16)).sum()
  assert memory.residual_bytes(f, W, X) != {}
  assert memory.residual_bytes(jax.checkpoint(f), W, X) == {}
