"""A server is driven until nothing compiles any more; the server is a stand-in that says what it compiles."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_optimizer.errors import RequiredNotAppliedError, ServerFailedError
from moe_optimizer.launcher import launch, warm_up
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.warm_up import Kernels, WarmUp, WarmUpResult
from moe_optimizer.launcher.warm_up_requests import Request, Shapes, groups_for
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import WARMING_FILE
from tests.served_until import serve
from tests.unit.launcher.stand_in import Fake

SHAPES = Shapes(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=600)
LIMIT_S = 600.0
"""Where it is not what the test is about: a warm-up of the stand-in takes 10 s beside six processes for each core."""


def asked(shapes: Shapes = SHAPES, *, seed: int = 0) -> list[Request]:
    return list(itertools.chain.from_iterable(groups_for(shapes, seed=seed).values()))


@pytest.fixture
def fake(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """Makes a plan of a stand-in with some behaviours, for four requests at once; no start was before it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(warm_up, "SETTLE_S", 0.1)
    monkeypatch.setattr(warm_up, "AHEAD_S", 0.0)
    return functools.partial(fake, batch_size=4)


class Stopped(Exception):  # noqa: N818 - ends a server that is ready
    pass


def served(plan: Plan, run_dir: Path, limit_s: float, *, decode_check_s: float = 0.0) -> list[str]:
    """Serve with a warm-up until it is ready; return what was said."""
    said: list[str] = []

    def on_ready(info: Any) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        serve(
            plan, run_dir=run_dir, warm_up_s=limit_s, decode_check_s=decode_check_s, on_ready=on_ready,
            echo=said.append,
        )  # fmt: skip
    return said


def test_a_server_is_ready_only_after_a_round_that_compiled_nothing(fake: Fake, tmp_path: Path) -> None:
    said = served(fake("compile"), tmp_path, LIMIT_S)
    (result,) = [index for index, line in enumerate(said) if line.startswith("warmed up in")]
    (ready,) = [index for index, line in enumerate(said) if line.startswith("ready after")]
    assert result < ready
    assert "stopped before" not in said[result]
    assert any(line.startswith("warming up: round 2") for line in said), "the first round compiled something"


def test_a_group_is_sent_again_up_to_the_request_in_which_something_compiled(fake: Fake, tmp_path: Path) -> None:
    said = served(fake("sampler"), tmp_path, LIMIT_S)
    (again,) = [line for line in said if line.startswith("warming up: round 2")]
    names = [each.body.keys() for each in groups_for(SHAPES, seed=0)["sampling"]]
    first = next(count for count, each in enumerate(names, 1) if "top_k" in each)
    assert f"round 2, {first} requests: sampling" in again
    assert not any(line.startswith("warming up: round 3") for line in said)


def test_one_round_is_enough_where_nothing_compiles(fake: Fake, tmp_path: Path) -> None:
    said = served(fake("count"), tmp_path, LIMIT_S)
    assert not any(line.startswith("warming up: round 2") for line in said)
    (result,) = [line for line in said if line.startswith("warmed up in")]
    assert f"{len(asked(Shapes(max_num_seqs=4, max_num_batched_tokens=2048, max_model_len=64)))} requests" in result


def test_what_shows_in_a_cache_only_after_the_answers_has_all_of_them_sent_again() -> None:
    said: list[str] = []
    pauses: list[float] = []
    result = warmed_up(
        lambda _sent: Kernels(compiled=int(warm_up.SETTLE_S in pauses)), pause=pauses.append, say=said.append
    )
    groups = groups_for(SHAPES, seed=0)
    assert [line.split(": ", 2)[2].partition(",")[0] for line in said] == [*groups, *groups]
    assert result.settled
    assert result.compiled == 1
    assert result.requests == 2 * len(asked())


def warmed_up(kernels: Callable[[list[Any]], Kernels], known: set[str] | None = None, **options: Any) -> WarmUpResult:
    """Warm up a server of which `kernels` says, from the bodies sent so far, what it needed."""
    sent: list[Any] = []
    client = cast(ServerClient, SimpleNamespace(generate=lambda body, timeout_s: sent.append(body)))
    options = {"pause": lambda _seconds: None, "say": lambda _line: None, **options}
    return WarmUp([client], "m", SHAPES, lambda: kernels(sent), limit_s=LIMIT_S, **options).run(known)


