"""Where an export goes: new folders, roots of disks, the folder one stands in, and places that cannot be; nothing of anybody's is lost."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.export import _placed, clear_scratch
from stoa.contracts.errors import DiskFullError, UsageError

FILES = ("a.json", "config.json", "model.safetensors")


def fill(scratch: Path) -> None:
    (scratch / "out").mkdir()
    for name in FILES:
        (scratch / "out" / name).write_text(name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("given", ["new", "new/below/it", "there", "link", "dangling", "../{name}/new"])
def test_export_appears_whole_and_leaves_nothing_else(given: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "dangling").symlink_to("made")
    folder = tmp_path / given.format(name=tmp_path.name)
    before = set(tmp_path.rglob("*"))
    with _placed(folder) as scratch:
        fill(scratch)
        assert not (folder / "config.json").exists()
    assert tuple(names(folder)) == FILES
    made = set(tmp_path.rglob("*")) - before
    assert {path.name for path in made} <= {*FILES, "new", "below", "it", "made"}


def test_folder_that_is_there_stays_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a disk can neither be removed nor be renamed over, nor can the folder one stands in."""
    disk = tmp_path / "disk"
    (disk / "lost+found").mkdir(parents=True)
    (disk / ".Trashes").mkdir()
    number = disk.stat().st_ino
    with _placed(disk) as scratch:
        assert scratch.parent == disk, "nothing that is moved crosses from one disk to another"
        fill(scratch)
    assert disk.stat().st_ino == number
    assert names(disk) == sorted([*FILES, "lost+found", ".Trashes"])
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with _placed(Path()) as scratch:
        fill(scratch)
    assert tuple(names(here)) == FILES


@pytest.mark.parametrize("given", ["full", "file", "hidden"])
def test_folder_with_anything_in_it_and_a_file_are_refused_untouched(given: str, tmp_path: Path) -> None:
    for name in ("full", "hidden"):
        (tmp_path / name).mkdir()
    kept = [tmp_path / "full" / "notes.txt", tmp_path / "hidden" / ".git", tmp_path / "file"]
    for path in kept:
        path.write_text("mine")
    with pytest.raises(UsageError, match=f"{given}: not an empty folder; an export overwrites nothing"), _placed(tmp_path / given):
        raise AssertionError("nothing is fetched for a folder that cannot be")
    assert [path.read_text() for path in kept] == ["mine"] * 3


def test_what_somebody_writes_meanwhile_is_kept(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.mkdir()
    for folder in (there, new):
        with pytest.raises(UsageError), _placed(folder) as scratch:
            fill(scratch)
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("mine")
        assert (names(folder), (folder / "config.json").read_text()) == (["config.json"], "mine")


@pytest.mark.parametrize("given", ["file/below", "loop", "x" * 300])
def test_place_that_cannot_be_written_is_named_with_the_reason(given: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=r"cannot be written: .+") as refused, _placed(tmp_path / given) as scratch:
        fill(scratch)
    assert refused.value.hint == "name a folder that you may write to"
    assert names(tmp_path) == ["file", "loop"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="permission denied"), _placed(tmp_path / "new") as scratch:
        fill(scratch)


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="a file system that nobody can write to")
def test_file_system_that_cannot_be_written_is_named() -> None:
    with pytest.raises(UsageError, match="/proc/stoa-export cannot be written"), _placed(Path("/proc/stoa-export")) as scratch:
        fill(scratch)


def test_full_disk_is_told_as_such_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="the disk is full"), _placed(tmp_path / "new") as scratch:
        fill(scratch)
        raise OSError(errno.ENOSPC, "No space left on device", "part")
    assert names(tmp_path) == []


@pytest.mark.parametrize("given", ["new", "there"])
def test_export_that_is_killed_never_looks_done(given: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    lines = (
        "import sys, time; from pathlib import Path; from cli.export import _placed\n"
        "with _placed(Path(sys.argv[1])) as scratch:\n"
        "    (scratch / 'out').mkdir(); (scratch / 'out' / 'config.json').write_text('{}'); print('writes', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", lines, str(tmp_path / given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"writes\n"
        above = tmp_path / given if given == "there" else tmp_path
        clear_scratch(above)
        assert list(above.glob(".stoa-export-*/out")), "one that runs is let be"
        running.send_signal(signal.SIGKILL)
    assert not (tmp_path / given / "config.json").exists()
    left = [path.name for path in (tmp_path / given if given == "there" else tmp_path).iterdir() if path.name != "there"]
    assert len(left) == 1 and left[0].startswith(".stoa-export-"), "and what is left says whose it is"
    with _placed(tmp_path / given) as scratch:
        fill(scratch)
    assert names(tmp_path / given) == sorted(FILES), "and the next export of the same folder removes it"
    assert not list(tmp_path.rglob(".stoa-export-*"))


def test_what_is_not_an_exports_own_stays(tmp_path: Path) -> None:
    """A folder that is just being made, which has no lock yet; one that links elsewhere; a file of such a name."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    (tmp_path / ".stoa-export-new").mkdir()
    old = tmp_path / ".stoa-export-old"
    old.mkdir()
    os.utime(old, (0, 0))
    (tmp_path / ".stoa-export-link").symlink_to("elsewhere")
    (tmp_path / ".stoa-export-file").touch()
    clear_scratch(tmp_path)
    assert names(tmp_path) == [".stoa-export-file", ".stoa-export-link", ".stoa-export-new", "elsewhere"]
    assert names(elsewhere) == ["kept"]
