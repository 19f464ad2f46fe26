"""A model of three blocks, for tests.

Claim: the whole runner works, from text to report.
Command: python -m experiments.train --config=configs/tiny.py --workdir=DIR
Expected: validation loss below the initial ln(vocab) = 5.8.
Cost: seconds on one CPU core.
"""

from configs import base


def get_config():
  """The smallest model that has first, middle and last blocks."""
  config = base.get_config()
  config.model.layers = 3
  config.model.d = 32
  config.model.heads = 2
  config.model.kv_heads = 1
  config.model.ffn = 64
  config.model.scan = True
  config.data.max_bytes = 200_000
  config.data.vocab = 320
  config.data.sequence = 32
  config.optimizer.peak_lr = 3e-3
  config.train.steps = 10
  config.train.batch = 4
  config.train.log_every = 2
  config.train.eval_every = 5
  config.train.eval_batches = 2
  config.train.checkpoint_every = 4
  config.sample.length = 16
  return config
