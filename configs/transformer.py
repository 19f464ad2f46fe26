"""The paper's comparison on a pure Transformer.

Claim: the paper's recipe, shown by its authors on a hybrid alone, also trains a
  Transformer close to BF16 and FP8.
Command: python -m experiments.compare --config=configs/transformer.py \
  --config.data.path=CORPUS --workdir=DIR
Corpus: python -m experiments.build_corpus --source=python: \
  --source=debian:linux-source-6.1=6.1.192-3 --exclude='*/asic_reg/*' \
  --tokens=45000000 --output=CORPUS
Expected: docs/results.md.
Cost: docs/results.md; made for one GPU.
"""

from configs import base


def get_config():
  """6 blocks, 40 M parameters; the last block BF16."""
  config = base.get_config()
  config.policy.first = 0
  config.policy.last = 1
  config.model.d = 640
  config.model.heads = 10
  config.model.kv_heads = 10
  config.model.ffn = 2560
  config.data.max_bytes = 300_000_000
  config.data.vocab = 8192
  config.data.sequence = 512
  config.train.steps = 450
  config.train.batch = 128
  config.train.accumulate = 2
  config.train.log_every = 50
  config.train.eval_every = 150
  config.train.checkpoint_every = 450
  config.train.keep = 1
  config.compare.recipes = "bf16,fp8,nvfp4,nvfp4_fp8_exact,mxfp4"
  config.compare.processes = 5
  return config
