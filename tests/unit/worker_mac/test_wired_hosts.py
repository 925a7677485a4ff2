import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoa.contracts.errors import WiredError
from worker_mac.cluster.hosts import Launch, WiredHost, choose_backend, hostfile, read_hosts, read_split
from worker_mac.cluster.probe import Said, addresses_of, read_wire
from worker_mac.cluster.split import Strength, split_layers

IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 12:34:56:78:9a:bc
\tinet 192.168.1.20 netmask 0xffffff00 broadcast 192.168.1.255
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 36:aa:bb:cc:dd:ee
\tinet 169.254.33.7 netmask 0xffff0000 broadcast 169.254.255.255
\tmember: en1 flags=3<LEARNING,DISCOVER>
\tstatus: active
"""
PORTS = """
Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 12:34:56:78:9a:bc

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:aa:bb:cc:dd:ee
"""
UNPLUGGED = IFCONFIG.replace("\tinet 169.254.33.7 netmask 0xffff0000 broadcast 169.254.255.255\n", "")
OTHER = IFCONFIG.replace("169.254.33.7", "169.254.90.1").replace("192.168.1.20", "192.168.1.21")


class KeptAnswers:
    """Answers by (host, first word); what is not kept is not there."""

    def __init__(self, answers: dict[tuple[str, str], Said]) -> None:
        self.answers = answers

    def ask(self, host: WiredHost, command: Sequence[str]) -> Said:
        return self.answers.get((host.ssh, command[0]), Said(127, f"{command[0]}: not found"))


def probe_of(**ifconfigs: str) -> KeptAnswers:
    answers = {}
    for name, text in ifconfigs.items():
        host = "127.0.0.1" if name == "here" else name
        answers |= {(host, "ifconfig"): Said(0, text), (host, "networksetup"): Said(0, PORTS)}
    return KeptAnswers(answers)


def written(folder: Path, value: object) -> Path:
    path = folder / "hosts.json"
    path.write_text(json.dumps(value))
    return path


def test_hosts_are_read_as_mlx_writes_them(tmp_path: Path) -> None:
    rows = [{"ssh": "127.0.0.1", "ips": ["169.254.1.1"]}, {"ssh": "ann@mini.local", "memory_bytes": 9, "bandwidth_bytes": 7}]
    expected = (WiredHost("127.0.0.1", ("169.254.1.1",)), WiredHost("ann@mini.local", (), (), 9, 7))
    assert read_hosts(written(tmp_path, rows)) == read_hosts(written(tmp_path, {"hosts": rows})) == expected


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"ssh": "127.0.0.1"}], "two Macs or more"),
        ([{"ssh": "mini.local"}, {"ssh": "127.0.0.1"}], "the first Mac is mini.local"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "a"}, {"ssh": "a"}], "names a Mac twice"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "a", "memory": 3}], "memory is not a setting"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "a", "memory_bytes": "9"}], "not a whole number"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "-oProxyCommand=x"}], "not what MLX's hostfile has"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "a\x00b"}], "not what MLX's hostfile has"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "a b"}], "not what MLX's hostfile has"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "a", "ips": "b"}], "not what MLX's hostfile has"),
        ([{"ssh": "127.0.0.1"}, {"ssh": "a", "memory_bytes": True}], "not a whole number"),
        ([{"ssh": "127.0.0.1"}, {"ip": "a"}], "no ssh name"),
        ("nonsense", "not a list"),
    ],
)
def test_a_hosts_file_that_cannot_be_used_says_why(tmp_path: Path, rows: object, words: str) -> None:
    with pytest.raises(WiredError, match=words):
        read_hosts(written(tmp_path, rows))


def test_what_is_shared_out_stands_in_the_file_and_in_the_line(tmp_path: Path) -> None:
    rows = [{"ssh": "127.0.0.1"}, {"ssh": "mini.local"}]
    assert read_split(written(tmp_path, rows)) == read_split(written(tmp_path, {"hosts": rows})) == "pipeline"
    path = written(tmp_path, {"hosts": rows, "split": "tensor"})
    assert read_split(path) == "tensor" and len(read_hosts(path)) == 2
    launch = Launch("mlx.launch", path, read_hosts(path), "169.254.33.7", Path("/e"), (), split=read_split(path))
    assert " --split tensor " in launch.text() and "--split" not in Launch("mlx.launch", path, read_hosts(path), "x", Path("/e"), ()).text()
    path = written(tmp_path, {"hosts": rows, "split": "layers"})
    with pytest.raises(WiredError, match="split is 'layers'"):
        read_split(path)
    path = written(tmp_path, {"hosts": rows, "splt": "tensor"})
    with pytest.raises(WiredError, match="splt is not a setting"):
        read_hosts(path)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"[" * 200_000, b"{"])
def test_a_file_that_is_no_json_is_told_and_never_a_crash(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_bytes(data)
    for read in (read_hosts, read_split):
        with pytest.raises(WiredError, match="cannot be read"):
            read(path)


def test_addresses_are_those_of_the_bridge_now_whatever_the_file_says() -> None:
    hosts = (WiredHost("127.0.0.1", ("169.254.5.5",)), WiredHost("mini.local", ("192.168.1.21",)))
    found = addresses_of(probe_of(here=IFCONFIG, **{"mini.local": OTHER}), hosts)
    assert found == ("169.254.33.7", "169.254.90.1")
    assert json.loads(hostfile(hosts, found)) == [
        {"ssh": "127.0.0.1", "ips": ["169.254.33.7"]},
        {"ssh": "mini.local", "ips": ["169.254.90.1"]},
    ]


def test_wifi_is_refused_and_a_missing_wire_named() -> None:
    probe = probe_of(here=IFCONFIG, **{"mini.local": UNPLUGGED})
    with pytest.raises(WiredError, match=r"192\.168\.1\.20 is its Wi-Fi"):
        addresses_of(probe, (WiredHost("127.0.0.1"), WiredHost("mini.local", ("192.168.1.20",))))
    with pytest.raises(WiredError, match=r"mini\.local has no address on bridge0"):
        addresses_of(probe, (WiredHost("127.0.0.1"), WiredHost("mini.local")))
    with pytest.raises(WiredError, match=r"cannot be asked: ifconfig: not found"):
        addresses_of(probe, (WiredHost("127.0.0.1"), WiredHost("gone.local")))
    assert read_wire(IFCONFIG, PORTS).is_wireless("192.168.1.20")
    assert not read_wire(IFCONFIG, PORTS).is_wireless("169.254.33.7")


def test_several_ranks_on_one_machine_need_no_wire() -> None:
    assert addresses_of(KeptAnswers({}), (WiredHost("127.0.0.1"),) * 3) == ("127.0.0.1",) * 3


def test_the_line_has_relative_folders_and_stated_strengths() -> None:
    hosts = (WiredHost("127.0.0.1", memory_bytes=5), WiredHost("mini.local"))
    line = Launch("mlx.launch", Path("/s/hosts.json"), hosts, "169.254.33.7", Path("/s/ended.json"), ("run.toml", "--state", "/s"))
    assert line.text() == (
        "mlx.launch --hostfile /s/hosts.json --backend ring --starting-port 3700 --cwd stoa-wired --python venv/bin/python -- "
        "-m worker_mac.cluster.rank --control 169.254.33.7:3750 --backend ring --ended /s/ended.json --limits 5,0 -- run.toml --state /s"
    )


def test_jaccl_is_taken_only_where_mlx_has_it_and_every_host_names_its_devices() -> None:
    bare = (WiredHost("127.0.0.1"), WiredHost("b"))
    wired = (WiredHost("127.0.0.1", rdma=(None, "rdma_en2")), WiredHost("b", rdma=("rdma_en2", None)))
    assert choose_backend(bare, ("jaccl", "ring")) == "ring"
    assert choose_backend(wired, ("ring",)) == "ring"
    assert choose_backend(wired, ("jaccl", "ring")) == "jaccl"
    with pytest.raises(WiredError, match="no ring"):
        choose_backend(bare, ())


def strengths(*pairs: tuple[int | None, float]) -> list[Strength]:
    return [Strength(limit, bandwidth) for limit, bandwidth in pairs]


def test_layers_go_by_bandwidth_and_the_head_counts_for_the_last() -> None:
    # Twelve layers of 10, embedding 20: the quick one reads 70 in a time of 35, the slow one 50 + 20 in 70, and so on.
    assert split_layers([10] * 12, [1] * 12, 0, 0, strengths((None, 2.0), (None, 1.0))) == [range(8), range(8, 12)]
    assert split_layers([10] * 12, [1] * 12, 20, 0, strengths((None, 1.0), (None, 1.0))) == [range(7), range(7, 12)]


def test_memory_wins_over_bandwidth() -> None:
    # The quick Mac holds 20 for the embedding, 11 a layer: four of them in 64.
    assert split_layers([10] * 12, [1] * 12, 20, 0, strengths((64, 9.0), (None, 1.0))) == [range(4), range(4, 12)]


def test_what_does_not_fit_one_fits_two_and_what_fits_none_says_so() -> None:
    with pytest.raises(WiredError, match="do not fit these 1 Macs"):
        split_layers([10] * 10, [1] * 10, 10, 5, strengths((100, 1.0)))
    assert split_layers([10] * 10, [1] * 10, 10, 5, strengths((100, 1.0), (100, 1.0))) == [range(5), range(5, 10)]
    with pytest.raises(WiredError, match="do not fit these 2 Macs"):
        split_layers([10] * 10, [1] * 10, 10, 5, strengths((60, 1.0), (60, 1.0)))
    with pytest.raises(WiredError, match="1 layers cannot be split over 2"):
        split_layers([10], [1], 10, 5, strengths((100, 1.0), (100, 1.0)))


def test_hosts_that_are_not_there_are_told_without_a_number(tmp_path: Path) -> None:
    with pytest.raises(WiredError, match=r"hosts\.json: no such file$"):
        read_hosts(tmp_path / "hosts.json")
