"""Chooses the attention backend of a device."""

from __future__ import annotations

import torch

from moe_optimizer.engine.attention.base import AttentionBackend
from moe_optimizer.engine.attention.sdpa import SdpaAttention
from moe_optimizer.log import get_logger

logger = get_logger(__name__)


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend `name`; "auto" is the fastest that this device has."""
    if name == "auto" and device.type == "cuda":
        logger.warning("attention runs through torch's SDPA: each step gathers the KV blocks that it reads")
    return SdpaAttention()
