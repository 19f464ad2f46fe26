"""NVFP4 next to BF16 on a small hybrid with experts.

Claim: the paper's recipe also trains a mixture of experts whose products are
  ``jax.lax.ragged_dot``; the router stays float32.
Command: python -m experiments.compare --config=configs/moe.py \
  --config.data.path=CORPUS --workdir=DIR
Corpus: as configs/transformer.py.
Expected: docs/results.md.
Cost: docs/results.md; made for one GPU.
"""

from configs import hybrid


def get_config():
  """configs/hybrid.py, each feed-forward 8 experts of half its width.

  A token goes to 2 of them: 33 M parameters of 71 M are active.
  """
  config = hybrid.get_config()
  config.model.pattern = "MEMEM*E"
  config.model.experts = 8
  config.model.experts_per_token = 2
  config.model.expert_ffn = 1024
  config.model.balance = 0.01
  config.compare.recipes = "bf16,fp8,nvfp4"
  config.compare.processes = 3
  return config
