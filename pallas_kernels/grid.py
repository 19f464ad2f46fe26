"""How the programs of a product share out the tiles of its result."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Literal

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Grid:
  """Tiles of a result, each of a cluster of programs.

  Attributes:
    shape: tiles along m and along n.
    tile: rows and columns of one, of all programs of a cluster together.
    minor: along which axis neighbouring clusters work.
    width: tiles along it, before the other axis goes on.
  """

  shape: tuple[int, int]
  tile: tuple[int, int]
  minor: Literal["m", "n"]
  width: int

  def visit(self, body: Callable) -> None:
    """Calls ``body`` with each tile of a program, and how many came before.

    A tile is given by its first row and column.
    """

    @plgpu.nd_loop((self.shape[0] * self.shape[1],), collective_axes="cluster")
    def one(loop):
      axis = 0 if self.minor == "m" else 1
      i, j = plgpu.planar_snake(loop.index[0], self.shape, axis, self.width)
      body(i * self.tile[0], j * self.tile[1], loop.local_index)

  def count(self):
    """int32, how many tiles ``visit`` gives to this program."""
    tiles = jnp.int32(self.shape[0] * self.shape[1])
    first, stride = lax.axis_index("cluster"), lax.axis_size("cluster")
    return lax.div(tiles - first + stride - 1, jnp.int32(stride))


def check_config(config, axes: Sequence[str], numbers: Sequence[str]) -> None:
  """Raises ValueError for fields of a config that say nothing.

  Args:
    config: of a product.
    axes: fields that name an axis of the result, m or n.
    numbers: fields that are numbers above 0, or tuples of these, or None.
  """
  owner = f"{type(config).__module__.rpartition('.')[-1]}.Config"
  for name in axes:
    if (value := getattr(config, name)) not in ("m", "n"):
      raise ValueError(f"{owner}: {name}={value!r}, needed 'm' or 'n'.")
  for name in numbers:
    value = getattr(config, name)
    for number in value if isinstance(value, tuple) else (value,):
      whole = isinstance(number, int) and not isinstance(number, bool)
      if number is not None and not (whole and number > 0):
        raise ValueError(
          f"{owner}: {name} has {number!r}, needed an integer above 0."
        )


def drain(free, total, stages: int) -> None:
  """Waits until the last stages that were filled are free.

  Args:
    free: a barrier a stage.
    total: how often a stage was filled, of all stages together.
    stages: how many there are.
  """

  def wait(done, _):
    plgpu.barrier_wait(free.at[lax.rem(done, stages)])
    return ()

  lax.fori_loop(jnp.maximum(total - stages, 0), total, wait, ())
