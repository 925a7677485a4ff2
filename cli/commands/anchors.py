"""`stoa anchors RUN --every N`."""

from typing import Annotated

from cyclopts import Parameter

from cli.arguments import AsJson, RunArgument, Servers

Every = Annotated[int, Parameter(help="Most versions between two anchors.")]
ByJoinCost = Annotated[bool, Parameter(help="Sooner where joining Macs would fetch more than an anchor costs to send.")]


def anchors(
    run: RunArgument, /, *, every: Every, by_join_cost: ByJoinCost = False, config: Servers = None, as_json: AsJson = False
) -> None:
    """Change how often a run publishes full weights, from its next version on."""
    from cli.follow import tell
    from stoa.contracts.messages import AnchorCadence

    cadence = AnchorCadence(every, by_join_cost)
    said = f"publishes an anchor at least every {every} versions" + (", sooner where joins make it worth it" if by_join_cost else "")
    tell(run, config, lambda control: control.set_anchor_cadence(run, cadence), as_json=as_json, said=said)
