"""The speculation pass and what only it uses."""

from moe_optimizer.passes.speculation.speculation import Speculation as Speculation
