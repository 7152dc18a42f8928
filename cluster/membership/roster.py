"""The processes of a generation, which of them may go on without the others, and those that call to take part."""

import dataclasses


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


@dataclasses.dataclass
class Caller:
    """A process that takes part in a rendezvous: what it says, and when it came first and was last heard.

    `knows`: rosters, see Members.knows().
    """

    member: Member
    knows: list[dict]
    since: float
    at: float
