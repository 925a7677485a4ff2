import pytest

from worker_mac.pace import FIRST_TOKENS, LEAST_TOKENS, MOST_TOKENS, Pace


def drive(pace: Pace, seconds_per_token: float, fixed_seconds: float, wanted: int, steps: int) -> list[tuple[int, float]]:
    """Steps of a machine with these speeds, each with as many tokens as wanted and allowed."""
    found = []
    for _ in range(steps):
        tokens = min(wanted, pace.tokens)
        seconds = fixed_seconds + tokens * seconds_per_token
        pace.saw(tokens, seconds)
        found.append((tokens, seconds))
    return found


@pytest.mark.parametrize(("per_token", "fixed"), [(1e-3, 0.02), (1e-4, 0.1), (2e-3, 0.0), (5e-5, 0.0)])
def test_steps_settle_at_or_below_a_quarter_of_a_second(per_token: float, fixed: float) -> None:
    steps = drive(Pace(), per_token, fixed, 100_000, 60)
    assert all(seconds <= 0.25 for _, seconds in steps[-20:-10]) or max(s for _, s in steps[-20:]) <= 0.25 * 1.25
    assert sum(seconds > 0.25 for _, seconds in steps[20:]) <= 6
    # And not far below it: what the machine can do is used, to three fifths at least.
    assert max(tokens for tokens, _ in steps[-20:]) >= min(MOST_TOKENS, 0.8 * (0.6 * 0.25 - fixed) / per_token)


def test_a_machine_that_is_too_slow_for_anything_still_gets_a_few_tokens() -> None:
    assert drive(Pace(), 1.0, 1.0, 500, 10)[-1][0] == LEAST_TOKENS


def test_small_steps_teach_nothing_about_large_ones() -> None:
    pace = Pace()
    drive(pace, 1e-5, 0.0, 8, 100)
    assert pace.tokens == FIRST_TOKENS


def test_an_interrupted_step_halves_what_it_had() -> None:
    pace = Pace()
    pace.interrupted(200)
    assert pace.tokens == 100
    for _ in range(9):
        pace.interrupted(pace.tokens)
    assert pace.tokens == LEAST_TOKENS
