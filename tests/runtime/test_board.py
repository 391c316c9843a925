"""The watchdog of a rank whose device waits: who is gone, what was waited for, and when it keeps still."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time

import pytest

pytest.importorskip("torch")
from ranks import PATIENCE_S, start_server


def process(how, timeout_s, lives_s, out, err):
    """A process with a watchdog, which ends after `lives_s` by itself; what it prints goes to two files."""
    from octopipe.runtime.ranks.pending_board import Board, Place, Watchdog

    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    asked, looked = itertools.count(), itertools.count()

    def where():
        again = next(asked) > 0
        if how == "driver hangs" and again:
            time.sleep(1000)
        if how == "device failed" and again:
            raise RuntimeError("CUDA error: the server died")
        moving = time.monotonic() if how == "moves" else 0
        peer = 0 if how in ("waits for another", "driver hangs") else 1
        return Place(moving, "waits on its device for the output of 0F1", peer)

    def dead():  # dying takes a moment
        return [] if how == "device failed" and next(looked) < 5 else [1]

    Watchdog(Board(None, "x", 0, 2), where, timeout_s=timeout_s, device_busy=lambda: how != "idle", dead=dead)
    time.sleep(lives_s)
    print("lived", flush=True)


@pytest.fixture
def watch(tmp_path):
    """(exit code, what it printed, what it complained about) of a process with a watchdog."""

    def run(how, timeout_s=PATIENCE_S, lives_s=PATIENCE_S):
        start_server()
        out, err = tmp_path / "out", tmp_path / "err"
        args = (how, timeout_s, lives_s, str(out), str(err))
        watched = multiprocessing.get_context("forkserver").Process(target=process, args=args)
        watched.start()
        watched.join(2 * PATIENCE_S)
        return watched.exitcode, out.read_text(), err.read_text()

    return run


@pytest.mark.parametrize(("how", "words"), [("waits", "rank 1 is gone;"), ("device failed", "and the device failed;")])
def test_dead_peer_ends_the_process_with_what_was_waited_for(how, words, watch):
    code, out, err = watch(how)
    assert code == 1
    assert "lived" not in out
    (line,) = err.splitlines()
    assert line.startswith("octopipe: rank 0: rank 1 is gone")
    assert words in line
    assert "pending ops: rank 0: waits on its device for the output of 0F1; rank 1: no answer" in line


@pytest.mark.parametrize("how", ["moves", "idle", "waits for another"])
def test_others_death_alone_ends_nothing(how, watch):
    assert watch(how, lives_s=1.5) == (0, "lived\n", "")


def test_no_progress_ends_the_process_at_the_timeout(watch):
    code, _, err = watch("waits for another", 0.5)
    assert code == 1
    assert "made no progress for 0.5 s" in err


def test_a_driver_that_never_answers_cannot_silence_the_watchdog(watch):
    code, _, err = watch("driver hangs", 0.8)
    assert code == 1
    assert "made no progress for 0.8 s" in err
    assert "rank 0: waits on its device for the output of 0F1 (the device's driver does not answer)" in err


def test_whoever_started_the_ranks_says_what_they_wait_for():
    """Nothing is asked of the ranks: their last lines are in the store, which the starting process serves."""
    import torch.distributed as dist

    from octopipe.base.errors import OctoPipeError
    from octopipe.runtime.ranks.pending_board import Board
    from octopipe.runtime.ranks.watch import Watch

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    board = Board(store, "x", 1, 2)
    board._seat = 1  # as in a process of rank 1
    board.write("waits for the output of 0F1")
    ours = [pipe for pipe, _ in pipes]
    with pytest.raises(OctoPipeError, match=r"pending ops: rank 0: no answer; rank 1: waits for the output of 0F1"):
        Watch([multiprocessing.current_process()] * 2, ours, print, store, grace_s=1.0, timeout_s=0.1).run()
    board.say("the device made no progress for 3 s")
    for _, theirs in pipes:
        theirs.close()
    gone = [multiprocessing.Process(target=exit, args=(1,)) for _ in range(2)]
    for process in gone:
        process.start()
    with pytest.raises(OctoPipeError, match=r"exit code 1 .*without a message|the device made no progress for 3 s"):
        Watch(gone, ours, print, store, grace_s=1.0, timeout_s=PATIENCE_S).run()


def test_the_rank_that_failed_is_named_even_if_those_that_waited_for_it_are_heard_long_before():
    from octopipe.base.errors import OctoPipeError
    from octopipe.runtime.ranks.watch import Watch
    from octopipe.runtime.wire.encoding import encoded

    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]

    def says(rank, text, *, consequence):
        pipes[rank][1].send_bytes(encoded(("failed", (text, consequence))))
        pipes[rank][1].close()

    says(0, "rank 0 did not get the output of 1F1: the peer is gone", consequence=True)
    cleaning_up = threading.Timer(1.5, says, (1, "ValueError: a bad layer"), {"consequence": False})
    cleaning_up.start()
    ours = [pipe for pipe, _ in pipes]
    with pytest.raises(OctoPipeError, match=r"^rank 1: ValueError: a bad layer"):
        Watch([multiprocessing.current_process()] * 2, ours, print, None, grace_s=PATIENCE_S).run()
    cleaning_up.join()
