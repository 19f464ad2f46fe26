"""Backends: which one serves a recipe on this device, and why not."""

from fp4jax import errors
from fp4jax import recipes

BACKENDS = ("reference",)


def check(recipe: recipes.Recipe, backend: str | None = None) -> str:
  """The backend that serves ``recipe``, asked beforehand.

  Args:
    recipe: the recipe to serve.
    backend: a name in ``BACKENDS``, or None to choose.

  Returns:
    The backend's name.

  Raises:
    UnsupportedError: the backend is not there or cannot serve the recipe.
    ValueError: no backend has that name.

  >>> check(recipes.nvfp4())
  'reference'
  """
  if backend == "pallas":
    raise errors.UnsupportedError(
      f"backend 'pallas' was asked for recipe {recipe.name}, but this version"
      " has no Pallas kernels; use backend='reference', which computes the"
      " same bits on every device."
    )
  if backend not in (None, *BACKENDS):
    raise ValueError(
      f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)},"
      " or None to choose by device."
    )
  return "reference"
