"""A multiple-choice task made of held-out text, in MMLU-Pro's format.

python -m experiments.cloze --workdir=DIR

A question is a piece of held-out text, and has ten options: what comes next,
and nine pieces that come elsewhere, in other documents. Five shots, of
documents without questions, are the same for all. Two scorings:

  cloze_text: each option follows the piece as text does; accuracy of the most
    probable one (acc), and of the most probable one a character (acc_norm).
  cloze_letter: the options are listed under letters, and the most probable
    letter is the answer, as in MMLU-Pro. Small models are at chance here.

Chance is 10 % in both: the right options' places are all equally frequent.
``experiments.evaluate`` gives the same two tasks to lm-evaluation-harness, from
the files that ``write_tasks`` leaves.

References:
  Wang et al., "MMLU-Pro", arXiv 2406.01574.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import hashlib
import json
from pathlib import Path
import re
import sys
from typing import Any
from typing import NamedTuple

from absl import flags
import numpy as np
import tokenizers

from experiments import cli
from experiments import data
from experiments import errors
from experiments import files
from experiments import scoring
from experiments import trained as trained_lib

LETTERS = "ABCDEFGHIJ"
OPTIONS = len(LETTERS)
TEXT = "cloze_text"
LETTER = "cloze_letter"
NAMES = (TEXT, LETTER)
SHOTS = 5
_BETWEEN = "\n\n"  # shots
_MOST = 16  # pieces of a document, so that a long one is not all there is
_DESCRIPTION = (
  "The following are multiple choice questions (with answers) about what comes"
  " next in a text."
)
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # of a character cut in two
_WORD = re.compile(r"\s*\S+")


class Piece(NamedTuple):
  """A text, and how it goes on.

  Attributes:
    document: that it is of, a number.
    context: its beginning, without white space around.
    answer: what comes next, with the white space before.
  """

  document: int
  context: str
  answer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """A piece of text and ten ways to go on.

  Attributes:
    number: among the questions, or the shots.
    document: that the text is of.
    text: the beginning.
    options: ten, each with the white space before it.
    sources: the documents of the options.
    answer: index of the right one.
  """

  number: int
  document: int
  text: str
  options: tuple[str, ...]
  sources: tuple[int, ...]
  answer: int

  def row(self) -> dict:
    """The question with the fields of MMLU-Pro's data."""
    letter = LETTERS[self.answer]
    return {
      "question_id": self.number,
      "question": self.text,
      "options": list(self.options),
      "answer": letter,
      "answer_index": self.answer,
      "cot_content": f"A: Let's think step by step. The answer is ({letter}).",
      "category": "cloze",
      "src": f"document {self.document}",
    }

  def prompt(self, task: str) -> str:
    """What comes before the option, or before its letter."""
    if task == TEXT:
      return self.text
    listed = "".join(
      f"{letter}. {option.strip()}\n"
      for letter, option in zip(LETTERS, self.options, strict=True)
    )
    return f"Question:\n{self.text}\nOptions:\n{listed}Answer:"

  def choices(self, task: str) -> tuple[str, ...]:
    """What may follow the prompt."""
    return self.options if task == TEXT else tuple(f" {x}" for x in LETTERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What a cloze follows from, besides the text.

  Attributes:
    seed: of all choices.
    questions: how many, if the text has as many pieces (a document has 16 at
      most).
    shots: how many there are, to be shown.
    context: tokens of a piece's beginning, at most.
    answer: tokens of its continuation, at most.
  """

  seed: int = 0
  questions: int = 500
  shots: int = SHOTS
  context: int = 64
  answer: int = 16

  def __post_init__(self):
    least = {"seed": 0, "questions": 2, "shots": 0, "context": 1, "answer": 1}
    for name, needed in least.items():
      value = getattr(self, name)
      if not needed <= value < 2**31:
        raise errors.UserError(
          f"--{name}={value}; needed at least {needed} and less than 2**31."
        )


def fitting(sequence: int, **settings) -> Settings:
  """Settings whose shots and question fit into a sequence, scored as text.

  >>> fitting(128), fitting(512).context
  (Settings(seed=0, questions=500, shots=5, context=15, answer=4), 67)
  """
  shots = settings.get("shots", SHOTS)
  answer = settings.get("answer") or min(16, max(4, sequence // 32))
  context = settings.get("context") or sequence // (shots + 1) - answer - 2
  context = min(256, max(8, context))
  return Settings(**(settings | {"context": context, "answer": answer}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cloze:
  """Questions and shots.

  Attributes:
    questions: to be answered.
    shots: shown before each of them.
    settings: that they follow from.
    documents: number of documents of the text, or of what stands for them.
    passages: whether the text has too few documents, and passages of one
      length stand for them.
  """

  questions: tuple[Question, ...]
  shots: tuple[Question, ...]
  settings: Settings
  documents: int
  passages: bool

  def context(self, question: Question, task: str, shots: int) -> str:
    """All that comes before the choices."""
    shown = [
      shot.prompt(task) + shot.choices(task)[shot.answer] + _BETWEEN
      for shot in self.shots[:shots]
    ]
    head = f"{_DESCRIPTION}{_BETWEEN}" if task == LETTER else ""
    return head + "".join(shown) + question.prompt(task)

  def summary(self) -> str:
    """One line on what was made."""
    kind = "passages" if self.passages else "documents"
    fewer = ""
    if len(self.questions) < self.settings.questions:
      fewer = (
        f" (the text yields no more, {self.settings.questions} were asked)"
      )
    return (
      f"{len(self.questions)} questions{fewer} and {len(self.shots)} shots of"
      f" {self.documents} held-out {kind}; chance is"
      f" {100 / OPTIONS:.0f} %"
    )


def _order(seed: int, stream: int, count: int) -> np.ndarray:
  """A permutation; NumPy promises the same from every version."""
  random = np.random.Philox(key=[seed, stream]).random_raw(count)
  return np.argsort(random, kind="stable")


def build(
  tokens: np.ndarray, tokenizer: tokenizers.Tokenizer, settings: Settings
) -> Cloze:
  """Makes questions.

  Args:
    tokens: [n] held-out tokens, documents with ``data.END`` between.
    tokenizer: of the tokens.
    settings: the rest; the same give the same questions.

  Returns:
    The questions: pieces of text that do not overlap. Options are distinct,
    wrong ones are of other documents than the question.

  Raises:
    UserError: the text is too short.
  """
  documents, passages = _documents(tokens, tokenizer, settings)
  order = _order(settings.seed, 0, len(documents))
  reserved: list[Piece] = []
  pieces: list[Piece] = []
  wanted = 2 * settings.shots + 2 * OPTIONS if settings.shots else 0
  for i in order.tolist():
    found = list(_pieces(i, documents[i], tokenizer, settings))
    found = found[:: -(-len(found) // _MOST) or 1]
    some = len({piece.document for piece in reserved}) < settings.shots + 2
    if wanted and (some or len(reserved) < wanted):
      reserved += found
    else:
      pieces += found
    # Wrong options are drawn from four times as many pieces as are asked about.
    if len(pieces) >= 4 * settings.questions:
      break
  shots = _questions(reserved, settings.shots, settings.seed, 1, apart=True)
  questions = _questions(pieces, settings.questions, settings.seed, 2)
  if len(shots) < settings.shots or len(questions) < 2:
    raise errors.UserError(
      f"the held-out text is {len(tokens):,} tokens long, which gives"
      f" {len(questions)} questions and {len(shots)} of {settings.shots} shots;"
      " needed 2 questions and all shots: evaluate a run with more text, or"
      " give a smaller --context or --answer."
    )
  return Cloze(
    questions=questions,
    shots=shots,
    settings=settings,
    documents=len(documents),
    passages=passages,
  )


def _documents(
  tokens: np.ndarray, tokenizer: tokenizers.Tokenizer, settings: Settings
) -> tuple[list[np.ndarray], bool]:
  """Tokens by document, and whether passages stand for documents."""
  end = tokenizer.token_to_id(data.END)
  ends = [] if end is None else np.flatnonzero(tokens == end).tolist()
  if len(ends) >= 4 * (settings.shots + OPTIONS):
    parts = np.split(tokens, ends)  # all but the first begin with the mark
    parts = [parts[0], *(part[1:] for part in parts[1:])]
    return [part for part in parts if len(part)], False
  if ends:
    tokens = np.delete(tokens, ends)
  length = 4 * (settings.context + settings.answer)
  count = len(tokens) // length
  return list(tokens[: count * length].reshape(count, length)), True


def _pieces(
  document: int,
  tokens: np.ndarray,
  tokenizer: tokenizers.Tokenizer,
  settings: Settings,
) -> Iterator[Piece]:
  """Cuts a document, between words, into pieces that do not overlap."""
  text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
  words = _WORD.findall(text)
  sizes = _sizes(tokenizer, words)
  # A context begins without white space.
  bare = _sizes(tokenizer, [word.lstrip() for word in words])
  start = 0
  while start < len(words):
    room = settings.context - bare[start]
    middle = _filled(sizes, start + 1, room) if room >= 0 else start
    end = _filled(sizes, middle, settings.answer)
    context = "".join(words[start:middle]).strip()
    answer = "".join(words[middle:end])
    if context and answer.strip() and _BROKEN not in context + answer:
      yield Piece(document, context, answer)
    start = max(end, start + 1)  # a word longer than a piece is left out


def _sizes(tokenizer: tokenizers.Tokenizer, words: list[str]) -> list[int]:
  encoded = tokenizer.encode_batch(words, add_special_tokens=False)
  return [len(encoding.ids) for encoding in encoded]


def _filled(sizes: Sequence[int], start: int, most: int) -> int:
  """Where words from ``start`` on have at most so many tokens."""
  total, end = 0, start
  while end < len(sizes) and total + sizes[end] <= most:
    total += sizes[end]
    end += 1
  return end


def _questions(
  pieces: Sequence[Piece], count: int, seed: int, stream: int, apart=False
) -> tuple[Question, ...]:
  """Questions from pieces.

  Args:
    pieces: to ask about, and to take wrong options from.
    count: of questions, at most.
    seed: of the choices.
    stream: likewise.
    apart: whether each question is of a document of its own.

  Returns:
    The questions.
  """
  chosen: list[tuple[Piece, list[Piece]]] = []
  asked: set[int] = set()
  for i in _order(seed, 4 * stream, len(pieces)).tolist():
    if len(chosen) == count:
      break
    if apart and pieces[i].document in asked:
      continue
    others = _others(pieces, i, seed, 4 * stream + 2**32 * (i + 1))
    if len(others) == OPTIONS - 1:
      chosen.append((pieces[i], others))
      asked.add(pieces[i].document)
  # Every place comes equally often, or one less.
  places = _order(seed, 4 * stream + 1, len(chosen)) % OPTIONS
  questions = []
  for number, (piece, others) in enumerate(chosen):
    place = int(places[number])
    options = [*others[:place], piece, *others[place:]]
    questions.append(
      Question(
        number=number,
        document=piece.document,
        text=piece.context,
        options=tuple(option.answer for option in options),
        sources=tuple(option.document for option in options),
        answer=place,
      )
    )
  return tuple(questions)


def _others(
  pieces: Sequence[Piece], index: int, seed: int, stream: int
) -> list[Piece]:
  """Nine pieces of other documents that go on in ten different ways."""
  own, found = pieces[index], []
  different = {own.answer.strip()}
  for i in _order(seed, stream, len(pieces)).tolist():
    other = pieces[i]
    if other.document == own.document or other.answer.strip() in different:
      continue
    different.add(other.answer.strip())
    found.append(other)
    if len(found) == OPTIONS - 1:
      break
  return found


def score(
  cloze: Cloze, scorer: scoring.Scorer, task: str, shots: int
) -> dict[str, float]:
  """How often the most probable choice is the right one.

  Args:
    cloze: the questions.
    scorer: the model.
    task: one of ``NAMES``.
    shots: shown before each question.

  Returns:
    ``acc`` and, for ``cloze_text``, ``acc_norm``, each with its standard error
    (of the mean of independent questions), as lm-evaluation-harness has them.
  """
  check_shots(cloze, shots)
  requests = [
    scorer.encode_pair(cloze.context(question, task, shots), choice)
    for question in cloze.questions
    for choice in question.choices(task)
  ]
  logs = np.array([found.log_likelihood for found in scorer.score(requests)])
  logs = logs.reshape(len(cloze.questions), OPTIONS)
  answers = np.array([question.answer for question in cloze.questions])
  characters = np.array(
    [[len(x) for x in question.options] for question in cloze.questions]
  )
  ranked = {"acc": logs}
  if task == TEXT:
    ranked["acc_norm"] = logs / characters
  results: dict[str, float] = {}
  for name, values in ranked.items():
    right = values.argmax(axis=1) == answers
    error = right.std(ddof=1) / np.sqrt(len(right))
    results |= {name: float(right.mean()), f"{name}_stderr": float(error)}
  return results


def check_shots(cloze: Cloze, shots: int) -> None:
  """Raises ``UserError`` for more shots than there are."""
  if not 0 <= shots <= len(cloze.shots):
    raise errors.UserError(
      f"--fewshot={shots}; needed at least 0 and at most the"
      f" {len(cloze.shots)} shots that there are."
    )


def write_tasks(cloze: Cloze, workdir: Path) -> Path:
  """Writes both tasks for lm-evaluation-harness, which then needs no network.

  ``lm_eval --include_path FOLDER --tasks cloze_text,cloze_letter`` finds them.

  Args:
    cloze: the questions.
    workdir: of the run whose text they are of.

  Returns:
    The folder, whose name follows from the settings; its files name it.
  """
  plain = json.dumps(dataclasses.asdict(cloze.settings), sort_keys=True)
  digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
  folder = workdir.absolute() / "evaluations" / f"cloze-{digest}"
  for name, rows in (("test", cloze.questions), ("validation", cloze.shots)):
    lines = [json.dumps(question.row()) + "\n" for question in rows]
    files.write(folder / f"{name}.jsonl", "".join(lines))
  for task in NAMES:
    # JSON is YAML too.
    content = json.dumps(_task(task, folder, bool(cloze.shots)), indent=2)
    files.write(folder / f"{task}.yaml", f"{content}\n")
  return folder


def _task(task: str, folder: Path, shots: bool) -> dict:
  """A task of lm-evaluation-harness."""
  splits = ("test", "validation") if shots else ("test",)
  means = {"aggregation": "mean", "higher_is_better": True}
  metrics = ("acc", "acc_norm") if task == TEXT else ("acc",)
  config: dict[str, Any] = {
    "task": task,
    "dataset_path": "json",
    "dataset_kwargs": {
      "data_files": {name: str(folder / f"{name}.jsonl") for name in splits},
      "cache_dir": str(folder / "cache"),
    },
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_target": "answer_index",
    "num_fewshot": SHOTS if shots else 0,
    "fewshot_delimiter": _BETWEEN,
    "metric_list": [{"metric": metric, **means} for metric in metrics],
    "metadata": {"version": 1.0},
  }
  if shots:
    config["fewshot_split"] = "validation"
    config["fewshot_config"] = {"sampler": "first_n"}
  if task == TEXT:
    return config | {
      "doc_to_text": "question",
      "doc_to_choice": "options",
      "target_delimiter": "",
    }
  options = "".join(
    f"{letter}. {{{{options[{i}]|trim}}}}\n" for i, letter in enumerate(LETTERS)
  )
  return config | {
    "description": f"{_DESCRIPTION}{_BETWEEN}",
    "doc_to_text": f"Question:\n{{{{question}}}}\nOptions:\n{options}Answer:",
    "doc_to_choice": list(LETTERS),
    "target_delimiter": " ",
  }


def of_run(trained: trained_lib.Trained, values: flags.FlagValues) -> Cloze:
  """The questions of a run's held-out text, as flags ask for them."""
  settings = fitting(
    trained.config.data.sequence,
    seed=values.seed,
    questions=values.questions,
    shots=max(SHOTS, values.fewshot),
    context=values.context,
    answer=values.answer,
  )
  corpus = trained.corpus
  cloze = build(corpus.validation, corpus.tokenizer, settings)
  check_shots(cloze, values.fewshot)
  return cloze


def describe(results: dict[str, float]) -> str:
  """Accuracies with their standard errors, in per cent.

  >>> describe({"acc": 0.5, "acc_stderr": 0.025})
  'acc 50.0 ± 2.5 %'
  """
  return ", ".join(
    f"{name} {100 * value:.1f} ± {100 * results[f'{name}_stderr']:.1f} %"
    for name, value in results.items()
    if not name.endswith("_stderr")
  )


def run(values: flags.FlagValues, arguments: Sequence[str] = ()) -> Path:
  """Makes the questions of a run, asks them, and writes the results.

  Args:
    values: the flags.
    arguments: of the command line, for the results.

  Returns:
    The file of the results.

  Raises:
    UserError: the run or its text cannot be used.
  """
  trained = trained_lib.load(values.workdir, values.recipe, values.step)
  cloze = of_run(trained, values)
  print(f"{trained.coverage}\n{cloze.summary()}", flush=True)
  scorer = scoring.Scorer(
    trained.apply,
    trained.params,
    trained.corpus.tokenizer,
    trained.config.data.sequence,
    batch=values.batch,
  )
  results = {}
  for task in NAMES:
    found = score(cloze, scorer, task, values.fewshot)
    truncation = scorer.reset()
    print(f"{task}: {describe(found)}; {truncation}", flush=True)
    results[task] = {
      **found,
      "chance": 1 / OPTIONS,
      "questions": len(cloze.questions),
      "fewshot": values.fewshot,
      "truncation": dataclasses.asdict(truncation),
    }
  path = trained_lib.save(
    trained,
    name="cloze",
    settings=dataclasses.asdict(cloze.settings)
    | {"fewshot": values.fewshot, "batch": values.batch},
    results=results,
    versions={},
    command=("experiments.cloze", *arguments),
  )
  print(f"results: {path}")
  return path


if __name__ == "__main__":
  cli.evaluate(lambda values: run(values, sys.argv[1:]))
