"""Mailboxes between ranks of one host, and gloo in their place between hosts."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from unittest.mock import patch

import pytest
from effort import draws

torch = pytest.importorskip("torch")

from executor_models import make, random_jobs  # noqa: E402
from random_plans import random_plan  # noqa: E402
from ranks import PATIENCE_S, Ranks, shared_ranks  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.wire.transports import delivery, mail  # noqa: E402

if not mail.supported():
    pytest.skip("mailboxes need Linux on x86-64", allow_module_level=True)

ROOM = 256


class Transfer:
    """As much of a slot as mail asks for."""

    def __init__(self, number: int, peer: int, sending: bool):
        self.number, self.peer, self.sending = number, peer, sending


def two_ways(world, count):
    other = 1 - world.rank
    return [Transfer(n, other, (n % 2 == 0) == (world.rank == 0)) for n in range(count)]


def exchange(world):
    """Messages of every length, hundreds through every box; the lists that went and came."""
    post = mail.Mail()
    slots = two_ways(world, 6)
    boxes = post.open(world.control, slots, ROOM, PATIENCE_S)
    assert len(boxes) == 6
    world.gather(None)
    with open("/proc/self/maps") as maps:
        files = [line for line in maps if "octopipe" in line and "rw-s" in line]
    assert files and all("/dev/shm" not in line and "(deleted)" in line for line in files)  # no name to be left
    room = ctypes.create_string_buffer(ROOM)
    got, gave = [], []
    for turn in range(200):
        for slot in slots:
            box = boxes[2 * slot.number + slot.sending]
            text = bytes((turn + slot.number + k) % 251 for k in range(1 + (37 * turn + slot.number) % ROOM))
            if slot.sending:
                held = ctypes.create_string_buffer(text, len(text))
                box.put(ctypes.addressof(held), len(text))
                gave.append(text)
            else:
                box.pointer = ctypes.addressof(room)
                box.wait()
                got.append(room.raw[: len(text)])
                assert got[-1] == text
    world.gather(None)
    post.close()
    return len(got), len(gave)


def test_messages_arrive_in_order_and_whole():
    assert shared_ranks(2).run(exchange) == [(600, 600), (600, 600)]


def run_ahead(world):
    """A sender that nothing answers stops before it would overwrite what was not taken: what arrived, and when each
    message was sent, or when this rank was about to take it."""
    post = mail.Mail()
    (slot,) = [Transfer(0, 1 - world.rank, world.rank == 0)]
    box = post.open(world.control, [slot], ROOM, PATIENCE_S)[slot.sending]
    seen, times = [], []
    word = ctypes.c_uint32()
    for k in range(5):
        if world.rank == 0:
            word.value = k
            box.put(ctypes.addressof(word), 4)
            times.append(time.monotonic())
        else:
            time.sleep(0.1)
            box.pointer = ctypes.addressof(word)
            times.append(time.monotonic())
            box.wait()
            seen.append(word.value)
    world.gather(None)
    post.close()
    return seen, times


def test_sender_waits_for_a_receiver_a_step_behind():
    (_, sent), (seen, about_to_take) = shared_ranks(2).run(run_ahead)
    assert seen == [0, 1, 2, 3, 4]
    # One clock for all processes of a host. A box holds one message.
    for k in range(1, 5):
        assert sent[k] >= about_to_take[k - 1]


def lost(world, how):
    """What rank 0 hears of a message that never comes, and how soon."""
    post = mail.Mail()
    slot = Transfer(0, 1 - world.rank, world.rank == 1)
    box = post.open(world.control, [slot], ROOM, 1.5 if how == "silent" else PATIENCE_S)[slot.sending]
    if world.rank == 1:
        time.sleep(0.3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "closed":
            post.close()
        world.gather(None)
        return None
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        box.wait()
    waited = time.monotonic() - begin
    if how != "killed":
        world.gather(None)  # a box that is silent must not be closed before
    return str(caught.value), waited


@pytest.mark.parametrize(("how", "words"), [("killed", "closed"), ("closed", "closed"), ("silent", "timed out")])
def test_a_message_that_never_comes_is_noticed(how, words):
    ranks = Ranks(2)
    ranks.start(lost, how)
    (worked, said), _ = ranks.results()
    ranks.close()
    assert worked, said
    assert words in said[0]
    assert said[1] < PATIENCE_S


class Elsewhere(mail.BoxArea):
    def __init__(self, *_, **__):
        raise OSError("no such file on this host")


def run_plans(world, jobs, where):
    out = []
    with patch.object(mail, "BoxArea", Elsewhere if where == "other hosts" or world.rank == 1 else mail.BoxArea):
        for name, kind, plan, channel in jobs:
            case = make(kind, plan.num_micro_batches)
            expected, _ = plain_gradients(*case)
            with Pipeline(case.layers, plan, case.loss_fn, group=world, channel=channel, timeout_s=PATIENCE_S) as pipe:
                boxes = [slot.state.box for slot in pipe.executor.program.slots]
                for _ in range(2):
                    pipe.zero_grad()
                    pipe.step(case.inputs, case.targets)
            out.append((name, worst_error(pipe, expected), sum(b is not None for b in boxes), len(boxes)))
            pipe.zero_grad()
    return out


@pytest.mark.parametrize(
    ("size", "where"),
    [(2, "other hosts"), pytest.param(4, "other hosts", marks=pytest.mark.slow), (4, "one on another host")],
)
def test_ranks_of_other_hosts_get_the_same_over_gloo(size, where):
    jobs = random_jobs(size, draws(60 // size, least=3), first_seed=500 * size)
    boxes = slots = 0
    for per_rank in shared_ranks(size).run(run_plans, jobs, where):
        for name, error, with_box, all_of_them in per_rank:
            assert error <= 1e-12, name
            boxes, slots = boxes + with_box, slots + all_of_them
    assert boxes == 0 if where == "other hosts" else 0 < boxes < slots


class Pair(torch.nn.Module):
    """Passes two tensors on, one of which is a view of the other's half."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x, y):
        out = torch.tanh(self.inner(x)) + y.repeat(1, 2)
        return out, out[:, :8]


