"""Text that a model writes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import tokenizers

from experiments import state


def generate(
  apply: Callable,
  params,
  prompt: jax.Array,
  *,
  length: int,
  temperature: float,
  key: jax.Array,
) -> jax.Array:
  """Samples a continuation: tokens ~ softmax(logits / temperature).

  Every token costs a forward pass over all ``length``; causality keeps what is
  not written yet out of the logits. (A quantised model's tensor scale sees it,
  as it sees the rest of any batch.)

  Args:
    apply: f(variables, tokens [1, length], fp4_key) → logits.
    params: the parameters.
    prompt: [p] int, 1 <= p < length.
    length: number of tokens with the prompt.
    temperature: above 0.
    key: a PRNG key; the same key writes the same text.

  Returns:
    [length] int32.
  """
  start = prompt.shape[0]
  tokens = jnp.zeros((1, length), jnp.int32).at[0, :start].set(prompt)

  def write(i, tokens):
    step = jax.random.fold_in(key, i)
    logits = apply({"params": params}, tokens, fp4_key=step)[0, i - 1]
    new = jax.random.categorical(step, logits / temperature)
    return tokens.at[0, i].set(new.astype(jnp.int32))

  return jax.lax.fori_loop(start, length, write, tokens)[0]


def text(
  apply: Callable,
  params,
  tokenizer: tokenizers.Tokenizer,
  config: ConfigDict,
) -> str:
  """The configured prompt and what the model makes of it."""
  sample = config.sample
  length = min(sample.length, config.data.sequence)
  ids = tokenizer.encode(sample.prompt, add_special_tokens=False).ids
  # Without a prompt it begins as a document does, after the mark (token 0).
  prompt = jnp.array(ids[: length - 1] or [0], jnp.int32)
  key = state.make_key(config.seed)

  def run(params):
    return generate(
      apply,
      params,
      prompt,
      length=length,
      temperature=sample.temperature,
      key=key,
    )

  tokens = jax.jit(run)(params)
  return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
