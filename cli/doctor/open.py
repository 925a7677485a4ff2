"""Makes the scene of the checks from what a person gives: a configuration, a role, a state folder."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from cli.doctor.scene import Role, Scene
from stoa.bucket.store import Store
from stoa.config.load import bucket_credentials, load_run, state_base, temporal_access
from stoa.config.run import RunConfig
from stoa.contracts.errors import AccessDeniedError
from worker_mac.invited import INVITE_FILE, Entry, enter


def open_scene(file: Path | None, role: Role | None = None, state: Path | None = None) -> Scene:
    """The scene of a configuration file, or of the invitation that a Mac's state folder keeps.

    Raises ConfigError or InviteError if one of them, or what the Mac's owner wrote, cannot be used.
    """
    role, folder = role or installed_role(), state or state_base() / "mac"
    invited = role == "mac" and file is None and (folder / INVITE_FILE).is_file()
    scene = scene_of_mac(enter(None, folder), folder) if invited else scene_of(load_run(file), role, folder)
    if scene.is_mac:
        _ = scene.allowed
    return scene


def scene_of(config: RunConfig, role: Role, state: Path | None = None) -> Scene:
    """The scene of settings that are loaded already."""
    try:
        credentials = bucket_credentials(config.bucket)
    except AccessDeniedError:
        credentials = None
    store = None if credentials is None else Store(config.bucket, credentials)
    return Scene(role, config, state or state_base() / "mac", store, credentials, temporal_access(config.temporal))


def scene_of_mac(entry: Entry, state: Path) -> Scene:
    """The scene of a Mac that is about to join."""
    return Scene("mac", entry.config, state, Store(entry.config.bucket, entry.credentials), entry.credentials, entry.access)


def installed_role(find: Callable[[str], object] = find_spec) -> Role:
    """What this machine can be, by what is installed."""
    mac, gpu = (find(name) is not None for name in ("mlx", "megatron"))
    return ("all" if gpu else "mac") if mac else ("gpu" if gpu else "home")
