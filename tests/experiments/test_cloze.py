"""Contract: questions are what they say, and a model that knows answers them.

Ten options, distinct, the right one in every place equally often and what the
document goes on with, the others of other documents; shots of documents that
are asked nothing; all decided by the seed. Scored as text, a model that has
learnt a Markov chain is as often right as the chain itself, and one that has
learnt nothing is at chance.
"""

from collections import Counter
import json
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import cloze
from experiments import data
from experiments import errors
from experiments import scoring
from experiments import synthetic
from experiments import train
from experiments import trained

CHAIN = synthetic.Chain(vocab=32, branches=4)
SMALL = cloze.Settings(questions=60, context=12, answer=6)
# As the command line has them.
FLAGS = {
  "recipe": "",
  "step": 0,
  "fewshot": 5,
  "batch": 16,
  "seed": 0,
  "questions": 200,
  "context": 0,
  "answer": 0,
}


def _texts(count: int) -> list[str]:
  """Documents with lines, indentation and letters of several bytes."""
  generator = random.Random(0)
  syllables = ["na", "to", "ri", "mé", "ko", "λu", "(x)", "si", "ve", "dø"]
  between = [" ", " ", " ", "\n", "\n    ", "  "]
  texts = []
  for _ in range(count):
    words = [
      "".join(generator.choices(syllables, k=generator.randint(1, 3)))
      + generator.choice(between)
      for _ in range(120)
    ]
    texts.append("".join(words))
  return texts


def _documents() -> tuple[list[str], np.ndarray, object]:
  texts = _texts(80)
  tokenizer = data.train_tokenizer(texts, 300)
  return texts, data.encode(tokenizer, texts), tokenizer


def _check_form(made: cloze.Cloze, texts: list[str]) -> None:
  for question in (*made.questions, *made.shots):
    assert len(question.options) == len(question.sources) == 10
    assert len({option.strip() for option in question.options}) == 10
    assert all(option.strip() for option in question.options)
    right = question.options[question.answer]
    assert question.text + right in texts[question.document]
    assert question.text == question.text.strip()
    assert right[0].isspace()
    for i, source in enumerate(question.sources):
      assert question.options[i] in texts[source]
      assert (source == question.document) == (i == question.answer)
  numbers = [question.number for question in made.questions]
  assert numbers == list(range(len(numbers)))
  shot_documents = {shot.document for shot in made.shots}
  assert len(made.shots) == len(shot_documents) == 5
  used = {source for q in made.questions for source in q.sources}
  shown = {source for shot in made.shots for source in shot.sources}
  assert not used & shown
  places = Counter(question.answer for question in made.questions)
  assert len(places) == 10
  assert max(places.values()) - min(places.values()) <= 1
  assert len({shot.answer for shot in made.shots}) == 5


def test_questions_of_documents():
  texts, tokens, tokenizer = _documents()
  made = cloze.build(tokens, tokenizer, SMALL)
  assert not made.passages and made.documents == 80
  assert len(made.questions) == 60
  _check_form(made, texts)
  for question in made.questions:
    assert len(tokenizer.encode(question.text).ids) <= 12
    for option in question.options:
      assert len(tokenizer.encode(option).ids) <= 6
  asked = Counter(question.document for question in made.questions)
  assert len(asked) > 20  # of many documents
  # A piece is asked about once.
  assert len({(q.document, q.text) for q in made.questions}) == 60


def test_passages_stand_for_documents_where_there_are_few():
  tokens, tokenizer = CHAIN.sample(20_000, 1), CHAIN.tokenizer()
  made = cloze.build(tokens, tokenizer, SMALL)
  assert made.passages and made.documents == 20_000 // (4 * 18)
  parts = [
    tokenizer.decode(tokens[i * 72 : (i + 1) * 72].tolist())
    for i in range(made.documents)
  ]
  _check_form(made, parts)
  assert "held-out passages" in made.summary()


def test_seed_decides():
  tokens, tokenizer = CHAIN.sample(20_000, 1), CHAIN.tokenizer()
  made, again = (cloze.build(tokens, tokenizer, SMALL) for _ in range(2))
  assert made == again
  other = cloze.build(
    tokens,
    tokenizer,
    cloze.Settings(questions=60, context=12, answer=6, seed=1),
  )
  assert made.shots != other.shots
  both = {q.text for q in made.questions} & {q.text for q in other.questions}
  assert len(both) < 60
  # Of NumPy's promised streams, so these hold with every version.
  answers = [question.answer for question in made.questions[:8]]
  assert answers == [9, 7, 7, 8, 0, 2, 0, 1]


def test_a_long_document_is_not_all_there_is():
  texts = _texts(80)
  texts[7] = "".join(texts)  # half of all text
  tokenizer = data.train_tokenizer(texts[:3], 300)
  made = cloze.build(data.encode(tokenizer, texts), tokenizer, SMALL)
  options = {
    (source, option)
    for question in made.questions
    for source, option in zip(question.sources, question.options, strict=True)
  }
  assert max(Counter(source for source, _ in options).values()) <= 16
  assert len({question.document for question in made.questions}) > 20


def test_shots_do_not_change_the_questions():
  """Up to five there are five; fewer are shown."""
  tokens, tokenizer = CHAIN.sample(20_000, 1), CHAIN.tokenizer()
  made = cloze.build(tokens, tokenizer, SMALL)
  question = made.questions[0]
  assert made.context(question, cloze.TEXT, 0) == question.text
  two = made.context(question, cloze.TEXT, 2)
  shown = [x.text + x.options[x.answer] for x in made.shots[:2]]
  assert two == f"{shown[0]}\n\n{shown[1]}\n\n{question.text}"
  with pytest.raises(errors.UserError, match="--fewshot=6; .* the 5 shots"):
    cloze.check_shots(made, 6)


