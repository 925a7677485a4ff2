"""Keys: spelt as the table says, parsed back, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.bucket import keys
from stoa.contracts.errors import FormatError

NAMES = st.from_regex(r"[a-z0-9][a-z0-9-]{0,47}", fullmatch=True)
COUNTS = st.integers(0, 99_999_999)
SHA = "0123456789abcdef" * 4


def test_keys_are_spelt_as_documented():
    assert keys.head("demo") == "runs/demo/HEAD.json"
    assert keys.manifest("demo", 7, 2001, SHA) == "runs/demo/manifests/00000007.e2001-0123456789abcdef.json"
    assert keys.delta("demo", 6, 7, SHA) == "runs/demo/deltas/00000006-00000007-0123456789abcdef.safetensors"
    assert keys.anchor_part("demo", 20, 3, SHA) == "runs/demo/anchors/00000020/0003-0123456789abcdef.safetensors"
    assert keys.group("demo", 1, "mac-1", 2, 3) == "runs/demo/groups/v00000001/mac-1/00000002/03.safetensors.zst"
    assert keys.step_manifest("demo", 1000, 9) == "runs/demo/steps/e1000/s00000009.json"


@given(NAMES, COUNTS, NAMES, COUNTS, st.integers(0, 99))
def test_parts_of_a_group_step_and_grant_come_back(run: str, version: int, host: str, sweep: int, index: int):
    assert keys.parse_group(keys.group(run, version, host, sweep, index)) == keys.GroupKey(run, version, host, sweep, index)
    assert keys.parse_step(keys.step_manifest(run, version, sweep)) == keys.StepKey(run, version, sweep)
    assert keys.parse_grant(keys.grant(run, host, sweep)) == keys.GrantKey(run, host, sweep)


@pytest.mark.parametrize(
    "key",
    ["", "runs/a/groups/v1/m/2/3", "runs/a/groups/v00000001/../00000002/03.safetensors.zst", "x" + keys.group("a", 1, "m", 2, 3)],
)
def test_what_is_no_key_of_a_group_is_refused(key: str):
    with pytest.raises(FormatError):
        keys.parse_group(key)


@pytest.mark.parametrize("run", ["", "Demo", "a/b", "..", "a" * 49, "-a"])
def test_name_that_would_leave_its_prefix_is_refused(run: str):
    with pytest.raises(FormatError):
        keys.head(run)
