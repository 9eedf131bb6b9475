from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from envbus.bus.memory.memfd import FOUND_BY_LABEL, create_memfd, open_labelled

pytestmark = pytest.mark.skipif(not FOUND_BY_LABEL, reason="needs Linux")

LABEL = "envbus-test"
#: A file of a file system that is taken out of all folders is called by its name alone.
PROGRAM = """
mount -t tmpfs none /mnt && {make} && exec 7<>/mnt/memfd:{label} && umount -l /mnt && echo made &&
exec sleep 600
"""


@contextlib.contextmanager
def false_file(make: str) -> Iterator[str]:
    """Make a file that is called as a memfd is; yields its path among its process' descriptors."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("needs user namespaces, which this system does not allow")
    program = PROGRAM.format(make=make.format(f"/mnt/memfd:{LABEL}"), label=LABEL)
    process = subprocess.Popen(
        [*apart, "sh", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        yield f"/proc/{process.pid}/fd/7"
    finally:
        process.kill()
        process.communicate()


def test_a_file_is_found_by_its_label_and_its_content_read() -> None:
    fd = create_memfd(f"{LABEL}-1")
    try:
        os.write(fd, b"content")
        found = open_labelled(f"/proc/{os.getpid()}/fd/{fd}", LABEL, os.O_RDONLY)
        try:
            assert os.pread(found, 100, 0) == b"content"
        finally:
            os.close(found)
        with pytest.raises(FileNotFoundError):
            open_labelled(f"/proc/{os.getpid()}/fd/{fd}", "another", os.O_RDONLY)
    finally:
        os.close(fd)


@pytest.mark.parametrize("make", ["mkfifo {}", "touch {}"])
def test_a_file_that_is_called_as_a_memfd_is_not_opened(make: str) -> None:
    with false_file(make) as path:
        assert os.readlink(path) == f"/memfd:{LABEL}"
        with pytest.raises(FileNotFoundError):
            open_labelled(path, LABEL, os.O_RDONLY)
