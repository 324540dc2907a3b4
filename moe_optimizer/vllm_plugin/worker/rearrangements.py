"""Tries the experts of a worker after vLLM's load balancer (EPLB) has moved them between GPUs.

The balancer copies weights and scales into the rows that kernels read in place, and then changes the maps by which
tokens find them. After each rearrangement one layer, in turn, is looked at before the next forward:

- each of its experts is the one that the map says: a digest of its weights, compared with those of the loaded model;
- both maps of vLLM, from experts to slots and back, say the same;
- our kernels compute what the weights say, with the bounds of the canary before ready.

The balancer's own `step` is wrapped on the object that serves; nothing of its source is relied on but a few attributes,
without which the proof says "not run".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession

if TYPE_CHECKING:
    import torch

    from moe_optimizer.vllm_plugin.experts.self_check import CheckResult

logger = get_logger(__name__)

_WHEN = "after a rearrangement"
_KNOWN = ("step", "model_states", "is_async", "expert_rearrangement_step")
"""What is asked of the balancer itself."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The experts of one model as they were loaded."""

    logical: torch.Tensor
    """Expert in each physical slot of each layer, over all ranks: int64 [L, P]."""
    digests: torch.Tensor
    """int64 [L, P]; `UNKNOWN` where our kernels do not serve the layer."""

    def misplaced(self, index: int, logical: torch.Tensor, digests: torch.Tensor) -> str:
        """Return which expert of a layer is not in the slot where it should be now; "" where all are.

        Args:
            index: of the layer.
            logical: the expert that each slot of all ranks should hold now [P].
            digests: of what this rank's slots hold.
        """
        from moe_optimizer.vllm_plugin.experts.expert_digests import UNKNOWN

        slots = _slots(len(digests))
        for slot, expert, found in zip(
            range(slots.start, slots.stop), logical[slots].tolist(), digests.tolist(), strict=True
        ):
            # Replicas may differ: dummy weights are random in each slot.
            loaded = set(self.digests[index][self.logical[index] == expert].tolist())
            if loaded and UNKNOWN not in loaded and found not in loaded:
                return f"slot {slot} should hold expert {expert}, and its weights are not those that were loaded for it"
        return ""


