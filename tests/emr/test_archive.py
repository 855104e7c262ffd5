"""Archives of artifacts: the same bytes for the same folder, back again without loss, and nothing foreign unpacked."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest
import zstandard

from hf_ext.emr.archive import pack, unpack
from tests import warm_python
from tests.hub.published import contents

LONG = "tasks/" + "a" * 64 + "/" + "special_tokens_map_that_is_long_" * 5 + ".json"


@pytest.fixture
def artifact(tmp_path) -> Path:
    """What an archive cares about: files of several sizes, long names, folders, bits that cannot be compressed."""
    folder = tmp_path / "artifact"
    files = {
        "emr.json": b"{}",
        "model.safetensors": os.urandom(300_000),
        "README.md": "Größe\n".encode(),
        "tasks/a/mask.safetensors": bytes(200_000),
        "tasks/a/config.json": b"",
        LONG: b"{}",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").touch()
    return folder


def test_there_and_back_without_what_is_hidden(artifact, tmp_path):
    found = pack(artifact, tmp_path / "a.tar.zst")
    expected = {name: content for name, content in contents(artifact).items() if not name.startswith(".cache")}
    assert found["bytes"] == sum(map(len, expected.values()))
    assert found["archive_bytes"] == (tmp_path / "a.tar.zst").stat().st_size < 310_000
    assert (found["files"], found["path"]) == (6, str(tmp_path / "a.tar.zst"))
    assert contents(unpack(tmp_path / "a.tar.zst", tmp_path / "there" / "b")) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.zst", "artifact", "there"]
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["b"]


def test_the_same_folder_gives_the_same_bytes(artifact, tmp_path):
    pack(artifact, tmp_path / "first.tar.zst")
    copy = tmp_path / "elsewhere"
    # Written in another order, later, with other rights; one file is a link, as in a Hub's cache.
    for name in sorted(contents(artifact), reverse=True):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((artifact / name).read_bytes())
        os.utime(copy / name, (0, 0))
    (copy / "README.md").chmod(0o755)
    (copy / "emr.json").unlink()
    (copy / "emr.json").symlink_to(artifact / "emr.json")
    pack(copy, tmp_path / "second.tar.zst")
    assert (tmp_path / "first.tar.zst").read_bytes() == (tmp_path / "second.tar.zst").read_bytes()
    assert pack(artifact, tmp_path / "small.tar.zst", level=19)["files"] == 6
    assert contents(unpack(tmp_path / "small.tar.zst", tmp_path / "b")).keys() < contents(artifact).keys()


@pytest.mark.skipif(shutil.which("tar") is None or shutil.which("zstd") is None, reason="needs tar and zstd")
def test_tar_reads_it(artifact, tmp_path):
    pack(artifact, tmp_path / "a.tar.zst")
    (tmp_path / "b").mkdir()
    subprocess.run(["tar", "--zstd", "-xf", tmp_path / "a.tar.zst", "-C", tmp_path / "b"], check=True)
    assert contents(tmp_path / "b") == contents(unpack(tmp_path / "a.tar.zst", tmp_path / "c"))


@pytest.mark.parametrize("kept", [0, 3, 40, 0.5, 0.999, -5])
def test_an_archive_that_was_cut_off_is_refused_and_nothing_is_left(artifact, tmp_path, kept):
    pack(artifact, tmp_path / "a.tar.zst")
    data = (tmp_path / "a.tar.zst").read_bytes()
    (tmp_path / "cut.tar.zst").write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"cut\.tar\.zst: not a complete archive of an artifact .*pack it again"):
        unpack(tmp_path / "cut.tar.zst", tmp_path / "b")
    assert sorted(tmp_path.iterdir()) == before


def test_a_changed_byte_is_found(artifact, tmp_path):
    pack(artifact, tmp_path / "a.tar.zst")
    data = bytearray((tmp_path / "a.tar.zst").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.tar.zst").write_bytes(data)
    with pytest.raises(ValueError, match="not a complete archive"):
        unpack(tmp_path / "a.tar.zst", tmp_path / "b")


def forged(path: Path, *entries: tarfile.TarInfo) -> Path:
    """An archive with any entries, compressed as ours are."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for entry in (tarfile.TarInfo("emr.json"), *entries):
            entry.size = 2 if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(b"{}"))
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(raw.getvalue()))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../evil.json")],
        [entry("tasks/../../evil.json")],
        [entry("/tmp/evil.json")],
        [entry("C:\\evil.json")],
        [entry("tasks//a")],
        [entry(".ssh/authorized_keys")],
        [entry("tasks", tarfile.SYMTYPE, "/tmp"), entry("tasks/evil.json")],
        [entry("link.json", tarfile.LNKTYPE, "/etc/passwd")],
        [entry("pipe", tarfile.FIFOTYPE)],
        [entry("disk", tarfile.BLKTYPE)],
        [entry("folder", tarfile.DIRTYPE)],
        [entry("emr.json")],
    ],
    ids=lambda entries: entries[0].name,
)
def test_what_leads_out_of_the_folder_is_refused(tmp_path, entries):
    archive = forged(tmp_path / "evil.tar.zst", *entries)
    with pytest.raises(ValueError, match=r"no regular file inside the folder|is in it twice"):
        unpack(archive, tmp_path / "in" / "out")
    assert list((tmp_path / "in").iterdir()) == []
    assert not list(tmp_path.rglob("evil.json"))


