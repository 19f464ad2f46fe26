"""Mamba-2: a gated state space mixer.

Of a sequence of inputs x, step sizes Δ and matrices B, C it computes, for each
head with its own A < 0,

  h_t = exp(Δ_t A) h_(t-1) + Δ_t B_t x_tᵀ
  y_t = C_tᵀ h_t + D x_t

in chunks: within a chunk as attention with decays for weights, between chunks
as a recurrence of one state a chunk (``chunked_scan``).

References:
  Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.
"""

import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from experiments.models import layers

Array = jax.Array


class Mamba(nn.Module):
  """out(norm(scan(conv(x), B, C, Δ) · silu(z))); z, x, B, C, Δ = in(input).

  Attributes:
    head: size of a head, a divisor of the inner width.
    state: size of the state, for each channel of the inner width.
    groups: heads of a group share B and C; a divisor of the number of heads.
      The norm is of each group by itself.
    conv: inputs that the causal convolution sees.
    chunk: length of the scan's chunks.
    expand: inner width over the width.
    out_init: of the output's kernel.
    dtype: of the arithmetic; decays and states are float32.
  """

  head: int
  state: int
  groups: int
  conv: int
  chunk: int
  expand: int
  out_init: Any
  dtype: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Args: x, [b, t, d]. Returns: [b, t, d] of ``dtype``."""
    b, t, d = x.shape
    inner, shared = self.expand * d, self.groups * self.state
    heads = inner // self.head
    dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
    width = 2 * inner + 2 * shared + heads
    projected = dense(width, kernel_init=layers.INIT, name="in_proj")(x)
    z, xbc, dt = jnp.split(projected, [inner, width - heads], axis=-1)
    xbc = CausalConv(width=self.conv, dtype=self.dtype, name="conv")(xbc)
    x, b_matrix, c_matrix = jnp.split(xbc, [inner, inner + shared], axis=-1)
    x = x.reshape(b, t, heads, self.head)
    grouped = b, t, self.groups, self.state
    log_a = self.param("log_a", _log_a_init, (heads,), jnp.float32)
    dt_bias = self.param("dt_bias", _dt_bias_init, (heads,), jnp.float32)
    skip = self.param("skip", nn.initializers.ones, (heads,), jnp.float32)
    y = chunked_scan(
      x,
      nn.softplus(dt.astype(jnp.float32) + dt_bias),
      -jnp.exp(log_a),
      b_matrix.reshape(grouped),
      c_matrix.reshape(grouped),
      self.chunk,
    )
    y = (y + x * skip[:, None]).astype(self.dtype)
    norm = GatedRMSNorm(groups=self.groups, name="norm")
    y = norm(y.reshape(b, t, inner), z)
    return dense(d, kernel_init=self.out_init, name="out_proj")(y)


class CausalConv(nn.Module):
  """silu(bias + Σ_i kernel[i] · x_(t - width + 1 + i)), channel by channel."""

  width: int
  dtype: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Args: x, [b, t, channels]. Returns: [b, t, channels] of ``dtype``."""
    shape = self.width, x.shape[-1]
    bound = 1 / self.width**0.5

    def init(key, shape, dtype):
      return jax.random.uniform(key, shape, dtype, -bound, bound)

    kernel = self.param("kernel", init, shape, jnp.float32)
    bias = self.param("bias", init, shape[1:], jnp.float32)
    return _convolved(x.astype(self.dtype), kernel, bias)


@jax.checkpoint
def _convolved(x: Array, kernel: Array, bias: Array) -> Array:
  width, t = kernel.shape[0], x.shape[1]
  padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
  taps = (padded[:, i : i + t] * kernel[i] for i in range(width))
  return nn.silu(sum(taps, bias)).astype(x.dtype)


class GatedRMSNorm(nn.Module):
  """RMSNorm of x · silu(z), each group of channels by itself."""

  groups: int

  @nn.compact
  def __call__(self, x: Array, z: Array) -> Array:
    """Args: x and z, [b, t, inner]. Returns: the same shape and dtype."""
    size = x.shape[-1:]
    scale = self.param("scale", nn.initializers.ones, size, jnp.float32)
    return _gated_norm(x, z, scale, self.groups)


