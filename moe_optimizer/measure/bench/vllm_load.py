"""Sends the requests of traces to servers with `vllm bench serve`, in a process of its own.

    python -m moe_optimizer.measure.bench.vllm_load REQUEST EVENTS

vLLM's own load generator is what others measure with. Importing it takes seconds and a gigabyte, so that one process
sends all rounds. The result is a file of samples for each round; what they mean is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.files import write_atomically
from moe_optimizer.measure.bench.api_servers import processor_seconds, seconds_between
from moe_optimizer.measure.bench.compilations import compilations
from moe_optimizer.measure.bench.gpu_counters import energy_joules
from moe_optimizer.measure.bench.samples import RoundSamples
from moe_optimizer.measure.bench.texts import Prompts, Texts
from moe_optimizer.measure.bench.trace import CHUNK_TOKENS, read_trace
from moe_optimizer.measure.process import OnStep, answer_request
from moe_optimizer.plan.json_codec import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The requests of one trace, sent once to one server."""

    base_url: str
    model: str
    """The name that the server serves."""
    trace: str
    """Path of the file."""
    requests: int
    clients: int | None
    """At most so many requests at a time, each as soon as another ends; None: at the trace's times."""
    samples: str
    """Path of the file to write; a round whose file is there is not sent again."""
    run_dirs: tuple[str, ...]
    """Folders of the servers whose workers say what they compile."""
    caches: Mapping[str, str]
    """Variables of the server's environment that name folders of compiled kernels, where it has others than we."""
    title: str
    """For progress."""
    servers: tuple[int, ...] = ()
    """The first process of each server behind the URL; none where they are not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Rounds to send, one after the other."""

    tokenizer: str
    """Folder or name of the model, from whose vocabulary prompts are drawn."""
    trust_remote_code: bool
    rounds: tuple[Round, ...]
    texts: Texts | None = None
    """What prompts are taken from; None: random tokens."""


def send(request: LoadRequest, on_step: OnStep) -> int:
    """Send the rounds that have no samples yet; return how many there were."""
    # The public functions behind `vllm bench serve`: the command needs the metadata of a package called vllm.
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    missing = [each for each in request.rounds if not Path(each.samples).exists()]
    for number, each in enumerate(missing):
        on_step(number / len(missing), each.title)
        folders, environ = [Path(folder) for folder in each.run_dirs], {**os.environ, **each.caches}
        compiled, before, busy = compilations(folders, environ), energy_joules(), processor_seconds(each.servers)
        arguments: Any = parser.parse_args(_arguments(request, each))
        with _prompts_from(request.texts, serve):
            found = serve.main(arguments)
        after, taken = energy_joules(), seconds_between(busy, processor_seconds(each.servers))
        used = None if before is None or after is None else after - before
        samples = _samples(found, used, compilations(folders, environ) - compiled)
        samples = dataclasses.replace(samples, api_servers_s=taken)
        write_atomically(Path(each.samples), json.dumps(encode(samples)))
    return len(missing)


@contextlib.contextmanager
def _prompts_from(texts: Texts | None, serve: Any) -> Iterator[None]:
    """Have the requests of a trace ask about texts: vLLM's traces have random tokens for prompts."""
    if texts is None:
        yield
        return
    original = serve.get_samples

    def get_samples(arguments: Any, tokenizer: Any) -> Any:
        prompts = Prompts(texts, lambda text: tokenizer.encode(text, add_special_tokens=False))
        samples = original(arguments, tokenizer)
        for sample, asked in zip(samples, read_trace(Path(arguments.dataset_path)), strict=True):
            sample.prompt = prompts.tokens(asked.hash_ids[0], asked.input_length)
            sample.prompt_len = len(sample.prompt)
        return samples

    serve.get_samples = get_samples
    try:
        yield
    finally:
        serve.get_samples = original


def _arguments(request: LoadRequest, each: Round) -> list[str]:
    closed = ["--no-self-timed", "--max-concurrency", str(each.clients)]
    return [
        *("--backend", "openai", "--base-url", each.base_url, "--endpoint", "/v1/completions"),
        *("--model", each.model, "--tokenizer", request.tokenizer),
        *(["--trust-remote-code"] if request.trust_remote_code else []),
        *("--dataset-name", "timed_trace", "--dataset-path", each.trace, "--num-prompts", str(each.requests)),
        *("--timed-trace-chunk-hash-size", str(CHUNK_TOKENS), "--temperature", "0", "--ignore-eos"),
        # The servers are ready: a request to find out would be one that nobody counts.
        *("--ready-check-timeout-sec", "0", "--save-detailed", "--disable-tqdm"),
        *(closed if each.clients is not None else []),
    ]


def _samples(found: dict[str, Any], energy: float | None, compiled: int) -> RoundSamples:
    itls = [tuple(map(float, each)) for each in found["itls"]]
    ttfts = tuple(map(float, found["ttfts"]))
    return RoundSamples(
        duration_s=float(found["duration"]),
        ttft_s=ttfts,
        e2e_s=tuple(first + sum(rest) for first, rest in zip(ttfts, itls, strict=True)),
        itl_s=tuple(gap for each in itls for gap in each),
        input_tokens=tuple(map(int, found["input_lens"])),
        output_tokens=tuple(map(int, found["output_lens"])),
        errors=tuple(str(each or "") for each in found["errors"]),
        energy_j=energy,
        compilations=compiled,
    )


if __name__ == "__main__":
    sys.exit(answer_request(LoadRequest, sys.argv[1:], send))
