"""Contract: text is sampled from the model, and the seed decides which."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments import sample


def _bigram(variables, tokens, fp4_key):
  """Logits of the next token given the current one: a table."""
  del fp4_key
  return variables["params"][tokens]


def _generate(table, key=0, temperature=1.0, length=400, prompt=(2,)):
  return sample.generate(
    _bigram,
    table,
    jnp.array(prompt),
    length=length,
    temperature=temperature,
    key=jax.random.key(key),
  )


def test_prompt_stays_and_certain_tokens_follow():
  cycle = 100.0 * jax.nn.one_hot(jnp.array([1, 2, 3, 0]), 4)
  got = _generate(cycle, length=8, prompt=(3, 1))
  assert got.tolist() == [3, 1, 2, 3, 0, 1, 2, 3]


def test_seed_decides():
  table = jnp.zeros((8, 8))
  one, same, other = (_generate(table, key=key) for key in (0, 0, 1))
  np.testing.assert_array_equal(one, same)
  assert np.any(one != other)


def test_frequencies_follow_the_temperature():
  """Two tokens with log-odds 1: p = σ(1 / temperature), four σ of n tokens."""
  table = jnp.tile(jnp.array([0.0, 1.0]), (2, 1))
  for temperature in (0.5, 1.0, 2.0):
    n = 2000
    tokens = _generate(table, 0, temperature, n + 1, prompt=(0,))[1:]
    p = 1 / (1 + np.exp(-1 / temperature))
    assert abs(tokens.mean() - p) < 4 * np.sqrt(p * (1 - p) / n)
