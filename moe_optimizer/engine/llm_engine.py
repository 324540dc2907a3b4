"""`LLMEngine`: requests in, one step at a time, outputs out."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import Any, TypedDict

from moe_optimizer.engine.block_manager import BlockManager
from moe_optimizer.engine.engine_args import EngineArgs, EngineConfig
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.output_processor import OutputProcessor
from moe_optimizer.engine.outputs import RequestOutput, SampledToken
from moe_optimizer.engine.protocols import Executor, Sampler
from moe_optimizer.engine.protocols import Scheduler as SchedulerProtocol
from moe_optimizer.engine.sampling_params import SamplingParams
from moe_optimizer.engine.scheduler import Scheduler
from moe_optimizer.engine.sequence import Sequence, SequenceGroup
from moe_optimizer.engine.tokenizer import end_token_ids, load_tokenizer
from moe_optimizer.errors import InputError


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


Prompt = str | Sequences[int] | TokensPrompt


class LLMEngine:
    """Holds the requests under way. Not thread-safe: `AsyncLLM` runs it in a thread of its own.

    Args:
        args: what the user asks for.
        executor: in place of a `ModelRunner`.
        scheduler: in place of a `Scheduler`, with its block manager.
        sampler: in place of a `TorchSampler`.

    Raises:
        MoeOptimizerError: the model cannot be loaded, or does not fit.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        executor: Executor | None = None,
        scheduler: SchedulerProtocol | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.config = config = EngineConfig.resolve(args)
        self.executor = executor or ModelRunner(config, sampler)
        size = self.executor.cache_size
        self.max_model_len = size.max_model_len
        self.scheduler = scheduler or Scheduler(
            BlockManager(
                size.num_blocks,
                num_host_blocks=size.num_host_blocks,
                block_size=args.block_size,
                prefix_caching=args.enable_prefix_caching,
            ),
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            chunked_prefill=args.enable_chunked_prefill,
            swap=size.num_host_blocks > 0,
        )
        self.tokenizer = None if config.tokenizer_folder is None else load_tokenizer(config.tokenizer_folder)
        self.outputs = OutputProcessor(self.tokenizer, self.max_model_len)
        self.groups: dict[str, SequenceGroup] = {}
        self._eos_ids = end_token_ids(config.hf_config, config.folder, self.tokenizer)
        self._num_requests = 0

    def step(self) -> list[RequestOutput]:
        """Compute one batch of tokens; return what became of the requests in it."""
        step = self.scheduler.schedule()
        tokens = self.executor.execute(step)
        self.scheduler.commit(step)
        return self._accept(step.sampled, tokens)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Let a request wait for its turn; those of lower `priority` numbers go first.

        Raises:
            InputError: the prompt is empty, too long, or has a token that the model does not know; the request id is
                in use; or an argument needs a tokenizer and there is none.
        """
        params = params or SamplingParams()
        if request_id in self.groups:
            raise InputError(f"request_id: got {request_id!r}, which is in use, expected a new one")
        text, token_ids = self._tokenized(prompt)
        if params.stop and self.tokenizer is None:
            raise InputError("stop: got strings without a tokenizer, expected stop_token_ids")
        group = SequenceGroup(request_id, text, token_ids, params, priority, self._num_requests)
        group.end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        self._num_requests += 1
        self.groups[request_id] = group
        self.scheduler.add(group.sequences[0])

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and free what it holds; return its last output, None if there is no such request."""
        group = self.groups.pop(request_id, None)
        if group is None:
            return None
        for sequence in group.sequences:
            if not sequence.finished:
                sequence.finish_reason = "abort"
                self.scheduler.finish(sequence)
        return self.outputs.output(group)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to compute."""
        return self.scheduler.has_unfinished

    def check_integrity(self) -> None:
        """Assert that the block manager's books are right."""
        self.scheduler.blocks.check_integrity(each for group in self.groups.values() for each in group.sequences)

    def _accept(self, sequences: list[Sequence], tokens: list[SampledToken]) -> list[RequestOutput]:
        groups: dict[str, SequenceGroup] = {}
        for sequence, token in zip(sequences, tokens, strict=True):
            group = sequence.group
            if not group.forked:
                self._fork(group)
            self.outputs.accept(sequence, token)
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
            groups[group.request_id] = group
        return [output for group in groups.values() if (output := self._output(group)) is not None]

    def _fork(self, group: SequenceGroup) -> None:
        """Start the samples behind the first, whose prompt is computed now."""
        first, *others = group.sequences
        for other in others:
            self.scheduler.fork(first, other)
        group.forked = True

    def _output(self, group: SequenceGroup) -> RequestOutput | None:
        if group.finished:
            del self.groups[group.request_id]
        return self.outputs.output(group)

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("prompt: got text without a tokenizer, expected token ids")
            return prompt, self._checked(self.tokenizer.encode(prompt))
        token_ids: Any = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        return None, self._checked(list(token_ids))

    def _checked(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise InputError("prompt: got no tokens, expected at least one")
        if len(token_ids) >= self.max_model_len:
            raise InputError(
                f"prompt: got {len(token_ids)} tokens, expected fewer than {self.max_model_len} (max_model_len): "
                "there must be room for one more",
                hint="shorten the prompt, or raise max_model_len up to what the model and the KV cache allow",
            )
        vocab_size = self.config.hf_config.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InputError(f"prompt: got token {token_id!r}, expected an integer from 0 to {vocab_size - 1}")
        return token_ids
