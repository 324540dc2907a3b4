"""Answers of two servers to the same questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.errors import InputError, ServerFailedError
from moe_optimizer.measure.quality.tasks import check_tasks, compare_tasks, mcnemar, scores


@pytest.mark.parametrize(("one", "other", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (1, 9, 0.021484375)])
def test_mcnemars_test_is_the_exact_binomial(one: int, other: int, p: float) -> None:
    assert mcnemar(one, other) == pytest.approx(p)
    assert mcnemar(other, one) == pytest.approx(p)


def test_answers_are_paired_by_question() -> None:
    reference = {"gsm8k exact_match": {"0": 1.0, "1": 1.0, "2": 0.0, "3": 1.0}}
    plan = {"gsm8k exact_match": {"3": 0.0, "2": 1.0, "1": 0.0, "0": 1.0, "9": 1.0}}
    (found,) = compare_tasks(reference, plan)
    assert (found.questions, found.only_reference, found.only_plan) == (4, 2, 1)
    assert (found.reference, found.plan) == (0.75, 0.5)
    assert found.difference.value == pytest.approx(-0.25)


def test_scores_are_read_from_what_the_harness_logs() -> None:
    samples = {
        "mmlu_law": [{"doc_id": 0, "acc": 1.0, "filter": "none"}, {"doc_id": 1, "acc": 0.0, "filter": "none"}],
        "gsm8k": [{"doc_id": 0, "exact_match": 1.0, "filter": "strict-match"}],
    }
    assert scores(samples, {}) == {
        "mmlu_law acc": {"0": 1.0, "1": 0.0},
        "gsm8k exact_match (strict-match)": {"0": 1.0},
    }


def test_the_questions_of_a_group_are_put_together() -> None:
    samples = {name: [{"doc_id": 0, "acc": 1.0}] for name in ("mmlu_law", "mmlu_logic", "arc")}
    groups = {"mmlu": ["mmlu_humanities"], "mmlu_humanities": ["mmlu_law", "mmlu_logic"], "arc": []}
    assert scores(samples, groups) == {
        "mmlu acc": {"mmlu_law/0": 1.0, "mmlu_logic/0": 1.0},
        "arc acc": {"0": 1.0},
    }


def test_a_task_with_another_metric_is_refused_by_its_name() -> None:
    samples = {"arc": [{"doc_id": 0, "acc": 1.0}], "wikitext": [{"doc_id": 0, "metrics": ["word_perplexity"]}]}
    with pytest.raises(InputError, match=r"wikitext.*word_perplexity.*exact_match"):
        scores(samples, {})


def test_a_task_that_only_one_server_has_answered_is_no_result() -> None:
    with pytest.raises(ServerFailedError, match="arc acc"):
        compare_tasks({"arc acc": {"0": 1.0}}, {})


@pytest.mark.parametrize(
    "content", [None, "- a list\n", "tsk: own\n", "task: own\nprocess_docs: !function own.process\n"]
)
def test_a_file_that_is_no_task_is_refused_by_its_name(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=str(file)):
        check_tasks(["mmlu", str(file)])
