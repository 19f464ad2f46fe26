"""Maxima, tensor scales and block scales, and their degenerate inputs.

Scales are compared bit for bit with the oracle or with a value worked out
from the page; where a decoded value is compared, the bound counts roundings.
"""

import functools

import jax
from jax.extend.core import Literal
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import scaling
from tests import oracle

SIX_SCALES = (
  fp4jax.Operand(),
  fp4jax.Operand(block=(16, 16)),
  fp4jax.Operand(four_over_six=True),
  fp4jax.Operand(format="nvfp4_fp8_exact", four_over_six=True),
  fp4jax.Operand(format="nvfp4_fp8_exact", rounding="sr"),
  fp4jax.Operand(format="mxfp4", block=(1, 32)),
)
FP8 = (
  fp4jax.Operand(format="fp8_e4m3"),
  fp4jax.Operand(format="fp8_e5m2"),
)
STREAM = jnp.array([1, 2, 3], jnp.uint32)


def quantize(x, operand):
  """Unpacked, with a stream where the operand needs one."""
  stream = STREAM if operand.rounding == "sr" else None
  return fp4jax.quantize_array(jnp.asarray(x), operand, stream, packed=False)


def options(operand):
  """What `oracle.quantize` calls the fields of an operand."""
  return {
    "fmt": operand.format,
    "block": operand.block,
    "rounding": operand.rounding,
    "four_over_six": operand.four_over_six,
  }


def nvfp4_dot(x, w):
  contract = (((x.ndim - 1,), (0,)), ((), ()))
  return fp4jax.dot(
    x, w, contract, recipe=fp4jax.recipes.nvfp4(), key=jax.random.key(0)
  )


@jax.jit
def forward_and_gradients(x, w, g):
  y, vjp = jax.vjp(nvfp4_dot, x, w)
  return y, *vjp(g)


def finite_scales(q):
  scales = [np.asarray(q.tensor_scale)]
  if q.scales is not None:
    fmt = "e8m0" if q.format.startswith("mx") else "e4m3"
    scales.append(np.asarray(scaling.decode_block_scale(q.scales, fmt)))
  return all(np.isfinite(scale).all() for scale in scales)


def divide_coarsely(a, b, ulps):
  """The corrected quotient, where the device's is wrong by `ulps`."""
  jaxpr = jax.make_jaxpr(scaling.corrected_quotient)(a, b).jaxpr
  values = dict(zip(jaxpr.invars, (a, b), strict=True))

  def read(atom):
    return atom.val if isinstance(atom, Literal) else values[atom]

  for equation in jaxpr.eqns:
    inputs = [read(atom) for atom in equation.invars]
    if equation.primitive.name == "div":
      outputs = ((inputs[0] / inputs[1]).view(np.int32) + ulps).view(np.float32)
    else:
      outputs = equation.primitive.bind(*inputs, **equation.params)
    if not equation.primitive.multiple_results:
      outputs = [outputs]
    values.update(zip(equation.outvars, outputs, strict=True))
  return read(jaxpr.outvars[0])


def test_divide():
  """The quotient of scales is IEEE's, also where the device's is wrong by two
  units in the last place, as XLA's on GPUs: random pairs over the range of
  scales, every 8-bit mantissa divided by every other, quotients next to 1."""
  random = np.random.default_rng(0)
  a, b = np.exp2(random.uniform(-60, 60, (2, 50000))).astype(np.float32)
  short = np.arange(128, 256, dtype=np.float32)
  one = np.nextafter(np.float32(1), np.array([0, 2], np.float32))
  a = np.concatenate([a, np.repeat(short, 128), np.ones(2), one, one])
  b = np.concatenate([b, np.tile(short, 128), one, np.ones(2), one[::-1]])
  a, b = (np.tile(x.astype(np.float32), (5, 1)) for x in (a, b))
  for divide in (scaling.divide, scaling.corrected_quotient):
    oracle.same_bits(jax.jit(divide)(a, b), a / b)
  ulps = np.arange(-2, 3, dtype=np.int32)[:, None]
  oracle.same_bits(divide_coarsely(a, b, ulps), a / b)


