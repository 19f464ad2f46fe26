"""Contract: the chain's entropy is what it says, and no model goes below it.

The closed form is that of the transition matrix, and samples follow the matrix.
A tiny model's loss approaches the entropy; below it, beyond the sampling error
of the validation text, would mean that the model sees what it has to predict.
"""

import math

import numpy as np
import pytest

from experiments import data
from experiments import errors
from experiments import synthetic
from experiments import train
from tests.experiments.helpers import make_config

CHAIN = synthetic.Chain(vocab=40, branches=5, seed=3)


def test_entropy_is_that_of_the_transition_matrix():
  matrix = CHAIN.transitions()
  np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-14)
  # The stationary distribution, from its definition πP = π.
  values, vectors = np.linalg.eig(matrix.T)
  stationary = np.real(vectors[:, np.argmin(abs(values - 1))])
  stationary /= stationary.sum()
  np.testing.assert_allclose(stationary, 1 / 40, atol=1e-12)
  assert np.sum(abs(values - 1) < 1e-9) == 1  # the only one
  logs = np.log(np.where(matrix > 0, matrix, 1))
  expected = -np.sum(stationary[:, None] * matrix * logs)
  assert CHAIN.entropy == pytest.approx(expected, abs=1e-12)
  second = np.sum(stationary[:, None] * matrix * logs**2)
  expected = math.sqrt(second - CHAIN.entropy**2)
  assert CHAIN.deviation == pytest.approx(expected, abs=1e-12)


def test_sample_follows_the_matrix():
  n = 400_000
  tokens = CHAIN.sample(n, 0)
  assert tokens.dtype == np.uint8 and tokens.shape == (n,)
  pairs = np.zeros((40, 40))
  np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
  expected = CHAIN.transitions() * pairs.sum(1, keepdims=True)
  assert not pairs[expected == 0].any()
  # Pearson's statistic has 40·(5 - 1) degrees of freedom: mean 160, standard
  # deviation √320.
  possible = expected > 0
  statistic = np.sum((pairs - expected)[possible] ** 2 / expected[possible])
  assert abs(statistic - 160) < 4 * math.sqrt(320)
  logs = CHAIN.log_probabilities(tokens)
  taken = CHAIN.transitions()[tokens[:-1], tokens[1:]]
  np.testing.assert_allclose(logs, np.log(taken), atol=1e-12)
  assert abs(-logs.mean() - CHAIN.entropy) < 4 * CHAIN.deviation / math.sqrt(n)


def test_impossible_steps_have_no_probability():
  token = int(CHAIN.sample(1, 0)[0])
  assert CHAIN.log_probabilities(np.array([token, token])) == -math.inf


def test_same_seed_same_text():
  """Other seeds are other chains; other streams other texts of one chain."""
  text = CHAIN.sample(1000, 0)
  again = synthetic.Chain(vocab=40, branches=5, seed=3)
  np.testing.assert_array_equal(text, again.sample(1000, 0))
  assert np.isfinite(CHAIN.log_probabilities(CHAIN.sample(1000, 1))).all()
  assert (text != CHAIN.sample(1000, 1)).mean() > 0.9
  other = synthetic.Chain(vocab=40, branches=5, seed=4).sample(1000, 0)
  assert np.isinf(CHAIN.log_probabilities(other)).any()
  # Of NumPy's promised streams, so these hold with every version.
  assert text[:8].tolist() == [31, 2, 7, 22, 9, 38, 24, 13]


@pytest.mark.parametrize(
  "path, vocab, words",
  [
    ("markov:branch=3", 40, "'branch=3'; needed branches, tokens, seed"),
    ("markov:seed=1,seed=2", 40, "'seed=2'; needed"),
    ("markov:seed=-1", 40, "'seed=-1'; needed"),
    ("markov:seed=4294967296", 40, "below 2\\*\\*32"),
    ("markov:tokens=0", 40, "tokens=0; needed more than 0"),
    ("markov:branches=1", 40, "branches=1; needed at least 2"),
    ("markov:", 8, "branches=8; needed at least 2, and fewer than the 8"),
    ("markov:tokens=500", 40, "validation text is 25 tokens long"),
  ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, path, vocab, words):
  config = make_config(data__path=path, data__vocab=vocab)
  with pytest.raises(errors.UserError, match=words):
    train.run(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_tokens_are_words_of_their_numbers():
  tokenizer = CHAIN.tokenizer()
  assert tokenizer.encode("3 17 39").ids == [3, 17, 39]
  assert tokenizer.decode([3, 17, 39]) == "3 17 39"
  assert tokenizer.encode("def ").ids == [0]


def test_configuration_gives_the_chain(tmp_path):
  config = make_config(
    data__path="markov:branches=5,tokens=9000,seed=3", data__vocab=40
  )
  corpus = data.prepare(config, tmp_path / "cache")
  np.testing.assert_array_equal(corpus.train, CHAIN.sample(9000, 0))
  np.testing.assert_array_equal(corpus.validation, CHAIN.sample(450, 1))
  assert corpus.entropy_rate == CHAIN.entropy
  assert corpus.unigram_entropy == pytest.approx(math.log(40), abs=0.05)
  assert not (tmp_path / "cache").exists()


def _trained(tmp_path, recipe: str) -> tuple[float, float, float]:
  """The model's loss, the chain's on the same tokens, and its error.

  Every training sequence is seen once, so nothing can be learnt by heart.
  """
  config = make_config(
    recipe=recipe,
    data__path="markov:branches=4,tokens=400000",
    data__vocab=32,
    optimizer__peak_lr=1e-2,
    train__steps=300,
    train__batch=32,
    train__log_every=100,
    train__eval_every=300,
    train__eval_batches=16,
    train__checkpoint_every=300,
    sample__prompt="1 2",
  )
  chain = synthetic.parse(config.data.path, config.data.vocab)
  corpus = data.prepare(config, tmp_path / "cache")
  tokens = np.concatenate(data.validation_batches(config, corpus))
  logs = chain.log_probabilities(tokens)
  result = train.run(config, tmp_path / "run", corpus=corpus)
  assert result.tokens < len(corpus.train)
  error = chain.deviation / math.sqrt(logs.size)
  assert abs(-logs.mean() - chain.entropy) < 4 * error
  return result.validation_loss, chain.entropy, error


@pytest.mark.slow  # nightly: test_cloze trains on a chain
def test_loss_approaches_the_entropy_from_above(tmp_path):
  loss, entropy, error = _trained(tmp_path, "none")
  assert loss > entropy - 4 * error
  # From ln 32 = 3.47 at the start, most of the way.
  assert loss - entropy < 0.05 * (math.log(32) - entropy)


@pytest.mark.slow  # nightly: the same, quantised
def test_quantised_loss_stays_above_the_entropy(tmp_path):
  """A tensor's scale sees later tokens; that must not tell what they are."""
  loss, entropy, error = _trained(tmp_path, "nvfp4")
  assert loss > entropy - 4 * error
  assert loss - entropy < 0.2 * (math.log(32) - entropy)
