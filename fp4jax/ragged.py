"""The quantised ragged_dot of a mixture of experts.

  fprop  y[i]  = x[i] · w[expert of token i]
  dgrad  dx[i] = g[i] · w[expert of token i]ᵀ
  wgrad  dw[e] = Σ over the tokens i of expert e of x[i]ᵀ · g[i]

Each expert's weight is an operand with its own tensor scale; all tokens share
one. In wgrad the tokens of each expert are moved to a multiple of the block
first, with zeros between, so that no block and no rotation mixes two experts.
"""

import functools
import math

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from fp4jax import backends
from fp4jax import errors
from fp4jax import formats
from fp4jax import recipes
from fp4jax import scaling
from fp4jax.dot import OUTPUT
from fp4jax.operands import GT
from fp4jax.operands import WT
from fp4jax.operands import XT
from fp4jax.operands import G
from fp4jax.operands import Spec
from fp4jax.operands import Use
from fp4jax.operands import W
from fp4jax.operands import X
from fp4jax.operands import check_key
from fp4jax.operands import check_sharding
from fp4jax.operands import gemm_operands
from fp4jax.operands import named
from fp4jax.operands import once_differentiable
from fp4jax.operands import operand_streams


def ragged_dot(
  lhs,
  rhs,
  group_sizes,
  *,
  recipe: recipes.Recipe,
  key=None,
  preferred_element_type=None,
  precision=None,
  backend: str | None = None,
  site: str = "ragged_dot",
):
  """``lax.ragged_dot`` whose three GEMMs are quantised by a recipe.

  Args:
    lhs: [m, k] float, tokens sorted by expert.
    rhs: [g, k, n] float, one weight an expert.
    group_sizes: int[g], tokens of each expert; zero is fine.
    recipe: what fprop, dgrad and wgrad do.
    key: as of ``fp4jax.dot``.
    preferred_element_type: the output's dtype.
    precision: of GEMMs that the recipe leaves alone.
    backend: a name in ``backends.BACKENDS``, or None to choose by device.
    site: name for errors.

  Returns:
    [m, n]; rows beyond the sum of ``group_sizes`` are 0. The gradient of an
    expert without tokens is exactly 0.

  Raises:
    MissingKeyError: a stochastically rounded GEMM runs and ``key`` is None.
    ValueError: ``lhs`` or ``rhs`` is no real float or of another rank.
    UnsupportedError: an operand has ``row_scale``; or as of ``fp4jax.dot``.
  """
  if lhs.ndim != 2 or rhs.ndim != 3:
    raise ValueError(
      f"{site}: lhs has shape {lhs.shape} and rhs {rhs.shape}, needed [m, k]"
      " and [g, k, n]."
    )
  for name, x in (("lhs", lhs), ("rhs", rhs)):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"{site}: {name} has dtype {x.dtype}, needed a float.")
  check_sharding(site, lhs, rhs)
  backend = backends.check(recipe, backend).name
  for name in recipes.GEMMS:
    gemm = getattr(recipe, name)
    if gemm and (gemm.lhs.row_scale or gemm.rhs.row_scale):
      raise errors.UnsupportedError(
        f"{site}: {name} of recipe {recipe.name} has row_scale=True, which"
        " ragged_dot does not compute; use"
        f' recipes.change(recipe, "{name}", row_scale=False), or exclude the'
        f' site with Rule(path="{site}", recipe=None).'
      )
  dtype = np.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
  spec = Spec(recipe, dtype, precision, site, backend)
  streams = None if key is None else operand_streams(key)
  return _ragged(lhs, jnp.swapaxes(rhs, 1, 2), group_sizes, streams, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ragged(x, w, sizes, streams, spec):
  """x [m, k], w [g, n, k]."""
  check_key(streams, spec, ("fprop",))
  gemm = spec.recipe.fprop
  (xq,) = gemm_operands(x, [Use(gemm and gemm.lhs, X)], streams, spec)
  (wq,) = gemm_operands(w, [Use(gemm and gemm.rhs, W)], streams, spec)
  return _grouped(xq, wq, sizes, spec.out_dtype, spec)


@once_differentiable
def _ragged_forward(spec, x, w, sizes, streams):
  fprop, dgrad, wgrad = (getattr(spec.recipe, g) for g in recipes.GEMMS)
  (xq,) = gemm_operands(x, [Use(fprop and fprop.lhs, X)], streams, spec)
  uses = Use(fprop and fprop.rhs, W), Use(dgrad and dgrad.rhs, WT, kept=True)
  wq, wt = gemm_operands(w, uses, streams, spec)
  y = _grouped(xq, wq, sizes, spec.out_dtype, spec)
  use = Use(wgrad and wgrad.lhs, XT, kept=True)
  (xt,) = gemm_operands(_apart(x, sizes, wgrad), [use], streams, spec)
  return y, (xt, wt)


def _ragged_fwd(x, w, sizes, streams, spec):
  check_key(streams, spec, recipes.GEMMS)
  y, kept = _ragged_forward(spec, x, w, sizes, streams)
  return checkpoint_name(y, OUTPUT), (*named(kept), sizes, streams)


def _ragged_bwd(spec, residuals, g):
  # Nothing is differentiated in sizes and streams.
  return *_ragged_gradients(spec, residuals, g), None, None


@once_differentiable
def _ragged_gradients(spec, residuals, g):
  xt, wt, sizes, streams = residuals
  _, dgrad, wgrad = (getattr(spec.recipe, g) for g in recipes.GEMMS)
  (gq,) = gemm_operands(g, [Use(dgrad and dgrad.lhs, G)], streams, spec)
  dx = _grouped(gq, wt, sizes, xt.array.dtype, spec)
  use = Use(wgrad and wgrad.rhs, GT)
  (gt,) = gemm_operands(_apart(g, sizes, wgrad), [use], streams, spec)
  dw = _contract_tokens(gt, xt, sizes, wgrad, wt.array.dtype, spec)
  return dx, dw


_ragged.defvjp(_ragged_fwd, _ragged_bwd)


def _padding(gemm: recipes.Gemm | None) -> int:
  """Tokens that an expert's share of wgrad is padded to a multiple of."""
  if gemm is None:
    return 1
  sizes = [1]
  for operand in (gemm.lhs, gemm.rhs):
    sizes.append(formats.FORMATS[operand.format].block or 1)
    sizes.append(operand.rht.size if operand.rht else 1)
  return math.lcm(*sizes)


def _padded(sizes, multiple: int):
  return (sizes + (multiple - 1)) // multiple * multiple


def _apart(x, sizes, gemm):
  """[m, k] tokens, each expert's beginning at a multiple of the block."""
  multiple = _padding(gemm)
  if multiple == 1:
    return x
  m, groups = x.shape[0], sizes.shape[0]
  starts = jnp.cumsum(sizes) - sizes
  padded = _padded(sizes, multiple)
  shift = jnp.cumsum(padded) - padded - starts
  rows = jnp.arange(m, dtype=sizes.dtype)
  expert = jnp.repeat(jnp.arange(groups), sizes, total_repeat_length=m)
  length = -(-m // multiple) * multiple + groups * multiple
  place = jnp.where(rows < jnp.sum(sizes), rows + shift[expert], length)
  return (
    jnp.zeros((length, *x.shape[1:]), x.dtype).at[place].set(x, mode="drop")
  )


def _grouped(lhs, rhs, sizes, dtype, spec):
  """[m, n] product of tokens and their experts' weights."""
  (left, left_scale), (right, right_scale) = lhs.read(spec), rhs.read(spec)
  right = right if rhs.contract == -2 else jnp.swapaxes(right, 1, 2)
  if left_scale is None:
    return lax.ragged_dot(
      left, right, sizes, spec.precision, preferred_element_type=dtype
    )
  y = lax.ragged_dot(left, right, sizes, preferred_element_type=jnp.float32)
  m = left.shape[0]
  for factor in scaling.product_factors(left_scale, right_scale):
    y = y * jnp.repeat(factor, sizes, total_repeat_length=m)[:, None]
  valid = jnp.arange(m) < jnp.sum(sizes)
  return jnp.where(valid[:, None], y, 0.0).astype(dtype)


def _contract_tokens(gt, xt, sizes, gemm, dtype, spec):
  """[g, n, k] product over each expert's tokens."""
  numbers = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
  )
  (left, left_scale), (right, right_scale) = gt.read(spec), xt.read(spec)
  left, right = (
    values if x.contract == -2 else values.T
    for x, values in ((gt, left), (xt, right))
  )
  quantised = left_scale is not None
  y = lax.ragged_dot_general(
    left,
    right,
    _padded(sizes, _padding(gemm)),
    numbers,
    precision=None if quantised else spec.precision,
    preferred_element_type=jnp.float32 if quantised else dtype,
  )
  if quantised:
    for factor in scaling.product_factors(left_scale, right_scale):
      y = y * factor
  return y.astype(dtype)
