"""The FP4 product of Blackwell, run by the Mosaic interpreter on a CPU.

Contract: every byte of codes and scales serves the element that the PTX ISA and
cuBLAS say, at every step of every tile; and the pipeline (copies, barriers,
stages, tiles, sums in tensor memory, what is stored) computes the product of
the decoded operands, exactly where float32 holds the sums. Decoding stands in
for the block-scaled MMA, which the interpreter has no rule for, and programs of
a pair multiply apart: what tensor cores do with scales, and a pair's barriers,
are compiled in test_aot.py and run nowhere yet.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import block_scaled_matmul as fp4
from pallas_kernels import compat
from pallas_kernels import quantize

PARAMS = compat.interpret_params()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ONE = {"code": 2, "scale": 0x38}  # 1.0 of E2M1 and of E4M3
CONFIG = fp4.Config(pair=False, tile_k=128, stages=3, width=1)


def byte_of_scale(row: int, block: int, blocks: int) -> int:
  """Where a scale lies in memory.

  References:
    cuBLAS, "1D block scaling factors layout": tiles of 128 rows and 4 blocks,
      the tiles of a row of tiles one after the other; inside of one
      (row % 32) * 16 + (row / 32) * 4 + block.
  """
  tile = row // 128 * (blocks // 4) + block // 4
  return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def code_of(data: bytes, row: int, term: int, k: int) -> int:
  """The E2M1 code of an element: the first of two is a byte's low nibble."""
  byte = data[row * (k // 2) + term // 2]
  return byte >> 4 if term % 2 else byte & 15


def decoded(codes, tiles) -> np.ndarray:
  """[rows, k] float64 values, element by element, from bytes in memory."""
  (rows, half), data = codes.shape, np.asarray(codes).tobytes()
  scales, k = np.asarray(tiles).tobytes(), 2 * half
  values = np.zeros((rows, k))
  table = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
  table = table.astype(np.float64)
  for row, term in np.ndindex(rows, k):
    code = code_of(data, row, term, k)
    scale = table[scales[byte_of_scale(row, term // 16, k // 16)]]
    values[row, term] = E2M1[code & 7] * (-1 if code & 8 else 1) * scale
  return values


def random_operand(rows, k, seed, low=0x30, high=0x40):
  """Codes and scales from 0.5 to 1.875: float32 holds their sums."""
  rng = np.random.default_rng(seed)
  codes = rng.integers(0, 256, (rows, k // 2), np.uint8)
  shape = rows // 128, k // 64, 32, 16
  return codes, rng.integers(low, high, shape, np.uint8)


def identity(size):
  """Codes and scales of the identity."""
  codes = np.zeros((size, size // 2), np.uint8)
  for i in range(size):
    codes[i, i // 2] = ONE["code"] << (4 if i % 2 else 0)
  shape = size // 128, size // 64, 32, 16
  return codes, np.full(shape, ONE["scale"], np.uint8)


def multiply(
  lhs, rhs, scales=None, params=PARAMS, dtype=jnp.float32, **options
):
  config = dataclasses.replace(CONFIG, **options)
  arrays = [jnp.asarray(a) for a in (*lhs, *rhs)]
  scales = None if scales is None else jnp.asarray(scales)
  return fp4.matmul(
    *arrays, scales, dtype=dtype, config=config, interpret=params
  )


def assert_same_bits(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape and got.dtype == want.dtype
  assert got.tobytes() == want.tobytes()


def test_tile_scales_is_the_order_of_cublas():
  """Every byte, of 256 rows and 12 blocks."""
  rows, blocks = 256, 12
  scales = np.random.default_rng(0).integers(0, 256, (rows, blocks), np.uint8)
  flat = np.asarray(quantize.tile_scales(jnp.asarray(scales))).reshape(-1)
  want = np.zeros(rows * blocks, np.uint8)
  for row, block in np.ndindex(rows, blocks):
    want[byte_of_scale(row, block, blocks)] = scales[row, block]
  assert_same_bits(flat, want)


def test_tensor_memory_serves_the_same_scales():
  """What is copied there is what the MMA reads, by the PTX ISA.

  ``tcgen05.cp.32x128b.warpx4`` brings row r of sixteen bytes of a tile to four
  columns of lane r. ``scale_vec::4X`` reads the scales of row r of 128 from
  lane r % 32, column r / 32, one byte a block. Tiles of further rows lie four
  columns on, those of further terms after them.
  """
  down, across = 2, 4
  tiles = np.arange(down * across * 512).reshape(down, across, 32, 16)
  columns = np.zeros((32, across * down * 4, 4), int)  # lanes, columns, bytes
  for i, j in np.ndindex(down, across):
    for lane, byte in np.ndindex(32, 16):
      column = 4 * (down * j + i) + byte // 4
      columns[lane, column, byte % 4] = tiles[i, j, lane, byte]
  read = np.zeros((down * 128, across * 64), int)
  for row, term in np.ndindex(read.shape):
    column = 4 * (down * (term // 64) + row // 128) + row % 128 // 32
    read[row, term] = columns[row % 32, column, term % 64 // 16]
  twin = fp4._per_element(jnp.asarray(tiles.reshape(down, across * 2, 256)))
  assert_same_bits(np.asarray(twin).astype(int), read)
  for row, term in ((0, 0), (33, 16), (127, 255), (200, 100)):
    assert read[row, term] == byte_of_scale(row, term // 16, across * 4)


def test_quantised_operands_are_read_as_they_are_written():
  """The rows kernel's codes and tiles hold the values that it decodes."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((128, 128)), jnp.bfloat16)
  scalars = jnp.array([1.0, 1.0, 1.0, 2.0**-100], jnp.float32)
  operand = quantize.Operand(
    quantize.Config(), scalars, decoded=jnp.float32, tiled_scales=True
  )
  (q,) = quantize.quantize(x, operand, None, PARAMS)
  want = decoded(q.codes, q.scales)
  assert_same_bits(np.asarray(q.decoded, np.float64), want)
  got = multiply((q.codes, q.scales), identity(128), tile_n=128)
  np.testing.assert_array_equal(got, want)  # zeros of either sign


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_every_byte_serves_its_element(side):
  """Times the identity: values come through alone, at every step and tile."""
  operand = random_operand(256, 512, seed=1, low=0, high=0x7F)  # no NaN
  want = decoded(*operand).astype(np.float32)
  if side == "lhs":
    got = multiply(operand, identity(512), tile_n=128, programs=2)
  else:
    got = multiply(identity(512), operand, tile_n=256, programs=2).T
  np.testing.assert_array_equal(got, want)  # zeros of either sign


PRODUCTS: dict = {  # columns, dtype of the result, options
  "overlap": (512, "float32", {"tile_n": 256, "programs": 1}),
  "overlap_bf16": (512, "bfloat16", {"tile_n": 256, "stages": 2}),
  "apart": (384, "bfloat16", {"tile_n": 128, "programs": 2}),
  "deep": (256, "float32", {"tile_n": 128, "tile_k": 256, "minor": "n"}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_exact(name):
  """Bit for bit: float32 holds their sums in whatever order."""
  n, dtype, options = PRODUCTS[name]
  lhs, rhs = random_operand(256, 512, 1), random_operand(n, 512, 2)
  scales = np.array([1 / 3, 0.7], np.float32) if name != "deep" else None
  want = decoded(*lhs) @ decoded(*rhs).T
  assert (want == want.astype(np.float32)).all()
  want = want.astype(np.float32)
  for scale in () if scales is None else scales:
    want = want * scale
  got = multiply(lhs, rhs, scales, dtype=dtype, **options)
  assert_same_bits(got, jnp.asarray(want, dtype))


def test_products_under_vmap():
  pairs = [
    (random_operand(128, 128, i), random_operand(128, 128, 9 + i))
    for i in range(2)
  ]
  stacked = [
    jnp.stack([jnp.asarray((*lhs, *rhs)[i]) for lhs, rhs in pairs])
    for i in range(4)
  ]
  got = jax.vmap(
    lambda *a: fp4.matmul(
      *a,
      dtype=jnp.float32,
      config=dataclasses.replace(CONFIG, tile_n=128),
      interpret=PARAMS,
    )
  )(*stacked)
  want = [decoded(*lhs) @ decoded(*rhs).T for lhs, rhs in pairs]
  assert_same_bits(got, np.stack(want).astype(np.float32))


@pytest.mark.parametrize("tile_n", [128, 256])
def test_products_have_no_races(capfd, tile_n):
  """Two stages and a program that computes four tiles."""
  params = compat.interpret_params(detect_races=True)
  lhs, rhs = random_operand(256, 384, 1), random_operand(2 * tile_n, 384, 2)
  got = multiply(
    lhs,
    rhs,
    params=params,
    stages=2,
    programs=1,
    tile_n=tile_n,
    dtype="float32",
  )
  jax.block_until_ready(got)  # raises or prints, as JAX' version has it
  assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("m", [128, 256, 8192])
@pytest.mark.parametrize("n", [128, 256, 8192])
@pytest.mark.parametrize("k", [128, 256, 4096 + 128])
def test_every_choice_of_tiles_fits(m, n, k):
  config = fp4.choose(m, n, k)
  for dtype in fp4.RESULTS:
    assert fp4.supports((m, k // 2), (n, k // 2), dtype)
    assert fp4.refusal((m, k // 2), (n, k // 2), dtype, config) is None
  if min(m, n) == 8192:
    assert config is not None and config.pair and config.tile_n == 256


def zeros(m=256, n=256, k=256, dtype=jnp.uint8, tiles=None):
  shapes = (
    (m, k // 2),
    (m // 128, k // 64, 32, 16),
    (n, k // 2),
    tiles or (n // 128, k // 64, 32, 16),
  )
  return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


@pytest.mark.parametrize(
  "arguments, options, words",
  [
    (zeros(m=64), {}, ["m=64", "128", "pad"]),
    (zeros(k=64), {}, ["k=64", "128", "pad"]),
    (zeros(m=0), {}, ["m=0"]),
    (zeros(k=0), {}, ["k=0"]),
    (zeros()[:2] + zeros(k=512)[2:], {}, ["k=256", "512", "one size"]),
    (zeros(dtype=jnp.int8), {}, ["lhs_codes", "int8", "uint8", "bitcast"]),
    (zeros(tiles=(256, 16)), {}, ["rhs_scales", "[256, 16]", "tile_scales"]),
    (zeros(), {"dtype": jnp.float16}, ["float16", "bfloat16"]),
    ([zeros()[1], *zeros()[1:]], {}, ["[2, 4, 32, 16]", "vmap"]),
    (zeros(), {"scales": jnp.ones(3)}, ["float32[3]", "float32[2]"]),
    (
      zeros(m=128),
      {"config": fp4.Config()},
      ["m=128", "256", "pair=True", "choose"],
    ),
    (zeros(), {"config": fp4.Config(tile_n=64)}, ["tile_n=64", "128"]),
    (zeros(), {"config": fp4.Config(tile_k=64)}, ["tile_k=64", "256"]),
    (
      zeros(k=1024),
      {"config": fp4.Config(tile_k=512, stages=2)},
      ["544 columns of tensor memory", "512", "choose"],
    ),
    (
      zeros(),
      {"config": fp4.Config(stages=6)},
      ["stages=6", "shared memory", "choose"],
    ),
  ],
)
def test_what_cannot_be_multiplied_is_refused(arguments, options, words):
  with pytest.raises(ValueError, match="^block_scaled_matmul: ") as info:
    fp4.matmul(*arguments, **options)
  assert all(word in str(info.value) for word in words), info.value


@pytest.mark.parametrize(
  "options, words",
  [
    ({"tile_k": 0}, "tile_k has 0"),
    ({"stages": 2.0}, "stages has 2.0"),
    ({"width": True}, "width has True"),
    ({"programs": -1}, "programs has -1"),
    ({"minor": "k"}, "minor='k', needed 'm' or 'n'"),
  ],
)
def test_configs_that_say_nothing_are_refused(options, words):
  with pytest.raises(ValueError, match=f"block_scaled_matmul.Config: {words}"):
    fp4.Config(**options)
