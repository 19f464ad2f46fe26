"""Layers that the models share.

No biases; parameters are float32, arithmetic is ``dtype``, norms' statistics,
softmax and logits float32. The backward pass keeps what norms and activations
read, and computes the rest again.
"""

import functools
from typing import Any
from typing import Literal

from flax import linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array

INIT = nn.initializers.normal(0.02)

# In the backward pass computed again from its input in ``dtype``: it would keep
# three arrays of float32.
RMSNorm = nn.remat(nn.RMSNorm)


def out_init(branches: int) -> nn.initializers.Initializer:
  """How a residual branch ends: small, so that depth does not grow the stream.

  Args:
    branches: residual branches of the whole model.
  """
  return nn.initializers.normal(0.02 / branches**0.5)


def embed(vocab: int, d: int, dtype: Any) -> nn.Embed:
  """Tokens to vectors, named "embed"."""
  return nn.Embed(vocab, d, embedding_init=INIT, dtype=dtype, name="embed")


def lm_head(vocab: int, dtype: Any) -> nn.Dense:
  """Vectors to float32 logits, named "lm_head"."""
  return nn.Dense(
    vocab,
    use_bias=False,
    kernel_init=INIT,
    dtype=dtype,
    dot_general=_dot_general_f32,
    name="lm_head",
  )


class Attention(nn.Module):
  """Causal grouped-query attention, with rotary embeddings or without.

  Attributes:
    heads: query heads, a divisor of the width.
    kv_heads: key and value heads, a divisor of ``heads``.
    qk_norm: normalises queries and keys.
    rope_base: the slowest rotation's wavelength over 2π; None for no rotation.
    out_init: of the output's kernel.
    dtype: of the arithmetic.
    implementation: ``jax.nn.dot_product_attention``'s.
    dot_general_cls: Flax's, of the linear layers.
  """

  heads: int
  kv_heads: int
  qk_norm: bool
  rope_base: float | None
  out_init: Any
  dtype: Any
  implementation: Literal["xla", "cudnn"]
  dot_general_cls: Any = None

  @nn.compact
  def __call__(self, x: Array) -> Array:
    b, t, d = x.shape
    size = d // self.heads
    dense = functools.partial(
      nn.Dense,
      use_bias=False,
      kernel_init=INIT,
      dtype=self.dtype,
      dot_general_cls=self.dot_general_cls,
    )
    q = dense(self.heads * size, name="q")(x).reshape(b, t, self.heads, size)
    k = dense(self.kv_heads * size, name="k")(x)
    v = dense(self.kv_heads * size, name="v")(x)
    k = k.reshape(b, t, self.kv_heads, size)
    v = v.reshape(b, t, self.kv_heads, size)
    if self.qk_norm:
      q = RMSNorm(dtype=self.dtype, name="q_norm")(q)
      k = RMSNorm(dtype=self.dtype, name="k_norm")(k)
    if self.rope_base is not None:
      q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
    y = jax.nn.dot_product_attention(
      q, k, v, is_causal=True, implementation=self.implementation
    )
    out = dense(d, kernel_init=self.out_init, name="out")
    return out(y.reshape(b, t, d))


class FeedForward(nn.Module):
  """down(relu(up(x))²), or down(silu(gate(x)) · up(x))."""

  hidden: int
  activation: str
  out_init: Any
  dtype: Any
  dot_general_cls: Any = None

  @nn.compact
  def __call__(self, x: Array) -> Array:
    dense = functools.partial(
      nn.Dense,
      use_bias=False,
      kernel_init=INIT,
      dtype=self.dtype,
      dot_general_cls=self.dot_general_cls,
    )
    h = dense(self.hidden, name="up")(x)
    if self.activation == "swiglu":
      h = _swiglu(dense(self.hidden, name="gate")(x), h)
    else:
      h = squared_relu(h)
    return dense(x.shape[-1], kernel_init=self.out_init, name="down")(h)


@jax.checkpoint
def squared_relu(x: Array) -> Array:
  """relu(x)²."""
  return jnp.square(nn.relu(x))


@jax.checkpoint
def _swiglu(gate: Array, x: Array) -> Array:
  return nn.silu(gate) * x


def rotate(x: Array, base: float) -> Array:
  """Rotary position embedding.

  The pair (x_i, x_{i + size/2}) turns by the angle t · base^(-2i / size).

  Args:
    x: [b, t, heads, size] float, size % 2 == 0.
    base: the slowest rotation's wavelength over 2π.

  Returns:
    [b, t, heads, size], dtype of ``x``; computed in float32.

  References:
    Su et al., "RoFormer", arXiv 2104.09864.
  """
  t, size = x.shape[1], x.shape[3]
  frequency = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
  angle = jnp.arange(t, dtype=jnp.float32)[:, None, None] * frequency
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)


def _dot_general_f32(lhs, rhs, dimension_numbers, precision=None):
  return jax.lax.dot_general(
    lhs,
    rhs,
    dimension_numbers,
    precision=precision,
    preferred_element_type=jnp.float32,
  )
