"""Kernels, run by the Mosaic interpreter on a CPU.

Contract: codes, block scales, tensor scales and decoded values of the Pallas
backend are bit for bit those of the reference, whatever the shape, dtype,
rounding and data; what runs on a GPU is held to the same in test_gpu.py.
"""

import dataclasses
import math
from pathlib import Path
import re
import subprocess
import sys
import types

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import Operand
from fp4jax import Rht
from fp4jax import _jax
from fp4jax import backends
from fp4jax import block_scaled
from fp4jax import errors
from fp4jax import kernels
from fp4jax import policies
from fp4jax import recipes
from fp4jax import rounding
from fp4jax import scaling
from pallas_kernels import amax
from pallas_kernels import compat
from pallas_kernels import decode
from pallas_kernels import errors as block_errors
from pallas_kernels import matmul
from pallas_kernels import quantize
from pallas_kernels import registers

slow = pytest.mark.slow  # nightly: the same code, other numbers

OPERANDS = {
  "rne": Operand(),
  "sr": Operand(rounding="sr"),
  "sr8": Operand(rounding="sr", sr_bits=8),
  "guard": Operand(rounding="sr", scale_guard=16 / 17),
  "rht": Operand(rht=Rht()),
  "rht_signs_sr": Operand(rht=Rht(signs=0x1234), rounding="sr"),
  "four_over_six": Operand(four_over_six=True),
  "exact": Operand(format="nvfp4_fp8_exact", four_over_six=True),
  "exact_sr": Operand(format="nvfp4_fp8_exact", rounding="sr"),
}
NIGHTLY = "guard", "exact_sr", "sr", "rht", "four_over_six"
STREAM = rounding.site_stream(jax.random.key(3), 5, 2, 7)
MATMUL = (((1,), (0,)), ((), ()))


def operand_data(shape, dtype="float32", seed=0):
  """Heavy-tailed values with zeros of both signs, tiny and large blocks."""
  rng = np.random.default_rng(seed)
  x = rng.standard_t(3, shape) * np.exp2(rng.integers(-12, 4, shape))
  x[..., 0, :16], x[..., 1, :16] = 0.0, -0.0
  x[..., 2, :16] *= 1e-9
  x[..., 3, :16] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2  # ties
  return jnp.asarray(x, dtype)


def huge(shape):
  return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def product(
  lhs=(512, 512), rhs=(512, 512), contract=(-1, -1), dtype="bfloat16", **options
):
  """``matmul`` of zeros."""
  lhs, rhs = jnp.zeros(lhs, dtype), jnp.zeros(rhs, dtype)
  return matmul.matmul(lhs, rhs, contract=contract, **options)


def assert_same_bits(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape and got.dtype == want.dtype
  assert got.tobytes() == want.tobytes()


def check(x, rows=None, columns=None):
  """Compares every result of one call with the reference's."""
  requests = [
    operand and kernels.Request(operand, packed=True, decoded=jnp.bfloat16)
    for operand in (rows, columns)
  ]
  results = kernels.quantize(x, *requests, (STREAM, STREAM), interpret=True)
  for operand, axis, result in zip(
    (rows, columns), (-1, -2), results, strict=True
  ):
    if operand is None:
      assert result is None
      continue
    want = block_scaled.quantize_array(x, operand, STREAM, axis=axis)
    assert_same_bits(result.codes.codes, want.codes)
    assert_same_bits(result.codes.scales, want.scales)
    assert_same_bits(result.codes.tensor_scale, want.tensor_scale)
    assert_same_bits(result.tensor_scale, want.tensor_scale)
    assert jax.tree.structure(result.codes) == jax.tree.structure(want)
    values = want.decode()
    if axis == -2:
      values = jnp.swapaxes(values, -1, -2)
    assert_same_bits(result.decoded, values)
    assert_same_bits(
      kernels.decode(result.codes, interpret=True), want.decode()
    )


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=slow if name in NIGHTLY else ())
    for name in OPERANDS
  ],
)
def test_bits_of_both_directions(name):
  operand = OPERANDS[name]
  check(operand_data((64, 64), "bfloat16"), operand, operand)


@slow
@pytest.mark.parametrize("name", ["rht_signs_sr", "rne", "exact"])
def test_bits_of_float32(name):
  operand = OPERANDS[name]
  check(operand_data((32, 128)), Operand(rounding="sr"), operand)


