"""The random Hadamard transform: bits, orthogonality, cancellation.

Bits equal the oracle's butterfly. Against a float64 matrix product the bound
counts roundings: log2(size) FP32 additions on sums of at most size terms, and
one BF16 rounding of 2^-8 relative (half an ulp of 8 significant bits).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import hadamard
from tests import oracle

SIGNS = 0xD7E8
rht = jax.jit(hadamard.rht, static_argnums=1)


def matrix(size=16):
  """diag(s) H / sqrt(size), float64, Sylvester order."""
  h = np.ones((1, 1))
  while len(h) < size:
    h = np.kron([[1, 1], [1, -1]], h)
  sign = [-1 if SIGNS >> (i % 16) & 1 else 1 for i in range(size)]
  return np.array(sign)[:, None] * h / np.sqrt(size)


@functools.cache
def data():
  """[7, 24, 80]: normal, wide range in a group, tiny, huge, and special."""
  random = np.random.default_rng(0)
  normal = random.standard_normal((24, 80))
  wide = np.exp2(random.uniform(-30, 30, (24, 80)))
  special = normal.copy()
  special[0, 3], special[1, 20], special[2, 40] = np.nan, np.inf, -np.inf
  special[3] = -0.0
  every_binade = np.exp2(random.uniform(-126, 120, (24, 80)))
  arrays = np.stack(
    [
      normal,
      wide * np.sign(normal),
      normal * 2.0**-124,  # differences are subnormal
      normal * 2.0**124,  # sums overflow
      special,
      every_binade * np.sign(normal),
      np.round(normal * 4) / 4,
    ]
  )
  return np.where(np.isinf(arrays), arrays, np.clip(arrays, -3e38, 3e38))


@pytest.mark.parametrize("size", [16, 2, 32, 128])
def test_bits(size):
  """Equal to the oracle, padded to whole groups; NaN and overflow included."""
  x = data()[:, :, :77].astype(np.float32)
  rotation = fp4jax.Rht(size=size, signs=SIGNS)
  y = oracle.flush(np.asarray(rht(x, rotation)))
  assert y.shape[-1] == -(-77 // size) * size
  oracle.same_bits(y, oracle.rht(x, size, SIGNS))


def test_eager_bf16_and_signs():
  """Eager equals jit; BF16 input equals its float32 value; bit i of signs
  negates element i alone: the group with x_i = 4 is a row of H, times -1."""
  x = jnp.asarray(data()[0], jnp.bfloat16)
  y = rht(x, fp4jax.Rht())
  oracle.same_bits(hadamard.rht(x, fp4jax.Rht()), np.asarray(y))
  oracle.same_bits(rht(x.astype(jnp.float32), fp4jax.Rht()), np.asarray(y))
  units = rht(4 * jnp.eye(16), fp4jax.Rht())
  oracle.same_bits(units, (4 * matrix()).astype(np.float32))
  assert matrix()[:, 0].tolist() == [
    -0.25 if SIGNS >> i & 1 else 0.25 for i in range(16)
  ]


@pytest.mark.parametrize("size", [16, 64])
def test_matrix_product(size):
  """|y - x D H / sqrt(size)| <= 2^-8 |y| + log2(size) 2^-24 sum |x| /
  sqrt(size) (+ one FP32 rounding of the scale, where it is no power of 2)."""
  x = data()[1, :, :64].astype(np.float32)
  y = np.asarray(rht(x, fp4jax.Rht(size=size)), np.float64)
  groups = x.astype(np.float64).reshape(24, -1, size)
  exact = (groups @ matrix(size)).reshape(y.shape)
  total = np.abs(groups).sum(-1, keepdims=True) / np.sqrt(size)
  total = np.broadcast_to(total, groups.shape).reshape(y.shape)
  bound = 2.0**-8 * np.abs(exact) + (np.log2(size) + 2) * 2.0**-24 * total
  assert (np.abs(y - exact) <= bound).all()
  bf16 = oracle.round_bf16(y)
  np.testing.assert_array_equal(y, bf16)


def test_rotation_cancels():
  """x y^T == rht(x) rht(y)^T up to the BF16 roundings of the rotated values:
  2 * 2^-8 a product to first order, hence 2^-7 * 1.01 sum |rx| |ry|."""
  random = np.random.default_rng(1)
  x, y = random.standard_normal((2, 24, 80)).astype(np.float32)
  rx = np.asarray(rht(x, fp4jax.Rht()), np.float64)
  ry = np.asarray(rht(y, fp4jax.Rht()), np.float64)
  exact = x.astype(np.float64) @ y.T.astype(np.float64)
  bound = 2.0**-7 * 1.01 * (np.abs(rx) @ np.abs(ry).T)
  assert (np.abs(rx @ ry.T - exact) <= bound).all()
  identity = np.kron(np.eye(5), matrix() @ matrix().T)
  np.testing.assert_allclose(identity, np.eye(80), atol=1e-15)


def test_quantised_operand_is_the_rotated_one():
  """An Rht operand's codes, scales and shape are those of the rotated, padded
  array, whose own amax sets the tensor scale."""
  x = data()[0, :, :77].astype(np.float32)
  operand = fp4jax.Operand(rht=fp4jax.Rht())
  q = fp4jax.quantize_array(x, operand, packed=False)
  rotated = oracle.rht(x)
  plain = oracle.quantize(rotated)
  assert q.shape == (24, 80)
  oracle.same_bits(q.codes, plain.codes)
  oracle.same_bits(q.scales, plain.scales)
  oracle.same_bits(q.tensor_scale, plain.tensor_scale)
  assert np.abs(rotated).max() != np.abs(x).max()