def first_of(pair, target):
    return (pair[0] - target).square().mean()


def run_sizes(world, plan, sizes, room, most):
    """Steps of changing shapes: what fits, what does not, what must wait for room; errors, and who went which way."""
    torch.manual_seed(0)
    layers = [Pair() for _ in range(plan.num_layers)]
    errors, ways = [], set()
    put, late = mail.Box.put, delivery.Delivery.send_late

    def seen_put(box, pointer, nbytes, bodies=()):
        placed = put(box, pointer, nbytes, bodies)
        ways.add("placed" if placed else "refused" if bodies else "boxed")
        return placed

    def seen_late(self, slot, tensor):
        ways.add("late")
        return late(self, slot, tensor)

    with (
        patch.object(mail, "OVERFLOW_BYTES", room),
        patch.object(delivery, "BODIES_BYTES", most),
        patch.object(mail.Box, "put", seen_put),
        patch.object(delivery.Delivery, "send_late", seen_late),
        Pipeline(layers, plan, first_of, group=world, timeout_s=PATIENCE_S) as pipe,
    ):
        for step, rows in enumerate(sizes):
            shapes = [max(1, rows + (k % 3) * (step % 2)) for k in range(plan.num_micro_batches)]
            whole = [torch.randn(n, 16, dtype=torch.float64) for n in shapes]
            inputs = [(x, x[:, :8]) for x in whole]
            targets = [torch.randn(n, 16, dtype=torch.float64) for n in shapes]
            expected, _ = plain_gradients(layers, inputs, targets, first_of)
            pipe.zero_grad()
            pipe.step(inputs, targets)
            errors.append(worst_error(pipe, expected))
    return errors, ways


@pytest.mark.parametrize(
    ("room", "most", "expected"),
    [
        (1 << 20, 1 << 19, {"placed", "boxed"}),
        (1 << 13, 1 << 15, {"placed", "refused", "late", "boxed"}),
        (0, 1 << 20, {"refused", "late", "boxed"}),
        pytest.param(1 << 20, 0, {"boxed", "late"}, marks=pytest.mark.slow),
    ],
)
def test_tensors_lie_in_the_overflow_area_or_go_over_gloo(room, most, expected):
    ways = set()
    for seed in range(draws(4, least=1)):
        plan = random_plan(random.Random(seed), num_ranks=2, num_layers=6, num_micro_batches=5)
        sizes = [3, 60, 60, 1, 200, 200, 30, 60]
        for errors, seen in shared_ranks(2).run(run_sizes, plan, sizes, room, most):
            assert max(errors) <= 1e-12
            ways |= seen
    assert ways == expected