@pytest.mark.parametrize(
  "shape",
  [
    pytest.param((50, 40), marks=slow),
    pytest.param((5, 272), marks=slow),
    (15, 250),
    pytest.param((130, 17), marks=slow),
  ],
)
def test_bits_of_any_size(shape):
  """Padded inside; padding touches neither amax nor the random bits."""
  x = operand_data(shape, "bfloat16")
  check(x, Operand(rounding="sr"), Operand(rht=Rht(), rounding="sr"))


def test_float16_is_read_exactly():
  check(operand_data((32, 64), "float16"), Operand(), Operand())


@pytest.mark.parametrize(
  "operand",
  [
    Operand(block=(16, 16)),
    pytest.param(Operand(block=(16, 16), four_over_six=True), marks=slow),
    Operand(format="nvfp4_fp8_exact", block=(16, 16), four_over_six=True),
  ],
  ids=["rne", "four_over_six", "exact"],
)
def test_bits_of_square_blocks(operand):
  """A block's sixteen rows share a scale, and 4/6's choice by their error."""
  check(operand_data((40, 50), "bfloat16"), operand)


@pytest.mark.parametrize("transposed", [False, True])
def test_near_ties_of_4_and_6_are_decided_alike(transposed):
  """Of a block whose errors differ by less than their sums' rounding.

  Added along columns first, they compare the other way round. A weight that
  stays [k, n] is not to be quantised otherwise than one that is [n, k].
  """
  tiles = np.load(Path(__file__).parent / "data" / "near_tie.npy")
  tiles = np.swapaxes(tiles, 1, 2) if transposed else tiles
  w = jnp.asarray(tiles.reshape(32, 16))
  operand = Operand(
    format="nvfp4_fp8_exact", block=(16, 16), four_over_six=True
  )
  one, other = (
    fp4jax.quantize_array(x, operand).dequantize() for x in (w, w.T)
  )
  assert np.any(one != other.T)
  outputs = [
    fp4jax.dot(
      jnp.eye(32),
      w,
      MATMUL,
      recipe=recipes.nvfp4_fp8_exact(),
      backend=backend,
    )
    for backend in ("reference", "pallas_interpret")
  ]
  assert_same_bits(*outputs)


@pytest.mark.parametrize(
  "name, value",
  [
    ("nan", np.nan),
    pytest.param("inf", -np.inf, marks=slow),
    ("zero", None),
    ("tiny", 1e-36),
    ("subnormal", 1e-41),
    pytest.param("huge", 1e37, marks=slow),
  ],
)
def test_bits_of_special_operands(name, value):
  x = np.array(operand_data((32, 128)))
  if name in ("nan", "inf"):
    x[7, 9] = value
  elif name == "zero":
    x = np.zeros_like(x)
  else:
    x = (x / np.abs(x).max() * value).astype(np.float32)
  check(jnp.asarray(x), Operand(), Operand(rht=Rht(), rounding="sr"))


@pytest.mark.parametrize(
  "value", [1e-41, pytest.param(1e-36, marks=slow), pytest.param(0, marks=slow)]
)
def test_bits_of_tiny_operands_on_the_restricted_grid(value):
  x = np.array(operand_data((32, 128)))
  x = (x / np.abs(x).max() * value).astype(np.float32)
  check(jnp.asarray(x), OPERANDS["exact_sr"])


@slow
def test_batch_elements_are_operands_of_their_own():
  x = (
    operand_data((3, 32, 64), "bfloat16")
    * jnp.array([1, 8, 64], "bfloat16")[:, None, None]
  )
  check(x, Operand(rounding="sr"), Operand(rounding="sr", rht=Rht()))


def test_vmap_and_scan():
  x = operand_data((2, 32, 128), "bfloat16")
  request = kernels.Request(Operand(), packed=True)

  def codes(x):
    return kernels.quantize(x, request, interpret=True)[0].codes.codes

  want = jnp.stack([block_scaled.quantize_array(v, Operand()).codes for v in x])
  assert_same_bits(jax.vmap(codes)(x), want)
  _, scanned = jax.lax.scan(lambda c, v: (c, codes(v)), 0, x)
  assert_same_bits(scanned, want)


@pytest.mark.parametrize("place", [(3, 5), (111, 250)])
def test_amax_of_programs_with_several_tiles(monkeypatch, place):
  """Two rounds of four tiles, wherever the largest element lies."""
  x = operand_data((112, 256), "bfloat16").at[place].set(-512)
  params = compat.interpret_params()
  want = amax.amax(x, signs=0xD7E8, interpret=params)
  monkeypatch.setattr(amax, "PROGRAMS", 2)
  got = amax.amax(x, signs=0xD7E8, interpret=params)
  assert got[0] == 512
  assert_same_bits(got[1], want[1])


