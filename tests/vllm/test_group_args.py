"""vLLM and its router take the arguments of the golden plans of several servers."""

from __future__ import annotations

import pytest

from moe_optimizer.plan.server_group import ServerGroup
from tests.golden.stored import PLANS, read_plan


def golden_groups(kind: str) -> list[ServerGroup]:
    paths = [path for path in PLANS if path.stem.endswith(f"_{kind}")]
    groups = [group for path in paths if (group := read_plan(path).group)]
    assert groups
    assert len(groups) == len(paths)
    return groups


@pytest.mark.parametrize("kind", ["disaggregated", "split", "split_2-machines", "tiered", "replicas"])
def test_vllm_parses_the_arguments_of_every_server(kind: str) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for group in golden_groups(kind):
        for server in group.servers:
            parser.parse_args(["--model", "any", *server.serve_args.words])


def test_the_router_is_told_who_prefills_and_who_decodes() -> None:
    router = pytest.importorskip("vllm_router.launch_router")
    for group in (group for kind in ("disaggregated", "split", "split_2-machines") for group in golden_groups(kind)):
        parsed = router.parse_router_args(list(group.router_args.words))
        assert (parsed.port, parsed.policy) == (8000, "round_robin")
        given = {"prefill": [url for url, _ in parsed.prefill_urls], "decode": parsed.decode_urls}
        for part, urls in given.items():
            servers = [each.serve_args for each in group.servers if each.name.startswith(part)]
            assert urls == [f"http://{each.value('--host')}:{each.value('--port')}" for each in servers] != []


def test_the_router_deals_to_whole_servers_in_turns() -> None:
    router = pytest.importorskip("vllm_router.launch_router")
    for group in golden_groups("replicas"):
        parsed = router.parse_router_args(list(group.router_args.words))
        assert (parsed.port, parsed.policy) == (8000, "round_robin")
        assert parsed.worker_urls == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
