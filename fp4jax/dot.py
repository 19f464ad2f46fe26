"""The quantised dot_general: fprop, dgrad and wgrad of one linear layer.

Every operand is brought to K-major form, [*batch, rows, contraction], so the
three GEMMs are one expression with three pairs of operands:

  fprop  y  = x · w     x [*b, m, k]   w [*b, n, k]
  dgrad  dx = g · wᵀ    g [*b, m, n]   wᵀ [*b, k, n]
  wgrad  dw = gᵀ · x    gᵀ [*b, n, m]  xᵀ [*b, k, m]

What the backward pass keeps is the quantised operands of its own GEMMs, made
in the forward pass from the same high-precision arrays. Where the kernels'
products contract either axis, a weight of square blocks stays [k, n].
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

from fp4jax import backends
from fp4jax import kernels
from fp4jax import recipes
from fp4jax import rounding
from fp4jax import scaling
from fp4jax.operands import GT
from fp4jax.operands import WT
from fp4jax.operands import XT
from fp4jax.operands import G
from fp4jax.operands import GemmOperand
from fp4jax.operands import Spec
from fp4jax.operands import Use
from fp4jax.operands import W
from fp4jax.operands import X
from fp4jax.operands import check_key
from fp4jax.operands import check_sharding
from fp4jax.operands import from_codes
from fp4jax.operands import gemm_operands
from fp4jax.operands import named
from fp4jax.operands import once_differentiable
from fp4jax.operands import operand_streams
from fp4jax.operands import weight_codes
from fp4jax.operands import weight_operands

OUTPUT = "fp4jax_output"
"""The ``checkpoint_name`` of what a quantised dot returns."""


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
    everywhere where an operand holds NaN or Inf; in that operand's row alone
    where it has ``row_scale``.

  Raises:
    MissingKeyError: a stochastically rounded GEMM runs and ``key`` is None.
    ValueError: operands are not real floats.
    UnsupportedError: the backend cannot serve the recipe; or explicit axes of
      a mesh divide an operand.

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
  codes=None,
) -> "Product":
  """What ``dot`` is asked for, checked and not yet computed.

  ``codes`` are those of the weight, from ``Product.weight_codes``, or None.
  """
  for name, x in (("lhs", lhs), ("rhs", rhs)):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
        f"{site}: {name} has dtype {x.dtype}, needed a real float; exclude"
        f' the site with Rule(path="{site}", recipe=None).'
      )
  if weight not in ("lhs", "rhs"):
    raise ValueError(f"{site}: weight={weight!r}; use 'lhs' or 'rhs'.")
  check_sharding(site, lhs, rhs)
  backend = backends.check(recipe, backend).name
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
    Spec(
      recipe,
      out.dtype,
      precision,
      site,
      backend,
      backends.multiplier(backend),
    ),
    codes,
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
    codes: of its weight, None where it is quantised anew.
  """

  lhs: Any
  rhs: Any
  dimension_numbers: Any
  weight: str
  streams: rounding.Streams | None
  spec: Spec
  codes: tuple | None = None

  def prepared(self) -> tuple:
    """Activations, weight, spec, and batch and free sizes of the result."""
    (lc, rc), (lb, rb) = self.dimension_numbers
    x, w, wc, wb = self.rhs, self.lhs, lc, lb
    if self.weight == "rhs":
      x, w, wc, wb = self.lhs, self.rhs, rc, rb
    xb, xc = x_axes(self.dimension_numbers, self.weight)
    x, batch, m = _k_major(x, xb, xc)
    spec = self.spec
    if spec.takes_k_first and not wb and sorted(wc) == list(range(len(wc))):
      spec = dataclasses.replace(spec, k_first=True)
      n = w.shape[len(wc) :]
      w = w.reshape(math.prod(w.shape[: len(wc)]), math.prod(n))
    else:
      w, _, n = _k_major(w, wb, sorted(wc))
    return x, w, spec, (batch, m, n)

  def weight_codes(self) -> tuple | None:
    """The weight's codes; None where it is not quantised, or stochastically."""
    _, w, spec, _ = self.prepared()
    gemms = spec.recipe.fprop, spec.recipe.dgrad
    return weight_codes(w, gemms, self.streams, spec)


