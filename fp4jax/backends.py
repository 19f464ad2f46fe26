"""Backends: which one serves a recipe on this device, and why not."""

from typing import NamedTuple

from fp4jax import _jax
from fp4jax import errors
from fp4jax import recipes

BACKENDS = ("reference", "pallas", "pallas_interpret")
_FORMATS = ("nvfp4", "nvfp4_fp8_exact")
_CAPABILITY = (9, 0)
_BLACKWELL = (10, 0)


class Choice(NamedTuple):
  """The backend that serves a recipe, and the reason."""

  name: str
  reason: str


def check_name(backend: str | None):
  """Raises ValueError unless a backend has that name, or None is given."""
  if backend not in (None, *BACKENDS):
    raise ValueError(
      f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)},"
      " or None to choose by device."
    )


def check(recipe: recipes.Recipe, backend: str | None = None) -> Choice:
  """The backend that serves ``recipe``, asked beforehand.

  Args:
    recipe: the recipe to serve.
    backend: "pallas", kernels for NVIDIA GPUs of compute capability 9.0 and
      later; "reference", ``jax.numpy`` on any device; "pallas_interpret", the
      kernels run slowly on a CPU, for tests; None takes the kernels where they
      can serve, else the reference. All give the same bits.

  Returns:
    The backend's name, and why it was chosen.

  Raises:
    UnsupportedError: the backend is not there or cannot serve the recipe.
    ValueError: no backend has that name, or ``recipe`` is no ``Recipe``.

  >>> check(recipes.nvfp4(), "reference").name
  'reference'
  """
  check_name(backend)
  if not isinstance(recipe, recipes.Recipe):
    raise ValueError(
      f"recipe={errors.shown(recipe)} is no Recipe; call one of fp4jax.recipes,"
      " as in fp4jax.recipes.nvfp4()."
    )
  if backend == "reference":
    return Choice("reference", "it was asked for")
  obstacle = _unserved(recipe)
  if manual := _jax.mesh_axes("Manual"):
    obstacle = obstacle or (
      f"it runs inside a shard_map over {', '.join(manual)}, which the kernels"
      " do not follow yet"
    )
  if explicit := _jax.mesh_axes("Explicit"):
    obstacle = obstacle or (
      f"the axes {', '.join(explicit)} of the mesh are explicit, and the"
      " kernels follow auto axes alone"
    )
  if backend != "pallas_interpret":
    obstacle = obstacle or _device_obstacle()
  if backend is not None:
    if obstacle:
      raise errors.UnsupportedError(
        f"backend {backend!r} was asked for recipe {recipe.name}, but"
        f" {obstacle}; use backend='reference', which computes the same bits on"
        " every device."
      )
    return Choice(backend, "it was asked for")
  if obstacle:
    return Choice("reference", obstacle)
  return Choice("pallas", "the device and the recipe have kernels")


def _unserved(recipe: recipes.Recipe) -> str | None:
  """What of a recipe has no kernel."""
  for name in recipes.GEMMS:
    gemm = getattr(recipe, name)
    for operand in (gemm.lhs, gemm.rhs) if gemm else ():
      if lacking := lacks_kernel(operand):
        return f"{name} {lacking}"
  return None


def lacks_kernel(operand: recipes.Operand) -> str | None:
  """Why no kernel quantises an operand, as what a GEMM does; None if one does.

  >>> lacks_kernel(recipes.Operand(row_scale=True))
  'has an operand with row_scale, which has no kernel'
  """
  if operand.format not in _FORMATS:
    return f"has the format {operand.format}, which has no kernel"
  if operand.rht is not None and operand.rht.size != 16:
    return f"rotates {operand.rht.size} elements, not 16"
  if operand.rht is not None and operand.block[0] != 1:
    return "rotates an operand of square blocks"
  if operand.rht is not None and operand.rht.signs is None:
    return "draws the signs of its rotation, which no kernel does"
  if operand.rounding == "eden":
    return "has an operand rounded by EDEN, which has no kernel"
  if operand.row_scale:
    return "has an operand with row_scale, which has no kernel"
  return None


def _device_obstacle() -> str | None:
  """Why the kernels cannot run on the default device."""
  device = _jax.default_device()
  if device.platform not in ("gpu", "cuda"):
    return (
      f"the device is {device.device_kind!r}, and the kernels need an NVIDIA"
      " GPU of compute capability 9.0 or later"
    )
  capability = _capability(device)
  if capability is None:
    return f"the device {device.device_kind!r} says no compute capability"
  if capability < _CAPABILITY:
    return (
      f"the device {device.device_kind!r} has compute capability"
      f" {'.'.join(map(str, capability))}, and the kernels need 9.0 or later"
    )
  return None


def multiplier(backend: str) -> str:
  """What multiplies the operands of a GEMM.

  "hopper" and "blackwell" are kernels of ours, for operands decoded and packed;
  "cudnn" is ``jax.nn.scaled_matmul`` of packed ones, for Blackwell GPUs that do
  not have the instructions of "blackwell"; "xla" multiplies decoded ones. On
  several devices it is "xla", which partitions its own products alone.

  Args:
    backend: the name that ``check`` chose.
  """
  if backend == "pallas_interpret":
    return "hopper"
  capability = _capability(_jax.default_device())
  if backend != "pallas" or capability is None or _jax.device_count() > 1:
    return "xla"
  kinds = {(9, 0): "hopper", (10, 0): "blackwell", (12, 0): "cudnn"}
  return kinds.get(capability, "xla")


def native_rounding() -> tuple[str, ...]:
  """What the default device rounds to E2M1 by instructions of its own.

  "sr8" is not among it: which random bits ``cvt.rs`` gives to which element is
  not documented well enough to promise the reference's bits.
  """
  capability = _capability(_jax.default_device())
  return ("rne",) if capability and capability >= _BLACKWELL else ()


def _capability(device) -> tuple[int, int] | None:
  """The CUDA compute capability of a device."""
  major, dot, minor = str(getattr(device, "compute_capability", "")).partition(
    "."
  )
  return (int(major), int(minor)) if dot else None
