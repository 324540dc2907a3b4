"""The NIXL connector's prefill and decode side in one process: a prompt's cache is read for that prompt, and once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Transfers:
    """Stands for vLLM's scheduler side of NIXL: what it is told, and the place that it names."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def on_new_request(self, request: Any) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self.reads.append(request.request_id)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        return True, {"do_remote_prefill": True, "remote_request_id": request.request_id}


def connector() -> Any:
    """Return a connector without what it would take from vLLM's configuration."""
    from moe_optimizer.vllm_plugin.kv_connectors.prompt_checked_nixl import NixlConnector

    made = object.__new__(NixlConnector)
    made.connector_scheduler, made._readers = Transfers(), {}
    return made


def request(name: str, prompt: list[int], params: dict[str, Any] | None) -> Any:
    return SimpleNamespace(request_id=name, prompt_token_ids=prompt, kv_transfer_params=params)


def prefilled(prompt: list[int], name: str = "first") -> dict[str, Any]:
    """Return what the prefill server's answer says of a prompt."""
    prefill, read = connector(), request(name, prompt, {"do_remote_decode": True})
    prefill.on_new_request(read)
    # vLLM may leave the last token to the decode server.
    read.prompt_token_ids = prompt[:-1]
    later, place = prefill.request_finished_all_groups(read, ([1],))
    assert later
    return place


def reads(decode: Any, *requests: Any) -> list[str]:
    for each in requests:
        decode.on_new_request(each)
    return decode.connector_scheduler.reads


def test_the_prompt_that_was_read_takes_its_cache() -> None:
    place = prefilled([1, 2, 3])
    assert reads(connector(), request("a", [1, 2, 3], place)) == ["a"]


def test_other_prompts_of_the_same_request_are_computed_here() -> None:
    place = prefilled([1, 2, 3])
    others = [request("b", [4, 5, 6], dict(place)), request("c", [1, 2], dict(place))]
    assert reads(connector(), request("a", [1, 2, 3], dict(place)), *others) == ["a"]
    assert [each.kv_transfer_params for each in others] == [None, None]


def test_a_second_answer_to_the_same_prompt_is_computed_here() -> None:
    # The cache is given up when one has read it.
    place = prefilled([1, 2, 3])
    assert reads(connector(), request("a", [1, 2, 3], dict(place)), request("b", [1, 2, 3], dict(place))) == ["a"]


def test_another_place_of_the_same_prompt_is_read() -> None:
    one, other = prefilled([1, 2, 3]), prefilled([1, 2, 3], "second")
    assert reads(connector(), request("a", [1, 2, 3], one), request("b", [1, 2, 3], other)) == ["a", "b"]


def test_nothing_is_kept_of_a_request_that_has_finished() -> None:
    decode, mine = connector(), request("a", [1, 2, 3], prefilled([1, 2, 3]))
    decode.on_new_request(mine)
    assert decode.request_finished(mine, [1]) == (False, None)
    assert decode._readers == {}


def test_a_place_without_a_digest_is_not_read() -> None:
    assert reads(connector(), request("a", [1], {"do_remote_prefill": True, "remote_request_id": "x"})) == []


def test_requests_without_transfer_are_left_alone() -> None:
    plain = connector()
    alone = request("a", [1], None)
    plain.on_new_request(alone)
    assert plain.request_finished(alone, [1]) == (False, None)


def test_vllm_finds_it_under_the_name_of_its_own() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    module = "moe_optimizer.vllm_plugin.kv_connectors.prompt_checked_nixl"
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer", kv_connector_module_path=module)
    assert KVConnectorFactory.get_connector_class(config).__module__ == module
