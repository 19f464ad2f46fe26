"""Product of two NVFP4 operands on the tensor cores of Blackwell.

y = ((lhs rhs) scales[0]) scales[1], rounded once to the result's dtype, where
an operand is E2M1 codes times E4M3 scales, one a block of sixteen terms; the
tensor cores multiply codes and scales and add in float32. FLOPs: 2 m n k, at
most 9 PFLOP/s of dense FP4 on a B200; bytes: 9/16 of the operands' elements and
the result once, at 7.7 TB/s, a fifth of the time of 8192 terms and two thirds
of that of 2048. What programs read from the L2 cache is more, see README.md.

A program stays on its multiprocessor and computes one tile of the result after
another. One of its warps copies codes and scales to shared memory, by TMA; one
has the tensor cores multiply them; a warpgroup scales and stores. The copies
run ahead by ``Config.stages`` tiles of the operands. Sums lie in tensor memory,
in two places by turns, so that a tile is stored while the next is multiplied.
Two programs of a cluster, a pair, multiply together: each holds half of the
rows of the result and brings half of both operands.

Compiled for sm_100a, not yet run: no such GPU was at hand.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import Literal

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from pallas_kernels import grid

BLOCK = 16  # terms that share a scale
ROWS = 128  # of the result in a program: the lanes of tensor memory
SCALE_TILE = (128, 64)  # rows and terms whose scales lie together
COLUMNS = 512  # of tensor memory, four bytes each in every lane
SLOTS = 2  # of sums in tensor memory, and of parts that are being stored
SHARED_BYTES = 227 * 1024 - 1024  # of a program, less barriers and alignment
SWIZZLE = 128  # bytes of a row in shared memory, in the pattern of TMA
SCALE_ROW = 256  # bytes of scales in a row that TMA copies, half a tile
WARPGROUPS = 2  # of whose first two warps have work
COPY_WARP, MULTIPLY_WARP = 0, 1
RESULTS = ("bfloat16", "float32")

Axis = Literal["m", "n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the product is divided.

  Attributes:
    tile_n: columns of the result that a program, or a pair, computes at once;
      128 or 256.
    tile_k: terms that are copied at once; 128 or a multiple of 256.
    stages: copies of operand tiles in flight.
    pair: whether two programs multiply together, 128 rows each.
    minor: axis along which programs go first, ``width`` tiles far, before they
      go along the other, so that those that run together read what the L2 cache
      holds.
    width: tiles that lie so side by side.
    programs: how many there are; None for one a multiprocessor.
  """

  tile_n: int = 256
  tile_k: int = 256
  stages: int = 5
  pair: bool = True
  minor: Axis = "m"
  width: int = 8
  programs: int | None = None

  def __post_init__(self):
    """Raises ValueError for fields that name no axis or are not positive."""
    sizes = ("tile_n", "tile_k", "stages", "width", "programs")
    grid.check_config(self, ("minor",), sizes)

  @property
  def neighbours(self) -> int:
    """Programs that multiply together."""
    return 1 + self.pair

  @property
  def tile_m(self) -> int:
    """Rows of the result that they compute at once."""
    return ROWS * self.neighbours

  @property
  def overlap(self) -> int:
    """Columns of sums that the two slots have in common.

    Two tiles of 256 columns and the scales do not fit. What is common is stored
    first, and then free for the tile that follows.
    """
    return 64 if 2 * self.tile_n == COLUMNS else 0

  @property
  def columns(self) -> int:
    """Of tensor memory, that sums and scales take."""
    groups = self.tile_k // SCALE_TILE[1] * 4
    scales = groups * (1 + self.tile_n // SCALE_TILE[0])
    return SLOTS * self.tile_n - self.overlap + scales

  def shared_bytes(self) -> int:
    """Of shared memory, that operands and parts of the result take."""
    scale_rows = ROWS + self.tile_n
    code_rows = ROWS + self.tile_n // self.neighbours
    stage = self.tile_k * code_rows // 2 + self.tile_k * scale_rows // BLOCK
    return self.stages * stage + SLOTS * ROWS * SWIZZLE


# Divisions that are tried, with the share of the tensor cores' rate that one
# may reach: in proportion to the bytes that a program must read for a product.
_TILES: tuple[tuple[bool, int, float], ...] = (
  (True, 256, 1.0),
  (False, 256, 2 / 3),
  (True, 128, 2 / 3),
  (False, 128, 1 / 2),
)


def matmul(
  lhs_codes,
  lhs_scales,
  rhs_codes,
  rhs_scales,
  scales=None,
  *,
  dtype=jnp.bfloat16,
  config: Config | None = None,
  interpret=None,
):
  """Product of two block-scaled matrices, times two factors.

  Args:
    lhs_codes: uint8 [m, k / 2], two E2M1 codes a byte, the first lowest.
    lhs_scales: uint8 [m / 128, k / 64, 32, 16], E4M3 codes in the order of
      ``quantize.tile_scales``.
    rhs_codes: uint8 [n, k / 2].
    rhs_scales: uint8 [n / 128, k / 64, 32, 16].
    scales: float32 [2], multiplied one after the other onto the float32 sums;
      None without any.
    dtype: of the result, bfloat16 or float32.
    config: how the product is divided; None for what ``choose`` gives.
    interpret: ``compat.interpret_params()`` on a CPU, not in x64 mode. There
      the programs of a pair multiply apart, see ``_Product.decoded``.

  Returns:
    [m, n] of ``dtype``. Under ``jax.vmap`` elements of the batch are launched
    together, each divided as a product of its own.

  Raises:
    ValueError: for what ``refusal`` names, and for other scales.
  """
  reason = refusal(lhs_codes.shape, rhs_codes.shape, dtype, config)
  reason = reason or _operands_refusal(
    (lhs_codes, rhs_codes), (lhs_scales, rhs_scales), scales
  )
  if reason is not None:
    raise ValueError(f"block_scaled_matmul: {reason}")
  m, n, k = _sizes(lhs_codes.shape, rhs_codes.shape)
  config = config or choose(m, n, k)
  assert config is not None  # refusal has asked
  if interpret is not None:
    config = dataclasses.replace(config, pair=False)
  product = _Product(
    config=config,
    sizes=(m, n, k),
    result=np.dtype(dtype),
    interpreted=interpret is not None,
  )
  operands = (
    _elements(lhs_codes),
    _scale_rows(lhs_scales),
    _elements(rhs_codes),
    _scale_rows(rhs_scales),
  )
  factors = () if scales is None else (scales,)
  with jax.enable_x64(False):  # Mosaic counts in 32 bits
    return product.launch(interpret)(*operands, *factors)


def supports(lhs_shape, rhs_shape, dtype=jnp.bfloat16) -> bool:
  """Whether ``matmul`` takes codes of such shapes on a Blackwell GPU."""
  return refusal(lhs_shape, rhs_shape, dtype) is None


def refusal(
  lhs_shape, rhs_shape, dtype=jnp.bfloat16, config: Config | None = None
) -> str | None:
  """Why ``matmul`` does not take codes of such shapes: a sentence, or None."""
  if len(lhs_shape) != 2 or len(rhs_shape) != 2:
    return (
      f"codes are {list(lhs_shape)} and {list(rhs_shape)}, needed matrices;"
      " batches go through jax.vmap."
    )
  if np.dtype(dtype).name not in RESULTS:
    return f"dtype is {np.dtype(dtype).name}, needed one of {RESULTS}."
  m, n, k = _sizes(lhs_shape, rhs_shape)
  if 2 * rhs_shape[1] != k:
    return (
      f"lhs contracts k={k} and rhs {2 * rhs_shape[1]}, needed one size; both"
      " have their contraction last."
    )
  if max(m, n, k) >= 2**31:
    return f"m={m}, n={n}, k={k}, needed sizes below 2**31; divide the product."
  if config is not None:
    return _misfit(config, m, n, k)
  if choose(m, n, k) is None:
    return (
      f"no tile divides m={m}, n={n}, k={k}, needed multiples of 128; pad the"
      " operands with zeros."
    )
  return None


def choose(m: int, n: int, k: int) -> Config | None:
  """What should keep a GPU busy; nothing was measured yet.

  Args:
    m: rows of the result.
    n: its columns.
    k: terms of each sum.

  Returns:
    The config; None where no tile divides the sizes.
  """
  tile_k = 256 if k % 256 == 0 else 128
  busy = compat.multiprocessors()
  found: list[tuple[float, Config]] = []
  for pair, tile_n, rate in _TILES:
    config = Config(tile_n=tile_n, tile_k=tile_k, pair=pair, stages=1)
    if m % config.tile_m or n % tile_n or k % tile_k or not min(m, n, k):
      continue
    parts = SLOTS * ROWS * SWIZZLE
    stages = (SHARED_BYTES - parts) // (config.shared_bytes() - parts)
    tiles = m // config.tile_m * (n // tile_n)
    waves = -(-tiles // max(busy // config.neighbours, 1))
    config = dataclasses.replace(config, stages=stages)
    found.append((waves * tile_n / rate, config))
  return min(found, key=lambda f: f[0])[1] if found else None


def _operands_refusal(codes, tiles, scales) -> str | None:
  """Why codes and scales do not belong together: a sentence, or None."""
  for name, code, tile in zip(("lhs", "rhs"), codes, tiles, strict=True):
    for what, array in (("codes", code), ("scales", tile)):
      if np.dtype(array.dtype).name != "uint8":
        return (
          f"{name}_{what} are {np.dtype(array.dtype).name}, needed uint8;"
          " bitcast them."
        )
    rows, blocks = code.shape[0] // SCALE_TILE[0], 2 * code.shape[1]
    want = rows, blocks // SCALE_TILE[1], 32, 16
    if tuple(tile.shape) != want:
      return (
        f"{name}_scales are {list(tile.shape)}, needed {list(want)}; order them"
        " by quantize.tile_scales."
      )
  if scales is not None:
    kind = np.dtype(scales.dtype).name
    if tuple(scales.shape) != (2,) or kind != "float32":
      return (
        f"scales are {kind}{list(scales.shape)}, needed float32[2]; cast them."
      )
  return None


def _sizes(lhs_shape, rhs_shape) -> tuple[int, int, int]:
  return lhs_shape[0], rhs_shape[0], 2 * lhs_shape[1]


def _elements(codes):
  """[rows, k / 2] bytes as [rows, k] elements: the same bytes on a GPU."""
  elements = lax.bitcast_convert_type(codes, jnp.float4_e2m1fn)
  return elements.reshape(codes.shape[0], -1)


def _scale_rows(tiles):
  """[rows / 128, k / 64, 32, 16] tiles as [rows / 128, k / 32, 256]."""
  scales = lax.bitcast_convert_type(tiles, jnp.float8_e4m3fn)
  return scales.reshape(tiles.shape[0], -1, SCALE_ROW)


def _misfit(config: Config, m: int, n: int, k: int) -> str | None:
  """Why a config does not suit a product: a sentence, or None."""
  tile = f"{config}"
  if config.tile_n not in (128, 256):
    return f"tile_n of {tile} is not 128 or 256; choose another."
  if config.tile_k % 256 and config.tile_k != 128:
    return f"tile_k of {tile} is not 128 or a multiple of 256; choose another."
  if (
    m % config.tile_m or n % config.tile_n or k % config.tile_k or not m * n * k
  ):
    return (
      f"m={m}, n={n}, k={k} are not multiples of {config.tile_m},"
      f" {config.tile_n} and {config.tile_k} of {tile}; choose other tiles or"
      " pad with zeros."
    )
  if config.columns > COLUMNS:
    return (
      f"{tile} takes {config.columns} columns of tensor memory, needed at most"
      f" {COLUMNS}; choose a smaller tile_k."
    )
  if config.stages < 2 or config.shared_bytes() > SHARED_BYTES:
    return (
      f"{tile} takes {config.shared_bytes()} bytes of shared memory, needed at"
      f" most {SHARED_BYTES} and two stages or more; choose other stages or"
      " tiles."
    )
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
  """A product whose sizes and division are settled."""

  config: Config
  sizes: tuple[int, int, int]
  result: np.dtype
  interpreted: bool

  @property
  def steps(self) -> int:
    """Tiles of the operands that make a tile of the result."""
    return self.sizes[2] // self.config.tile_k

  @property
  def pair_axis(self) -> str | None:
    return "neighbour" if self.config.pair else None

  @property
  def tiles(self) -> grid.Grid:
    """The result, divided among programs, or pairs of them."""
    config, (m, n, _) = self.config, self.sizes
    shape = m // config.tile_m, n // config.tile_n
    tile = config.tile_m, config.tile_n
    return grid.Grid(shape, tile, config.minor, config.width)

  def copy(self, operands, shared) -> None:
    """The warp that fills shared memory."""
    config = self.config
    stages, steps = config.stages, self.steps
    lhs, lhs_scales, rhs, rhs_scales = operands
    halves = config.tile_k // SCALE_TILE[1] * 2  # of tiles of scales
    # Each of a pair takes its half, and all scales of rhs.
    half = plgpu.CopyPartition.PARTITIONED(0) if config.pair else None
    whole = plgpu.CopyPartition.REPLICATED if config.pair else None

    def tiles(first, size):
      rows = SCALE_TILE[0]
      return pl.ds(lax.div(first, rows), size // rows)

    def tile(row, column, before):
      down, across = (row, config.tile_m), (column, config.tile_n)

      def step(k, _):
        done = before * steps + k
        slot = lax.rem(done, stages)

        @pl.when(done >= stages)
        def wait():
          plgpu.barrier_wait(shared["free"].at[slot])

        codes = pl.ds(k * config.tile_k, config.tile_k)
        scales = pl.ds(k * halves, halves)
        for ref, name, index, share in (
          (lhs, "lhs", (pl.ds(*down), codes), half),
          (lhs_scales, "lhs_scales", (tiles(*down), scales), half),
          (rhs, "rhs", (pl.ds(*across), codes), half),
          (rhs_scales, "rhs_scales", (tiles(*across), scales), whole),
        ):
          target = shared[name][0] if "scales" in name else shared[name]
          plgpu.copy_gmem_to_smem(
            ref.at[index],
            target.at[slot],
            shared["full"].at[slot],
            collective_axes=self.pair_axis,
            leader_tracked=share,
          )
        return ()

      lax.fori_loop(0, steps, step, ())

    self.tiles.visit(tile)
    # No program ends while its neighbour may read its shared memory.
    total = self.tiles.count() * steps
    grid.drain(shared["free"], total, stages)

  def multiply(self, shared) -> None:
    """The warp that has the tensor cores multiply; of a pair, the first's."""
    stages, steps = self.config.stages, self.steps
    product = self.decoded if self.interpreted else self.block_scaled
    # Slots that overlap are given back by the tile before, others by the last
    # one that had the same.
    lag = 1 if self.config.overlap else SLOTS

    def wait(tile):
      plgpu.barrier_wait(shared["drained"].at[lax.rem(tile, SLOTS)])

    def tile(row, column, before):
      del row, column
      pl.when(before >= lag)(lambda: wait(before - lag))
      slot = lax.rem(before, SLOTS)
      sums = self.sums(shared, slot, 0, self.config.tile_n)

      def step(k, _):
        stage = lax.rem(before * steps + k, stages)
        plgpu.barrier_wait(shared["full"].at[stage])
        product(shared, sums, stage, k > 0)
        return ()

      @pl.when(lax.axis_index("neighbour") == 0)
      def products():
        lax.fori_loop(0, steps, step, ())
        plgpu.tcgen05_commit_arrive(
          shared["summed"].at[slot], collective_axis=self.pair_axis
        )

    self.tiles.visit(tile)
    # No program ends while its neighbour may arrive at its barriers.
    total = self.tiles.count()
    lax.fori_loop(
      jnp.maximum(total - lag, 0), total, lambda tile, _: wait(tile), None
    )

  def block_scaled(self, shared, sums, stage, accumulate) -> None:
    """Multiplies a stage, once its scales are in tensor memory.

    The PTX ISA has a copy to tensor memory done before products that the same
    thread asks for later. That it waits for those asked for earlier, which read
    the scales it overwrites, the ISA does not say; CUTLASS and JAX count on it.
    """
    for name in ("lhs_scales", "rhs_scales"):
      plgpu.async_copy_scales_to_tmem(
        shared[name][1].at[stage],
        shared[f"{name}_tensor"],
        collective_axis=self.pair_axis,
      )
    plgpu.tcgen05_mma(
      sums,
      shared["lhs"].at[stage],
      shared["rhs"].at[stage].transpose((1, 0)),
      shared["free"].at[stage],
      a_scale=shared["lhs_scales_tensor"],
      b_scale=shared["rhs_scales_tensor"],
      accumulate=accumulate,
      collective_axis=self.pair_axis,
    )

  def decoded(self, shared, sums, stage, accumulate) -> None:
    """The interpreter's twin of ``block_scaled``, which it has no rule for.

    Decodes the stage to BF16, which is exact, and multiplies that.
    """
    for name in ("lhs", "rhs"):
      codes = shared[name].at[stage][...].astype(jnp.bfloat16)
      scales = shared[f"{name}_scales"][0].at[stage][...]
      scales = _per_element(scales.astype(jnp.bfloat16))
      shared[f"{name}_decoded"].at[stage][...] = codes * scales
    plgpu.commit_smem()
    plgpu.tcgen05_mma(
      sums,
      shared["lhs_decoded"].at[stage],
      shared["rhs_decoded"].at[stage].transpose((1, 0)),
      shared["free"].at[stage],
      accumulate=accumulate,
    )

  def sums(self, shared, slot, first, columns):
    """Columns of a tile's sums in tensor memory."""
    start = slot * (self.config.tile_n - self.config.overlap) + first
    return shared["sums"].at[:, pl.ds(start, columns)]

  def store(self, scales, out, shared) -> None:
    """The warpgroup that scales sums, and stores part after part."""
    config = self.config
    width = SWIZZLE // self.result.itemsize
    parts = config.tile_n // width
    # After these the next tile's sums may come.
    release = (config.overlap or config.tile_n) // width
    factors = [ref[i] for ref in scales for i in range(2)]
    rows = lax.axis_index("neighbour") * ROWS

    def tile(row, column, before):
      slot = lax.rem(before, SLOTS)
      plgpu.barrier_wait(shared["summed"].at[slot])
      for number in range(parts):
        # The slots overlap at the end of the first.
        part = jnp.where(slot == 0, parts - 1 - number, number)
        values = plgpu.async_load_tmem(
          self.sums(shared, slot, part * width, width)
        )
        if number + 1 == release:
          plgpu.wait_load_tmem()
          plgpu.barrier_arrive(shared["drained"].at[slot])
        for factor in factors:
          values = values * factor
        buffer = shared["out"].at[number % SLOTS]
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        buffer[...] = values.astype(self.result)
        plgpu.commit_smem()
        place = pl.ds(row + rows, ROWS), pl.ds(column + part * width, width)
        plgpu.copy_smem_to_gmem(buffer, out.at[place])

    self.tiles.visit(tile)
    plgpu.wait_smem_to_gmem(0)

  def shared(self) -> dict:
    """What a program holds in shared and in tensor memory."""
    config = self.config
    stages, tile_n, tile_k = config.stages, config.tile_n, config.tile_k
    rows, terms = SCALE_TILE
    groups = tile_k // terms
    barrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    drained: Callable = barrier
    if config.pair:
      drained = functools.partial(
        plgpu.ClusterBarrier,
        collective_axes=("neighbour",),
        orders_tensor_core=True,
      )
    held = {
      "lhs": _swizzled((stages, ROWS, tile_k), jnp.float4_e2m1fn),
      "rhs": _swizzled(
        (stages, tile_n // config.neighbours, tile_k), jnp.float4_e2m1fn
      ),
      "out": _swizzled(
        (SLOTS, ROWS, SWIZZLE // self.result.itemsize), self.result
      ),
      "sums": plgpu.TMEM(
        (ROWS, SLOTS * tile_n - config.overlap),
        jnp.float32,
        collective=config.pair,
      ),
      "full": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
      "free": barrier(num_barriers=stages),
      "summed": barrier(num_barriers=SLOTS),
      "drained": drained(num_barriers=SLOTS),
    }
    for name, size in (("lhs", ROWS), ("rhs", tile_n)):
      down = size // rows
      # The same bytes as they are copied, and as the tensor cores read them.
      held[f"{name}_scales"] = plgpu.RefUnion(
        plgpu.SMEM((stages, down, groups * 2, SCALE_ROW), jnp.float8_e4m3fn),
        plgpu.SMEM((stages, down, groups, 32, 16), jnp.float8_e4m3fn),
      )
      if self.interpreted:
        held[f"{name}_decoded"] = _swizzled(
          (stages, size, tile_k), jnp.bfloat16
        )
      else:
        held[f"{name}_scales_tensor"] = plgpu.TMEM(
          (size, tile_k // BLOCK),
          jnp.float8_e4m3fn,
          layout=plgpu.TMEMLayout.SCALES_LAYOUT,
          collective=config.pair,
        )
    return held

  def launch(self, interpret) -> Callable:
    """The kernel, a function of the operands and the scales."""
    config = self.config
    m, n, _ = self.sizes
    tiles = m // config.tile_m * (n // config.tile_n)
    programs = config.programs or compat.multiprocessors()

    def block_scaled_matmul_kernel(*refs):
      operands, (*scales, out, shared) = refs[:4], refs[4:]

      def feed():
        @plgpu.warp_map
        def roles(warp):
          @pl.when(warp == COPY_WARP)
          def copy():
            self.copy(operands, shared)

          @pl.when(warp == MULTIPLY_WARP)
          def multiply():
            self.multiply(shared)

      lax.cond(
        lax.axis_index("warpgroup") == 0,
        feed,
        lambda: self.store(scales, out, shared),
      )

    return plgpu.kernel(
      block_scaled_matmul_kernel,
      out_type=jax.ShapeDtypeStruct((m, n), self.result),
      scratch_types=(self.shared(),),
      grid=(max(min(programs // config.neighbours, tiles), 1),),
      grid_names=("cluster",),
      cluster=(config.neighbours,),
      cluster_names=("neighbour",),
      num_threads=WARPGROUPS,
      thread_name="warpgroup",
      compiler_params=plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup
      ),
      **({} if interpret is None else {"interpret": interpret}),
    )


def _per_element(scale_rows):
  """[rows / 128, k / 32, 256] scales to one an element, [rows, k].

  Byte 16 r + 4 q + b of a tile serves row 32 q + r and block b.
  """
  rows, terms = SCALE_TILE
  down, halves, _ = scale_rows.shape
  tiles = scale_rows.reshape(down, halves // 2, 32, 4, terms // BLOCK)
  scales = tiles.transpose(0, 3, 2, 1, 4).reshape(down * rows, -1)
  return jnp.repeat(scales, BLOCK, axis=1)


def _swizzled(shape, dtype):
  """Shared memory in the pattern of TMA and of the tensor cores."""
  bits = jnp.finfo(dtype).bits
  swizzle = plgpu.find_swizzle(shape[-1] * bits)
  kinds: Any = plgpu  # whose transforms mypy takes for abstract
  transforms = (
    kinds.TilingTransform((8, swizzle * 8 // bits)),
    kinds.SwizzleTransform(swizzle),
  )
  return plgpu.SMEM(shape, dtype, transforms=transforms)
