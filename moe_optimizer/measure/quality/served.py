"""Serves one side of a quality run and keeps what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_json, write_atomically
from moe_optimizer.measure.bench.pace import Pace
from moe_optimizer.measure.bench.side import Side, opened
from moe_optimizer.measure.quality.collect import Asked, answered
from moe_optimizer.measure.quality.distributions import Distributions
from moe_optimizer.measure.quality.metrics import Answers
from moe_optimizer.measure.quality.probes import Probe, probes
from moe_optimizer.measure.quality.request import QualityRequest, telling
from moe_optimizer.measure.quality.tasks import TaskAnswers, answer_tasks, read_tasks, tasks_path

Begin = Callable[[str, str], None]
"""Takes the kind of the part that begins, as `Pace` has it, and what it is in words."""

_TOKENS_FILE = "tokens.json"
_MAX_BYTES = 1 << 30
_PROMPTS, _TASKS = "prompts", "tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Continuations of the user's prompts."""

    alone: tuple[str, ...]
    """Of each prompt in a request of its own."""
    in_batch: tuple[str, ...]
    """Of all prompts in one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSide:
    """What one side answered."""

    name: str
    answers: Answers
    texts: Texts | None
    """None where the user gave no prompts."""
    tasks: TaskAnswers
    run_dir: Path


def known_probes(request: QualityRequest, *, sizes: tuple[int, ...], max_num_seqs: int) -> tuple[Probe, ...] | None:
    """Return what is asked; None before any server has given the tokens of the texts."""
    return _probes(request, sizes, max_num_seqs, None)


def parts(request: QualityRequest, key: str, asked: tuple[Probe, ...]) -> list[str]:
    """Return what is to do yet of a side, as `Pace` has it; nothing where all is answered."""
    folder = request.folder / key
    found = [str(probe) for probe in asked if not (folder / f"{probe.key}.npz").exists()]
    found += [_PROMPTS] if request.prompts and not _texts_path(folder).exists() else []
    found += [_TASKS] if request.tasks and not tasks_path(folder).exists() else []
    return [Pace.START, *found] if found else []


def serve_side(
    request: QualityRequest,
    side: Side,
    key: str,
    *,
    sizes: tuple[int, ...],
    max_num_seqs: int,
    begin: Begin,
    on_probes: Callable[[tuple[Probe, ...]], None],
) -> tuple[ServedSide, tuple[Probe, ...]]:
    """Start a side's server, unless everything was answered before, and ask it all probes.

    Args:
        request: of the run.
        side: whose server.
        key: names its files.
        sizes: tokens in one step that matter.
        max_num_seqs: sequences to decode at once.
        begin: takes what is done next.
        on_probes: takes what is asked, once a server has given the tokens.

    Raises:
        MoeOptimizerError: as `opened` and `Asked`.
    """
    folder = request.folder / key
    folder.mkdir(exist_ok=True, mode=0o700)
    asked = _probes(request, sizes, max_num_seqs, None)
    if asked is None or parts(request, key, asked):
        begin(Pace.START, f"starting {side.name}")
        with opened(
            telling(side, request.top_logprobs), run_dir=folder / "run", ready_timeout_s=request.ready_timeout_s
        ) as server:
            client = Asked(
                base_url=server.base_url, model=server.model, top_logprobs=request.top_logprobs, name=side.name
            )
            limit = (server.max_model_len, client)
            if asked is None:
                asked = _probes(request, sizes, max_num_seqs, limit)
                assert asked is not None, "a running server gives the tokens"
                on_probes(asked)
            _check_length(asked, server.max_model_len, side.name)
            todo = parts(request, key, asked)
            for probe in asked:
                if str(probe) in todo:
                    begin(str(probe), f"{side.name}: {probe}")
                answered(folder / f"{probe.key}.npz", client, probe)
            if _PROMPTS in todo:
                begin(_PROMPTS, f"{side.name}: the prompts")
                _keep_texts(request, folder, client)
            answer_tasks(
                request.tasks, request.task_limit, data=request.task_data, base_url=server.base_url,
                model=server.model, tokenizer=request.model, max_model_len=server.max_model_len,
                path=tasks_path(folder), log=folder / "tasks.log",
                on_step=lambda _share, text: begin(_TASKS, f"{side.name}: {text}"),
            )  # fmt: skip
            server.check_alive(side.name)
    answers = {probe.key: Distributions.read(folder / f"{probe.key}.npz") for probe in asked}
    served = ServedSide(
        name=side.name,
        answers=answers,
        texts=_texts(request, folder),
        tasks=read_tasks(tasks_path(folder)) if request.tasks else {},
        run_dir=folder / "run",
    )
    return served, asked


def _probes(
    request: QualityRequest, sizes: tuple[int, ...], max_num_seqs: int, server: tuple[int, Asked] | None
) -> tuple[Probe, ...] | None:
    """Return what to ask; None before any server has given the tokens of the texts."""
    path = request.folder / _TOKENS_FILE
    if not path.exists():
        if server is None:
            return None
        length, client = server
        tokens = [client.tokenize(text) for text in request.texts]
        if not any(tokens):
            raise InputError("--data: got a text without tokens, expected some that is like the traffic to come")
        write_atomically(path, json.dumps({"tokens": tokens, "max_model_len": length}))
    found = read_json(path, max_bytes=_MAX_BYTES)
    return probes(
        [token for text in _dealt(found["tokens"]) for token in text],
        sizes,
        extent=request.extent,
        max_num_seqs=max_num_seqs,
        max_model_len=found["max_model_len"],
    )


def _dealt(texts: list[list[int]]) -> list[list[int]]:
    """Return pieces of the texts in turns, so that a part of all of them has every kind of text."""
    size = 256
    pieces = [[text[start : start + size] for start in range(0, len(text), size)] for text in texts]
    longest = max(len(each) for each in pieces)
    return [each[number] for number in range(longest) for each in pieces if number < len(each)]


def _check_length(asked: tuple[Probe, ...], max_model_len: int, name: str) -> None:
    needed = max(len(prompt) + max(1, probe.generated) for probe in asked for prompt in probe.prompts)
    if needed > max_model_len:
        raise InputError(
            f"{name} takes requests of at most {max_model_len} tokens, but the other side has kernels for {needed}",
            hint="give both the same --max-model-len",
        )


def _texts_path(folder: Path) -> Path:
    return folder / "continuations.json"


def _keep_texts(request: QualityRequest, folder: Path, client: Asked) -> None:
    each = [client.texts((prompt,), max_tokens=request.prompt_tokens)[0] for prompt in request.prompts]
    together = client.texts(request.prompts, max_tokens=request.prompt_tokens) if len(each) > 1 else each
    write_atomically(_texts_path(folder), json.dumps({"alone": each, "in_batch": together}))


def _texts(request: QualityRequest, folder: Path) -> Texts | None:
    if not request.prompts:
        return None
    found = read_json(_texts_path(folder), max_bytes=_MAX_BYTES)
    return Texts(alone=tuple(found["alone"]), in_batch=tuple(found["in_batch"]))
