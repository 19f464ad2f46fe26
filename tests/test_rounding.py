"""Stochastic rounding: the generator, where its bits go, and its statistics.

Bits and rounding decisions are compared exactly with the oracle. Statistical
tests have fixed keys; their bounds are 4.5 to 5 standard errors of what is
counted, and say of how much.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import formats
from fp4jax import rounding
from tests import oracle

SR = fp4jax.Operand(rounding="sr")
STREAM = np.array([0x243F6A88, 0x85A308D3, 7], np.uint32)


@pytest.mark.parametrize("generate", [rounding.philox4x32, oracle.philox4x32])
def test_philox_known_answers(generate):
  """Random123's published vectors of Philox4x32-10 (kat_vectors)."""
  ones = 0xFFFFFFFF
  vectors = {
    ((0, 0, 0, 0), (0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ((ones,) * 4, (ones,) * 2): "408f276d 41c83b0e a20bc7c6 6d5451fd",
    (
      (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
      (0xA4093822, 0x299F31D0),
    ): "d16cfe09 94fdcceb 5001e420 24126ea1",
  }
  for (counter, key), answer in vectors.items():
    counter = tuple(np.uint32(word) for word in counter)
    key = tuple(np.uint32(word) for word in key)
    words = " ".join(f"{int(word):08x}" for word in generate(counter, key))
    assert words == answer


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("shape", [(3, 37), (2, 5, 16), (2, 3, 4, 33), (4, 0)])
def test_random_bits(bits, shape):
  """Element [batch, row, k] has the oracle's bits: counter (k // lanes, row,
  flattened batch, loop), lane k % lanes, little-endian."""
  drawn = rounding.random_bits(jnp.asarray(STREAM), shape, bits)
  expected = oracle.random_bits(STREAM, shape, bits).astype(np.uint32)
  oracle.same_bits(drawn, expected)


def test_random_bits_know_no_padding():
  """A longer row or one more row changes no bit of the others."""
  stream = jnp.asarray(STREAM)
  small = rounding.random_bits(stream, (2, 5, 37), 16)
  large = np.asarray(rounding.random_bits(stream, (3, 9, 64), 16))
  oracle.same_bits(small, large[:2, :5, :37])


def test_site_streams():
  """Streams of sites and operands are the oracle's, for raw and typed keys of
  two and of four words, and no two coincide."""
  seen = set()
  raw = np.array([1, 2, 0xFFFFFFFF, 4], np.uint32)
  for key in (raw[:2], raw):
    for site in (0, 5):
      for operand in (0, 2, 5):
        for loop in (0, 3):
          stream = rounding.site_stream(jnp.asarray(key), site, operand, loop)
          expected = oracle.site_stream(key, site, operand, loop)
          oracle.same_bits(stream, np.array(expected, np.uint32))
          seen.add(expected)
  assert len(seen) == 2 * 2 * 3 * 2
  for name in ("threefry2x32", "rbg"):
    typed = jax.random.key(11, impl=name)
    data = np.asarray(jax.random.key_data(typed))
    expected = np.array(oracle.site_stream(data, 1, 5), np.uint32)
    oracle.same_bits(rounding.site_stream(typed, 1, 5), expected)


@pytest.mark.parametrize("name", ["E2M1", "E4M3", "E5M2"])
@pytest.mark.parametrize("sr_bits", [16, 8])
def test_encode_stochastic(name, sr_bits):
  """Codes equal the oracle's for values over the whole grid, both signs, and
  bits that include the two ends."""
  random = np.random.default_rng(1)
  size = 50000
  largest = oracle.ELEMENTS[name][3]
  x = np.exp2(random.uniform(-18, np.log2(largest) + 0.1, size))
  x = (x * random.choice([-1, 1], size)).astype(np.float32)
  x[:4] = [0, -0.0, largest, -largest]
  bits = random.integers(0, 2**sr_bits, size, np.uint32)
  bits[::7], bits[1::7] = 0, 2**sr_bits - 1
  element = getattr(formats, name)
  encode = jax.jit(formats.encode, static_argnums=(1, 3))
  codes = encode(x, element, jnp.asarray(bits), sr_bits)
  oracle.same_bits(codes, oracle.encode(x, name, bits, sr_bits))


@pytest.mark.parametrize("sr_bits", [16, 8])
def test_probability_by_exhaustion(sr_bits):
  """Over all values of the random bits, exactly fraction * 2^bits go up.

  Fractions j / 16 of the seven gaps of E2M1, both signs: the probability is
  exact, hence no tolerance.
  """
  points = oracle.grid("E2M1")
  fractions = np.arange(16) / 16
  x = points[:-1, None] + np.diff(points)[:, None] * fractions
  x = np.stack([x, -x]).astype(np.float32)
  count = 2**sr_bits
  bits = np.arange(count, dtype=np.uint32).reshape(-1, 1, 1, 1)
  shape = (count, *x.shape)

  @jax.jit
  def magnitudes(x, bits):
    bits = jnp.broadcast_to(bits, shape)
    codes = formats.encode(
      jnp.broadcast_to(x, shape), formats.E2M1, bits, sr_bits
    )
    return (codes & 7).astype(jnp.int32).sum(0)

  up = np.asarray(magnitudes(x, bits)) - count * np.arange(7)[:, None]
  np.testing.assert_array_equal(up, np.broadcast_to(fractions * count, x.shape))


def gap_operand(rows):
  """An operand whose scaled values are known: S_enc = 1 (amax 2688), every
  block scale of the other rows is 1 (block amax 6), and its other elements
  run through fractions of the seven gaps, both signs.

  Returns the operand [rows + 1, 240], and of each of its columns: the fraction
  of the gap, the index below; columns of block maxima have fraction 0.
  """
  points = oracle.grid("E2M1")
  fractions = np.append((np.arange(14) + 1) / 16, [0.1, 0.9])
  values = points[:-1, None] + np.diff(points)[:, None] * fractions
  values = values.astype(np.float32)
  below = np.broadcast_to(np.arange(7)[:, None], values.shape)
  fractions = (values - points[below]) / np.diff(points)[below]
  values = np.append(values, -values)

  def columns(top, inner):
    rest = np.append(inner, [0]).reshape(15, 15)
    return np.insert(rest, 0, top, axis=1).ravel()

  x = np.tile(columns(6, values), (rows + 1, 1)).astype(np.float32)
  x[-1] = 2688
  gaps = columns(0, np.tile(fractions.ravel(), 2))
  return x, gaps, columns(7, np.tile(below.ravel(), 2))


@pytest.mark.parametrize("sr_bits", [16, 8])
def test_a15_probability_is_the_fraction(sr_bits):
  """P(up) = fraction of the gap, with the operand's own Philox bits.

  16 fractions in each of the 7 gaps, both signs, n = 4096 rows: z scores of
  the binomial counts within 4.5 (224 of them: expected exceedances .0015),
  and their mean square within 5 standard errors sqrt(2 / 224) of 1. With 8
  bits the probability is floor(256 f) / 256.
  """
  n = 4096
  x, fraction, below = gap_operand(n)
  operand = fp4jax.Operand(rounding="sr", sr_bits=sr_bits)
  q = fp4jax.quantize_array(x, operand, jnp.asarray(STREAM), packed=False)
  assert float(q.tensor_scale) == 1
  assert (np.asarray(q.scales)[:-1] == 0x38).all()  # E4M3's 1.0
  codes = np.asarray(q.codes)[:-1]
  assert (codes >> 3 == np.signbit(x[:-1])).all()
  up = (codes & 7).astype(int) - below
  assert set(np.unique(up)) == {0, 1}
  probability = fraction
  if sr_bits == 8:
    probability = np.floor(fraction * 256) / 256
  counts = up.sum(0)
  undecided = probability > 0
  assert undecided.sum() == 224
  assert (counts[~undecided] == 0).all()
  p = probability[undecided]
  z = (counts[undecided] - n * p) / np.sqrt(n * p * (1 - p))
  assert np.abs(z).max() < 4.5
  assert abs((z**2).mean() - 1) < 5 * np.sqrt(2 / 224)


def test_e01_decisions_are_independent():
  """Round-up decisions of equal data do not repeat: between rows, batch
  elements, sites, the dgrad and the wgrad copy, iterations and keys.

  n halves: correlations are N(0, 1 / n), bound 5 / sqrt(n); so about half of
  the decisions differ.
  """
  rows, columns = 32, 2048
  x = np.full((2, rows, columns), 2.5, np.float32)
  x[:, :, ::16] = 6
  half = np.arange(columns) % 16 != 0

  def decisions(key, site, operand, loop):
    stream = rounding.site_stream(jax.random.key(key), site, operand, loop)
    q = fp4jax.quantize_array(x, SR, stream, packed=False)
    up = np.asarray(q.codes)[:, :, half] - 4.0
    assert set(np.unique(up)) == {0, 1}
    return 2 * up - 1

  base = decisions(0, 0, 2, 0)
  np.testing.assert_array_equal(base, decisions(0, 0, 2, 0))
  flat = base.reshape(2 * rows, -1)
  n = flat.shape[1]
  correlation = flat @ flat.T / n - np.eye(2 * rows)
  assert np.abs(correlation).max() < 5 / np.sqrt(n)
  neighbours = (flat[:, 1:] * flat[:, :-1]).mean()
  assert abs(neighbours) < 5 / np.sqrt(base.size)
  for other in ((0, 1, 2, 0), (0, 0, 5, 0), (0, 0, 2, 1), (1, 0, 2, 0)):
    same = (base * decisions(*other)).mean()
    assert abs(same) < 5 / np.sqrt(base.size), other


def test_stochastic_rounding_is_unbiased():
  """The mean of 4096 roundings of a value is the value.

  Scale guard 16/17, so that nothing saturates: the top element is at most
  6 * 16/17 * 17/16 after the scale's rounding. z scores of 240 column means
  within 4.5, the standard error at least that of one count of the smallest
  gap; the 16-bit probability is off by at most 2^-17, far below 1 / 4096.
  """
  n = 4096
  row = np.random.default_rng(3).standard_normal(240).astype(np.float32)
  operand = fp4jax.Operand(rounding="sr", scale_guard=16 / 17)
  x = np.tile(row, (n, 1))
  q = fp4jax.quantize_array(x, operand, jnp.asarray(STREAM))
  decoded = np.asarray(q.dequantize(), np.float64)
  gap = 0.5 * np.abs(row).reshape(15, 16).max(1, keepdims=True) / 6
  spread = np.maximum(decoded.reshape(n, 15, 16).std(0), gap / np.sqrt(n))
  error = (decoded.mean(0) - row).reshape(15, 16)
  assert np.abs(error / spread * np.sqrt(n)).max() < 4.5