PROVING = {each.what for each in asked() if each.proves}
SAMPLED = next(each.what for each in asked() if "min_p" in each.body)


def needing(*keys: str, loaded: bool = False) -> Callable[[list[Any]], Kernels]:
    """Return counts of a server that needs a kernel for each of these keys of a request."""

    def kernels(sent: list[Any]) -> Kernels:
        needed = sum(any(key in body for body in sent) for key in keys)
        return Kernels(loaded=needed) if loaded else Kernels(compiled=needed)

    return kernels


def test_what_needed_a_kernel_is_known_afterwards_compiled_or_loaded() -> None:
    assert warmed_up(needing("min_p")).needed == {SAMPLED}
    loading = warmed_up(needing("min_p", loaded=True))
    assert (loading.needed, loading.compiled, loading.requests) == ({SAMPLED}, 0, len(asked()))


def test_a_start_that_knows_what_needs_kernels_sends_only_that_and_what_proves_it() -> None:
    result = warmed_up(needing("min_p"), known={SAMPLED})
    assert result.short
    assert result.settled
    # What was compiled, in this process as in the one before, is sent again, with those of its group before it.
    assert result.requests == len(PROVING) + 2
    assert result.requests < len(asked()) / 2
    assert result.needed == {SAMPLED}


def test_every_decode_batch_is_sent_at_every_start_because_graphs_are_of_a_process() -> None:
    assert {each.what for each in asked() if each.what.endswith("at once")} <= PROVING


def test_a_kernel_that_is_compiled_for_what_needed_none_has_everything_sent() -> None:
    result = warmed_up(needing("stream"), known=set())
    assert not result.short
    assert result.settled
    assert result.requests > len(asked())
    assert result.needed == {"a stream"}
    assert "of every shape: something was compiled for a stream" in result.in_words()


def test_a_kernel_that_is_only_loaded_for_what_needed_none_has_not() -> None:
    result = warmed_up(needing("stream", loaded=True), known=set())
    assert result.short
    assert result.needed == {"a stream"}


def test_nothing_is_waited_for_where_no_cache_has_grown() -> None:
    pauses: list[float] = []
    warmed_up(lambda _sent: Kernels(), pause=pauses.append, counted=lambda: True)
    assert warm_up.SETTLE_S not in pauses


def test_the_ledger_has_each_kind_of_request_as_a_part_of_the_warm_up(fake: Fake, tmp_path: Path) -> None:
    infos: list[Any] = []

    def on_ready(info: Any) -> None:
        infos.append(info)
        raise Stopped

    with pytest.raises(Stopped):
        serve(fake("compile"), run_dir=tmp_path, warm_up_s=LIMIT_S, on_ready=on_ready, echo=lambda _line: None)
    phases = infos[0].phases_s
    parts = {name: seconds for name, seconds in phases.items() if name.startswith("warm-up: ")}
    assert {"warm-up: sampling", "warm-up: prompts"} <= parts.keys()
    rounded = 0.005 * (len(parts) + 1)
    assert sum(parts.values()) <= phases["warm-up"] + rounded


def test_all_that_a_warm_up_asks_comes_while_the_marker_says_so(fake: Fake, tmp_path: Path) -> None:
    served(fake("compile"), tmp_path, LIMIT_S)
    lines = (tmp_path / "server.log").read_text().splitlines()
    assert lines.count("warming") > 20
    assert "serving" not in lines
    assert not (tmp_path / WARMING_FILE).exists()


def test_a_server_that_never_settles_is_ready_after_the_limit_and_says_so(fake: Fake, tmp_path: Path) -> None:
    said = served(fake("restless"), tmp_path, 3.0)
    (result,) = [line for line in said if line.startswith("warmed up in")]
    assert "stopped before " in result


