"""Contract: scores are log-likelihoods, and the harness gets the same ones.

Each token of a continuation counts once, given all that fits before it; what
does not fit is reported; padding, lengths and batches change nothing. A run is
evaluated under its own recipe or another, and what cannot be evaluated is
refused in a sentence. Tests of lm-evaluation-harness itself run where it is
installed.
"""

from importlib import util
import json
from pathlib import Path
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models as word_models
from tokenizers import pre_tokenizers

from experiments import cloze
from experiments import data
from experiments import errors
from experiments import evaluate
from experiments import models
from experiments import scoring
from experiments import synthetic
from experiments import trained
from tests.experiments.helpers import make_config
from tests.experiments.test_cloze import FLAGS

TOKENIZER = synthetic.Chain(vocab=32, branches=4).tokenizer()

harness_only = pytest.mark.skipif(
  util.find_spec("lm_eval") is None,
  reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'",
)


def _bigram(variables, tokens):
  """Logits of the next token given the current one: a table."""
  return variables["params"][tokens]


def _table(seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).normal(0, 2, (32, 32)).astype(np.float32)


def _requests(count: int, longest: int, seed: int = 0) -> list:
  rng = np.random.default_rng(seed)
  requests = []
  for _ in range(count):
    context, continuation = rng.integers(1, longest, 2)
    requests.append(
      scoring.Encoded(
        rng.integers(0, 32, context).tolist(),
        rng.integers(0, 32, continuation).tolist(),
      )
    )
  return requests


def _scorer(sequence: int = 32, batch: int = 4, table=None) -> scoring.Scorer:
  table = _table() if table is None else table
  return scoring.Scorer(_bigram, table, TOKENIZER, sequence, batch=batch)


def test_each_token_counts_once_with_all_that_fits_before():
  for i, encoded in enumerate(_requests(300, 40)):
    tokens = np.array([*encoded.context, *encoded.continuation])
    for length in (1, 7, 16, 100):
      found = list(scoring.windows(i, encoded, length))
      end = len(encoded.context)
      for window in found:
        assert window.request == i and 1 <= window.scored <= length
        end += window.scored
        start = max(0, end - length - 1)
        assert window.tokens == tokens[start:end].tolist()
        # A target has a token before it, and all of the sequence if there is.
        assert len(window.tokens) > window.scored
      assert end == len(tokens)
      fits = len(encoded.continuation) <= length
      assert (len(found) == 1) == fits


def test_scores_are_those_of_the_definition():
  """Float32 sums of up to 40 terms of at most 15, against float64."""
  requests = _requests(100, 40)
  table = _table().astype(np.float64)
  logs = table - np.log(np.exp(table).sum(1, keepdims=True))
  scores = _scorer(sequence=200).score(requests)
  for (context, continuation), score in zip(requests, scores, strict=True):
    before = [context[-1], *continuation[:-1]]
    expected = logs[before, continuation].sum()
    assert score.log_likelihood == pytest.approx(expected, abs=40 * 15 * 2**-23)
    greedy = (logs[before].argmax(1) == continuation).all()
    assert score.greedy == greedy
  best = [int(logs[3].argmax())]
  best.append(int(logs[best[0]].argmax()))
  (score,) = _scorer().score([scoring.Encoded([3], best)])
  assert score.greedy


