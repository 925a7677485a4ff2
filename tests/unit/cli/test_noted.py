"""Notes of dropped groups in a real bucket, beside the steps that tell of some of them."""

from cli.report.collect import Collector, facts_of
from cli.report.noted import with_noted
from stoa.bucket import keys
from stoa.bucket.steps import Dropped, write_drop_note
from tests.unit.cli.records import record, step
from tests.unit.weights.small_run import SmallRun


def test_a_report_counts_groups_that_only_notes_tell_of(store, tmp_path) -> None:
    run = SmallRun(store, tmp_path)
    group = [keys.group("small", 0, "mac-a", 0, index) for index in range(7)]
    reasons = ("all_zero", "stale", "all_zero", "all_one", "wrong_state")
    drops = [Dropped(key, reason) for key, reason in zip(group, reasons, strict=False)]
    write_drop_note(store, "small", 1000, 0, drops)
    write_drop_note(store, "small", 2000, 0, [drops[0], Dropped(group[5], "all_equal"), Dropped(group[6], "all_one")])

    found = Collector(run.document, store, None).collect(everything=True)
    assert found.noted_dropped == {
        group[0]: "all_zero", group[1]: "stale", group[2]: "all_zero", group[3]: "all_one", group[5]: "all_equal", group[6]: "all_one"
    }  # fmt: skip
    assert found.noted_refused == {group[4]: "wrong_state"}
    assert Collector(run.document, store, None).collect().noted_dropped == {}, "a live view lists no notes"

    row = step(1, consumed=(group[0],), dropped={group[1]: "stale"}, refused=((group[4], "mac-a", "wrong_state"),))
    told = with_noted(store, record(facts=facts_of(run.document), steps=(row,)))
    assert (set(told.noted_dropped), told.noted_refused) == ({group[2], group[3], group[5], group[6]}, {})
