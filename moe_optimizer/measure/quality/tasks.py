"""Has lm-evaluation-harness ask two servers the same questions, and compares the answers question by question.

    python -m moe_optimizer.measure.quality.tasks REQUEST EVENTS

The harness (extra `eval`) is imported in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_optimizer.errors import InputError, ServerFailedError, UnsupportedError
from moe_optimizer.files import read_json, write_atomically
from moe_optimizer.measure.process import OnStep, answer_request, run_measurement
from moe_optimizer.measure.quality.intervals import estimate, mean
from moe_optimizer.measure.quality.result import TaskResult
from moe_optimizer.measure.quality.task_names import check_task_names
from moe_optimizer.yaml_document import read_yaml

TaskAnswers = Mapping[str, Mapping[str, float]]
""""TASK METRIC" -> question -> score, 1 for a right answer."""

_MODULE = "moe_optimizer.measure.quality.tasks"
_FILES = (".yaml", ".yml")
_METRICS = ("acc", "exact_match")
_MOST_GENERATED = 256
"""As the harness has it, where a task says nothing else and the server takes that much."""
_GRACE_S = 5.0
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """Questions for one server."""

    base_url: str
    model: str
    tokenizer: str
    tasks: tuple[str, ...]
    limit: int | None
    data: str | None
    """Folder with data sets by their names; None: the harness finds them as it does."""
    max_model_len: int
    """Tokens of the longest prompt and completion that the server takes."""
    path: str
    """Of the file to write."""


def check_tasks(tasks: Sequence[str], data: str | None = None) -> None:
    """Refuse tasks without the harness, names that it does not know, files that are no task, and no folder of data.

    Raises:
        InputError: a file cannot be read or names no task, there is no task of that name, or no folder.
        UnsupportedError: the harness is not installed.
    """
    if data is not None and not Path(data).is_dir():
        raise InputError(
            f"--task-data: got {data!r:.200}, expected a folder",
            hint="it holds each data set under its name, for example DIR/openai/gsm8k",
        )
    names = [each for each in tasks if isinstance(_specified(each), str)]
    if tasks and importlib.util.find_spec("lm_eval") is None:
        raise UnsupportedError(
            "--tasks: lm-evaluation-harness is not installed", hint="run: pip install 'moe-optimizer[eval]'"
        )
    check_task_names(names)


def _specified(task: str) -> str | dict[str, Any]:
    """Return what the harness takes for a task: a name that it knows, or what the user's own file says.

    Raises:
        InputError: the file cannot be read or names no task.
    """
    if not task.endswith(_FILES):
        return task
    found = read_yaml(Path(task), origin=f"--tasks {task}", what="task").data
    if not isinstance(found, dict) or not isinstance(found.get("task"), str):
        raise InputError(f"--tasks {task}: has no key task, expected the name of the task that it describes")
    return found


def tasks_path(folder: Path) -> Path:
    """Return the file of a side's answers."""
    return folder / "tasks.json"


def read_tasks(path: Path) -> TaskAnswers:
    """Return a side's answers."""
    return read_json(path, max_bytes=_MAX_BYTES)


def answer_tasks(
    tasks: tuple[str, ...],
    limit: int | None,
    *,
    data: str | None,
    base_url: str,
    model: str,
    tokenizer: str,
    max_model_len: int,
    path: Path,
    log: Path,
    on_step: OnStep,
) -> None:
    """Ask a server the questions of tasks, unless the file of its answers is there.

    Raises:
        InputError: a task scores by something else than whether an answer is right.
        MeasurementError: the harness failed; its last lines are in the message.
    """
    if not tasks or path.exists():
        return
    request = TaskRequest(
        base_url=base_url,
        model=model,
        tokenizer=_absolute(tokenizer),
        tasks=tuple(_absolute(each) if each.endswith(_FILES) else each for each in tasks),
        limit=limit,
        data=data,
        max_model_len=max_model_len,
        path=str(path.absolute()),
    )
    key = {"OPENAI_API_KEY": os.environ.get("VLLM_API_KEY") or "none"}
    run_measurement(_MODULE, request, on_step=on_step, log=log, environment={**os.environ, **key}, grace_s=_GRACE_S)


