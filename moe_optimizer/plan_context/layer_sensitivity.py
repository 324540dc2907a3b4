"""Says which layers stay as they are because fewer bits were measured to change them too much."""

from __future__ import annotations

from moe_optimizer.errors import InputError
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.layer_sensitivity import LayerSensitivityFile


def layers_over_budget(
    ctx: PlanContext, given: LayerSensitivityFile | None, *, pass_name: str, weights: str, most: float | None
) -> set[int]:
    """Return the layers whose measured change is larger than `most`; none where nothing was measured or bounds it.

    Args:
        ctx: what the plan is made from.
        given: the measurement that the profile names.
        pass_name: whose profile section names it.
        weights: what the layers are to be converted to.
        most: the largest change that the profile allows.

    Raises:
        InputError: the measurement is of something else.
    """
    if given is None:
        return set()
    measured = given.measured
    for what, found, wanted in (
        ("model", measured.model, ctx.model.name.rstrip("/").rpartition("/")[2]),
        ("weights", measured.weights, weights),
        ("layers", sorted(measured.errors), list(ctx.model.moe_layers)),
    ):
        if found != wanted:
            raise InputError(f"{pass_name}.sensitivity {given.path}: {what}: got {found}, expected {wanted}")
    return set() if most is None else {layer for layer, error in measured.errors.items() if error > most}


def measured_on(given: LayerSensitivityFile | None, words: str) -> tuple[str, ...]:
    """Return the evidence that a measurement is; `words`: what changes the layers, as subject of a sentence."""
    if given is None:
        return ()
    errors = given.measured.errors.values()
    span = f"{min(errors):.3f} to {max(errors):.3f}"
    return (f"{given.path}: {words} the layers' outputs by {span} on {given.measured.tokens} tokens",)
