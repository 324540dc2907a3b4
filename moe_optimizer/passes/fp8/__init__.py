"""The fp8 pass and what only it uses."""

from moe_optimizer.passes.fp8.fp8 import Fp8 as Fp8
