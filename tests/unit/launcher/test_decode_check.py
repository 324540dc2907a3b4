"""What is decoded is compared with the same tokens in prompts; the server is a function that answers as vLLM does."""

from __future__ import annotations

import io
import math
import urllib.error
from collections.abc import Mapping
from email.message import Message
from typing import Any

import pytest

from moe_optimizer.launcher.decode_check import DecodeQuestion, check_decode, decode_question
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.pass_params import GraphCaptureParams, SchedulerParams
from tests.builders import gpus, made_plan, qwen3_30b_a3b, with_arguments

VOCABULARY = 400
QUESTION = DecodeQuestion(batches=(1, 8, 32), prompt_tokens=20, step_tokens=256, tolerance=0.5)


class Server:
    """A model whose next token depends on the last one and on how many tokens came before.

    Args:
        decoding: what a decode step adds to a log-probability, by the number of requests at once and the row.
        prompts: the same of a prompt.
        spread: between the first and the second best token.
    """

    def __init__(self, decoding: Any = None, prompts: Any = None, *, spread: float = 1.0) -> None:
        self._decoding = decoding or (lambda batch, row: 0.0)
        self._prompts = prompts or (lambda batch, row: 0.0)
        self._spread = spread
        self.bodies: list[Mapping[str, Any]] = []

    def completions(self, body: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        self.bodies.append(body)
        batch = len(body["prompt"])
        return [{"logprobs": self._answer(body, batch, row)} for row in range(batch)]

    def _answer(self, body: Mapping[str, Any], batch: int, row: int) -> dict[str, Any]:
        before, tokens, values, best = list(body["prompt"][row]), [], [], []
        for index in range(body["max_tokens"]):
            off = (self._decoding if index else self._prompts)(batch, row)
            if math.isnan(off):
                said = b'{"error": "Out of range float values are not JSON compliant"}'
                raise urllib.error.HTTPError("", 400, "Bad Request", Message(), io.BytesIO(said))
            token = (7 * before[-1] + len(before)) % VOCABULARY
            values.append(-0.4 + off)
            best.append({f"token_id:{token + place}": -0.4 + off - place * self._spread for place in range(5)})
            tokens.append(f"token_id:{token}")
            before.append(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best}


def found(server: Server, *, limit_s: float = 60.0) -> Any:
    return check_decode(server, "model", QUESTION, limit_s=limit_s)  # pyrefly: ignore[bad-argument-type]


def test_a_server_that_agrees_with_itself_passes_at_every_size() -> None:
    result = found(Server())
    assert (result.wrong, result.batches) == ("", QUESTION.batches)
    assert len(result.differences) == 16 + 16 + 32
    assert result.in_words().startswith("passed decode against prompt: 64 tokens at 1, 8, 32 requests")


def test_nothing_that_was_decoded_is_read_from_the_cache() -> None:
    server = Server()
    found(server)
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == len(salts)
    decoded = [body for body in server.bodies if body["max_tokens"] > 1]
    assert [len(body["prompt"]) for body in decoded] == list(QUESTION.batches)


def test_no_prompt_begins_as_another_of_its_request_does() -> None:
    server = Server(lambda batch, row: -2.0 if batch == 8 else 0.0)
    found(server)
    for body in server.bodies:
        beginnings = [tuple(prompt[: QUESTION.prompt_tokens]) for prompt in body["prompt"]]
        assert len(set(beginnings)) == len(beginnings)


@pytest.mark.parametrize(
    ("batch", "decoding"),
    [
        (1, lambda batch, row: -2.0),
        (8, lambda batch, row: -2.0 if batch == 8 else 0.0),
        (32, lambda batch, row: 0.8 if batch > 8 else 0.0),
        (32, lambda batch, row: -1.0 if row > 27 else 0.0),
        (8, lambda batch, row: math.nan if batch > 1 else 0.0),
    ],
)
def test_decode_steps_that_are_wrong_are_found_at_their_size(batch: int, decoding: Any) -> None:
    result = found(Server(decoding))
    assert result.wrong.startswith(f"{batch} requests at once:")
    assert result.in_words().startswith("failed decode against prompt")


def test_rounding_is_no_finding() -> None:
    noise = iter(range(10**6))
    result = found(
        Server(lambda batch, row: 0.4 * math.sin(next(noise)), lambda batch, row: 0.09 * math.sin(next(noise)))
    )
    assert (result.wrong, len(result.differences)) == ("", 64)
    assert 0.3 < max(result.differences) < QUESTION.tolerance


def test_single_tokens_that_flip_are_no_finding() -> None:
    assert found(Server(lambda batch, row: 5.0 if row in (3, 4) and batch == 32 else 0.0)).wrong == ""


def test_what_other_prompts_do_not_show_again_is_no_finding() -> None:
    server = Server()
    server._decoding = lambda batch, row: 3.0 if sum(b["max_tokens"] > 1 for b in server.bodies) == 1 else 0.0  # type: ignore[attr-defined]
    assert found(server).wrong == ""


def test_a_model_whose_prompts_contradict_each_other_is_no_finding() -> None:
    wild = iter(range(10**6))
    assert found(Server(lambda batch, row: 2.0, lambda batch, row: 9.0 * math.sin(next(wild)))).wrong == ""


def test_of_dummy_weights_nothing_is_said() -> None:
    result = found(Server(spread=0.001))
    assert (result.wrong, result.differences) == ("", ())
    assert "dummy weights" in result.in_words()


def test_numbers_that_are_none_in_prompts_too_are_not_decodings_fault() -> None:
    result = found(Server(lambda batch, row: math.nan, lambda batch, row: math.nan))
    assert result.wrong == ""
    assert "not numbers" in result.why_not


@pytest.mark.parametrize(
    "error", [urllib.error.HTTPError("", 404, "Not Found", Message(), io.BytesIO(b"no")), ConnectionError("gone")]
)
def test_a_server_that_refuses_is_not_judged(error: Exception) -> None:
    class Refusing(Server):
        def completions(self, body: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
            raise error

    result = found(Refusing())
    assert result.in_words().startswith("not run decode against prompt")


def test_an_answer_of_another_form_is_not_judged() -> None:
    class Other(Server):
        def _answer(self, body: Mapping[str, Any], batch: int, row: int) -> dict[str, Any]:
            return {"tokens": None}

    assert "not as known" in found(Other()).why_not


def test_sizes_for_which_there_is_no_time_are_left_out() -> None:
    result = found(Server(), limit_s=0.0)
    assert (result.wrong, result.batches, result.why_not) == ("", (), "no time")


def test_prompts_are_longer_than_the_largest_graph_of_a_decode_step() -> None:
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 1))
    requests = plan.decision("scheduler").params_as(SchedulerParams).max_num_seqs
    # Graphs of steps that read prompts are larger, and prompts as long as those would take the time of a start.
    assert plan.decision("graph_capture").params_as(GraphCaptureParams).max_capture_size > 1024
    question = decode_question(plan, 32_768)
    assert 1024 > question.prompt_tokens > requests > 0
    assert (question.batches, question.tolerance, question.why_not) == ((1, 8, 32, 64), 0.5, "")
    assert decode_question(plan, 300).prompt_tokens < 300


def test_quantised_weights_may_round_more() -> None:
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 1), wishes=resolve_wishes(("fp8",), ()))
    assert decode_question(plan, 32_768).tolerance == 1.0


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_not_compared_as_log_probabilities(mode: str) -> None:
    plan = with_arguments(made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 1)), "--logprobs-mode", mode)
    assert mode in decode_question(plan, 32_768).why_not


def test_servers_that_share_a_request_are_not_asked() -> None:
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2), wishes=resolve_wishes(("disaggregation",), ()))
    question = decode_question(plan, 32_768)
    server = Server()
    assert "different servers" in check_decode(server, "model", question, limit_s=9.0).in_words()  # pyrefly: ignore[bad-argument-type]
    assert server.bodies == []
