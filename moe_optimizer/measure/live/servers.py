"""Finds the servers that a URL or a run folder names, and asks them for their metrics."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError, ServerFailedError
from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.http_client import ServerClient, api_key
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.measure.live.moment import RUNNING, Moment, read_moment
from moe_optimizer.plan.plan import PLAN_FILE, Plan

_TIMEOUT_S = 10.0
"""Chosen: a page takes milliseconds, but seconds on a machine that does much else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveServer:
    """A server whose metrics can be asked for."""

    name: str
    """Such as "server" or "prefill server"."""
    client: ServerClient
    plan: str = ""
    """Digest of the plan that it serves; "": any."""

    def moment(self) -> Moment:
        """Ask for the metrics.

        Raises:
            ServerFailedError: the server does not answer.
            InputError: what answers is no vLLM server, or serves another plan.
        """
        url = self.client.base_url
        try:
            page = self.client.metrics(timeout_s=_TIMEOUT_S)
            moment = read_moment(page, seconds=time.monotonic())
        except OSError as error:
            raise ServerFailedError(f"{url}/metrics: {error}", hint="is the server running?") from None
        except (ValueError, KeyError) as error:
            raise InputError(f"{url}/metrics: not a metrics page: {error}") from None
        if RUNNING not in moment.totals:
            raise InputError(f"{url}/metrics: got no metrics of vLLM", hint="is this the URL of a vLLM server?")
        if self.plan and moment.plan not in ("", self.plan):
            raise InputError(
                f"{url}: serves plan {moment.plan}, expected {self.plan}",
                hint="another server has this address by now: give its URL or its run folder",
            )
        return moment


def servers_of(source: str) -> Sequence[LiveServer]:
    """Return the servers of a run folder, or the one at a URL.

    Raises:
        InputError: it is neither.
    """
    if source.startswith(("http://", "https://")):
        try:
            host = urllib.parse.urlsplit(source).hostname
        except ValueError:  # a bracket without its other one
            host = None
        if not host:
            raise InputError(f"{source}: not a URL, expected for example http://127.0.0.1:8000")
        base = source.rstrip("/").removesuffix("/metrics")
        return (LiveServer(name="server", client=ServerClient(base, api_key())),)
    folder = Path(source)
    if not (folder / PLAN_FILE).is_file():
        raise InputError(f"{source}: no {PLAN_FILE} in it", hint="give the URL of a server, or the run folder of serve")
    plan = Plan.load(folder / PLAN_FILE)
    servers = Deployment(plan, RunFolder(folder)).servers
    return tuple(LiveServer(name=each.title, client=each.client, plan=plan.digest) for each in servers)
