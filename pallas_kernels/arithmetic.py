"""NVFP4 arithmetic on tiles of blocks, as the kernels spell it.

Results are bit for bit those of docs/numerics.md. Instructions are counted:
what is done once an element decides a kernel's speed on Hopper, whose integer
and comparison units keep up with its memory for about eight of them.
"""

import dataclasses

from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import registers

BLOCK = registers.BLOCK
NORMAL = np.float32(2.0**-126)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What a quantise kernel computes.

  Attributes:
    rounding: "rne" or "sr".
    sr_bits: random bits an element, 16 or 8.
    scale: "e4m3", or "restricted" to the mantissas 1, 1.25 and 1.5.
    scale_max: the largest block scale.
    four_over_six: choose for each block between amax to 6 and amax to 4.
    signs: sign bits of the rotation before, None without one.
  """

  rounding: str = "rne"
  sr_bits: int = 16
  scale: str = "e4m3"
  scale_max: float = 448.0
  four_over_six: bool = False
  signs: int | None = None


def f32(bits):
  return lax.bitcast_convert_type(bits, jnp.float32)


def u32(x):
  return lax.bitcast_convert_type(x, jnp.uint32)


# E2M1. With e = max(exponent, 0) the grid's step is 2**(e - 1), and
# |x| + 2**e * MAGIC is |x| rounded to it, to nearest even: the last bits of the
# sum are |x| / step + 6. Bits 22 to 24 are 2 + 2 e. Their sum modulo 8 is the
# index of the magnitude among 0, .5, 1, 1.5, 2, 3, 4, 6.
MAGIC = np.float32(2**22 + 3)


def round_to_grid(a, config: Config, random=None):
  """Magnitudes rounded to E2M1.

  Args:
    a: float32 tile of values in [0, 6].
    config: says how.
    random: uint32 tile of random bits, for stochastic rounding.

  Returns:
    What ``Tile.pack`` takes for an index, and the rounded magnitudes.
  """
  power = f32(u32(jnp.maximum(a, 1.0)) & jnp.uint32(0x7F800000))  # 2**e
  if config.rounding == "sr" and config.sr_bits == 8:
    return _round_down(a, power, random)
  if config.rounding == "sr":
    # (random - 32767.5) / 2**17, exactly, out of 2**23 + random. Two additions
    # of constants in a row would be one for XLA, which rounds differently.
    part = f32(random | jnp.uint32(0x4B000000)) - np.float32(2**23 + 2**15)
    part = part * np.float32(2.0**-17) + np.float32(2.0**-18)
    a = a + part * power
  magic = power * MAGIC
  rounded = a + magic
  return u32(rounded), rounded - magic


def _round_down(a, power, random):
  """Blackwell's ``cvt.rs``: probabilities truncated to 1/256."""
  part = f32(random | jnp.uint32(0x4B000000)) - np.float32(2**23)
  moved = a + part * np.float32(2.0**-9) * power
  e = (u32(power) >> 23).astype(jnp.int32) - 127
  per_step = f32((128 - e).astype(jnp.uint32) << 23)  # 2**(1 - e)
  steps = (moved * per_step).astype(jnp.int32)
  index = (2 * e + steps).astype(jnp.uint32)
  return index, steps.astype(jnp.float32) * (power * 0.5)


def round_block_scale(v, config: Config):
  """uint32 E4M3 codes of float32 ``v >= 0``, and their values."""
  code = v.astype(jnp.float8_e4m3fn)
  value = code.astype(jnp.float32)
  index = lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.uint32)
  if config.scale == "e4m3":
    return index, value
  # Steps 0, 2 and 4 of the eight of a binade (0, 2, 4, 6 among subnormals);
  # the midpoints between them are steps too.
  one = jnp.uint32(1)
  up = config.rounding == "sr"
  if up:
    index = jnp.where(value < v, index + one, index)
  else:
    index = jnp.where(value > v, index - one, index)
  step = index & jnp.uint32(7)
  last = 5 if up else 6
  rounded = jnp.where(step < last, jnp.uint32(4), jnp.uint32(8))
  rounded = jnp.where(step < 3, jnp.uint32(2), rounded)
  rounded = jnp.where(step == 0, jnp.uint32(0), rounded)
  subnormal = (index + one) & ~one
  index = jnp.where(index < 8, subnormal, index - step + rounded)
  code = lax.bitcast_convert_type(index.astype(jnp.uint8), jnp.float8_e4m3fn)
  return index, code.astype(jnp.float32)


def _clear_low_bits(x):
  """float32 with its low 12 bits cleared: its square is exact."""
  return f32(u32(x) & jnp.uint32(0xFFFFF000))


