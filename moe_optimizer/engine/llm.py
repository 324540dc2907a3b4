"""`LLM`: generate for a list of prompts, and wait."""

import time
from collections.abc import Sequence
from itertools import count
from typing import Any, cast

from moe_optimizer.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.llm_engine import LLMEngine, Prompt
from moe_optimizer.engine.outputs import RequestOutput
from moe_optimizer.engine.sampling_params import RequestOutputKind, SamplingParams
from moe_optimizer.engine.tokenizer import chat_text, generation_defaults
from moe_optimizer.errors import InputError

Message = dict[str, Any]
_FINAL_ONLY = {"output_kind": RequestOutputKind.FINAL_ONLY}


class LLM:
    """An engine for offline use, with the arguments of `EngineArgs`."""

    def __init__(self, model: str, **arguments: Any) -> None:
        self.llm_engine = LLMEngine(EngineArgs(model=model, **arguments))
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return the outputs, in the order of the prompts.

        Prompts are text or token ids. `sampling_params` are for all of them, or one for each; None is
        `get_default_sampling_params`. Of `priority`, lower is served first.

        Raises:
            InputError: a prompt or a parameter is wrong; nothing is computed then.
        """
        listed = several(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.get_default_sampling_params()] * len(listed)
        priorities = [0] * len(listed) if priority is None else priority
        for name, values in (("sampling_params", sampling_params), ("priority", priorities)):
            if not isinstance(values, Sequence) or len(values) != len(listed):
                raise InputError(f"{name}: got {values!r}, expected one for each of {len(listed)} prompts")
        if not all(isinstance(each, SamplingParams) for each in sampling_params):
            raise InputError(f"sampling_params: got {sampling_params!r}, expected SamplingParams")
        groups = [
            self.llm_engine.make_group(str(next(self._ids)), prompt, each.model_copy(update=_FINAL_ONLY), number)
            for prompt, each, number in zip(listed, sampling_params, priorities, strict=True)
        ]
        try:
            for group in groups:
                self.llm_engine.add_group(group)
            outputs = self._run(len(groups), use_tqdm=use_tqdm)
        except BaseException:
            for group in groups:
                self.llm_engine.abort_request(group.request_id)
            raise
        return [outputs[group.request_id] for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Return the answers to one conversation, or to several, through the model's chat template."""
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InputError(f"messages: got {messages!r}, expected a list of messages, or of conversations")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        texts = [chat_text(self.llm_engine.tokenizer, each, **template_arguments) for each in conversations]
        prompts = [self.llm_engine.encode(each, add_special_tokens=False) for each in texts]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the likeliest outputs of each prompt, the best first."""
        if not isinstance(params, BeamSearchParams):
            raise InputError(f"params: got {params!r}, expected BeamSearchParams")
        return beam_search(self.llm_engine, several(prompts), params)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers."""
        if self.llm_engine.tokenizer is None:
            raise InputError("tokenizer: got none with skip_tokenizer_init=True, expected one")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return default_sampling_params(self.llm_engine)

    def _run(self, total: int, *, use_tqdm: bool) -> dict[str, RequestOutput]:
        from tqdm import tqdm

        outputs, num_tokens, started = dict[str, RequestOutput](), 0, time.perf_counter()
        with tqdm(total=total, desc="Generating", unit="req", disable=not use_tqdm) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    outputs[output.request_id] = output
                    num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
                    bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - started):.0f} tok/s", refresh=False)
                    bar.update()
        return outputs


def default_sampling_params(engine: LLMEngine) -> SamplingParams:
    """Return the parameters that the model's generation_config.json recommends."""
    defaults = generation_defaults(engine.config.folder)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: defaults[name] for name in names if defaults.get(name) is not None}
    if defaults.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingParams(**found)


def several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as several."""
    many = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    one = not many or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [cast(Prompt, prompts)] if one else list(cast(Sequence[Prompt], prompts))