@pytest.mark.parametrize("signs", [None, 0xD7E8])
@pytest.mark.parametrize("shape", [(16, 256), (96, 128), (320, 64)])
def test_amax_of_operand_and_rotation(signs, shape):
  x = operand_data(shape, "bfloat16")
  plain, rotated = amax.amax(
    x, signs=signs, interpret=compat.interpret_params()
  )
  assert_same_bits(plain, jnp.max(jnp.abs(x)).astype(jnp.float32))
  if signs is None:
    assert rotated is None
  else:
    q = block_scaled.quantize_array(x, Operand(rht=Rht()), axis=-2)
    want = 2688 / np.float64(rotated)
    np.testing.assert_allclose(1 / q.tensor_scale, want, rtol=1e-6)


def test_decode_to_e4m3_is_exact():
  """Products of codes and restricted scales are E4M3 numbers."""
  x = operand_data((32, 64))
  q = block_scaled.quantize_array(x, OPERANDS["exact"])
  values = decode.decode(
    q.codes,
    q.scales,
    dtype=jnp.float8_e4m3fn,
    interpret=compat.interpret_params(),
  )
  assert_same_bits(values.astype(jnp.float32), q.decode(jnp.float32))


def test_decoded_to_e4m3_is_exact():
  """Straight from the quantise kernel, for FP8 tensor cores."""
  x = operand_data((64, 64), "bfloat16")
  want = block_scaled.quantize_array(x, OPERANDS["exact"])
  scale = scaling.two_level_scale(
    jnp.max(jnp.abs(x)).astype(jnp.float32), OPERANDS["exact"]
  )
  smallest = jnp.float32(2.0**-100)
  scalars = [scale.per_block, scale.decode, scale.encode, smallest]
  config = quantize.Config(
    scale="restricted", scale_max=64.0, four_over_six=True
  )
  operand = quantize.Operand(
    config, jnp.stack(scalars), packed=False, decoded=jnp.float8_e4m3fn
  )
  (got,) = quantize.quantize(x, operand, None, compat.interpret_params())
  assert got.codes is None
  assert_same_bits(got.decoded.astype(jnp.float32), want.decode(jnp.float32))


