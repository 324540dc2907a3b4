"""Subclasses vLLM's NixlConnector so that a cache is read only for the prompt that it was computed from.

--kv-transfer-config names this class and module. The prefill server's answer names one place of a cache even if the
request has several prompts or wants several answers, and vLLM's decode server answers all of them from that cache.
Here the place comes with a digest of the prompt's tokens. The decode server itself computes a prompt with another
digest, and one whose place has been read already: the answer is right, only later.
"""

from __future__ import annotations

import array
import hashlib
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from moe_optimizer.log import get_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

_DIGEST = "moe_optimizer_prompt_digest"
"""Key beside vLLM's own in what travels from one server to the other through the router."""
_Stock: Any = KVConnectorFactory.get_connector_class_by_name("NixlConnector")
_Finished = tuple[bool, dict[str, Any] | None]

logger = get_logger(__name__)


class NixlConnector(_Stock):
    """Has the name of vLLM's class, by which vLLM recognises NIXL."""

    # vLLM looks for this argument's name before it makes a connector that is not its own.
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._readers: dict[str, str] = {}

    def on_new_request(self, request: Request) -> None:
        """Add the digest of a prompt whose cache another server will read; refuse a cache of another prompt."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            params[_DIGEST] = _digest(request)
        elif params and params.get("do_remote_prefill") and not self._may_read(request, params):
            logger.info(
                "request %s: its prompt is computed here, the offered cache is of another one", request.request_id
            )
            request.kv_transfer_params = None
        super().on_new_request(request)

    def _may_read(self, request: Request, params: dict[str, Any]) -> bool:
        """Return whether the cache is of this prompt and has not been read; it is freed after one reader."""
        place = str(params.get("remote_request_id"))
        if params.get(_DIGEST) != _digest(request) or place in self._readers.values():
            return False
        self._readers[request.request_id] = place
        return True

    def request_finished(self, request: Request, block_ids: list[int]) -> _Finished:
        """Return vLLM's answer, with the digest beside the place."""
        return self._named(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> _Finished:
        """Return the same for a model with several kinds of cache."""
        return self._named(request, super().request_finished_all_groups(request, block_ids))

    def _named(self, request: Request, finished: _Finished) -> _Finished:
        self._readers.pop(request.request_id, None)
        later, place = finished
        if place is not None:
            place[_DIGEST] = (request.kv_transfer_params or {}).get(_DIGEST)
        return later, place


def _digest(request: Request) -> str:
    # int64, as nothing in vLLM says how large a token's number may be.
    return hashlib.sha256(array.array("q", request.prompt_token_ids or ()).tobytes()).hexdigest()
