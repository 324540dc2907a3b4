"""Reads the expert load from the /metrics page of a running server."""

from __future__ import annotations

import http.client
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from datetime import UTC, datetime

from moe_optimizer.env import EXPERT_SERIES
from moe_optimizer.errors import InputError, ServerFailedError
from moe_optimizer.launcher.metrics_page import samples
from moe_optimizer.specs.expert_load import ExpertLoad, LayerLoad

TIMEOUT_S = 20.0
"""Chosen: for the whole page; vLLM's metrics come in milliseconds, or seconds on a machine that does much else."""
_MAX_BYTES = 1 << 26
"""Chosen: four times the page of a model of 100 layers with 1024 experts."""
_PREFIX = "moe_optimizer_expert_"


def read_metrics(url: str) -> ExpertLoad:
    """Return the expert load that the server at `url` shows.

    Raises:
        InputError: the URL is none, or the server shows no expert load.
        ServerFailedError: it does not answer.
    """
    base = url.rstrip("/").removesuffix("/metrics")
    try:
        host = urllib.parse.urlsplit(base).hostname
    except ValueError:  # a bracket without its other one
        host = None
    if not host:
        raise InputError(f"{url}: not a URL, expected for example http://127.0.0.1:8000")
    page: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()
    # In a thread, and without a time limit of the socket's own: that is for one read, and a page can come a byte at a
    # time. A thread that still reads when the command has its answer ends with the process.
    threading.Thread(target=_read_page, args=(f"{base}/metrics", page), daemon=True).start()
    try:
        text = page.get(timeout=TIMEOUT_S)
        if isinstance(text, Exception):
            raise text
    except queue.Empty:
        raise ServerFailedError(
            f"{base}/metrics: no whole answer within {TIMEOUT_S:g} s", hint="is it a vLLM server?"
        ) from None
    except urllib.error.HTTPError as error:
        raise InputError(f"{base}/metrics: got status {error.code}, expected a vLLM server's metrics") from None
    except (http.client.InvalidURL, ValueError) as error:
        raise InputError(f"{url}: not a URL: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerFailedError(f"{base}/metrics: no answer: {reason}", hint="is the server running?") from None
    return parse_metrics(text, origin=f"{base}/metrics")


def _read_page(url: str, page: queue.SimpleQueue[str | Exception]) -> None:
    """Put the text at `url` into `page`, or why there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url) as response:
            page.put(response.read(_MAX_BYTES).decode("utf-8", errors="replace"))
    except Exception as error:  # noqa: BLE001 - the reader raises it again
        page.put(error)


def parse_metrics(text: str, *, origin: str) -> ExpertLoad:
    """Return the expert load in a page of Prometheus' text format.

    Raises:
        InputError: the page has none, or not a whole one.
    """
    tokens: dict[int, dict[int, int]] = {}
    names: dict[int, str] = {}
    model, steps, since = "", 0, 0.0
    try:
        for sample in samples(text, _PREFIX):
            name, labels, value = sample.name.removeprefix(_PREFIX), sample.labels, sample.value
            model = labels.get("model_name", model)
            if name == "tokens_total":
                tokens.setdefault(int(labels["layer"]), {})[int(labels["expert"])] = int(value)
            elif name == "load_max_over_mean_ratio":
                names[int(labels["layer"])] = labels["name"]
            elif name == "load_steps_total":
                steps = int(value)
            elif name == "load_since_timestamp_seconds":
                since = value
        moment = datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds")
    except (KeyError, ValueError, OverflowError, OSError) as error:
        raise InputError(f"{origin}: not this package's metrics: {type(error).__name__}: {error}") from None
    if not tokens:
        hint = "start the server with --enable-expert-load, and send requests"
        if steps:
            hint = f"name its run folder; or start it with {EXPERT_SERIES}=1, for a series for each expert"
        raise InputError(f"{origin}: no expert load", hint=hint)
    num_experts = 1 + max(max(each) for each in tokens.values())
    if any(sorted(each) != list(range(num_experts)) for each in tokens.values()):
        raise InputError(f"{origin}: the experts of a layer are not 0 to {num_experts - 1}")
    return ExpertLoad(
        model=model,
        num_experts=num_experts,
        layers=tuple(
            LayerLoad(
                index=index,
                # The name comes with the figures, and a layer without tokens has none.
                name=names.get(index, f"layer {index}"),
                tokens=tuple(tokens[index][expert] for expert in range(num_experts)),
            )
            for index in sorted(tokens)
        ),
        since=moment,
        steps=steps,
    )