@pytest.mark.parametrize(
  "operand, dtype",
  [(operand, jnp.float32) for operand in SIX_SCALES + FP8]
  + [(SIX_SCALES[0], jnp.bfloat16), (FP8[0], jnp.bfloat16)],
  ids=str,
)
def test_below_the_threshold_is_zero(operand, dtype):
  """An operand or a block whose amax is below 2^-100 has codes 0 (+0 for
  negative elements too) and scale 0, the operand a tensor scale of 1; at
  2^-100 it has codes. Negative data, the amax one ulp on either side."""
  edge = 2.0**-100
  below = edge * (1 - float(jnp.finfo(dtype).eps) / 2)
  k = 32
  x = np.full((3, 32, 2 * k), -edge, np.float64)
  x[1] = -below
  x[2, :, :k] = -below
  x = jnp.asarray(x, dtype)
  assert float(-x[1, 0, 0]) == below
  q = quantize(x, operand)
  codes = np.asarray(q.codes)
  assert codes[0].all() and not codes[1].any()
  assert float(q.tensor_scale[1]) == 1
  assert codes[2, :, k:].all()
  if q.scales is not None:
    scales = np.asarray(q.scales)
    half = scales.shape[-1] // 2
    assert scales[0].all() and not scales[1].any()
    assert not codes[2, :, :k].any()
    assert not scales[2, :, :half].any() and scales[2, :, half:].all()
  values = np.asarray(x.astype(jnp.float32))
  stream = np.asarray(STREAM)
  expected = oracle.quantize(values, stream=stream, **options(operand))
  oracle.same_bits(codes, expected.codes)


@pytest.mark.parametrize("rounding", ["rne", "sr"])
@pytest.mark.parametrize("scale", ["e4m3", "restricted"])
def test_round_scale(scale, rounding):
  """E4M3 to nearest even; restricted to nearest with midpoints to the larger,
  or up for SR operands: at, just below and just above every E4M3 number and
  every midpoint of both grids, and on a log-uniform sweep to scale_max."""
  fmt, largest = ("nvfp4", 448) if scale == "e4m3" else ("nvfp4_fp8_exact", 96)
  points = [oracle.grid("E4M3"), oracle.RESTRICTED]
  points += [(p[1:] + p[:-1]) / 2 for p in points]
  points = np.concatenate(points).astype(np.float32)
  sweep = np.exp2(np.random.default_rng(0).uniform(-14, 9, 20000))
  v = np.concatenate(
    [
      points,
      np.nextafter(points, np.float32(0)),
      np.nextafter(points, np.float32(np.inf)),
      sweep.astype(np.float32),
      [np.float32(1e-30), np.float32(2.0**-126)],
    ]
  )
  v = np.minimum(oracle.flush(v), np.float32(largest))
  expected = oracle.encode(oracle.round_scale(v, fmt, rounding), "E4M3")
  encode = jax.jit(scaling.encode_block_scale, static_argnums=(1, 2))
  oracle.same_bits(encode(v, scale, rounding), expected)


def test_restricted_products_are_e4m3():
  """By exhaustion: every E2M1 code times every restricted scale is an E4M3
  number of at most 384; for the scales 80 and 96, which only amax→4 blocks
  have, every code up to 4. 1.75 and 1.125 times a power have no such luck."""
  e4m3 = oracle.grid("E4M3")
  for scale in oracle.RESTRICTED:
    assert scale in e4m3
    limit = 4 if scale > 64 else 6
    codes = oracle.grid("E2M1")
    products = codes[codes <= limit] * scale
    assert np.isin(products, e4m3).all(), scale
    assert products.max() <= 384
  others = np.setdiff1d(
    e4m3[(e4m3 >= 2.0**-4) & (e4m3 <= 64)], oracle.RESTRICTED
  )
  for scale in others:
    assert not np.isin(oracle.grid("E2M1") * scale, e4m3).all(), scale


