"""A cable that is pulled for ten minutes: the Mac is heard again within a minute of its return, and says why it spoke."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from worker_mac.membership import Greeter

OUT_SECONDS = 600.0
HELLO_SECONDS = 10.0
"""A hello into nothing takes as long as it may."""


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), pulled_at=st.floats(5.0, 900.0), lost=st.booleans())
def test_mac_says_hello_within_a_minute_of_the_cables_return(seed: int, pulled_at: float, lost: bool) -> None:
    """Without any help: it may also learn that the server has given its sweep up, or play on by itself meanwhile."""
    greeter, now, heard = Greeter(random.Random(seed)), 0.0, list[tuple[float, str]]()
    back_at = pulled_at + OUT_SECONDS
    while now < back_at + 120.0:
        out = pulled_at <= now < back_at
        reason = greeter.reason(
            now,
            tick_seconds=1.0,
            idle_seconds=max(0.0, now - pulled_at) if now >= pulled_at else 0.0,  # it is asked for sweeps until then
            lost=lost and pulled_at + 30.0 <= now < pulled_at + 31.0,
        )
        if reason:
            greeter.said(now, taken=not out)
            if out:
                now += HELLO_SECONDS
            else:
                heard.append((now, reason))
        now += 1.0
    after = [(at - back_at, reason) for at, reason in heard if at >= back_at]
    assert after and after[0][0] <= 60.0, after
    assert after[0][1] in ("silence", "lost")
