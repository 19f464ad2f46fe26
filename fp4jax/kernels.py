"""The Pallas backend: operands quantised and decoded by ``pallas_kernels``.

Broken blocks, and operands that hold no tile, are padded here; batch elements
are mapped over. An operand that is quantised in both directions, as activations
and gradients are, is read once for its amax and its rotation's, and once to be
quantised.
"""

import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fp4jax import backends
from fp4jax import block_scaled
from fp4jax import errors
from fp4jax import formats
from fp4jax import hadamard
from fp4jax import recipes
from fp4jax import scaling
from fp4jax import sharding
from pallas_kernels import amax as amax_kernel
from pallas_kernels import block_scaled_matmul
from pallas_kernels import compat
from pallas_kernels import decode as decode_kernel
from pallas_kernels import errors as errors_kernel
from pallas_kernels import matmul as matmul_kernel
from pallas_kernels import quantize as quantize_kernel
from pallas_kernels import registers

PACKED = ("blackwell", "cudnn")
"""The multipliers of ``backends.multiplier`` that take packed operands."""
BLOCK = quantize_kernel.BLOCK
_ROW_ELEMENTS = 2048  # that an operand must have at least
_BATCH = 2**15  # CUDA launches at most 65,535 programs along a batch


class Request(NamedTuple):
  """How one direction of an operand is quantised.

  Attributes:
    operand: the recipe's.
    packed: whether codes are wanted.
    decoded: dtype in which decoded values are wanted, or None.
    transposed: whether rows of square blocks are the columns of the operand
      that the recipe means, whose errors, for 4/6, are added along these first.
  """

  operand: recipes.Operand
  packed: bool
  decoded: Any = None
  transposed: bool = False


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

  Raises:
    UnsupportedError: an operand has no kernel.
  """
  for request in (rows, columns):
    if request and (lacking := backends.lacks_kernel(request.operand)):
      raise errors.UnsupportedError(
        f"kernels: a GEMM {lacking}; use backend='reference', which computes it"
        " on every device."
      )
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
  """``_quantize`` of the flattened batch."""
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    x = scaling.read(x)
  batch = x.shape[:-2]
  flat = x.reshape(-1, *x.shape[-2:])
  index = jnp.arange(flat.shape[0], dtype=jnp.uint32)[:, None]

  def with_index(stream):
    stream = jnp.broadcast_to(stream, (*index.shape[:1], 3))
    return jnp.concatenate([stream, index], 1)

  streams = jax.tree.map(with_index, tuple(streams))
  params = compat.interpret_params() if interpret else None

  @_batched
  def run(x, streams):
    return _quantize(x, streams, rows, columns, params, native)

  out = run(flat, streams)
  return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), out)


def _batched(function):
  """A function of arrays [b, ...] under whose ``jax.vmap`` b is longer."""
  call = jax.custom_batching.custom_vmap(function)

  @call.def_vmap
  def over(length, batched, *args):
    def merged(x, is_batched):
      x = x if is_batched else jnp.broadcast_to(x, (length, *x.shape))
      return x.reshape(-1, *x.shape[2:])

    out = _batched(function)(*jax.tree.map(merged, args, tuple(batched)))
    out = jax.tree.map(lambda x: x.reshape(length, -1, *x.shape[1:]), out)
    return out, jax.tree.map(lambda _: True, out)

  return call


def _limited(function, launched: int = 1):
  """A function of arrays of which, under ``jax.vmap``, no more than ``_BATCH``
  are launched together.

  Args:
    function: of arrays, to an array.
    launched: how many of what it was are launched by one call.
  """
  call = jax.custom_batching.custom_vmap(function)

  @call.def_vmap
  def over(length, batched, *args):
    axes = tuple(0 if b else None for b in batched)
    if launched * length <= _BATCH:
      out = _limited(jax.vmap(function, axes), launched * length)(*args)
      return out, True

    def one(divided):
      rest = iter(divided)
      own = (next(rest) if b else a for a, b in zip(args, batched, strict=True))
      return _limited(function, launched)(*own)

    divided = [a for a, b in zip(args, batched, strict=True) if b]
    return lax.map(one, divided, batch_size=_BATCH // launched), True

  return call


def _by_shards(function, args, outs, whole, params):
  """A function of a shard and one batch element, of all of both.

  ``sharding.shardable`` says what the arguments are. The interpreter's
  callbacks are not partitioned.
  """

  def local(shard, *arrays):
    return _each(functools.partial(function, shard), *arrays)

  if params is not None:
    return functools.partial(local, sharding.Shard())
  return sharding.shardable(local, args, outs, whole)


def _each(function, *arrays):
  """A function of every batch element, launched together."""
  count = arrays[0].shape[0]
  if count == 1:
    out = function(*(a[0] for a in arrays))
    return jax.tree.map(lambda leaf: leaf[None], out)
  if count <= _BATCH:
    return jax.vmap(function)(*arrays)
  return lax.map(lambda a: function(*a), arrays, batch_size=_BATCH)


def _quantize(x, streams, rows, columns, params, native):
  """Codes, scales, decoded values and tensor scale of each direction.

  Args:
    x: [b, m, k].
    streams: uint32 [b, 4] of each direction that rounds stochastically.
    rows: how rows are quantised, or None.
    columns: how columns are, or None.
    params: of the interpreter.
    native: what the GPU rounds itself.
  """
  _, m, k = x.shape
  square = rows is not None and rows.operand.block[0] == BLOCK
  blocks_down = columns is not None or square
  x = _pad(
    x, (_up(m, BLOCK if blocks_down else 1), _up(k, BLOCK if rows else 1))
  )
  rotation = columns and columns.operand.rht
  if square:
    tops = scaling.block_amax(
      scaling.magnitude(scaling.read(x)), rows.operand.block
    )
    plain = scaling.operand_amax(tops)
  if rotation:
    own, rotated = _amax(x, rotation, params)
    plain = plain if square else own
  elif not square:
    plain = scaling.operand_amax(scaling.magnitude(scaling.read(x)))
  along = plain
  if rows is not None and rows.operand.rht:  # no recipe of ours does
    turned = hadamard.rht(scaling.read(x), rows.operand.rht)
    along = scaling.operand_amax(scaling.magnitude(turned))
  operands: list = [
    request and _kernel_operand(request, amax, stream)
    for request, amax, stream in (
      (rows, along, streams[0]),
      (columns, rotated if rotation else plain, streams[1]),
    )
  ]
  if square:
    if rows.operand.four_over_six:
      axis = -2 if rows.transposed else -1
      tops = _chosen(x, operands[0], tops, axis, params)
    block_amax = jnp.repeat(tops, BLOCK, axis=1)
    operands[0] = operands[0]._replace(block_amax=block_amax)
  results = _launched(x, operands, params, native)
  out: list = []
  for request, operand, transposed in zip(
    (rows, columns), operands, (False, True), strict=True
  ):
    if request is None:
      out.append(None)
      continue
    arrays = _trim(results.pop(0), m, k, request, transposed)
    # The scale of an operand that is not finite is not, either.
    _, decode, _, smallest = jnp.moveaxis(operand.scalars, -1, 0)
    scale = jnp.where(jnp.isnan(smallest), jnp.nan, decode)
    out.append((*arrays, scale))
  return tuple(out)


def _launched(x, operands, params, native) -> list:
  """The results of the quantise kernel, shard by shard.

  Args:
    x: [b, m, k], k a multiple of sixteen for rows, m for columns.
    operands: of rows and columns, None for what is not wanted; their arrays
      have an axis for the batch.
    params: of the interpreter.
    native: what the GPU rounds itself.
  """
  arrays, args = [x], ["b m k"]
  outs, whole = [], ""
  for operand, out, inner in zip(
    operands, ("b m k", "b k m"), "km", strict=True
  ):
    if operand is None:
      continue
    whole += inner if operand.block_amax is None else "mk"
    arrays.append(operand.scalars)
    args.append("b .")
    if operand.stream is not None:
      arrays.append(operand.stream)
      args.append("b .")
    if operand.block_amax is not None:
      arrays.append(operand.block_amax)
      args.append("b m k/16")
    if operand.packed:
      outs += [f"{out}/2", f"{out}/16"]
    if operand.decoded is not None:
      outs.append("b m k")

  def one(shard, x, *arrays):
    rest = list(arrays)
    m, k = x.shape
    shape = _padded_shape(m, k, operands[1] is not None)
    own: list = [None, None]
    for i, operand in enumerate(operands):
      if operand is None:
        continue
      operand = operand._replace(scalars=rest.pop(0))
      if operand.stream is not None:
        row, block = (shard.row, shard.column)[:: -1 if i else 1]
        place = (jnp.full(1, p, jnp.uint32) for p in (row, block // BLOCK))
        stream = jnp.concatenate([rest.pop(0), *place])
        operand = operand._replace(stream=stream)
      if operand.block_amax is not None:
        amax = _pad(rest.pop(0), (shape[0], shape[1] // BLOCK))
        operand = operand._replace(block_amax=amax)
      own[i] = operand
    found = quantize_kernel.quantize(
      _pad(x, shape), own[0], own[1], params, native
    )
    out = []
    for i, operand in enumerate(own):
      if operand is None:
        continue
      q, (outer, inner) = found.pop(0), (m, k)[:: -1 if i else 1]
      if operand.packed:
        out.append(q.codes[:outer, : inner // 2])
        out.append(q.scales[:outer, : inner // BLOCK])
      if operand.decoded is not None:
        out.append(q.decoded[:m, :k])
    return tuple(out)

  flat = list(_by_shards(one, args, outs, whole, params)(*arrays))
  return [
    quantize_kernel.Quantized(
      flat.pop(0) if operand.packed else None,
      flat.pop(0) if operand.packed else None,
      flat.pop(0) if operand.decoded is not None else None,
    )
    for operand in operands
    if operand is not None
  ]


def _chosen(x, operand, tops, axis, params):
  """The amax of square blocks, negative where that to 4 has the lesser error.

  Args:
    x: [b, m, k], both sizes multiples of sixteen.
    operand: as the kernel takes it.
    tops: float32 [b, m / 16, k / 16] amax.
    axis: along which errors are added first, -1 or -2.
    params: of the interpreter.
  """
  args, whole = ["b m k", "b .", "b m k/16"], "mk"
  if axis == -2:
    args[2] = "b m/16 k"

  def one(shard, x, scalars, block_amax):
    del shard
    m, k = x.shape
    shape = _padded_shape(m, k, axis == -2)
    narrow = list(shape)
    narrow[axis] //= BLOCK
    errors = errors_kernel.errors(
      _pad(x, shape),
      scalars,
      _pad(block_amax, narrow),
      operand.config,
      axis=axis,
      interpret=params,
    )
    m, k = block_amax.shape
    return tuple(error[:m, :k] for error in errors)

  across = -3 - axis
  block_amax = jnp.repeat(tops, BLOCK, axis=across)
  errors = _by_shards(one, args, args[2:] * 2, whole, params)
  six, four = errors(x, operand.scalars, block_amax)

  def added(error):
    if across == -2:
      return block_scaled.add_rows(error, BLOCK)
    error = jnp.swapaxes(error, -1, -2)
    return jnp.swapaxes(block_scaled.add_rows(error, BLOCK), -1, -2)

  return jnp.where(added(four) < added(six), -tops, tops)


def _trim(q, m, k, request, transposed):
  """Codes, scales and decoded values without the padding."""
  codes, scales, decoded = q
  outer, inner = (k, m) if transposed else (m, k)
  inner = _up(inner, BLOCK)
  if codes is not None:
    codes = codes[:, :outer]
    # Rows of a square block share their scale.
    scales = scales[:, : outer : request.operand.block[0]]
  if decoded is not None:
    if request.operand.rht:
      m, k = (inner, k) if transposed else (m, inner)
    decoded = decoded[:, :m, :k]
  return codes, scales, decoded


def _kernel_operand(request, amax, stream):
  """A request as the kernel takes it, an axis for the batch in its arrays."""
  operand = request.operand
  scale = scaling.two_level_scale(amax, operand)
  smallest = jnp.where(jnp.isfinite(amax), scaling.SMALLEST, jnp.nan)
  return quantize_kernel.Operand(
    quantize_kernel.Config(
      rounding=operand.rounding,
      sr_bits=operand.sr_bits,
      scale=str(formats.FORMATS[operand.format].scale),
      scale_max=scale.block_max,
      four_over_six=operand.four_over_six,
      signs=operand.rht.signs if operand.rht else None,
    ),
    jnp.stack([scale.per_block, scale.decode, scale.encode, smallest], -1),
    stream if operand.rounding == "sr" else None,
    packed=request.packed,
    decoded=request.decoded,
  )


def _amax(x, rotation, params):
  """float32 [b] amax of an operand and of its rotation along columns."""

  def one(shard, x):
    del shard
    x = _pad(x, _padded_shape(x.shape[0], x.shape[1], columns=True))
    return amax_kernel.amax(x, signs=rotation.signs, interpret=params)

  return _by_shards(one, ["b m k"], ["b", "b"], "m", params)(x)


def _padded_shape(m, k, columns: bool) -> tuple[int, int]:
  """The least shape that holds a tile of the kernels; theirs overlap."""
  if columns:
    m, k = _up(m, BLOCK), _up(k, 2)
    shapes = [
      (max(m, rows), max(k, across)) for rows, across in registers.COLUMN_SHAPES
    ]
  else:  # few rows are padded to longer ones
    longer = _up(-(-_ROW_ELEMENTS // m), BLOCK)
    shapes = [(m, max(k, longer)), (max(m, -(-_ROW_ELEMENTS // k)), k)]
  return min(shapes, key=math.prod)


def _up(size, multiple):
  return -(-size // multiple) * multiple


def _pad(x, shape):
  """Zeros behind the last two axes, up to a shape."""
  rest = [(0, n - s) for n, s in zip(shape, x.shape[-2:], strict=True)]
  if not any(after for _, after in rest):
    return x
  return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), *rest])


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def decode(
  quantised: block_scaled.BlockScaled,
  dtype=jnp.bfloat16,
  *,
  interpret: bool = False,
):
  """``BlockScaled.decode`` of packed codes, by a kernel; to BF16 or E4M3."""
  *batch, rows, k = quantised.shape
  params = compat.interpret_params() if interpret else None
  codes, scales = quantised.codes, quantised.scales
  assert scales is not None
  scales = jnp.repeat(scales, quantised.block[0], axis=-2)[..., :rows, :]

  def one(shard, codes, scales):
    del shard
    m, k = codes.shape[0], 2 * codes.shape[1]
    shape = _padded_shape(m, k, False)
    values = decode_kernel.decode(
      _pad(codes, (shape[0], shape[1] // 2)),
      _pad(scales, (shape[0], shape[1] // BLOCK)),
      dtype=dtype,
      interpret=params,
    )
    return (values[:m, :k],)

  args = ["b m k/2", "b m k/16"]

  @_batched
  def run(codes, scales):
    return _by_shards(one, args, ["b m k"], "k", params)(codes, scales)

  (values,) = run(*(a.reshape(-1, *a.shape[-2:]) for a in (codes, scales)))
  return values[..., :k].reshape(*batch, rows, k)


def multiplies(lhs, rhs, contract, dtype) -> bool:
  """Whether the kernel takes two decoded operands, as ``multiply`` does."""
  return matmul_kernel.supports(
    lhs.shape, rhs.shape, contract, lhs.dtype, rhs.dtype, dtype
  )


def multiply(lhs, rhs, factors, contract, dtype, *, interpret: bool = False):
  """Product of two matrices and two factors, by a kernel.

  Args:
    lhs: [m, k], or [k, m] where it contracts its first axis; BF16 or E4M3.
    rhs: [n, k] or [k, n], of the same dtype.
    factors: two float32 scalars.
    contract: the axis of each that is contracted, -1 or -2.
    dtype: of the result.
    interpret: run the kernel on a CPU.
  """
  product = functools.partial(
    matmul_kernel.matmul,
    contract=contract,
    dtype=dtype,
    interpret=compat.interpret_params() if interpret else None,
  )
  return _limited(product)(lhs, rhs, jnp.stack(factors))


def multiplies_packed(lhs, rhs, dtype) -> bool:
  """Whether ``multiply_packed`` takes two operands; None is of no codes."""
  if lhs is None or rhs is None or len(lhs.shape) != 2 or len(rhs.shape) != 2:
    return False
  return jnp.dtype(dtype).name in block_scaled_matmul.RESULTS and bool(
    lhs.codes.size and rhs.codes.size
  )


def multiply_packed(lhs, rhs, dtype, multiplier, *, interpret: bool = False):
  """Product of two packed operands, their tensor scales included.

  Args:
    lhs: ``BlockScaled`` of shape [m, k], packed NVFP4.
    rhs: of shape [n, k].
    dtype: of the result, [m, n].
    multiplier: one of ``PACKED``.
    interpret: run the kernel on a CPU.
  """
  factors = scaling.product_factors(lhs.tensor_scale, rhs.tensor_scale)
  scales = [
    jnp.repeat(q.scales, q.block[0], axis=0)[: q.shape[0]] for q in (lhs, rhs)
  ]
  if multiplier == "cudnn":
    y = _by_cudnn(lhs.codes, rhs.codes, *scales)
    return (y * factors[0] * factors[1]).astype(dtype)
  m, n = lhs.shape[0], rhs.shape[0]
  tile = registers.LANES
  # Zeros behind: scales of 0, whose codes count for nothing.
  codes = [
    _pad(q.codes, (_up(q.shape[0], tile), _up(q.codes.shape[1], tile // 2)))
    for q in (lhs, rhs)
  ]
  tiles = [
    quantize_kernel.tile_scales(_pad(s, (c.shape[0], c.shape[1] * 2 // BLOCK)))
    for s, c in zip(scales, codes, strict=True)
  ]
  product = functools.partial(
    block_scaled_matmul.matmul,
    dtype=dtype,
    interpret=compat.interpret_params() if interpret else None,
  )
  y = _limited(product)(
    codes[0], tiles[0], codes[1], tiles[1], jnp.stack(factors)
  )
  return y[:m, :n]


def _by_cudnn(lhs, rhs, lhs_scales, rhs_scales):
  """float32 [m, n] product of codes [m, k / 2] and [n, k / 2] with scales."""

  def batch_of_one(array, dtype):
    array = lax.bitcast_convert_type(array, dtype)
    return array.reshape(1, array.shape[0], -1)

  operands = (batch_of_one(codes, jnp.float4_e2m1fn) for codes in (lhs, rhs))
  scales = (
    batch_of_one(codes, jnp.float8_e4m3fn) for codes in (lhs_scales, rhs_scales)
  )
  return jax.nn.scaled_matmul(*operands, *scales)[0]
