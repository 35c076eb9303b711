"""Waker: a poll in another thread is woken, once for many calls, and never sleeps over one."""

from __future__ import annotations

import socket
import threading

import pytest
import zmq

from dips.transport.lane import Waker


def test_waking_twice_is_waking_once():
    """One byte is under way, however often it is called; after the drain the next call wakes again."""
    waker = Waker()
    try:
        for _ in range(2):
            for _ in range(5):
                waker.wake()
            assert waker.theirs.recv(4096, socket.MSG_PEEK) == b"\0"
            waker.drain()
            with pytest.raises(BlockingIOError):  # else the poll would never sleep again
                waker.theirs.recv(4096)
            waker.drain()  # woken by something else
    finally:
        waker.close()


def test_a_wake_after_the_close_is_nobodys():
    """A late caller is no error: nobody is left to wake."""
    waker = Waker()
    waker.close()
    waker.wake()


def test_no_wake_is_lost():
    """Whoever drains first and looks afterwards sees everything that was posted before a wake."""
    waker, posted, seen, total = Waker(), [], 0, 20_000

    def post() -> None:
        for k in range(total):
            posted.append(k)
            waker.wake()

    thread = threading.Thread(target=post)
    poller = zmq.Poller()
    poller.register(waker.theirs, zmq.POLLIN)
    thread.start()
    try:
        while seen < total:
            assert poller.poll(5000), f"asleep with {len(posted) - seen} posted"
            waker.drain()
            seen = len(posted)
    finally:
        thread.join()
        waker.close()
