"""Recipes: what one linear layer does in its three GEMMs.

A recipe is plain data. Variants are made with ``dataclasses.replace``:

>>> import dataclasses
>>> recipe = nvfp4()
>>> no_rht = dataclasses.replace(recipe.wgrad.lhs, rht=None)
>>> wgrad = Gemm(lhs=no_rht, rhs=no_rht)
>>> print(dataclasses.replace(recipe, name="no_rht", wgrad=wgrad).wgrad)
nvfp4 · nvfp4
"""

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
