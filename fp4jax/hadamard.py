"""Random Hadamard transform, the one rotation that wgrad's operands share."""

from jax import lax
import jax.numpy as jnp
import numpy as np

from fp4jax import recipes
from fp4jax import rounding


def pad_last(x, multiple: int):
  """Zero-pads the last axis to a multiple."""
  rest = -x.shape[-1] % multiple
  if not rest:
    return x
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])


def round_to_bf16(x):
  """float32 rounded to the nearest BF16 value, as float32.

  ``reduce_precision`` stays in the program where XLA would delete a pair of
  casts.
  """
  return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def signs(rht: "recipes.Rht", stream=None):
  """float32[size] of +1 and -1: -1 where bit i of ``rht.signs`` is set.

  Where these are None, the bits are the stream's ``rounding.rotation_bits``.
  """
  if rht.signs is None:
    bits = rounding.rotation_bits(stream)[: rht.size]
    return jnp.where(bits == 1, np.float32(-1), np.float32(1))
  bits = [(rht.signs >> (i % 16)) & 1 for i in range(rht.size)]
  return np.where(bits, -1.0, 1.0).astype(np.float32)


def rht(x, rht: "recipes.Rht", stream=None):
  """``y = (x ∘ s) H / sqrt(size)`` along the last axis, in groups of ``size``.

  The sums run as a float32 butterfly in Sylvester order (strides 1, 2, 4, ...)
  and are rounded once, to BF16.

  Args:
    x: [..., k] float; zero-padded to a multiple of ``rht.size``.
    rht: size and sign vector.
    stream: uint32[3] that signs are drawn from, where ``rht.signs`` is None.

  Returns:
    [..., k padded] float32 array of BF16 values.

  References:
    NVIDIA, arXiv 2509.25149, section 4.2.
  """
  x = pad_last(x.astype(jnp.float32), rht.size)
  *lead, k = x.shape
  y = _times(x.reshape(*lead, k // rht.size, rht.size), signs(rht, stream))
  plus_minus = np.array([[1], [-1]], np.float32)
  stride = 1
  while stride < rht.size:
    y = y.reshape(*lead, k // (2 * stride), 2, stride)
    y = y[..., :1, :] + _times(y[..., 1:, :], plus_minus)
    if stride in (2, 32):  # four terms a pass, not all of them
      y = lax.optimization_barrier(y)
    stride *= 2
  scale = np.float32(rht.size**-0.5)
  y = round_to_bf16(y.reshape(*lead, k) * scale)
  return lax.optimization_barrier(y)  # once, not for each of its readers


def _times(x, constants):
  """Multiplies by constants along the last axes of ``x``."""
  return x * constants.reshape(
    (1,) * (x.ndim - constants.ndim) + constants.shape
  )
