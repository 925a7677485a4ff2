"""Starts the bucket of compose.yml with two keys: its owner's, and one for invited Macs that may only read what they need.

Standard library only. The keys come from the environment and are written to a file that only this user can read, in the
folder that `-dir` names.
"""

import json
import os
import sys
from collections.abc import Mapping

MAC_READS = ("run.json", "HEAD.json", "model/*", "manifests/*", "deltas/*", "anchors/*")
"""As `MAC_READS` of stoa/bucket/keys.py; a test holds the two together."""


def document(environ: Mapping[str, str]) -> str:
    """The identities as the S3 server reads them."""
    owner = {"accessKey": environ["STOA_BUCKET_KEY"], "secretKey": environ["STOA_BUCKET_SECRET"]}
    identities = [{"name": "owner", "credentials": [owner], "actions": ["Admin"]}]
    if environ.get("STOA_MAC_BUCKET_KEY"):
        macs = {"accessKey": environ["STOA_MAC_BUCKET_KEY"], "secretKey": environ["STOA_MAC_BUCKET_SECRET"]}
        identities.append({"name": "macs", "credentials": [macs], "actions": [f"Read:*/runs/*/{what}" for what in MAC_READS]})
    return json.dumps({"identities": identities})


if __name__ == "__main__":
    (folder,) = (word.removeprefix("-dir=") for word in sys.argv if word.startswith("-dir="))
    path = os.path.join(folder, "keys.json")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(document(os.environ))
    os.execvp("weed", ["weed", *sys.argv[1:], f"-s3.config={path}"])  # noqa: S606 - this process becomes the server