def _absolute(what: str) -> str:
    """Return the absolute path of a file or folder that is here; a name as it is."""
    return str(Path(what).absolute()) if Path(what).exists() else what


def ask(request: TaskRequest, on_step: OnStep) -> int:
    """Ask all questions and write the answers; return how many there were."""
    from lm_eval import simple_evaluate

    on_step(0.0, f"tasks {', '.join(request.tasks)}")
    if request.data is not None:
        # A data set is looked for in the working folder before it is asked for over the network.
        os.chdir(request.data)
    found: Any = simple_evaluate(
        model="local-completions",
        model_args={
            "model": request.model,
            "base_url": f"{request.base_url}/v1/completions",
            "tokenizer": request.tokenizer,
            "num_concurrent": 8,
            "max_retries": 3,
            "tokenized_requests": True,
            # The harness takes 2048 tokens for any server's longest, and cuts prompts off there.
            "max_length": request.max_model_len,
            "max_gen_toks": min(_MOST_GENERATED, request.max_model_len // 2),
        },
        tasks=[_specified(each) for each in request.tasks],
        limit=request.limit,
        log_samples=True,
        bootstrap_iters=0,
    )
    answers = scores(found["samples"], found.get("group_subtasks", {}))
    write_atomically(Path(request.path), json.dumps(answers))
    return sum(len(each) for each in answers.values())


def scores(
    samples: Mapping[str, list[dict[str, Any]]], groups: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Return the scores of each question from what the harness logs of it.

    Args:
        samples: of each task.
        groups: each group of tasks with its parts, tasks or groups; the questions of a group are put together, or
            one of 57 small tasks would drop by chance.

    Raises:
        InputError: a task scores by something else than whether an answer is right.
    """
    parents = {part: group for group, parts in groups.items() for part in parts}
    found: dict[str, dict[str, float]] = {}
    for task, rows in samples.items():
        asked = task
        while asked in parents:
            asked = parents[asked]
        for row in rows:
            metric = next((each for each in _METRICS if each in row), None)
            if metric is None:
                scored = ", ".join(row.get("metrics", ())) or "nothing"
                raise InputError(f"--tasks {task}: scores {scored}, expected one of {', '.join(_METRICS)}")
            kept = f" ({row['filter']})" if row.get("filter", "none") != "none" else ""
            number = str(row["doc_id"]) if asked == task else f"{task}/{row['doc_id']}"
            found.setdefault(f"{asked} {metric}{kept}", {})[number] = float(row[metric])
    return found


def compare_tasks(reference: TaskAnswers, plan: TaskAnswers) -> tuple[TaskResult, ...]:
    """Compare two servers on the questions that both were asked.

    Raises:
        ServerFailedError: there are none of a task.
    """
    results = []
    for name, theirs in reference.items():
        shared = sorted(theirs.keys() & plan.get(name, {}).keys())
        if not shared:
            raise ServerFailedError(f"--tasks: {name}: the two servers have answered no question that is the same")
        task, _, metric = name.partition(" ")
        mine = np.array([plan[name][each] for each in shared])
        other = np.array([theirs[each] for each in shared])
        only_plan, only_reference = int(np.sum(mine > other)), int(np.sum(mine < other))
        results.append(
            TaskResult(
                task=task,
                metric=metric,
                questions=len(shared),
                reference=float(other.mean()),
                plan=float(mine.mean()),
                difference=estimate(mine - other, np.arange(len(shared), dtype=np.int32), mean),
                only_reference=only_reference,
                only_plan=only_plan,
                p_value=mcnemar(only_reference, only_plan),
            )
        )
    return tuple(results)


def mcnemar(only_one: int, only_other: int) -> float:
    """Return the exact two-sided p-value of McNemar's test from the questions on which two disagree."""
    disagreed, fewer = only_one + only_other, min(only_one, only_other)
    if disagreed == 0:
        return 1.0
    tail = sum(math.comb(disagreed, each) for each in range(fewer + 1)) / 2**disagreed
    return min(1.0, 2 * tail)


if __name__ == "__main__":
    sys.exit(answer_request(TaskRequest, sys.argv[1:], ask))
