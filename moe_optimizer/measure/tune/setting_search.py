"""Chooses which settings to try next, with Optuna, and which trial is hopeless after its first repetitions."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.measure.tune.settings import UNCHANGED, Settings

if TYPE_CHECKING:
    import optuna

_RANDOM_TRIALS = 5
"""Before Optuna's model of the past trials chooses."""


def check_optuna() -> None:
    """Refuse a search without its sampler.

    Raises:
        UnsupportedError: it is not installed.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UnsupportedError("tune: optuna is not installed", hint="run: pip install 'moe-optimizer[tune]'")


class SettingSearch:
    """Trials of settings, in an order that the seed and the results alone decide.

    Args:
        settings: flag -> values; the unchanged one first.
        higher_is_better: of scores.
        seed: of the sampler.
    """

    def __init__(self, settings: Settings, *, higher_is_better: bool, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._settings = settings
        self._study = optuna.create_study(
            direction="maximize" if higher_is_better else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM_TRIALS),
            # Worse at its first repetition than half of those that came before.
            pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=0),
        )
        self._study.enqueue_trial(dict.fromkeys(settings, UNCHANGED))
        self._trial: optuna.Trial | None = None

    @property
    def _current(self) -> optuna.Trial:
        assert self._trial is not None, "ask comes first"
        return self._trial

    def ask(self) -> dict[str, str]:
        """Return a value for each flag; the first time the unchanged ones."""
        self._trial = self._study.ask()
        return {flag: str(self._trial.suggest_categorical(flag, values)) for flag, values in self._settings.items()}

    def is_hopeless(self, scores: Sequence[float]) -> bool:
        """Take the scores of the trial so far; return whether to end it."""
        if len(scores) > len(self._reported()):
            self._current.report(scores[-1], step=len(scores) - 1)
        return self._current.should_prune()

    def _reported(self) -> dict[int, float]:
        return self._study.trials[self._current.number].intermediate_values

    def tell(self, score: float | None, scores: Sequence[float] = ()) -> None:
        """Take the result of the trial; None: it has none, because it was ended early or failed."""
        import optuna

        # What an earlier run measured was not reported on the way.
        for step in range(len(self._reported()), len(scores)):
            self._current.report(scores[step], step=step)
        if score is not None:
            self._study.tell(self._current, score)
        elif scores:
            self._study.tell(self._current, state=optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(self._current, state=optuna.trial.TrialState.FAIL)
