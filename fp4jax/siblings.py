"""Linear layers that read one operand, brought together to quantise it once.

Query, key and value projections, and the gate and up projections of a gated
feed-forward, read the same activations. Quantised apart, each would quantise
them, and keep a copy for the backward pass.

``interpreter`` is built on it; it imports ``_jax`` alone and changes no jaxpr.
"""

from collections.abc import Hashable
from collections.abc import Mapping

from fp4jax import _jax


def schedule(jaxpr, operands: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
  """Equations in an order that brings siblings together.

  Args:
    jaxpr: with named constants.
    operands: of the equations that may have siblings, what they read and how;
      siblings are those of equal values.

  Returns:
    Positions of equations, all of them once: siblings together, others alone.
    What a sibling needs is moved before the first of them; where that has
    effects, or depends on one of them, it stays apart.
  """
  producers = {
    var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars
  }
  members: dict[Hashable, list[int]] = {}
  for i, operand in operands.items():
    members.setdefault(operand, []).append(i)
  order: list[tuple[int, ...]] = []
  done: set[int] = set()
  for i in range(len(jaxpr.eqns)):
    if i in done:
      continue
    group = [i]
    for j in members.get(operands[i], []) if i in operands else []:
      if j <= i or j in done:
        continue
      needed = _needed(jaxpr, producers, j, done)
      if needed & operands.keys() or any(jaxpr.eqns[n].effects for n in needed):
        continue
      order += [(n,) for n in sorted(needed)]
      done |= needed
      group.append(j)
    done.update(group)
    order.append(tuple(group))
  return order


def _needed(jaxpr, producers, i: int, done: set[int]) -> set[int]:
  """What an equation depends on and is not done."""
  found: set[int] = set()
  pending = [i]
  while pending:
    for atom in jaxpr.eqns[pending.pop()].invars:
      n = None if _jax.is_literal(atom) else producers.get(atom)
      if n is not None and n not in done and n not in found:
        found.add(n)
        pending.append(n)
  return found


def names(jaxpr) -> dict:
  """Variables that are another one cast to a dtype, under one name.

  Flax casts the input of every layer on its own.
  """
  found: dict = {}
  for eqn in jaxpr.eqns:
    if eqn.primitive.name != "convert_element_type":
      continue
    (atom,), (var,) = eqn.invars, eqn.outvars
    if not _jax.is_literal(atom):
      found[var] = (found.get(atom, atom), var.aval.dtype)
  return found
