"""What ends a wait in an elastic run: a process that is lost or leaves, others that wait to be taken in, a signal."""

import json
import os
import signal
import socket
import sys
import threading
import time

import pytest
from lab.launch import ROOT, modules_of

with modules_of(9):
    from membership import failure_detector
    from membership.failure_detector import FailureDetector
    from membership.rendezvous import Members
    from membership.roster import Member, Roster
    from ranks import lost
    from ranks.stopping import Signals, StopAgreement
    from run.generation import end_of_elastic_run
    from utils import UserError

SECRET = "of the generation"


@pytest.fixture
def members(monkeypatch, tmp_path):
    """members(count): of one generation, to which they have agreed. They share a process here, so what one of them
    shuts down would be another one's, too."""
    monkeypatch.setattr(FailureDetector, "shut", lambda self: None)

    def members(count: int) -> list[Members]:
        record = {"id": "run", "token": "token", "hosts": [f"127.0.0.{rank + 1}" for rank in range(count)], "port": 1,
                  "at_least": 1, "at_most": count, "nproc": 1}
        made = [Members({**record, "host": rank}, str(tmp_path / "members"), 1) for rank in range(count)]
        for it in made:
            it.meeting.next = Roster(1, tuple(each.me for each in made), ("127.0.0.1", 1), SECRET)
        return made

    return members


def within(seconds: float, condition) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_who_leaves_is_missed_by_all(members):
    """The system closes the connections of a process that ends; close() does so for one that leaves."""
    everyone = members(3)
    detectors = [FailureDetector(each) for each in everyone]
    time.sleep(0.1)
    assert [each.reason for each in detectors] == [None] * 3
    detectors[1].close()
    assert within(2, lambda: detectors[0].reason and detectors[2].reason)
    assert [each.reason and each.reason.split()[0] for each in detectors] == ["127.0.0.2", None, "127.0.0.2"]
    detectors[0].close(), detectors[2].close()
    assert not any(each.links for each in everyone)


def test_a_member_that_does_not_come(members, monkeypatch):
    monkeypatch.setattr(failure_detector, "JOINING", 0.2)
    everyone = members(2)
    everyone[1].meeting.next = None
    with pytest.raises(lost.MembershipChanged, match="127.0.0.2"):
        FailureDetector(everyone[0])
    with socket.create_server(("127.0.0.3", 0)) as gone:
        port = gone.getsockname()[1]
    everyone[0].meeting.next = Roster(1, (everyone[0].me, Member("x", 2, "127.0.0.3", 0, port, 1)), ("127.0.0.1", 1), SECRET)
    assert not everyone[0].contacts.not_reached  # it answers
    with pytest.raises(lost.MembershipChanged, match="127.0.0.3 is lost"):
        FailureDetector(everyone[0])
    assert everyone[0].contacts.not_reached == {"x": 1}


def test_no_connection_stays_open_over_many_generations(members):
    everyone = members(2)
    for generation in range(11):
        detectors = [FailureDetector(each) for each in everyone]
        for each in detectors:
            each.close()
        if generation == 0:
            within(1, lambda: threading.active_count() <= 3)
            before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert within(3, lambda: len(os.listdir("/proc/self/fd")) <= before and threading.active_count() <= threads)


