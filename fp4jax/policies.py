"""Ready-made policies."""

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


def _left_alone(path, name: str, **fields) -> Rule:
  return Rule(path=path, recipe=None, name=name, **fields)


def _blocks(which: str, count: int) -> str:
  return f"{which} block" if count == 1 else f"{which} {count} blocks"


def all_linear(recipe: recipes.Recipe | None = None) -> Policy:
  """Every linear layer follows one recipe (default ``nvfp4``)."""
  return Policy(default=recipe or recipes.nvfp4())


def bf16() -> Policy:
  """Leaves the model as it is; coverage then lists what could be quantised."""
  return Policy(default=None)


def nemotron(
  first: int = 2,
  last: int = 8,
  *,
  recipe: recipes.Recipe | None = None,
  blocks: str | tuple[str, ...] = BLOCKS,
  heads: str | tuple[str, ...] = HEADS,
) -> Policy:
  """The paper's policy: first and last blocks, embeddings and head in BF16.

  Args:
    first: blocks at the beginning that are left alone.
    last: blocks at the end that are left alone.
    recipe: the recipe of everything else, default ``nvfp4``.
    blocks: globs that name the blocks, see ``Rule.path``.
    heads: globs that name embeddings and output heads; may match nothing.

  Returns:
    A policy.

  References:
    NVIDIA, arXiv 2509.25149, section 4.1 and appendix A.
  """
  for name, count in (("first", first), ("last", last)):
    if not isinstance(count, numbers.Integral) or count < 0:
      raise ValueError(
        f"nemotron: {name}={errors.shown(count)}; needed a number of blocks, an"
        " int of 0 or more."
      )
  rules = [_left_alone(heads, "embeddings and heads", optional=True)]
  if first:
    layers = slice(0, first)
    rules.append(_left_alone(blocks, _blocks("first", first), layers=layers))
  if last:
    layers = slice(-last, None)
    rules.append(_left_alone(blocks, _blocks("last", last), layers=layers))
  return Policy(rules=tuple(rules), default=recipe or recipes.nvfp4())


def last_fraction(
  fraction: float = 0.15,
  *,
  recipe: recipes.Recipe | None = None,
  blocks: str | tuple[str, ...] = BLOCKS,
  heads: str | tuple[str, ...] = HEADS,
) -> Policy:
  """The last fraction of the blocks, rounded up, and the head in BF16."""
  if not isinstance(fraction, numbers.Real) or not 0 <= fraction < 1:
    raise ValueError(
      f"last_fraction: fraction={errors.shown(fraction)}; needed a number of at"
      " least 0, below 1."
    )
  rules = [_left_alone(heads, "embeddings and heads", optional=True)]
  if fraction:
    tail = slice(-float(fraction), None)
    name = f"last {fraction:.0%} of the blocks"
    rules.append(_left_alone(blocks, name, layers=tail))
  return Policy(rules=tuple(rules), default=recipe or recipes.nvfp4())
