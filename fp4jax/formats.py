"""Element and scale formats: integer codes, packing, grids.

Nothing here narrows with a float cast: XLA's GPU compiler deletes a narrowing
cast that is widened again, and a fake-quantised model then trains unquantised.
Codes are computed with integer arithmetic instead.
"""

import dataclasses

from jax import lax
import jax.numpy as jnp
import numpy as np

from fp4jax import rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Element:
  """A small float: sign, exponent, mantissa, with subnormals.

  Attributes:
    name: the format's name.
    bits: bits of a code; the sign is the highest.
    mantissa_bits: explicit bits of the mantissa.
    min_exponent: exponent of the smallest normal number.
    max: largest finite magnitude.
  """

  name: str
  bits: int
  mantissa_bits: int
  min_exponent: int
  max: float

  @property
  def sign_shift(self) -> int:
    return self.bits - 1


E2M1 = Element(name="e2m1", bits=4, mantissa_bits=1, min_exponent=0, max=6.0)
E4M3 = Element(name="e4m3", bits=8, mantissa_bits=3, min_exponent=-6, max=448.0)
E5M2 = Element(
  name="e5m2", bits=8, mantissa_bits=2, min_exponent=-14, max=57344.0
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """How an operand is stored: elements, and the scales that decode them.

  Attributes:
    name: the name that recipes use.
    element: format of the codes.
    block: elements that share a block scale along the contraction axis, or
      None for a tensor scale alone.
    scale: "e4m3", "restricted" (E4M3 with mantissas 1, 1.25, 1.5) or "e8m0";
      None without blocks.
    scale_max: largest block scale the tensor scale aims at.
  """

  name: str
  element: Element
  block: int | None = None
  scale: str | None = None
  scale_max: float = 1.0

  @property
  def packed(self) -> bool:
    """Whether two codes share a byte."""
    return self.element.bits == 4


FORMATS = {
  f.name: f
  for f in (
    Format(name="nvfp4", element=E2M1, block=16, scale="e4m3", scale_max=448.0),
    Format(
      name="nvfp4_fp8_exact",
      element=E2M1,
      block=16,
      scale="restricted",
      scale_max=64.0,
    ),
    Format(name="mxfp4", element=E2M1, block=32, scale="e8m0"),
    Format(name="mxfp8", element=E4M3, block=32, scale="e8m0"),
    Format(name="mxfp8_e5m2", element=E5M2, block=32, scale="e8m0"),
    Format(name="fp8_e4m3", element=E4M3),
    Format(name="fp8_e5m2", element=E5M2),
  )
}


def float_bits(x):
  """The uint32 pattern of float32 values."""
  return lax.bitcast_convert_type(x, jnp.uint32)


def bits_float(bits):
  """The float32 value of uint32 patterns."""
  return lax.bitcast_convert_type(bits, jnp.float32)


def exponent(x):
  """int32 floor(log2 |x|) of normal float32 numbers, -127 at zero."""
  return ((float_bits(x) >> 23) & 0xFF).astype(jnp.int32) - 127


def power_of_two(e):
  """float32 2**e for int32 e in [-126, 127]."""
  return bits_float((e + 127).astype(jnp.uint32) << 23)


def round_to_grid(magnitude, element: Element, random=None, sr_bits: int = 16):
  """int32 index of the grid value that a magnitude rounds to.

  With q the step of the magnitude's binade, nearest rounding is one addition:
  t + 1.5 * 2**23 * q is a multiple of q, ties to even. Stochastic rounding
  moves t by a random part of q first.

  Args:
    magnitude: float32 in [0, ``element.max``].
    element: the grid.
    random: None for nearest even, else uint32 random bits.
    sr_bits: how many random bits there are, 16 or 8.
  """
  # The pattern of a power of two is its biased exponent, shifted by 23.
  lowest = element.min_exponent + 127
  binade = jnp.maximum(float_bits(magnitude) & 0x7F800000, lowest << 23)
  index = ((binade >> 23).astype(jnp.int32) - lowest) << element.mantissa_bits
  step = bits_float(binade - jnp.uint32(element.mantissa_bits << 23))
  if random is None:
    return index + _nearest(magnitude, step)
  moved = magnitude + rounding.offset(random, sr_bits) * step
  if sr_bits == 16:
    return index + _nearest(moved, step)
  steps = power_of_two(-exponent(step))
  return index + jnp.floor(moved * steps).astype(jnp.int32)


def _nearest(t, step):
  """int32 nearest integer, ties to even, of t / step, where that is small."""
  shift = step * np.float32(1.5 * 2**23)
  return (float_bits(t + shift) - float_bits(shift)).astype(jnp.int32)


def encode(
  x,
  element: Element,
  random=None,
  sr_bits: int = 16,
  limit: float | None = None,
):
  """Codes of the grid values that ``x`` rounds to, saturating.

  Args:
    x: float array, cast to float32. NaN is not encoded: callers carry it in
      the tensor scale.
    element: the grid.
    random: None rounds to nearest even; uint32 bits of ``x``'s shape round
      stochastically.
    sr_bits: how many random bits an element has, 16 or 8.
    limit: the magnitude at which codes saturate, ``element.max`` by default.

  Returns:
    uint8 codes of ``x``'s shape, unpacked: the sign bit above the index of
    the magnitude in the grid.

  >>> encode(jnp.array([0.25, 0.75, -5.0, 7.0]), E2M1).tolist()
  [0, 2, 14, 7]
  """
  x = jnp.asarray(x, jnp.float32)
  magnitude = jnp.minimum(jnp.abs(x), limit or element.max)
  index = round_to_grid(magnitude, element, random, sr_bits)
  sign = float_bits(x) >> 31 << element.sign_shift
  return (index.astype(jnp.uint32) | sign).astype(jnp.uint8)


def decode(codes, element: Element):
  """float32 values of unpacked codes; -0.0 keeps its sign.

  >>> decode(jnp.arange(8, dtype=jnp.uint8), E2M1).tolist()
  [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
  """
  codes = codes.astype(jnp.uint32)
  value = grid_value(codes & ((1 << element.sign_shift) - 1), element)
  sign = codes >> element.sign_shift << 31
  return bits_float(float_bits(value) | sign)


def grid_value(index, element: Element):
  """float32 magnitudes of uint32 indices in the grid."""
  # The index, read as exponent and mantissa of a float32, is the value with
  # another bias; subnormals lose the implicit one that a float32 would add.
  pattern = index << (23 - element.mantissa_bits)
  rebias = 126 + element.min_exponent
  normal = bits_float(pattern + jnp.uint32(rebias << 23))
  tiny = 2.0 ** (element.min_exponent - element.mantissa_bits)
  subnormal = index.astype(jnp.int32).astype(jnp.float32) * tiny
  return jnp.where(index >> element.mantissa_bits == 0, subnormal, normal)


def encode_e8m0(x, element_max: float):
  """uint8 E8M0 codes of the least 2**e with ``x <= 2**e * element_max``.

  e is at least -126; ``x == 0`` gives code 0. Needs finite
  ``x >= 0``.
  """
  x = jnp.asarray(x, jnp.float32)
  mantissa, top = element_max, 0
  while mantissa >= 2:
    mantissa, top = mantissa / 2, top + 1
  # x = m * 2**e, m in [1, 2), is at most max * 2**(e - top) if m <= mantissa.
  m = bits_float((float_bits(x) & 0x7FFFFF) | jnp.uint32(127 << 23))
  e = exponent(x) - top + (m > mantissa).astype(jnp.int32)
  return jnp.where(x == 0, 0, jnp.maximum(e, -126) + 127).astype(jnp.uint8)


def decode_e8m0(codes):
  """float32 2**(code - 127); code 0, which only zero blocks have, gives 0."""
  return bits_float(codes.astype(jnp.uint32) << 23)


def pack(codes):
  """Two 4-bit codes a byte along the last axis, the even one in the low half.

  Args:
    codes: uint8 [..., k] with k even.

  Returns:
    uint8 [..., k / 2].
  """
  # Unfused: XLA's CPU compiler would compute the codes once per byte, scalar.
  codes = lax.optimization_barrier(codes)
  pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
  both = lax.bitcast_convert_type(pairs, jnp.uint16)
  return (both | both >> 4).astype(jnp.uint8)


def unpack(packed):
  """The inverse of ``pack``: uint8 [..., k / 2] to uint8 [..., k]."""
  both = packed.astype(jnp.uint16)
  pairs = lax.bitcast_convert_type((both | both << 4) & 0x0F0F, jnp.uint8)
  return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)