def test_shut_wakes_a_blocked_receive_and_leaves_other_sockets_alone(run_code, tmp_path):
    """Two processes; one waits in a receive of gloo's for what the other never sends."""
    run_code("cluster", 2, """
import os, pathlib, socket, threading, time
import torch, torch.distributed as dist
from membership.failure_detector import FailureDetector
from membership.rendezvous import Members
from membership.roster import Roster
from ranks.lost import is_lost_peer
done, server = pathlib.Path(sys.argv[1]), socket.create_server(("127.0.0.1", 0))
mine = socket.create_connection(server.getsockname())
other, _ = server.accept()
members = Members({"id": "run", "token": "token", "hosts": ["127.0.0.1"], "port": 1, "host": 0, "at_least": 1,
                   "at_most": 1, "nproc": 1}, sys.argv[1], 1)
members.meeting.next = Roster(1, (members.me,), ("127.0.0.1", 1), "secret")
detector = FailureDetector(members)
dist.init_process_group("gloo")
group = dist.new_group(backend="gloo")
dist.barrier(group)
if dist.get_rank() == 0:
    threading.Timer(0.2, detector.shut).start()
    try:
        sys.exit(dist.recv(torch.zeros(1), 1, group=group))
    except RuntimeError as error:
        assert is_lost_peer(error), error
    done.write_text("woken")
    mine.sendall(b"x")
    assert other.recv(1) == b"x"
while not done.exists():
    time.sleep(0.02)
os._exit(0)  # at its end Python would wait for the group's threads
""", tmp_path / "done")


def test_errors_of_a_lost_rank():
    """gloo's, torch's and the store's own words for it; none of ours, and nothing of the memory."""
    import torch

    for text in "Connection closed by peer [127.0.0.1]:1", "Socket Timeout", "Broken pipe", "wait timeout after 100ms":
        assert lost.is_lost_peer(RuntimeError(text))
    ours = torch.OutOfMemoryError("remote process"), UserError("a socket"), RuntimeError("shape"), OSError("peer")
    for error in ours:
        assert not lost.is_lost_peer(error)
    assert lost.is_lost_peer(lost.MembershipChanged("whatever it says"))


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Signals()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_before_and_after_there_is_something_to_lose(signals, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    signals.ready = True
    assert not signals.wait(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.wait(2) and signals.asked == signal.SIGTERM and not codes
    signals.ready = False
    os.kill(os.getpid(), signal.SIGINT)
    assert within(2, lambda: codes == [130]) and "stopped before the training began" in capsys.readouterr().out


@pytest.mark.parametrize("error, code", [(ValueError("a fault"), 2), (UserError("a mistake"), None),
                                         (RuntimeError("Connection closed by peer"), None)])
def test_an_agent_learns_what_is_not_to_be_tried_again(monkeypatch, error, code):
    codes = []
    monkeypatch.setenv(lost.VARIABLE, json.dumps({"id": "run", "host": 1}))
    monkeypatch.setenv("RANK", "none")  # the host's number takes its place
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(type(error)), end_of_elastic_run():
        raise error
    assert codes == ([] if code is None else [code])


def test_torchruns_agents_learn_it_too(tmp_path, command):
    """Of two hosts with a process each: neither agent starts its process anew."""
    script = tmp_path / "mistaken.py"
    script.write_text(f"""import sys
sys.path[0] = {str(ROOT / "cluster")!r}
from ranks import course
import os
import torch.distributed as dist
from ranks.errors import one_error_of_all
from run.generation import end_of_elastic_run
from utils import UserError

with one_error_of_all(""), end_of_elastic_run():
    os.write(1, b"a start\\n")
    dist.init_process_group("gloo")
    raise UserError("a mistake")
""")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", 1, "--max-restarts", 3,
             "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=15", "--rdzv-id", "mistaken", "--rdzv-endpoint",
             address, "--local-addr", "127.0.0.1", script]
    agents = [command([*map(str, words)]) for _ in range(2)]
    assert within(90, lambda: all(agent.process.poll() is not None for agent in agents))
    texts = [agent.output() for agent in agents]
    assert all(text.count("a start") == 1 for text in texts) and "".join(texts).count("error: a mistake") == 1, texts


def test_the_agreement_hears_of_newcomers(world_of_one, signals):
    """Those who call while a generation trains are taken in at a step's end."""
    waiting = []
    it = StopAgreement(lambda: waiting, signals)
    assert it.agree() == 0 and it.has_newcomers is False
    waiting.append("somebody")
    assert it.agree() == 0 and it.has_newcomers is True
    signals.asked = signal.SIGTERM
    assert it.agree() == signal.SIGTERM
    it.begin()
    assert signals.ready
