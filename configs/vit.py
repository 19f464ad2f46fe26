"""NVFP4 next to BF16 on a small Vision Transformer, written in Flax NNX.

Claim: the paper's recipe also trains a model that reads images, by the same
  runner; patch embedding and head stay in BF16.
Command: python -m experiments.compare --config=configs/vit.py --workdir=DIR
Expected: not run at this length; the gap to BF16 is what it measures. Chance is
  an accuracy of 10 % and a loss of ln 10 = 2.303. With the flags below, 0.2 M
  parameters and two of four blocks in NVFP4 end, for seeds 0 and 1, at
  validation losses of 1.2815 and 1.2602 (BF16), 1.2889 and 1.2739 (NVFP4): gaps
  of +0.57 and +1.09 %, accuracies of 46 to 49 %.
Cost: not measured; 512,000 images of 64 patches a recipe, for a GPU. With
  --config.model.layers=4 --config.model.d=64 --config.model.heads=2
  --config.model.kv_heads=2 --config.model.ffn=256 --config.model.scan=True
  --config.optimizer.peak_lr=2e-3 --config.train.steps=300
  --config.train.batch=64 --config.train.checkpoint_every=300
  2.8 minutes a seed on 2 shared CPU cores (2026-12-07).
"""

from configs import base


def get_config():
  """6 blocks, 7.4 M parameters, drawn shapes; first and last block in BF16."""
  config = base.get_config()
  config.model.name = "vit"
  config.model.layers = 6
  config.model.d = 320
  config.model.heads = 5
  config.model.kv_heads = 5
  config.model.ffn = 1280
  config.model.patch = 4
  config.data.path = "shapes:count=100000"
  config.data.image = 32
  config.optimizer.weight_decay = 0.05
  config.train.steps = 2000
  config.train.batch = 256
  config.train.eval_every = 250
  config.train.checkpoint_every = 500
  return config
