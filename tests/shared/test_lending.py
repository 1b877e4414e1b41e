"""Blocks that libzmq sends from where they lie: never written to before it has let go, and then again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from services.replay.recycler import Recycler
from services.replay.release import RELEASE
from shared import lending
from shared.layout import Packed, parse_layout
from shared.lending import Loan, lend
from shared.links.frames import send_frames
from tests.waiting import wait_for

BIG = 1 << 22  # more than the sockets' buffers take
WAIT_S = 20.0


class Link:
    """A PUSH and a PULL over tcp, and a context that is closed without waiting for anything."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.push, self.pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.pull.set_hwm(1)  # what nobody reads stays with the sender
        self.endpoint = f"tcp://127.0.0.1:{self.pull.bind_to_random_port('tcp://127.0.0.1')}"
        self.push.connect(self.endpoint)


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.context.destroy(linger=0)


def lent(size: int = BIG, fill: int = 7) -> Loan:
    loan = lend(np.full(size, fill, np.uint8), RELEASE)
    assert loan is not None
    return loan


def came_back(loan: Loan) -> bool:
    return not loan.out


def all_are(frame: zmq.Frame, value: int) -> bool:
    array = np.frombuffer(frame.buffer, np.uint8)
    return bool((array == value).all())


@pytest.mark.parametrize("size", [1, 1_000, 100_000, BIG])
def test_block_that_has_arrived_is_released(link: Link, size: int) -> None:
    """Small or large: it arrives as it was, and then libzmq says that it has let go."""
    loan = lent(size)
    loan.send(link.push, zmq.NOBLOCK)
    frame = link.pull.recv(copy=False)
    assert len(frame) == size
    assert all_are(frame, 7)
    wait_for(lambda: came_back(loan), "given back", WAIT_S, 0.01)


def test_block_that_nobody_reads_stays_lent(link: Link) -> None:
    """What is still in a queue is not free, however long that takes."""
    recycler, loans = Recycler(), {}
    for _block, address, loan in [recycler.block(BIG) for _ in range(6)]:
        assert loan is not None
        loans[address] = loan
        loan.send(link.push, zmq.NOBLOCK)
    del _block, loan
    time.sleep(0.3)  # libzmq may send what the sockets' buffers take
    given = recycler.block(BIG)[1]
    assert given not in {address for address, loan in loans.items() if loan.out}
    assert any(loan.out for loan in loans.values())
    for _ in loans:
        link.pull.recv(copy=False)
    wait_for(lambda: all(came_back(loan) for loan in loans.values()), "given back", WAIT_S, 0.01)
    assert recycler.block(BIG)[1] in loans


def test_full_queue_refuses_a_block_and_has_it_released(link: Link) -> None:
    """Nothing was queued, so nothing is lent."""
    alone = link.context.socket(zmq.PUSH)
    loan = lent()
    with pytest.raises(zmq.Again):
        loan.send(alone, zmq.NOBLOCK)
    alone.close()
    assert not loan.out


def test_closed_socket_refuses_a_block_and_has_it_released(link: Link) -> None:
    """The mistake is an error as it is with any other message."""
    loan = lent()
    link.push.close()
    with pytest.raises(zmq.ZMQError):
        loan.send(link.push, zmq.NOBLOCK)
    assert not loan.out


def test_peer_that_disconnects_has_its_blocks_released(link: Link) -> None:
    """What waits for somebody who has gone is dropped, and comes back."""
    router, dealer = link.context.socket(zmq.ROUTER), link.context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, b"reader")
    dealer.set_hwm(1)
    dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    dealer.send(b"hello")
    router.recv_multipart()
    loans = [lent() for _ in range(6)]
    for loan in loans:
        router.send(b"reader", zmq.SNDMORE)
        loan.send(router, zmq.NOBLOCK)
    assert any(loan.out for loan in loans)
    dealer.close(linger=0)

    def all_back() -> bool:
        router.poll(0)  # a ROUTER tidies up when it is used
        return all(came_back(loan) for loan in loans)

    wait_for(all_back, "given back", WAIT_S, 0.01)
    router.close()


def test_context_that_is_closed_with_blocks_queued_releases_them() -> None:
    """A service that ends throws away what it could not send; the memory is whole until then."""
    link = Link()
    loans = [lent() for _ in range(6)]
    for loan in loans:
        loan.send(link.push, zmq.NOBLOCK)
    assert any(loan.out for loan in loans)
    link.context.destroy(linger=0)
    assert not any(loan.out for loan in loans)


