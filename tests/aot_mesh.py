"""Compiles a step of two linear layers for eight H200s that are not there.

python tests/aot_mesh.py

Run by test_aot.py. Prints a JSON line for each sharding of the weights and the
model as written, and quantised: the kernels in the program of a device, and
what its collectives give.
"""

import json

import aot
from collectives import collectives
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import fp4jax

TOKENS, WIDTH, HIDDEN = 9216, 1024, 4096
# Meshes ("a", "b") of 4 x 2: sharding of x, of the first and second weight.
SHARDINGS = {
  "data": (P(("a", "b")), P(), P()),
  "fsdp": (P(("a", "b")), P(("a", "b")), P(("a", "b"))),
  "tensor": (P("a"), P(None, "b"), P("b")),
  "fsdp, tensor": (P("a"), P("a", "b"), P("b", "a")),
}
POLICY = fp4jax.Policy(default=fp4jax.recipes.nvfp4())


def loss(weights, x, **options):
  """Of a model whose weights are its first argument."""
  up, down = weights

  def model(weights, x):
    up, down = weights
    h = jax.nn.relu(x @ up.astype(x.dtype)) ** 2
    return h @ down.astype(x.dtype)

  if options:
    model = fp4jax.quantize(model, POLICY, backend="pallas")
  y = model((up, down), x, **options)
  return jnp.sum(y.astype(jnp.float32) ** 2)


def main() -> None:
  """Compiles for all shardings."""
  topology = topologies.get_topology_desc(
    "aot",
    "cuda",
    target_config=aot._TARGET.format(**aot.GPUS["sm_90a"]),
    topology="1x1x8",
  )
  mesh = jax.sharding.Mesh(
    np.array(topology.devices).reshape(4, 2),
    ("a", "b"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )

  def struct(shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, spec)
    )

  with jax.set_mesh(mesh), jax.default_device(topology.devices[0]):
    key = struct((2,), P(), jnp.uint32)
    for name, (x, up, down) in SHARDINGS.items():
      args = (
        (struct((WIDTH, HIDDEN), up), struct((HIDDEN, WIDTH), down)),
        struct((TOKENS, WIDTH), x, jnp.bfloat16),
      )
      shardings = jax.tree.map(lambda a: a.sharding, args)
      for options in ({}, {"fp4_key": key}):
        step = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=shardings)
        text = step.lower(*args, **options).compile().as_text()
        line = {
          "sharding": name,
          "quantised": bool(options),
          "kernels": text.count('custom_call_target="mosaic_gpu'),
          "collectives": collectives(text),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
  main()
