"""Element codes, packing and E8M0 are those of the page, bit for bit.

Integers are compared, so there is no tolerance. The oracle rounds by comparing
with midpoints of a written-out grid; ml_dtypes is a second witness.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp4jax import formats
from fp4jax import scaling
from tests import oracle

ELEMENTS = {
  "E2M1": (formats.E2M1, ml_dtypes.float4_e2m1fn),
  "E4M3": (formats.E4M3, ml_dtypes.float8_e4m3fn),
  "E5M2": (formats.E5M2, ml_dtypes.float8_e5m2),
}
NAMES = list(ELEMENTS)

encode = jax.jit(formats.encode, static_argnums=1)
decode = jax.jit(formats.decode, static_argnums=1)


def hard_values(name):
  """float32 at and one ulp around every grid value and midpoint, both signs;
  saturated, tiny and subnormal values; a log-uniform sweep."""
  points = oracle.grid(name)
  points = np.concatenate([points, (points[1:] + points[:-1]) / 2])
  points = points.astype(np.float32)
  random = np.random.default_rng(0)
  sweep = np.exp2(random.uniform(-24, 18, 20000)).astype(np.float32)
  extreme = [1e-45, 2e-38, 1e-30, 7, 464, 465, 480, 61440, 65536, 3e38]
  positive = np.concatenate(
    [
      points,
      np.nextafter(points, np.float32(0)),
      np.nextafter(points, np.float32(np.inf)),
      sweep,
      np.array(extreme, np.float32),
    ]
  )
  return np.concatenate([positive, -positive])


@pytest.mark.parametrize("name", NAMES)
def test_constants(name):
  """The table of elements: bits, exponents, maximum."""
  element = ELEMENTS[name][0]
  fields = (
    element.bits,
    element.min_exponent,
    element.mantissa_bits,
    element.max,
  )
  assert fields == oracle.ELEMENTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_decode_every_code(name):
  """decode(code) is the grid value, sign of zero included.

  Codes above the maximum (NaN, Inf in other stacks) are never encoded and
  have no meaning here.
  """
  element, dtype = ELEMENTS[name]
  count = len(oracle.grid(name))
  codes = np.arange(count, dtype=np.uint8)
  codes = np.concatenate([codes, codes | 1 << (element.bits - 1)])
  expected = oracle.decode(codes, name).astype(np.float32)
  oracle.same_bits(codes.view(dtype).astype(np.float32), expected)
  oracle.same_bits(decode(codes, element), expected)


def test_a13_negative_subnormal_codes():
  """Codes 8 to 15 of E2M1 mirror 0 to 7; code 8 is -0.0, code 9 is -0.5."""
  table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
  codes = np.arange(16, dtype=np.uint8)
  decoded = np.asarray(formats.decode(codes, formats.E2M1))  # eager
  oracle.same_bits(decoded[:8], np.array(table, np.float32))
  oracle.same_bits(decoded[8:], -np.array(table, np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_encode_nearest(name, dtype):
  """RNE codes equal the oracle's, and the cast of ml_dtypes of the clipped
  value; eager codes (one element) equal jitted ones."""
  element, small = ELEMENTS[name]
  x = jnp.asarray(hard_values(name), dtype)
  values = np.asarray(x.astype(jnp.float32))
  expected = oracle.encode(oracle.flush(values), name)
  oracle.same_bits(encode(x, element), expected)
  if name == "E4M3":
    oracle.same_bits(formats.encode(x, element), expected)
  clipped = np.clip(values, -element.max, element.max)
  oracle.same_bits(clipped.astype(small).view(np.uint8), expected)


@pytest.mark.parametrize("name", NAMES)
def test_encode_inverts_decode(name):
  """Grid values are fixed points: encode(decode(code)) == code."""
  element = ELEMENTS[name][0]
  count = len(oracle.grid(name))
  codes = np.arange(count, dtype=np.uint8)
  codes = np.concatenate([codes, codes | 1 << (element.bits - 1)])
  again = encode(decode(codes, element), element)
  oracle.same_bits(again, codes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a21_sticky_bits_at_midpoints(dtype):
  """Just below a midpoint goes down, just above goes up, at it to even: 21
  positive and 21 negative cases of E2M1."""
  midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
  below = np.arange(7)
  even = np.array([0, 2, 2, 4, 4, 6, 6])
  # One ulp of the dtype: 2^-23 or 2^-7 relative to the binade; half of it
  # suffices below a power of two, and no midpoint is one but .25.
  ulp = float(jnp.finfo(dtype).eps)
  step = np.exp2(np.floor(np.log2(midpoints))) * ulp
  x = np.stack([midpoints - step, midpoints, midpoints + step])
  assert np.array_equal(x, np.asarray(jnp.asarray(x, dtype), np.float32))
  expected = np.stack([below, even, below + 1]).astype(np.uint8)
  for sign, bit in ((1, 0), (-1, 8)):
    codes = encode(jnp.asarray(sign * x, dtype), formats.E2M1)
    oracle.same_bits(codes, expected | np.uint8(bit))


def test_a05_e4m3_saturates():
  """Above 464 an XLA cast to E4M3 gives NaN; the encoder gives 448 (0x7E),
  so does the scale encoder, and no scale is ever the NaN code 0x7F."""
  x = np.array([448, 464, 465, 480, 1000, np.inf, 3e38], np.float32)
  codes = np.full(7, 0x7E, np.uint8)
  oracle.same_bits(encode(x, formats.E4M3), codes)
  oracle.same_bits(encode(-x, formats.E4M3), codes | np.uint8(0x80))
  clipped = jnp.minimum(x, 448)
  encode_scale = jax.jit(scaling.encode_block_scale, static_argnums=(1, 2))
  oracle.same_bits(encode_scale(clipped, "e4m3", "rne"), codes)


def test_pack_layout():
  """Element 2i is the low nibble of byte i; unpack inverts every byte."""
  codes = np.array([[1, 2, 15, 0], [8, 9, 7, 3]], np.uint8)
  packed = np.array([[0x21, 0x0F], [0x98, 0x37]], np.uint8)
  oracle.same_bits(formats.pack(jnp.asarray(codes)), packed)
  oracle.same_bits(oracle.pack(codes), packed)
  every = jnp.arange(256, dtype=jnp.uint8).reshape(2, 1, 128)
  unpacked = jax.jit(formats.unpack)(every)
  assert unpacked.shape == (2, 1, 256) and unpacked.max() == 15
  oracle.same_bits(jax.jit(formats.pack)(unpacked), np.asarray(every))
  oracle.same_bits(oracle.pack(np.asarray(unpacked)), np.asarray(every))
  assert formats.pack(jnp.zeros((3, 0), jnp.uint8)).shape == (3, 0)


@pytest.mark.parametrize("largest", [6.0, 448.0, 57344.0])
def test_e8m0(largest):
  """The least 2^e with x <= 2^e * max: the bound itself, one ulp above it and
  below it, for every e; zero has code 0."""
  bounds = np.exp2(np.arange(-126, 128.0)) * largest
  bounds = bounds[bounds < 3.4e38].astype(np.float32)
  x = np.concatenate(
    [
      bounds,
      np.nextafter(bounds, np.float32(0)),
      np.nextafter(bounds, np.float32(np.inf)),
      np.array([0, 2.0**-126, 3.4e38], np.float32),
    ]
  )
  e = oracle.mx_exponent(x.astype(np.float64), largest)
  expected = np.where(x == 0, 0, e + 127).astype(np.uint8)
  encode_e8m0 = jax.jit(formats.encode_e8m0, static_argnums=1)
  oracle.same_bits(encode_e8m0(x, largest), expected)
  codes = np.arange(1, 255, dtype=np.uint8)
  decoded = oracle.decode_e8m0(codes).astype(np.float32)
  oracle.same_bits(formats.decode_e8m0(jnp.asarray(codes)), decoded)
