"""Files that a run leaves behind: whole or not at all, and what lies in their place is treated as what it is."""

import errno
import os
import threading

import pytest

from simcse_weince.outputs import replacing, write_text


def test_a_failed_write_keeps_the_old_file_and_names_the_path(tmp_path):
    path = tmp_path / "scores.json"
    write_text(path, "old")
    with pytest.raises(OSError) as caught, replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(temporary))
    assert caught.value.filename == str(path) and caught.value.strerror == "No space left on device"
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["scores.json"]


def test_what_is_no_file_and_cannot_be_written_is_named():
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_text("/dev/full", "text")
    assert caught.value.filename == "/dev/full"


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "scores.json"
    link.symlink_to(tmp_path / "disk" / "real.json")
    for text in ("first", "second"):  # the target is missing, then there
        write_text(link, text)
        assert link.is_symlink() and (tmp_path / "disk" / "real.json").read_text() == text


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path, through_a_link):
    pipe = path = tmp_path / "pipe"
    os.mkfifo(pipe)
    if through_a_link:
        path = tmp_path / "link"
        path.symlink_to(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(path, "through")
    reader.join(timeout=10)
    assert received == ["through"] and pipe.is_fifo()


@pytest.mark.parametrize("name", ["x" * 251 + ".npy", "\u57cb" * 80 + ".npy", "a." + "y" * 250])
def test_any_name_that_the_disk_takes_can_be_written(tmp_path, name):
    write_text(tmp_path / name, "text")
    assert os.listdir(tmp_path) == [name]
