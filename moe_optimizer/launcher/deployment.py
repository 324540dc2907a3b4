"""Builds the processes of one run: a server, or a group of servers and the router before them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping

from moe_optimizer import env
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.launcher.address import base_url, reserved, server_address
from moe_optimizer.launcher.command import check_plugin_visible, server_command, server_environment
from moe_optimizer.launcher.compile_caches import graph_cache
from moe_optimizer.launcher.http_client import ServerClient, api_key
from moe_optimizer.launcher.router import check_group_can_run, router_command, router_environment
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.launcher.service import START_GRACE_S, Service
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.server_group import RUN_DIR, ServerRole

KV_FOLDER = "kv"
"""Below the run folder: the files that a connector over a shared folder hands from server to server."""
STOP_MARGIN_S = 20.0
"""Chosen: on top of the drain; stopping engine and workers takes 5 s on the CPU build."""


class Deployment:
    """All processes that a plan asks for.

    One server has the run folder for itself. Servers of a group have a folder each below it, and the router, which
    listens where the plan says, has the run folder.

    Args:
        plan: what to serve.
        folder: of the run.
        restarts: times its processes ended unexpectedly in this run.
    """

    def __init__(self, plan: Plan, folder: RunFolder, *, restarts: int = 0) -> None:
        self._plan = plan
        self._restarts = restarts
        self.folder = folder
        self.router: Service | None = None
        if plan.group is None:
            self.servers = (_server(plan, folder, restarts),)
        else:
            self.servers = tuple(_server(plan, folder, restarts, role) for role in plan.group.servers)
            self.router = _router(plan, folder)

    @property
    def front(self) -> Service:
        """The service that takes requests."""
        return self.router or self.servers[0]

    @property
    def services(self) -> tuple[Service, ...]:
        """Everything that is started, the servers first."""
        return self.servers if self.router is None else (*self.servers, self.router)

    @property
    def _addresses(self) -> list[tuple[str, int]]:
        return [address for service in self.services for address in service.addresses]

    def check(self) -> None:
        """Refuse, before anything is started or written, what is known to fail.

        Raises:
            InputError, UnsupportedError: an address is taken, something that is needed is missing, or the plan is for
                several machines and needs more than one server's command on each.
        """
        # First: a group of several machines has addresses that stand for others.
        _check_machines(self._plan)
        check_group_can_run(self._plan)
        with reserved(self._addresses):
            pass
        check_plugin_visible(self._plan)
        self._plan.serve_args.drain_timeout_s()

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Reserve addresses and run folder for this run while the block lasts, and write the plan to the folder.

        Raises:
            InputError: one of them is in use, or the folder cannot be written.
        """
        with reserved(self._addresses), self.folder.locked():
            for service in self.services:
                service.folder.prepare(self._plan, restarts=self._restarts)
            with self.folder.scratch(KV_FOLDER) if self._hands_over else contextlib.nullcontext():
                yield

    @property
    def _hands_over(self) -> bool:
        """Whether servers exchange files in the run folder."""
        servers = () if self._plan.group is None else self._plan.group.servers
        return any(RUN_DIR in word for server in servers for word in server.serve_args.words)

    def stop(self, hurry: Callable[[], bool], *, drain: bool) -> None:
        """Stop everything that was started and wait until it is gone.

        The router stops first: it ends when its requests are answered, for which it needs the servers.

        Args:
            hurry: says whether to wait no longer.
            drain: there may be requests to finish.
        """
        grace_s = self._plan.serve_args.drain_timeout_s() + STOP_MARGIN_S if drain else START_GRACE_S
        if self.router is not None:
            self.router.stop(grace_s=grace_s, hurry=hurry)
        for server in self.servers:
            server.ask_to_stop()
        deadline = time.monotonic() + grace_s
        for server in self.servers:
            server.stop(grace_s=max(0.0, deadline - time.monotonic()), hurry=hurry)


def _check_machines(plan: Plan) -> None:
    """Refuse a plan for several machines but for a whole server on each, and for one that Ray takes to the others."""
    split = plan.parallelism
    over_all = split.pipeline_parallel_size == plan.num_nodes
    if plan.num_nodes == 1 or over_all or split.replicas == plan.num_nodes:
        return
    raise UnsupportedError(
        f"the plan is for {plan.num_nodes} machines, and each has commands of its own, which serve does not start",
        hint="moe-optimizer plan --render ray prints the commands of every machine, --render lws what a cluster takes",
    )


def _server(plan: Plan, run: RunFolder, restarts: int, role: ServerRole | None = None) -> Service:
    """Return the server for one role of a group; without a role, the plan's only server."""
    folder = run if role is None else RunFolder(run.path / role.name)
    arguments = plan.serve_args if role is None else role.serve_args
    command = server_command(plan, arguments)
    environment = {**server_environment(plan, folder.plan_path), env.RESTARTS: str(restarts)}
    if role is not None:
        # The plan's placeholder for the run folder stands only inside JSON.
        command = [word.replace(RUN_DIR, json.dumps(str(run.path))[1:-1]) for word in command]
        environment |= {
            **role.serve_env,
            **_visible_gpus(role.gpus, os.environ),
            **_graph_cache(plan, role, environment),
        }
    host, port = server_address(arguments)
    scheme = "https" if arguments.value("--ssl-certfile") else "http"
    return Service(
        title="server" if role is None else f"{role.name} server",
        addresses=((host, port),),
        command=command,
        environment=environment,
        folder=folder,
        client=ServerClient(base_url(host, port).replace("http", scheme, 1), api_key()),
        takes_user_arguments=True,
    )


def _router(plan: Plan, run: RunFolder) -> Service:
    assert plan.group is not None, "a router without a group"
    arguments = plan.group.router_args
    host, port = server_address(arguments)
    metrics_port = arguments.value("--prometheus-port")
    assert metrics_port is not None, f"the router would take its default port for metrics: {arguments}"
    return Service(
        title="router",
        addresses=((host, port), ("127.0.0.1", int(metrics_port))),
        command=router_command(arguments),
        environment=router_environment(run.plan_path),
        folder=run,
        client=ServerClient(base_url(host, port)),
        takes_user_arguments=False,
    )


def _graph_cache(plan: Plan, role: ServerRole, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that keeps compiled graphs of a group's servers apart; the first has the folder of one."""
    assert plan.group is not None, "a role without a group"
    return {} if role is plan.group.servers[0] else graph_cache(role.name, environ)


def _visible_gpus(gpus: tuple[int, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that restricts a server to its own of the GPUs that this process may use."""
    if not gpus:
        return {}
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] if gpu < len(visible) else str(gpu) for gpu in gpus)}