def test_products_are_exact_in_bf16():
  """By exhaustion: code * block scale of all 16 codes and all 127 finite E4M3
  scales survives BF16, in float64 and as the library decodes it."""
  scales = np.arange(127, dtype=np.uint8)
  codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
  exact = oracle.decode(codes, "E2M1") * oracle.decode(scales, "E4M3")[:, None]
  oracle.same_bits(oracle.round_bf16(exact).astype(np.float64), exact)
  q = fp4jax.BlockScaled(
    codes=jnp.asarray(codes),
    scales=jnp.asarray(scales[:, None]),
    tensor_scale=jnp.float32(1),
    format="nvfp4",
    block=(1, 16),
    shape=(127, 16),
    axis=-1,
    dtype=jnp.float32,
    packed=False,
  )
  decoded = q.decode()
  assert decoded.dtype == jnp.bfloat16
  oracle.same_bits(np.asarray(decoded).astype(np.float64), exact)


def test_a01_zeros():
  """All-zero operands: tensor scale 1 in every format, all codes 0, output 0,
  both gradients exactly 0; a ReLU that is dead everywhere included."""
  for operand in SIX_SCALES + FP8:
    q = quantize(jnp.zeros((4, 32), jnp.bfloat16), operand)
    assert float(q.tensor_scale) == 1
    assert not np.asarray(q.codes).any()
    assert q.scales is None or not np.asarray(q.scales).any()
  x = jax.nn.relu(-jnp.ones((4, 32), jnp.bfloat16))
  w = jnp.ones((32, 16), jnp.bfloat16)
  y, dx, dw = forward_and_gradients(x, w, jnp.ones((4, 16), jnp.bfloat16))
  assert not np.asarray(y, np.float32).any()
  assert not np.asarray(dw, np.float32).any()
  assert (np.asarray(dx, np.float32) == 16).all()  # 16 terms of 1 * 1
  y, dx, dw = forward_and_gradients(
    jnp.ones_like(x), w, jnp.zeros((4, 16), jnp.bfloat16)
  )
  assert not np.asarray(dx, np.float32).any()
  assert not np.asarray(dw, np.float32).any()


@pytest.mark.parametrize("operand", SIX_SCALES + FP8, ids=str)
def test_a03_tiny_operands_stay_finite(operand):
  """amax from 1e-45 to 1e-25, by decades, constant and normal data: finite
  scales, and |decoded - x| <= amax. Below 2^-100 everything is zero."""
  amax = 10.0 ** np.arange(-45, -24)
  noise = np.random.default_rng(0).standard_normal((16, 32))
  noise /= np.abs(noise).max()
  x = amax[:, None, None] * np.stack([np.ones((16, 32)), noise])[:, None]
  x = x.astype(np.float32)
  q = quantize(x, operand)
  assert finite_scales(q)
  decoded = np.asarray(q.dequantize(), np.float64)
  largest = np.abs(x).max((-2, -1), keepdims=True)
  assert (np.abs(decoded - x) <= largest).all()
  alive = np.broadcast_to(largest >= 2.0**-100, x.shape)
  assert not decoded[~alive].any()
  assert decoded[0][alive[0]].all()


@pytest.mark.parametrize("operand", SIX_SCALES[:4], ids=str)
def test_a09_a_huge_element_survives(operand):
  """The largest element of an operand decodes to itself, at any magnitude.

  decoded = f32(6 * scale_max * S_dec), S_dec = f32(1 / f32(T / amax)): three
  roundings of 2^-24 each. The other elements are below amax / 50.
  """
  amax = np.array([1e-30, 1e-3, 1, 5000, 1e6, 1e30], np.float32)
  x = np.tile(np.random.default_rng(0).uniform(0, 0.02, (1, 16)), (6, 1, 1))
  x[:, 0, 5] = 1
  x = x.astype(np.float32) * amax[:, None, None]
  q = quantize(x, operand)
  decoded = np.asarray(q.dequantize(), np.float64)[:, 0, 5]
  assert np.abs(decoded / x[:, 0, 5] - 1).max() <= 3.01 * 2.0**-24
  if operand == fp4jax.Operand():
    assert (np.asarray(q.scales) == 0x7E).all()  # 448
    assert (np.asarray(q.codes)[:, 0, 5] == 7).all()


