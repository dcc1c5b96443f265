"""Scratch files that another process uses are left alone, those of dead processes are removed: locks decide."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lit_lazy.support.names_to_paths import delete, join_name

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--map-root-user")
WRITER = """
import sys
from pathlib import Path
from lit_lazy.support import disk

def wait():
    print("writing", flush=True)
    sys.stdin.readline()

path = Path(sys.argv[2])
if sys.argv[1] == "file":
    disk.write_atomically(path, lambda file: (file.write(b"whole"), file.flush(), wait()))
else:
    with disk.create_folder_atomically(path) as scratch:
        (scratch / "part").write_text("whole")
        wait()
"""


@pytest.fixture(params=["a process", "a container"])
def place(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Words before a command that start it here or where other process ids are counted."""
    if request.param == "a process":
        return ()
    if not shutil.which("unshare") or subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and user namespaces, which this machine does not permit")
    return CONTAINER


def start_writer(kind: str, path: Path, place: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process in the middle of writing a file or a folder; it ends when its stdin gets a line."""
    command = [*place, sys.executable, "-c", WRITER, kind, path]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    return writer


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_is_removed_and_what_another_one_writes_is_not(kind, place, tmp_path) -> None:
    path = tmp_path / "out"
    with start_writer(kind, path, place) as killed:
        killed.kill()
        assert killed.stdout is not None
        killed.stdout.read()  # until its child has ended too
    assert len(list(tmp_path.iterdir())) == 1
    with start_writer(kind, path) as first, start_writer(kind, path, place) as second:
        assert len(list(tmp_path.iterdir())) == 2
        first.communicate("go on\n")
        second.kill()
    assert first.returncode == 0
    assert (path if kind == "file" else path / "part").read_text() == "whole"


@pytest.mark.parametrize("name", ["", "..", "/etc", "a/b", "a\0", "a" * 256, "\ud800", None])
def test_what_is_no_name_is_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no name of an entry"):
        join_name(tmp_path, name)


def test_deletion_stays_inside(tmp_path: Path) -> None:
    """Of a folder; a link at the end is itself deleted."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (root / "folder").mkdir(parents=True)
    for link in (root / "link", root / "folder" / "link"):
        link.symlink_to(outside)
    for path in (root / "link" / "kept", root / ".." / "outside", root / "folder" / ".." / "link" / "kept"):
        with pytest.raises(ValueError, match="cannot be removed"):
            delete(path, root)
    for path in (root / "link", root / "folder", root / "gone" / "file"):
        delete(path, root)
    assert [list(root.iterdir()), list(outside.iterdir())] == [[], [outside / "kept"]]


OBSTACLES = {
    "a bind mount": (
        "unshare --mount --map-root-user sh -c 'mount --bind . root/below/folder && exec \"$@\"' -",
        "mounted",
    ),
    "another user's": ("setpriv --reuid=65534 --clear-groups", "may not write in"),
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_cannot_be_deleted_whole_is_left_whole(kind: str, tmp_path: Path) -> None:
    words, message = shlex.split(OBSTACLES[kind][0]), OBSTACLES[kind][1]
    (tmp_path / "root" / "below" / "folder").mkdir(parents=True)
    (tmp_path / "root" / "below" / "a").touch()
    tmp_path.chmod(0o755)
    if subprocess.run([*words, "true"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("this machine permits neither mounts nor other users")
    code = "import lit_lazy.support.names_to_paths as n; n.delete(n.Path('root/below'), n.Path('root'))"
    done = subprocess.run([*words, sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert message in done.stderr.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "below", "folder", "root"]
