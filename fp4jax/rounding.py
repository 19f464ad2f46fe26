"""Rounding decisions and the counter-based generator behind them.

A quantiser sees a value as ``floor code + fraction`` on its grid; rounding
decides whether the code goes up by one. Nearest-even looks at the fraction
alone, stochastic rounding compares it with random bits that depend only on the
key and on where the element sits in the operand, never on tiles or devices.
"""

import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fp4jax import _jax
from fp4jax import errors

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SITE_TAG = 0x66703464  # "fp4d": keeps site keys apart from element bits


def _multiply(word, multiplier):
  """The high and low 32 bits of uint32 products, by halves of 16 bits.

  ``lax.mulhi`` does not pass through XLA's partitioner (JAX 0.11.2, 0.12.0.1).
  """
  low, high = word & 0xFFFF, word >> 16
  m_low, m_high = multiplier & 0xFFFF, multiplier >> 16
  middle = high * m_low + (low * m_low >> 16)
  cross = low * m_high + (middle & 0xFFFF)
  top = high * m_high + (middle >> 16) + (cross >> 16)
  return top, word * multiplier


def philox4x32(counter, key):
  """Philox4x32-10.

  Args:
    counter: four uint32 arrays that broadcast against each other.
    key: uint32[2], or its two words.

  Returns:
    Four uint32 arrays of the broadcast shape.

  >>> [hex(w) for w in philox4x32((0, 0, 0, 0), (0, 0))]
  ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']

  References:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
  """
  words = _philox4x32(counter, key)
  return tuple(words[..., i] for i in range(4))


def _philox4x32(counter, key):
  """The four words of each counter, [..., 4].

  Where quantisers are compiled apart, by the smallest program: a loop over one
  array. Else by the fastest: four arrays, which a GPU holds in registers.
  """
  counter = [jnp.asarray(word, jnp.uint32) for word in counter]
  c0, c1, c2, c3 = jnp.broadcast_arrays(*counter)
  if not _jax.compiles_units():
    for i in range(_ROUNDS):
      k0, k1 = (
        jnp.asarray(word, jnp.uint32) + jnp.uint32(weyl * i & 0xFFFFFFFF)
        for word, weyl in zip(key, _WEYL, strict=True)
      )
      high0, low0 = _multiply(c0, jnp.uint32(_MULTIPLIERS[0]))
      high1, low1 = _multiply(c2, jnp.uint32(_MULTIPLIERS[1]))
      c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return jnp.stack([c0, c1, c2, c3], -1)
  if isinstance(key, tuple):
    key = jnp.stack([jnp.asarray(word, jnp.uint32) for word in key])
  place = lax.broadcasted_iota(jnp.uint32, (4, *c0.shape), 0)
  odd = jnp.where(place == 2, c1, c3)
  words = jnp.where(place == 0, c0, jnp.where(place == 1, c2, odd))

  def one_round(i, words):
    return _round(words, key, i)

  start, stop = jnp.uint32(0), jnp.uint32(_ROUNDS)
  words = lax.fori_loop(start, stop, one_round, words)
  words = jnp.moveaxis(words.reshape(2, 2, *c0.shape), (1, 0), (-2, -1))
  return words.reshape(*c0.shape, 4)


@_jax.compiled_once
def _round(words, key, i):
  """One round of the words 0, 2, 1 and 3, [4, ...]."""

  def pair(words):
    words = jnp.asarray(words, jnp.uint32)
    return words.reshape(2, *(1,) * (rest.ndim - 1))

  even, rest = words[:2], words[2:]
  high, low = _multiply(even, pair(_MULTIPLIERS))
  mixed = high[::-1] ^ rest ^ (pair(key) + pair(_WEYL) * i)
  return jnp.concatenate([mixed, low[::-1]])


def key_words(key) -> jax.Array:
  """The uint32[2] that a typed or raw PRNG key of any generator stands for."""
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
    return key
  return jnp.stack(philox4x32(tuple(key), (0, 0))[:2])


def site_keys(key, sites, operands) -> jax.Array:
  """uint32[..., 2] key words of sites and operands (integer arrays)."""
  words = philox4x32((sites, operands, 0, _SITE_TAG), key_words(key))
  return jnp.stack(words[:2], -1)


class Streams(NamedTuple):
  """The random streams of the operands of one site.

  Attributes:
    words: uint32[sites, operands, 2] key words.
    site: uint32[], which one.
    loop: uint32[], the iterations of the loops around, counted as one number.
  """

  words: jax.Array
  site: jax.Array
  loop: jax.Array

  def of(self, operand: int) -> jax.Array:
    """The uint32[3] stream (two key words, loop counter) of one operand."""
    return _stream(*self, jnp.uint32(operand))


@_jax.compiled_once
def _stream(words, site, loop, operand):
  """``Streams.of``, one compilation for all sites."""
  start = (site, operand, jnp.uint32(0))
  return jnp.append(lax.dynamic_slice(words, start, (1, 1, 2)), loop)


def site_stream(key, site: int = 0, operand: int = 0, loop=0) -> jax.Array:
  """The uint32[3] stream (two key words, loop counter) of one operand."""
  words = site_keys(key, jnp.uint32(site), jnp.uint32(operand))
  return jnp.append(words, jnp.asarray(loop, jnp.uint32))


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
  random = _random_groups(
    stream,
    jnp.uint32(rows),
    jnp.uint32(groups),
    count=math.prod((*batch, rows, groups)),
    batched=bool(batch),
    bits=bits,
  )
  random = random.reshape(*batch, rows, groups * lanes)
  return random[..., :k].astype(jnp.uint32)


@_jax.compiled_once
def _random_groups(stream, rows, groups, *, count, batched, bits):
  """[count, 128 / bits] random bits: a Philox counter for each group.

  Groups are numbered through, so that operands of as many are one compilation.
  """
  index = lax.iota(jnp.uint32, count)
  row = index // groups
  group = index - row * groups
  element = jnp.uint32(0)
  if batched:
    element = row // rows
    row = row - element * rows
  counter = group, row, element, stream[2]
  words = _philox4x32(counter, stream[:2])
  halves = jnp.uint16 if bits == 16 else jnp.uint8
  return lax.bitcast_convert_type(words, halves).reshape(count, 128 // bits)


def rotation_bits(stream):
  """uint32[128] of 0 and 1, of a counter that no element of an operand has."""
  last = jnp.uint32(0xFFFFFFFF)
  words = jnp.stack(philox4x32((last, last, last, stream[2]), stream[:2]))
  places = jnp.arange(32, dtype=jnp.uint32)
  return (words[:, None] >> places & 1).reshape(128)


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
