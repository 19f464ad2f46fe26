"""Log-likelihoods of texts and greedy continuations, by a causal model.

A request is a context and a continuation; its score is

  Σ_i log p(continuation_i | context, continuation_(<i)), in float32.

What is longer than the model's sequence loses context on the left, which is
counted and reported. Rows are padded on the right, to one of a few lengths, so
that a model compiles a few times in all; causality keeps the padding out of the
logits. (A quantised model's tensor scale sees it, as it sees the other rows:
its scores depend on the batch a little, and are the same every time.)
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from experiments import data
from experiments import errors
from experiments import state

Array = jax.Array

_SHORTEST = 16  # of the padded lengths
_CHUNK = 16  # tokens written between two looks at the stop strings


class Encoded(NamedTuple):
  """Tokens of a request; none of the two is empty."""

  context: list[int]
  continuation: list[int]


class Score(NamedTuple):
  """What a model makes of a continuation.

  Attributes:
    log_likelihood: in nats.
    greedy: whether each of its tokens is the most probable.
  """

  log_likelihood: float
  greedy: bool


class Window(NamedTuple):
  """What one forward pass scores.

  Attributes:
    request: whose it is.
    tokens: inputs and the last target, at most the sequence and one.
    scored: number of targets, at the end.
  """

  request: int
  tokens: list[int]
  scored: int


@dataclasses.dataclass
class Truncation:
  """What did not fit into the model's sequence.

  Attributes:
    sequence: its length.
    requests: scored or continued.
    cut: those whose context lost tokens on the left.
    tokens: that these lost, all together.
    longest: tokens that one lost.
    split: those whose continuation alone is longer: all of it is scored, in
      pieces that see at most a sequence.
  """

  sequence: int
  requests: int = 0
  cut: int = 0
  tokens: int = 0
  longest: int = 0
  split: int = 0

  def add(self, lost: int, pieces: int = 1) -> None:
    """One more request, and what its context lost."""
    self.requests += 1
    self.cut += lost > 0
    self.tokens += lost
    self.longest = max(self.longest, lost)
    self.split += pieces > 1

  def __str__(self):
    if not self.cut and not self.split:
      return f"all {self.requests:,} requests fit into {self.sequence} tokens"
    mean = self.tokens / max(1, self.cut)
    return (
      f"of {self.requests:,} requests {self.cut:,} did not fit into"
      f" {self.sequence} tokens and lost context on the left ({mean:.0f} tokens"
      f" on average, {self.longest:,} at most);"
      f" {self.split:,} were scored in pieces"
    )


def windows(request: int, encoded: Encoded, length: int) -> Iterator[Window]:
  """What scores each token of a continuation once, with all that fits before.

  Args:
    request: a number.
    encoded: its tokens.
    length: of the model's inputs.

  >>> [w.tokens for w in windows(0, Encoded([0, 1, 2, 3], [4, 5]), 3)]
  [[2, 3, 4, 5]]
  >>> [w[1:] for w in windows(0, Encoded([0], [1, 2, 3, 4, 5]), 3)]
  [([0, 1, 2, 3], 3), ([2, 3, 4, 5], 2)]
  """
  tokens = [*encoded.context, *encoded.continuation]
  start = len(encoded.context)
  while start < len(tokens):
    end = min(start + length, len(tokens))
    yield Window(request, tokens[max(0, end - length - 1) : end], end - start)
    start = end


def lengths(sequence: int) -> tuple[int, ...]:
  """The padded lengths: the sequence, and halves of it down to 16.

  >>> lengths(128), lengths(100), lengths(8)
  ((16, 32, 64, 128), (25, 50, 100), (8,))
  """
  found = [sequence]
  while found[-1] >= 2 * _SHORTEST:
    found.append(-(-found[-1] // 2))
  return tuple(reversed(found))


class Scorer:
  """A model that scores and continues texts.

  Attributes:
    truncation: of all requests since it was last set.
    end: the token that ends a document, and precedes one.
  """

  def __init__(
    self,
    apply: Callable,
    params: Any,
    tokenizer: tokenizers.Tokenizer,
    sequence: int,
    *,
    batch: int = 16,
    seed: int = 0,
  ):
    """A scorer.

    Args:
      apply: f(variables, tokens [b, t]) → logits [b, t, vocab], causal.
      params: the parameters.
      tokenizer: between text and tokens.
      sequence: most tokens that the model has seen at once.
      batch: rows of a forward pass.
      seed: of sampled continuations.
    """
    if batch < 1:
      raise errors.UserError(f"batch={batch}; needed at least 1.")
    self._params = params
    self._tokenizer = tokenizer
    self._sequence = sequence
    self._batch = batch
    self._seed = seed
    self._score = jax.jit(functools.partial(_score, apply))
    self._next = jax.jit(functools.partial(_next, apply))
    self._write = jax.jit(functools.partial(_write, apply))
    self.truncation = Truncation(sequence)
    # Texts without documents have no such mark: the first token stands for it.
    self.end = tokenizer.token_to_id(data.END) or 0
    self._marks_documents = tokenizer.token_to_id(data.END) is not None

  def reset(self) -> Truncation:
    """The truncation up to here; what follows is counted anew."""
    found, self.truncation = self.truncation, Truncation(self._sequence)
    return found

  def encode(self, text: str) -> list[int]:
    """Tokens of a text."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_pair(self, context: str, continuation: str) -> Encoded:
    """Tokens of a request, as lm-evaluation-harness takes them apart.

    The two are encoded together; white space at the end of the context belongs
    to the continuation; an empty context is the end of a document.
    """
    if not context:
      return Encoded([self.end], self.encode(continuation))
    stripped = context.rstrip()
    if not stripped:
      return Encoded([self.end], self.encode(context + continuation))
    whole = self.encode(context + continuation)
    before = self.encode(stripped)
    return Encoded(before, whole[len(before) :])

  def score(self, requests: Sequence[Encoded]) -> list[Score]:
    """The scores of requests, in order.

    Raises:
      UserError: a continuation or a context is empty.
    """
    pieces: list[Window] = []
    for i, encoded in enumerate(requests):
      if not encoded.continuation or not encoded.context:
        raise errors.UserError(
          f"request {i} of {len(requests)} has {len(encoded.context)} tokens of"
          f" context and {len(encoded.continuation)} of continuation; needed at"
          " least one of each."
        )
      mine = list(windows(i, encoded, self._sequence))
      whole = len(encoded.context) + len(encoded.continuation)
      end = min(len(encoded.context) + self._sequence, whole)  # of the first
      lost = max(0, end - self._sequence - 1)
      self.truncation.add(lost, len(mine))
      pieces += mine
    totals = np.zeros(len(requests))
    greedy = np.ones(len(requests), bool)
    single = [w for w in pieces if w.scored == 1]
    longer = [w for w in pieces if w.scored > 1]
    for window, total, best in (*self._singles(single), *self._rows(longer)):
      totals[window.request] += total
      greedy[window.request] &= best
    pairs = zip(totals.tolist(), greedy.tolist(), strict=True)
    return [Score(*pair) for pair in pairs]

  def _rows(self, found: Sequence[Window]) -> Iterator[tuple]:
    """Each window, its log-likelihood, and whether that is the greedy one."""
    for rows, tokens in self._batches(found, lambda window: window.tokens, 1):
      sizes = np.zeros((2, self._batch), np.int32)
      for i, window in enumerate(rows):
        sizes[:, i] = len(window.tokens), window.scored
      total, greedy = jax.device_get(
        self._score(self._params, tokens, sizes[0], sizes[1])
      )
      yield from zip(rows, total.tolist(), greedy.tolist(), strict=False)

  def _singles(self, found: Sequence[Window]) -> Iterator[tuple]:
    """As ``_rows`` of windows with one target; equal inputs are read once."""
    same: dict[tuple, list[Window]] = {}
    for window in found:
      same.setdefault(tuple(window.tokens[:-1]), []).append(window)
    for rows, tokens in self._batches(list(same), list, 0):
      sizes = np.ones(self._batch, np.int32)
      sizes[: len(rows)] = [len(inputs) for inputs in rows]
      logs = jax.device_get(self._next(self._params, tokens, sizes))
      for inputs, row in zip(rows, logs, strict=False):
        best = int(row.argmax())
        for window in same[inputs]:
          target = window.tokens[-1]
          yield window, float(row[target]), target == best

  def _batches(
    self, items: Sequence[Any], tokens_of: Callable, extra: int
  ) -> Iterator[tuple[list, np.ndarray]]:
    """Items, and their tokens padded to [batch, one of ``lengths`` + extra]."""
    buckets: dict[int, list] = {n: [] for n in lengths(self._sequence)}
    for item in items:
      size = len(tokens_of(item)) - extra
      buckets[next(n for n in buckets if n >= size)].append(item)
    for length, mine in buckets.items():
      for start in range(0, len(mine), self._batch):
        rows = mine[start : start + self._batch]
        tokens = np.zeros((self._batch, length + extra), np.int32)
        for i, item in enumerate(rows):
          row = tokens_of(item)
          tokens[i, : len(row)] = row
        yield rows, tokens

  def generate(
    self,
    contexts: Sequence[str],
    *,
    until: Sequence[Sequence[str]],
    most: Sequence[int],
    temperature: float = 0.0,
  ) -> list[str]:
    """Texts that follow contexts.

    A text that grows beyond the model's sequence goes on with what fits.

    Args:
      contexts: the texts to continue.
      until: strings of each, before the first of which it stops; it stops at
        the end of a document too.
      most: tokens of each, at most.
      temperature: 0 is greedy.

    Returns:
      What follows, the context left out.
    """
    found: list[str] = []
    for start in range(0, len(contexts), self._batch):
      part = slice(start, start + self._batch)
      found += self._continue(
        contexts[part], until[part], most[part], temperature, start
      )
    return found

  def _continue(self, contexts, until, most, temperature, first) -> list[str]:
    encoded = [self.encode(text) or [self.end] for text in contexts]
    tokens = np.zeros((self._batch, self._sequence), np.int32)
    sizes = np.ones(self._batch, np.int32)
    for i, ids in enumerate(encoded):
      kept = ids[-self._sequence :]
      tokens[i, : len(kept)], sizes[i] = kept, len(kept)
    key = jax.random.fold_in(state.make_key(self._seed), first)
    written = np.zeros((self._batch, 0), np.int32)
    texts: list[str | None] = [None] * len(contexts)
    while any(text is None for text in texts):
      tokens, sizes, new = self._write(
        self._params, tokens, sizes, key, written.shape[1], temperature
      )
      written = np.concatenate([written, jax.device_get(new)], axis=1)
      for i, ids in enumerate(encoded):
        if texts[i] is None:
          texts[i], count = self._stopped(written[i], until[i], most[i])
          if texts[i] is not None:
            self.truncation.add(max(0, len(ids) + count - 1 - self._sequence))
    return [text or "" for text in texts]

  def _stopped(self, written, until, most) -> tuple[str | None, int]:
    """The text if it ends within what is written, and its tokens' number."""
    ids = written[:most].tolist()
    ends = len(ids) == most
    if self._marks_documents and self.end in ids:
      ids, ends = ids[: ids.index(self.end)], True
    text = self._tokenizer.decode(ids, skip_special_tokens=False)
    stops = [text.find(stop) for stop in until if stop and stop in text]
    if stops:
      return text[: min(stops)], len(ids)
    return (text if ends else None), len(ids)


