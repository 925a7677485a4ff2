"""Reads settings: TOML (or the resolved JSON of a run), then `--set`, then endpoints. The only reader of the environment.

What the settings are is `run.py`'s and `host.py`'s. Secrets come from here and nowhere else, and never print themselves.

    STOA_TEMPORAL_ADDRESS  STOA_BUCKET_ENDPOINT  STOA_BUCKET_NAME     endpoints, stronger than the file
    STOA_TEMPORAL_API_KEY  STOA_TEMPORAL_CA  STOA_TEMPORAL_CERT  STOA_TEMPORAL_KEY     a key; paths of PEM files
    STOA_BUCKET_KEY  STOA_BUCKET_SECRET                               else AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY
    STOA_MAC_BUCKET_KEY  STOA_MAC_BUCKET_SECRET  STOA_MAC_BUCKET_SESSION     read-only key that invitations carry
    STOA_STATE                                                        base folder of state on this host
    STOA_SIGNING_KEY                                                  base64 of 32 bytes, else <state>/signing.key

A worker that starts at log-in has no such environment: what it needs of it is kept in its state folder (KEPT_FILE, 0600).
"""

import base64
import binascii
import ipaddress
import json
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import ValidationError

from stoa.config.faults import Fault, Origin, config_error, contradictions, faults_of, join_faults, without_faulty
from stoa.config.host import MacHost
from stoa.config.run import Bucket, RunConfig, Section, Temporal
from stoa.contracts.access import PLAIN, Access
from stoa.contracts.errors import AccessDeniedError, ConfigError

PROJECT_ROOT: Final = Path(__file__).resolve().parents[2]
IS_CHECKOUT: Final = (PROJECT_ROOT / "configs" / "demo.toml").is_file()
SHIPPED: Final = PROJECT_ROOT if IS_CHECKOUT else PROJECT_ROOT.parents[2] / "share" / "stoa"
"""Where configs/ and constraints.txt are: in a checkout, or where the wheel puts them, <prefix>/lib/python3/site-packages beside."""
DEFAULT_CONFIG: Final = SHIPPED / "configs" / "demo.toml"
MAC_CONFIG: Final = SHIPPED / "configs" / "mac.toml"
LOOPBACK_KEY: Final = "stoa"
LOOPBACK_SECRET: Final = "stoa-on-loopback"  # noqa: S105 - a local server's well-known pair, no secret
MAC_LOOPBACK_KEY: Final = "stoa-mac"
MAC_LOOPBACK_SECRET: Final = "stoa-mac-on-loopback"  # noqa: S105 - as above, of a key that may only read
_ENDPOINTS: Final = {
    "STOA_TEMPORAL_ADDRESS": ("temporal", "address"),
    "STOA_BUCKET_ENDPOINT": ("bucket", "endpoint"),
    "STOA_BUCKET_NAME": ("bucket", "name"),
}
KEPT_FILE: Final = "environment.json"
TEMPORAL_SECRETS: Final = ("STOA_TEMPORAL_API_KEY", "STOA_TEMPORAL_CA", "STOA_TEMPORAL_CERT", "STOA_TEMPORAL_KEY")
_KEPT: Final = (*_ENDPOINTS, *TEMPORAL_SECRETS, "STOA_BUCKET_KEY", "STOA_BUCKET_SECRET")
"""What a Mac's worker reads of the environment; never the key that signs a run."""
_SECRET_WORDS: Final = ("SECRET", "TOKEN", "PASSW", "API_KEY", "ACCESS_KEY", "SIGNING_KEY", "BUCKET_KEY", "CREDENTIAL", "_SESSION")
_SECRET_FILES: Final = ("signing.key", KEPT_FILE, "invite", "tickets")
_SEED_BYTES: Final = 32
_TOML_LINE = re.compile(r"\(at line (\d+), column \d+\)")

