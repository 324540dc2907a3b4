"""Runs `moe-optimizer top`: shows what running servers do now, redrawn in place on a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.measuring_options import TopOptions
from moe_optimizer.cli.termination import clean_termination
from moe_optimizer.errors import ExitCode, InputError

if TYPE_CHECKING:
    from moe_optimizer.measure.live.activity import LiveActivity
    from moe_optimizer.measure.live.servers import LiveServer

_INTERVAL_S = 1.0
_HISTORY = 240
"""Chosen: intervals whose rates are kept for the curve; no terminal is wider."""


@takes(TopOptions)
def command(options: TopOptions) -> messages.Output | int:
    """Show live what a server does: tokens per second, times, cache, passes, experts.

    SOURCE is the URL of a vLLM server, or the run folder of serve. Without a terminal one interval is shown.
    """
    if not options.source:
        raise InputError("SOURCE: is missing", hint="give a URL or a run folder")
    from moe_optimizer.cli.top_view import rendered
    from moe_optimizer.measure.live.servers import servers_of

    servers = servers_of(options.source)
    live = not options.json and not options.once and messages.use_color(sys.stdout)
    if not live:
        shown = next(_intervals(servers, options.interval or _INTERVAL_S))
        return messages.Output(result=shown, render=lambda result: rendered(result, {}, width=messages.output_width()))
    _redraw(servers, options.interval or _INTERVAL_S)
    return ExitCode.OK


def _intervals(servers: Sequence[LiveServer], interval_s: float) -> Iterator[LiveActivity]:
    """Yield what the servers did in one interval after the other.

    Raises:
        ServerFailedError, InputError: one does not answer, or is no vLLM server.
    """
    from moe_optimizer.measure.live.activity import LiveActivity, ServerActivity, activity

    before = [server.moment() for server in servers]
    while True:
        time.sleep(interval_s)
        after = [server.moment() for server in servers]
        yield LiveActivity(
            servers=tuple(
                ServerActivity(name=server.name, url=server.client.base_url, activity=activity(then, now))
                for server, then, now in zip(servers, before, after, strict=True)
            )
        )
        before = after


def _redraw(servers: Sequence[LiveServer], interval_s: float) -> None:
    """Show interval after interval in the same place until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from moe_optimizer.cli.top_view import rendered

    history: dict[str, deque[float]] = {server.client.base_url: deque(maxlen=_HISTORY) for server in servers}
    console = Console()
    with clean_termination(), Live(Text("waiting for the first interval"), console=console, auto_refresh=False) as view:
        try:
            for shown in _intervals(servers, interval_s):
                for each in shown.servers:
                    history[each.url].append(each.activity.output_tokens_per_s)
                text = rendered(shown, history, width=messages.output_width())
                view.update(Text(text, no_wrap=True), refresh=True)
        except KeyboardInterrupt:
            # How everybody ends it: what was shown last stays, and nothing failed.
            return
