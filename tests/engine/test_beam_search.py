"""Beam search finds what the same search over whole texts finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer.engine import LLM, BeamSearchParams, SamplingParams
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.errors import InputError


def search(folder: Path, prompt: list[int], width: int, count: int, end: int | None) -> list[tuple[list[int], float]]:
    """The definition: every continuation of every beam is scored by a forward pass over the whole text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    beams, complete = [(prompt, 0.0)], []
    for _ in range(count):
        longer = []
        for tokens, score in beams:
            with torch.inference_mode():
                logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            longer += [([*tokens, token], score + value) for token, value in enumerate(logprobs.tolist())]
        longer.sort(key=lambda beam: beam[1], reverse=True)
        ended = [beam for beam in longer if beam[0][-1] == end]
        # Of each beam only the 2 * width likeliest continuations are looked at, in vLLM too.
        complete += [beam for beam in ended if beam in longer[: 2 * width]]
        beams = [beam for beam in longer if beam[0][-1] != end][:width]
    found = complete + beams
    return sorted(found, key=lambda beam: beam[1] / (len(beam[0]) - len(prompt)), reverse=True)[:width]


@pytest.mark.parametrize("width", [1, 3])
def test_beams_are_those_of_a_search_over_whole_texts(width: int, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen3")
    llm = LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=64, block_size=4, max_num_seqs=8)
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8]]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=6))
    for prompt, output in zip(prompts, outputs, strict=True):
        want = search(folder, prompt, width, 6, None)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in want]
        assert [beam.cum_logprob for beam in output.sequences] == pytest.approx([score for _, score in want], abs=1e-4)
        assert {beam.finish_reason for beam in output.sequences} == {"length"}


def test_a_beam_that_ends_is_complete_and_the_others_go_on(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "model"))
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 64, "max_num_seqs": 8}
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    second = LLM(str(folder), **options).beam_search([1, 2, 3], params)[0].sequences[0].tokens[4]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": second}))
    llm = LLM(str(folder), **options)
    sequences = llm.beam_search([1, 2, 3], params)[0].sequences
    assert len(sequences) == 2
    for beam in sequences:
        assert (beam.tokens[-1] == second) == (beam.finish_reason == "stop")
        assert second not in beam.tokens[3:-1]
    assert not any(beam.tokens[-1] == second and beam.finish_reason == "length" for beam in sequences)


def test_a_width_beyond_the_reported_logprobs_is_refused() -> None:
    with pytest.raises(InputError, match="beam_width"):
        BeamSearchParams(beam_width=51, max_tokens=3)  # pyrefly: ignore[bad-argument-type]


def test_parameters_of_another_kind_are_refused(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_model("qwen3")), skip_tokenizer_init=True, num_gpu_blocks_override=16)
    wrong: Any = SamplingParams()
    with pytest.raises(InputError, match="BeamSearchParams"):
        llm.beam_search([1, 2], wrong)


def test_a_prompt_that_reaches_the_context_before_the_others_keeps_its_beams(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(
        str(tiny_model("qwen3")), skip_tokenizer_init=True, max_model_len=8, num_gpu_blocks_override=16, max_num_seqs=8
    )
    outputs = llm.beam_search([[1, 2, 3, 4, 5, 6], [7]], BeamSearchParams(beam_width=2, max_tokens=5))
    assert [[len(beam.tokens) for beam in output.sequences] for output in outputs] == [[8, 8], [6, 6]]


def test_beams_share_the_blocks_of_the_beam_before_them_and_copy_what_they_write_into(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(
        str(tiny_model("qwen3")), skip_tokenizer_init=True, num_gpu_blocks_override=64, block_size=4, max_num_seqs=16,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine, prompts = llm.llm_engine, [[1, 2, 3, 4, 5, 6], [7, 8]]
    steps, launch = [], engine.executor.launch

    def watched(step: SchedulerOutput) -> SampledTokens:
        engine.check_integrity()
        held = [block for each in step.decodes for block in each.block_table.block_ids]
        steps.append((len(step.prefills), len(step.decodes), len(step.copies), len(held) - len(set(held))))
        return launch(step)

    monkeypatch.setattr(engine.executor, "launch", watched)
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8))
    for prompt, output in zip(prompts, outputs, strict=True):
        want = search(tiny_model("qwen3"), prompt, 3, 8, None)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in want]
    # The prompts once; then one token of each beam, whatever the beam before it was.
    assert [step[:2] for step in steps] == [(2, 0)] + [(0, 6)] * 7
    assert sum(step[2] for step in steps) > 0, "no block was copied before it was written into"
    assert all(step[3] > 0 for step in steps[3:]), "beams of one prompt hold no block together"
    assert engine.scheduler.blocks.num_available == 64
    assert not engine.groups


@pytest.mark.parametrize(("num_blocks", "max_num_seqs", "caching"), [(9, 16, True), (9, 16, False), (64, 2, True)])
def test_beams_without_room_to_share_are_computed_again(
    num_blocks: int, max_num_seqs: int, caching: bool, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("qwen3")
    llm = LLM(
        str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=num_blocks, block_size=2, max_model_len=16,
        max_num_seqs=max_num_seqs, enable_prefix_caching=caching,
    )  # fmt: skip
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8))
    for prompt, output in zip(prompts, outputs, strict=True):
        want = search(folder, prompt, 3, 8, None)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in want]
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.scheduler.blocks.num_available == num_blocks


def test_beams_that_wait_for_a_seat_get_it_when_others_have_their_token(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen3")
    llm = LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=64, max_model_len=60, max_num_seqs=2)
    engine, steps = llm.llm_engine, []
    launch = engine.executor.launch
    engine.executor.launch = lambda step: (steps.append(len(step.sampled)), launch(step))[1]
    (output,) = llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=6, max_tokens=3))
    assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in search(folder, [1, 2, 3], 6, 3, None)]
    # One, then six by twos, twice: not until the first two have reached the end of the context.
    assert len(steps) <= 1 + 2 * 6