def _logits(apply: Callable, params: Any, tokens: Array) -> Array:
  return apply({"params": params}, tokens).astype(jnp.float32)


def _score(
  apply: Callable, params: Any, tokens: Array, sizes: Array, scored: Array
) -> tuple[Array, Array]:
  """Scores of rows.

  Args:
    apply: the model.
    params: its parameters.
    tokens: [b, t + 1] int32, padded.
    sizes: [b] int32, tokens of each row without the padding.
    scored: [b] int32, how many of these, the last ones, count.

  Returns:
    [b] float32 log-likelihoods, and [b] bool: whether all are the greedy ones.
  """
  logs = jax.nn.log_softmax(_logits(apply, params, tokens[:, :-1]))
  targets = tokens[:, 1:]
  taken = jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
  position = 1 + jnp.arange(targets.shape[1])
  sizes, scored = sizes[:, None], scored[:, None]
  counts = (position < sizes) & (position >= sizes - scored)
  best = (jnp.argmax(logs, axis=-1) == targets) | ~counts
  return jnp.sum(jnp.where(counts, taken, 0.0), axis=1), jnp.all(best, axis=1)


def _next(apply: Callable, params: Any, tokens: Array, sizes: Array) -> Array:
  """[b, vocab] float32: log p of what follows the first ``sizes`` tokens."""
  logits = _logits(apply, params, tokens)
  last = jnp.take_along_axis(logits, sizes[:, None, None] - 1, axis=1)[:, 0]
  return jax.nn.log_softmax(last)


