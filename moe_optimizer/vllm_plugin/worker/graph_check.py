"""Compares the first replays of each of vLLM's CUDA graphs with the same step computed without a graph.

The canary chooses the inputs of single layers; vLLM's graphs hold the whole model, and no layer's inputs can be chosen.
But a step can be computed twice: it writes the same keys and values into the same slots of the cache. So where a graph
is replayed for the first time since the start, or since the weights changed, the model runs once more on the same
inputs and metadata, without the graph, with the same kernels and the same padding. What the graph gave is compared
with that, row by row. The warm-up replays most graphs before the server is ready; the others are compared when a
request first uses them.

The ranks of a model replay the same graphs in the same order and wait for each other in every layer. So with several
of them how often a step is computed depends on the graph and on the step's rows alone, and never on what a rank finds:
twice beside each replay, for what two runs differ by. One rank stops at a replay that is right.

Runs do differ where a graph is larger than its step. Nothing defines what the rows behind the step's hold, and they
choose experts too; our kernel for few tokens cuts the sum of a token's experts by how many experts the step has, so the
last bits of all rows depend on all. Behind ten layers that is a hundredth of a row, and rows differ in one run and not
in the next (seen with gpt-oss's layers on an H200, with 3 rows in 4 and 5 to 7 in 8).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.proof.record import COMPARED_REPLAYS, PADDED_REPLAYS
from moe_optimizer.vllm_plugin.experts.canary import failed, our_layers
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession
from moe_optimizer.vllm_plugin.worker.captured_graphs import captured_graphs

logger = get_logger(__name__)
_TOLERANCE = 1e-3
"""Chosen: relative difference of a row of hidden states, in the middle of the rows. The kernels are the same, so right
graphs differ by nothing, or by what two runs without a graph differ by."""
_OF_PADDED = 0.05
"""Chosen: the same where some of the graph's rows are no request's, as no two runs need show what those change."""
_NOISE = 4.0
"""Chosen: a graph must differ by so many times what the row that differs most does in two runs without it, in each of
the replays compared."""
_WRONG = 0.5
"""Chosen: no rounding changes half of the rows by so much, whatever one row does whose experts are others."""


@dataclass(slots=True)
class _Replays:
    """Replays of one graph, beside the same steps without it."""

    tolerance: float
    noise: float = 0.0
    """By how much two of those steps differ at most, in the row that differs most."""
    differences: list[float] = field(default_factory=list)
    """Of each replay; not a number where the step without the graph gave none."""

    @property
    def off(self) -> bool:
        """Whether every replay is off."""
        return all(each > max(self.tolerance, min(_NOISE * self.noise, _WRONG)) for each in self.differences)


@dataclass(slots=True)
class _Compared:
    """What is known of one graph."""

    full: _Replays = field(default_factory=lambda: _Replays(_TOLERANCE))
    """Those whose rows are all requests'. They tell more: two of them decide, whatever the others were."""
    padded: _Replays = field(default_factory=lambda: _Replays(_OF_PADDED))
    settled: bool = False
    """Whether a replay was right, and no other rank waits for more."""

    @property
    def by_full(self) -> bool:
        """Whether enough replays without padding were compared to decide."""
        return len(self.full.differences) == COMPARED_REPLAYS

    @property
    def decided(self) -> bool:
        """Whether enough replays were compared, as far as there were any."""
        return self.settled or self.by_full or len(self.padded.differences) == PADDED_REPLAYS

    @property
    def deciding(self) -> list[float]:
        """By how much those were off that decide."""
        return self.full.differences if self.by_full else self.full.differences + self.padded.differences

    @property
    def wrong(self) -> bool:
        """Whether every one of those was off."""
        return self.full.off and (self.by_full or self.padded.off)

    @property
    def passed(self) -> bool:
        """Whether enough replays were compared with numbers, and one was right."""
        return self.decided and not self.wrong and not any(map(math.isnan, self.deciding))

    def is_due(self, *, padded: bool) -> bool:
        """Return whether a replay is to be compared. It is a matter of the steps' rows alone, unless one settled it."""
        if self.settled or self.by_full:
            return False
        return not padded or len(self.padded.differences) < PADDED_REPLAYS