def test_letters_are_asked_as_in_mmlu_pro():
  question = cloze.Question(
    number=0,
    document=3,
    text="two  words",
    options=tuple(f"\n  option {i} " for i in range(10)),
    sources=(0,) * 10,
    answer=2,
  )
  assert question.prompt(cloze.LETTER) == (
    "Question:\ntwo  words\nOptions:\nA. option 0\nB. option 1\nC. option 2\n"
    "D. option 3\nE. option 4\nF. option 5\nG. option 6\nH. option 7\n"
    "I. option 8\nJ. option 9\nAnswer:"
  )
  assert question.choices(cloze.LETTER)[2] == " C"
  assert question.row() | {"src": ""} == {
    "question_id": 0,
    "question": "two  words",
    "options": list(question.options),
    "answer": "C",
    "answer_index": 2,
    "cot_content": "A: Let's think step by step. The answer is (C).",
    "category": "cloze",
    "src": "",
  }


def test_what_is_too_short_or_cannot_be_meant_is_refused():
  tokens, tokenizer = CHAIN.sample(600, 1), CHAIN.tokenizer()
  with pytest.raises(errors.UserError, match="600 tokens long.* needed 2 q"):
    cloze.build(tokens, tokenizer, SMALL)
  fewer = cloze.build(CHAIN.sample(1500, 1), tokenizer, SMALL)
  assert "the text yields no more, 60 were asked" in fewer.summary()
  for name, value in {"seed": -1, "questions": 1, "context": 0}.items():
    with pytest.raises(errors.UserError, match=f"--{name}={value}; needed"):
      cloze.Settings(**{name: value})


def _sigma(share: float, count: int) -> float:
  return np.sqrt(share * (1 - share) / count)


def test_a_model_that_learnt_the_chain_answers_as_the_chain(learned):
  """Standard errors are those of 400 independent questions, p (1 - p) / n."""
  model = trained.load(learned)
  made = cloze.build(
    model.corpus.validation,
    model.corpus.tokenizer,
    cloze.fitting(96, questions=400),
  )
  assert len(made.questions) == 400

  def make_scorer(params):
    return scoring.Scorer(model.apply, params, model.corpus.tokenizer, 96)

  # What knows the chain: log-likelihoods of its own.
  chain = synthetic.parse(model.config.data.path, 32)
  right = []
  for question in made.questions:
    logs = [
      chain.log_probabilities(
        np.array((question.text + option).split(), int)
      ).sum()
      for option in question.options
    ]
    right.append(np.argmax(logs) == question.answer)
  best = np.mean(right)
  chance = 0.1 + 3 * _sigma(0.1, 400)
  assert best > 0.5
  scorer = make_scorer(model.params)
  for shots in (0, 5):
    results = cloze.score(made, scorer, cloze.TEXT, shots)
    assert not scorer.truncation.cut
    for name in ("acc", "acc_norm"):
      assert results[name] > 0.1 + 3 * results[f"{name}_stderr"]
      assert abs(results[name] - best) < 3 * _sigma(best, 400)
    expected = _sigma(results["acc"], 399)  # of a sample: n - 1
    assert results["acc_stderr"] == pytest.approx(expected, rel=1e-9)

  experiment = train.make_experiment(model.config)
  untrained = jax.jit(experiment.initialise)().params
  results = cloze.score(made, make_scorer(untrained), cloze.TEXT, 0)
  assert 0.1 - 3 * _sigma(0.1, 400) < results["acc"] < chance
  assert 0.1 - 3 * _sigma(0.1, 400) < results["acc_norm"] < chance
  # All letters are one token of the chain: always the first is chosen, which
  # is right in exactly a tenth of the places.
  assert cloze.score(made, scorer, cloze.LETTER, 0)["acc"] == 0.1


def test_command_writes_results_beside_the_run(learned, capsys):
  values = SimpleNamespace(**FLAGS, workdir=str(learned))
  path = cloze.run(values, ["--workdir=A B"])
  assert path.parent == learned / "evaluations"
  content = json.loads(path.read_text())
  assert content["command"] == "python -m experiments.cloze '--workdir=A B'"
  assert content["run"]["config"]["data"]["sequence"] == 96
  assert content["run"]["trained_recipe"] == content["run"]["recipe"] == "none"
  assert content["run"]["step"] == 100 and content["run"]["finished"]
  assert content["settings"]["questions"] == 200
  assert set(content["versions"]) >= {"jax", "fp4jax", "device"}
  text = content["results"]["cloze_text"]
  assert text["acc"] > 0.5 and text["chance"] == 0.1
  assert text["truncation"]["cut"] == 0
  letter = content["results"]["cloze_letter"]
  assert letter["truncation"]["cut"] == letter["truncation"]["requests"] == 2000
  output = capsys.readouterr().out
  assert (
    f"acc {100 * text['acc']:.1f} ± {100 * text['acc_stderr']:.1f}" in output
  )
  assert "2,000 did not fit into 96 tokens" in output
  assert cloze.run(values) == path  # the same settings, the same file


def test_tasks_of_the_harness_are_plain_files(tmp_path):
  tokens, tokenizer = CHAIN.sample(20_000, 1), CHAIN.tokenizer()
  made = cloze.build(tokens, tokenizer, SMALL)
  folder = cloze.write_tasks(made, tmp_path)
  for name, expected in (("test", made.questions), ("validation", made.shots)):
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    assert [json.loads(x) for x in lines] == [x.row() for x in expected]
  for task in cloze.NAMES:
    content = json.loads((folder / f"{task}.yaml").read_text())
    assert content["task"] == task
    files = content["dataset_kwargs"]["data_files"]
    assert files["test"] == str(folder / "test.jsonl")
