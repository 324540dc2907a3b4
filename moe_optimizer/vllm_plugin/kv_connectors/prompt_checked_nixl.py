"""vLLM's NixlConnector, taking a prompt's cache only for that prompt.

vLLM names this class by --kv-transfer-config, with this module. The prefill server's answer names one place where a
cache lies, also when the request had several prompts or wanted several answers, and the decode server gives that place
to all of them. As it is, every prompt after the first is answered from the first one's cache. Here the place comes with
a digest of the prompt's tokens: a prompt with another digest, and a second reader of the same place, is computed by the
decode server itself. The answer is the right one, only later.
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
    """Keeps vLLM's name: vLLM asks by name whether the connector is NIXL's."""

    # vLLM looks for this argument's name before it makes a connector that is not its own.
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._readers: dict[str, str] = {}

    def on_new_request(self, request: Request) -> None:
        """Note a prompt that another server will read, or let this server compute one that is not the one noted."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            params[_DIGEST] = _digest(request)
        elif params and params.get("do_remote_prefill") and not self._may_read(request, params):
            logger.info(
                "request %s: its prompt is computed here, the other server's cache is another's", request.request_id
            )
            request.kv_transfer_params = None
        super().on_new_request(request)

    def _may_read(self, request: Request, params: dict[str, Any]) -> bool:
        """Whether the cache is of this prompt, and this is the request that reads it: after one it is given up."""
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
