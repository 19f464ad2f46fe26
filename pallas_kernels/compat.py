"""What differs between the versions of Pallas Mosaic GPU that are supported."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def load(ref, layout):
  """Reads a whole reference in device memory into registers."""
  return plgpu.load(ref, layout=layout, optimized=False)


def store(ref, value):
  """Writes registers to a whole reference in device memory."""
  if hasattr(plgpu, "store"):  # JAX 0.12: assignment refuses narrow stores
    plgpu.store(ref, value, optimized=False)
  else:
    ref[...] = value


def interpret_params(detect_races: bool = False):
  """What runs a kernel on a CPU, see ``plgpu.kernel(interpret=...)``.

  Args:
    detect_races: raise where two programs or threads race.
  """
  return plgpu.InterpretGPUParams(detect_races=detect_races)


def multiprocessors() -> int:
  """Multiprocessors of the device that is compiled for; an H200's on a CPU."""
  device = jax.config.jax_default_device or jax.devices()[0]
  return getattr(device, "core_count", None) or 132
