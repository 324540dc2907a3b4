"""`RotaryEmbedding`: turns queries and keys by an angle that grows with their position."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.errors import UnsupportedError

# Those whose frequencies do not depend on the length of the sequence.
_KINDS = ("default", "linear", "llama3", "yarn")


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines, computed in float32 and cast to the model's dtype."""

    cos_Ld: Tensor
    sin_Ld: Tensor

    def __init__(self, config: Any, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("cpu"):
            inv_freq, factor = _frequencies(config)
            angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_Ld", (angles.cos() * factor).to(dtype), persistent=False)
        self.register_buffer("sin_Ld", (angles.sin() * factor).to(dtype), persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions, [T, 1, d] each."""
        return F.embedding(positions_T, self.cos_Ld)[:, None], F.embedding(positions_T, self.sin_Ld)[:, None]


def head_size(config: Any) -> int:
    """Return the elements of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotate(x_TNd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Turn the heads of each token: the first half of a head's elements pairs with the second."""
    first, second = x_TNd.chunk(2, dim=-1)
    return x_TNd * cos_T1d + torch.cat((-second, first), dim=-1) * sin_T1d


def _frequencies(config: Any) -> tuple[Tensor, float]:
    """Return the inverse frequencies, float32 [d / 2], and the factor of the tables."""
    rope = config.rope_parameters
    if rope["rope_type"] not in _KINDS or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(f"config.json: rope_type: got {rope}, expected one of {', '.join(_KINDS)}, whole heads")
    if rope["rope_type"] == "default":
        head_dim = head_size(config)
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
