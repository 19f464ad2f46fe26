"""The operands of a site's three GEMMs, and the rules of its derivative.

An array is an operand of two GEMMs, along one axis in the first and along the
other in the second. Both are made here, by the backend that serves them; what
waits for the backward pass waits as codes.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from fp4jax import _jax
from fp4jax import block_scaled
from fp4jax import errors
from fp4jax import kernels
from fp4jax import recipes
from fp4jax import rounding

RESIDUAL = "fp4jax_residual"
"""The ``checkpoint_name`` of everything that a quantised dot keeps."""

# Operands of a site: 2 * GEMM + (0 for lhs, 1 for rhs).
OPERANDS = 2 * len(recipes.GEMMS)
X, W, G, WT, XT, GT = range(OPERANDS)


@dataclasses.dataclass(frozen=True)
class Spec:
  """What is static of one quantised dot.

  Attributes:
    recipe: of its three GEMMs.
    out_dtype: of its result.
    precision: of GEMMs that the recipe leaves alone.
    site: name for errors.
    backend: what quantises.
    multiplier: what multiplies, see ``backends.multiplier``.
    k_first: whether the weight is [k, n], not [n, k]: then nothing transposes
      it, nor its gradient.
  """

  recipe: recipes.Recipe
  out_dtype: Any
  precision: Any
  site: str
  backend: str
  multiplier: str = "xla"
  k_first: bool = False

  @property
  def takes_k_first(self) -> bool:
    """Whether both uses of the weight have the same codes, in either order."""
    fprop, dgrad = self.recipe.fprop, self.recipe.dgrad
    if fprop is None or dgrad is None or self.multiplier != "hopper":
      return False
    return fprop.rhs == dgrad.rhs and fprop.rhs.transposable

  @property
  def packed(self) -> bool:
    """Whether products take packed operands, as Blackwell's tensor cores do."""
    return self.multiplier in kernels.PACKED

  @property
  def interpret(self) -> bool:
    """Whether kernels run on a CPU."""
    return self.backend == "pallas_interpret"

  def dtype(self, gemm: str):
    """What the operands of a GEMM are decoded to: both hold them exactly."""
    asked = getattr(self.recipe, gemm)
    if asked is None or self.multiplier != "hopper":
      return jnp.bfloat16
    formats = {asked.lhs.format, asked.rhs.format}
    exact = formats == {"nvfp4_fp8_exact"}
    return jnp.float8_e4m3fn if exact else jnp.bfloat16


def operand_streams(key) -> rounding.Streams:
  """The streams of a dot that is a site of its own."""
  if isinstance(key, rounding.Streams):
    return key
  site, operands = np.indices((1, OPERANDS), np.uint32)
  words = rounding.site_keys(key, site, operands)
  return rounding.Streams(words, jnp.uint32(0), jnp.uint32(0))


def check_sharding(site: str, *arrays) -> None:
  """Raises UnsupportedError for operands that explicit axes divide."""
  if axes := _jax.divided_explicitly(*arrays):
    raise errors.UnsupportedError(
      f"site {site}: the explicit mesh axes {', '.join(axes)} divide its"
      " operands, needed auto axes, along which blocks are divided as XLA sees"
      " fit; call the quantised function in jax.sharding.auto_axes, or make the"
      " mesh with axis_types=(jax.sharding.AxisType.Auto, ...)."
    )


