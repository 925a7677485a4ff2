"""`stoa proxy CONFIG`: let invited Macs reach Temporal, and nothing beyond what a Mac needs."""

from pathlib import Path

from cli import say


def proxy(
    config: Path | None = None,
    /,
    *,
    listen: str = "127.0.0.1:7234",
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    client_ca: Path | None = None,
    behind_tls: bool = False,
) -> None:
    """Stand before Temporal for the invited Macs of a run, until Ctrl-C.

    Parameters
    ----------
    config
        Configuration of the run; the demo's when left out.
    listen
        Address and port to listen on; beyond this machine only with TLS.
    tls_cert
        PEM file of the proxy's certificate; read again when it changes.
    tls_key
        PEM file of its private key.
    client_ca
        PEM file of who must have signed the callers' own certificates.
    behind_tls
        Listen beyond this machine without TLS, because something before the proxy speaks it.
    """
    import asyncio
    from importlib.util import find_spec

    from stoa.bucket.revocations import Revoked
    from stoa.bucket.run_document import read_run
    from stoa.bucket.store import Store
    from stoa.config.load import bucket_credentials, load_run, temporal_access
    from stoa.contracts.errors import MissingExtraError, UsageError
    from stoa.telemetry import log

    if find_spec("grpc") is None:
        raise MissingExtraError("the proxy needs grpcio, which is not installed", hint="run `pip install 'stoa[proxy]'`")
    if bool(tls_cert) != bool(tls_key) or (client_ca and not tls_cert):
        raise UsageError("--tls-cert and --tls-key go together, and --client-ca with them")
    from cli.proxy import Listening, Proxy, Tls, serve_until_told

    settings = load_run(config)
    log.configure(level="info", worker="proxy", run=settings.run)
    store = Store(settings.bucket, bucket_credentials(settings.bucket))
    public_key = read_run(store, settings.run).public_key
    tls = Tls(tls_cert, tls_key, client_ca) if tls_cert and tls_key else None
    server = Proxy(settings.run, public_key, Revoked(store, settings.run, public_key), Listening(listen, tls, behind_tls))

    def ready() -> None:
        say.talk(f"run {settings.run}: invited Macs reach Temporal at {server.address}; Ctrl-C stops the proxy")

    temporal = settings.temporal
    asyncio.run(serve_until_told(server, temporal.address, temporal.namespace_mac, temporal_access(temporal), ready))