@pytest.mark.parametrize("operand", SIX_SCALES + FP8, ids=str)
def test_a11_powers_of_two_change_no_byte(operand):
  """quantize(x * 2^k), k = -40..40: the same codes; the same block scales and
  a tensor scale times 2^k, or (MX) block scales times 2^k. The block of the
  amax has the format's largest scale: nothing of E4M3's range is wasted."""
  k = np.arange(-40, 41)
  x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
  largest = np.unravel_index(np.abs(x).argmax(), x.shape)
  stack = x * np.exp2(k)[:, None, None].astype(np.float32)
  # vmap, not a batch: batch elements would draw different bits.
  q = jax.vmap(functools.partial(quantize, operand=operand))(stack)
  codes = np.asarray(q.codes)
  tensor_scale = np.asarray(q.tensor_scale)
  np.testing.assert_array_equal(codes, np.broadcast_to(codes[0], codes.shape))
  if operand.format.startswith("mx"):
    scales = np.asarray(q.scales).astype(int) - k[:, None, None]
    np.testing.assert_array_equal(tensor_scale, 1)
  else:
    np.testing.assert_array_equal(tensor_scale, tensor_scale[40] * np.exp2(k))
    if operand in FP8:
      return
    scales = np.asarray(q.scales)
    top = {"nvfp4": 448, "nvfp4_fp8_exact": 64}[operand.format]
    if operand.four_over_six:
      top = {448: (256, 384), 64: (64, 96)}[top]
    rows, columns = operand.block
    block = scales[40, largest[0] // rows, largest[1] // columns]
    assert oracle.decode(block, "E4M3") in np.atleast_1d(top)
  np.testing.assert_array_equal(
    scales, np.broadcast_to(scales[0], scales.shape)
  )


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(1, 16), (3, 40), (48, 96), (16, 4096)])
def test_a17_one_bad_element_marks_the_operand(shape, bad):
  """NaN or Inf anywhere: tensor scale NaN, all scales and codes 0; a finite
  batch element beside it is untouched.

  Sizes matter: XLA's CPU maximum of thousands of floats loses a NaN.
  """
  size = shape[0] * shape[1]
  places = sorted({0, 1, size // 3, size // 2, size - 2, size - 1})
  x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  x = np.tile(x, (len(places) + 1, 1, 1))
  for i, place in enumerate(places):
    x[i].flat[place] = bad
  for operand in (fp4jax.Operand(), fp4jax.Operand(format="fp8_e5m2")):
    q = quantize(x, operand)
    scale = np.asarray(q.tensor_scale)
    assert np.isnan(scale[:-1]).all() and np.isfinite(scale[-1])
    assert not np.asarray(q.codes)[:-1].any()
    assert np.asarray(q.codes)[-1].any()
    assert q.scales is None or not np.asarray(q.scales)[:-1].any()
    values = np.asarray(q.dequantize())
    assert np.isnan(values[:-1]).all() and np.isfinite(values[-1]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a17_non_finite_reaches_every_output(bad):
  """One NaN or Inf in x makes y and dw NaN everywhere; in w, y and dx; in g,
  dx and dw. What does not depend on it stays finite."""
  random = np.random.default_rng(0)
  arrays = [
    random.standard_normal(s).astype(np.float32)
    for s in ((48, 96), (96, 64), (48, 64))
  ]
  spoils = ({0, 2}, {0, 1}, {1, 2})
  for which, spoiled in enumerate(spoils):
    inputs = [array.copy() for array in arrays]
    inputs[which][17, 23] = bad
    for i, output in enumerate(forward_and_gradients(*inputs)):
      expected = np.isnan if i in spoiled else np.isfinite
      assert expected(np.asarray(output)).all(), (which, i)


def test_b03_empty_operands():
  """amax of nothing is 0: tensor scale 1, no codes; a contraction of length 0
  is zeros, and its gradients are empty."""
  for shape in ((4, 0), (0, 16), (2, 0, 0)):
    for operand in (SIX_SCALES[1], SIX_SCALES[4]):
      q = quantize(jnp.zeros(shape), operand)
      assert q.tensor_scale.shape == shape[:-2]
      assert (np.asarray(q.tensor_scale) == 1).all()
      assert q.codes.size == 0
      assert q.dequantize().shape == shape
  y, dx, dw = forward_and_gradients(
    jnp.zeros((4, 0)), jnp.zeros((0, 8)), jnp.ones((4, 8))
  )
  oracle.same_bits(y, np.zeros((4, 8), np.float32))
  assert dx.shape == (4, 0) and dw.shape == (0, 8)