class Rearrangements:
    """The balancer of one worker, whose layers are tried when it has moved their experts.

    Args:
        session: this process's.
        worker: vLLM's, with its model loaded.
    """

    def __init__(self, session: PluginSession, worker: Any) -> None:
        self._session = session
        self._worker = worker
        self._balancer: Any = getattr(worker.model_runner, "eplb_state", None)
        self._loaded: dict[str, _Loaded] = {}
        self._layers: dict[str, dict[int, Any]] = {}
        self._turn = 0
        self._checks = 0
        self._worst = 0.0

    def watch(self) -> None:
        """Wrap the balancer's step, if this worker has one."""
        if self._balancer is None:
            return
        unknown = [name for name in _KNOWN if not hasattr(self._balancer, name)]
        if unknown:
            self._balancer = None
            logger.warning("no canary runs %s: vLLM's balancer has no %s", _WHEN, ", ".join(unknown))
            return
        step = self._balancer.step

        @functools.wraps(step)
        def watched(is_dummy: bool = False, is_profile: bool = False, **named: Any) -> Any:
            awaited = self._awaited()
            result = step(is_dummy, is_profile, **named)
            if not is_profile and self._moved(awaited):
                self._check()
            return result

        self._balancer.step = watched

    def model_loaded(self) -> None:
        """Note the digests of all experts. Every rank of the expert parallel group must call it at the same time.

        A rank that cannot read its own takes part all the same: the others wait for it.
        """
        import torch

        if self._balancer is None or self._worker.vllm_config.parallel_config.enable_elastic_ep:
            return
        for key, state in self._balancer.model_states.items():
            logical = state.physical_to_logical_map.cpu().long()
            digests = torch.zeros(logical.shape, dtype=torch.int64, device="cpu")
            try:
                self._fill(key, digests)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
                digests.zero_()
                logger.warning("experts are not compared after a rearrangement: %s", described(error))
            # Over the CPU, whatever device vLLM builds its model on; each slot is filled by one rank.
            torch.distributed.all_reduce(digests, group=_group().cpu_group)
            self._loaded[key] = _Loaded(logical.clone(), digests)

    def weights_changed(self) -> None:
        """Forget the digests: nothing says that all ranks change their weights at the same time."""
        self._loaded, self._layers = {}, {}

    def _fill(self, key: str, digests: torch.Tensor) -> None:
        for index, layer in self._served(key).items():
            local = self._digests(layer)
            digests[index, _slots(len(local))] = local

    @staticmethod
    def _digests(layer: Any) -> torch.Tensor:
        from moe_optimizer.vllm_plugin.experts.expert_digests import expert_digests

        return expert_digests(_experts(layer).stored_weights(layer)).cpu()

    def _served(self, key: str) -> dict[int, Any]:
        """Return the layers of a model that our kernels serve, by their place in the balancer's tables."""
        from moe_optimizer.vllm_plugin.experts.canary import our_layers

        if key not in self._layers:
            ours = {
                layer.w13_weight.data_ptr(): layer for layer, _ in our_layers(self._worker.model_runner.get_model())
            }
            found = {}
            for index, tensors in enumerate(self._balancer.model_states[key].model.expert_weights):
                here = next((ours[each.data_ptr()] for each in tensors if each.data_ptr() in ours), None)
                if here is not None:
                    found[index] = here
            self._layers[key] = found
        return self._layers[key]

    def _awaited(self) -> dict[str, Any]:
        """Return the results that wait to be moved into a layer, where the balancer moves one layer in a step."""
        states = self._balancer.model_states if self._balancer.is_async else {}
        return {key: state.pending_result for key, state in states.items() if state.pending_result is not None}

    def _moved(self, awaited: Mapping[str, Any]) -> bool:
        """Return whether the layer whose turn it is has just been moved, with all others or alone."""
        if not self._balancer.is_async:
            # A rearrangement begins the count anew, and every step adds one to it before.
            return self._balancer.expert_rearrangement_step == 0
        return any(
            self._balancer.model_states[key].pending_result is not result and self._place() == (key, result.layer_idx)
            for key, result in awaited.items()
        )

    def _place(self) -> tuple[str, int] | None:
        """Return model and index of the layer whose turn it is; None where our kernels serve none.

        From the last to the first: a balancer that moves them in order, one in a step, then meets one in its turn.
        """
        places = [(key, index) for key in self._balancer.model_states for index in self._served(key)]
        return places[-1 - self._turn % len(places)] if places else None

    def _check(self) -> None:
        """Try the layer whose turn it is.

        Raises:
            RequiredNotAppliedError: it is wrong.
        """
        from moe_optimizer.vllm_plugin.experts.canary import failed, not_run
        from moe_optimizer.vllm_plugin.experts.self_check import NotCheckedError

        try:
            place = self._place()
            if place is None:
                return
            result = self._outcome(*place)
        except NotCheckedError as error:
            not_run(self._session, _WHEN, str(error))
            return
        except Exception as error:  # noqa: BLE001 - vLLM is serving
            not_run(self._session, _WHEN, described(error))
            return
        self._turn += 1
        layer = self._served(place[0])[place[1]]
        name = str(getattr(layer, "layer_name", "")) or f"layer {place[1]}"
        if result.reason:
            raise failed(self._session, _WHEN, f"{name}: {result.reason}")
        self._checks += 1
        self._worst = max(self._worst, result.error)
        compared = "" if place[0] in self._loaded else ", not compared with the weights as loaded"
        self._session.checked(
            EXPERTS_PASS,
            f"passed after {self._checks} rearrangements: one layer each, the last {name}{compared}, "
            f"worst error {self._worst:.2f} of the allowed",
            of="rearrangements",
        )

    def _outcome(self, key: str, index: int) -> CheckResult:
        """Return what is found of one layer.

        Raises:
            NotCheckedError: it could not be tried.
        """
        from moe_optimizer.vllm_plugin.experts.canary import check_one
        from moe_optimizer.vllm_plugin.experts.self_check import CheckResult

        state, layer = self._balancer.model_states[key], self._served(key)[index]
        logical = state.physical_to_logical_map[index].cpu().long()
        why = _contradiction(logical, state.logical_to_physical_map[index], state.logical_replica_count[index])
        if not why and key in self._loaded:
            why = self._loaded[key].misplaced(index, logical, self._digests(layer))
        if why:
            return CheckResult(math.inf, why)
        largest = self._worker.vllm_config.scheduler_config.max_num_batched_tokens
        return check_one(self._session, layer, _experts(layer), largest=largest, turn=self._turn)


def _group() -> Any:
    from vllm.distributed import get_ep_group

    return get_ep_group()


def _slots(count: int) -> slice:
    """Return the physical slots of this rank, which has so many."""
    first = _group().rank_in_group * count
    return slice(first, first + count)


def _experts(layer: Any) -> Any:
    # Not kept: after an update of the weights vLLM makes them anew.
    return layer.quant_method.moe_kernel.fused_experts


def _contradiction(logical: torch.Tensor, slots: torch.Tensor, replicas: torch.Tensor) -> str:
    """Return where the map from experts to slots names a slot that holds another expert; "" nowhere.

    Args:
        logical: expert in each slot [P].
        slots: of each expert [E, at least its replicas].
        replicas: number of slots of each expert [E].
    """
    import torch

    slots, replicas = slots.cpu().long(), replicas.cpu().long()
    used = torch.arange(slots.shape[1], device="cpu") < replicas[:, None]
    experts, places = used.nonzero(as_tuple=True)
    wrong = logical[slots[experts, places]] != experts
    if not bool(wrong.any()):
        return ""
    first = int(wrong.nonzero()[0])
    expert, slot = int(experts[first]), int(slots[experts[first], places[first]])
    return f"tokens of expert {expert} are sent to slot {slot}, which holds expert {int(logical[slot])}"
