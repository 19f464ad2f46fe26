"""An NNX module with the interface of a linen one."""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Functional:
  """``init`` and ``apply`` of an NNX module, as pure functions.

  Its parameters are a tree of dicts of plain arrays, named by the module's
  attributes, which policies, optimizer and checkpoints treat like linen's.

  Attributes:
    make: gives the module, from its random streams; it holds no state but
      parameters.
    auxiliary: whether a call sows losses; linen's collections have no
      counterpart here.
  """

  make: Callable[[nnx.Rngs], nnx.Module]
  auxiliary: bool = dataclasses.field(default=False, init=False)

  def init(self, key: Array, inputs: Array) -> dict:
    """New parameters; the module knows its shapes without ``inputs``."""
    del inputs
    state = nnx.state(self.make(nnx.Rngs(key)))
    return {"params": nnx.to_pure_dict(state)}

  def apply(self, variables: dict, *args):
    """What the module with these parameters gives."""
    abstract = nnx.eval_shape(lambda: self.make(nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, variables["params"])
    return nnx.merge(graphdef, state)(*args)
