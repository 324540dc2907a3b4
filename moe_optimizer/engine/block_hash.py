"""The hash that blocks of equal beginnings are found by."""

import hashlib
import os
from array import array
from collections.abc import Sequence

from moe_optimizer.log import get_logger

try:
    import xxhash
except ImportError:
    xxhash = None
    get_logger(__name__).info("xxhash is not installed: blocks are hashed with blake2b, 1 us slower each")

# Drawn for each process: who does not know it cannot construct a prompt that finds another prompt's blocks.
_KEY = os.urandom(8)
_SEED = int.from_bytes(_KEY, "little")


def block_hash(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Return 16 bytes that stand for `token_ids` behind the tokens that `before` stands for (b"" for none)."""
    data = before + array("q", token_ids).tobytes()
    if xxhash is not None:
        return xxhash.xxh3_128_digest(data, seed=_SEED)
    return hashlib.blake2b(data, digest_size=16, key=_KEY).digest()
