"""Recipes: what one linear layer does in its three GEMMs.

A recipe is plain data. Variants are made with ``change``, or with
``dataclasses.replace``:

>>> print(change(nvfp4(), "wgrad", rht=None, rounding="rne").wgrad)
nvfp4 · nvfp4
"""

from collections.abc import Iterable
import dataclasses
import numbers
from typing import Literal

from fp4jax import errors
from fp4jax import formats

Rounding = Literal["rne", "sr", "eden"]
GEMMS = ("fprop", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rht:
  """Random Hadamard transform: group size and sign vector.

  Attributes:
    size: elements a group, a power of two from 2 to 128.
    signs: bit i set means sign -1 of element i; 16 bits, repeated over longer
      groups. None draws all signs from the key: others for each GEMM, layer
      and call, the same for both operands.
  """

  size: int = 16
  signs: int | None = 0xD7E8

  def __post_init__(self):
    if self.size not in (2, 4, 8, 16, 32, 64, 128):
      raise ValueError(
        f"Rht: size={self.size!r} is no power of two from 2 to 128; the"
        " paper's is 16."
      )
    if self.signs is not None and not 0 <= self.signs < 1 << 16:
      raise ValueError(
        f"Rht: signs={self.signs!r} has more than 16 bits; the default is"
        " 0xD7E8."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
  """How one operand of a GEMM is quantised.

  Attributes:
    format: a name in ``fp4jax.formats.FORMATS``.
    block: rows and contraction elements that share a block scale, (1, b) or
      (b, b) with the format's b; ignored by formats without blocks.
    rounding: "rne" (nearest, ties to even), "sr" (stochastic), or "eden":
      nearest codes, and each block's correction ⟨x, x⟩ / ⟨x, Q(x)⟩ in its
      scale, which is rounded stochastically (nvfp4 of 1x16 blocks only).
    rht: the rotation along the contraction axis before quantising, or None.
      Both operands of a GEMM must agree.
    scale_guard: fraction of the largest code that a block's amax maps to;
      16/17 makes stochastic rounding unbiased.
    four_over_six: per block the better of amax→6 and amax→4 (RNE only).
    sr_bits: random bits an element, 16 or 8 (Blackwell's ``cvt.rs``).
    row_scale: whether every row, all of its contraction, has a tensor scale of
      its own. NaN or Inf then spoils its row of the GEMM's result alone. Blocks
      must not span rows. The reference backend alone computes it, and not in
      ``ragged_dot`` nor inside ``shard_map``.
  """

  format: str = "nvfp4"
  block: tuple[int, int] = (1, 16)
  rounding: Rounding = "rne"
  rht: Rht | None = None
  scale_guard: float = 1.0
  four_over_six: bool = False
  sr_bits: int = 16
  row_scale: bool = False

  def __post_init__(self):
    known = isinstance(self.format, str) and self.format in formats.FORMATS
    if not known:
      raise ValueError(
        f"Operand: format={self.format!r} is not known; use one of"
        f" {', '.join(formats.FORMATS)}, or leave the GEMM None for BF16."
      )
    block = formats.FORMATS[self.format].block
    if block and self.block not in ((1, block), (block, block)):
      raise ValueError(
        f"Operand: block={self.block!r} does not fit {self.format}; use"
        f" (1, {block}) or ({block}, {block})."
      )
    if not isinstance(self.block, tuple) or len(self.block) != 2:
      raise ValueError(
        f"Operand: block={errors.shown(self.block)} is no pair of sizes;"
        f" {self.format} has no blocks: leave it out."
      )
    if self.rht is not None and not isinstance(self.rht, Rht):
      raise ValueError(
        f"Operand: rht={errors.shown(self.rht)} is no Rht; pass Rht(), or None"
        " for no rotation."
      )
    if not isinstance(self.four_over_six, bool):
      raise ValueError(
        f"Operand: four_over_six={errors.shown(self.four_over_six)}; use True"
        " or False."
      )
    if self.rounding not in ("rne", "sr", "eden"):
      raise ValueError(
        f"Operand: rounding={self.rounding!r}; use 'rne', 'sr' or 'eden'."
      )
    if self.four_over_six and self.rounding != "rne":
      raise ValueError(
        f"Operand: four_over_six=True with rounding={self.rounding!r} would"
        " bias the gradient; choose one of them."
      )
    if self.four_over_six and not self.format.startswith("nvfp4"):
      raise ValueError(
        f"Operand: four_over_six=True with format={self.format!r}; it is"
        " defined for nvfp4 and nvfp4_fp8_exact."
      )
    number = isinstance(self.scale_guard, numbers.Real)
    if not number or not 0.5 <= self.scale_guard <= 1.5:
      raise ValueError(
        f"Operand: scale_guard={self.scale_guard!r} is outside [0.5, 1.5];"
        " 1.0 is the paper's, 16/17 unbiased."
      )
    if self.scale_guard != 1.0 and self.format != "nvfp4":
      raise ValueError(
        f"Operand: scale_guard={self.scale_guard!r} with"
        f" format={self.format!r}; it is defined for nvfp4."
      )
    if self.scale_guard != 1.0 and self.four_over_six:
      raise ValueError(
        "Operand: scale_guard and four_over_six both change the range of"
        " codes; choose one of them."
      )
    if self.sr_bits not in (8, 16):
      raise ValueError(f"Operand: sr_bits={self.sr_bits!r}; use 16 or 8.")
    if self.rounding == "eden":
      self._check_eden()
    if not isinstance(self.row_scale, bool):
      raise ValueError(
        f"Operand: row_scale={errors.shown(self.row_scale)}; use True or False."
      )
    if self.row_scale and formats.FORMATS[self.format].scale == "e8m0":
      raise ValueError(
        f"Operand: row_scale=True with format={self.format!r}, which has no"
        " tensor scale; leave it out."
      )
    if self.row_scale and self.block[0] != 1:
      raise ValueError(
        f"Operand: row_scale=True with block={self.block!r}, whose rows share"
        f" block scales; use block=(1, {self.block[1]})."
      )

  def _check_eden(self):
    """Raises ValueError for what EDEN is not defined for."""
    if self.format != "nvfp4" or self.block != (1, 16):
      raise ValueError(
        f"Operand: rounding='eden' with format={self.format!r} and"
        f" block={self.block!r}; it is defined for nvfp4 with block=(1, 16)."
      )
    if self.rht is None:
      raise ValueError(
        "Operand: rounding='eden' with rht=None, whose correction would be a"
        " bias: it is unbiased over random rotations; use rht=Rht(size=128,"
        " signs=None)."
      )
    if self.sr_bits != 16:
      raise ValueError(
        f"Operand: rounding='eden' with sr_bits={self.sr_bits!r}; it is defined"
        " for 16."
      )

  @property
  def transposable(self) -> bool:
    """Whether Q(x) transposed and Q(x transposed) are the same numbers."""
    square = (
      self.block[0] == self.block[1]
      or formats.FORMATS[self.format].block is None
    )
    plain = self.rht is None and self.rounding == "rne"
    return square and plain and not self.row_scale

  @property
  def stochastic(self) -> bool:
    """Whether quantising needs a key."""
    keyed = self.rht is not None and self.rht.signs is None
    return keyed or self.rounding != "rne"

  def __str__(self):
    text = self.format
    if self.block[0] > 1:
      text += f" {self.block[0]}x{self.block[1]}"
    if self.rht:
      text += " rht" if self.rht.size == 16 else f" rht{self.rht.size}"
      text += " keyed" if self.rht.signs is None else ""
    if self.rounding != "rne":
      text += f" {self.rounding}"
    if self.four_over_six:
      text += " 4/6"
    if self.row_scale:
      text += " row"
    return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
  """The two operands of one GEMM; both contract along their K-major axis."""

  lhs: Operand
  rhs: Operand

  def __post_init__(self):
    for name, operand in (("lhs", self.lhs), ("rhs", self.rhs)):
      if not isinstance(operand, Operand):
        raise ValueError(
          f"Gemm: {name}={errors.shown(operand)} is no Operand; pass Operand(),"
          " or leave a GEMM as written with None in place of the Gemm."
        )
    if self.lhs.rht != self.rhs.rht:
      raise ValueError(
        f"Gemm: lhs.rht={self.lhs.rht} and rhs.rht={self.rhs.rht} differ, so"
        " the rotation would not cancel; give both the same."
      )

  def __str__(self):
    return f"{self.lhs} · {self.rhs}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What one linear layer does: ``y = x w`` and its two gradients.

  Attributes:
    name: for tables and logs.
    fprop: lhs x, rhs w, contraction K.
    dgrad: lhs g, rhs wᵀ, contraction N.
    wgrad: lhs xᵀ, rhs gᵀ, contraction tokens.

  A GEMM that is None runs as the model wrote it.
  """

  name: str
  fprop: Gemm | None = None
  dgrad: Gemm | None = None
  wgrad: Gemm | None = None

  @property
  def quantises(self) -> bool:
    """Whether any GEMM is quantised."""
    return any((self.fprop, self.dgrad, self.wgrad))

  @property
  def stochastic(self) -> tuple[str, ...]:
    """Names of the GEMMs that need a key."""
    return tuple(
      name
      for name in GEMMS
      if (gemm := getattr(self, name))
      and (gemm.lhs.stochastic or gemm.rhs.stochastic)
    )


def _three(name, x, w, g, wt=None, xt=None, gt=None) -> Recipe:
  """The recipe table: fprop x·w, dgrad g·wᵀ, wgrad xᵀ·gᵀ."""
  return Recipe(
    name=name,
    fprop=Gemm(lhs=x, rhs=w),
    dgrad=Gemm(lhs=g, rhs=wt or w),
    wgrad=Gemm(lhs=xt or x, rhs=gt or g),
  )


def nvfp4() -> Recipe:
  """The paper's recipe: 1x16 activations, 16x16 weights, RHT on wgrad, SR.

  References:
    NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
  """
  return _nvfp4("nvfp4", "nvfp4")


def nvfp4_fp8_exact() -> Recipe:
  """``nvfp4`` with block scales whose products with codes are E4M3 numbers.

  Hopper's FP8 tensor cores then take exact operands. RNE operands choose
  between amax→6 and amax→4 per block.
  """
  return _nvfp4("nvfp4_fp8_exact", "nvfp4_fp8_exact", four_over_six=True)


def _nvfp4(name: str, format: str, four_over_six: bool = False) -> Recipe:
  x = Operand(format=format, four_over_six=four_over_six)
  w = dataclasses.replace(x, block=(16, 16))
  g = Operand(format=format, rounding="sr")
  return _three(
    name,
    x,
    w,
    g,
    xt=dataclasses.replace(x, rht=Rht()),
    gt=dataclasses.replace(g, rht=Rht()),
  )


def mxfp4() -> Recipe:
  """OCP MXFP4 throughout, 1x32 blocks, with the paper's RHT and SR."""
  x = Operand(format="mxfp4", block=(1, 32))
  g = dataclasses.replace(x, rounding="sr")
  xt = dataclasses.replace(x, rht=Rht())
  gt = dataclasses.replace(g, rht=Rht())
  return _three("mxfp4", x, x, g, xt=xt, gt=gt)


def mxfp8() -> Recipe:
  """OCP MXFP8 throughout: E4M3, 1x32 blocks, nearest rounding."""
  x = Operand(format="mxfp8", block=(1, 32))
  return _three("mxfp8", x, x, x)


def fp8(gradient: str = "fp8_e5m2") -> Recipe:
  """FP8 with per-tensor current scaling.

  Args:
    gradient: "fp8_e5m2", or "fp8_e4m3" as the paper's baseline.
  """
  x = Operand(format="fp8_e4m3")
  return _three("fp8", x, x, Operand(format=gradient))


def bf16() -> Recipe:
  """Every GEMM as the model wrote it."""
  return Recipe(name="bf16")


_SIDES = tuple(f"{gemm}.{side}" for gemm in GEMMS for side in ("lhs", "rhs"))
PARTS = {
  "all": _SIDES,
  **{gemm: tuple(s for s in _SIDES if s.startswith(gemm)) for gemm in GEMMS},
  "activations": ("fprop.lhs", "wgrad.lhs"),
  "weights": ("fprop.rhs", "dgrad.rhs"),
  "gradients": ("dgrad.lhs", "wgrad.rhs"),
  **{side: (side,) for side in _SIDES},
}
"""The parts of a recipe that ``change`` names, and the operands of each."""


def change(
  recipe: Recipe,
  part: str | Iterable[str] = "all",
  *,
  name: str | None = None,
  **fields,
) -> Recipe:
  """A variant of a recipe: some fields of some of its operands replaced.

  Args:
    recipe: the recipe to vary.
    part: which operands: those of a GEMM ("fprop", "dgrad", "wgrad"), of what
      is multiplied ("activations", "weights", "gradients"), one of them
      ("fprop.lhs"), "all", or several of these. GEMMs that are None stay None.
    name: of the variant; None says what was changed.
    **fields: of ``Operand``, with their new values.

  Returns:
    A recipe.

  Raises:
    ValueError: no such part or field, nothing to change, or operands that
      would not fit.

  >>> no_rht = change(nvfp4(), "wgrad", rht=None)
  >>> print(no_rht.name, "|", no_rht.wgrad)
  nvfp4, wgrad rht=None | nvfp4 · nvfp4 sr
  >>> print(change(nvfp4(), "weights", block=(1, 16)).fprop)
  nvfp4 · nvfp4
  """
  if not isinstance(recipe, Recipe):
    raise ValueError(
      f"change: recipe={errors.shown(recipe)} is no Recipe; call one of"
      " fp4jax.recipes, as in recipes.nvfp4()."
    )
  parts = (part,) if isinstance(part, str) else tuple(part)
  for given in parts:
    if given not in PARTS:
      raise ValueError(
        f"change: part={errors.shown(given)} is not known; use one of"
        f" {', '.join(PARTS)}."
      )
  known = [field.name for field in dataclasses.fields(Operand)]
  for given in fields:
    if given not in known:
      raise ValueError(
        f"change: {given} is no field of Operand; use one of"
        f" {', '.join(known)}."
      )
  if not parts or not fields:
    raise ValueError(
      "change: nothing to change; name a part and a field, as in"
      ' change(recipe, "wgrad", rht=None).'
    )
  chosen = {side for given in parts for side in PARTS[given]}
  gemms: dict = {}
  for gemm in GEMMS:
    sides = [s.removeprefix(f"{gemm}.") for s in chosen if s.startswith(gemm)]
    if sides and (before := getattr(recipe, gemm)) is not None:
      gemms[gemm] = dataclasses.replace(
        before,
        **{
          side: dataclasses.replace(getattr(before, side), **fields)
          for side in sides
        },
      )
  if not gemms:
    raise ValueError(
      f"change: {' and '.join(parts)} of recipe {recipe.name} is as the model"
      " wrote it, and has no operands to change; give a recipe that quantises"
      " it."
    )
  if name is None:
    changed = ", ".join(f"{k}={_short(v)}" for k, v in fields.items())
    name = f"{recipe.name}, {' and '.join(parts)} {changed}"
  return dataclasses.replace(recipe, name=name, **gemms)


def _short(value) -> str:
  """A field's value in a variant's name."""
  if isinstance(value, Rht):
    return f"{value.size}{'' if value.signs is not None else ' keyed'}"
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def four_over_six() -> Recipe:
  """``nvfp4`` whose nearest operands take the better of amax→6 and amax→4.

  Gradients stay as they are: a choice by error would bias them. On N(0, 1) the
  relative MSE of 1x16 blocks falls from 9.04e-3 to 7.57e-3, that of 16x16
  blocks from 12.41e-3 to 12.38e-3 only: combine it with 1x16 weights.

  References:
    "Four Over Six", arXiv 2512.02010; Quartet II, arXiv 2601.22813, table 1.
  """
  nearest = ("activations", "weights")
  return change(
    nvfp4(), nearest, four_over_six=True, name="nvfp4_four_over_six"
  )


def weights_1x16() -> Recipe:
  """``nvfp4`` with weights in 1x16 blocks, quantised anew for dgrad.

  Relative MSE of a weight on N(0, 1): 9.04e-3 in place of 12.41e-3. fprop and
  dgrad then see different weights.

  References:
    Quartet II, arXiv 2601.22813, table 1; NVIDIA, arXiv 2509.25149, appendix
    E.5, where differing weights cost more than square blocks.
  """
  return change(nvfp4(), "weights", block=(1, 16), name="nvfp4_weights_1x16")


def scale_guard() -> Recipe:
  """``nvfp4`` whose gradients leave stochastic rounding nothing to clip.

  A block's amax maps to 6 * 16/17: the bias of -0.33 % goes, and the relative
  MSE on N(0, 1) rises from 18.8e-3 to 23.5e-3.

  References:
    Quartet II, arXiv 2601.22813, table 1 (its baseline for gradients).
  """
  return change(
    nvfp4(), "gradients", scale_guard=16 / 17, name="nvfp4_scale_guard"
  )


def row_scale() -> Recipe:
  """``nvfp4`` with a tensor scale for each row of activations and gradients.

  No amax of a whole operand is needed, and NaN stays in its row of a result.
  (Scales of the step before, "delayed amax", would need none either: they are
  not here, because ``quantize`` keeps no state.)
  Weights, whose blocks are square, keep one tensor scale. The relative MSE on
  N(0, 1) is that of one scale, 9.04e-3; on rows of different size it is lower
  where one scale would have flushed blocks of small rows. By the reference
  backend alone.

  References:
    Transformer Engine's row-scaled activations.
  """
  parts = ("activations", "gradients")
  return change(nvfp4(), parts, row_scale=True, name="nvfp4_row_scale")


def ms_eden() -> Recipe:
  """``nvfp4`` forward; backward, Quartet II's MS-EDEN in all four operands.

  They are rotated in groups of 128 by signs drawn from the key (the same for
  both operands of a GEMM), rounded to nearest with a block's amax at 6.073, and
  each block's scale is corrected by ⟨x, x⟩ / ⟨x, Q(x)⟩ and rounded
  stochastically: unbiased, at a relative MSE on N(0, 1) of 9.4e-3, where
  stochastic codes have 18.8e-3 (biased) or 23.5e-3. The correction is of blocks
  of 16, as in the paper's text; that of its code is of 128 elements (9.7e-3).
  Weights and activations are quantised from the arrays of the forward pass, not
  from their codes as in the paper. By the reference backend alone.

  References:
    Quartet II, arXiv 2601.22813, section 4 and table 1.
  """
  x = Operand()
  eden = Operand(
    rounding="eden", rht=Rht(size=128, signs=None), scale_guard=6.073 / 6
  )
  w = dataclasses.replace(x, block=(16, 16))
  return _three("nvfp4_ms_eden", x, w, eden, wt=eden, xt=eden, gt=eden)


def quartet_ii() -> Recipe:
  """``ms_eden`` with a forward pass of 1x16 weights and four over six.

  References:
    Quartet II, arXiv 2601.22813.
  """
  return change(
    ms_eden(),
    "fprop",
    block=(1, 16),
    four_over_six=True,
    name="nvfp4_quartet_ii",
  )
