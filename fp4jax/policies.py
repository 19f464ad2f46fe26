"""Ready-made policies."""

from collections.abc import Iterable
import dataclasses
import numbers

from fp4jax import errors
from fp4jax import recipes
from fp4jax.policy import Policy
from fp4jax.policy import Rule

_STACKS = ("*[Bb]lock", "*[Bb]locks", "*[Ll]ayer", "*[Ll]ayers", "h")
BLOCKS = (
  *(f"**/{name}/{{layer}}/**" for name in _STACKS),
  *(f"**/{name}*/**" for name in _STACKS[:-1]),
  "**/h/**",
  *(f"**/{name}*_{{layer}}/**" for name in _STACKS[:-1]),
  *(f"**/{name}{{layer}}/**" for name in _STACKS),
  "**/h_{layer}/**",
)
"""Usual names of blocks: lists, scanned stacks, numbered modules."""

HEADS = (
  "**/head/**",
  "**/*_head/**",
  "**/*[Ee]mbed*/**",
  "**/*logits*/**",
  "**/wte/**",
  "output/**",
  "params/output/**",
)
"""Usual names of embeddings and output heads."""


_NVFP4 = recipes.nvfp4()


def _kept(
  heads: str | Iterable[str], blocks, layers: dict[str, slice]
) -> tuple[Rule, ...]:
  """Rules that leave heads and some layers of the blocks as written."""
  rules = [
    _named(blocks, BLOCKS, name=name, argument="blocks", layers=part)
    for name, part in layers.items()
  ]
  if isinstance(heads, (list, tuple)) and not heads:
    return tuple(rules)
  name = "embeddings and heads"
  return (_named(heads, HEADS, name=name, argument="heads"), *rules)


def _named(path, usual: tuple[str, ...], **fields) -> Rule:
  """A rule that leaves alone; of usual names not every one is in a model."""
  rule = Rule(path=path, recipe=None, **fields)
  every = not {*rule.paths} & {*usual}
  return dataclasses.replace(rule, every=every)


def _blocks(which: str, count: int) -> str:
  return f"{which} block" if count == 1 else f"{which} {count} blocks"


def _default(preset: str, recipe: recipes.Recipe) -> recipes.Recipe:
  """A preset's recipe; None is not taken for the default."""
  if recipe is None:
    raise ValueError(
      f"{preset}: recipe=None; pass recipes.nvfp4(), or policies.bf16() to"
      " leave all layers as written."
    )
  return recipe


def all_linear(recipe: recipes.Recipe = _NVFP4) -> Policy:
  """Every linear layer follows one recipe (default ``nvfp4``)."""
  return Policy(default=_default("all_linear", recipe))


def bf16() -> Policy:
  """Leaves the model as it is; coverage then lists what could be quantised."""
  return Policy(default=None)


def nemotron(
  first: int = 2,
  last: int = 8,
  *,
  recipe: recipes.Recipe = _NVFP4,
  blocks: str | tuple[str, ...] = BLOCKS,
  heads: str | tuple[str, ...] = HEADS,
) -> Policy:
  """The paper's policy: first and last blocks, embeddings and head in BF16.

  Args:
    first: blocks at the beginning that are left alone.
    last: blocks at the end that are left alone.
    recipe: the recipe of everything else, default ``nvfp4``.
    blocks: globs that name the blocks, see ``Rule.path``, as in
      ``"**/stage_{layer}/**"``. Each stack of blocks has its first and last.
    heads: globs that name embeddings and output heads, as in ``"**/out/**"``;
      ``()`` where there are none. A head that no glob matches raises.

  Returns:
    A policy.

  References:
    NVIDIA, arXiv 2509.25149, section 4.1 and appendix A.
  """
  for name, count in (("first", first), ("last", last)):
    if not errors.is_integer(count) or count < 0:
      raise ValueError(
        f"nemotron: {name}={errors.shown(count)}; needed a number of blocks, an"
        " int of 0 or more."
      )
  layers = {}
  if first:
    layers[_blocks("first", first)] = slice(0, first)
  if last:
    layers[_blocks("last", last)] = slice(-last, None)
  rules = _kept(heads, blocks, layers)
  return Policy(rules=rules, default=_default("nemotron", recipe))


def last_fraction(
  fraction: float = 0.15,
  *,
  recipe: recipes.Recipe = _NVFP4,
  blocks: str | tuple[str, ...] = BLOCKS,
  heads: str | tuple[str, ...] = HEADS,
) -> Policy:
  """The last fraction of the blocks, rounded up, and the head in BF16.

  Args:
    fraction: of each stack of blocks.
    recipe: as of ``nemotron``.
    blocks: as of ``nemotron``.
    heads: as of ``nemotron``.
  """
  if not isinstance(fraction, numbers.Real) or not 0 <= fraction < 1:
    raise ValueError(
      f"last_fraction: fraction={errors.shown(fraction)}; needed a number of at"
      " least 0, below 1."
    )
  layers = {}
  if fraction:
    tail = slice(-float(fraction), None)
    layers[f"last {fraction:.0%} of the blocks"] = tail
  rules = _kept(heads, blocks, layers)
  return Policy(rules=rules, default=_default("last_fraction", recipe))


def healed(
  policy: Policy, *, forward: bool = True, backward: bool = True
) -> Policy:
  """What a policy becomes when its products go back to BF16.

  Training the last part of a run so recovers loss that quantisation cost. In a
  ``Schedule`` it begins at a step.

  Args:
    policy: the policy of the steps before; what it leaves alone stays so.
    forward: whether fprop runs as the model wrote it.
    backward: whether dgrad and wgrad do.

  Returns:
    A policy of the same rules. Where both are healed nothing is quantised, and
    the bits are those of the model as written.

  Raises:
    ValueError: ``policy`` is no Policy, or nothing is to be healed.

  References:
    NVIDIA, arXiv 2509.25149, appendix D: of a 12B model's gap of 1.5 %, both
    directions recover all, the forward alone leaves 0.5 %, the backward alone
    gains nothing.

  >>> print(healed(all_linear(), backward=False))
  default → nvfp4, fprop healed
  >>> print(healed(all_linear()))
  default → nvfp4, healed
  """
  if not isinstance(policy, Policy):
    raise ValueError(
      f"healed: policy={errors.shown(policy)} is no Policy; call one of"
      " fp4jax.policies."
    )
  if not (forward or backward):
    raise ValueError(
      "healed: forward=False and backward=False heal nothing; set one of them,"
      " or use the policy as it is."
    )
  fields: dict = {"fprop": None} if forward else {}
  fields |= {"dgrad": None, "wgrad": None} if backward else {}
  part = "" if forward and backward else f" {' and '.join(fields)}".rstrip()

  def heal(recipe):
    if recipe is None or not any(getattr(recipe, gemm) for gemm in fields):
      return recipe
    name = f"{recipe.name},{part} healed"
    return dataclasses.replace(recipe, name=name, **fields)

  rules = (
    dataclasses.replace(rule, recipe=heal(rule.recipe)) for rule in policy.rules
  )
  return Policy(rules=tuple(rules), default=heal(policy.default))
