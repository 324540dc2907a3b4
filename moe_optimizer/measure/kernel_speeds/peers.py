"""Times vLLM's other MoE backends beside the one that computes beside ours, on layers that are measured anyway."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from moe_optimizer.errors import described
from moe_optimizer.measure.kernel_speeds.schedule import peers_in_the_race
from moe_optimizer.measure.kernel_speeds.timing import sampler_of, timed
from moe_optimizer.specs.kernel_speeds import STOCK, TokenSpeeds

if TYPE_CHECKING:
    from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer
    from moe_optimizer.measure.kernel_speeds.measured_sides import MakeCall
    from moe_optimizer.measure.kernel_speeds.vllm_backends import Backends

_CALLS = 8
_ENDED = "it ended the measuring process"


@dataclasses.dataclass
class Compared:
    """What is known of vLLM's other backends for one question."""

    backend: str = ""
    """The one that vLLM takes by itself, once all are compared."""
    unavailable: dict[str, str] = dataclasses.field(default_factory=dict)


class Peers:
    """vLLM's other backends on the layers of one question.

    Args:
        layers: that take turns.
        compared: of an earlier measurement that is gone on with; brought up to date.
        write: keeps what is known so far: a backend that ends this process is not tried at the next start.
    """

    def __init__(self, layers: Sequence[MeasuredLayer], compared: Compared, write: Callable[[], None]) -> None:
        from moe_optimizer.measure.kernel_speeds.vllm_backends import backends_for

        self._layers = layers
        self._compared = compared
        self._write = write
        self._found: Backends = backends_for(layers[0])
        self._sides: dict[str, list[MakeCall]] = {}
        ended = {name: why for name, why in compared.unavailable.items() if has_ended(why)}
        compared.unavailable = dict(self._found.unavailable) | ended
        for name in self._found.usable:
            if name not in ended:
                self._guarded(name, "at its first call", functools.partial(self._make, name))

    def compare(self, rows: dict[int, TokenSpeeds], is_left: Callable[[], bool], deadline: float) -> None:
        """Add times to the rows, in the order in which they were measured, until all are there or no time is left.

        One that fails at some number of tokens is in no row: a server meets them all.
        """
        for tokens in tuple(rows):
            self._leave_out_unavailable(rows)
            row = rows[tokens]
            names = [
                name for name in peers_in_the_race(self._sides, rows, self._found.taken) if name not in row.peers_us
            ]
            if names and not is_left():
                return
            if names:
                times = self._timed(row, names, deadline)
                rows[tokens] = dataclasses.replace(row, peers_us={**row.peers_us, **times})
                self._leave_out_unavailable(rows)
                self._write()
        self._compared.backend = self._found.taken
        self._write()

    def _leave_out_unavailable(self, rows: dict[int, TokenSpeeds]) -> None:
        for tokens, row in rows.items():
            kept = {name: time for name, time in row.peers_us.items() if name not in self._compared.unavailable}
            rows[tokens] = dataclasses.replace(row, peers_us=kept)

    def _make(self, name: str) -> None:
        """Make the experts of a backend on each layer, and call them once."""
        from moe_optimizer.measure.kernel_speeds.vllm_backends import experts_of

        choice = self._found.usable[name]
        made = [layer.runner(experts_of(layer, choice)) for layer in self._layers]
        made[0](*self._layers[0].inputs(1, 0))()
        self._sides[name] = made

    def _guarded(self, name: str, when: str, call: Callable[[], object]) -> bool:
        """Call a backend's kernel; return whether it did not fail. While it runs, what is written says that it ended
        this process: so it has, if anybody reads it.

        Raises:
            Exception: the call's, where the GPU does not answer after it.
        """
        self._compared.unavailable[name] = f"{_ENDED} {when}"
        self._write()
        try:
            call()
            self._layers[0].synchronize()
        except Exception as error:  # noqa: BLE001 - whatever a kernel of vLLM's needs and has not
            # An illegal access stays with the process: every further call would fail in another backend's name.
            self._layers[0].synchronize()
            self._compared.unavailable[name] = described(error)
            self._sides.pop(name, None)
            return False
        del self._compared.unavailable[name]
        return True

    def _timed(self, row: TokenSpeeds, names: Sequence[str], deadline: float) -> Mapping[str, float]:
        """Return the times of these at the tokens of a row, on the scale of its time of vLLM's kernel: both are taken
        again in turns, so that a clock that has changed since changes nothing.
        """
        from moe_optimizer.measure.kernel_speeds.measured_sides import sides_for

        stock = [sides_for(layer, ())[STOCK] for layer in self._layers]
        sides = {STOCK: stock} | {name: self._sides[name] for name in names}
        count, device = len(self._layers), self._layers[0].device
        inputs = [self._layers[index % count].inputs(row.tokens, index) for index in range(_CALLS)]
        calls = {
            name: [made[index % count](*given) for index, given in enumerate(inputs)] for name, made in sides.items()
        }
        for name in names:
            alone = {name: calls[name]}
            if not self._guarded(name, f"at {row.tokens} tokens", lambda alone=alone: sampler_of(alone, device)):
                del calls[name]
        found = timed(calls, device, deadline)
        times = {**found.first_us, **found.times_us}
        return {name: round(time * row.stock_us / times[STOCK], 3) for name, time in times.items() if name != STOCK}


def has_ended(why: str) -> bool:
    """Return whether a backend is not available because its kernel ended a measuring process."""
    return why.startswith(_ENDED)
