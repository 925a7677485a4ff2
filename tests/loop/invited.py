"""A run with invited Macs: bucket, Temporal with two namespaces, control process, proxy and Macs, all as a person starts them.

The trainer is played by the test, which publishes versions with the real code. What is planted as a secret is kept, so
that a test can look for it wherever it must not be.
"""

import base64
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from activities.connection import connect, setup_namespace
from cli.launch import run_input
from stoa.bucket import keys
from stoa.bucket.invite import Invite, read_invite
from stoa.bucket.manifest import Signer
from stoa.bucket.store import Store
from stoa.config.load import PROJECT_ROOT, load_run
from stoa.config.run import Learning, Macs, RunConfig, Temporal
from stoa.contracts import names
from tests.servers import CREDENTIALS, MAC_CREDENTIALS, BucketServer, TemporalServer, free_ports
from tests.unit.worker_mac.publishing import Publishing

RUN = "friends"
ROOMY = Learning(groups_per_step=64, max_staleness=8, max_staleness_hard=8)
"""Nobody trains here: so much room that no Mac waits for the trainer."""
GUIDE = PROJECT_ROOT / "docs" / "guides" / "invite-macs.md"


def guide_commands() -> list[str]:
    """The commands of the guide that need no account, in its order."""
    blocks = re.findall(r"```console\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


class World:
    """`listen`: where the proxy listens; `bucket_endpoint`: the bucket as Macs see it."""

    def __init__(
        self,
        folder: Path,
        server: TemporalServer,
        bucket: BucketServer,
        store: Store,
        *,
        listen: str = "127.0.0.1",
        bucket_endpoint: str = "",
    ) -> None:
        word = secrets.token_hex(4)
        self.folder, self.server, self.bucket, self.store = folder, server, bucket, store
        self.core, self.mac = f"core-{word}", f"mac-{word}"
        self.proxy_address = f"{listen}:{free_ports(1)[0]}"
        self.seed = secrets.token_bytes(32)
        self.planted = {
            "owner's bucket secret": CREDENTIALS.secret,
            "Macs' bucket secret": MAC_CREDENTIALS.secret,
            "signing key": base64.b64encode(self.seed).decode(),
            "API key": f"planted-{secrets.token_hex(16)}",
        }
        self.left = guide_commands()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        temporal = Temporal(address=server.address, namespace_core=self.core, namespace_mac=self.mac)
        macs = Macs(temporal_address=self.proxy_address, bucket_endpoint=bucket_endpoint)
        self.config = folder / "run.json"
        settings = RunConfig(
            run=RUN, model=str(PROJECT_ROOT / "environments/search/policy"), temporal=temporal, bucket=store.settings, macs=macs
        )
        self.config.write_text(settings.model_dump_json())
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("STOA_", "AWS_"))}
        self.stranger = {**clean, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
        self.owner = {
            **self.stranger,
            "STOA_STATE": str(folder / "owner"),
            "STOA_SIGNING_KEY": self.planted["signing key"],
            "STOA_TEMPORAL_API_KEY": self.planted["API key"],
        }
        base = folder / "base"
        base.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (base / name).write_bytes((PROJECT_ROOT / "environments/search/policy" / name).read_bytes())
        self.run = Publishing(store, base, run=RUN, bucket=store.settings, signer=Signer.from_seed(self.seed), learning=ROOMY)

    async def set_up(self) -> None:
        """Namespaces, the first version, the run's workflow (which waits for a trainer), the control process and the proxy."""
        for namespace in (self.core, self.mac):
            await setup_namespace(self.server.address, namespace)
        self.run.publish(steps_per_version=0)
        core = await connect(self.server.address, self.core)
        run_id, queue = names.run_workflow_id(RUN), names.control_queue(RUN)
        await core.start_workflow(names.RUN_WORKFLOW, run_input(load_run(self.config, environ={})), id=run_id, task_queue=queue)
        self.start("control", sys.executable, "-m", "trainer_gpu.control", str(self.config), stdin=subprocess.PIPE)
        where = () if self.proxy_address.startswith("127.") else ("--behind-tls",)
        self.start("proxy", *STOA, *self.guided("stoa proxy"), *where)

    def start(self, name: str, *command: str, stranger: bool = False, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """A process with the owner's environment, or with a stranger's, which says nothing of the run."""
        environment = self.stranger if stranger else self.owner
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=stdin, env=environment, cwd=PROJECT_ROOT)
        self.processes[name] = process
        return process

    def guided(self, begins: str, **words: str) -> list[str]:
        """The next command of the guide, which must begin so, as arguments of `stoa`, with this world's names in it."""
        line = self.left.pop(0)
        assert line.startswith(begins), line
        words = {"friends.toml": str(self.config), "127.0.0.1:7234": self.proxy_address, **words}
        return [words.get(word, word) for word in shlex.split(line)[1:]]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def stoa(self, *arguments: str, seconds: float = 50.0) -> subprocess.CompletedProcess[str]:
        """A command of the owner."""
        command = [*STOA, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=self.owner, cwd=PROJECT_ROOT, timeout=seconds, check=False)

    def invite(self, host: str) -> tuple[str, Invite]:
        """A token by `stoa invite`; what is secret in it is planted."""
        done = self.stoa(*self.guided("stoa invite", attic=host))
        assert done.returncode == 0, done.stderr
        token = done.stdout.strip()
        invite = read_invite(token)
        self.planted |= {f"token of {host}": token, f"pass of {host}": invite.proof, f"seal key of {host}": invite.seal_key}
        return token, invite

    def join(self, token: str, host: str, *, through: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """A friend's Mac, with nothing set up but what the token says."""
        command = (*through, *STOA, *self.guided("stoa join", TOKEN=token), "--state", str(self.folder / host), "--no-doctor")
        return self.start(host, *command, stranger=True)

    def groups(self, host: str, version: int) -> set[tuple[int, int]]:
        """Sweep and group of what a host has in the bucket at a version."""
        listed = (found.key for found in self.store.list(keys.groups_of_version(RUN, version)))
        return {(parts.sweep, parts.group) for _, parts in keys.ours(listed, keys.parse_group) if parts.host == host}

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 20
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait for something; a process that ends meanwhile is told with its log."""
        deadline = time.monotonic() + seconds
        while not condition():
            for name, process in self.processes.items():
                assert process.poll() in (None, 0), f"{name} ended: {self.log(name).read_text()[-3000:]}"
            assert time.monotonic() < deadline, "\n".join(f"{name}: {self.log(name).read_text()[-1500:]}" for name in self.processes)
            time.sleep(0.1)


STOA = (sys.executable, "-m", "cli.main")
