"""Links between ranks in processes that hold many descriptors."""

import os
import resource
import socket
from collections.abc import Iterator

import msgspec
import pytest

from tokenmesh.engine.ranks.frames import FrameKind, RankDone, pack_frame
from tokenmesh.engine.ranks.link import LeaderLink

OF_SELECT = 1024
"""`select` takes descriptors below this number."""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * OF_SELECT if hard == resource.RLIM_INFINITY else min(hard, 2 * OF_SELECT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < OF_SELECT:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_link_hears_ranks_above_the_descriptors_that_select_takes() -> None:
    ends: list[str] = []
    here, there = socket.socketpair()
    assert here.fileno() > OF_SELECT
    link = LeaderLink({1: here}, 10.0, lambda reason, is_config: ends.append(reason))
    link.start()
    there.sendall(pack_frame(FrameKind.DONE, msgspec.msgpack.encode(RankDone("same"))))
    assert link.wait_done() == [RankDone("same")]
    assert not ends
    link.close()
    there.close()
