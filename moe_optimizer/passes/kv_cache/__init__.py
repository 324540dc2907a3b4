"""The kv_cache pass and what only it uses."""

from moe_optimizer.passes.kv_cache.kv_cache import KvCache as KvCache