class GraphCheck:
    """The comparison of one worker's graphs.

    Args:
        session: this process's.
        worker: vLLM's, with its model loaded.
    """

    def __init__(self, session: PluginSession, worker: Any) -> None:
        self._session = session
        self._worker = worker
        self._alone = worker.vllm_config.parallel_config.world_size == 1
        self._armed = False
        self._ours = False
        self._when = ""
        self._why_not = ""
        self._rows = 0
        self._compared: dict[Hashable, _Compared] = {}

    def watch(self) -> None:
        """Wrap what replays graphs. To be called before vLLM captures them."""
        self._why_not = _why_not(self._worker)
        if self._why_not:
            return
        runner = self._worker.model_runner
        try:
            self._watch_steps(runner)
            if hasattr(runner, "cudagraph_dispatcher"):
                runner._model_forward = self._watched(runner._model_forward)
            elif runner.cudagraph_manager is not None:
                self._watch_manager(runner.cudagraph_manager)
        except AttributeError as error:
            self._why_not = f"this vLLM replays them elsewhere: {described(error)}"

    def begin(self, when: str) -> None:
        """Compare each graph at its next replay.

        Args:
            when: for the proof, for example "after a reload".
        """
        self._armed, self._when = not self._why_not, when
        self._compared.clear()
        self._ours = any(True for _ in our_layers(self._worker.model_runner.get_model()))
        if self._why_not:
            self._say(f"vLLM's graphs not compared: {self._why_not}")

    def _watch_steps(self, runner: Any) -> None:
        execute = runner.execute_model

        @functools.wraps(execute)
        def watched(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            self._rows = scheduler_output.total_num_scheduled_tokens
            return execute(scheduler_output, *arguments, **named)

        runner.execute_model = watched

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that runs in vLLM's forward context, which says whether it replays a graph."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        @functools.wraps(forward)
        def watched(*arguments: Any, **named: Any) -> Any:
            result = forward(*arguments, **named)
            context = get_forward_context()
            graph = (context.cudagraph_runtime_mode, context.batch_descriptor)
            if graph[0] == CUDAGraphMode.NONE or not self._due(graph) or _embedded(*arguments, **named):
                return result

            def plain() -> Any:
                context.cudagraph_runtime_mode = CUDAGraphMode.NONE
                try:
                    return forward(*arguments, **named)
                finally:
                    context.cudagraph_runtime_mode = graph[0]

            self._compare(graph, result, plain)
            return result

        return watched

    def _watch_manager(self, manager: Any) -> None:
        """Watch the graphs of the runner that vLLM calls V2. It replays them without a context; what it captures reads
        the buffers of a step, so it is kept, to be run without the graph.
        """
        from vllm.config import CUDAGraphMode

        run_fullgraph, capture = manager.run_fullgraph, manager.capture
        owner = next(each for each in type(manager).__mro__[1:] if "capture" in vars(each))
        forwards: dict[Hashable, Callable[[Any], None]] = {}

        @contextmanager
        def keeping_forwards() -> Iterator[None]:
            inherited = owner.capture

            def keeping(self: Any, create_forward_fn: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
                def create(graph: Hashable, *others: Any, **options: Any) -> Any:
                    made = create_forward_fn(graph, *others, **options)
                    if self is manager:
                        forwards[graph] = made
                    return made

                return inherited(self, create, *arguments, **named)

            owner.capture = keeping
            try:
                yield
            finally:
                owner.capture = inherited

        @functools.wraps(capture)
        def watched_capture(*arguments: Any, **named: Any) -> Any:
            with keeping_forwards():
                return capture(*arguments, **named)

        @functools.wraps(run_fullgraph)
        def watched_run(graph: Any) -> Any:
            result = run_fullgraph(graph)
            if not self._due(graph) or graph not in forwards:
                return result
            replayed = _hidden(result).clone()

            def plain() -> Any:
                forwards[graph](CUDAGraphMode.NONE)
                return result

            self._compare(graph, replayed, plain)
            _hidden(result).copy_(replayed)
            return result

        manager.capture, manager.run_fullgraph = watched_capture, watched_run
        # Graphs that break at eager operations read their context in a way of their own.
        if not manager.use_breakable_cg:
            manager.run_pw_graph = self._watched(manager.run_pw_graph)

    def _due(self, graph: Hashable) -> bool:
        return self._armed and self._seen(graph).is_due(padded=self._is_padded(graph))

    def _is_padded(self, graph: Any) -> bool:
        return self._rows < _tokens(graph)

    def _seen(self, graph: Hashable) -> _Compared:
        return self._compared.setdefault(graph, _Compared())

    def _compare(self, graph: Any, replayed: Any, plain: Callable[[], Any]) -> None:
        """Compare a replay with the same step without a graph.

        Args:
            graph: which one.
            replayed: what it gave.
            plain: computes the step without it.

        Raises:
            RequiredNotAppliedError: the graph is wrong, in several steps.
        """
        seen, padded = self._seen(graph), self._is_padded(graph)
        like_it = seen.padded if padded else seen.full
        kept = _hidden(replayed)[: self._rows].clone()
        try:
            with self._session.not_counting():
                computed = _hidden(plain())[: self._rows].clone()
                difference = _differences(kept, computed)[0]
                seen.settled = self._alone and difference <= _TOLERANCE
                if not seen.settled:
                    like_it.noise = max(like_it.noise, _differences(_hidden(plain())[: self._rows], computed)[1])
        except (AttributeError, TypeError) as error:
            self._armed, self._why_not = False, described(error)
            self._say(f"vLLM's graphs not compared: {self._why_not}")
            return
        like_it.differences.append(difference)
        if difference > _TOLERANCE:
            rows = f"{self._rows} of them requests'" if padded else "all requests'"
            logger.info("%s; %s", _found(graph, like_it.noise, difference), rows)
        if seen.decided and self._ours:
            self._judge(graph, seen)
        elif seen.decided and seen.wrong:
            logger.warning("vLLM's own kernels: %s", _of_least(graph, seen))

    def _judge(self, graph: Any, seen: _Compared) -> None:
        if seen.wrong:
            self._armed = False
            raise failed(self._session, self._when, _of_least(graph, seen))
        passed = [each for each in self._compared.values() if each.passed]
        if not passed:
            self._say("vLLM's graphs not compared: the same steps without them give hidden states that are not numbers")
            return
        off = max((each for seen in passed for each in seen.deciding if math.isfinite(each)), default=0.0)
        self._say(
            f"passed in {len(passed)} of {len(captured_graphs(self._worker))} of vLLM's graphs, beside the same steps "
            f"without them: off by {off:.1g} at most"
        )

    def _say(self, outcome: str) -> None:
        if self._ours:
            self._session.checked(EXPERTS_PASS, outcome, of="graphs")


def _why_not(worker: Any) -> str:
    """Return why a worker's steps cannot be computed twice; "" where they can."""
    config = worker.vllm_config
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        return "data parallelism: a replica without requests would not compute the step twice"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism: a stage changes what it gets in place"
    if getattr(parallel, "enable_dbo", False):
        return "dual-batch overlap"
    if config.kv_transfer_config is not None:
        return "a KV connector, which would save every layer twice"
    if config.model_config.is_hybrid or config.model_config.is_attention_free:
        return "layers of the model keep a state, which a step changes"
    return ""


def _embedded(*arguments: Any, inputs_embeds: Any = None, **_named: Any) -> bool:
    """Return whether a forward gets embeddings: a model may change them in place, so that a second run had others."""
    given = next((each for each in arguments if isinstance(each, dict)), {})
    return inputs_embeds is not None or given.get("inputs_embeds") is not None


def _hidden(output: Any) -> torch.Tensor:
    """Return the hidden states [tokens, H] of a forward's output, which may have others behind them."""
    return output[0] if isinstance(output, tuple) else output


def _differences(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the relative difference of two times the same rows [tokens, H], in the middle of them and the largest.

    Infinite where only `one` has numbers that are not finite; not a number where `other` has them: it says nothing.
    """
    if not bool(torch.isfinite(other).all()):
        return math.nan, math.nan
    if not bool(torch.isfinite(one).all()):
        return math.inf, math.inf
    sizes = other.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    of_rows = (one.float() - other.float()).norm(dim=-1) / sizes
    return float(of_rows.median()), float(of_rows.max())


def _found(graph: Any, noise: float, difference: float) -> str:
    return (
        f"vLLM's graph of {_tokens(graph)} tokens ({_mode(graph)}) gives other hidden states than the same step "
        f"without it, off by {difference:.2g} of their size; two steps without it by {noise:.2g} at most"
    )


def _of_least(graph: Any, seen: _Compared) -> str:
    """Return what was found in the replay that was off least."""
    noise = seen.full.noise if seen.by_full else max(seen.full.noise, seen.padded.noise)
    return _found(graph, noise, min(seen.deciding))


def _mode(graph: Any) -> str:
    """Return what is captured, in vLLM's word: FULL, or PIECEWISE without attention."""
    mode = graph[0] if type(graph) is tuple else getattr(graph, "cg_mode", None)
    return getattr(mode, "name", "FULL")


def _tokens(graph: Any) -> int:
    """Return for how many tokens a graph is, in the terms of either runner."""
    return (graph[-1] if type(graph) is tuple else graph).num_tokens
