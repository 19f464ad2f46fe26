"""fp4jax: NVFP4 training of JAX models, as a function transformation."""

__version__ = "0.1.0.dev0"

from fp4jax import checkpoint_policies as checkpoint_policies
from fp4jax import policies as policies
from fp4jax import recipes as recipes
from fp4jax.block_scaled import BlockScaled as BlockScaled
from fp4jax.block_scaled import quantize_array as quantize_array
from fp4jax.coverage import Coverage as Coverage
from fp4jax.dot import OUTPUT as OUTPUT
from fp4jax.dot import dot as dot
from fp4jax.errors import MissingKeyError as MissingKeyError
from fp4jax.errors import PolicyError as PolicyError
from fp4jax.errors import UnsupportedError as UnsupportedError
from fp4jax.operands import RESIDUAL as RESIDUAL
from fp4jax.policy import Policy as Policy
from fp4jax.policy import Rule as Rule
from fp4jax.recipes import Gemm as Gemm
from fp4jax.recipes import Operand as Operand
from fp4jax.recipes import Recipe as Recipe
from fp4jax.recipes import Rht as Rht
from fp4jax.schedule import Schedule as Schedule
from fp4jax.transform import Quantized as Quantized
from fp4jax.transform import coverage as coverage
from fp4jax.transform import quantize as quantize
