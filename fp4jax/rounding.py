"""Rounding decisions and the counter-based generator behind them.

A quantiser sees a value as ``floor code + fraction`` on its grid; rounding
decides whether the code goes up by one. Nearest-even looks at the fraction
alone, stochastic rounding compares it with random bits that depend only on the
key and on where the element sits in the operand, never on tiles or devices.
"""

import jax
from jax import lax
import jax.numpy as jnp

from fp4jax import errors

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SITE_TAG = 0x66703464  # "fp4d": keeps site keys apart from element bits


def _multiply(word, multiplier: int):
  """The high and low 32 bits of uint32 products, by halves of 16 bits.

  ``lax.mulhi`` does not pass through XLA's partitioner (JAX 0.11.2, 0.12.0.1).
  """
  low, high = word & 0xFFFF, word >> 16
  m_low, m_high = jnp.uint32(multiplier & 0xFFFF), jnp.uint32(multiplier >> 16)
  middle = high * m_low + (low * m_low >> 16)
  cross = low * m_high + (middle & 0xFFFF)
  top = high * m_high + (middle >> 16) + (cross >> 16)
  return top, word * jnp.uint32(multiplier)


def philox4x32(counter, key):
  """Philox4x32-10.

  Args:
    counter: four uint32 arrays that broadcast against each other.
    key: two uint32 scalars.

  Returns:
    Four uint32 arrays of the broadcast shape.

  >>> [hex(w) for w in philox4x32((0, 0, 0, 0), (0, 0))]
  ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']

  References:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
  """
  counter = jnp.broadcast_arrays(*(jnp.asarray(w, jnp.uint32) for w in counter))
  key = tuple(jnp.asarray(w, jnp.uint32) for w in key)

  def one_round(_, state):
    (c0, c1, c2, c3), (k0, k1) = state
    high0, low0 = _multiply(c0, _MULTIPLIERS[0])
    high1, low1 = _multiply(c2, _MULTIPLIERS[1])
    counter = (high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0)
    return counter, (k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1]))

  return lax.fori_loop(0, _ROUNDS, one_round, (tuple(counter), key))[0]


def key_words(key) -> tuple[jax.Array, jax.Array]:
  """The two words that a typed or raw PRNG key of any generator stands for."""
  if callable(key):
    raise ValueError(
      f"fp4_key is a {type(key).__name__}, needed a PRNG key; call it, as in"
      " fp4_key=rngs.fp4() of an nnx.Rngs(fp4=0)."
    )
  dtype = getattr(key, "dtype", None)
  if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
    key = jax.random.key_data(key)
  if getattr(key, "dtype", None) != jnp.uint32 or key.shape not in ((2,), (4,)):
    got = errors.shown(key)
    if hasattr(key, "dtype"):
      got = f"{key.dtype}{key.shape}"
    raise ValueError(
      f"fp4_key is {got}, needed one PRNG key (uint32[2] or uint32[4]); pass"
      " jax.random.key(step)."
    )
  if key.shape == (2,):
    return key[0], key[1]
  return philox4x32(tuple(key), (0, 0))[:2]


def site_keys(key, sites, operands) -> jax.Array:
  """uint32[..., 2] key words of sites and operands (integer arrays)."""
  words = philox4x32((sites, operands, 0, _SITE_TAG), key_words(key))
  return jnp.stack(words[:2], -1)


def site_stream(key, site: int = 0, operand: int = 0, loop=0) -> jax.Array:
  """The uint32[3] stream (two key words, loop counter) of one operand."""
  words = site_keys(key, jnp.uint32(site), jnp.uint32(operand))
  return jnp.concatenate([words, jnp.asarray(loop, jnp.uint32)[None]])


def random_bits(stream, shape, bits: int = 16) -> jax.Array:
  """Random bits of every element of an operand, by its position alone.

  Args:
    stream: uint32[3], see ``site_stream``.
    shape: [*batch, row, k], the operand's logical shape.
    bits: 16 or 8 bits an element.

  Returns:
    uint32 array of ``shape`` with values below ``2**bits``.
  """
  *batch, rows, k = shape
  lanes = 128 // bits
  groups = -(-k // lanes)
  dims = (*batch, rows, groups)

  def iota(axes):
    index = jnp.zeros(dims, jnp.uint32)
    for axis in axes:
      index = index * jnp.uint32(dims[axis]) + lax.broadcasted_iota(
        jnp.uint32, dims, axis
      )
    return index

  n = len(dims)
  counter = (iota([n - 1]), iota([n - 2]), iota(range(n - 2)), stream[2])
  words = jnp.stack(philox4x32(counter, (stream[0], stream[1])), -1)
  halves = lax.bitcast_convert_type(
    words, jnp.uint16 if bits == 16 else jnp.uint8
  )
  return halves.reshape(*dims[:-1], groups * lanes)[..., :k].astype(jnp.uint32)


def offset(random, bits: int):
  """What stochastic rounding adds, in grid steps.

  Args:
    random: uint32 random bits.
    bits: how many there are. 16 bits are centred on zero and rounded to the
      nearest afterwards: unbiased to 2**-17. 8 bits are rounded down
      afterwards: the probability is truncated to 1/256, as by Blackwell's
      ``cvt.rs``.

  Returns:
    float32 in (-1/2, 1/2) for 16 bits, in [0, 1) for 8 bits.
  """
  if bits == 8:
    return random.astype(jnp.float32) * (1 / 256)
  return (random.astype(jnp.float32) - 32767.5) * (1 / 65536)
