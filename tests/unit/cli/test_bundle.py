"""A bundle holds what a helper needs and none of the secrets that were planted in every place they may come from."""

import base64
import json
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest

from cli.bundle import LOG_BYTES, NO_EVENTS, beside, logs_in, tail, write_bundle
from cli.redact import REMOVED, Redactor
from stoa.config.load import known_secrets
from stoa.config.run import Bucket, RunConfig, Temporal

PLANTED = {
    "STOA_BUCKET_SECRET": "bucket/secret+with=signs",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-K7MDENG",
    "STOA_TEMPORAL_API_KEY": "temporal-api-key-value",
    "HF_TOKEN": "hub-token-of-a-person",
    "MY_DB_PASSWORD": "correct horse battery",
}
SEED = base64.b64encode(bytes(range(32))).decode()
TOKEN = "stoa1.eyJydW4iOiJkZW1vIn0.c2lnbmF0dXJl"
FORMS = {
    "an unknown token in words": (f"joined with {TOKEN}", TOKEN),
    "a presigned address": ("PUT http://b/x?X-Amz-Credential=AKIAX%2Fx&X-Amz-Signature=0123abcd&y=1", "0123abcd"),
    "a header": ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
    "a password in an address": ("http://user:hunter22@host/x", "hunter22"),
    "a setting": ('aws_secret_access_key = "zzz9/zzz"', "zzz9/zzz"),
    "a JSON field": ('{"token_secret": "qqq-7", "bytes": 3}', "qqq-7"),
    "an escaped JSON field": (r'{"event": "{\"password\": \"rrr-8\"}"}', "rrr-8"),
    "a shell's line": ("export API_KEY=sss9sss", "sss9sss"),
    "a key id": ("key AKIAABCDEFGHIJKLMNOP was used", "AKIAABCDEFGHIJKLMNOP"),
    "a hub token": ("hf_abcdefghijklmnopqrstuv", "hf_abcdefghijklmnopqrstuv"),
    "a PEM block": ("-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----", "MIIabc"),
    "half a PEM block": ("-----BEGIN EC PRIVATE KEY-----\nMIIcut", "MIIcut"),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_looks_like_a_secret_is_removed(name: str) -> None:
    text, secret = FORMS[name]
    assert secret not in Redactor(()).clean(text)
    assert REMOVED in Redactor(()).clean(text)


def test_known_value_is_removed_in_every_spelling() -> None:
    value = 'se"cret/value+1'
    clean = Redactor([value]).clean
    for spelling in (value, json.dumps(value), quote(value, safe=""), base64.b64encode(value.encode()).decode()):
        assert clean(f"x {spelling} y").count(REMOVED) == 1
        assert "cret" not in clean(spelling)


@pytest.mark.parametrize(
    "text", ["step 7: 128 tokens", "num_sampled_tokens=5", '"bytes_up": 12', "keys: 3", "sha256 0f0f0f0f", "tokens a second"]
)
def test_innocent_words_stay(text: str) -> None:
    assert Redactor(["short", ""]).clean(text) == text


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    (folder / "mac").mkdir(parents=True)
    monkeypatch.setenv("STOA_STATE", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    (folder / "signing.key").write_text(SEED + "\n")
    (folder / "mac" / "environment.json").write_text(json.dumps({"STOA_BUCKET_KEY": "kept-bucket-key-1"}))
    (folder / "mac" / "invite").write_text(TOKEN)
    return folder


def test_bundle_holds_its_parts_and_no_planted_secret(state: Path, tmp_path: Path) -> None:
    secrets = [*PLANTED.values(), SEED, "kept-bucket-key-1", TOKEN]
    (state / "mac" / "worker.log").write_text("".join(f'{{"event": "oops", "what": {json.dumps(secret)}}}\n' for secret in secrets))
    more = tmp_path / "demo" / "logs"
    more.mkdir(parents=True)
    (more / "trainer.log").write_text(f"sent {secrets[0]} from {tmp_path}/x\n" + "".join(text + "\n" for text, _ in FORMS.values()))
    # Nobody listens there: the bundle says so and is made all the same.
    config = RunConfig(run="tale", bucket=Bucket(endpoint="http://127.0.0.1:9"), temporal=Temporal(address="127.0.0.1:9"))
    done = write_bundle(tmp_path / "out" / "b.zip", config, "", [more])
    assert {"versions.json", "config.json", "doctor.json", "logs/state/mac/worker.log", "logs/logs/trainer.log"} <= set(done.parts)
    assert NO_EVENTS in done.missing, "it says how to name the folder of a worker that was started elsewhere"
    with zipfile.ZipFile(done.path) as file:
        everything = "\n".join(f"{name}\n{file.read(name).decode()}" for name in file.namelist())
        packages = json.loads(file.read("versions.json"))["packages"]
        assert {one["name"] for one in json.loads(file.read("doctor.json"))["checks"]} >= {"disk", "temporal", "bucket"}
        assert json.loads(file.read("config.json"))["run"] == "tale"
    assert packages["pydantic"]
    for secret in [*secrets, *(secret for _, secret in FORMS.values())]:
        assert secret not in everything, secret
    assert str(tmp_path) not in everything and "~/x" in everything
    assert "oops" in everything


def test_bundle_of_a_demo_has_the_logs_beside_its_configuration(state: Path, tmp_path: Path) -> None:
    demo = tmp_path / "demo-1"
    for place in ("state/trainer", "logs"):
        (demo / place).mkdir(parents=True)
    (demo / "config.json").write_text("{}")
    for place in ("state/trainer/events.log", "state/trainer/control-events.log", "logs/trainer.log"):
        (demo / place).write_text(f"{place}\n")
    (state / "trainer").mkdir()
    (state / "trainer" / "events.log").write_text("of another run\n")
    assert [folder.name for folder in beside(demo / "config.json")] == ["logs", "state"]
    assert beside(None) == () == beside(demo / "logs" / "run.toml")
    config = RunConfig(run="tale", bucket=Bucket(endpoint="http://127.0.0.1:9"), temporal=Temporal(address="127.0.0.1:9"))
    done = write_bundle(tmp_path / "b.zip", config, "", (), beside(demo / "config.json"))
    assert done.missing == ()
    with zipfile.ZipFile(done.path) as file:
        told = sorted(file.read(name).decode().strip() for name in done.parts if name.startswith("logs/"))
    # Both folders of state are called so: neither log of one name is lost.
    assert told == ["logs/trainer.log", "of another run", "state/trainer/control-events.log", "state/trainer/events.log"]


def test_other_peoples_logs_beside_a_configuration_are_left_alone_unless_named(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    ours = [
        "bucket.log",
        "control-events.before.log",
        "events.before.log",
        "events.log",
        "mac-12.log",
        "temporal.log",
        "trainer.log",
        "worker.log",
    ]
    for name in (*ours, "access.log", "diary.log", "mac-notes.log", "my-trainer.log"):
        (logs / name).write_text("x\n")
    assert [log.name for _, log in logs_in((), (logs,))] == ours
    assert len(logs_in((logs,), (logs,))) == len(ours) + 4


def test_of_a_long_log_its_end_is_told_from_the_beginning_of_a_line(state: Path, tmp_path: Path) -> None:
    log = state / "mac" / "worker.log"
    log.write_text("first line\n" + "x" * 99 + "\n" + ("y" * 99 + "\n") * (LOG_BYTES // 100))
    (state / "mac" / "link.log").symlink_to("/etc/hostname")
    (state / "mac" / "000003.log").write_bytes(b"a database's journal")
    assert [name for name, _ in logs_in([state])] == ["state/mac/worker.log"]
    text = tail(log)
    assert "first line" not in text and text.startswith("y" * 99 + "\n") and len(text) <= LOG_BYTES


def test_secrets_of_the_environment_are_told_by_their_names(tmp_path: Path) -> None:
    found = known_secrets((tmp_path,), environ={**PLANTED, "PATH": "/bin", "STOA_STATE": "/x", "STOA_SIGNING_KEY": SEED, "EMPTY_TOKEN": ""})
    assert set(found) == {*PLANTED.values(), SEED}
