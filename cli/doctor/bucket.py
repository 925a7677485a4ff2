"""The bucket: does it keep what this project relies on, may this key do what is needed and no more, and how fast is it?

What is written for a test stands under one prefix and is deleted again.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final

from cli.doctor.finding import Finding, bad, good, warn
from cli.doctor.scene import Scene
from cli.say import bytes_text, time_text
from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.config.load import is_loopback
from stoa.contracts.errors import (
    AccessDeniedError,
    BucketError,
    ObjectExistsError,
    ObjectMissingError,
    PreconditionError,
    ServiceUnavailableError,
    SetupMissingError,
)

BUCKET: Final = "bucket"
PERMISSIONS: Final = "permissions"
BANDWIDTH: Final = "bandwidth"
NO_KEY: Final = "set STOA_BUCKET_KEY and STOA_BUCKET_SECRET"
SAMPLE_BYTES: Final = 8 << 20
FIRST_PROBE_BYTES: Final = 1 << 20
QUICK_SECONDS: Final = 0.5
"""A first probe that is up sooner is followed by one of `SAMPLE_BYTES`, which then takes 4 s at most."""
SAMPLE_SECONDS: Final = 2.0
SMALL_SAMPLE_BYTES: Final = 4 << 20
"""A smaller object is here before a line has come up to its speed."""
SLOW_SECONDS: Final = 2 * 3600.0
"""A first join that takes longer than this is worth a warning."""


def check_bucket(scene: Scene) -> Finding:
    """It answers, and keeps create-only and conditional writes. Raises what the store raises."""
    store = scene.store
    if store is None:
        return bad(BUCKET, f"there is no key for {scene.config.bucket.endpoint}", NO_KEY)
    if not scene.is_home:
        return _reads(store, scene.config.run)
    store.check()
    key = keys.probe(secrets.token_hex(8))
    try:
        return _keeps_conditions(store, key)
    finally:
        store.delete([key])


def _reads(store: Store, run: str) -> Finding:
    """All that a Mac's key must do. A key without the right to list is told that a missing object is none of its business."""
    try:
        store.get(keys.run_json(run), max_bytes=1 << 20)
    except ObjectMissingError:
        return warn(BUCKET, f"{store.name} answers; it has no run {run} yet", "a worker waits for `stoa run`")
    except AccessDeniedError as error:
        # Without the right to list, a key is not told that an object is missing.
        return bad(BUCKET, f"{error.message}: the key is wrong or of another run, or there is no run {run}", "ask for a new token")
    return good(BUCKET, f"{store.name} answers, run {run} is there")


def _keeps_conditions(store: Store, key: str) -> Finding:
    fix = "use a bucket with conditional writes: R2, S3, or SeaweedFS as in docker/"
    etag = store.create(key, b"first")
    try:
        store.create(key, b"other")
        return bad(BUCKET, f"{store.name} overwrites an object that was to be created: two trainers would undo each other", fix)
    except ObjectExistsError:
        pass
    try:
        store.swap(key, b"lost", '"00000000000000000000000000000000"')
        return bad(BUCKET, f"{store.name} ignores the condition of a conditional write: two trainers would undo each other", fix)
    except PreconditionError:
        pass
    store.swap(key, b"second", etag)
    if store.get(key, max_bytes=64).data != b"second":
        return bad(BUCKET, f"{store.name} does not give back what was just written", fix)
    return good(BUCKET, f"{store.name} keeps create-only and conditional writes")


def check_permissions(scene: Scene) -> Finding | None:
    """A Mac's key may read versions; that of the run's home may write too, and sees no other bucket."""
    if scene.store is None:
        return None
    try:
        return _of_home(scene, scene.store) if scene.is_home else _of_mac(scene, scene.store)
    except (ServiceUnavailableError, SetupMissingError):
        return None  # the bucket's own check says so


def _of_home(scene: Scene, store: Store) -> Finding:
    if is_loopback(store.settings.endpoint):
        return good(PERMISSIONS, "a server on this machine: its key may do everything, and is no secret")
    if _sees_other_buckets(scene):
        return warn(PERMISSIONS, "this key lists every bucket of its account", f"make one for {store.settings.name} alone")
    return good(PERMISSIONS, "read, write and delete, in this bucket only")


def _of_mac(scene: Scene, store: Store) -> Finding:
    too_much = _too_much(store, scene.config.run)
    if too_much:
        return warn(PERMISSIONS, f"this Mac's key may also {too_much}", "a Mac needs to read only: ask for a token made by `stoa invite`")
    return good(PERMISSIONS, "it reads versions, and may neither list nor write nor delete")


