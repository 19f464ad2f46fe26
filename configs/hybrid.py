"""The paper's comparison on a small Mamba-2 and attention hybrid.

Claim: the paper's recipe trains a Nemotron-H style hybrid, with Mamba-2's
  projections quantised like the rest, close to BF16 and FP8.
Command: python -m experiments.compare --config=configs/hybrid.py \
  --config.data.path=CORPUS --workdir=DIR
Corpus: configs/transformer.py says how it is built.
Expected: docs/results.md.
Cost: docs/results.md; made for one GPU.
"""

from configs import base
from configs import transformer


def get_config():
  """14 blocks, 2 of attention, 33 M parameters; the first 1 and last 2 BF16."""
  config = transformer.get_config()
  usual = base.get_config().model
  config.policy.first = 1
  config.policy.last = 2
  config.model.name = "hybrid"
  config.model.layers = usual.layers
  config.model.pattern = "M-M-M*-"
  config.model.repeat = 2
  config.model.d = 512
  config.model.heads = 8
  config.model.kv_heads = 2
  config.model.ffn = 2048
  config.model.mamba_head = 64
  config.model.mamba_state = 128
  config.model.mamba_groups = 2
  return config
