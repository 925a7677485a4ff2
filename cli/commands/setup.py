"""`stoa setup CONFIG`: what the servers must hold before a run."""

from pathlib import Path

from cli import say


def setup(config: Path | None = None, /) -> None:
    """Make the namespaces, their search attributes and the bucket; safe to repeat.

    Parameters
    ----------
    config
        Configuration of the run; the demo's when left out.
    """
    from cli.launch import set_up
    from stoa.config.load import load_run

    settings = load_run(config)
    store = set_up(settings)
    temporal = settings.temporal
    namespaces = " and ".join(dict.fromkeys((temporal.namespace_core, temporal.namespace_mac)))
    say.data(f"Temporal at {temporal.address}: namespace {namespaces} ready")
    say.data(f"bucket {store.name}: ready")
