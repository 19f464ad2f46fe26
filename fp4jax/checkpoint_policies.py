"""What ``jax.checkpoint`` saves of a model with quantised layers.

Predicates like those of ``jax.checkpoint_policies``, for the ``policy=`` of
``jax.checkpoint``, ``nn.remat``, ``nn.remat_scan`` and ``nnx.remat``, in the
function that ``fp4jax.quantize`` takes or around the one that it returns:

  policy               saves of a linear layer    computes again
  None                 nothing                    the whole forward pass
  `packed_saveable`    its packed residuals       all but how they are packed
  `linears_saveable`   these and its output       what is between linear layers
  without checkpoint   these, and all between     nothing

JAX's own policies see no product of a quantised layer: ``dots_saveable`` and
``dots_with_no_batch_dims_saveable`` recompute them all.

>>> import fp4jax
>>> import jax.numpy as jnp
>>> def mlp(params, x):
...   return jax.nn.relu(x @ params["up"]) @ params["down"]
>>> block = jax.checkpoint(mlp, policy=linears_saveable)
>>> recipe = fp4jax.recipes.mxfp8()
>>> f = fp4jax.quantize(block, fp4jax.policies.all_linear(recipe))
>>> params = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
>>> loss = lambda params: f(params, jnp.ones((4, 32))).sum()
>>> str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general[")
6
"""

import jax

from fp4jax import dot
from fp4jax import operands

_jax = jax.checkpoint_policies
_packed = _jax.save_only_these_names(operands.RESIDUAL)
_linears = _jax.save_from_both_policies(
  _jax.save_only_these_names(operands.RESIDUAL, dot.OUTPUT),
  _jax.dots_with_no_batch_dims_saveable,
)


def packed_saveable(prim, *args, **params) -> bool:
  """Saves what quantised layers keep for the backward pass, and no more.

  In NVFP4 4.5 bits an element of a layer's input and 4.03 of its weight. What
  is between layers needs their outputs, so all products of the forward pass run
  again but those whose output nothing needs, such as the last of a block: not
  much less work than saving nothing. Combine it with names of your own:

  >>> policy = jax.checkpoint_policies.save_from_both_policies(
  ...   packed_saveable,
  ...   jax.checkpoint_policies.save_only_these_names("attention"),
  ... )
  """
  return _packed(prim, *args, **params)


def linears_saveable(prim, *args, **params) -> bool:
  """Saves what quantised layers keep, and the outputs of linear layers.

  No linear layer is computed again, quantised or not; norms, activations and
  attention are. For layers that a policy leaves as written it is
  ``dots_with_no_batch_dims_saveable``. Take it first where memory is short; for
  less, quantise again rather than keep packed residuals:

  >>> policy = jax.checkpoint_policies.save_only_these_names(dot.OUTPUT)
  """
  return _linears(prim, *args, **params)
