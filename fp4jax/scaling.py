"""Absolute maxima, tensor scales and block scales."""

from typing import Any
from typing import NamedTuple

from jax import lax
import jax.numpy as jnp
import numpy as np

from fp4jax import _jax
from fp4jax import errors
from fp4jax import formats
from fp4jax import hadamard
from fp4jax import recipes

# Anything below is zero: no scale of what is left, nor any reciprocal of one,
# is subnormal, which XLA's CPU backend flushes and its GPU backend does not.
SMALLEST = np.float32(2.0**-100)
NORMAL = np.float32(2.0**-126)


def read(x):
  """``x`` as float32, with the values that its own dtype can hold.

  XLA deletes a rounding to BF16 that is widened again, on CPU too; what is
  quantised would then depend on what is fused with it.
  """
  if x.dtype == jnp.bfloat16:
    return hadamard.round_to_bf16(x.astype(jnp.float32))
  if x.dtype.itemsize < 4:  # float16, whose subnormals must stay
    x = lax.optimization_barrier(x)
  return x.astype(jnp.float32)


def divide(a, b):
  """The float32 quotient a / b, rounded to nearest, ties to even.

  XLA's CPU compiler divides exactly, its GPU compiler to within two units in
  the last place.

  Args:
    a: positive normal float32.
    b: positive normal float32, with a normal quotient.
  """
  a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
  exact = lambda a, b: a / b
  return lax.platform_dependent(a, b, cpu=exact, default=corrected_quotient)


def corrected_quotient(a, b):
  """``divide`` where the device's quotient is up to two units off.

  It is corrected by its remainder, which is exact in wrapping integers.
  """
  q = formats.float_bits(a / b)
  for _ in range(2):  # one unit in the last place each
    q = q + _correction(a, b, formats.bits_float(q)).astype(jnp.uint32)
  return formats.bits_float(q)


def _correction(a, b, q):
  """-1, 0 or 1: where a / b lies, in patterns next to q."""
  (ea, ma), (eb, mb), (eq, mq) = map(_exponent_and_mantissa, (a, b, q))
  # a = q * b where ma * 2**shift = mq * mb; shift is 23, or 24 where ma < mb.
  shift = (23 + ea - eb - eq).astype(jnp.uint32)
  remainder = ((ma << shift) - mq * mb).astype(jnp.int32)
  mb = mb.astype(jnp.int32)
  # Below a power of two the pattern before q is half a unit away.
  below = jnp.where(mq == 1 << 23, 4, 2) * remainder < -mb
  return (2 * remainder > mb).astype(jnp.int32) - below.astype(jnp.int32)


def _exponent_and_mantissa(x):
  """int32 exponent and uint32 24-bit mantissa of positive normal float32."""
  mantissa = (formats.float_bits(x) & 0x7FFFFF) | jnp.uint32(1 << 23)
  return formats.exponent(x), mantissa


def magnitude(x):
  """float32 |x|, Inf for NaN, which XLA drops from maxima."""
  return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))


def largest(magnitudes, axes):
  """The maxima of magnitudes over some axes, 0 for an empty array."""
  axes = tuple(axis % magnitudes.ndim for axis in axes)
  return lax.reduce(magnitudes, np.float32(0), lax.max, axes)


def block_amax(magnitude, block):
  """[*batch, m, k] magnitudes to [*batch, m or m blocks, blocks] amax."""
  rows, width = block
  *lead, m, k = magnitude.shape
  if m % rows:
    rest = [*[(0, 0)] * len(lead), (0, -m % rows), (0, 0)]
    magnitude = jnp.pad(magnitude, rest)
  blocks = magnitude.reshape(*lead, -(-m // rows), rows, k // width, width)
  return largest(blocks, (-3, -1))


def operand_amax(magnitudes):
  """float32 [*batch] amax of an operand over all its shards, Inf for NaN.

  Args:
    magnitudes: [*batch, m, k], of its elements or its blocks.
  """
  local = largest(magnitudes, (-2, -1))
  varying = _jax.varying_axes(local)
  return lax.pmax(local, varying) if varying else local


def row_amax(magnitudes):
  """float32 [*batch, m] amax of every row of an operand, Inf for NaN.

  Args:
    magnitudes: [*batch, m, k], of its elements or its blocks.

  Raises:
    UnsupportedError: inside a ``shard_map``, where nothing says which axis of
      the operand is divided.
  """
  if varying := _jax.varying_axes(magnitudes):
    raise errors.UnsupportedError(
      f"row_scale=True inside a shard_map over {', '.join(varying)}: whether"
      " rows are divided, or their contraction, is not known there; use"
      " row_scale=False, or quantise outside of shard_map, under auto axes."
    )
  return largest(magnitudes, (-1,))


def encode_scale(amax, top: float):
  """S_enc = top / amax, 1 where amax is zero."""
  return jnp.where(amax < SMALLEST, 1.0, divide(np.float32(top), amax))


class TwoLevelScale(NamedTuple):
  """What an operand's amax says about the scales of its blocks.

  Attributes:
    encode: float32 [*batch], [*batch, m] for a scale a row; multiplies values.
    decode: its reciprocal, the tensor scale.
    per_block: multiplies a block's amax, to give its scale.
    block_max: the largest block scale.
  """

  encode: Any
  decode: Any
  per_block: Any
  block_max: float


def two_level_scale(amax, operand: "recipes.Operand") -> TwoLevelScale:
  """The scales of an operand of the float32 amax [*batch] or [*batch, m]."""
  fmt = formats.FORMATS[operand.format]
  # Room for the scales of 4/6, and for EDEN's corrected ones.
  six = operand.four_over_six or operand.rounding == "eden"
  block_max = 256.0 if six and fmt.scale == "e4m3" else fmt.scale_max
  guard = operand.scale_guard
  encode = encode_scale(amax, 6 * block_max * guard)
  return TwoLevelScale(
    encode,
    divide(1.0, encode),
    encode * np.float32(1 / (6 * guard)),
    block_max,
  )


def product_factors(lhs, rhs) -> tuple:
  """Two float32 factors of the product of two operands' tensor scales.

  The second is 1 unless the product would be subnormal or zero, which the
  result of the GEMM that it multiplies need not be.
  """
  small = lhs * rhs < SMALLEST
  lifted = jnp.where(small, lhs * np.float32(2.0**100), lhs) * rhs
  return lifted, jnp.where(small, SMALLEST, np.float32(1))


def encode_block_scale(v, scale: str, rounding: str):
  """uint8 codes of block scales ``v >= 0``.

  Args:
    v: float32, already clipped to the format's largest scale.
    scale: "e4m3", or "restricted" for E4M3 with mantissas 1, 1.25, 1.5.
    rounding: rounding of the operand: "sr" rounds restricted scales up, so
      that no element saturates.
  """
  index = formats.round_to_grid(v, formats.E4M3)
  if scale == "e4m3":
    return index.astype(jnp.uint8)
  # On the E4M3 grid of 8 steps a binade, the restricted grid is the steps 0, 2
  # and 4 (0, 2, 4, 6 among subnormals); the midpoints are grid points too.
  value = decode_block_scale(index, "e4m3")
  above = index + (value < v).astype(index.dtype)
  below = index - (value > v).astype(index.dtype)
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
  return formats.grid_value(codes.astype(jnp.uint32), formats.E4M3)
