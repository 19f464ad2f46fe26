"""The quantised dot_general: fprop, dgrad and wgrad of one linear layer.

Every operand is brought to K-major form, [*batch, rows, contraction], so the
three GEMMs are one expression with three pairs of operands:

  fprop  y  = x · w     x [*b, m, k]   w [*b, n, k]
  dgrad  dx = g · wᵀ    g [*b, m, n]   wᵀ [*b, k, n]
  wgrad  dw = gᵀ · x    gᵀ [*b, n, m]  xᵀ [*b, k, m]

What the backward pass keeps is the quantised operands of its own GEMMs, made
in the forward pass from the same high-precision arrays.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from fp4jax import _jax
from fp4jax import backends
from fp4jax import block_scaled
from fp4jax import errors
from fp4jax import kernels
from fp4jax import recipes
from fp4jax import rounding
from fp4jax import scaling

RESIDUAL = "fp4jax_residual"
"""The ``checkpoint_name`` of everything that a quantised dot keeps."""

# Operands of a site: 2 * GEMM + (0 for lhs, 1 for rhs).
OPERANDS = 2 * len(recipes.GEMMS)
X, W, G, WT, XT, GT = range(OPERANDS)


@dataclasses.dataclass(frozen=True)
class Spec:
  """What is static of one quantised dot."""

  recipe: recipes.Recipe
  out_dtype: Any
  precision: Any
  site: str
  backend: str

  @property
  def interpret(self) -> bool:
    """Whether kernels run on a CPU."""
    return self.backend == "pallas_interpret"


def dot(
  lhs,
  rhs,
  dimension_numbers,
  *,
  recipe: recipes.Recipe,
  key=None,
  weight: str | None = "rhs",
  precision=None,
  preferred_element_type=None,
  backend: str | None = None,
  site: str = "dot",
):
  """``lax.dot_general`` whose three GEMMs are quantised by a recipe.

  Args:
    lhs: float array.
    rhs: float array.
    dimension_numbers: as ``jax.lax.dot_general``'s, any batch, contracted and
      free axes; no size needs to be a multiple of anything.
    recipe: what fprop, dgrad and wgrad do.
    key: PRNG key (typed or raw), or the ``rounding.Streams`` of its operands.
      Needed where a stochastically rounded GEMM runs.
    weight: "rhs" or "lhs", the side that holds the weight.
    precision: of GEMMs that the recipe leaves alone.
    preferred_element_type: the output's dtype, as ``dot_general``'s.
    backend: a name in ``backends.BACKENDS``, or None to choose by device.
    site: name for errors.

  Returns:
    What ``lax.dot_general`` returns, of the same shape and dtype. NaN
    everywhere where an operand holds NaN or Inf.

  Raises:
    MissingKeyError: a stochastically rounded GEMM runs and ``key`` is None.
    ValueError: operands are not real floats.
    UnsupportedError: the backend cannot serve the recipe.

  >>> import fp4jax
  >>> x, w = jnp.eye(16), jnp.full((16, 8), 3.0)
  >>> y = dot(x, w, (((1,), (0,)), ((), ())), recipe=fp4jax.recipes.nvfp4())
  >>> y.shape, round(float(y[0, 0]), 4)
  ((16, 8), 3.0)
  """
  asked = product(
    lhs,
    rhs,
    dimension_numbers,
    recipe=recipe,
    key=key,
    weight=weight,
    precision=precision,
    preferred_element_type=preferred_element_type,
    backend=backend,
    site=site,
  )
  return multiply([asked])[0]


def product(
  lhs,
  rhs,
  dimension_numbers,
  *,
  recipe,
  key,
  weight,
  precision,
  preferred_element_type,
  backend,
  site,
) -> "Product":
  """What ``dot`` is asked for, checked and not yet computed."""
  for name, x in (("lhs", lhs), ("rhs", rhs)):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
        f"{site}: {name} has dtype {x.dtype}, needed a real float; exclude"
        f' the site with Rule(path="{site}", recipe=None).'
      )
  if weight not in ("lhs", "rhs"):
    raise ValueError(f"{site}: weight={weight!r}; use 'lhs' or 'rhs'.")
  shards = _jax.varying_axes(lhs, rhs)
  backend = backends.check(recipe, backend, shards).name
  out = jax.eval_shape(
    lambda lhs, rhs: lax.dot_general(
      lhs,
      rhs,
      dimension_numbers,
      preferred_element_type=preferred_element_type,
    ),
    lhs,
    rhs,
  )
  return Product(
    lhs,
    rhs,
    dimension_numbers,
    weight,
    None if key is None else operand_streams(key),
    Spec(recipe, out.dtype, precision, site, backend),
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
  """One ``dot_general`` of a weight with another operand, not yet computed.

  Attributes:
    lhs: left operand.
    rhs: right operand.
    dimension_numbers: of ``lax.dot_general``.
    weight: "lhs" or "rhs".
    streams: random streams of its operands, None without a key.
    spec: how it is quantised.
  """

  lhs: Any
  rhs: Any
  dimension_numbers: Any
  weight: str
  streams: rounding.Streams | None
  spec: Spec


def multiply(products: Sequence[Product]) -> list:
  """Products that share their activations, which are quantised once.

  Args:
    products: of one recipe and backend, their operands besides the weight equal
      in value and in ``x_axes``; more than one only where ``shares`` says so.

  Returns:
    What ``lax.dot_general`` returns, of each.
  """
  xs, ws, shapes = [], [], []
  for p in products:
    (lc, rc), (lb, rb) = p.dimension_numbers
    x, w, wc, wb = p.rhs, p.lhs, lc, lb
    if p.weight == "rhs":
      x, w, wc, wb = p.lhs, p.rhs, rc, rb
    xb, xc = x_axes(p.dimension_numbers, p.weight)
    x, batch, m = _k_major(x, xb, xc)
    w, _, n = _k_major(w, wb, sorted(wc))
    xs.append(x)
    ws.append(w)
    shapes.append((batch, m, n))
  streams = tuple(p.streams for p in products)
  specs = tuple(p.spec for p in products)
  # Last first: so JAX adds the gradients of x in the order of single products.
  ys = _linears(*(v[::-1] for v in (tuple(xs), tuple(ws), streams, specs)))
  out = []
  for p, y, (batch, m, n) in zip(products, ys[::-1], shapes, strict=True):
    if p.weight == "rhs":
      out.append(y.reshape(*batch, *m, *n))
    else:
      out.append(jnp.swapaxes(y, -1, -2).reshape(*batch, *n, *m))
  return out


def x_axes(dimension_numbers, weight: str) -> tuple[tuple, tuple]:
  """Batch and contracted axes of the operand that is not the weight.

  Contracted axes come in the order that they have in the weight.
  """
  (lc, rc), (lb, rb) = dimension_numbers
  xc, wc, xb = (lc, rc, lb) if weight == "rhs" else (rc, lc, rb)
  order = sorted(range(len(wc)), key=lambda i: wc[i])
  return tuple(xb), tuple(xc[i] for i in order)


def shares(recipe: recipes.Recipe) -> bool:
  """Whether products of one operand may quantise it once.

  They may unless it is rounded stochastically: each has a stream of its own.
  """
  gemms = recipe.fprop, recipe.wgrad
  return recipe.quantises and not any(
    gemm is not None and gemm.lhs.rounding == "sr" for gemm in gemms
  )


def _k_major(x, batch, contract):
  """[*batch, rows, k], and the sizes of the batch and free axes."""
  free = [i for i in range(x.ndim) if i not in batch and i not in contract]
  sizes = [[x.shape[i] for i in axes] for axes in (batch, free, contract)]
  x = lax.transpose(x, (*batch, *free, *contract))
  lead = (math.prod(sizes[0]),) if batch else ()
  x = x.reshape(*lead, math.prod(sizes[1]), math.prod(sizes[2]))
  return x, sizes[0], sizes[1]


def operand_streams(key) -> rounding.Streams:
  """The streams of a dot that is a site of its own."""
  if isinstance(key, rounding.Streams):
    return key
  site, operands = np.indices((1, OPERANDS), np.uint32)
  words = rounding.site_keys(key, site, operands)
  return rounding.Streams(words, jnp.uint32(0), jnp.uint32(0))


def once_differentiable(function):
  """A part of a derivative rule that refuses to be differentiated itself.

  Codes have no slope, so a second derivative through them would be zero,
  silently.
  """
  rule = jax.custom_vjp(function, nondiff_argnums=(0,))

  def refuse(specs, *unused):
    spec = specs[0] if isinstance(specs, tuple) else specs
    raise errors.UnsupportedError(
      f"site {spec.site}: a second derivative through recipe"
      f" {spec.recipe.name} was asked for, but only first derivatives are"
      " defined; differentiate the untransformed model twice, or exclude the"
      f' site with Rule(path="{spec.site}", recipe=None).'
    )

  rule.defvjp(refuse, refuse)
  return rule


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linears(xs, ws, streams, specs):
  """The products of equal xs [*batch, m, k] with ws, [*batch, n, k] each."""
  for stream, spec in zip(streams, specs, strict=True):
    check_key(stream, spec, ("fprop",))
  gemm = specs[0].recipe.fprop
  use = Use(gemm and gemm.lhs, X)
  (xq,) = gemm_operands(xs[0], [use], streams[0], specs[0])
  ys = []
  for w, stream, spec in zip(ws, streams, specs, strict=True):
    (wq,) = gemm_operands(w, [Use(gemm and gemm.rhs, W)], stream, spec)
    ys.append(_gemm(xq, wq, spec.out_dtype, spec))
  return ys


@once_differentiable
def _linears_forward(specs, xs, ws, streams):
  fprop, dgrad, wgrad = (getattr(specs[0].recipe, g) for g in recipes.GEMMS)
  uses = Use(fprop and fprop.lhs, X), Use(wgrad and wgrad.lhs, XT, kept=True)
  xq, xt = gemm_operands(xs[0], uses, streams[0], specs[0])
  ys, wts = [], []
  for w, stream, spec in zip(ws, streams, specs, strict=True):
    uses = Use(fprop and fprop.rhs, W), Use(dgrad and dgrad.rhs, WT, kept=True)
    wq, wt = gemm_operands(w, uses, stream, spec)
    ys.append(_gemm(xq, wq, spec.out_dtype, spec))
    wts.append(wt)
  return ys, (xt, tuple(wts))


def _linears_fwd(xs, ws, streams, specs):
  for stream, spec in zip(streams, specs, strict=True):
    check_key(stream, spec, recipes.GEMMS)
  ys, kept = _linears_forward(specs, xs, ws, streams)
  return ys, (*named(kept), streams)


def _linears_bwd(specs, residuals, gs):
  gradients = _linears_gradients(specs, residuals, gs)
  return *gradients, no_gradient(residuals[-1])


def no_gradient(integers):
  """The cotangents of integer arrays."""
  return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), integers)


@once_differentiable
def _linears_gradients(specs, residuals, gs):
  xt, wts, streams = residuals
  _, dgrad, wgrad = (getattr(specs[0].recipe, g) for g in recipes.GEMMS)
  uses = Use(dgrad and dgrad.lhs, G), Use(wgrad and wgrad.rhs, GT)
  dxs, dws = [], []
  for wt, stream, spec, g in zip(wts, streams, specs, gs, strict=True):
    gq, gt = gemm_operands(g, uses, stream, spec)
    dxs.append(_gemm(gq, wt, xt.array.dtype, spec))
    dws.append(_gemm(gt, xt, wt.array.dtype, spec))
  return tuple(dxs), tuple(dws)


_linears.defvjp(_linears_fwd, _linears_bwd)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("array", "decoded_scale"),
  meta_fields=("contract",),
)
@dataclasses.dataclass(frozen=True)
class GemmOperand:
  """One operand of a GEMM.

  Attributes:
    array: [*batch, rows, columns] as the model wrote it, decoded BF16 values,
      or the codes of a ``BlockScaled``.
    contract: the axis that is contracted, -1 or -2.
    decoded_scale: the tensor scale [*batch] of decoded values.
  """

  array: Any
  contract: int
  decoded_scale: Any = None

  @property
  def scale(self):
    """The tensor scale [*batch] of a quantised operand, else None."""
    if isinstance(self.array, block_scaled.BlockScaled):
      return self.array.tensor_scale
    return self.decoded_scale

  def values(self, spec: Spec):
    """What the GEMM multiplies."""
    if not isinstance(self.array, block_scaled.BlockScaled):
      return self.array
    if spec.backend == "reference" or not self.array.packed:
      return self.array.decode()
    return kernels.decode(self.array, interpret=spec.interpret)


@dataclasses.dataclass(frozen=True)
class Use:
  """What becomes of an array in one of its GEMMs.

  Attributes:
    operand: how it is quantised; None leaves it alone.
    place: which of the six operands it is.
    kept: whether it waits for the backward pass.
  """

  operand: recipes.Operand | None
  place: int
  kept: bool = False

  @property
  def transposed(self) -> bool:
    """Whether the GEMM contracts the axis before the last."""
    return self.place in (XT, WT, GT)


def gemm_operands(x, uses, streams, spec) -> list[GemmOperand]:
  """An array as the operand of each of its GEMMs.

  Args:
    x: [*batch, rows, columns].
    uses: one of a GEMM that contracts the columns, one of a GEMM that contracts
      the rows, or both in this order.
    streams: of all operands, None without a key.
    spec: recipe and backend.

  Returns:
    An operand for each use.
  """
  first, second = uses[0], uses[1] if len(uses) > 1 else None
  if second is not None and _shared(first, second):
    (array,) = _quantised(x, [first], streams, spec, packed=True)
    codes, operand = array
    return [operand, GemmOperand(codes, -2)]
  quantised = [u for u in uses if u.operand is not None]
  made = dict(
    zip(quantised, _quantised(x, quantised, streams, spec), strict=True)
  )
  return [
    made[u][1] if u in made else GemmOperand(x, -2 if u.transposed else -1)
    for u in uses
  ]


def _shared(first: Use, second: Use) -> bool:
  """Whether the codes of one direction are those of the other, transposed."""
  operand = first.operand
  return (
    operand is not None and operand == second.operand and operand.transposable
  )


def _quantised(x, uses, streams, spec, packed=False):
  """Codes, where they are kept or ``packed``, and operand of each use."""
  if not uses:
    return []
  served = x.size and all(kernels.serves(u.operand, u.transposed) for u in uses)
  if spec.backend == "reference" or not served:
    return [_by_reference(x, u, streams, packed) for u in uses]
  requests: list = [None, None]
  stream: list = [None, None]
  for use in uses:
    kept = use.kept or packed
    requests[use.transposed] = kernels.Request(
      use.operand, packed=kept, decoded=not use.kept
    )
    if use.operand.rounding == "sr":
      stream[use.transposed] = streams.of(use.place)
  rows, columns = requests
  results = kernels.quantize(x, rows, columns, stream, interpret=spec.interpret)
  out = []
  for use in uses:
    codes, decoded, scale = results[use.transposed] or (None, None, None)
    kept = GemmOperand(codes, -1)
    contract = -2 if use.transposed else -1
    operand = kept if use.kept else GemmOperand(decoded, contract, scale)
    out.append((codes, operand))
  return out


def _by_reference(x, use, streams, packed):
  kept = use.kept or packed
  result = block_scaled.quantize(
    x,
    use.operand,
    streams.of(use.place) if use.operand.rounding == "sr" else None,
    axis=-2 if use.transposed else -1,
    codes=kept,
    decoded=not kept,
  )
  if kept:
    return result.codes, GemmOperand(result.codes, -1)
  return None, GemmOperand(result.decoded, -1, result.tensor_scale)


def named(kept):
  """What a quantised dot keeps, under its ``checkpoint_name``."""
  return jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL), kept)


def _gemm(lhs: GemmOperand, rhs: GemmOperand, dtype, spec):
  """[*batch, m, n] product of two operands, each contracted where it says."""
  quantised = lhs.scale is not None
  left, right = lhs.values(spec), rhs.values(spec)
  batch = tuple(range(left.ndim - 2))
  contract = ((left.ndim + lhs.contract,), (right.ndim + rhs.contract,))
  y = lax.dot_general(
    left,
    right,
    (contract, (batch, batch)),
    # Decoded operands are exact in BF16.
    precision=None if quantised else spec.precision,
    preferred_element_type=jnp.float32 if quantised else dtype,
  )
  if quantised:
    for factor in scaling.product_factors(lhs.scale, rhs.scale):
      y = y * factor[..., None, None]
  return y.astype(dtype)


def check_key(streams, spec, gemms):
  missing = [g for g in gemms if g in spec.recipe.stochastic]
  if streams is None and missing:
    raise errors.MissingKeyError(
      f"site {spec.site}: recipe {spec.recipe.name} rounds"
      f" {', '.join(missing)} stochastically and no key was given; pass"
      " fp4_key=jax.random.key(step) to the quantised function (key= to"
      " fp4jax.dot), or evaluate without differentiating."
    )
