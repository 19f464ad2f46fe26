"""Matrix product on Hopper's tensor cores, with the operands' tensor scales.

y = ((lhs rhs) scales[0]) scales[1], rounded once to the result's dtype. FLOPs:
2 m n k, at most 989 TFLOP/s of dense BF16 on an H200 and twice that of FP8;
bytes: the operands once and the result once, less than a tenth of the time at
the sizes of a model.

A program stays on its multiprocessor and computes one tile of the result after
another. Of its three warpgroups one copies tiles of the operands to shared
memory, by TMA; two multiply them, each a half of the result's tile. The copies
run ahead of the products by ``Config.stages`` tiles, also into the next tile of
the result, so that the tensor cores wait for memory once a program; and a
warpgroup that is ahead of the other scales and stores its half while the other
multiplies. Two programs of a cluster fetch what both need once.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
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

WARPGROUPS = 2  # that multiply; one more copies
COPY_REGISTERS = 40  # a thread of the warpgroup that copies
MULTIPLY_REGISTERS = 232  # (65536 / 128 - 40) / 2, rounded down to eights
ACCUMULATOR = 64 * 256  # float32 sums of a warpgroup, 128 registers a lane
OUT_SLOTS = 2  # parts of a warpgroup's half that are being stored
SHARED_BYTES = 227 * 1024 - 1024  # of a program, less barriers and alignment
SWIZZLE = 128  # bytes of a row in shared memory, in the pattern of wgmma
STORED = 32  # bytes of a row, the least that has a pattern
DTYPES = ("bfloat16", "float8_e4m3fn")
RESULTS = ("bfloat16", "float32")

Axis = Literal["m", "n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the product is divided.

  Attributes:
    tile_m: rows of the result that a program computes at once.
    tile_n: its columns.
    tile_k: elements of the contraction that are copied at once; 128 bytes or a
      multiple.
    stages: copies of operand tiles in flight.
    split: axis along which the two warpgroups divide a tile of the result.
    cluster: axis along which two programs are neighbours and share what they
      read; None where each reads for itself.
    minor: axis along which programs go first, ``width`` tiles far, before they
      go along the other, so that those that run together read what the L2 cache
      holds.
    width: tiles (of clusters, where there are any) that lie so side by side.
    part: rows and columns of the result that are stored at once, of the columns
      128 bytes at most.
    programs: how many there are; None for one a multiprocessor.
  """

  tile_m: int = 128
  tile_n: int = 256
  tile_k: int = 64
  stages: int = 4
  split: Axis = "m"
  cluster: Axis | None = "m"
  minor: Axis = "m"
  width: int = 8
  part: tuple[int, int] = (64, 64)
  programs: int | None = None

  def __post_init__(self):
    """Raises ValueError for fields that name no axis or are not positive."""
    axes = ("split", "minor") + (() if self.cluster is None else ("cluster",))
    sizes = ("tile_m", "tile_n", "tile_k", "stages", "width", "part")
    grid.check_config(self, axes, (*sizes, "programs"))

  @property
  def half(self) -> tuple[int, int]:
    """Rows and columns of a warpgroup."""
    if self.split == "m":
      return self.tile_m // WARPGROUPS, self.tile_n
    return self.tile_m, self.tile_n // WARPGROUPS

  @property
  def cluster_tile(self) -> tuple[int, int]:
    """Rows and columns of the programs of a cluster."""
    down, across = self.cluster_shape
    return self.tile_m * down, self.tile_n * across

  @property
  def cluster_shape(self) -> tuple[int, int]:
    return 1 + (self.cluster == "m"), 1 + (self.cluster == "n")


# Tiles of the result that are tried, with the share of the tensor cores' rate
# that a multiprocessor may reach: smaller tiles read more of shared memory for
# a product. Of 19 configs on four shapes of a 1.3 B model (H200, 2026-12-03)
# none was 1.5 % faster than what this gives: there is no table of shapes.
_TILES: tuple[tuple[int, int, Axis, float], ...] = (
  (128, 256, "m", 1.0),
  (256, 128, "m", 1.0),
  (128, 128, "m", 0.85),
  (128, 64, "m", 0.6),
)


