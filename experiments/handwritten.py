"""NVFP4 linear layers as one writes them by hand, in plain ``jax.numpy``.

What ``bench_step`` compares ``fp4jax`` with: the paper's recipe (1x16
activations and gradients, 16x16 weights, stochastically rounded gradients,
rotated inputs of wgrad) without kernels, packed residuals or a library. Values
are rounded by arithmetic, scales behind a barrier, since XLA's GPU compiler
deletes casts to a narrow format and back.

References:
  NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
"""

import functools

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

BLOCK = 16
_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])


class DotGeneral(nn.Module):
  """Flax's ``dot_general_cls``: draws from the random stream "rounding"."""

  @nn.compact
  def __call__(self, x, w, dimension_numbers, precision=None, **unused):
    """Args: x, [*b, k]; w, [k, n]; k, n and tokens multiples of 16."""
    if dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
      raise ValueError(
        f"handwritten: dimension_numbers={dimension_numbers}; needed those of"
        " x [*b, k] times w [k, n]."
      )
    key = jnp.zeros(2, jnp.uint32)
    if self.has_rng("rounding"):
      key = jax.random.key_data(self.make_rng("rounding"))
    y = linear(x.reshape(-1, x.shape[-1]), w, key)
    return y.reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def linear(x, w, key):
  """The product of x [m, k] and w [k, n]; ``key`` is raw, uint32[2]."""
  return _matmul(quantize(x), quantize(w.T, rows=BLOCK), x.dtype)


def _forward(x, w, key):
  return linear(x, w, key), (x, w, key)


def _backward(residuals, g):
  x, w, key = residuals
  for_dgrad, for_wgrad = jax.random.split(jax.random.wrap_key_data(key))
  wt = quantize(w, rows=BLOCK)
  dx = _matmul(quantize(g, key=for_dgrad), wt, x.dtype)
  xt, gt = quantize(_rotate(x.T)), quantize(_rotate(g.T), key=for_wgrad)
  dw = _matmul(xt, gt, w.dtype)
  return dx, dw, np.zeros(key.shape, jax.dtypes.float0)


linear.defvjp(_forward, _backward)


def quantize(x, rows: int = 1, key=None) -> tuple[jax.Array, jax.Array]:
  """Rounds to NVFP4 along the last axis.

  Args:
    x: [m, k] float, k % 16 == 0 and m % rows == 0.
    rows: rows that share a block scale.
    key: rounds stochastically, where given.

  Returns:
    Codes times block scales, [m, k] bfloat16 (exact), and the tensor scale.
  """
  m, k = x.shape
  x = x.astype(jnp.float32).reshape(m // rows, rows, k // BLOCK, BLOCK)
  amax = jnp.max(jnp.abs(x), axis=(1, 3), keepdims=True)
  largest = jnp.max(amax)
  tensor_scale = jnp.where(largest > 0, largest, 1) / (6 * 448)
  scale = (amax / (6 * tensor_scale)).astype(jnp.float8_e4m3fn)
  scale = lax.optimization_barrier(scale).astype(jnp.float32)
  y = x / jnp.where(scale > 0, scale * tensor_scale, 1)
  y = jnp.where(scale > 0, y, 0)
  decoded = (_round(y, key) * scale).reshape(m, k).astype(jnp.bfloat16)
  return lax.optimization_barrier(decoded), tensor_scale


def _round(x, key):
  """To 0, 1/2, 1, 3/2, 2, 3, 4 or 6, and their negatives."""
  a = jnp.minimum(jnp.abs(x), 6)
  step = jnp.where(a < 2, 0.5, jnp.where(a < 4, 1.0, 2.0))
  if key is None:
    a = jnp.round(a / step)  # ties to even, as the codes' are
  else:
    bits = jax.random.bits(key, a.shape, jnp.uint16)
    a = jnp.floor(a / step + bits.astype(jnp.float32) / 2**16)
  return jnp.sign(x) * a * step


def _rotate(x):
  """The random Hadamard transform of 16 neighbours along the last axis."""
  blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
  rotated = jnp.einsum(
    "...i,ij->...j",
    blocks,
    jnp.asarray(_hadamard(), blocks.dtype),
    preferred_element_type=jnp.float32,
  )
  return rotated.reshape(x.shape)


@functools.cache
def _hadamard():
  h = np.ones((1, 1))
  while len(h) < BLOCK:
    h = np.block([[h, h], [h, -h]])
  return _SIGNS[:, None] * h / BLOCK**0.5


def _matmul(a, b, dtype):
  """The product of a [m, k] and b [n, k]."""
  (a, a_scale), (b, b_scale) = a, b
  contract = (((1,), (1,)), ((), ()))
  y = lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
  return (y * (a_scale * b_scale)).astype(dtype)
