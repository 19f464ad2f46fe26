"""The Pallas backend: operands quantised and decoded by ``pallas_kernels``.

Sizes are padded here to what the kernels' tiles divide, which costs a copy
where they do not; batch elements are mapped over. An operand that is quantised
in both directions, as activations and gradients are, is read once for its amax
and its rotation's, and once to be quantised.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fp4jax import backends
from fp4jax import block_scaled
from fp4jax import formats
from fp4jax import hadamard
from fp4jax import recipes
from fp4jax import scaling
from pallas_kernels import amax as amax_kernel
from pallas_kernels import compat
from pallas_kernels import decode as decode_kernel
from pallas_kernels import errors as errors_kernel
from pallas_kernels import quantize as quantize_kernel
from pallas_kernels import registers

BLOCK = quantize_kernel.BLOCK
_ROW_ELEMENTS = 2048  # m k of rows must be a multiple
_BATCH = 2**15  # CUDA launches at most 65,535 programs along a batch


class Request(NamedTuple):
  """How one direction of an operand is quantised.

  Attributes:
    operand: the recipe's.
    packed: whether codes are wanted.
    decoded: whether decoded values are wanted.
  """

  operand: recipes.Operand
  packed: bool
  decoded: bool


def serves(operand: recipes.Operand, transposed: bool) -> bool:
  """Whether a kernel quantises the operand, along columns if ``transposed``.

  Square blocks along columns have none. Only weights have square blocks, and
  the codes of their transpose are theirs, transposed.
  """
  return operand.block[0] == 1 or not transposed


def quantize(
  x,
  rows: Request | None = None,
  columns: Request | None = None,
  streams=(None, None),
  *,
  interpret: bool = False,
) -> tuple[block_scaled.Quantised | None, block_scaled.Quantised | None]:
  """Quantises an operand along its last axis, the one before, or both.

  Args:
    x: [*batch, m, k] float, no axis empty; the whole operand, no shard of it:
      ``backends.check`` keeps shards away.
    rows: contracts k.
    columns: contracts m.
    streams: uint32 [3] of each request that rounds stochastically, see
      ``rounding.site_stream``.
    interpret: run the kernels on a CPU.

  Returns:
    The results of both requests; decoded values in the operand's own layout.
  """
  arrays = _quantize_batch(
    x,
    streams,
    rows=rows,
    columns=columns,
    interpret=interpret,
    native=() if interpret else backends.native_rounding(),
  )
  *batch, m, k = x.shape
  shapes = (*batch, m, k), (*batch, k, m)
  results: list = []
  for request, axis, shape, out in zip(
    (rows, columns), (-1, -2), shapes, arrays, strict=True
  ):
    if request is None:
      results.append(None)
      continue
    codes, scales, decoded, tensor_scale = out
    operand = request.operand
    if request.packed:
      codes = block_scaled.BlockScaled(
        codes=codes,
        scales=scales,
        tensor_scale=tensor_scale,
        format=operand.format,
        block=operand.block,
        shape=block_scaled.rotated_shape(shape, operand.rht),
        axis=axis,
        dtype=x.dtype,
        packed=True,
      )
    results.append(block_scaled.Quantised(codes, decoded, tensor_scale))
  return results[0], results[1]


@functools.partial(
  jax.jit, static_argnames=("rows", "columns", "interpret", "native")
)
def _quantize_batch(x, streams, *, rows, columns, interpret, native):
  """``_quantize`` of each batch element."""
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    x = scaling.read(x)
  batch = x.shape[:-2]
  flat = x.reshape(-1, *x.shape[-2:])

  @_launched
  def one(x, index, streams):
    return _quantize(x, index, streams, rows, columns, interpret, native)

  if flat.shape[0] == 1:
    out = one(flat[0], jnp.uint32(0), streams)
    out = jax.tree.map(lambda leaf: leaf[None], out)
  else:
    index = jnp.arange(flat.shape[0], dtype=jnp.uint32)
    out = jax.vmap(one, in_axes=(0, 0, None))(flat, index, streams)
  return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), out)


def _launched(function, size: int = 1):
  """A function whose ``jax.vmap`` comes in parts where it is too long.

  Args:
    function: of arrays, launches kernels.
    size: how many batch elements ``function`` launches together.
  """
  call = jax.custom_batching.custom_vmap(function)

  @call.def_vmap
  def over(length, batched, *args):
    axes = tuple(jax.tree.map(lambda b: 0 if b else None, batched))
    if size * length <= _BATCH:
      out = _launched(jax.vmap(function, axes), size * length)(*args)
    else:
      leaves, tree = jax.tree.flatten(args)
      mapped = jax.tree.leaves(batched)

      def one(rows):
        rows = iter(rows)
        each = zip(leaves, mapped, strict=True)
        own = [next(rows) if is_mapped else leaf for leaf, is_mapped in each]
        return _launched(function, size)(*jax.tree.unflatten(tree, own))

      rows = [leaf for leaf, m in zip(leaves, mapped, strict=True) if m]
      out = jax.lax.map(one, rows, batch_size=max(_BATCH // size, 1))
    return out, jax.tree.map(lambda _: True, out)

  return call


def _quantize(x, batch, streams, rows, columns, interpret, native):
  """Codes, scales, decoded values and tensor scale of each direction."""
  m, k = x.shape
  params = compat.interpret_params() if interpret else None
  x = _pad(x, _padded_shape(m, k, columns is not None))
  rotation = columns and columns.operand.rht
  square = rows is not None and rows.operand.block[0] == BLOCK
  block_amax = plain = rotated = None
  if square:
    magnitude = scaling.magnitude(scaling.read(x))
    tops = scaling.block_amax(magnitude, rows.operand.block)
    block_amax = jnp.repeat(tops, BLOCK, axis=0)[: x.shape[0]]
    plain = scaling.operand_amax(tops)
  if not square or columns is not None:
    plain, rotated = _amax(x, rotation, params)
  if rows is not None and rows.operand.rht:  # no recipe of ours does
    turned = hadamard.rht(scaling.read(x), rows.operand.rht)
    along = scaling.operand_amax(scaling.magnitude(turned))
  else:
    along = plain
  requests = rows, columns
  operands: list = []
  for request, amax, stream in zip(
    requests, (along, rotated if rotation else plain), streams, strict=True
  ):
    operands.append(request and _kernel_operand(request, amax, stream, batch))
  if square:
    if rows.operand.four_over_six:
      block_amax = _chosen(x, operands[0], block_amax, params)
    operands[0] = operands[0]._replace(block_amax=block_amax)
  results = quantize_kernel.quantize(
    x, operands[0], operands[1], params, native=native
  )
  out: list = []
  for request, operand, transposed in zip(
    requests, operands, (False, True), strict=True
  ):
    if request is None:
      out.append(None)
      continue
    arrays = _trim(results.pop(0), m, k, request, transposed)
    # The scale of an operand that is not finite is not, either.
    _, decode, _, smallest = operand.scalars
    scale = jnp.where(jnp.isnan(smallest), jnp.nan, decode)
    out.append((*arrays, scale))
  return tuple(out)


def _chosen(x, operand, block_amax, params):
  """The amax of square blocks, negative where that to 4 has the lesser error.

  Args:
    x: [m, k].
    operand: as the kernel takes it.
    block_amax: float32 [m, k / 16].
    params: of the interpreter.
  """
  errors = errors_kernel.errors(
    x, operand.scalars, block_amax, operand.config, params
  )
  six, four = (block_scaled.add_rows(error, BLOCK) for error in errors)
  better = jnp.repeat(four < six, BLOCK, axis=0)[: x.shape[0]]
  return jnp.where(better, -block_amax, block_amax)


def _trim(q, m, k, request, transposed):
  """Codes, scales and decoded values without the padding."""
  codes, scales, decoded = q
  outer, inner = (k, m) if transposed else (m, k)
  blocks = -(-inner // BLOCK)
  if codes is not None:
    codes = codes[:outer, : blocks * BLOCK // 2]
    # Rows of a square block share their scale.
    scales = scales[: outer : request.operand.block[0], :blocks]
  if decoded is not None:
    if request.operand.rht:
      inner = blocks * BLOCK
    decoded = decoded[:inner, :outer] if transposed else decoded[:outer, :inner]
  return codes, scales, decoded


def _kernel_operand(request, amax, stream, batch):
  """A request as the kernel takes it."""
  operand = request.operand
  scale = scaling.two_level_scale(amax, operand)
  finite = jnp.isfinite(amax)
  smallest = jnp.where(finite, scaling.SMALLEST, jnp.nan)
  if operand.rounding == "sr":
    stream = jnp.concatenate([stream, batch[None]])
  return quantize_kernel.Operand(
    quantize_kernel.Config(
      rounding=operand.rounding,
      sr_bits=operand.sr_bits,
      scale=str(formats.FORMATS[operand.format].scale),
      scale_max=scale.block_max,
      four_over_six=operand.four_over_six,
      signs=operand.rht.signs if operand.rht else None,
    ),
    jnp.stack([scale.per_block, scale.decode, scale.encode, smallest]),
    stream if operand.rounding == "sr" else None,
    packed=request.packed,
    decoded=jnp.bfloat16 if request.decoded else None,
  )


def _amax(x, rotation, params):
  """Amax of an operand and of its rotation along columns."""
  m, k = x.shape
  if registers.columns(m, k, False) is None:  # and so no rotation
    return scaling.operand_amax(scaling.magnitude(scaling.read(x))), None
  return amax_kernel.amax(
    x, signs=rotation.signs if rotation else None, interpret=params
  )


def _padded_shape(m, k, columns: bool) -> tuple[int, int]:
  """The least shape that the kernels' tiles divide."""
  if columns:
    shapes = [
      (_up(m, rows), _up(k, across)) for rows, across in registers.COLUMN_SHAPES
    ]
    return min(shapes, key=math.prod)
  shapes, width = [], BLOCK
  while width <= _ROW_ELEMENTS:  # few rows are padded to longer ones
    shapes.append((_up(m, _ROW_ELEMENTS // width), _up(k, width)))
    width *= 2
  return min(shapes, key=math.prod)


def _up(size, multiple):
  return -(-size // multiple) * multiple


def _pad(x, shape):
  if x.shape == shape:
    return x
  return jnp.pad(x, [(0, n - s) for n, s in zip(shape, x.shape, strict=True)])


@functools.partial(jax.jit, static_argnames="interpret")
def decode(quantised: block_scaled.BlockScaled, *, interpret: bool = False):
  """``BlockScaled.decode`` of packed codes, by a kernel; to BF16."""
  *batch, rows, k = quantised.shape
  params = compat.interpret_params() if interpret else None
  codes, scales = quantised.codes, quantised.scales
  assert scales is not None
  scales = jnp.repeat(scales, quantised.block[0], axis=-2)[..., :rows, :]

  @_launched
  def one(codes, scales):
    width = 2 * codes.shape[-1]
    shape = _padded_shape(rows, width, False)
    values = decode_kernel.decode(
      _pad(codes, (shape[0], shape[1] // 2)),
      _pad(scales, (shape[0], shape[1] // BLOCK)),
      interpret=params,
    )
    return values[:rows, :k]

  if not batch:
    return one(codes, scales)
  flat = [a.reshape(-1, *a.shape[-2:]) for a in (codes, scales)]
  values = jax.vmap(one)(*flat)
  return values.reshape(*batch, *values.shape[1:])
