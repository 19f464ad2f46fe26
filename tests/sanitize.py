"""Runs every kernel once on this GPU, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py

The programs are those that test_aot.py compiles, or the ones that are named on
the command line. Runs are recorded in pallas_kernels/README.md.
"""

import sys

import aot
import jax
import jax.numpy as jnp
import numpy as np


def filled(aval, rng) -> jax.Array:
  """Numbers of every kind that a kernel meets: normal ones and any bits."""
  if jnp.issubdtype(aval.dtype, jnp.floating):
    return jnp.asarray(rng.standard_normal(aval.shape), aval.dtype)
  top = jnp.iinfo(aval.dtype).max
  return jnp.asarray(rng.integers(0, top, aval.shape, endpoint=True))


def main(names: list[str]) -> None:
  """Runs the programs of these names, all where there are none."""
  gpu = jax.devices()[0]
  if gpu.platform != "gpu" or gpu.compute_capability != "9.0":
    raise SystemExit(f"sanitize: {gpu} runs no program of sm_90a; use a Hopper")
  rng = np.random.default_rng(0)
  programs = aot.kernels("sm_90a")
  for name in names or programs:
    function, *avals = programs[name]
    args = [filled(aval, rng).astype(aval.dtype) for aval in avals]
    jax.block_until_ready(jax.jit(function)(*args))
    print(f"ran {name}", flush=True)
  print(f"ran {len(names or programs)} programs on {gpu.device_kind}")


if __name__ == "__main__":
  main(sys.argv[1:])