def matmul(
  lhs,
  rhs,
  scales=None,
  *,
  contract: tuple[int, int] = (-1, -1),
  dtype=jnp.bfloat16,
  config: Config | None = None,
  interpret=None,
):
  """Product of two matrices, times two factors.

  Sums are of float32 (the tensor cores' own for E4M3, which keep fewer bits:
  about 2**-13 of the largest term each step).

  Args:
    lhs: [m, k], or [k, m] where ``contract[0]`` is -2; BF16, or E4M3 whose
      contraction is last.
    rhs: [n, k], or [k, n] where ``contract[1]`` is -2; of lhs' dtype.
    scales: float32 [2], multiplied one after the other onto the float32 sums;
      None without any.
    contract: axis of each operand that is contracted.
    dtype: of the result, bfloat16 or float32.
    config: how the product is divided; None for what ``choose`` gives.
    interpret: ``compat.interpret_params()`` on a CPU, not in x64 mode.

  Returns:
    [m, n] of ``dtype``. Under ``jax.vmap`` elements of the batch are launched
    together, each divided as a product of its own.

  Raises:
    ValueError: for what ``refusal`` names.
  """
  arguments = lhs.shape, rhs.shape, contract, lhs.dtype, rhs.dtype
  reason = refusal(*arguments, dtype, config)
  if reason is None and scales is not None:
    reason = _scales_refusal(scales)
  if reason is not None:
    raise ValueError(f"matmul: {reason}")
  m, n, k = _sizes(lhs.shape, rhs.shape, contract)
  config = config or choose(m, n, k, lhs.dtype)
  assert config is not None  # refusal has asked
  product = _Product(
    config=config,
    contract=contract,
    sizes=(m, n, k),
    operand=np.dtype(lhs.dtype),
    result=np.dtype(dtype),
    scaled=scales is not None,
  )
  factors = () if scales is None else (scales,)
  with jax.enable_x64(False):  # Mosaic counts in 32 bits
    return product.launch(interpret)(lhs, rhs, *factors)


def supports(
  lhs_shape, rhs_shape, contract, lhs_dtype, rhs_dtype, dtype=jnp.bfloat16
) -> bool:
  """Whether ``matmul`` takes such operands on a Hopper GPU."""
  return (
    refusal(lhs_shape, rhs_shape, contract, lhs_dtype, rhs_dtype, dtype) is None
  )


def refusal(
  lhs_shape,
  rhs_shape,
  contract,
  lhs_dtype,
  rhs_dtype,
  dtype=jnp.bfloat16,
  config: Config | None = None,
) -> str | None:
  """Why ``matmul`` does not take such operands: a sentence, or None."""
  contract = tuple(contract)
  if len(lhs_shape) != 2 or len(rhs_shape) != 2:
    return (
      f"operands are {list(lhs_shape)} and {list(rhs_shape)}, needed matrices;"
      " batches go through jax.vmap."
    )
  if len(contract) != 2 or not set(contract) <= {-1, -2}:
    return f"contract is {contract}, needed two of -1 and -2."
  names = [np.dtype(d).name for d in (lhs_dtype, rhs_dtype)]
  if names[0] != names[1] or names[0] not in DTYPES:
    return (
      f"operands are {' and '.join(names)}, needed two of one of {DTYPES}; cast"
      " them."
    )
  if np.dtype(dtype).name not in RESULTS:
    return f"dtype is {np.dtype(dtype).name}, needed one of {RESULTS}."
  if names[0] != "bfloat16" and contract != (-1, -1):
    return (
      f"operands are {names[0]} with contract={contract}, needed (-1, -1), the"
      " only order in which tensor cores take bytes; transpose them."
    )
  m, n, k = _sizes(lhs_shape, rhs_shape, contract)
  if rhs_shape[contract[1]] != k:
    return (
      f"lhs contracts k={k} and rhs {rhs_shape[contract[1]]}, needed one size."
    )
  if max(m, n, k) >= 2**31:
    return f"m={m}, n={n}, k={k}, needed sizes below 2**31; divide the product."
  if config is not None:
    return _misfit(config, m, n, k, lhs_dtype, dtype)
  if choose(m, n, k, lhs_dtype) is None:
    step = SWIZZLE // np.dtype(lhs_dtype).itemsize
    return (
      f"no tile divides m={m}, n={n}, k={k}, needed m % 128 == 0, n % 64 == 0"
      f" and k % {step} == 0; pad the operands with zeros."
    )
  return None


