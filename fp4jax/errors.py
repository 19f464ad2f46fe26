"""Errors of fp4jax: one sentence of what, got, needed and how to fix."""

import numbers
import reprlib

shown = reprlib.Repr(maxother=60, maxstring=60).repr
"""A value for a message: its repr, the middle of a long one left out."""


def is_integer(x) -> bool:
  """Whether a value is an integer; True and False are none.

  >>> is_integer(0), is_integer(True), is_integer(1.0)
  (True, False, False)
  """
  return isinstance(x, numbers.Integral) and not isinstance(x, bool)


class PolicyError(ValueError):
  """A policy does not fit the model it is applied to."""


class MissingKeyError(ValueError):
  """A recipe with stochastic rounding is differentiated without a key."""


class UnsupportedError(NotImplementedError):
  """Hardware, backend or JAX cannot do what a recipe asks for."""
