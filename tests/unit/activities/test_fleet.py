"""What the control activities about the fleet decide without a server."""

import pytest

from activities.connection import DATA_CONVERTER
from activities.fleet import census_page, is_older
from stoa.contracts.fleet_messages import MacFacts


def test_census_is_paged_by_bytes_and_counts_all_that_play() -> None:
    macs = [MacFacts(f"mac-{i:04d}", "resting" if i % 10 == 0 else "live", 9, 3, 120.5, "x" * 48, "y" * 64) for i in range(1000)]
    after, seen, num_pages = "", list[MacFacts](), 0
    while True:
        page = census_page(macs, after)
        DATA_CONVERTER.payload_converter.to_payloads([page])  # raises above 16 KiB
        seen += page.macs
        num_pages += 1
        assert page.num_macs == 900
        after = page.next_host
        if not after:
            break
    assert seen == macs
    assert num_pages < 25


@pytest.mark.parametrize(
    ("build", "older"), [("0.0.9", True), ("0.1.0", False), ("0.10.0", False), ("1.0.0rc1", False), ("source", False), ("", False)]
)
def test_builds_are_compared_by_number(build: str, older: bool) -> None:
    assert is_older(build, "0.1.0") is older


def test_a_census_counts_a_mac_that_says_what_nobody_can_write() -> None:
    macs = [MacFacts("mac-1", slow_because="\ud800"), MacFacts("mac-2")]
    assert [one.host for one in census_page(macs, "").macs] == ["mac-1", "mac-2"]
