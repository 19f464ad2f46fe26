"""Tokens of known entropy: a seeded Markov chain, without a file.

The states are the residues modulo V, named by tokens in a seeded order ρ. From
state x the chain goes to x + s_k with probability p_k:

  P[ρ(x), ρ(x + s_k)] = p_k,  p_k = (1/k) / Σ_j (1/j),  k = 1 ... branches

The shifts s_k are distinct, so every row holds the same probabilities and the
entropy rate is H = -Σ p_k ln p_k. Columns add up to 1 too, so all tokens are
equally frequent: without the context a model cannot go below ln V.

``config.data.path = "markov:branches=8,tokens=1000000,seed=0"`` gives it to the
runner, ``config.data.vocab`` is V. All of the three may be left out.
"""

import dataclasses
import math

import numpy as np
import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers

from experiments import errors

PREFIX = "markov:"
_NAMES = ("branches", "tokens", "seed")


def is_chain(path: str) -> bool:
  """Whether ``config.data.path`` stands for a chain."""
  return path.startswith(PREFIX)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
  """A Markov chain.

  Attributes:
    vocab: V, the number of tokens.
    branches: successors of each token, 1 < branches < V.
    tokens: length of the training text.
    seed: of the order, the shifts and the text.
  """

  vocab: int
  branches: int = 8
  tokens: int = 1_000_000
  seed: int = 0

  def __post_init__(self):
    if not 1 < self.branches < self.vocab:
      raise errors.UserError(
        f"config.data.path: branches={self.branches}; needed at least 2, and"
        f" fewer than the {self.vocab} tokens of config.data.vocab."
      )
    if not 0 < self.tokens < 2**31:
      raise errors.UserError(
        f"config.data.path: tokens={self.tokens}; needed more than 0 and less"
        " than 2**31."
      )
    if not 0 <= self.seed < 2**32:
      raise errors.UserError(
        f"config.data.path: seed={self.seed}; needed at least 0 and below"
        " 2**32."
      )

  @property
  def probabilities(self) -> np.ndarray:
    """[branches] float64: p."""
    weights = 1 / np.arange(1, self.branches + 1)
    return weights / weights.sum()

  @property
  def entropy(self) -> float:
    """H, nats a token: no model's expected loss is below it."""
    p = self.probabilities
    return float(-np.sum(p * np.log(p)))

  @property
  def deviation(self) -> float:
    """Standard deviation of -ln p_k: over n tokens the mean's is by √n less.

    The steps k are independent of each other, so that is exact.
    """
    p = self.probabilities
    return math.sqrt(np.sum(p * np.log(p) ** 2) - self.entropy**2)

  @property
  def order(self) -> np.ndarray:
    """[V] int64: ρ, the token of each state."""
    return np.argsort(self._random(0, self.vocab), kind="stable")

  @property
  def shifts(self) -> np.ndarray:
    """[branches] int64: s. The first is 1, so every state can be reached."""
    others = np.argsort(self._random(1, self.vocab - 2), kind="stable") + 2
    return np.concatenate([[1], others[: self.branches - 1]])

  def transitions(self) -> np.ndarray:
    """[V, V] float64: P."""
    order, states = self.order, np.arange(self.vocab)
    matrix = np.zeros((self.vocab, self.vocab))
    for p, shift in zip(self.probabilities, self.shifts, strict=True):
      matrix[order, order[(states + shift) % self.vocab]] = p
    return matrix

  def sample(self, count: int, stream: int) -> np.ndarray:
    """A text.

    Args:
      count: n, its length.
      stream: texts of different streams are independent.

    Returns:
      [n] tokens, of the smallest unsigned type.
    """
    random = self._random(2 + stream, count)
    uniform = (random[1:] >> 11) * 2.0**-53
    k = np.searchsorted(np.cumsum(self.probabilities), uniform, side="right")
    moves = self.shifts[np.minimum(k, self.branches - 1)]
    start = int(random[0]) % self.vocab
    states = np.concatenate([[0], np.cumsum(moves)]) + start
    dtype = np.min_scalar_type(self.vocab - 1)
    return self.order.astype(dtype)[states % self.vocab]

  def log_probabilities(self, tokens: np.ndarray) -> np.ndarray:
    """ln P of each token after the one before it.

    Args:
      tokens: [..., n] integers, n > 1.

    Returns:
      [..., n - 1] float64, -inf for what the chain never does.
    """
    states = np.argsort(self.order)[tokens]
    of_shift = np.full(self.vocab, -np.inf)
    of_shift[self.shifts] = np.log(self.probabilities)
    return of_shift[np.diff(states, axis=-1) % self.vocab]

  def tokenizer(self) -> tokenizers.Tokenizer:
    """Between tokens and their numbers as words; other words are token 0."""
    words = {str(token): token for token in range(self.vocab)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer

  def _random(self, stream: int, count: int) -> np.ndarray:
    """[count] uint64; NumPy promises the same from every version."""
    return np.random.Philox(key=[self.seed, stream]).random_raw(count)


def parse(path: str, vocab: int) -> Chain:
  """The chain that ``config.data.path`` stands for.

  Args:
    path: ``markov:name=value,...``.
    vocab: ``config.data.vocab``.

  Returns:
    The chain.

  Raises:
    UserError: a name or value cannot be used.
  """
  return Chain(vocab=vocab, **numbers(path, PREFIX, _NAMES))


def numbers(path: str, prefix: str, names: tuple[str, ...]) -> dict[str, int]:
  """The numbers that a path without a file gives by name.

  Raises:
    UserError: a name or value cannot be used.

  >>> numbers("markov:branches=8,seed=1", "markov:", ("branches", "seed"))
  {'branches': 8, 'seed': 1}
  """
  values = {}
  for item in filter(None, path.removeprefix(prefix).split(",")):
    name, _, value = item.partition("=")
    if name not in names or name in values or not value.isdecimal():
      raise errors.UserError(
        f"config.data.path={path!r}: {item!r}; needed {', '.join(names)},"
        f" each once at most and a number, as in {prefix}{names[0]}=8,seed=1."
      )
    values[name] = int(value)
  return values
