"""vLLM's kernel for the norms of queries and keys with RoPE: the tokens of the kernels that it replaces."""

from __future__ import annotations

import pytest

from moe_optimizer.plan.decision import Wish
from tests.gpu.at_once import Seen, with_and_without
from tests.vllm.answers import assert_same_up_to_a_tie

pytestmark = pytest.mark.gpu

PASS = "norm_rope_fusion"


@pytest.fixture(scope="module")
def servers(hopper: None, tmp_path_factory: pytest.TempPathFactory) -> dict[Wish, Seen]:
    return with_and_without(PASS, tmp_path_factory.mktemp("fusion"))


def test_greedy_answers_are_those_without_it_up_to_ties(servers: dict[Wish, Seen]) -> None:
    for want, got in zip(servers[Wish.OFF].answered(), servers[Wish.ON].answered(), strict=True):
        assert_same_up_to_a_tie(want, got, spacings=2)


def test_the_server_says_that_it_has_it(servers: dict[Wish, Seen]) -> None:
    servers[Wish.ON].answered()
    entries = [proof.passes[PASS] for proof in servers[Wish.ON].proofs if PASS in proof.passes]
    assert any(entry.applied for entry in entries), entries
