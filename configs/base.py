"""Every field of an experiment, with its meaning.

A configuration starts from these and changes what it is about; a field that is
not here does not exist. Every field is a flag too: ``--config.train.steps=10``.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """A small Transformer on the Python standard library's sources."""
  config = ConfigDict()
  # Initialisation, data order and stochastic rounding all follow from it.
  config.seed = 0
  # "none" is the model as written, without fp4jax; then "bf16", "nvfp4",
  # "nvfp4_fp8_exact", "fp8", "mxfp8", "mxfp4", and NVFP4's variants and
  # ablations in experiments/recipe.py.
  config.recipe = "nvfp4"

  # Which layers follow the recipe; each policy reads the fields it names.
  config.policy = ConfigDict()
  config.policy.name = "nemotron"  # or "all_linear", "last_fraction", "bf16"
  config.policy.first = 1  # nemotron: blocks left in BF16 at the beginning
  config.policy.last = 1  # nemotron: and at the end
  config.policy.fraction = 0.15  # last_fraction: of the blocks, rounded up
  # Healing: the last steps in BF16.
  config.policy.heal = ConfigDict()
  config.policy.heal.fraction = 0.0  # of the steps; 0 never heals
  config.policy.heal.gemms = "both"  # or "forward", "backward"

  # What all models read.
  config.model = ConfigDict()
  config.model.name = "transformer"  # or "hybrid", "vit"
  config.model.d = 128
  config.model.heads = 4
  config.model.kv_heads = 2
  config.model.ffn = 512
  config.model.scan = False  # one scanned stack `blocks`, not blocks_0, ...
  config.model.remat = False  # recompute each block in the backward pass
  config.model.dtype = "bfloat16"  # of the arithmetic; parameters are float32
  config.model.attention = "xla"  # or "cudnn", on a GPU
  # The Transformer, and of these the Vision Transformer the layers; another
  # model refuses changes of them.
  config.model.layers = 6
  config.model.activation = "relu2"  # or "swiglu"
  config.model.qk_norm = True
  config.model.rope_base = 10_000.0
  # The hybrid alone, likewise. A letter a block: M Mamba-2, * attention,
  # - feed-forward, E mixture of experts.
  config.model.pattern = "M-M*-"
  config.model.repeat = 1  # of the pattern; the scanned stack repeats it
  config.model.mamba_head = 64  # size of a head
  config.model.mamba_state = 64
  config.model.mamba_groups = 1  # of heads
  config.model.mamba_conv = 4  # inputs that the convolution sees
  config.model.mamba_chunk = 128  # steps of the scan's chunks; same function
  config.model.mamba_expand = 2  # inner width over d
  config.model.experts = 8
  config.model.experts_per_token = 2
  config.model.expert_ffn = 256
  config.model.balance = 0.01  # coefficient of the experts' balance loss
  # The Vision Transformer alone, likewise.
  config.model.patch = 4  # side of a patch, a divisor of data.image

  config.data = ConfigDict()
  # A file or folder of text, "" for Python's standard library; or a folder of
  # experiments.build_corpus; or "markov:", a chain of experiments.synthetic.
  config.data.path = ""
  config.data.max_bytes = 16_000_000  # of text; the others do not read it
  config.data.vocab = 1024
  config.data.sequence = 128
  # Images, for "vit" alone. The path is "shapes:", of experiments.images, or a
  # file .npz.
  config.data.image = 32  # side in pixels
  config.data.classes = 10
  config.data.validation_fraction = 0.05  # a built folder has its own
  config.data.cache = ""  # of tokens; "" is a folder in the workdir

  config.optimizer = ConfigDict()
  config.optimizer.schedule = "cosine"  # or "wsd"
  config.optimizer.peak_lr = 1e-3
  config.optimizer.final_lr_fraction = 0.1
  config.optimizer.warmup_fraction = 0.1  # of the steps
  config.optimizer.decay_fraction = 0.2  # of the steps, at the end; wsd only
  config.optimizer.b1 = 0.9
  config.optimizer.b2 = 0.95
  config.optimizer.eps = 1e-8
  config.optimizer.weight_decay = 0.1  # of kernels and embeddings
  config.optimizer.clip = 1.0  # global norm of the gradient

  config.train = ConfigDict()
  config.train.steps = 300
  config.train.batch = 16  # sequences a step, all micro-batches together
  config.train.accumulate = 1  # micro-batches a step
  config.train.log_every = 10
  config.train.eval_every = 100
  config.train.eval_batches = 16
  config.train.checkpoint_every = 100
  config.train.keep = 2  # checkpoints
  config.train.max_skips = 10  # consecutive non-finite steps before it stops

  config.sample = ConfigDict()
  config.sample.prompt = "def "
  config.sample.length = 64  # tokens, prompt included
  config.sample.temperature = 0.8

  # What experiments.compare trains; gaps are relative to the first. Fields that
  # differ may follow a recipe: "nvfp4+policy.last=0".
  config.compare = ConfigDict()
  config.compare.recipes = "bf16,nvfp4"
  # Runs at a time, each a process of its own; 0 trains one after the other in
  # this one. Several share the device, and its speed.
  config.compare.processes = 0
  return config.lock()
