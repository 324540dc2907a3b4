"""Writes what `--show-config` asks for: every setting, its value and where the value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from moe_optimizer.cli import messages
from moe_optimizer.cli.options import PlanOptions
from moe_optimizer.cli.planning import read_settings
from moe_optimizer.cli.settings import Setting, Settings
from moe_optimizer.errors import printable

if TYPE_CHECKING:
    from moe_optimizer.profiles.schema import Profile, Section

_FROM_PROFILE = {
    "batch_size": "workload.batch_size",
    "goal": "goal",
    "clients": "workload.clients",
    "ttft": "workload.ttft_ms",
    "tpot": "workload.tpot_ms",
    "input_tokens": "workload.input_tokens",
    "output_tokens": "workload.output_tokens",
    "max_model_len": "max_model_len",
    "expert_load": "passes.expert_placement.load",
    "expert_load_check": "passes.expert_placement.load_check",
}
"""Settings that a profile has too, under this key."""


def shown_config(options: PlanOptions) -> messages.Output:
    """Return every setting.

    Raises:
        InputError, UnsupportedError: see `read_settings`.
    """
    return messages.Output(result=effective_settings(*read_settings(options)), render=_render)


def _render(settings: Mapping[str, Setting]) -> str:
    width = max(map(len, settings))
    return "\n".join(
        printable(f"{name:<{width}}  {_text(setting.value)}  ({setting.origin})") for name, setting in settings.items()
    )


def effective_settings(settings: Settings, profile: Profile) -> dict[str, Setting]:
    """Return the effective value of every setting, with its origin."""
    stated = dict(_profile_settings(profile, f"profile {profile.name}"))
    from_profile = {name: stated.pop(key) for name, key in _FROM_PROFILE.items()}
    merged = {
        name: from_profile[name] if setting.value is None and name in from_profile else setting
        for name, setting in settings.values.items()
    } | stated
    for name, (wish, origin) in settings.wishes.items():
        merged[f"passes.{name}" if "." in name else f"passes.{name}.mode"] = Setting(wish.value, origin)
    for name in settings.required:
        merged[f"passes.{name}.required"] = Setting(True, "flag --require")
    return merged


def _profile_settings(section: Section, origin: str, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Yield every setting of the profile; one that its file leaves out is a default."""
    from moe_optimizer.yaml_model import Section

    for field in type(section).model_fields:
        value: Any = getattr(section, field)
        stated = origin if field in section.model_fields_set else "default"
        if isinstance(value, Section):
            yield from _profile_settings(value, stated, f"{prefix}{field}.")
        elif prefix or field not in ("name", "description"):
            yield prefix + field, Setting(list(value) if isinstance(value, tuple) else value, stated)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
