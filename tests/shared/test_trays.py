"""Trays: memory that a learner lends for a batch, found by who may find it and never written while read."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from shared.errors import BadMessage, NoTray
from shared.layout import Packed, layout_of, pack
from shared.links.trays import MAPPED_TRAYS, SUPPORTED, LentTray, TrayLender, TrayTable
from shared.messages import Tray

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="trays need Linux")

LAYOUT = layout_of((("observation", np.dtype(np.float32), (100, 7)), ("index", np.dtype(np.int64), (100,))))
LIMIT = 2**20


def make_lender(most: int = 8, size: int = LAYOUT.nbytes) -> TrayLender:
    lender = TrayLender(most)
    lender.note_size(pack({"bytes": np.zeros(size, np.uint8)}))
    return lender


def lend(lender: TrayLender) -> LentTray:
    lent = lender.lend()
    assert lent is not None
    return lent


def test_batch_put_on_a_tray_is_what_the_learner_takes_back() -> None:
    """Both ends see one memory, described by the header alone."""
    lender, table = make_lender(), TrayTable(LIMIT)
    lent = lend(lender)
    batch = Packed(LAYOUT, table.open(lent.tray))
    batch["observation"][...] = np.arange(700).reshape(100, 7)
    batch["index"][...] = np.arange(100)
    rows = lender.take_back(lent, LAYOUT.text)
    assert np.array_equal(rows["observation"], np.arange(700).reshape(100, 7))
    assert np.array_equal(rows["index"], np.arange(100))
    assert rows.block.nbytes == LAYOUT.nbytes


def test_tray_written_by_another_process_is_read_here() -> None:
    """Through /proc, as a replay service finds it."""
    lender = make_lender()
    lent = lend(lender)
    script = textwrap.dedent(
        """
        import sys
        from shared.links.trays import TrayTable
        from shared.messages import Tray
        TrayTable(2**20).open(Tray.model_validate_json(sys.argv[1]))[:5] = [1, 2, 3, 4, 5]
        """
    )
    subprocess.run([sys.executable, "-c", script, lent.tray.model_dump_json()], check=True, timeout=60)
    assert lent.block[:6].tolist() == [1, 2, 3, 4, 5, 0]


def test_tray_is_not_lent_again_while_any_view_of_its_batch_lives() -> None:
    """A view of a view, long after the batch itself was dropped, still counts."""
    lender = make_lender()
    first = lend(lender)
    name = first.tray.name
    rows = lender.take_back(first, LAYOUT.text)
    del first
    view = rows["observation"][3:5].reshape(-1)[2:]
    del rows
    gc.collect()
    other = lend(lender)
    assert other.tray.name != name
    del view
    assert lend(lender).tray.name == name


def test_tray_whose_request_ended_otherwise_is_never_lent_again() -> None:
    """Somebody who was asleep may still write on it."""
    lender = make_lender(most=2)
    names = set()
    for _ in range(10):
        lent = lend(lender)
        names.add(lent.tray.name)
        lender.leave(lent)
    assert len(names) == 10


def test_lender_lends_no_more_than_it_may() -> None:
    """With all of them lent or read, a request goes without."""
    lender = make_lender(most=3)
    lent = [lend(lender) for _ in range(3)]
    assert lender.lend() is None
    rows = lender.take_back(lent.pop(), LAYOUT.text)
    assert lender.lend() is None
    del rows
    assert lender.lend() is not None


def test_lender_lends_nothing_before_it_knows_a_size_or_after_giving_up() -> None:
    """The first batches say how large a tray must be; a replay that cannot reach them is not asked again."""
    lender = TrayLender(4)
    assert lender.lend() is None
    lender.note_size(pack({"bytes": np.zeros(100, np.uint8)}))
    assert lender.lend() is not None
    lender.give_up("another machine")
    assert lender.lend() is None


def test_lender_that_is_told_not_to_lends_nothing() -> None:
    """replay.shared_memory: false."""
    lender = TrayLender(4, enabled=False)
    lender.note_size(pack({"bytes": np.zeros(100, np.uint8)}))
    assert lender.lend() is None


def test_larger_batch_makes_larger_trays() -> None:
    """Small ones are not lent again."""
    lender = make_lender(size=100)
    lent = lend(lender)
    small = lent.tray.name
    lender.take_back(lent, "index int64[10]")
    lender.note_size(pack({"bytes": np.zeros(5_000, np.uint8)}))
    del lent
    lent = lend(lender)
    assert lent.tray.name != small
    assert lent.block.nbytes == 5_000


def test_batch_said_to_be_larger_than_its_tray_is_refused() -> None:
    """Nothing behind the tray's end is ever looked at."""
    lender = make_lender(size=100)
    lent = lend(lender)
    with pytest.raises(BadMessage, match="800 bytes on a tray of 100"):
        lender.take_back(lent, "index int64[100]")