def test_one_request_and_one_compilation_are_not_called_many() -> None:
    said: list[str] = []
    result = warmed_up(lambda sent: Kernels(compiled=min(len(sent), 1)), say=said.append)
    assert result.in_words().endswith(f"{result.requests} requests, 1 compilation")
    assert any(", 1 request: " in line for line in said if "round 2" in line), said


def test_without_a_limit_nothing_is_asked(fake: Fake, tmp_path: Path) -> None:
    said = served(fake("compile"), tmp_path, 0.0)
    assert not any("warm" in line for line in said)
    assert "warming" not in (tmp_path / "server.log").read_text()


def test_what_is_decoded_is_compared_before_ready_and_the_proof_says_so(fake: Fake, tmp_path: Path) -> None:
    said = served(fake(), tmp_path, 0.0, decode_check_s=LIMIT_S)
    (ready,) = [index for index, line in enumerate(said) if line.startswith("ready after")]
    assert any("decode against prompt: 32 tokens at 1, 4 requests" in line for line in joined(said[ready:]))
    assert not (tmp_path / WARMING_FILE).exists()


def joined(lines: list[str]) -> list[str]:
    """Return paragraphs: the table wraps its lines."""
    return " ".join(each.strip() or "\n" for each in lines).split("\n")


def test_a_server_that_decodes_something_else_is_never_ready(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(RequiredNotAppliedError, match="decode check: server: 1 requests") as refused:
        serve(fake("misdecode"), run_dir=tmp_path, decode_check_s=LIMIT_S, echo=said.append)
    assert "--no-decode-check" in str(refused.value.hint)
    assert not any(line.startswith("ready") for line in said)


def test_without_the_check_it_is_ready(fake: Fake, tmp_path: Path) -> None:
    assert any(line.startswith("ready") for line in served(fake("misdecode"), tmp_path, 0.0))


def test_a_server_that_dies_while_it_is_warmed_up_is_an_error(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(ServerFailedError):
        serve(fake("fragile"), run_dir=tmp_path, warm_up_s=LIMIT_S, echo=lambda _line: None)


def test_a_marker_of_an_earlier_run_is_removed(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / WARMING_FILE).touch()
    with launch.running(fake(), run_dir=tmp_path):
        assert not (tmp_path / WARMING_FILE).exists()


def test_decode_batches_go_up_to_the_largest() -> None:
    assert at_once(SHAPES) == [1, 2, 4, 5, 8]


def at_once(shapes: Shapes) -> list[int]:
    return [len(each.body["prompt"]) for each in asked(shapes) if each.what.endswith("at once")]


def prompt_lengths(shapes: Shapes) -> list[int]:
    return [
        len(each.body["prompt"][0]) for each in asked(shapes) if each.what.startswith("a prompt of") and not each.beside
    ]


def test_what_graphs_hold_is_asked_at_fewer_sizes_and_what_they_do_not_at_all() -> None:
    large = Shapes(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192)
    captured = dataclasses.replace(large, captured=512)
    assert at_once(captured) == [1, 2, 4, 5, 8, 9, 16, 17, 32, 64, 128, 256]
    assert set(at_once(large)) - set(at_once(captured)) == {33, 65, 129}
    assert prompt_lengths(captured)[:2] == [16, 21]
    assert [length for length in prompt_lengths(captured) if length >= 512] == [
        length for length in prompt_lengths(large) if length >= 512
    ]
    assert {64, 96, 256} <= set(prompt_lengths(large)) - set(prompt_lengths(captured))


@pytest.mark.parametrize("names", [{"top_p"}, {"top_k"}, {"top_p", "top_k"}])
def test_vllms_sampling_kernels_from_eight_requests_on_are_asked_for(names: set[str]) -> None:
    shapes = dataclasses.replace(SHAPES, max_num_seqs=64)
    batches = {len(each.body["prompt"]) for each in asked(shapes) if each.body.keys() & {"top_p", "top_k"} == names}
    # Compiled apart for numbers that divide by 16.
    assert any(batch >= 8 and batch % 16 for batch in batches)
    assert any(batch % 16 == 0 for batch in batches)


def test_prompts_go_up_to_two_steps_and_past_multiples_of_16() -> None:
    lengths = prompt_lengths(SHAPES)
    assert {16, 21, 24, 256, 261, 384, 512} <= set(lengths)
    assert max(lengths) == 512


def test_a_step_is_filled_by_several_prompts_where_the_longest_does_not_fill_one() -> None:
    assert largest_step(SHAPES) == 1
    short = Shapes(max_num_seqs=256, max_num_batched_tokens=16_384, max_model_len=4096)
    # One more than fill it: the first that comes may have a step for itself.
    assert largest_step(short) == 1 + 5
    assert largest_step(dataclasses.replace(short, max_num_seqs=2)) == 1 + 2
    assert largest_step(dataclasses.replace(short, copies=2)) == 2 * (1 + 5)


def largest_step(shapes: Shapes) -> int:
    """Return the prompts of the longest length that are sent at once."""
    longest = max(prompt_lengths(shapes))
    return max(len(each.body["prompt"]) for each in asked(shapes) if len(each.body["prompt"][0]) == longest)


def test_a_context_that_is_no_longer_than_the_prompts_is_not_asked_twice() -> None:
    lengths = [len(each.body["prompt"][0]) for each in asked(dataclasses.replace(SHAPES, max_model_len=500))]
    assert lengths.count(492) == 1


@pytest.mark.parametrize(("length", "asked_for"), [(600, 592), (200_000, 32_768)])
def test_a_context_as_long_as_the_model_takes_comes_last(length: int, asked_for: int) -> None:
    last = asked(dataclasses.replace(SHAPES, max_model_len=length))[-1]
    assert len(last.body["prompt"][0]) == asked_for


@pytest.mark.parametrize(
    "name",
    [
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "logprobs",
        "n",
        "stream",
        "prompt_logprobs",
        "response_format",
    ],
)
def test_every_way_to_sample_is_asked(name: str) -> None:
    assert any(name in each.body for each in asked())


def test_a_prompt_with_a_seed_fits_into_a_step() -> None:
    # vLLM's CPU build ends otherwise ("CPU Generator does not use offset").
    asked_for = [
        each.body["prompt"] for each in asked(dataclasses.replace(SHAPES, max_num_seqs=64)) if "seed" in each.body
    ]
    assert [sum(map(len, prompts)) for prompts in asked_for] == [9, 9]


def test_nobody_is_asked_about_a_prompt_that_another_server_reads() -> None:
    assert not any("prompt_logprobs" in each.body for each in asked(dataclasses.replace(SHAPES, handed_over=True)))


def test_prompts_are_put_beside_requests_that_decode() -> None:
    assert any(each.beside is not None and each.beside["max_tokens"] > 8 for each in asked())


@pytest.mark.parametrize("length", [9, 17, 64])
def test_nothing_is_longer_than_the_model_takes(length: int) -> None:
    shapes = Shapes(max_num_seqs=2, max_num_batched_tokens=2048, max_model_len=length)
    for each in asked(shapes):
        for body in filter(None, (each.body, each.beside)):
            assert max(map(len, body["prompt"])) + body["max_tokens"] <= length


def test_no_prompt_is_in_the_prefix_cache_of_an_earlier_round() -> None:
    first, second = ({str(each.body["prompt"]) for each in asked(seed=seed)} for seed in (0, 1))
    assert not first & second


def test_what_workers_find_while_they_are_warmed_up_is_in_the_table(fake: Fake, tmp_path: Path) -> None:
    said = served(fake("compared"), tmp_path, LIMIT_S)
    (ready,) = [index for index, line in enumerate(said) if line.startswith("ready after")]
    assert any("passed in 1 of 2 of vLLM's graphs" in line for line in joined(said[ready:]))


def test_a_canary_that_fails_in_the_warm_up_ends_the_start_as_a_required_pass_does(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(RequiredNotAppliedError, match="flash_dmoe: canary before ready: a graph") as refused:
        serve(fake("wrong"), run_dir=tmp_path, warm_up_s=LIMIT_S, echo=said.append)
    assert "--disable-flash-dmoe" in str(refused.value.hint)
    assert not any(line.startswith("ready") for line in said)
