"""NVFP4 next to BF16 on a small Mamba-2 and attention hybrid.

Claim: the paper's recipe also trains a Nemotron-H style hybrid, with Mamba-2's
  projections quantised like the rest.
Command: python -m experiments.compare --config=configs/hybrid.py \
  --workdir=DIR
Expected: not run at this length; the gap to BF16 is what it measures.
Cost: not measured; 59 M tokens a recipe, for a GPU. Give more text than the
  standard library has, by --config.data.path=FOLDER.
"""

from configs import base


def get_config():
  """14 blocks, 2 of attention, 33 M parameters; the first 1 and last 2 BF16."""
  config = base.get_config()
  config.policy.first = 1
  config.policy.last = 2
  config.model.name = "hybrid"
  config.model.pattern = "M-M-M*-"
  config.model.repeat = 2
  config.model.d = 512
  config.model.heads = 8
  config.model.kv_heads = 2
  config.model.ffn = 2048
  config.model.mamba_head = 64
  config.model.mamba_state = 128
  config.model.mamba_groups = 2
  config.data.max_bytes = 300_000_000
  config.data.vocab = 8192
  config.data.sequence = 512
  config.train.steps = 450
  config.train.batch = 256
  config.train.accumulate = 4
  config.train.eval_every = 150
  config.train.checkpoint_every = 150
  return config