def test_scales_in_the_order_of_blackwell():
  """Row r and block c of a tile lie at byte 16 (r % 32) + 4 (r / 32) + c."""
  scales = jnp.arange(200 * 6, dtype=jnp.uint32).reshape(200, 6) % 251
  tiles = np.asarray(quantize.tile_scales(scales.astype(jnp.uint8)))
  assert tiles.shape == (2, 2, 32, 16)
  flat = tiles.reshape(2, 2, 512)
  for r, c in ((0, 0), (33, 1), (127, 3), (128, 4), (199, 5)):
    place = 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
    assert flat[r // 128, c // 4, place] == scales[r, c]
  assert not flat[0, 1, 2:4].any() and not tiles[1, 0, 8:, 8:].any()
  x = operand_data((128, 64), "bfloat16")
  scalars = jnp.array([1.0, 1.0, 1.0, 2.0**-100], jnp.float32)
  plain, tiled = (
    quantize.quantize(
      x,
      quantize.Operand(quantize.Config(), scalars, tiled_scales=t),
      None,
      compat.interpret_params(),
    )[0]
    for t in (False, True)
  )
  assert_same_bits(tiled.scales, quantize.tile_scales(plain.scales))


def test_kernels_have_no_races(capfd):
  params = compat.interpret_params(detect_races=True)
  scalars = jnp.array([1.0, 1.0, 1.0, 2.0**-100], jnp.float32)
  stream = jnp.arange(6, dtype=jnp.uint32)
  x = operand_data((64, 128), "bfloat16")
  config = quantize.Config(rounding="sr", signs=0xD7E8)
  operand = quantize.Operand(config, scalars, stream, decoded=jnp.bfloat16)
  codes = block_scaled.quantize_array(x, Operand())
  six, tops = quantize.Config(four_over_six=True), jnp.ones((64, 8))
  for run in (
    lambda: quantize.quantize(x, operand, operand, params),
    lambda: amax.amax(x, signs=1, interpret=params),
    lambda: block_errors.errors(x, scalars, tops, six, interpret=params),
    lambda: decode.decode(codes.codes, codes.scales, interpret=params),
    lambda: multiplied(64, "m", params),
    lambda: multiplied(384, "n", params),
    lambda: multiplied(384, None, params),
  ):
    jax.block_until_ready(run())  # raises or prints, as JAX' version has it
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def multiplied(k, cluster, params):
  """A product by two programs, two tiles or four each."""
  config = matmul.Config(
    tile_n=128, stages=3, cluster=cluster, programs=2, width=1
  )
  lhs, rhs = (jnp.ones((size, k), jnp.bfloat16) for size in (512, 256))
  return matmul.matmul(lhs, rhs, config=config, interpret=params)


PARAMS = compat.interpret_params()
PRODUCTS = {  # contract, dtype of the operands and of the result, tiles
  "default": ((-1, -1), "bfloat16", "bfloat16", {}),
  "lhs_first": ((-2, -1), "bfloat16", "float32", {"cluster": None}),
  "rhs_first": ((-1, -2), "bfloat16", "bfloat16", {"minor": "n"}),
  "both_first": ((-2, -2), "bfloat16", "float32", {"cluster": "n"}),
  "columns": ((-2, -2), "bfloat16", "bfloat16", {"split": "n", "stages": 2}),
  "tall": ((-1, -1), "bfloat16", "float32", {"tile_m": 256, "tile_n": 128}),
  "deep": ((-1, -1), "bfloat16", "float32", {"tile_k": 192, "stages": 2}),
  "e4m3": ((-1, -1), "float8_e4m3fn", "bfloat16", {"tile_k": 128}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_small_integers_are_exact(name):
  """Bit for bit: their sums are float32 numbers in whatever order."""
  contract, dtype, result, options = PRODUCTS[name]
  scaled = name not in ("columns", "tall")
  rng = np.random.default_rng(0)
  a, b = (rng.integers(-4, 5, (size, 384)) for size in (512, 512))
  scales = np.array([1 / 3, 0.7], np.float32)
  want = (a @ b.T).astype(np.float32)
  if scaled:
    want = want * scales[0] * scales[1]
  lhs, rhs = (
    jnp.asarray(x if axis == -1 else x.T, dtype)
    for x, axis in zip((a, b), contract, strict=True)
  )
  options = {"tile_n": 128, "stages": 3, "programs": 4, "width": 2} | options
  got = matmul.matmul(
    lhs,
    rhs,
    jnp.asarray(scales) if scaled else None,
    contract=contract,
    dtype=result,
    config=matmul.Config(**options),
    interpret=PARAMS,
  )
  assert_same_bits(got, jnp.asarray(want, result))


def test_products_under_vmap():
  rng = np.random.default_rng(0)
  a, b = (rng.integers(-4, 5, (2, size, 64)) for size in (128, 256))
  got = jax.vmap(
    lambda lhs, rhs: matmul.matmul(
      lhs, rhs, dtype=jnp.float32, interpret=PARAMS
    )
  )(jnp.asarray(a, "bfloat16"), jnp.asarray(b, "bfloat16"))
  assert_same_bits(got, np.einsum("bmk,bnk->bmn", a, b).astype(np.float32))


@pytest.mark.parametrize("sizes", [(128, 64, 64), (384, 320, 128)])
def test_every_choice_of_tiles_fits(sizes):
  for dtype in ("bfloat16", "float8_e4m3fn"):
    m, n, k = (2 * s if dtype != "bfloat16" else s for s in sizes)
    lhs, rhs = huge((m, k)), huge((n, k))
    config = matmul.choose(m, n, k, dtype)
    for result in ("bfloat16", "float32"):
      arguments = lhs.shape, rhs.shape, (-1, -1), dtype, dtype, result
      assert matmul.supports(*arguments)
      assert matmul.refusal(*arguments, config) is None


RACE = """
import jax, jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from pallas_kernels import compat

def kernel(out_ref, shared):
  thread = jax.lax.axis_index("thread")
  shared[...] = jnp.full((128,), thread, jnp.int32)
  out_ref[...] = shared[...]

jax.block_until_ready(plgpu.kernel(
  kernel,
  out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
  scratch_types=[plgpu.SMEM((128,), jnp.int32)],
  grid=(1,),
  grid_names=("i",),
  num_threads=2,
  thread_name="thread",
  interpret=compat.interpret_params(detect_races=True),
)())
"""


def test_the_race_detector_finds_a_race():
  """In a process of its own: an exception spoils the interpreter's state."""
  done = subprocess.run(
    [sys.executable, "-c", RACE], capture_output=True, text=True
  )
  assert "RACE DETECTED" in done.stdout + done.stderr


@pytest.mark.parametrize(
  "call, words",
  [
    (lambda x, o: quantize.quantize(x, None, None), ["neither"]),
    (lambda x, o: quantize.quantize(x[:3], o, None), ["2048", "pad"]),
    (lambda x, o: quantize.quantize(x[:3], None, o), ["(64, 64)", "pad"]),
    (lambda x, o: quantize.quantize(x.astype(int), o, None), ["int32", "cast"]),
    (lambda x, o: amax.amax(x[:3]), ["(16, 256)", "pad"]),
    (lambda x, o: decode.decode(x[:3], x), ["1024", "pad"]),
    (lambda x, o: matmul.matmul(x, x), ["float32", "bfloat16", "cast"]),
    (lambda x, o: product((64, 128), (64, 128)), ["m=64", "128", "pad"]),
    (lambda x, o: product((128, 64), (64, 128)), ["k=64", "128"]),
    (lambda x, o: product((2, 128, 64), (64, 64)), ["[2, 128, 64]", "vmap"]),
    (
      lambda x, o: product((64, 128), (64, 64), (-2, -2), "float8_e4m3fn"),
      ["e4m3", "(-2, -2)", "transpose"],
    ),
    (
      lambda x, o: product(config=matmul.Config(stages=8)),
      ["stages=8", "shared memory", "choose"],
    ),
    (
      lambda x, o: product(config=matmul.Config(tile_k=32)),
      ["tile_k=32", "64 bytes", "128"],
    ),
    (
      lambda x, o: product(
        config=matmul.Config(tile_m=256, tile_n=256, stages=2)
      ),
      ["128 x 256", "16384", "smaller"],
    ),
    (
      lambda x, o: product(config=matmul.Config(part=(8, 64))),
      ["8 x 64", "64 rows"],
    ),
    (
      lambda x, o: product(config=matmul.Config(part=(64, 8))),
      ["64 x 8", "16 columns"],  # of BF16, 16 bytes have no pattern
    ),
    (lambda x, o: matmul.Config(minor="x"), ["minor='x'", "'m' or 'n'"]),
    (lambda x, o: matmul.Config(tile_m=0), ["tile_m has 0"]),
    (lambda x, o: matmul.Config(tile_k=64.0), ["tile_k has 64.0"]),
    (lambda x, o: matmul.Config(part=(64, -1)), ["part has -1"]),
    (
      lambda x, o: product(config=matmul.Config(tile_m=256, tile_n=512)),
      ["128 x 512", "256"],
    ),
    (lambda x, o: amax.amax(huge((64, 2**27))), ["2**26", "reference"]),
    (
      lambda x, o: quantize.quantize(huge((2**20, 2**15)), o, None),
      ["2**34", "divide"],
    ),
  ],
)
def test_what_kernels_cannot_take_is_refused(call, words):
  operand = quantize.Operand(quantize.Config(), jnp.ones(4))
  with pytest.raises(ValueError) as info:
    call(jnp.ones((64, 128)), operand)
  assert all(w in str(info.value) for w in words)


@pytest.mark.parametrize(
  "recipe, batch",
  [
    ("nvfp4", (2,)),
    pytest.param("nvfp4", (), marks=slow),
    pytest.param("nvfp4_fp8_exact", (), marks=slow),
    pytest.param("nvfp4_fp8_exact", (2,), marks=slow),
  ],
)
def test_dot_gives_the_numbers_of_the_reference(recipe, batch):
  """Operands have the same bits; only sums may run in another order."""
  m, k = 50, 40
  # Kernels keep a weight without a batch as [k, n], padded along n.
  n = 33 if batch else k
  rng = np.random.default_rng(1)
  x, w, g = (
    jnp.asarray(rng.standard_normal((*batch, *s)), jnp.float32)
    for s in ((m, k), (k, n), (m, n))
  )
  b = tuple(range(len(batch)))
  numbers = (((len(b) + 1,), (len(b),)), (b, b))
  results = []
  for backend in ("reference", "pallas_interpret"):

    def product(x, w, backend=backend):
      return fp4jax.dot(
        x,
        w,
        numbers,
        recipe=getattr(recipes, recipe)(),
        key=jax.random.key(7),
        backend=backend,
      )

    y, vjp = jax.vjp(jax.jit(product), x, w)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))
    results.append(([y, *vjp(g)], kept))
  (want, want_kept), (got, kept) = results
  assert kept == want_kept
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def products(x, w, g, recipe, backend):
  """``x @ w`` and the two gradients that the cotangent g gives."""

  def product(x, w):
    return fp4jax.dot(
      x,
      w,
      MATMUL,
      recipe=getattr(recipes, recipe)(),
      key=jax.random.key(7),
      backend=backend,
    )

  y, vjp = jax.vjp(product, x, w)
  return y, *vjp(g)


@pytest.mark.parametrize(
  "recipe, dtype",
  [
    pytest.param("nvfp4", "bfloat16", marks=slow),
    ("nvfp4_fp8_exact", "float8_e4m3fn"),
  ],
)
def test_dot_multiplies_by_a_kernel(monkeypatch, recipe, dtype):
  """Where tiles divide the sizes; operands of the exact recipe as E4M3."""
  x, w = operand_data((128, 128)), operand_data((128, 128), seed=1)
  multiply, seen = kernels.multiply, []

  def spy(lhs, rhs, *args, **options):
    seen.append({lhs.dtype.name, rhs.dtype.name})
    return multiply(lhs, rhs, *args, **options)

  monkeypatch.setattr(kernels, "multiply", spy)
  want, got = (
    products(x, w, x, recipe, backend)
    for backend in ("reference", "pallas_interpret")
  )
  assert seen == [{dtype}] * 3
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
  "multiplier",
  [
    pytest.param(name, marks=slow if i else ())
    for i, name in enumerate(kernels.PACKED)
  ],
)
@pytest.mark.parametrize(
  "recipe, sizes",
  [
    ("nvfp4", (50, 40, 33)),
    pytest.param("nvfp4", (128, 256, 128), marks=slow),
    pytest.param("nvfp4_fp8_exact", (50, 40, 33), marks=slow),
  ],
)
def test_dot_multiplies_packed_operands(monkeypatch, multiplier, recipe, sizes):
  """As on Blackwell: no operand is decoded, of any size."""
  m, k, n = sizes
  rng = np.random.default_rng(1)
  x, w, g = (
    jnp.asarray(rng.standard_normal(s), jnp.float32)
    for s in ((m, k), (k, n), (m, n))
  )
  want = products(x, w, g, recipe, "reference")
  monkeypatch.setattr(backends, "multiplier", lambda _: multiplier)
  monkeypatch.setattr(kernels, "decode", None)  # nobody calls it
  got = products(x, w, g, recipe, "pallas_interpret")
  for a, b in zip(got, want, strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_shards_are_refused_or_left_to_the_reference(monkeypatch):
  """A kernel sees one shard, whose amax is not the operand's."""
  mesh = jax.make_mesh(
    (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spec = jax.sharding.PartitionSpec
  x, w = operand_data((32, 64)), operand_data((64, 32), seed=1)

  def product(x, w, backend):
    recipe = recipes.nvfp4()
    return fp4jax.dot(x, w, MATMUL, recipe=recipe, backend=backend)

  def sharded(backend):
    return jax.shard_map(
      lambda x, w: product(x, w, backend),
      mesh=mesh,
      in_specs=(spec("data"), spec()),
      out_specs=spec("data"),
    )

  with pytest.raises(errors.UnsupportedError, match="shard_map over data"):
    sharded("pallas_interpret")(x, w)
  TestBackends().device(monkeypatch)  # one GPU, as the library sees it
  assert backends.check(recipes.nvfp4()).name == "pallas"
  np.testing.assert_array_equal(sharded(None)(x, w), product(x, w, "reference"))


def test_long_batches_are_launched_in_parts(monkeypatch):
  x = operand_data((3, 16, 64), "bfloat16")
  want = fp4jax.quantize_array(x, Operand(rounding="sr"), STREAM)
  monkeypatch.setattr(kernels, "_BATCH", 2)
  jax.clear_caches()
  request = kernels.Request(Operand(rounding="sr"), packed=True)
  got, _ = kernels.quantize(x, request, None, (STREAM, None), interpret=True)
  assert_same_bits(got.codes.codes, want.codes)
  values = kernels.decode(got.codes, interpret=True)
  assert_same_bits(values, want.decode())


@pytest.mark.parametrize("batch, most", [(4, 4), (2, 2), (1, 1), (6, 6)])
def test_long_vmaps_of_products_are_launched_in_parts(monkeypatch, batch, most):
  """By a product of jax.numpy in the kernel's place, which shows its batch."""

  def product(lhs, rhs, scales, **_):
    return scales[0] * (lhs @ rhs.T)

  monkeypatch.setattr(kernels.matmul_kernel, "matmul", product)
  monkeypatch.setattr(kernels, "_BATCH", batch)
  rng = np.random.default_rng(0)
  lhs, rhs = rng.standard_normal((3, 2, 8, 4)), rng.standard_normal((2, 8, 4))
  one = jnp.float32(1)

  def call(lhs, rhs):
    return kernels.multiply(lhs, rhs, (one, one), (-1, -1), jnp.float32)

  over = jax.vmap(jax.vmap(call), (0, None))
  np.testing.assert_allclose(
    over(lhs, rhs), lhs @ np.swapaxes(rhs, 1, 2), rtol=1e-5
  )
  text = str(jax.make_jaxpr(over)(lhs, rhs))
  shapes = re.findall(r"f32\[([\d,]+)\] = dot_general", text)
  sizes = [math.prod(map(int, shape.split(","))) // 64 for shape in shapes]
  assert max(sizes) == most


@slow
def test_long_vmaps_are_launched_in_parts(monkeypatch):
  """Operands under a user's vmap: elements 0 of batches of their own."""
  x = operand_data((3, 2, 16, 64), "bfloat16")
  sr = Operand(rounding="sr")
  request = kernels.Request(sr, packed=True)

  def quantised(x):
    stream = STREAM, None
    q, _ = kernels.quantize(x, request, None, stream, interpret=True)
    return q.codes, kernels.decode(q.codes, interpret=True)

  monkeypatch.setattr(kernels, "_BATCH", 5)
  jax.clear_caches()
  codes, values = jax.vmap(jax.vmap(quantised))(x)
  for i, j in np.ndindex(3, 2):
    want = fp4jax.quantize_array(x[i, j], sr, STREAM)
    assert_same_bits(codes.codes[i, j], want.codes)
    assert_same_bits(codes.scales[i, j], want.scales)
    assert_same_bits(values[i, j], want.decode())


@pytest.mark.parametrize(
  "shape, padded",
  [
    ((1, 1040), (1, 2048)),
    pytest.param((3, 16), (128, 16), marks=slow),
    pytest.param((4, 1040), (4, 1040), marks=slow),
  ],
)
def test_few_rows_are_not_padded_to_many(shape, padded):
  assert kernels._padded_shape(*shape, False) == padded
  x = operand_data((4, shape[1]), "bfloat16")
  check(x[: shape[0]], Operand(rounding="sr"))


@pytest.mark.parametrize(
  "shape",
  [
    (80, 64),
    pytest.param((80, 112), marks=slow),
    pytest.param((48, 144), marks=slow),
    pytest.param((16, 272), marks=slow),
    pytest.param((208, 80), marks=slow),
  ],
)
def test_sizes_of_whole_blocks_are_not_padded(shape):
  """Tiles at the edges overlap: no operand is copied to be padded."""
  sr, rotated = Operand(rounding="sr"), Operand(rht=Rht(), rounding="sr")
  x = operand_data(shape, "bfloat16")
  check(x, sr, rotated)
  requests = [kernels.Request(o, True, jnp.bfloat16) for o in (sr, rotated)]

  def quantised(x):
    streams = STREAM, STREAM
    results = kernels.quantize(x, *requests, streams, interpret=True)
    return [kernels.decode(r.codes, interpret=True) for r in results]

  assert " pad[" not in str(jax.make_jaxpr(quantised)(x))
  odd = jnp.zeros((shape[0], shape[1] + 1), x.dtype)
  assert " pad[" in str(jax.make_jaxpr(quantised)(odd))


def test_a_shard_draws_the_bits_of_its_place():
  """Rows and columns of a shard are told where the shard begins."""
  x = operand_data((80, 128), "bfloat16")
  config = quantize.Config(rounding="sr")
  scalars = jnp.array([448 / 36, 1 / 448, 448, 2.0**-100], jnp.float32)

  def codes(x, row, column):
    """Of the operand's rows, and of its columns."""
    operands = (
      quantize.Operand(
        config, scalars, jnp.array([5, 7, 3, 0, *place], jnp.uint32)
      )
      for place in ((row, column // 16), (column, row // 16))
    )
    both = quantize.quantize(x, *operands, compat.interpret_params())
    return [np.asarray(q.codes) for q in both]

  rows, columns = codes(x, 0, 0)
  got_rows, got_columns = codes(x[16:, 64:], 16, 64)
  assert_same_bits(got_rows, rows[16:, 32:])
  assert_same_bits(got_columns, columns[64:, 8:])


@slow
def test_x64_mode():
  with jax.enable_x64(True):
    x = jnp.asarray(operand_data((32, 64)), "float64")
    sr, rotated = Operand(rounding="sr"), Operand(rounding="sr", rht=Rht())
    check(x, sr, rotated)


@slow
def test_quantize_takes_a_backend():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(48)(nn.relu(nn.Dense(64)(x)))

  net, x = Net(), operand_data((32, 64))
  params = net.init(jax.random.key(0), x)
  grads = []
  for backend in ("reference", "pallas_interpret"):
    apply = fp4jax.quantize(net.apply, policies.all_linear(), backend=backend)

    def loss(params, apply=apply):
      return jnp.sum(apply(params, x, fp4_key=jax.random.key(1)) ** 2)

    grads.append(jax.jit(jax.grad(loss))(params))
  for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


class TestBackends:
  """What serves a recipe is asked beforehand, with a reason."""

  def device(self, monkeypatch, count=1, **attributes):
    device = types.SimpleNamespace(
      **{
        "platform": "gpu",
        "device_kind": "NVIDIA H200",
        "compute_capability": "9.0",
        **attributes,
      }
    )
    monkeypatch.setattr(_jax, "default_device", lambda: device)
    monkeypatch.setattr(_jax, "device_count", lambda: count)

  def test_a_hopper_gpu_is_served_by_kernels(self, monkeypatch):
    self.device(monkeypatch)
    assert backends.check(recipes.nvfp4()).name == "pallas"
    assert backends.check(recipes.nvfp4_fp8_exact()).name == "pallas"
    assert backends.native_rounding() == ()

  @pytest.mark.parametrize("capability", ["10.0", "12.0"])
  def test_blackwell_rounds_itself(self, monkeypatch, capability):
    self.device(monkeypatch, compute_capability=capability)
    assert backends.check(recipes.nvfp4()).name == "pallas"
    assert backends.native_rounding() == ("rne",)

  @pytest.mark.parametrize(
    "capability, multiplier",
    [
      ("9.0", "hopper"),
      ("10.0", "blackwell"),
      ("10.3", "xla"),  # not compiled for
      ("12.0", "cudnn"),
    ],
  )
  def test_what_multiplies(self, monkeypatch, capability, multiplier):
    self.device(monkeypatch, compute_capability=capability)
    assert backends.multiplier("pallas") == multiplier
    assert backends.multiplier("reference") == "xla"
    self.device(monkeypatch, count=8, compute_capability=capability)
    assert backends.multiplier("pallas") == "xla"

  @pytest.mark.parametrize(
    "attributes, words",
    [
      ({"platform": "cpu", "device_kind": "cpu"}, ["'cpu'", "NVIDIA"]),
      ({"compute_capability": "8.9"}, ["8.9", "9.0"]),
      ({"compute_capability": None}, ["compute capability"]),
    ],
  )
  def test_other_devices(self, monkeypatch, attributes, words):
    self.device(monkeypatch, **attributes)
    choice = backends.check(recipes.nvfp4())
    assert choice.name == "reference"
    assert all(w in choice.reason for w in words)
    with pytest.raises(errors.UnsupportedError) as info:
      backends.check(recipes.nvfp4(), "pallas")
    assert all(w in str(info.value) for w in [*words, "backend='reference'"])

  def test_several_devices_are_served(self, monkeypatch):
    self.device(monkeypatch, count=8)
    assert backends.check(recipes.nvfp4()).name == "pallas"

  def test_explicit_meshes_are_left_to_the_reference(self, monkeypatch):
    self.device(monkeypatch)
    mesh = jax.make_mesh(
      (1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with jax.set_mesh(mesh):
      choice = backends.check(recipes.nvfp4())
      assert choice.name == "reference" and "data" in choice.reason
      with pytest.raises(errors.UnsupportedError, match="explicit"):
        backends.check(recipes.nvfp4(), "pallas")

  @pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "fp8"])
  def test_formats_without_kernels(self, monkeypatch, name):
    self.device(monkeypatch)
    recipe = getattr(recipes, name)()
    assert backends.check(recipe).name == "reference"
    with pytest.raises(errors.UnsupportedError, match="no kernel"):
      backends.check(recipe, "pallas_interpret")

  def test_other_rotations(self, monkeypatch):
    self.device(monkeypatch)
    recipe = recipes.nvfp4()
    gemm = recipe.wgrad
    rotated = Rht(size=64)
    gemm = dataclasses.replace(
      gemm,
      lhs=dataclasses.replace(gemm.lhs, rht=rotated),
      rhs=dataclasses.replace(gemm.rhs, rht=rotated),
    )
    choice = backends.check(dataclasses.replace(recipe, wgrad=gemm))
    assert choice.name == "reference" and "64" in choice.reason

  def test_unknown(self):
    with pytest.raises(ValueError, match="pallas_interpret"):
      backends.check(recipes.nvfp4(), "cuda")


def test_round_keys_are_philox4x32s():
  key = jnp.array([3, 5], jnp.uint32)
  keys = registers.round_keys(key)
  counter = tuple(jnp.full((1,), i, jnp.uint32) for i in (9, 8, 7, 6))
  got = registers._philox4x32(registers._Jnp, counter, list(keys))
  want = rounding.philox4x32((9, 8, 7, 6), (3, 5))
  assert [int(w[0]) for w in got] == [int(w) for w in want]
