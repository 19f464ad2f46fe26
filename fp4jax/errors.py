"""Errors of fp4jax: one sentence of what, got, needed and how to fix."""

import reprlib

shown = reprlib.Repr(maxother=60, maxstring=60).repr
"""A value for a message: its repr, the middle of a long one left out."""


class PolicyError(ValueError):
  """A policy does not fit the model it is applied to."""


class MissingKeyError(ValueError):
  """A recipe with stochastic rounding is differentiated without a key."""


class UnsupportedError(NotImplementedError):
  """Hardware, backend or JAX cannot do what a recipe asks for."""
