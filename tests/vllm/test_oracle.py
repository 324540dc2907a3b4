"""The embedded engine in float32 as the plugin's oracle: a second opinion that shares none of vLLM's code."""

from __future__ import annotations

import pytest

from moe_optimizer.debug.oracle import logprobs_behind
from moe_optimizer.engine import LLM
from tests.vllm.conftest import MAX_TOKENS, PROMPTS, TINY_MOE, Served


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(TINY_MOE), dtype="float32", device="cpu", max_num_seqs=1, enable_prefix_caching=False)


@pytest.mark.parametrize("server", ["ours_fp32", "plain_tensor_parallel", "ours_expert_parallel"])
def test_a_server_gives_the_tokens_and_logits_of_the_oracle(
    server: str, llm: LLM, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(server)
    compared = 0
    for prompt, answer in zip(PROMPTS, served.answers, strict=True):
        prompt_ids = llm.get_tokenizer().encode(prompt)
        # The server's own tokens, so that one that differs does not make all that follow differ.
        rows = logprobs_behind(llm.llm_engine, [*prompt_ids, *answer.tokens])[len(prompt_ids) - 1 : -1]
        assert tuple(rows.argmax(-1).tolist()) == answer.tokens
        for row, (one, other) in zip(rows, (each.items() for each in answer.best_two), strict=True):
            # The servers give logits: their differences are those of log-probabilities.
            assert float(row[one[0]] - row[other[0]]) == pytest.approx(one[1] - other[1], abs=2e-4)
            compared += 1
    # Some texts end before.
    assert compared > len(PROMPTS) * MAX_TOKENS // 2
