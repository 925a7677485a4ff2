"""`stoa canary`: does anything move that must not, and where does a mismatch come from?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson, Sets
from cli.say import Exit

if TYPE_CHECKING:
    from cli.canary import Arm, VersionSeen
    from stoa.config.run import RunConfig


def canary(
    config: Path | None = None,
    /,
    *,
    versions: Annotated[int, Parameter(help="Versions to train at learning rate 0.")] = 6,
    decompose: Annotated[bool, Parameter(help="Split the mismatch instead: fp32, int8, int8 and older versions.")] = False,
    lags: Annotated[tuple[int, ...], Parameter(help="Ages in versions to split for.")] = (1, 3, 8),
    sets: Sets = (),
    as_json: AsJson = False,
) -> Exit:
    """Check, before a long run, that nothing moves at learning rate 0: digests, deltas, the engines' mismatch.

    Trainer, Mac engine and a bucket run on this machine; no server is needed.

    Parameters
    ----------
    config
        Configuration; the demo's when left out.
    """
    import tempfile

    from stoa.config.load import load_run
    from stoa.contracts.errors import UsageError

    if versions < 2 or not lags or min(lags) < 1:
        raise UsageError(f"{versions} versions and lags {lags}: nothing to compare", hint="use at least 2 versions, lags from 1 on")
    settings = load_run(config, sets)
    with tempfile.TemporaryDirectory() as folder:
        if decompose:
            return _decompose(settings, Path(folder), sorted(set(lags)), as_json)
        return _fly(settings, Path(folder), versions, as_json)


def _fly(settings: "RunConfig", folder: Path, num_versions: int, as_json: bool) -> Exit:
    import json
    from dataclasses import asdict

    from cli.canary import fly, judge

    seen: list[VersionSeen] = []
    for one in fly(settings, folder, num_versions):
        seen.append(one)
        error = f"{one.mismatch_mean:.3g} +- {one.mismatch_error:.1g}"
        say.talk(f"version {one.version}  digest {one.state_id[:12]}  changed {one.changed_fraction:.2g}  mean |pi - mu| {error}")
    found = judge(seen)
    if as_json:
        say.data(json.dumps({"num_versions": len(seen), "flat": not found.faults, **asdict(found)}, indent=2))
    for fault in found.faults:
        say.error(fault)
    if found.faults:
        return Exit.FAULT_FOUND
    say.talk(f"nothing moved over {len(seen)} versions")
    return Exit.DONE


def _decompose(settings: "RunConfig", folder: Path, lags: list[int], as_json: bool) -> Exit:
    import json
    from dataclasses import asdict

    from cli.canary import decompose

    arms: list[Arm] = []
    for arm in decompose(settings, folder, lags):
        arms.append(arm)
        far = f"mean |pi - mu| {arm.mean:.2e}  p99 {arm.p99:.2e}  max {arm.largest:.2e}"
        say.talk(f"{arm.name:24} {far}  k3 {arm.k3:.1e}  gate drops {arm.drop_rate:.2%}")
    if as_json:
        say.data(json.dumps({"gate": settings.learning.gate.mode, "arms": [asdict(arm) for arm in arms]}, indent=2))
    return Exit.DONE
