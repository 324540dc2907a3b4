"""Makes the scheduler's side of a golden plan's connectors, and writes in JSON which one loads what; no server.

    python -m tests.vllm.connected_tiers BLOCK PROMPT

BLOCK and PROMPT are tokens, of a cache block and of a prompt.

In a process of its own: vLLM's configuration changes the environment.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.request import Request

from tests.golden.stored import PLANS, read_plan
from tests.vllm.conftest import TINY_MOE

_STATS = {"NixlConnector": {}, "OffloadingConnector": {}}


def main(block: int, prompt: int) -> int:
    """Write what each server's connectors do."""
    (path,) = [path for path in PLANS if path.stem.endswith("_tiered")]
    group = read_plan(path).group
    assert group is not None
    init_none_hash(sha256)
    words = {server.name: server.serve_args.value("--kv-transfer-config") or "" for server in group.servers}
    print(json.dumps({name: seen(json.loads(text), block, prompt) for name, text in words.items()}))
    return 0


def seen(transfer: dict[str, Any], block: int, prompt: int) -> dict[str, Any]:
    """Return what a server's connectors say of their configuration, and of the requests that the two servers get."""
    config = EngineArgs(
        model=str(TINY_MOE),
        kv_transfer_config=KVTransferConfig(**transfer),
        enforce_eager=True,
        max_model_len=512,
        block_size=block,
    ).create_engine_config()
    joined: Any = config.kv_transfer_config
    kind: Any = KVConnectorFactory.get_connector_class(joined)
    layout = kind.get_required_kvcache_layout(config)
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = layout
    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=32, dtype=torch.float32)
    (cache,) = get_kv_cache_configs(config, [{"layer.0": spec}], [1 << 24])
    config.cache_config.num_gpu_blocks = cache.num_blocks
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    try:
        return {
            "hybrid cache manager": not config.scheduler_config.disable_hybrid_kv_cache_manager,
            "whole graphs": not kind.requires_piecewise_for_cudagraph(joined.kv_connector_extra_config),
            "layout": layout,
            "takes blocks in": joined.is_kv_consumer,
            "stats": sorted(kind.build_kv_connector_stats(_STATS).data),
            "tier on this platform": tier_on_this_platform(made, config, cache),
            "loads": loads(made, block, list(range(prompt))),
        }
    finally:
        made.shutdown()


def loads(made: Any, block: int, prompt: list[int]) -> dict[str, Any]:
    """Return which of the connectors has how many tokens of a prompt, before and after it was stored on the host."""
    between, tier = made._connectors
    place: dict[str, Any] = {
        "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h",
        "remote_port": 1, "remote_block_ids": ([1, 2, 3],), "tp_size": 1,
    }  # fmt: skip

    def asked(name: str, params: dict[str, Any]) -> Any:
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
            pooling_params=None,
            block_hasher=get_request_block_hasher(block, sha256),
        )
        made.on_new_request(request)
        tokens, _ = made.get_num_new_matched_tokens(request, 0)
        place["moe_optimizer_prompt_digest"] = (request.kv_transfer_params or {}).get("moe_optimizer_prompt_digest")
        chosen = made._requests_to_connector.get(name)
        return [tokens, None if chosen is None else type((between, tier)[chosen]).__name__]

    found = {"read for another server": asked("a", {"do_remote_decode": True})}
    scheduler = tier.connector_scheduler
    state = scheduler._req_status["a"]
    keys = state.group_states[0].offload_keys
    scheduler.manager.prepare_store(keys, state.req_context)
    scheduler.manager.complete_store(keys, state.req_context)
    found["read for another server again"] = asked("b", {"do_remote_decode": True})
    found["read by another server"] = asked("c", dict(place))
    found["read by another server, for another prompt"] = asked("d", place | {"moe_optimizer_prompt_digest": "x"})
    return found


def tier_on_this_platform(made: Any, config: Any, cache: Any) -> str:
    """Return why the worker's side of the tier cannot be made on vLLM's CPU build."""
    if not current_platform.is_cpu():
        return "not asked"
    (_, alone) = [each for _, each in type(made)._get_connector_classes_and_configs(config)]
    spec: Any = OffloadingSpecFactory.create_spec(build_offloading_config(alone, cache))
    try:
        spec.get_worker(SimpleNamespace())
    except Exception as error:  # noqa: BLE001 - vLLM raises no narrower one
        return str(error)
    return "there"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
