"""Sends requests to a server on this machine and reports failures as one error."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

_TIMEOUT_S = 600.0


class ServerError(Exception):
    """The server did not answer, or not as expected."""


@contextlib.contextmanager
def answer_of(url: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
    """Send one request, a POST if there is a body; yield the answer, whose lines can be read as they arrive.

    Raises:
        ServerError: no answer, an error status, or a failure while the block reads the answer.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # The server is on this machine: a proxy in the environment is ignored.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}: status {error.code}: {error.read(500).decode(errors='replace')}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServerError(f"{url}: {type(error).__name__}: {error}") from error


def post_json(url: str, body: dict[str, Any]) -> Any:
    """Send one request and return the JSON of its answer.

    Raises:
        ServerError: see `answer_of`, or the answer is not JSON.
    """
    with answer_of(url, body) as response:
        return json.load(response)