def test_block_whose_owner_is_gone_arrives_whole(link: Link) -> None:
    """Libzmq may still read what nobody here holds any more; then it is forgotten."""
    for number in range(8):
        lent(BIG, number).send(link.push, zmq.NOBLOCK)
    trash = [np.full(BIG, 255, np.uint8) for _ in range(8)]  # would land in memory that was freed
    for number in range(8):
        assert all_are(link.pull.recv(copy=False), number)
    del trash
    wait_for(lambda: not any(loan.out for loan in lending._OUT), "given back", WAIT_S, 0.01)
    lent(1)
    assert not lending._OUT


def test_block_that_is_sent_again_while_it_is_out_arrives_twice(link: Link) -> None:
    """Two readers of one block: pyzmq keeps count of the second."""
    recycler = Recycler()
    block, address, loan = recycler.block(BIG)
    block[:] = 9
    assert loan is not None
    loan.send(link.push, zmq.NOBLOCK)
    loan.send(link.push, zmq.NOBLOCK)
    del block, loan
    assert recycler.block(BIG)[1] != address
    assert all_are(link.pull.recv(copy=False), 9)
    assert all_are(link.pull.recv(copy=False), 9)
    wait_for(lambda: recycler.block(BIG)[1] == address, "given back", WAIT_S, 0.01)


def test_thousands_of_messages_in_few_blocks_are_never_written_over() -> None:
    """Each block is filled anew as soon as it is free while others are on their way; the reader is uneven."""
    link, size, count = Link(), 200_000, 4_000
    link.push.set_hwm(8)
    recycler, wrong = Recycler(), []

    def read() -> None:
        for number in range(count):
            frame = link.pull.recv(copy=False)
            if number % 97 == 0:
                time.sleep(0.002)
            if not all_are(frame, number % 251):
                wrong.append(number)

    reader = threading.Thread(target=read)
    reader.start()
    addresses = set()
    for number in range(count):
        block, address, loan = recycler.block(size)
        assert loan is not None
        block[:] = number % 251
        del block
        link.push.poll(flags=zmq.POLLOUT)
        loan.send(link.push, zmq.NOBLOCK)
        addresses.add(address)
    reader.join()
    link.context.destroy(linger=0)
    assert wrong == []
    assert len(addresses) < 32


def test_message_with_a_loan_arrives_like_any_other(link: Link) -> None:
    """The header and the block are two frames of one message."""
    block = np.arange(64, dtype=np.uint8)
    packed = Packed(parse_layout("a uint8[64]"), block, lend(block, RELEASE))
    send_frames(link.push, [b"header", block.data], packed)
    assert link.pull.recv_multipart() == [b"header", block.tobytes()]


def test_pyzmq_whose_libzmq_cannot_be_reached_sends_as_ever(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing is lent, and reference counts alone say what is free."""
    monkeypatch.setattr(lending, "_BACKEND", "zmq.backend.not_there")
    assert lending._find_libzmq() is None
    monkeypatch.setattr(lending, "_LIBZMQ", None)
    recycler = Recycler()
    block, address, loan = recycler.block(BIG)
    assert loan is None
    block[:] = 3
    packed = Packed(parse_layout(f"a uint8[{BIG}]"), block, loan)
    send_frames(link.push, [b"header", packed.block.data], packed)
    del block, packed
    assert recycler.block(BIG)[1] != address
    assert link.pull.recv() == b"header"
    assert all_are(link.pull.recv(copy=False), 3)
    wait_for(lambda: recycler.block(BIG)[1] == address, "given back", WAIT_S, 0.01)


def test_libzmq_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two libzmqs in one process must never get each other's sockets."""
    assert lending._find_libzmq() is not None
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 0, 0))
    assert lending._find_libzmq() is None


ENDS_AT_ONCE = """
import numpy as np, zmq
from services.replay.release import RELEASE
from shared.lending import lend
context = zmq.Context()
push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
pull.set_hwm(1)
push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
for number in range(40):
    lend(np.full(1 << 22, number, np.uint8), RELEASE).send(push, 0)
for _ in range(20):
    pull.recv(copy=False)
"""


def test_process_that_ends_with_blocks_on_their_way_ends_well() -> None:
    """Libzmq's threads may still read and release while the interpreter takes itself apart."""
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", ENDS_AT_ONCE], check=False, capture_output=True, timeout=120
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
