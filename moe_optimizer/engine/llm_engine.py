"""`LLMEngine`: requests in, one step at a time, outputs out."""

from collections import deque
from collections.abc import Sequence as Sequences
from itertools import count
from typing import Any

from moe_optimizer.engine import protocols
from moe_optimizer.engine.block_manager import BlockManager
from moe_optimizer.engine.engine_args import EngineArgs, EngineConfig
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.out_of_memory import out_of_memory_explained
from moe_optimizer.engine.output_processor import OutputProcessor
from moe_optimizer.engine.outputs import RequestOutput
from moe_optimizer.engine.parallel import ParallelExecutor
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.sampling_params import SamplingParams
from moe_optimizer.engine.scheduler import Scheduler
from moe_optimizer.engine.sequence import Sequence, SequenceGroup
from moe_optimizer.engine.tokenizer import end_token_ids, load_tokenizer
from moe_optimizer.errors import InputError

Prompt = str | Sequences[int] | dict[str, Any]
"""Text or token ids, or a dictionary with the one as `prompt` or the others as `prompt_token_ids`."""


class LLMEngine:
    """Holds the requests under way. Only `make_group` may be called from another thread than the rest.

    `executor`, `scheduler` with its block manager and `sampler` take the place of the engine's own.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        executor: protocols.Executor | None = None,
        scheduler: Scheduler | None = None,
        sampler: protocols.Sampler | None = None,
    ) -> None:
        self.config = config = EngineConfig.resolve(args)
        make_executor = ModelRunner if args.tensor_parallel_size == 1 else ParallelExecutor
        with out_of_memory_explained():
            self.executor = executor or make_executor(config, sampler)
        size, cache = self.executor.cache_size, args.kv_cache
        self.scheduler = scheduler or Scheduler(
            BlockManager(size.num_blocks, size.num_host_blocks, args.block_size, cache and args.enable_prefix_caching),
            max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens, kv_cache=cache,
            chunked_prefill=args.enable_chunked_prefill, continuous_batching=args.continuous_batching,
        )  # fmt: skip
        self.max_model_len = size.max_model_len
        self.tokenizer: Any = load_tokenizer(config.tokenizer_folder) if config.tokenizer_folder else None
        self._longest_text = size.max_model_len * max(map(len, self.tokenizer.get_vocab())) if self.tokenizer else 0
        self.outputs = OutputProcessor(self.tokenizer)
        self.groups: dict[str, SequenceGroup] = {}
        self.async_scheduling = config.async_scheduling
        self._launched: deque[tuple[list[Sequence], SampledTokens]] = deque()
        self.eos_ids = end_token_ids(config.hf_config, config.folder, self.tokenizer)
        self._arrivals = count()

    def step(self) -> list[RequestOutput]:
        """Launch a batch of tokens; return what became of it, or with asynchronous scheduling of the one before."""
        step = self.scheduler.schedule()
        with out_of_memory_explained():
            tokens = self.executor.launch(step)
        self.scheduler.commit(step)
        self._launched.append((step.sampled, tokens))
        outputs, num_under_way = [], 1 if self.async_scheduling else 0
        while len(self._launched) > num_under_way:
            outputs += self._accept(*self._launched.popleft())
        return outputs

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Let a request wait for its turn; those of lower `priority` numbers go first.

        Raises:
            InputError: as `make_group`, or the request id is in use.
        """
        if request_id in self.groups:
            raise InputError(f"request_id: got {request_id!r}, which is in use, expected a new one")
        self.add_group(self.make_group(request_id, prompt, params or SamplingParams(), priority))

    def make_group(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> SequenceGroup:
        """Return a request as the engine holds it.

        Raises:
            InputError: the prompt is empty or too long, a token is none of the model's, or an argument needs a
                tokenizer and there is none.
        """
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if not isinstance(prompt, Sequences) or isinstance(prompt, bytes):
            raise InputError(f"prompt: got {prompt!r}, expected text or token ids")
        if not isinstance(priority, int):
            raise InputError(f"priority: got {priority!r}, expected an integer")
        text = prompt if isinstance(prompt, str) else None
        if self.tokenizer is None and (text is not None or params.stop):
            raise InputError("prompt or stop: got text without a tokenizer, expected token ids")
        token_ids: list[Any] = list(prompt) if text is None else self.encode(text)
        self._check(token_ids, params.stop_token_ids)
        longest = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        return SequenceGroup(
            request_id=request_id, prompt=text, prompt_token_ids=token_ids, params=params,
            max_num_tokens=min(longest, self.max_model_len),
            end_token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids),
            priority=priority, arrival=next(self._arrivals),
        )  # fmt: skip

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the tokens of a text. One that is longer than the longest tokens together is not read at all."""
        if len(text) > (most := self._longest_text):
            raise InputError(f"prompt: got {len(text)} characters, expected at most {most} (max_model_len)")
        if any("\ud800" <= each <= "\udfff" for each in text):
            raise InputError("prompt: got a lone surrogate, expected text")
        return self.tokenizer.encode(text, verbose=False, **options)

    def add_group(self, group: SequenceGroup, *, parent: SequenceGroup | None = None) -> None:
        """Let a request of `make_group` wait for its turn, or go on from `parent`, which has all but its last token."""
        self.groups[group.request_id] = group
        if parent is None:
            self.scheduler.add(group.sequences[0])
        else:
            self.scheduler.fork(parent.sequences[0], group.sequences[0])

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

    def shutdown(self) -> None:
        if isinstance(self.executor, ParallelExecutor):
            self.executor.shutdown()

    def has_unfinished_requests(self) -> bool:
        return bool(self.groups)

    def check_integrity(self) -> None:
        """Assert that the block manager's books are right."""
        self.scheduler.blocks.check_integrity(each for group in self.groups.values() for each in group.sequences)

    def _accept(self, sequences: list[Sequence], tokens: SampledTokens) -> list[RequestOutput]:
        told: dict[str, SequenceGroup] = {}
        token_ids, logprobs = tokens.read()
        for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            if sequence.finished:
                # By an abort, or a token that was not known when this one was launched.
                continue
            group = sequence.group
            self.outputs.accept(sequence, token_id, logprobs.get(row))
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
            if sequence.finish_reason is not None or not group.params.final_only:
                told[group.request_id] = group
        outputs = [output for group in told.values() if (output := self.outputs.output(group)) is not None]
        for output in outputs:
            if output.finished:
                del self.groups[output.request_id]
        return outputs

    def _check(self, token_ids: list[Any], stop_token_ids: list[int]) -> None:
        vocab_size = self.config.hf_config.vocab_size
        if not 0 < len(token_ids) < self.max_model_len:
            raise InputError(
                f"prompt: got {len(token_ids)} tokens, expected at least 1 and fewer than {self.max_model_len} "
                "(max_model_len): there must be room for one more",
                hint="shorten the prompt, or raise max_model_len up to what the model and the KV cache allow",
            )
        for name, ids in (("prompt", token_ids), ("stop_token_ids", stop_token_ids)):
            for each in ids:
                if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < vocab_size:
                    raise InputError(f"{name}: got token {each!r}, expected an integer from 0 to {vocab_size - 1}")
