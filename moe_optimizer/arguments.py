"""`Arguments`: named values that are checked when they are given."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean


class Arguments(BaseModel):
    """Frozen; nothing is converted but integers to floats. The text below a field is its description.

    Raises:
        InputError: a value is of another type or outside its range, or there is no argument of that name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _input_error(error.errors()[0], type(self).model_fields) from None


def _input_error(first: Any, known: dict[str, FieldInfo]) -> InputError:
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return InputError(f"got the unknown argument {name!r}", hint=did_you_mean(name, list(known)))
    if first["type"] == "value_error":
        return InputError(first["msg"].removeprefix("Value error, "))
    return InputError(complaint(name, first), hint=known[first["loc"][0]].description)


def complaint(name: str, first: Any) -> str:
    """Return one of pydantic's errors as a sentence: what, got, expected."""
    if first["type"] == "missing":
        return f"{name}: got none, expected one"
    if first["type"] == "value_error":
        return f"{name}: {first['msg'].removeprefix('Value error, ')}"
    # "Input should be ...", "List should have ...".
    _, should, rest = first["msg"].partition(" after validation")[0].partition(" should ")
    said = rest.removeprefix("be ") if rest.startswith("be ") else f"to {rest}"
    return f"{name}: got {first['input']!r:.80}" + (f", expected {said}" if should else f": {first['msg']}")
