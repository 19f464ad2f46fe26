"""Absolute maxima, tensor scales and block scales."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from fp4jax import formats

# Anything below is zero: no scale of what is left, nor any reciprocal of one,
# is subnormal, which XLA's CPU backend flushes and its GPU backend does not.
SMALLEST = np.float32(2.0**-100)


def amax(x, axis=None, keepdims=False):
  """Largest magnitude, 0 for an empty array; NaN and Inf propagate."""
  return jnp.max(jnp.abs(x), axis=axis, keepdims=keepdims, initial=0.0)


def operand_amax(x):
  """float32 [*batch] amax of a [*batch, m, k] operand over all its shards.

  ``x`` may be the operand itself or the amax of its blocks.
  """
  local = amax(x, axis=(-2, -1))
  axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
  varying = tuple(a for a in axes if a in jax.typeof(local).vma)
  return lax.pmax(local, varying) if varying else local


def encode_scale(amax, top: float):
  """S_enc = top / amax, 1 where amax is zero."""
  return jnp.where(amax < SMALLEST, 1.0, np.float32(top) / amax)


def encode_block_scale(v, scale: str, rounding: str):
  """uint8 codes of block scales ``v >= 0``.

  Args:
    v: float32, already clipped to the format's largest scale.
    scale: "e4m3", or "restricted" for E4M3 with mantissas 1, 1.25, 1.5.
    rounding: rounding of the operand: "sr" rounds restricted scales up, so
      that no element saturates.
  """
  if scale == "e4m3":
    return formats.encode(v, formats.E4M3)
  # On the E4M3 grid of 8 steps a binade, the restricted grid is the steps 0, 2
  # and 4 (0, 2, 4, 6 among subnormals); the midpoints are grid points too.
  index = formats.round_to_grid(v, formats.E4M3)
  value = formats.decode(index, formats.E4M3)
  above, below = index + (value < v), index - (value > v)
  index = above if rounding == "sr" else below
  step = index & 7
  last = 5 if rounding == "sr" else 6
  middle = jnp.where(step < 3, 2, jnp.where(step < last, 4, 8))
  rounded = jnp.where(step == 0, 0, middle)
  subnormal = (index + 1) & ~1
  return jnp.where(index < 8, subnormal, index - step + rounded).astype(
    jnp.uint8
  )


def decode_block_scale(codes, scale: str):
  """float32 block scales of uint8 codes."""
  if scale == "e8m0":
    return formats.decode_e8m0(codes)
  return formats.decode(codes, formats.E4M3)