def test_padding_lengths_and_batches_change_nothing():
  """A Transformer in float32, against each request alone, padded with other
  tokens and once not at all.

  Its logits are below 8 and have errors of some 2^-20 of that, where sums of
  another order differ; scores add them up.
  """
  config = make_config(
    model__dtype="float32", model__layers=1, model__scan=False
  )
  model = models.from_config(config)
  tokens = jnp.zeros((1, 8), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
  requests = _requests(24, 17)
  assert scoring.lengths(32) == (16, 32)
  scorer = scoring.Scorer(model.apply, params, TOKENIZER, 32, batch=16)
  found = scorer.score(requests)
  assert {encoded.continuation[1:] == [] for encoded in requests} == {
    True,
    False,
  }
  apply = jax.jit(model.apply)
  longest = max(range(24), key=lambda i: sum(map(len, requests[i])))
  for i, (context, continuation) in enumerate(requests):
    inputs = [*context, *continuation][:-1]
    padding = [1] * (32 - len(inputs)) if i != longest else []
    logits = apply({"params": params}, np.array([inputs + padding]))
    logs = np.asarray(jax.nn.log_softmax(logits))[0, len(context) - 1 :]
    expected = logs[np.arange(len(continuation)), continuation].sum()
    tolerance = len(continuation) * 8 * 2**-20
    assert found[i].log_likelihood == pytest.approx(expected, abs=tolerance)


def test_few_shapes_are_compiled():
  shapes = set()

  def counted(variables, tokens):
    shapes.add(tokens.shape)
    return _bigram(variables, tokens)

  scorer = scoring.Scorer(counted, _table(), TOKENIZER, 64, batch=4)
  scorer.score(_requests(100, 90))
  assert shapes == {(4, 16), (4, 32), (4, 64)}


def test_what_does_not_fit_is_cut_on_the_left_and_reported():
  """A model that sees its inputs' sum tells what it was shown."""

  def summing(variables, tokens):
    total = jnp.cumsum(tokens, axis=1)[..., None]
    return variables["params"] * total * jnp.arange(32.0)

  def score(requests, sequence):
    scorer = scoring.Scorer(
      summing, jnp.float32(1e-3), TOKENIZER, sequence, batch=4
    )
    return [x.log_likelihood for x in scorer.score(requests)], scorer.reset()

  context, continuation = list(range(1, 21)), [3, 4]
  (cut,), truncation = score([scoring.Encoded(context, continuation)], 16)
  # 16 inputs: 15 of the context and one of the continuation.
  (same,), fitting = score([scoring.Encoded(context[5:], continuation)], 16)
  (whole,), _ = score([scoring.Encoded(context, continuation)], 32)
  assert cut == same != whole
  assert str(fitting) == "all 1 requests fit into 16 tokens"
  assert truncation == scoring.Truncation(16, 1, 1, 5, 5, 0)
  assert "of 1 requests 1 did not fit into 16 tokens" in str(truncation)

  long = scoring.Encoded([5], list(np.arange(40) % 32))
  (total,), truncation = score([long], 16)
  tokens = [*long.context, *long.continuation]
  parts, _ = score(
    [
      scoring.Encoded(tokens[0:1], tokens[1:17]),
      scoring.Encoded(tokens[16:17], tokens[17:33]),
      scoring.Encoded(tokens[24:33], tokens[33:41]),
    ],
    16,
  )
  assert total == pytest.approx(sum(parts), rel=1e-6)
  assert truncation == scoring.Truncation(16, 1, 0, 0, 0, 1)
  assert "1 were scored in pieces" in str(truncation)


def test_pairs_are_encoded_as_the_harness_does():
  texts = ["a b  c def", "deep deeper"] * 20
  scorer = scoring.Scorer(_bigram, None, data.train_tokenizer(texts, 270), 32)
  assert scorer.end == 0
  pair = scorer.encode_pair("a b ", "c d")
  assert pair == scorer.encode_pair("a b", " c d")
  assert pair.context == scorer.encode("a b")
  assert [*pair.context, *pair.continuation] == scorer.encode("a b c d")
  for context in ("", "  "):
    pair = scorer.encode_pair(context, "a")
    assert pair == scoring.Encoded([0], scorer.encode(f"{context}a"))
  with pytest.raises(
    errors.UserError, match="request 0 of 1 has 1 tokens of c"
  ):
    scorer.score([scoring.Encoded([1], [])])


def _cycle() -> np.ndarray:
  """1 → 2 → 3 → ... → 31 → 0 → 1, for certain."""
  return 100 * np.roll(np.eye(32, dtype=np.float32), 1, axis=1)


def test_texts_are_continued_up_to_a_stop():
  scorer = _scorer(sequence=32, table=_cycle())
  found = scorer.generate(
    ["1 2", "7", "30", "5", "4 5"],
    until=[["6"], ["nothing"], [], ["8", "7"], []],
    most=[100, 3, 4, 100, 50],
  )
  assert found[:4] == ["3 4 5 ", "8 9 10", "31 0 1 2", "6 "]
  # Beyond the sequence it goes on with what fits.
  assert found[4] == " ".join(str((6 + i) % 32) for i in range(50))
  assert scorer.truncation == scoring.Truncation(32, 5, 1, 19, 19, 0)


def test_a_text_beyond_the_sequence_is_seen_as_far_as_it_fits():
  """A model that repeats the token of seven steps ago."""

  def repeating(variables, tokens):
    before = jnp.roll(tokens, 6, axis=1)
    return variables["params"] * jax.nn.one_hot(before, 32)

  scorer = scoring.Scorer(repeating, 100.0, TOKENIZER, 16, batch=4)
  contexts = ["3 1 4 1 5 9 2", " ".join(map(str, range(30)))]
  found = scorer.generate(contexts, until=[[], []], most=[70, 14])
  assert found[0] == " ".join([contexts[0]] * 10)
  assert found[1] == " ".join(map(str, [*range(23, 30)] * 2))
  assert scorer.truncation == scoring.Truncation(16, 2, 2, 87, 60, 0)


def test_texts_end_with_the_document_and_follow_the_seed():
  tokenizer = data.train_tokenizer(["abc"], 257)
  a, b, c = tokenizer.encode("abc").ids
  table = np.zeros((tokenizer.get_vocab_size(),) * 2, np.float32)
  for i, j in ((a, b), (b, c), (c, 0)):
    table[i, j] = 100
  scorer = scoring.Scorer(_bigram, table, tokenizer, 16, batch=2)
  assert scorer.generate(["a"], until=[[]], most=[9]) == ["bc"]

  def sampled(seed):
    scorer = scoring.Scorer(
      _bigram, np.zeros((32, 32), np.float32), TOKENIZER, 16, seed=seed
    )
    return scorer.generate(["1"], until=[[]], most=[20], temperature=1.0)

  assert sampled(0) == sampled(0) != sampled(1)


def test_a_run_is_evaluated_under_its_recipe_or_another(learned, tmp_path):
  """``bf16`` quantises nothing, so its bits are those of the model as written;
  NVFP4's are others, and close.
  """
  folder = tmp_path / "runs" / "none"  # as in a comparison
  shutil.copytree(learned, folder)
  requests = _requests(6, 15)
  found = {}
  for recipe in ("", "bf16", "nvfp4"):
    model = trained.load(folder, recipe)
    assert model.trained_recipe == "none"
    assert model.config.recipe == (recipe or "none")
    scorer = scoring.Scorer(model.apply, model.params, TOKENIZER, 96)
    scores = scorer.score(requests)
    found[recipe] = np.array([x.log_likelihood for x in scores])
  assert model.coverage == "6 of 19 linear layers quantised"
  assert model.record()["recipe"] == "nvfp4"
  np.testing.assert_array_equal(found[""], found["bf16"])
  assert (found["nvfp4"] != found["bf16"]).any()
  np.testing.assert_allclose(found["nvfp4"], found["bf16"], rtol=0.2, atol=1)

  half, end = trained.load(folder, step=50), trained.load(folder)
  assert (half.step, half.finished) == (50, False)
  assert (end.step, end.finished) == (100, True)
  one, other = (jax.tree.leaves(x.params)[0] for x in (half, end))
  assert (one != other).any()

  (folder / "result.json").unlink()
  with pytest.raises(
    errors.UserError, match=r"has not finished.*--step .*there are: 50, 100\)"
  ):
    trained.load(folder)
  assert trained.load(folder, step=50).step == 50
  with pytest.raises(errors.UserError, match="no checkpoint of step 70.*50, 1"):
    trained.load(folder, step=70)
  with pytest.raises(errors.UserError, match="config.recipe='fp3'; needed"):
    trained.load(folder, "fp3", 50)
  with pytest.raises(
    errors.UserError, match=r"holds a comparison.*runs/none \(there are: none"
  ):
    trained.load(tmp_path)
  with pytest.raises(errors.UserError, match="holds no run"):
    trained.load(tmp_path / "new")
  assert not (tmp_path / "new").exists()
  config = json.loads((folder / "config.json").read_text())
  config["config"]["model"]["added"] = 1
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(errors.UserError, match="config.model.added is unknown"):
    trained.load(folder)


def test_a_healed_run_is_evaluated_as_it_ended(learned, tmp_path):
  """Of the policy alone: the parameters are those of another run."""
  folder = tmp_path / "run"
  shutil.copytree(learned, folder)
  content = json.loads((folder / "config.json").read_text())
  content["config"]["recipe"] = "nvfp4"
  content["config"]["policy"]["heal"]["fraction"] = 0.5
  (folder / "config.json").write_text(json.dumps(content))
  for recipe, step, count in (
    ("", 100, 0),
    ("", 50, 6),  # the last step before
    ("nvfp4", 100, 6),
    ("bf16", 50, 0),
  ):
    model = trained.load(folder, recipe, step)
    assert model.coverage == f"{count} of 19 linear layers quantised"


def _flags(workdir, **values) -> SimpleNamespace:
  given = FLAGS | {"tasks": ["cloze_text"], "limit": 0, "include": []} | values
  return SimpleNamespace(workdir=str(workdir), **given)


def test_what_is_asked_wrongly_is_said_first(tmp_path, monkeypatch):
  for values, words in (
    ({"tasks": []}, "--tasks=; needed names"),
    ({"tasks": ["a", "a"]}, "--tasks=a,a; needed names, each once"),
    ({"limit": -1}, "--limit=-1; needed"),
    ({"fewshot": -2}, "--fewshot=-2; needed"),
  ):
    with pytest.raises(errors.UserError, match=words):
      evaluate.run(_flags(tmp_path, **values))
  monkeypatch.setattr(util, "find_spec", lambda name: None)
  with pytest.raises(
    errors.UserError, match=r"is not installed; run pip install -e '.\[eval\]'"
  ):
    evaluate.run(_flags(tmp_path))


@harness_only
def test_the_harness_finds_the_same_numbers(learned, capsys):
  values = _flags(
    learned, tasks=["cloze_text", "cloze_letter"], questions=80, fewshot=2
  )
  theirs = json.loads(evaluate.run(values, ["--a"]).read_text())
  ours = json.loads(cloze.run(values).read_text())
  for task, found in ours["results"].items():
    other = theirs["results"][task]
    metrics = other["results"][task]
    for name in ("acc", "acc_norm") if task == cloze.TEXT else ("acc",):
      assert metrics[f"{name},none"] == pytest.approx(found[name], abs=1e-12)
      error = metrics[f"{name}_stderr,none"]
      assert error == pytest.approx(found[f"{name}_stderr"], rel=1e-9)
    assert other["truncation"] == found["truncation"]
    assert other["n-shot"][task] == 2
    assert other["n-samples"][task]["effective"] == 80
  assert theirs["results"][cloze.TEXT]["results"][cloze.TEXT]["acc,none"] > 0.4
  assert theirs["versions"]["lm_eval"] == evaluate.require_harness().VERSION
  assert theirs["command"] == "python -m experiments.evaluate --a"
  assert theirs["run"]["config"] == ours["run"]["config"]
  output = capsys.readouterr().out
  assert "cloze_text: acc 0." in output and ", 2 shots\n" in output
  assert "cloze_letter: of 800 requests 800 did not fit into 96" in output


@harness_only
def test_the_harness_has_the_same_prompts(tmp_path):
  harness = evaluate.require_harness()
  documents = [
    f"{i} " + " ".join(map(str, range(i, i + 99))) for i in range(80)
  ]
  tokenizer = data.train_tokenizer(documents, 300)
  settings = cloze.Settings(questions=20, context=12, answer=6)
  made = cloze.build(data.encode(tokenizer, documents), tokenizer, settings)
  folder = cloze.write_tasks(made, tmp_path)
  manager = harness.find_tasks([folder], own=True)
  for name, task in manager.load(list(cloze.NAMES))["tasks"].items():
    rows = list(task.eval_docs)
    for question, row in zip(made.questions, rows, strict=True):
      for shots in (0, 5):
        expected = made.context(question, name, shots)
        assert task.fewshot_context(row, shots) == expected
      delimiter = task.config.target_delimiter
      choices = [f"{delimiter}{x}" for x in task.doc_to_choice(row)]
      assert tuple(choices) == question.choices(name)


@harness_only
def test_the_harness_asks_for_all_kinds_of_requests():
  from lm_eval.api.instance import Instance

  harness = evaluate.require_harness()
  scorer = _scorer(sequence=16)
  model = harness.FlaxLM(scorer)

  def ask(kind, *arguments):
    requests = [
      Instance(request_type=kind, doc={}, arguments=x, idx=i)
      for i, x in enumerate(arguments)
    ]
    return getattr(model, kind)(requests)

  pairs = [("1 2 3", " 4 5"), ("", "6 7"), ("8 ", "9")]
  scores = scorer.score([scorer.encode_pair(*pair) for pair in pairs])
  assert ask("loglikelihood", *pairs) == scores
  text = " ".join(map(str, range(30)))
  (rolling,) = ask("loglikelihood_rolling", (text,))
  (score,) = scorer.score([scoring.Encoded([0], list(range(30)))])
  assert rolling == score.log_likelihood

  model = harness.FlaxLM(_scorer(table=_cycle()))
  greedy = {"until": ["6"], "max_gen_toks": 9, "do_sample": False, "top_p": 0.9}
  sampled = {"until": [], "max_gen_toks": 2, "do_sample": True}
  found = ask("generate_until", ("1 2", greedy), ("3", sampled))
  assert found == ["3 4 5 ", "4 5"]
  with pytest.raises(errors.UserError, match="top_p=0.9.* not implemented"):
    ask("generate_until", ("1", sampled | {"top_p": 0.9}))


@harness_only
def test_mmlu_pro_itself_on_questions_that_need_no_network(tmp_path):
  """Its own task, with other data: prompts, generation and what it extracts.

  The model answers C to everything, which is right in a tenth of the places.
  """
  harness = evaluate.require_harness()
  chain = synthetic.Chain(vocab=32, branches=4)
  made = cloze.build(
    chain.sample(20_000, 1), TOKENIZER, cloze.Settings(questions=40)
  )
  local = json.loads(
    (cloze.write_tasks(made, tmp_path) / "cloze_text.yaml").read_text()
  )
  folder = Path(util.find_spec("lm_eval").origin).parent / "tasks" / "mmlu_pro"
  task = {
    "include": str(folder / "_default_template_yaml"),
    "task": "mmlu_pro_local",
    "dataset_path": "json",
    "dataset_kwargs": local["dataset_kwargs"],
  }
  (tmp_path / "tasks").mkdir()
  (tmp_path / "tasks" / "local.yaml").write_text(json.dumps(task))
  words = ["[unknown]", "the", "answer", "is", "(C)", "Question:"]
  tokenizer = tokenizers.Tokenizer(
    word_models.WordLevel(
      {x: i for i, x in enumerate(words)}, unk_token=words[0]
    )
  )
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  table = 100 * np.roll(np.eye(6, dtype=np.float32), 1, axis=1)
  scorer = scoring.Scorer(_bigram, table, tokenizer, 64)
  found = harness.evaluate(
    scorer,
    "mmlu_pro_local",
    manager=harness.find_tasks([tmp_path / "tasks"], own=True),
    fewshot=5,
    limit=None,
    seed=0,
  )
  results = found["results"]["mmlu_pro_local"]
  assert results["exact_match,custom-extract"] == pytest.approx(0.1, abs=1e-12)
  assert scorer.truncation.requests == scorer.truncation.cut == 40
  (line,) = evaluate.summary(found, 5)
  assert line.startswith(
    "mmlu_pro_local: exact_match (custom-extract) 0.1000 ±"
  )
  assert line.endswith(", 5 shots")


@harness_only
def test_tasks_that_are_not_there(tmp_path):
  harness = evaluate.require_harness()

  with pytest.raises(errors.UserError, match="no task 'mmlu_prof'; .*mmlu_pro"):
    harness.check_task(harness.find_tasks([]), "mmlu_prof")

  def run(task, fewshot=0):
    return harness.evaluate(
      _scorer(),
      task,
      manager=harness.find_tasks([tmp_path], own=True),
      fewshot=fewshot,
      limit=2,
      seed=0,
    )

  tokens = synthetic.Chain(vocab=32, branches=4).sample(20_000, 1)
  made = cloze.build(tokens, TOKENIZER, cloze.Settings(questions=20))
  folder = cloze.write_tasks(made, tmp_path)
  with pytest.raises(errors.UserError, match="--fewshot: cloze_text has fewer"):
    run("cloze_text", 7)
  found = run("cloze_text")
  assert found["n-samples"]["cloze_text"]["effective"] == 2  # the limit
  (folder / "test.jsonl").unlink()
  with pytest.raises(errors.UserError, match="its data are not on this machin"):
    run("cloze_text")
