"""The processes of a generation, which of them may go on without the others, and what each knows of generations."""

import contextlib
import dataclasses
import glob
import json
import os

from ranks.files import replace


@dataclasses.dataclass(frozen=True)
class Member:
    """A process: `key` is its own, `host` its place in hosts.txt, `address` and `port` where it listens."""

    key: str
    host: int
    address: str
    local_rank: int
    port: int
    nproc: int  # processes of its host

    @property
    def place(self) -> tuple[str, int]:
        """Where the agent starts a process anew that has ended."""
        return self.address, self.local_rank

    @property
    def order(self) -> tuple:
        """What sorts processes by their ranks."""
        return self.host, self.place

    @property
    def endpoint(self) -> tuple[str, int]:
        return self.address, self.port


@dataclasses.dataclass(frozen=True)
class Roster:
    """The members of a generation in the order of their ranks. `store`: (address, port) of a TCPStore for them, under
    whose prefix `secret` they join. `has_begun`: all have joined, as who has this knows."""

    generation: int
    members: tuple[Member, ...]
    store: tuple[str, int] | None = None
    secret: str = ""
    has_begun: bool = False

    @classmethod
    def of(cls, record: dict) -> "Roster":
        members = tuple(Member(**each) for each in record["members"])
        return cls(**{**record, "members": members, "store": tuple(record["store"])})

    @property
    def places(self) -> list[tuple[str, int]]:
        return [member.place for member in self.members]

    def may_go_on(self, there: list[Member]) -> bool:
        """Whether these processes stand for more than half of the ranks, or for half of them with the lowest one."""
        places = {member.place for member in there}
        heard = [place in places for place in self.places]
        return 2 * sum(heard) > len(heard) or 2 * sum(heard) == len(heard) and heard[0]

    def needed_hosts(self) -> list[str]:
        """The addresses of hosts without which the others may not go on."""
        hosts = dict.fromkeys(member.address for member in self.members)
        return [host for host in hosts if len(hosts) > 1
                and not self.may_go_on([member for member in self.members if member.address != host])]


def since_last(rosters: list[Roster]) -> tuple[Roster | None, list[Roster]]:
    """The last generation that has begun, and those agreed on since then, which may have begun for others."""
    last = max((each for each in rosters if each.has_begun), key=lambda each: each.generation, default=None)
    return last, [each for each in rosters if last is None or each.generation > last.generation]


class History:
    """What a process knows of its run's generations. Its host keeps that on its disk, for processes that start anew.

    `roster`: of the generation that it belongs to, or belonged to. `agreed`: later ones, which may have begun for
    others. `path`: what the names of the host's files begin with; this process writes that of its `local_rank`.
    """

    def __init__(self, run_id: str, path: str, local_rank: int):
        self.run_id, self.file, self.is_done, rosters = run_id, f"{path}.{local_rank}.json", False, []
        for each in glob.glob(f"{glob.escape(path)}.*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(each, encoding="utf-8") as file:
                record = json.load(file)
                if record["run"] == run_id:
                    rosters += map(Roster.of, record["knows"])
                    self.is_done = self.is_done or record["is_done"]
        self.roster, self.agreed = since_last(rosters)

    def knows(self) -> list[dict]:
        """As JSON has it."""
        return [dataclasses.asdict(each) for each in [self.roster, *self.agreed] if each]

    def agree(self, roster: Roster) -> None:
        """From now on this generation may begin for others, whether this process hears of it or not."""
        self.agreed = [*(each for each in self.agreed if each.places != roster.places), roster]
        self.keep()

    def begin(self, roster: Roster) -> None:
        self.roster, self.agreed = dataclasses.replace(roster, has_begun=True), []
        self.keep()

    def keep(self, is_done: bool = False) -> None:
        """Writes it, unless the disk is full. `is_done`: the run has ended."""
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.file), exist_ok=True)
            replace(self.file, json.dumps({"run": self.run_id, "is_done": is_done, "knows": self.knows()}))


@dataclasses.dataclass
class Caller:
    """A process that takes part in a rendezvous: what it says, and when it came first and was last heard.

    `knows`: rosters, see History.knows().
    """

    member: Member
    knows: list[dict]
    since: float
    at: float
