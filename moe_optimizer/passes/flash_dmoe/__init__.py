"""The flash_dmoe pass and what only it uses."""

from moe_optimizer.passes.flash_dmoe.flash_dmoe import FlashDmoe as FlashDmoe
