"""The parallelism pass and what only it uses."""

from moe_optimizer.passes.parallelism.parallelism import Parallelism as Parallelism