@functools.partial(jax.checkpoint, static_argnums=3)
def _gated_norm(x: Array, z: Array, scale: Array, groups: int) -> Array:
  gated = x.astype(jnp.float32) * nn.silu(z.astype(jnp.float32))
  parts = gated.reshape(*x.shape[:-1], groups, -1)
  variance = jnp.mean(jnp.square(parts), axis=-1, keepdims=True)
  normed = parts * jax.lax.rsqrt(variance + 1e-6)
  return (normed.reshape(x.shape) * scale).astype(x.dtype)


def _log_a_init(key, shape, dtype):
  """A between -16 and -1."""
  return jnp.log(jax.random.uniform(key, shape, dtype, 1, 16))


def _dt_bias_init(key, shape, dtype):
  """softplus(bias) between 0.001 and 0.1, uniform in its logarithm."""
  low, high = math.log(1e-3), math.log(1e-1)
  dt = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
  return dt + jnp.log(-jnp.expm1(-dt))


@functools.partial(jax.checkpoint, static_argnums=5)
def chunked_scan(
  x: Array, dt: Array, a: Array, b: Array, c: Array, chunk: int
) -> Array:
  """The state space recurrence from h = 0, a chunk at a time.

  With s_t = Σ_(i<=t) Δ_i A within a chunk and h the state before it,

    y_t = Σ_(i<=t) exp(s_t - s_i) (C_t · B_i) Δ_i x_i + exp(s_t) C_tᵀ h

  Products have operands in the dtype of ``x`` and sums in float32 (float64 for
  float64); s, the decays and the states are of the latter. The backward pass
  computes all of it again.

  Args:
    x: [b, t, heads, size] float; t need not be a multiple of ``chunk``.
    dt: [b, t, heads] float, Δ >= 0.
    a: [heads] float, A <= 0.
    b: [b, t, groups, state] float, heads % groups == 0.
    c: [b, t, groups, state] float.
    chunk: steps of a chunk, at least 1.

  Returns:
    [b, t, heads, size], dtype of ``x``.
  """
  batch, t, heads, size = x.shape
  groups, dtype = b.shape[2], x.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  chunk = min(chunk, t)
  # Steps of Δ = 0 at the end neither decay the state nor add to it.
  count = -(-t // chunk)
  x, dt, b, c = (_chunks(v, count, chunk) for v in (x, dt, b, c))
  # b batch, n chunk, l and m steps, g group, h head of the group, p size,
  # s state.
  x = x.reshape(batch, count, chunk, groups, -1, size)
  dt = dt.astype(wide).reshape(batch, count, chunk, groups, -1)
  log_decay = jnp.cumsum(dt * a.astype(wide).reshape(groups, -1), axis=2)
  moved = (x * dt[..., None]).astype(dtype)

  later = log_decay[:, :, :, None] - log_decay[:, :, None]  # l, m
  causal = jnp.tril(jnp.ones((chunk, chunk), bool))[:, :, None, None]
  # Masked before exp: above the diagonal it would overflow.
  weights = jnp.exp(jnp.where(causal, later, -jnp.inf))
  scores = einsum("bnlgs,bnmgs->bnlmg", c, b)
  weights = (weights * scores[..., None]).astype(dtype)
  y = einsum("bnlmgh,bnmghp->bnlghp", weights, moved)

  last = log_decay[:, :, -1]
  to_end = jnp.exp(last[:, :, None] - log_decay)
  decayed = (x * (dt * to_end)[..., None]).astype(dtype)
  added = einsum("bnmgs,bnmghp->bnghps", b, decayed)

  def step(state, inputs):
    decay, new = inputs
    return state * decay[..., None, None] + new, state

  first = jnp.zeros_like(added[:, 0])
  by_chunk = (jnp.moveaxis(v, 1, 0) for v in (jnp.exp(last), added))
  _, before = jax.lax.scan(step, first, tuple(by_chunk))
  before = jnp.moveaxis(before, 0, 1).astype(dtype)
  carried = einsum("bnlgs,bnghps->bnlghp", c, before)
  y = y + carried * jnp.exp(log_decay)[..., None]
  y = y.reshape(batch, count * chunk, heads, size)
  return y[:, :t].astype(dtype)


def _chunks(x: Array, count: int, chunk: int) -> Array:
  """[b, t, ...] to [b, count, chunk, ...], with zeros at the end."""
  padding = [(0, 0)] * x.ndim
  padding[1] = (0, count * chunk - x.shape[1])
  padded = jnp.pad(x, padding)
  return padded.reshape(x.shape[0], count, chunk, *x.shape[2:])
