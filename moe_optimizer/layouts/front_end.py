"""Tells what an API server takes for each token: as the machine's own loads told, or as the model has it."""

from __future__ import annotations

import math

from moe_optimizer.layouts import constants as fitted
from moe_optimizer.specs.front_end import FrontEnd
from moe_optimizer.specs.quantity import Quantity, Source


def token_us(known: FrontEnd, clients: float) -> Quantity:
    """Return what an API server takes for a token, in us.

    Args:
        known: what is known of the machine's.
        clients: that it answers at once.
    """
    found = known.of_clients(clients, modelled_token_us)
    return found or Quantity(modelled_token_us(clients), "us", Source.MODELLED, f"as in {fitted.LAYOUTS}")


def modelled_token_us(clients: float) -> float:
    """Return it where nothing is known of the machine: between two numbers of clients by their logarithm."""
    (few, few_us), (many, many_us) = fitted.FRONT_END_TOKEN_US
    share = math.log(max(clients, few) / few) / math.log(many / few)
    return few_us + min(share, 1.0) * (many_us - few_us)