def _sees_other_buckets(scene: Scene) -> bool:
    """A key for one bucket is refused at any other name; one for all is told that there is none of that name."""
    settings = scene.config.bucket
    if scene.credentials is None:
        return False
    other = settings.model_copy(update={"name": f"{settings.name[:40].rstrip('-.')}-{secrets.token_hex(4)}"})
    try:
        Store(other, scene.credentials).check()
    except SetupMissingError:
        return True
    except AccessDeniedError:
        return False
    return True


def _too_much(store: Store, run: str) -> str:
    """What a key may do that a Mac's need not, in words."""
    key = keys.probe(secrets.token_hex(8))
    may: list[str] = []
    if _is_allowed(lambda: next(store.list(keys.checkpoints_prefix(run)), None)):
        may.append("list")
    if _is_allowed(lambda: store.create(key, b"doctor")):
        may.append("write")
        if _is_allowed(lambda: store.delete([key])):
            may.append("delete")
    return ", ".join(may)


def _is_allowed(act: Callable[[], object]) -> bool:
    try:
        act()
    except (AccessDeniedError, BucketError):
        return False
    return True


def check_bandwidth(scene: Scene) -> Finding | None:
    """How fast the newest weights come down, by a piece of them; and up, where this key may write."""
    line = _measured(scene)
    if line is None:
        return None
    num_bytes, down, up = line
    said = f"down {bytes_text(down)}/s" + ("" if up is None else f", up {bytes_text(up)}/s")
    small = num_bytes < SMALL_SAMPLE_BYTES and not scene.is_home
    if small:
        said += f" by an object of {bytes_text(num_bytes)}, most of it the time until a server answers"
    weights = scene.layout.num_bytes if scene.layout is not None else 0
    join_seconds = weights / down
    said += f"; a first join takes {bytes_text(weights)}, {'less than' if small else 'about'} {time_text(max(1.0, join_seconds))}"
    if join_seconds > SLOW_SECONDS:
        return warn(BANDWIDTH, said, "a wired line or another place; joining again later takes much less")
    return good(BANDWIDTH, said)


def measure_line(scene: Scene) -> tuple[float, float | None] | None:
    """Bytes a second down from the bucket, and up where this key may write; None where there is no run to measure with."""
    line = _measured(scene)
    return None if line is None else line[1:]


def _measured(scene: Scene) -> tuple[int, float, float | None] | None:
    """Bytes of the object it is measured by, and both speeds as `measure_line`."""
    store = scene.store
    if store is None or scene.run is None:
        return None
    sample = max(scene.run.model_files, key=lambda file: file.num_bytes, default=None)
    if sample is None:
        return None
    if not scene.is_home:
        num_bytes = min(sample.num_bytes, SAMPLE_BYTES)
        return num_bytes, _rate(lambda: _download(store, sample.key, num_bytes)), None
    key, size = _anchor_part(store, scene) or (sample.key, sample.num_bytes)
    there = size >= SMALL_SAMPLE_BYTES
    num_bytes, down, up = _probed(store, download=not there)
    if not there:
        return num_bytes, down, up
    num_bytes = min(size, SAMPLE_BYTES)
    return num_bytes, _rate(lambda: _download(store, key, num_bytes)), up


def _probed(store: Store, *, download: bool) -> tuple[int, float, float]:
    """Bytes of an object of our own, and both rates by it: down is 0 without `download`. The line decides how large it is."""
    down = up = 0.0
    num_bytes = FIRST_PROBE_BYTES
    while True:
        key, data = keys.probe(secrets.token_hex(8)), secrets.token_bytes(num_bytes)
        try:
            up = _rate(lambda key=key, data=data: _upload(store, key, data))
            quick = num_bytes / up < QUICK_SECONDS and num_bytes < SAMPLE_BYTES
            if download and not quick:
                down = _rate(lambda key=key, size=num_bytes: _download(store, key, size))
        finally:
            store.delete([key])
        if not quick:
            return num_bytes, down, up
        num_bytes = SAMPLE_BYTES


def _anchor_part(store: Store, scene: Scene) -> tuple[str, int] | None:
    parts = [listed for listed in store.list(keys.anchors_prefix(scene.config.run)) if listed.key.endswith(".safetensors")]
    largest = max(parts, key=lambda listed: listed.num_bytes, default=None)
    return None if largest is None else (largest.key, largest.num_bytes)


def _download(store: Store, key: str, num_bytes: int) -> int:
    deadline, done = time.monotonic() + SAMPLE_SECONDS, 0
    reply = store.open_range(key, 0, num_bytes, stall_seconds=SAMPLE_SECONDS)
    for chunk in reply.chunks:
        done += len(chunk)
        if time.monotonic() > deadline:
            break
    reply.chunks.close()
    return done


def _upload(store: Store, key: str, data: bytes) -> int:
    store.create(key, data)
    return len(data)


def _rate(move: Callable[[], int]) -> float:
    """Bytes a second, latency included."""
    began = time.monotonic()
    return max(1, move()) / max(time.monotonic() - began, 1e-3)