Tree = dict[str, object]
_Section = TypeVar("_Section", bound=Section)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key and its secret for the bucket; printing one shows neither."""

    key: str = field(repr=False)
    secret: str = field(repr=False)
    session: str = field(default="", repr=False)
    """Session token of temporary credentials."""


def load_run(
    path: Path | None = None,
    sets: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    look: Callable[[RunConfig, Origin], Sequence[Fault]] = lambda config, origin: (),
) -> RunConfig:
    """The settings of a run: `path` (default configs/demo.toml), then each `table.key=value`, then endpoints.

    look: finds more faults, also in what is good of a file that has some.

    Raises ConfigError that names file, line, key and the nearest setting, for all faults at once.
    """
    path = DEFAULT_CONFIG if path is None else path
    text = _read_text(path)
    tree = _parse(text, path)
    layers: dict[str, str] = {}
    for item in sets:
        key = _apply_set(tree, item)
        layers[key] = f"--set {item}"
    for variable, (table, key) in _ENDPOINTS.items():
        value = (os.environ if environ is None else environ).get(variable, "")
        if value:
            _put(tree, (table, key), value, variable)
            layers[f"{table}.{key}"] = variable
    origin = Origin(str(path), text, layers)
    faults: list[Fault] = []
    try:
        config = RunConfig.model_validate(tree, strict=True)
    except ValidationError as error:
        faults = faults_of(error, RunConfig, origin)
        rest = without_faulty(tree, error)
        try:
            config = RunConfig.model_validate(rest, strict=True)
        except ValidationError as again:
            faults += contradictions(again, error, RunConfig, origin)
            try:
                config = RunConfig.model_validate({key: rest[key] for key in ("model", "environment") if key in rest}, strict=True)
            except ValidationError:
                raise join_faults(faults, origin.name) from None
    faults += look(config, origin)
    if faults:
        raise join_faults(faults, origin.name)
    return config


def load_mac_host(path: Path | None = None) -> MacHost:
    """What the owner of this Mac allows, by the file at `path`; the defaults without one. Raises ConfigError as `load_run` does."""
    return MacHost() if path is None else load_section(path, MacHost, example=MAC_CONFIG)


def load_section(path: Path, kind: type[_Section], *, example: Path) -> _Section:
    """Settings of any kind from a file of their own; a missing one is told with `example`. Raises ConfigError as `load_run` does."""
    text = _read_text(path, example=example)
    try:
        return kind.model_validate(_parse(text, path), strict=True)
    except ValidationError as error:
        raise config_error(error, kind, Origin(str(path), text)) from None


def bucket_credentials(bucket: Bucket, *, environ: Mapping[str, str] | None = None) -> Credentials:
    """Key and secret for `bucket`; a server on this machine has a well-known pair and is never shown a cloud's.

    Raises AccessDeniedError when there is none and the endpoint is not loopback.
    """
    source = os.environ if environ is None else environ
    own, cloud = ("STOA_BUCKET_KEY", "STOA_BUCKET_SECRET"), ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for names in (own,) if is_loopback(bucket.endpoint) else (own, cloud):
        key, secret = (source.get(name, "") for name in names)
        if key and secret:
            return Credentials(key, secret)
        if key or secret:
            missing = names[1] if key else names[0]
            raise AccessDeniedError(f"{bucket.endpoint}: {missing} is not set", hint=f"set {names[0]} and {names[1]}")
    if is_loopback(bucket.endpoint):
        return Credentials(LOOPBACK_KEY, LOOPBACK_SECRET)
    raise AccessDeniedError(
        f"{bucket.endpoint}: no key for the bucket in the environment",
        hint="set STOA_BUCKET_KEY and STOA_BUCKET_SECRET",
    )


def keep_environment(folder: Path, config: RunConfig, *, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Keep in `folder`, for its owner's eyes only, what a worker that starts by itself needs of this environment.

    Returns the names that were kept. Raises AccessDeniedError if there is no key for the bucket of `config`.
    """
    source = os.environ if environ is None else environ
    kept = {name: source[name] for name in _KEPT if source.get(name)}
    if not is_loopback(config.bucket.endpoint):
        credentials = bucket_credentials(config.bucket, environ=source)
        kept |= {"STOA_BUCKET_KEY": credentials.key, "STOA_BUCKET_SECRET": credentials.secret}
    path = folder / KEPT_FILE
    part = folder / f"{KEPT_FILE}.part"
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        json.dump(kept, file, sort_keys=True)
    part.replace(path)
    return tuple(sorted(kept))


