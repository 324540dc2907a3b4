"""The six end-to-end tests: basic, batched, prefix caching, variable lengths, CUDA graphs, memory."""

from __future__ import annotations

import json
import logging
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer.engine import LLM, SamplingParams
from moe_optimizer.errors import DoesNotFitError, InputError
from tests.engine.tiny_models import TINY_MOE

PROMPTS = [
    "def add(a, b):\n",
    "import os\n\n",
    "class Queue:\n    def put(self, item):\n        ",
    "for index in range(10):\n    if index ",
    "try:\n    import json\nexcept",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> dict[str, list[int]]:
    """What transformers generates, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MOE)
    tokens = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(ids, do_sample=False, max_new_tokens=24, temperature=None, top_p=None)
        tokens[prompt] = out[0, ids.shape[1] :].tolist()
    return tokens


def test_basic(tiny_moe_llm: LLM, reference: dict[str, list[int]]) -> None:
    output = tiny_moe_llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
    sample = output.outputs[0]
    assert sample.token_ids == reference[PROMPTS[0]]
    assert sample.text == tiny_moe_llm.get_tokenizer().decode(sample.token_ids, skip_special_tokens=True)
    assert (output.finished, sample.finish_reason) == (True, "length")


def test_batched(tiny_moe_llm: LLM, reference: dict[str, list[int]]) -> None:
    outputs = tiny_moe_llm.generate(PROMPTS * 4, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS * 4
    assert [output.outputs[0].token_ids for output in outputs] == [reference[prompt] for prompt in PROMPTS * 4]


def test_prefix_caching(reference: dict[str, list[int]]) -> None:
    llm = LLM(str(TINY_MOE), dtype="float32", block_size=4)
    long = "".join(PROMPTS)
    first = llm.generate(long, GREEDY, use_tqdm=False)[0]
    second = llm.generate(long, GREEDY, use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(second.prompt_token_ids) - 1) // 4 * 4
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_variable_lengths(reference: dict[str, list[int]]) -> None:
    # Chunks of 11 tokens, blocks of 4, and outputs that end at different steps.
    llm = LLM(str(TINY_MOE), dtype="float32", block_size=4, max_num_seqs=3, max_num_batched_tokens=11)
    params = [GREEDY.model_copy(update={"max_tokens": 24 - 5 * number}) for number in range(5)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        assert output.outputs[0].token_ids == reference[prompt][: 24 - 5 * number]
    llm.llm_engine.check_integrity()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graphs(reference: dict[str, list[int]]) -> None:
    llm = LLM(str(TINY_MOE), dtype="float32", device="cuda")
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [reference[prompt] for prompt in PROMPTS]


@pytest.mark.parametrize("swap_space", [0.0, 0.01])
def test_memory(swap_space: float, reference: dict[str, list[int]]) -> None:
    # Room for one longest sequence: the others are preempted again and again.
    llm = LLM(
        str(TINY_MOE), dtype="float32", block_size=4, num_gpu_blocks_override=16, max_model_len=64,
        swap_space=swap_space,
    )  # fmt: skip
    outputs = llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [reference[prompt] for prompt in PROMPTS * 2]
    assert llm.llm_engine.scheduler.num_preemptions > 0
    assert llm.llm_engine.scheduler.blocks.num_available == 16


def test_a_progress_bar_counts_tokens_per_second(tiny_moe_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_moe_llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert f"{len(PROMPTS)}/{len(PROMPTS)}" in shown
    assert re.search(r"[1-9]\d* tok/s", shown)


@pytest.mark.parametrize("options", [[], ["--chat"]])
def test_the_example_answers_its_prompts(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = TINY_MOE.parent / "offline.py"
    monkeypatch.setattr("sys.argv", [str(example), PROMPTS[0], PROMPTS[1], "--max-tokens", "4", *options])
    runpy.run_path(str(example), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == [repr(PROMPTS[0]), repr(PROMPTS[1])]
    assert all(len(line.partition(" -> ")[2]) > 2 for line in lines)


@pytest.mark.thorough
def test_a_first_answer_imports_neither_vllm_nor_the_server() -> None:
    # A first token within seconds rests on this; benchmarks/cli_startup.py takes the time.
    script = (
        "import sys; sys.modules |= dict.fromkeys(['vllm', 'fastapi', 'uvicorn', 'xxhash', 'openai'])\n"
        "from moe_optimizer.engine import LLM, SamplingParams\n"
        f"llm = LLM({str(TINY_MOE)!r}, dtype='float32', device='cpu')\n"
        f"output = llm.generate({PROMPTS[0]!r}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]\n"
        "print(len(output.outputs[0].token_ids), 'torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["1", "False"]


def test_a_conversation_goes_through_the_chat_template(tiny_moe_llm: LLM) -> None:
    output = tiny_moe_llm.chat([{"role": "user", "content": "What?"}], GREEDY, use_tqdm=False)[0]
    text = tiny_moe_llm.get_tokenizer().decode(output.prompt_token_ids)
    assert text == "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"max_num_seq": 3}, "max_num_seq"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 4096}, "max_position_embeddings"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 256, "enable_chunked_prefill": False}, "chunked"),
        ({"device": "abacus"}, "device"),
        ({"dtype": "float8"}, "dtype"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_a_wrong_argument_is_an_error(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        LLM(str(TINY_MOE), **arguments)


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_a_home_folder_may_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(TINY_MOE.parent))
    assert LLM("~/tiny-moe", dtype="float32", num_gpu_blocks_override=4).llm_engine.max_model_len == 64


def test_a_cache_that_cannot_hold_the_longest_sequence_is_an_error() -> None:
    with pytest.raises(DoesNotFitError, match="1024") as caught:
        LLM(str(TINY_MOE), dtype="float32", max_model_len=1024, kv_cache_memory_bytes=1 << 20)
    assert caught.value.hint is not None
    assert "max_model_len" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "named"), [({"num_gpu_blocks_override": 10**10}, "KV cache"), ({"swap_space": 2.0**19}, "swap_space")]
)
def test_a_cache_that_is_more_than_there_is_memory_names_what_to_lower(given: dict[str, Any], named: str) -> None:
    # Over 128 TiB: more than a process of Linux can address, however generous the system is.
    with pytest.raises(DoesNotFitError, match="out of memory") as caught:
        LLM(str(TINY_MOE), dtype="float32", **given)
    assert named in (caught.value.hint or "")


@pytest.mark.parametrize(
    "prompt",
    ["", [], [2048], [-1], [1] * 2048, "x " * 3000, 5.5, None, {}, {"text": "x"}, "x\ud800"],
    ids=lambda each: ascii(each)[:10],
)
def test_a_prompt_that_cannot_be_served_is_refused(tiny_moe_llm: LLM, prompt: Any) -> None:
    for prompts in ([prompt], prompt) if prompt != [] else ([prompt],):
        with pytest.raises(InputError, match="prompt"):
            tiny_moe_llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not tiny_moe_llm.llm_engine.has_unfinished_requests()


def test_a_prompt_that_is_too_long_is_not_warned_of_beside_the_error(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(str(TINY_MOE), dtype="float32", num_gpu_blocks_override=8)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(InputError, match="prompt"):
            llm.generate("x " * 3000, GREEDY, use_tqdm=False)
        with pytest.raises(InputError, match="prompt"):
            llm.chat([{"role": "user", "content": "x " * 3000}], GREEDY, use_tqdm=False)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_a_prompt_may_be_named_as_vllm_names_it(tiny_moe_llm: LLM) -> None:
    token_ids = tiny_moe_llm.get_tokenizer().encode(PROMPTS[0])
    named: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": token_ids}]
    first, *others = (each.outputs[0].text for each in tiny_moe_llm.generate(named, GREEDY, use_tqdm=False))
    assert others == [first, first]


def test_parameters_that_are_none_are_refused(tiny_moe_llm: LLM) -> None:
    wrong: Any = {"temperature": 0}
    for params in (wrong, [wrong]):
        with pytest.raises(InputError, match="sampling_params"):
            tiny_moe_llm.generate(PROMPTS[:1], params, use_tqdm=False)


@pytest.mark.parametrize("priority", [1, [1], [1, "x"], [None, 1], [1.5, 2]], ids=str)
def test_a_priority_that_is_no_number_for_each_prompt_is_refused(tiny_moe_llm: LLM, priority: Any) -> None:
    with pytest.raises(InputError, match="priority"):
        tiny_moe_llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, priority=priority)
    assert not tiny_moe_llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("messages", [5, {"role": "user", "content": "x"}, "hello"], ids=str)
def test_messages_that_are_no_conversation_are_refused(tiny_moe_llm: LLM, messages: Any) -> None:
    with pytest.raises(InputError, match="messages"):
        tiny_moe_llm.chat(messages, GREEDY, use_tqdm=False)


def test_an_end_that_the_model_cannot_generate_is_none(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MOE, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4096]}))
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=8)
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=2)
    assert len(llm.generate([[5]], params, use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_an_output_ends_where_the_context_does(tiny_moe_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = tiny_moe_llm.generate([[5] * 2040], params, use_tqdm=False)[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (8, "length")


def test_fp8_experts_answer_nearly_the_same() -> None:
    llm = LLM(str(TINY_MOE), dtype="float32", quantization="fp8")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    exact = LLM(str(TINY_MOE), dtype="float32").generate(PROMPTS, params, use_tqdm=False)
    for got, want in zip(llm.generate(PROMPTS, params, use_tqdm=False), exact, strict=True):
        ours, theirs = got.outputs[0].logprobs, want.outputs[0].logprobs
        assert ours is not None
        assert theirs is not None
        assert ours != theirs
        shared = ours[0].keys() & theirs[0].keys()
        assert len(shared) >= 3
        assert all(abs(ours[0][token].logprob - theirs[0][token].logprob) < 0.5 for token in shared)