def multiply(products: Sequence[Product]) -> list:
  """Products that share their activations, which are quantised once.

  Args:
    products: of one recipe and backend, their operands besides the weight equal
      in value and in ``x_axes``; more than one only where ``shares`` says so.

  Returns:
    What ``lax.dot_general`` returns, of each.
  """
  prepared = [p.prepared() for p in products]
  xs, ws, specs, shapes = zip(*prepared, strict=True)
  codes, streams = zip(*((p.codes, p.streams) for p in products), strict=True)
  # Last first: so JAX adds the gradients of x in the order of single products.
  ys = _linears(*(v[::-1] for v in (xs, ws, codes, streams, specs)))
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

  They may unless it is quantised at random: each has a stream of its own.
  """
  gemms = recipe.fprop, recipe.wgrad
  return recipe.quantises and not any(
    gemm is not None and gemm.lhs.stochastic for gemm in gemms
  )


def _k_major(x, batch, contract):
  """[*batch, rows, k], and the sizes of the batch and free axes."""
  free = [i for i in range(x.ndim) if i not in batch and i not in contract]
  sizes = [[x.shape[i] for i in axes] for axes in (batch, free, contract)]
  x = lax.transpose(x, (*batch, *free, *contract))
  lead = (math.prod(sizes[0]),) if batch else ()
  x = x.reshape(*lead, math.prod(sizes[1]), math.prod(sizes[2]))
  return x, sizes[0], sizes[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linears(xs, ws, codes, streams, specs):
  """The products of equal xs [*batch, m, k] with ws.

  These are [*batch, n, k] each, or [k, n] where the spec says ``k_first``; they
  are not read where their codes are given.
  """
  for stream, spec in zip(streams, specs, strict=True):
    check_key(stream, spec, ("fprop",))
  gemm = specs[0].recipe.fprop
  use = Use(gemm and gemm.lhs, X)
  (xq,) = gemm_operands(xs[0], [use], streams[0], specs[0])
  ys = []
  for w, given, stream, spec in zip(ws, codes, streams, specs, strict=True):
    if given is None:
      (wq,) = weight_operands(w, [Use(gemm and gemm.rhs, W)], stream, spec)
    else:
      wq, _ = from_codes(given)
    ys.append(_gemm("fprop", xq, wq, spec.out_dtype, spec))
  return ys


@once_differentiable
def _linears_forward(specs, xs, ws, codes, streams):
  fprop, dgrad, wgrad = (getattr(specs[0].recipe, g) for g in recipes.GEMMS)
  uses = Use(fprop and fprop.lhs, X), Use(wgrad and wgrad.lhs, XT, kept=True)
  xq, xt = gemm_operands(xs[0], uses, streams[0], specs[0])
  uses = Use(fprop and fprop.rhs, W), Use(dgrad and dgrad.rhs, WT, kept=True)
  ys, wts = [], []
  for w, given, stream, spec in zip(ws, codes, streams, specs, strict=True):
    if given is None:
      wq, wt = weight_operands(w, uses, stream, spec)
    else:
      wq, wt = from_codes(given)
    ys.append(_gemm("fprop", xq, wq, spec.out_dtype, spec))
    wts.append(wt)
  return ys, (xt, tuple(wts))


def _linears_fwd(xs, ws, codes, streams, specs):
  for stream, spec in zip(streams, specs, strict=True):
    check_key(stream, spec, recipes.GEMMS)
  ys, kept = _linears_forward(specs, xs, ws, codes, streams)
  ys = [checkpoint_name(y, OUTPUT) for y in ys]
  return ys, (*named(kept), streams)


def _linears_bwd(specs, residuals, gs):
  # Nothing is differentiated in codes and streams.
  return *_linears_gradients(specs, residuals, gs), None, None


@once_differentiable
def _linears_gradients(specs, residuals, gs):
  xt, wts, streams = residuals
  _, dgrad, wgrad = (getattr(specs[0].recipe, g) for g in recipes.GEMMS)
  uses = Use(dgrad and dgrad.lhs, G), Use(wgrad and wgrad.rhs, GT)
  dxs, dws = [], []
  for wt, stream, spec, g in zip(wts, streams, specs, gs, strict=True):
    gq, gt = gemm_operands(g, uses, stream, spec)
    dxs.append(_gemm("dgrad", gq, wt, xt.array.dtype, spec))
    lhs, rhs = (xt, gt) if spec.k_first else (gt, xt)
    dws.append(_gemm("wgrad", lhs, rhs, wt.array.dtype, spec))
  return tuple(dxs), tuple(dws)


_linears.defvjp(_linears_fwd, _linears_bwd)


def _gemm(name: str, lhs: GemmOperand, rhs: GemmOperand, dtype, spec):
  """[*batch, m, n] product of two operands, each contracted where it says."""
  if spec.packed:
    packed = lhs.packed(), rhs.packed()
    if kernels.multiplies_packed(*packed, dtype):
      y = kernels.multiply_packed(
        *packed, dtype, spec.multiplier, interpret=spec.interpret
      )
      return lax.optimization_barrier(y)
  element = spec.dtype(name)
  (left, left_scale), (right, right_scale) = (
    operand.read(spec, element) for operand in (lhs, rhs)
  )
  contract = lhs.contract, rhs.contract
  if left_scale is None:
    y = _contracted(left, right, contract, dtype, spec.precision)
    return y.astype(dtype)
  rows, columns = (
    o.quantised is not None and o.quantised.row_scale for o in (lhs, rhs)
  )
  if rows or columns:  # of the result
    left_scale = left_scale[..., None] if rows else left_scale[..., None, None]
    right_scale = jnp.expand_dims(right_scale, -2 if columns else (-2, -1))
  factors = scaling.product_factors(left_scale, right_scale)
  if spec.multiplier == "hopper":
    if element != jnp.bfloat16:  # tensor cores take bytes K-major alone
      left, right = (
        x if axis == -1 else jnp.swapaxes(x, -1, -2)
        for x, axis in zip((left, right), contract, strict=True)
      )
      contract = -1, -1
    if kernels.multiplies(left, right, contract, dtype):
      y = kernels.multiply(
        left, right, factors, contract, dtype, interpret=spec.interpret
      )
      # XLA would run a kernel twice whose result is used and kept by a scan.
      return lax.optimization_barrier(y)
  # Decoded operands are exact in BF16, whose products XLA adds up in float32.
  left, right = (x.astype(jnp.bfloat16) for x in (left, right))
  y = _contracted(left, right, contract, jnp.float32, None)
  for factor in factors:
    y = y * (factor if rows or columns else factor[..., None, None])
  return y.astype(dtype)


def _contracted(lhs, rhs, contract, dtype, precision):
  """``lax.dot_general`` of [*batch, ...] operands, by the axes contracted."""
  batch = tuple(range(lhs.ndim - 2))
  axes = (lhs.ndim + contract[0],), (rhs.ndim + contract[1],)
  return lax.dot_general(
    lhs,
    rhs,
    (axes, (batch, batch)),
    precision=precision,
    preferred_element_type=dtype,
  )