def quantize(
  tile,
  x,
  scalars,
  config: Config,
  block_amax=None,
  random=None,
  native: tuple[str, ...] = (),
):
  """Codes and scales of the blocks of a tile.

  Args:
    tile: where the blocks lie.
    x: float32 tile.
    scalars: what a block's amax is multiplied with to give its scale; the
      tensor scale; its reciprocal; the least amax of a block that is not zero,
      NaN for an operand that is not finite.
    config: what is computed.
    block_amax: float32, of blocks that reach beyond the tile, negative where
      amax goes to 4; None takes the amax of ``x``.
    random: uint32 tile of random bits, for stochastic rounding.
    native: "rne" and "sr8", where the GPU rounds so itself.

  Returns:
    Two uint32 words of codes a block; a uint32 E4M3 code of each scale;
    and what ``decoded`` takes.
  """
  top = tile.amax(x) if block_amax is None else jnp.abs(block_amax)
  six, four = _ways(top, scalars, config)
  way = "rne" if config.rounding == "rne" else f"sr{config.sr_bits}"
  if way in native and not config.four_over_six:
    scale, value, values = _scaled(tile, x, six[0], scalars, config)
    words = tile.pack_native(values, random)
    zero = value == 0.0
    return [jnp.where(zero, jnp.uint32(0), w) for w in words], scale, None
  if not config.four_over_six:
    best = _candidate(tile, x, six, scalars, config, random)
  elif block_amax is None:
    best = _candidate(tile, x, six, scalars, config, random)
    other = _candidate(tile, x, four, scalars, config, random)
    better = _error(tile, x, scalars, other) < _error(tile, x, scalars, best)
    best = tuple(
      _select(tile, better, o, b) for o, b in zip(other, best, strict=True)
    )
  else:
    chosen = block_amax < 0.0
    v, limit = jnp.where(chosen, four[0], six[0]), six[1]
    if config.scale == "restricted":
      limit = tile.spread(jnp.where(chosen, four[1], six[1]))
    best = _candidate(tile, x, (v, limit), scalars, config, random)
  scale, value, index, magnitude = best
  zero = value == 0.0
  words = [jnp.where(zero, jnp.uint32(0), w) for w in tile.pack(index, x)]
  return words, scale, (value, magnitude)


def errors(tile, x, scalars, config: Config, block_amax):
  """Squared errors of a tile's blocks with their amax at 6, and at 4.

  Args:
    tile: where the blocks lie.
    x: float32 tile.
    scalars: as of ``quantize``.
    config: what is computed, with nearest rounding.
    block_amax: float32, of blocks that reach beyond the tile.

  Returns:
    Two float32 of each block, in units of the tensor scale.
  """
  return tuple(
    _error(tile, x, scalars, _candidate(tile, x, way, scalars, config, None))
    for way in _ways(block_amax, scalars, config)
  )


def _ways(top, scalars, config: Config):
  """Scales of blocks before rounding, and where codes saturate.

  Of blocks whose amax goes to 6, and of blocks whose amax goes to 4.
  """
  per_block, _, _, smallest = scalars
  v = top * per_block
  v = jnp.where((top >= smallest) & (v >= NORMAL), v, 0.0)
  six = jnp.minimum(v, config.scale_max), 6.0
  four = jnp.minimum(1.5 * v, np.float32(1.5 * config.scale_max))
  return six, (four, 4.0 if config.scale == "restricted" else 6.0)


def _scaled(tile, x, v, scalars, config: Config):
  """Codes and values of block scales, and elements in their units."""
  _, tensor_scale, _, _ = scalars
  scale, value = round_block_scale(v, config)
  live = jnp.where(value == 0.0, 1.0, value * tensor_scale)
  return scale, value, x * tile.spread(tile.reciprocal(live))


def _candidate(tile, x, way, scalars, config: Config, random):
  """Codes and values of scales; indices and magnitudes of elements."""
  v, limit = way
  scale, value, values = _scaled(tile, x, v, scalars, config)
  a = jnp.minimum(jnp.abs(values), limit)
  index, magnitude = round_to_grid(a, config, random)
  return scale, value, index, magnitude


def _error(tile, x, scalars, candidate):
  """Squared error of each block in units of the tensor scale."""
  _, _, encode, _ = scalars
  _, value, _, magnitude = candidate
  target = _clear_low_bits(x * encode)
  decoded = _with_sign_of(x, magnitude * tile.spread(value))
  d = _clear_low_bits(decoded - target)
  return tile.sum(d * d)


def _select(tile, better, other, best):
  """``other`` in the blocks where it is better."""
  if best.shape != better.shape:
    better = tile.spread(better.astype(jnp.int32)) != 0
  return jnp.where(better, other, best)


def decoded(tile, x, value, magnitude):
  """Code times scale, float32; zeros of zero blocks are positive."""
  signed = _with_sign_of(x, magnitude * tile.spread(value))
  return jnp.where(tile.spread(value) == 0.0, 0.0, signed)


def _with_sign_of(x, magnitude):
  return f32(u32(magnitude) | u32(x) & jnp.uint32(0x80000000))


def decode(tile, words, scale):
  """Codes times scales: two words and a float32 a block to a tile."""
  return tile.unpack(words) * tile.spread(scale)