def test_an_archive_of_something_else(tmp_path):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("notes.txt"), io.BytesIO())
    (tmp_path / "a.tar.zst").write_bytes(zstandard.ZstdCompressor().compress(raw.getvalue()))
    with pytest.raises(ValueError, match=r"no emr\.json in it"):
        unpack(tmp_path / "a.tar.zst", tmp_path / "b")
    (tmp_path / "a.tar.zst").write_bytes(raw.getvalue())
    with pytest.raises(ValueError, match="not a complete archive"):
        unpack(tmp_path / "a.tar.zst", tmp_path / "b")


def test_more_than_the_disk_holds_is_refused_before_anything_is_written(tmp_path):
    # The header of a frame that says how long its content is, in eight bytes.
    header = b"\x28\xb5\x2f\xfd\xe0" + (10**18).to_bytes(8, "little")
    (tmp_path / "a.tar.zst").write_bytes(header + bytes(20))
    with pytest.raises(OSError, match="1,000,000,000,000,000,000 bytes are to be unpacked, and the disk has less"):
        unpack(tmp_path / "a.tar.zst", tmp_path / "b", max_bytes=10**19, max_ratio=1e18)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.zst"]


def test_what_is_given_must_be_usable(artifact, tmp_path):
    with pytest.raises(ValueError, match=r"no emr\.json in it, so it is no artifact"):
        pack(tmp_path, tmp_path / "a.tar.zst")
    with pytest.raises(ValueError, match="level must be from 1 to 19, got 20"):
        pack(artifact, tmp_path / "a.tar.zst", level=20)
    pack(artifact, tmp_path / "a.tar.zst")
    with pytest.raises(FileExistsError, match="exists; choose another name"):
        pack(artifact, tmp_path / "a.tar.zst")
    pack(artifact, tmp_path / "a.tar.zst", overwrite=True)
    with pytest.raises(FileExistsError, match="exists; choose another place"):
        unpack(tmp_path / "a.tar.zst", artifact)
    (artifact / "a\\b").touch()
    with pytest.raises(ValueError, match="a name that not every system can store"):
        pack(artifact, tmp_path / "b.tar.zst")


WITHOUT_ZSTANDARD = """
    import sys
    sys.modules["zstandard"] = None
    from hf_ext.emr.archive import pack, unpack
    for run in (pack, unpack):
        try:
            run(*sys.argv[1:])
        except ImportError as error:
            print(error)
"""


def test_without_zstandard_it_says_what_to_install(artifact, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_ZSTANDARD), str(artifact), str(tmp_path / "b")]
    done = warm_python.run(command, env=os.environ, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install 'hf-ext[archive]'") == 2


def test_an_archive_that_would_fill_the_disk_is_refused_before_anything_is_written(artifact, tmp_path):
    (artifact / "tasks" / "a" / "mask.safetensors").write_bytes(bytes(150_000_000))
    (artifact / "model.safetensors").write_bytes(b"")
    archive = tmp_path / "bomb.tar.zst"
    pack(artifact, archive)
    assert archive.stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"times as many; .* raise max_ratio \(--max-ratio\)"):
        unpack(archive, tmp_path / "b")
    with pytest.raises(ValueError, match=r"at most 1,000,000 are allowed.*--max-bytes"):
        unpack(archive, tmp_path / "b", max_bytes=1_000_000, max_ratio=1e6)
    with pytest.raises(ValueError, match=r"more than 5 files.*--max-files"):
        unpack(archive, tmp_path / "b", max_files=5, max_ratio=1e6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "bomb.tar.zst"]
    assert unpack(archive, tmp_path / "b", max_ratio=1e6).is_dir()


def test_an_entry_that_grows_is_refused(tmp_path):
    """A name of a gigabyte, which tarfile would read into memory, and a sparse file."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        long = tarfile.TarInfo("emr.json")
        long.pax_headers = {"comment": "x" * 100_000}
        tar.addfile(long)
    (tmp_path / "a.tar.zst").write_bytes(zstandard.compress(raw.getvalue()))
    with pytest.raises(ValueError, match="an entry of type b'x' has 100,"):
        unpack(tmp_path / "a.tar.zst", tmp_path / "b")
    archive = forged(tmp_path / "c.tar.zst", entry("holes", tarfile.GNUTYPE_SPARSE))
    with pytest.raises(ValueError, match="no regular file inside"):
        unpack(archive, tmp_path / "b")


def test_a_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file; give an archive"):
        unpack(tmp_path / "pipe", tmp_path / "b")
