"""Runs vLLM's engine and worker in one process, without a server: once per plan, and writes what it answered.

    python -m tests.vllm.offline RUN_DIR...

Each RUN_DIR has a plan.json and a request.json; answers.json and the proof are written beside them. Where it has a file
`stand_in.py`, that is executed before anything of a plan is loaded. Each engine has a process of its own, forked from
one that has imported vLLM (`in_forks`).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.model_executor.models import qwen3_moe  # noqa: F401 - each fork has it then
from vllm.utils.argparse_utils import FlexibleArgumentParser

from moe_optimizer import env
from moe_optimizer.launcher.command import server_environment
from moe_optimizer.plan.plan import Plan
from tests.vllm.forked import cheaper
from tests.vllm.heldout import START, windows_of
from tests.vllm.in_forks import in_forks

ANSWERS = "answers.json"
_WRITTEN_S = 1.5
"""A worker writes its proof at most once a second."""


def main(*folders: str) -> int:
    """Run one after the other; stop at the first that fails."""
    return in_forks(answer, map(Path, folders))


def answer(folder: Path) -> None:
    """Serve the plan of a folder to its request.json: {"prompts", "max_tokens", "text", "reload"}.

    "reload": a folder whose weights are loaded into the engine before it answers; "" keeps the plan's.
    """
    stand_in = folder / "stand_in.py"
    if stand_in.exists():
        exec(stand_in.read_text(), {})
    plan, asked = Plan.load(folder / "plan.json"), json.loads((folder / "request.json").read_text())
    if "--enforce-eager" in plan.serve_args:
        os.environ.pop(cheaper.COMPILES)
        cheaper.spare()
    os.environ |= server_environment(plan, folder / "plan.json") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ[env.RUN_DIR] = str(folder)
    parser: Any = make_arg_parser(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", plan.model.path, *plan.serve_args.words]))
    engine = LLM(**vars(arguments))
    if asked["reload"]:
        engine.collective_rpc("reload_weights", kwargs={"weights_path": asked["reload"]})
    greedy = SamplingParams(max_tokens=asked["max_tokens"], temperature=0, logprobs=2)
    found = engine.generate(asked["prompts"], greedy, use_tqdm=False)
    answers = [_tokens_and_best_two(each.outputs[0]) for each in found]
    perplexity = _perplexity(engine, asked["text"]) if asked["text"] else None
    time.sleep(_WRITTEN_S)
    engine.generate(asked["prompts"][:1], greedy, use_tqdm=False)
    (folder / ANSWERS).write_text(json.dumps({"answers": answers, "perplexity": perplexity}))


def _tokens_and_best_two(found: Any) -> tuple[list[int], list[dict[int, float]]]:
    best = [{token: each.logprob for token, each in position.items() if each.rank <= 2} for position in found.logprobs]
    return list(found.token_ids), best


def _perplexity(engine: LLM, text: str) -> float:
    """Return exp of the mean negative log-likelihood of the text's tokens, as scripts/perplexity.py asks a server."""
    encode = engine.get_tokenizer().encode
    tokens = encode(text, add_special_tokens=False)
    windows = windows_of(tokens, encode(START, add_special_tokens=False))
    asked = [{"prompt_token_ids": window} for window in windows]
    given: Any = engine.generate(asked, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    nats = 0.0
    for window, found in zip(windows, given, strict=True):
        nats -= sum(at[token].logprob for token, at in zip(window[1:], found.prompt_logprobs[1:], strict=True))
    return math.exp(nats / len(tokens))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