def fill_overflow_area(world):
    """Bodies of random sizes, several under way: all whole, refused only where the area is really full."""
    post = mail.Mail()
    slots = [Transfer(n, 1 - world.rank, world.rank == 0) for n in range(8)]
    rng = random.Random(5)
    refused = 0
    with patch.object(mail, "OVERFLOW_BYTES", 16 * mail.PAGE):
        boxes = post.open(world.control, slots, ROOM, PATIENCE_S)
        for turn in range(60):
            sizes = [rng.choice((1, 5000, 12000, 40000)) * (1 + turn % 2) for _ in slots]
            fill = [bytes([(turn + k) % 251]) * size for k, size in enumerate(sizes)]
            for slot, text in zip(slots, fill):
                if world.rank == 0:
                    held = ctypes.create_string_buffer(text, len(text))
                    body = (ctypes.addressof(held), len(text), len(text))
                    refused += not boxes[2 * slot.number + 1].put(0, 0, [body])
            for slot, text in zip(rng.sample(slots, len(slots)), fill):
                box, text = boxes.get(2 * slot.number), fill[slot.number]
                if world.rank == 1:
                    box.wait()
                    if box.bodies:
                        assert ctypes.string_at(box.bodies, len(text)) == text
                        box.done()
                    else:
                        refused += 1
            world.gather(None)
    post.close()
    return refused


def test_the_overflow_area_keeps_bodies_apart_and_takes_them_back():
    sender, receiver = shared_ranks(2).run(fill_overflow_area)
    assert sender == receiver
    assert 0 < sender < 8 * 60


# -- machines that let memory accesses overtake each other -----------------------------------------------


class Words:
    """A box's words that write down what is done to them."""

    def __init__(self, words, log):
        self._words, self._log = words, log

    def __getitem__(self, k):
        self._log.append(("load", k % 16))
        return self._words[k]

    def __setitem__(self, k, value):
        self._log.append(("store", k % 16))
        self._words[k] = value


def test_fences_stand_between_messages_and_their_numbers(monkeypatch):
    """Arm reorders all but what a fence or the same address keeps in order: every hand-over needs one on both sides."""
    log = []
    move = ctypes.memmove
    monkeypatch.setattr(mail, "fence", lambda: log.append(("fence", -1)))
    monkeypatch.setattr(mail.ctypes, "memmove", lambda *args: (log.append(("copy", -1)), move(*args)))
    area = mail.BoxArea(1, 4096)
    sender, receiver = area.box(0, 1.0), area.box(0, 1.0)
    sender._words = receiver._words = Words(area.words, log)
    data, room = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    for bodies in ((), ((data.data_ptr(), 64, 64),)):
        log.clear()
        sender.put(data.data_ptr(), 64, bodies)
        sent = log.copy()
        log.clear()
        receiver.pointer = room.data_ptr()
        receiver.wait()
        if bodies:
            ctypes.memmove(room.data_ptr(), receiver.bodies, 64)
            receiver.done()
        assert torch.equal(room, data)
        taken = log.copy()

        def between(events, first, second, kinds=("fence",)):
            a = max(k for k, e in enumerate(events) if e == first)
            b = min(k for k, e in enumerate(events) if e == second)
            assert a < b and any(e[0] in kinds for e in events[a:b]), events

        copies = [k for k, e in enumerate(sent) if e == ("copy", -1)]
        assert len(copies) == 1 + len(bodies)
        between(sent, ("copy", -1), ("store", mail.SENT))  # message, fence, number
        between(sent, ("store", mail.LENGTH), ("store", mail.SENT))
        between(sent[: copies[-1] + 1], ("load", mail.TAKEN), ("copy", -1))  # taken, fence, next message
        between(taken, ("load", mail.SENT), ("copy", -1))  # number, fence, message
        between(taken, ("copy", -1), ("store", mail.TAKEN))  # read, fence, taken
    area.words.release()


def test_a_fence_is_one_on_every_machine():
    llvm = pytest.importorskip("llvmlite.binding")
    from octopipe.runtime.wire import fence

    fence.compiled()()  # runs on this one
    assert fence.for_machine("x86_64") is fence._nothing
    assert fence.for_machine("aarch64") is not fence._nothing
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    arm = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine()
    assert "dmb" in arm.emit_assembly(llvm.parse_assembly(fence.TEXT))
