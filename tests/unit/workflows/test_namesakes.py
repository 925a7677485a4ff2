"""Which Macs of two runs share one name in Temporal, and what a build is known of after a worker was replaced."""

from hypothesis import given
from hypothesis import strategies as st

from stoa.contracts import names
from stoa.contracts.fleet_messages import Hello, SessionInput
from stoa.contracts.namesakes import clash, namesakes, other_run
from workflows.session_plan import on_hello, take_over_if_due
from workflows.state import SessionProgress, dump, first_session_progress

NAMES = st.from_regex(r"[a-c][a-c-]{0,5}", fullmatch=True)


def test_namesakes_are_all_other_cuts_of_the_name() -> None:
    assert namesakes("a", "b-c") == (("a-b", "c"),)
    assert namesakes("a-b", "c") == (("a", "b-c"),)
    assert namesakes("a", "b-c-d") == (("a-b", "c-d"), ("a-b-c", "d"))
    assert namesakes("demo", "attic") == ()
    assert other_run("a", "b-c", "c") == "a-b"
    assert other_run("a", "b-c", "b") == other_run("a", "b-c", "") == other_run("a", "b-c", "b-c") == ""


def test_no_name_begins_with_a_dash() -> None:
    assert namesakes("a", "b--c") == (("a-b-", "c"),)  # the other cut would leave a host "-c"


@given(NAMES, NAMES, NAMES, NAMES)
def test_two_macs_share_a_queue_exactly_if_they_are_namesakes(run: str, host: str, other: str, its_host: str) -> None:
    shared = names.mac_queue(run, host) == names.mac_queue(other, its_host) and run != other
    assert ((other, its_host) in namesakes(run, host)) == shared
    assert (names.session_workflow_id(run, host) == names.session_workflow_id(other, its_host) and run != other) == shared


def test_a_clash_names_both() -> None:
    assert clash("a", "b-c", ("a-b", "c")).startswith("Mac b-c of run a and Mac c of run a-b have one name in Temporal")


def test_the_build_that_is_admitted_is_the_workers_that_plays_and_is_carried() -> None:
    state = on_hello(SessionProgress(), Hello("mac-1", "one", "0.1.0"), 1.0)
    waiting = on_hello(state, Hello("mac-1", "two", "0.2.0"), 2.0)
    assert (waiting.build, waiting.nonce) == ("0.1.0", "one")
    carried = first_session_progress(SessionInput("r", "mac-1", totals=dump(waiting)))
    assert carried == waiting
    taken_over = take_over_if_due(carried, 6.0, 60.0)
    assert (taken_over.build, taken_over.nonce, taken_over.candidate_build) == ("0.2.0", "two", "")
