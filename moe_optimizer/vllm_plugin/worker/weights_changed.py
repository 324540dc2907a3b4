"""Tells the experts of a worker when vLLM has changed their weights, and has them tried before they serve.

vLLM has no callback for any of it. Its worker's own methods are wrapped on the object that serves, with whatever
arguments they have: nothing is replaced, and nothing of their source is relied on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_optimizer.log import get_logger
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession
from moe_optimizer.vllm_plugin.worker.rearrangements import Rearrangements

if TYPE_CHECKING:
    from moe_optimizer.vllm_plugin.worker.graph_check import GraphCheck

logger = get_logger(__name__)

_STARTED = {"compile_or_warm_up_model": "before ready"}
_CHANGED = {"reload_weights": "after a reload", "finish_weight_update": "after a weight update"}
"""Methods of a worker -> when the canary runs, for the proof."""
_DISCARDING_LEVEL = 2
"""Of vLLM's sleep: the weights are gone until they are loaded again."""


class WatchedWorker:
    """A worker whose experts are tried before it is ready and whenever their weights may have changed.

    Args:
        session: this process's.
        worker: vLLM's, with its model loaded.
    """

    def __init__(self, session: PluginSession, worker: Any) -> None:
        self._session = session
        self._worker = worker
        self._discarded = False
        self._rearrangements = Rearrangements(session, worker)
        self._graphs: GraphCheck | None = None

    def watch(self) -> None:
        """Wrap the worker's methods. One that it lacks is not watched: nobody can call it."""
        for name, when in _STARTED.items():
            self._wrap(name, before=self._starts, after=functools.partial(self._started, when))
        for name, when in _CHANGED.items():
            before = self._refuse_kernel_format if name == "reload_weights" else None
            self._wrap(name, before=before, after=functools.partial(self._loaded_again, when))
        self._wrap("start_weight_update", before=self._refuse_update)
        self._wrap("sleep", before=self._sleeps)
        self._wrap("wake_up", after=self._woke)
        self._rearrangements.watch()

    def _starts(self, *_arguments: Any, **_named: Any) -> None:
        # Before vLLM captures its graphs. On a CPU it has none.
        from vllm.platforms import current_platform

        if current_platform.is_cuda() and not self._worker.vllm_config.model_config.enforce_eager:
            from moe_optimizer.vllm_plugin.worker.graph_check import GraphCheck

            self._graphs = GraphCheck(self._session, self._worker)
            self._graphs.watch()

    def _started(self, when: str, *_arguments: Any, **_named: Any) -> None:
        # Before the check, which may end one rank alone: all take part in it.
        self._rearrangements.model_loaded()
        self._check(when)

    def _check(self, when: str) -> None:
        """Run the canary.

        Raises:
            RequiredNotAppliedError: a layer is wrong.
        """
        from moe_optimizer.vllm_plugin.experts.canary import check_model
        from moe_optimizer.vllm_plugin.worker.captured_graphs import largest_known_graph

        # Without the pass, this rank only takes part in what all do together.
        if EXPERTS_PASS in self._session.proof.passes:
            check_model(
                self._session,
                self._worker.model_runner.get_model(),
                when=when,
                largest=self._worker.vllm_config.scheduler_config.max_num_batched_tokens,
                graphs=largest_known_graph(self._worker),
            )
        if self._graphs is not None:
            self._graphs.begin(when)

    def _loaded_again(self, when: str, *_arguments: Any, **_named: Any) -> None:
        self._rearrangements.weights_changed()
        self._weights_changed(when)

    def _weights_changed(self, when: str) -> None:
        from moe_optimizer.vllm_plugin.experts.canary import our_layers

        self._discarded = False
        for layer, experts in our_layers(self._worker.model_runner.get_model()):
            experts.weights_changed(layer)
        self._check(when)

    def _sleeps(self, level: int = 1, *_arguments: Any, **_named: Any) -> None:
        self._discarded = self._discarded or level >= _DISCARDING_LEVEL

    def _woke(self, tags: Any = None) -> None:
        # vLLM may be asked to wake the cache alone.
        if not self._discarded and (tags is None or "weights" in tags):
            self._weights_changed("after waking up")

    def _refuse_kernel_format(self, *arguments: Any, is_checkpoint_format: bool = True, **_named: Any) -> None:
        # vLLM's third argument, where it is given by position.
        if not is_checkpoint_format or (len(arguments) > 2 and not arguments[2]):
            self._refuse_update()

    def _refuse_update(self, *_arguments: Any, **_named: Any) -> None:
        """Refuse weights that would be copied into converted layers as they come.

        Raises:
            InputError: a layer is converted.
        """
        from moe_optimizer.vllm_plugin.experts.canary import our_layers
        from moe_optimizer.vllm_plugin.experts.converted_layer import is_converted, refuse_kernel_format

        converted = sum(is_converted(layer) for layer, _ in our_layers(self._worker.model_runner.get_model()))
        if converted:
            raise refuse_kernel_format(converted)

    def _wrap(
        self, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
    ) -> None:
        method = getattr(self._worker, name, None)
        if method is None:
            return

        @functools.wraps(method)
        def watched(*arguments: Any, **named: Any) -> Any:
            if before is not None:
                before(*arguments, **named)
            result = method(*arguments, **named)
            if after is not None:
                after(*arguments, **named)
            return result

        setattr(self._worker, name, watched)


def watch_experts(session: PluginSession, worker: Any) -> None:
    """Watch a worker in whose model our experts may be, or those of other ranks: what all do together all must do.

    Where a plan is made in each rank, it may have failed in this one alone.
    """
    if session.wanted(EXPERTS_PASS) is not None or session.plans_itself:
        WatchedWorker(session, worker).watch()