def _write(
  apply: Callable,
  params: Any,
  tokens: Array,
  sizes: Array,
  key: Array,
  count: Array,
  temperature: Array,
) -> tuple[Array, Array, Array]:
  """Writes a few tokens at the end of each row.

  Args:
    apply: the model.
    params: its parameters.
    tokens: [b, t] int32, padded.
    sizes: [b] int32, tokens of each row without the padding.
    key: of the texts.
    count: tokens that were written before.
    temperature: 0 takes the most probable token.

  Returns:
    ``tokens``, of which a full row has lost its first ones; ``sizes``; and
    [b, n] int32, what is new.
  """
  rows = jnp.arange(tokens.shape[0])

  def one(carry, i):
    tokens, sizes = carry
    logits = _logits(apply, params, tokens)
    last = jnp.take_along_axis(logits, sizes[:, None, None] - 1, axis=1)[:, 0]
    sampled = jax.random.categorical(
      jax.random.fold_in(key, count + i),
      last / jnp.where(temperature > 0, temperature, 1.0),
    )
    best = jnp.argmax(last, axis=-1)
    new = jnp.where(temperature > 0, sampled, best).astype(jnp.int32)
    full = sizes == tokens.shape[1]
    tokens = jnp.where(full[:, None], jnp.roll(tokens, -1, axis=1), tokens)
    sizes = jnp.where(full, sizes, sizes + 1)
    return (tokens.at[rows, sizes - 1].set(new), sizes), new

  (tokens, sizes), new = jax.lax.scan(one, (tokens, sizes), jnp.arange(_CHUNK))
  return tokens, sizes, new.T
