"""A trained model for EleutherAI's lm-evaluation-harness.

The one module that needs it: ``pip install -e '.[eval]'``.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import difflib
from importlib import metadata
import json
import logging
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval import tasks as lm_tasks
from lm_eval import utils as lm_utils
from lm_eval.api import instance
from lm_eval.api import model

from experiments import errors
from experiments import scoring

VERSION = metadata.version("lm_eval")

_GENERATED = 256  # tokens, where a task does not say; as the harness has it
# What samples differently, and what greedy decoding does not read.
_UNREAD_BY_GREEDY = {"top_p", "top_k", "min_p", "temperature"}
_READ = {"until", "max_gen_toks", "do_sample", "temperature"}


class FlaxLM(model.TemplateLM):
  """``scoring.Scorer`` with the harness's names.

  Texts are taken apart by ``TemplateLM``; an empty context is the end of a
  document.
  """

  def __init__(self, scorer: scoring.Scorer):
    super().__init__()
    self._scorer = scorer

  @property
  def eot_token_id(self) -> int:
    """The end of a document."""
    return self._scorer.end

  def tok_encode(self, string: str, add_special_tokens=None, **_) -> list[int]:
    """Tokens of a text; the model adds none, whatever is asked."""
    del add_special_tokens
    return self._scorer.encode(string)

  def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
    encoded = [
      scoring.Encoded(context or [self.eot_token_id], continuation)
      for _, context, continuation in requests
    ]
    return [(x.log_likelihood, x.greedy) for x in self._scorer.score(encoded)]

  def loglikelihood_rolling(
    self, requests: list[instance.Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """The log-likelihoods of whole texts, each after the end of a document."""
    del disable_tqdm
    encoded = [
      scoring.Encoded([self.eot_token_id], self.tok_encode(request.args[0]))
      for request in requests
    ]
    return [x.log_likelihood for x in self._scorer.score(encoded)]

  def generate_until(
    self, requests: list[instance.Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """What the model writes after each context, up to a stop string."""
    del disable_tqdm
    settings = [_generation(request) for request in requests]
    found = [""] * len(requests)
    for temperature in sorted({one["temperature"] for one in settings}):
      mine = [
        i for i, one in enumerate(settings) if one["temperature"] == temperature
      ]
      texts = self._scorer.generate(
        [requests[i].args[0] for i in mine],
        until=[settings[i]["until"] for i in mine],
        most=[settings[i]["most"] for i in mine],
        temperature=temperature,
      )
      for i, text in zip(mine, texts, strict=True):
        found[i] = text
    return found


def _generation(request: instance.Instance) -> dict[str, Any]:
  """How a request is to be continued."""
  asked = dict(request.args[1])
  sampled = bool(asked.get("do_sample", False))
  known = _READ if sampled else _READ | _UNREAD_BY_GREEDY
  unknown = sorted(set(asked) - known)
  if unknown:
    raise errors.UserError(
      f"task {request.task_name}: generation is asked with"
      f" {unknown[0]}={asked[unknown[0]]!r}, which is not implemented; needed"
      f" some of {', '.join(sorted(known))}."
    )
  until = asked.get("until") or []
  return {
    "until": [until] if isinstance(until, str) else list(until),
    "most": int(asked.get("max_gen_toks", _GENERATED)),
    "temperature": float(asked.get("temperature", 1.0)) if sampled else 0.0,
  }


def find_tasks(
  include: Sequence[Path], own: bool = False
) -> lm_tasks.TaskManager:
  """The tasks that there are.

  Args:
    include: folders with tasks of one's own.
    own: whether these are all; reading the harness's takes seconds.
  """
  # What it warns of stands in the results: the number of shots, and the seed.
  logging.getLogger("lm_eval").setLevel(logging.ERROR)
  return lm_tasks.TaskManager(
    include_path=[str(path) for path in include], include_defaults=not own
  )


def check_task(manager: lm_tasks.TaskManager, task: str) -> None:
  """Raises ``UserError`` if there is no such task."""
  if task in manager.all_tasks:
    return
  close = difflib.get_close_matches(task, manager.all_tasks, n=3, cutoff=0.5)
  raise errors.UserError(
    f"--tasks: lm-evaluation-harness {VERSION} has no task {task!r}; did you"
    f" mean {', '.join(close) or 'one of `lm_eval ls tasks`'}?"
  )


def evaluate(
  scorer: scoring.Scorer,
  task: str,
  *,
  manager: lm_tasks.TaskManager,
  fewshot: int | None,
  limit: int | None,
  seed: int,
) -> dict:
  """What the harness finds of one task, or of a group of them.

  Args:
    scorer: the model.
    task: its name.
    manager: of ``find_tasks``.
    fewshot: examples before each question; None is what the task says.
    limit: questions of each task at most; None is all.
    seed: of the choice of examples.

  Returns:
    The harness's results, plain values alone.

  Raises:
    UserError: there is no such task, its data are not here and cannot be
      loaded, or it asks for what is not implemented.
  """
  check_task(manager, task)
  with _explained(task):
    found = lm_eval.simple_evaluate(
      model=FlaxLM(scorer),
      tasks=[task],
      task_manager=manager,
      num_fewshot=fewshot,
      limit=limit,
      random_seed=seed,
      numpy_random_seed=seed,
      torch_random_seed=seed,
      fewshot_random_seed=seed,
      log_samples=False,
    )
  kept = ("results", "groups", "n-shot", "n-samples", "versions", "configs")
  plain = {name: found[name] for name in kept if name in found}
  text = json.dumps(plain, default=lm_utils.handle_non_serializable)
  return json.loads(text)


@contextlib.contextmanager
def _explained(task: str) -> Iterator[None]:
  """What keeps the harness from a task, as a ``UserError``."""
  try:
    yield
  except (ConnectionError, FileNotFoundError) as error:
    raise errors.UserError(
      f"--tasks={task}: its data are not on this machine and cannot be loaded"
      f" ({_line(error)}); connect to the network, or give --tasks=cloze_text,"
      "cloze_letter, which need none."
    ) from error
  except ImportError as error:
    raise errors.UserError(
      f"--tasks={task} needs another package ({_line(error)}); install it."
    ) from error
  except AssertionError as error:
    if "fewshot samples" not in str(error):
      raise
    raise errors.UserError(
      f"--fewshot: {task} has fewer examples ({_line(error)}); give less."
    ) from error


def _line(error: BaseException) -> str:
  return " ".join(f"{type(error).__name__}: {error}".split())[:200]
