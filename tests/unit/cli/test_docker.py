"""What stands in docker/ says the same as the code it stands for."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from cli.services import Keys
from stoa.config.load import Credentials

DOCKER = Path(__file__).parents[3] / "docker"
ENVIRON = {"STOA_BUCKET_KEY": "o", "STOA_BUCKET_SECRET": "s", "STOA_MAC_BUCKET_KEY": "m", "STOA_MAC_BUCKET_SECRET": "t"}


@pytest.fixture
def bucket() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_bucket", DOCKER / "bucket.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bucket_of_compose_knows_the_keys_of_the_local_one(bucket: ModuleType) -> None:
    assert json.loads(bucket.document(ENVIRON)) == json.loads(Keys(Credentials("o", "s"), Credentials("m", "t")).document())
    alone = json.loads(bucket.document({name: value for name, value in ENVIRON.items() if "MAC" not in name}))
    assert [one["name"] for one in alone["identities"]] == ["owner"]


def test_what_an_image_installs_is_pinned() -> None:
    pinned = {line.partition("==")[0].lower() for line in (DOCKER.parent / "constraints.txt").read_text().splitlines()}
    found = re.findall(r"pip install .*?-c constraints\.txt((?:[\s\\]+[a-z0-9-]+)+)", (DOCKER / "proxy.Dockerfile").read_text())
    wanted = set(re.findall(r"[a-z0-9-]+", " ".join(found)))
    assert {"grpcio", "temporalio", "cryptography"} <= wanted <= pinned


def test_the_proxy_of_compose_is_what_its_image_starts() -> None:
    compose, image = (DOCKER / "compose.yml").read_text(), (DOCKER / "proxy.Dockerfile").read_text()
    for text in (compose, image):
        assert '"--listen", "0.0.0.0:7234", "--behind-tls"' in text
    assert "dockerfile: docker/proxy.Dockerfile" in compose
    assert '"127.0.0.1:7234:7234"' in compose