def choose(m: int, n: int, k: int, dtype) -> Config | None:
  """The tiles that should keep a GPU busiest.

  Args:
    m: rows of the result.
    n: its columns.
    k: terms of each sum.
    dtype: of the operands.

  Returns:
    The config; None where no tile divides the sizes.
  """
  tile_k = SWIZZLE // np.dtype(dtype).itemsize
  busy = compat.multiprocessors()
  found: list[tuple[float, Config]] = []
  for tile_m, tile_n, split, rate in _TILES:
    if m % tile_m or n % tile_n or k % tile_k or not min(m, n, k):
      continue
    down, across = m // tile_m, n // tile_n
    # What is larger is shared.
    axes: tuple[Axis, Axis] = ("m", "n") if tile_n >= tile_m else ("n", "m")
    tiles = {"m": down, "n": across}
    cluster = next((a for a in axes if tiles[a] % 2 == 0), None)
    waves = -(-down * across // busy)
    config = Config(
      tile_m=tile_m,
      tile_n=tile_n,
      tile_k=tile_k,
      split=split,
      cluster=cluster,
      part=(64, min(64, tile_n // 2)),
    )
    found.append((waves * tile_m * tile_n / rate, config))
  return min(found, key=lambda f: f[0])[1] if found else None


def _scales_refusal(scales) -> str | None:
  name = np.dtype(scales.dtype).name
  if tuple(scales.shape) != (2,) or name != "float32":
    return (
      f"scales are {name}{list(scales.shape)}, needed float32[2]; cast them."
    )
  return None


def _sizes(lhs_shape, rhs_shape, contract) -> tuple[int, int, int]:
  left, right = contract
  return lhs_shape[-3 - left], rhs_shape[-3 - right], lhs_shape[left]


def _misfit(config: Config, m: int, n: int, k: int, operand, result):
  """Why a config does not suit a product: a sentence, or None."""
  tile = f"{config}"
  down, across = config.cluster_tile
  if m % down or n % across or k % config.tile_k or not min(m, n, k):
    return (
      f"m={m}, n={n}, k={k} are not multiples of {down}, {across} and"
      f" {config.tile_k} of {tile}; choose other tiles or pad with zeros."
    )
  size, out = np.dtype(operand).itemsize, np.dtype(result).itemsize
  half_m, half_n = config.half
  # A tile is copied as rows of 128 bytes, along whichever of its axes.
  if half_m % 64 or half_n % 64 or half_n > 256:
    return (
      f"warpgroups multiply {half_m} x {half_n} of {tile}, needed multiples of"
      " 64, and at most 256 columns; choose other tiles."
    )
  if config.tile_k * size % SWIZZLE:
    return (
      f"tile_k of {tile} is {config.tile_k * size} bytes, needed a multiple of"
      f" {SWIZZLE}; choose another."
    )
  if half_m * half_n > ACCUMULATOR:
    return (
      f"warpgroups add up {half_m} x {half_n} sums of {tile} in registers,"
      f" which hold {ACCUMULATOR}; choose smaller tiles."
    )
  part_m, part_n = _part(config, result)
  if part_m % 64 or part_n * out % STORED:
    return (
      f"{tile} stores parts of {part_m} x {part_n}, needed multiples of 64 rows"
      f" and of {STORED // out} columns; choose others."
    )
  parts = half_m * half_n // (part_m * part_n)
  if half_m % part_m or half_n % part_n or parts % OUT_SLOTS:
    return (
      f"{half_m} x {half_n} of {tile} are not an even number of parts of"
      f" {part_m} x {part_n}; choose smaller parts."
    )
  inputs = config.stages * (config.tile_m + config.tile_n) * config.tile_k
  shared = inputs * size + WARPGROUPS * OUT_SLOTS * part_m * part_n * out
  if config.stages < 2 or shared > SHARED_BYTES:
    return (
      f"{tile} takes {shared} bytes of shared memory, needed at most"
      f" {SHARED_BYTES} and two stages or more; choose other stages or tiles."
    )
  return None


def _part(config: Config, result) -> tuple[int, int]:
  """Rows and columns that are stored at once; rows of 128 bytes at most."""
  rows, columns = config.part
  return rows, min(columns, SWIZZLE // np.dtype(result).itemsize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
  """A product whose sizes and division are settled."""

  config: Config
  contract: tuple[int, int]
  sizes: tuple[int, int, int]
  operand: np.dtype
  result: np.dtype
  scaled: bool

  @property
  def steps(self) -> int:
    """Tiles of the operands that make a tile of the result."""
    return self.sizes[2] // self.config.tile_k

  @property
  def tiles(self) -> grid.Grid:
    """The result, divided among clusters."""
    config, (m, n, _) = self.config, self.sizes
    down, across = config.cluster_tile
    shape = m // down, n // across
    return grid.Grid(shape, (down, across), config.minor, config.width)

  def over_tiles(self, body: Callable) -> None:
    """``Grid.visit``, with the first row and column of this program's part."""
    config = self.config
    neighbour = lax.axis_index("neighbour")

    def part(row, column, before):
      if config.cluster == "m":
        row = row + neighbour * config.tile_m
      elif config.cluster == "n":
        column = column + neighbour * config.tile_n
      body(row, column, before)

    self.tiles.visit(part)

  def copy(self, lhs, rhs, shared) -> None:
    """The warpgroup that fills shared memory."""
    config = self.config
    stages, steps = config.stages, self.steps
    plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
    # Programs that are neighbours along m read the same of rhs.
    sharing = {"m": (None, "neighbour"), "n": ("neighbour", None)}
    shares = sharing.get(config.cluster or "", (None, None))

    def tile(row, column, before):
      def step(k, _):
        done = before * steps + k
        slot = lax.rem(done, stages)

        @pl.when(done >= stages)
        def wait():
          plgpu.barrier_wait(shared["free"].at[slot])

        terms = pl.ds(k * config.tile_k, config.tile_k)
        places = pl.ds(row, config.tile_m), pl.ds(column, config.tile_n)
        for ref, name, place, axis, share in zip(
          (lhs, rhs), ("lhs", "rhs"), places, self.contract, shares, strict=True
        ):
          index = (place, terms) if axis == -1 else (terms, place)
          plgpu.copy_gmem_to_smem(
            ref.at[index],
            shared[name].at[slot],
            shared["full"].at[slot],
            collective_axes=share,
          )
        return ()

      lax.fori_loop(0, steps, step, ())

    self.over_tiles(tile)
    # No program ends while its neighbour may write to its shared memory.
    total = self.tiles.count() * steps
    grid.drain(shared["free"], total, stages)

  def multiply(self, scales, out, shared) -> None:
    """A warpgroup that computes its half of each tile."""
    config, steps, stages = self.config, self.steps, self.config.stages
    plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
    warpgroup = lax.axis_index("warpgroup")
    half_m, half_n = config.half
    whole_m, whole_n = pl.ds(0, config.tile_m), pl.ds(0, config.tile_n)
    if config.split == "m":
      rows, columns = pl.ds(warpgroup * half_m, half_m), whole_n
    else:
      rows, columns = whole_m, pl.ds(warpgroup * half_n, half_n)
    factors = [ref[i] for ref in scales for i in range(2)]

    def operands(slot):
      """[m, k] of lhs and [k, n] of rhs."""
      left, right = self.contract
      lhs, rhs = shared["lhs"].at[slot], shared["rhs"].at[slot]
      lhs = lhs.at[rows] if left == -1 else lhs.at[:, rows].transpose((1, 0))
      rhs = (
        rhs.at[columns].transpose((1, 0)) if right == -1 else rhs.at[:, columns]
      )
      return lhs, rhs

    def tile(row, column, before):
      first = before * steps

      def products(sums):
        def step(k, _):
          slot = lax.rem(first + k, stages)
          plgpu.barrier_wait(shared["full"].at[slot])
          plgpu.wgmma(sums, *operands(slot))
          plgpu.wgmma_wait(1)  # the step before has been read

          @pl.when(k > 0)
          def release():
            slot = lax.rem(first + k - 1, stages)
            plgpu.barrier_arrive(shared["free"].at[slot])

          return ()

        lax.fori_loop(0, steps, step, ())
        return sums[...]

      sums = pl.run_scoped(products, plgpu.ACC((half_m, half_n), jnp.float32))
      last = lax.rem(first + steps - 1, stages)
      plgpu.barrier_arrive(shared["free"].at[last])
      place = out.at[
        pl.ds(row, config.tile_m), pl.ds(column, config.tile_n)
      ].at[rows, columns]
      self.store(sums, factors, shared["out"].at[warpgroup], place)

    self.over_tiles(tile)
    plgpu.wait_smem_to_gmem(0)

  def store(self, sums, factors, slots, out) -> None:
    """Scales a half, and stores part after part while the next is scaled."""
    part_m, part_n = _part(self.config, self.result)
    half_m, half_n = self.config.half
    parts = np.ndindex(half_m // part_m, half_n // part_n)
    for number, (i, j) in enumerate(parts):
      place = (
        slice(i * part_m, (i + 1) * part_m),
        slice(j * part_n, (j + 1) * part_n),
      )
      values = sums[place]
      for factor in factors:
        values = values * factor
      slot = slots.at[number % OUT_SLOTS]
      plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
      slot[...] = values.astype(self.result)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(slot, out.at[place])

  def shared(self) -> dict:
    """What a program holds in shared memory."""
    config, (part_m, part_n) = self.config, _part(self.config, self.result)
    operands = {}
    for name, size, axis in zip(
      ("lhs", "rhs"), (config.tile_m, config.tile_n), self.contract, strict=True
    ):
      tile = (size, config.tile_k) if axis == -1 else (config.tile_k, size)
      operands[name] = _swizzled((config.stages, *tile), self.operand)
    free: Callable = plgpu.Barrier
    if config.cluster:
      free = functools.partial(
        plgpu.ClusterBarrier, collective_axes=("neighbour",)
      )
    return {
      **operands,
      "out": _swizzled((WARPGROUPS, OUT_SLOTS, part_m, part_n), self.result),
      "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
      "free": free(num_arrivals=WARPGROUPS, num_barriers=config.stages),
    }

  def launch(self, interpret) -> Callable:
    """The kernel, a function of the operands and the scales."""
    config = self.config
    m, n, _ = self.sizes
    neighbours = math.prod(config.cluster_shape)
    tiles = m * n // math.prod(config.cluster_tile)
    programs = config.programs or compat.multiprocessors()

    def matmul_kernel(lhs, rhs, *refs):
      *scales, out, shared = refs
      lax.cond(
        lax.axis_index("warpgroup") < WARPGROUPS,
        lambda: self.multiply(scales, out, shared),
        lambda: self.copy(lhs, rhs, shared),
      )

    return plgpu.kernel(
      matmul_kernel,
      out_type=jax.ShapeDtypeStruct((m, n), self.result),
      scratch_types=(self.shared(),),
      grid=(max(min(programs // neighbours, tiles), 1),),
      grid_names=("cluster",),
      cluster=(neighbours,),
      cluster_names=("neighbour",),
      num_threads=WARPGROUPS + 1,
      thread_name="warpgroup",
      compiler_params=plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup
      ),
      **({} if interpret is None else {"interpret": interpret}),
    )


def _swizzled(shape, dtype):
  """Shared memory in the pattern of TMA and wgmma."""
  size = np.dtype(dtype).itemsize
  swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
  kinds: Any = plgpu  # whose transforms mypy takes for abstract
  transforms = (
    kinds.TilingTransform((8, swizzle // size)),
    kinds.SwizzleTransform(swizzle),
  )
  return plgpu.SMEM(shape, dtype, transforms=transforms)
