"""The quantised ragged_dot of a mixture of experts."""

from fp4jax import recipes


def ragged_dot(
    lhs, rhs, group_sizes, *, recipe: recipes.Recipe, key=None, **kwargs
):
  raise NotImplementedError