def check_key(streams, spec, gemms):
  missing = [g for g in gemms if g in spec.recipe.stochastic]
  if streams is None and missing:
    raise errors.MissingKeyError(
      f"site {spec.site}: recipe {spec.recipe.name} rounds"
      f" {', '.join(missing)} stochastically and no key was given; pass"
      " fp4_key=jax.random.key(step) to the quantised function (key= to"
      " fp4jax.dot), or evaluate without differentiating."
    )


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


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("array", "decoded_scale"),
  meta_fields=("contract", "quantised"),
)
@dataclasses.dataclass(frozen=True)
class GemmOperand:
  """One operand of a GEMM.

  Attributes:
    array: [*batch, rows, columns] as the model wrote it, decoded BF16 values,
      or codes.
    contract: the axis that is contracted, -1 or -2.
    decoded_scale: the tensor scale of decoded values, [*batch], or [*batch,
      rows] where the operand has ``row_scale``.
    quantised: how the array was quantised, None where it was not.
  """

  array: Any
  contract: int
  decoded_scale: Any = None
  quantised: recipes.Operand | None = None

  def read(self, spec: Spec, dtype=jnp.bfloat16) -> tuple:
    """What the GEMM multiplies, and its tensor scale, None if it has none.

    Args:
      spec: says who decodes.
      dtype: of decoded values.
    """
    if isinstance(self.array, block_scaled.JoinedBlockScaled):
      return self.array.decode()
    if not isinstance(self.array, block_scaled.BlockScaled):
      return self.array, self.decoded_scale
    if spec.backend == "reference" or not self.array.packed:
      values = self.array.decode(dtype)
    else:
      values = kernels.decode(self.array, dtype, interpret=spec.interpret)
    return values, self.array.tensor_scale

  def packed(self) -> block_scaled.BlockScaled | None:
    """Packed codes, the contraction last; None where there are none."""
    q = self.array
    if not isinstance(q, block_scaled.BlockScaled) or not q.packed:
      return None
    return q if self.contract == -1 else q.transposed()


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
  def gemm(self) -> str:
    """The GEMM that it is an operand of."""
    return recipes.GEMMS[self.place // 2]

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
    return [operand, GemmOperand(codes, -2, quantised=second.operand)]
  quantised = [u for u in uses if u.operand is not None]
  made = dict(
    zip(quantised, _quantised(x, quantised, streams, spec), strict=True)
  )
  return [
    made[u][1] if u in made else GemmOperand(x, -2 if u.transposed else -1)
    for u in uses
  ]


def weight_operands(w, uses, stream, spec) -> list[GemmOperand]:
  """A weight as the operand of fprop, and of dgrad where ``uses`` has it."""
  made = gemm_operands(w, uses, stream, spec)
  if not spec.k_first:
    return made
  # Square blocks: the codes along one axis are those along the other.
  return [dataclasses.replace(o, contract=-3 - o.contract) for o in made]


def weight_codes(w, gemms, stream, spec) -> tuple[GemmOperand, ...] | None:
  """A weight's codes, to be used in several calls; None where it has none.

  Args:
    w: as ``weight_operands`` takes it.
    gemms: fprop and dgrad of the recipe.
    stream: of all operands, None without a key.
    spec: recipe and backend.

  Returns:
    The operands of fprop and of dgrad, or the first where both have the same
    codes.
  """
  sides = [gemm and gemm.rhs for gemm in gemms]
  if any(side is None or side.stochastic for side in sides):
    return None
  uses = Use(sides[0], W, kept=True), Use(sides[1], WT, kept=True)
  made = weight_operands(w, uses, stream, spec)
  return (made[0],) if _shared(*uses) else tuple(made)


def from_codes(codes: tuple[GemmOperand, ...]) -> list[GemmOperand]:
  """The operands of fprop and dgrad, out of what ``weight_codes`` gives."""
  first = codes[0]
  second = dataclasses.replace(first, contract=-3 - first.contract)
  return [first, codes[1] if len(codes) > 1 else second]


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
  as_codes = {use: use.kept or _k_major_only(use, spec) for use in uses}
  for use in uses:
    requests[use.transposed] = kernels.Request(
      use.operand,
      packed=as_codes[use] or packed,
      decoded=None if as_codes[use] else spec.dtype(use.gemm),
      transposed=spec.k_first and use.place in (W, WT),
    )
    if use.operand.rounding == "sr":
      stream[use.transposed] = streams.of(use.place)
  rows, columns = requests
  results = kernels.quantize(x, rows, columns, stream, interpret=spec.interpret)
  out = []
  for use in uses:
    codes, decoded, scale = results[use.transposed] or (None, None, None)
    contract = -2 if use.transposed else -1
    if as_codes[use]:
      operand = GemmOperand(codes, -1, quantised=use.operand)
    else:
      operand = GemmOperand(decoded, contract, scale, use.operand)
    out.append((codes, operand))
  return out


def _k_major_only(use: Use, spec: Spec) -> bool:
  """Whether a GEMM takes the operand in the order of its codes alone.

  Kernels decode to the order of the array that they quantise; tensor cores take
  bytes, and codes, along the contraction.
  """
  return spec.packed or use.transposed and spec.dtype(use.gemm) != jnp.bfloat16


def _by_reference(x, use, streams, packed):
  stream = streams.of(use.place) if use.operand.rounding != "rne" else None
  rotation = None
  if use.operand.rht is not None and use.operand.rht.signs is None:
    rotation = streams.of(use.place & ~1)  # both operands draw lhs's
  axis = -2 if use.transposed else -1
  if not (use.kept or packed):
    result = block_scaled.quantize(
      x, use.operand, stream, rotation, axis=axis, codes=False, decoded=True
    )
    decoded, scale = result.decoded, result.tensor_scale
    return None, GemmOperand(decoded, -1, scale, use.operand)
  codes: Any
  if _jax.compiles_units():
    codes = block_scaled.quantize_joined(
      x, use.operand, stream, rotation, axis=axis
    )
  else:
    codes = block_scaled.quantize(
      x, use.operand, stream, rotation, axis=axis
    ).codes
  return codes, GemmOperand(codes, -1, quantised=use.operand)


def named(kept):
  """What a quantised dot keeps, under its ``checkpoint_name``."""
  return jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL), kept)
