"""How long a benchmark still takes, told from what its starts and rounds took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.measure.bench.pace import Pace


class Simulated:
    """A benchmark of so many starts with as many rounds each, on a clock that only they turn."""

    def __init__(self, starts: int, rounds: int, start_s: float, round_s: float) -> None:
        self.now, self.told = 0.0, list[tuple[float, float]]()
        pace = Pace(starts=starts, rounds=starts * rounds, on_step=self._note, now=lambda: self.now)
        for _ in range(starts):
            pace.starting("servers")
            self.now += start_s
            pace.started()
            for number in range(rounds):
                pace.sending("a round", done=min(number, 1))
                self.now += round_s
            pace.sent(1)
        self.takes_s = self.now

    def _note(self, share: float, _what: str) -> None:
        self.told.append((self.now, share))


durations = st.floats(0.5, 500.0)


@given(starts=st.integers(1, 6), rounds=st.integers(2, 12), start_s=durations, round_s=durations)
def test_from_the_second_round_on_the_share_is_that_of_the_time(
    starts: int, rounds: int, start_s: float, round_s: float
) -> None:
    run = Simulated(starts, rounds, start_s, round_s)
    second_round = start_s + round_s
    for now, share in run.told:
        if now >= second_round:
            assert share == pytest.approx(now / run.takes_s)
        else:
            assert share <= 0.01


@given(starts=st.integers(1, 6), rounds=st.integers(1, 12), start_s=durations, round_s=durations)
def test_the_share_never_falls_and_is_never_more_than_all(
    starts: int, rounds: int, start_s: float, round_s: float
) -> None:
    shares = [share for _, share in Simulated(starts, rounds, start_s, round_s).told]
    assert shares == sorted(shares)
    assert shares[-1] <= 1.0


def test_rounds_that_are_sent_again_do_not_lead_beyond_the_end() -> None:
    now, told = 0.0, list[float]()
    pace = Pace(starts=1, rounds=2, on_step=lambda share, _: told.append(share), now=lambda: now)
    pace.starting("servers")
    for done in (0, 1, 1, 1, 1):
        pace.sending("a round", done=done)
        now += 1.0
    assert told[-1] == 1.0