@pytest.mark.parametrize("arrays", ["index int64[100]", "nonsense"], ids=["too large", "no arrays at all"])
def test_tray_with_a_batch_that_is_refused_makes_room_for_another(arrays: str) -> None:
    """Neither its place nor its descriptor is lost."""
    lender = make_lender(most=1, size=100)
    lent = lend(lender)
    with pytest.raises(BadMessage):
        lender.take_back(lent, arrays)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lent.descriptor)
    assert lend(lender) is not lent


def test_tray_of_nobody_is_no_tray() -> None:
    """A process that is gone, or of another container."""
    with pytest.raises(NoTray, match="cannot be reached"):
        TrayTable(LIMIT).open(Tray(pid=2**30, descriptor=3, name="0" * 32))


def test_descriptor_that_is_something_else_is_not_opened() -> None:
    """A file of that number that is not the tray of that name: its contents stay as they are."""
    read, write = os.pipe()
    try:
        with pytest.raises(NoTray, match="something else"):
            TrayTable(LIMIT).open(Tray(pid=os.getpid(), descriptor=write, name="0" * 32))
    finally:
        os.close(read)
        os.close(write)


def test_tray_under_another_name_is_not_opened() -> None:
    """A number that was used again."""
    lent = lend(make_lender())
    with pytest.raises(NoTray, match="something else"):
        TrayTable(LIMIT).open(lent.tray.model_copy(update={"name": "f" * 32}))


def test_memory_that_may_shrink_is_not_mapped() -> None:
    """Writing behind its end would kill replay."""
    name = "a" * 32
    descriptor = os.memfd_create(f"rookery-{name}", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4096)
        tray = Tray(pid=os.getpid(), descriptor=descriptor, name=name)
        with pytest.raises(NoTray, match="may shrink"):
            TrayTable(LIMIT).open(tray)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        assert TrayTable(LIMIT).open(tray).nbytes == 4096
    finally:
        os.close(descriptor)


def test_trays_own_memory_cannot_be_made_smaller() -> None:
    """Not even by its owner."""
    lent = lend(make_lender())
    with pytest.raises(PermissionError):
        os.ftruncate(lent.descriptor, 1)


@pytest.mark.parametrize("size", [0, LIMIT + 1])
def test_tray_of_an_impossible_size_is_not_mapped(size: int) -> None:
    """Nobody makes replay map more than a message may be."""
    name = "b" * 32
    descriptor = os.memfd_create(f"rookery-{name}", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(NoTray, match="the limit is"):
            TrayTable(LIMIT).open(Tray(pid=os.getpid(), descriptor=descriptor, name=name))
    finally:
        os.close(descriptor)


def test_table_keeps_a_bounded_number_of_trays_open() -> None:
    """Whoever names ever new ones pushes out the oldest, and with a learner go all of its trays."""
    lender, table = make_lender(most=MAPPED_TRAYS + 50), TrayTable(LIMIT)
    lents = [lend(lender) for _ in range(MAPPED_TRAYS + 50)]
    before = len(os.listdir("/proc/self/fd"))
    for lent in lents:
        table.open(lent.tray)
    assert len(table) == MAPPED_TRAYS
    table.clear()
    assert len(table) == 0
    assert len(os.listdir("/proc/self/fd")) == before