def kept_environment(folder: Path, *, environ: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """This environment, and beneath it what `keep_environment` kept in `folder`.

    Raises ConfigError if the file is missing, is no such file, or may be read by others than its owner.
    """
    path = folder / KEPT_FILE
    hint = "run `stoa join --at-login` again"
    try:
        _owner_only(path)
        kept: object = json.loads(path.read_text("ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: what this worker needs to start by itself cannot be read ({error})", hint=hint) from None
    if not isinstance(kept, dict) or not all(name in _KEPT and isinstance(value, str) for name, value in kept.items()):
        raise ConfigError(f"{path}: holds other things than a worker needs", hint=hint)
    return {**cast(dict[str, str], kept), **(os.environ if environ is None else environ)}


def mac_credentials(bucket: Bucket, *, environ: Mapping[str, str] | None = None) -> Credentials:
    """The read-only key for invited Macs; a server on this machine has a well-known pair. Raises AccessDeniedError without one."""
    source = os.environ if environ is None else environ
    key, secret = source.get("STOA_MAC_BUCKET_KEY", ""), source.get("STOA_MAC_BUCKET_SECRET", "")
    if key and secret:
        return Credentials(key, secret, source.get("STOA_MAC_BUCKET_SESSION", ""))
    if is_loopback(bucket.endpoint) and not key and not secret:
        return Credentials(MAC_LOOPBACK_KEY, MAC_LOOPBACK_SECRET)
    raise AccessDeniedError(
        f"{bucket.endpoint}: no key for Macs in the environment",
        hint="make a key that may only read this bucket; set STOA_MAC_BUCKET_KEY and STOA_MAC_BUCKET_SECRET to it",
    )


def temporal_access(settings: Temporal, *, environ: Mapping[str, str] | None = None) -> Access:
    """How this host speaks to Temporal: TLS by `settings`, certificates and API key by the environment.

    A server on this machine without TLS is never shown a cloud's key.

    Raises ConfigError for a file that cannot be read, half of a pair, or a key that would go out in clear.
    """
    source = os.environ if environ is None else environ
    api_key, ca, certificate, private_key = (source.get(name, "") for name in TEMPORAL_SECRETS)
    if bool(certificate) != bool(private_key):
        raise ConfigError("STOA_TEMPORAL_CERT and STOA_TEMPORAL_KEY go together", hint="set both to paths of PEM files, or none")
    if not settings.tls and is_loopback(settings.address):
        return PLAIN
    if not settings.tls and (ca or certificate or api_key):
        what = "STOA_TEMPORAL_API_KEY would be sent in clear" if api_key else "certificates are set"
        raise ConfigError(f"{what}, and temporal.tls is false", hint="set temporal.tls = true")
    return Access(
        settings.tls,
        settings.tls_server_name,
        _read_pem(ca, "STOA_TEMPORAL_CA"),
        _read_pem(certificate, "STOA_TEMPORAL_CERT"),
        _read_pem(private_key, "STOA_TEMPORAL_KEY", is_secret=True),
        api_key,
    )


def _read_pem(path: str, variable: str, *, is_secret: bool = False) -> bytes:
    if not path:
        return b""
    try:
        file = Path(path).expanduser()
        data = file.read_bytes()
        if is_secret and file.stat().st_mode & 0o077:
            raise ConfigError(f"{variable}: others than its owner may read {path}", hint=f"run `chmod 600 {path}`")
    except OSError as error:
        raise ConfigError(f"{variable}: {path} cannot be read ({error.strerror})") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{variable}: {path} is no PEM file")
    return data


def is_loopback(endpoint: str) -> bool:
    """True if a URL or host:port names this machine."""
    host = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def state_base() -> Path:
    """Base folder of everything this project keeps on this host."""
    given = os.environ.get("STOA_STATE", "")
    return Path(given).expanduser() if given else Path.home() / ".local" / "state" / "stoa"


def state_folder(role: str) -> Path:
    """Folder of one role (`trainer`, `mac`) under the base, made if it is not there; readable by its owner only."""
    folder = state_base() / role
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def signing_seed(*, create: bool = False, base: Path | None = None) -> bytes:
    """The 32 secret bytes of the ed25519 key that signs manifests: STOA_SIGNING_KEY, else the file (0600).

    With `create` a missing file is made. With `base` only the file in that folder counts, not the environment.
    Raises ConfigError if there is no key, or it is not base64 of 32 bytes.
    """
    given = os.environ.get("STOA_SIGNING_KEY", "") if base is None else ""
    if given:
        return _decode_seed(given, "STOA_SIGNING_KEY")
    path = (state_base() if base is None else base) / "signing.key"
    if create:
        _make_seed(path)
    try:
        text = path.read_text("ascii")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: the key that signs this run is not here",
            hint="`stoa run` makes it; on another host set STOA_SIGNING_KEY or copy the file",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a signing key ({error})") from None
    _owner_only(path)
    return _decode_seed(text, str(path))


def _owner_only(path: Path) -> None:
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: others than its owner may read it", hint=f"run `chmod 600 {path}`")


def find_model_folder(config: RunConfig) -> Path | None:
    """Folder of the base checkpoint: as given from the working folder, else from the project's root; None if there is none."""
    given = config.model_folder.expanduser()
    return next((folder.resolve() for folder in (given, PROJECT_ROOT / given) if (folder / "config.json").is_file()), None)


def resolve_model_folder(config: RunConfig) -> Path:
    """`find_model_folder`, or a ConfigError that says where it was looked for."""
    folder = find_model_folder(config)
    if folder is None:
        raise ConfigError(
            f"model = {config.model!r}: no folder of that name holds a config.json", hint=f"looked in {Path.cwd()} and {PROJECT_ROOT}"
        )
    return folder


def known_secrets(folders: Iterable[Path] = (), *, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Secrets that this host knows: values of the environment by their names, and what the state folders keep.

    For removing them from what leaves the host; printing them is never right.
    """
    source = os.environ if environ is None else environ
    found = [value for name, value in source.items() if value and any(word in name.upper() for word in _SECRET_WORDS)]
    for folder in folders:
        for name in _SECRET_FILES:
            for path in folder.rglob(name) if folder.is_dir() else ():
                found += _values_in(path)
    return tuple(dict.fromkeys(found))


def _values_in(path: Path) -> list[str]:
    """Every text in a small secret file: all of it, and where it is JSON each of its values."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return []
    try:
        tree: object = json.loads(text)
    except ValueError:
        return [text]
    return [value for value in tree.values() if isinstance(value, str)] if isinstance(tree, dict) else [text]


@dataclass(frozen=True, slots=True)
class Launch:
    """How torchrun started this process: its number, and that on its host, of how many."""

    rank: int
    local_rank: int
    num_ranks: int
    num_local: int


def torchrun_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """What torchrun told this process, None if another program started it."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return Launch(*(int(environ[name]) for name in names))


def child_environment(overrides: Mapping[str, str], *, without: Sequence[str] = ()) -> dict[str, str]:
    """This process's environment less `without`, with `overrides`: what a process it starts is given."""
    return {**{name: value for name, value in os.environ.items() if name not in without}, **overrides}


def _read_text(path: Path, example: Path = DEFAULT_CONFIG) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", hint=f"an example is {example}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None


def _parse(text: str, path: Path) -> Tree:
    if path.suffix == ".json":
        return _parse_json(text, path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _TOML_LINE.search(str(error))
        where = f"{path}:{found[1]}" if found else str(path)
        said = _TOML_LINE.sub("", str(error)).strip()
        raise ConfigError(f"{where}: not TOML: {said}", hint="strings stand in quotes, tables in [brackets]") from None


def _parse_json(text: str, path: Path) -> Tree:
    try:
        tree: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: not a table of settings")
    return cast(Tree, tree)


def _apply_set(tree: Tree, item: str) -> str:
    name, equals, text = item.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"--set {item}: not of the form table.key=value", hint="for example --set stop.max_steps=8")
    try:
        value = cast(object, tomllib.loads(f"value = {text}")["value"])
    except tomllib.TOMLDecodeError:
        value = text
    _put(tree, tuple(name.split(".")), value, f"--set {item}")
    return name


def _put(tree: Tree, path: tuple[str, ...], value: object, source: str) -> None:
    table = tree
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{source}: {part} is a value, not a table")
        table = cast(Tree, inner)
    table[path[-1]] = value


def _decode_seed(text: str, where: str) -> bytes:
    try:
        seed = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        seed = b""
    if len(seed) != _SEED_BYTES:
        raise ConfigError(f"{where}: a signing key is base64 of {_SEED_BYTES} bytes")
    return seed


def _make_seed(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "wb") as file:
        file.write(base64.b64encode(secrets.token_bytes(_SEED_BYTES)) + b"\n")
