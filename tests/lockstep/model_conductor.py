"""The conductor of the lockstep model: its clients' programs, and what it says next."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from model_config import Config, kept

Body = tuple[Any, ...]


class Conductor(NamedTuple):
    places: tuple[int, ...]
    """How far each program has come."""
    keys: tuple[int, ...]
    """The adapter of each request that was made, by request."""
    served: tuple[tuple[str, int], ...]
    faults: int
    faulted: int = 0
    """Adapters of which a read went wrong."""
    pending: tuple[Body, ...] = ()
    """Messages that a follower has and the leader has not."""


class Conductors:
    """Its states by number, and its messages. What none has taken is not said yet."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.known: dict[Any, dict[Any, Any]] = defaultdict(dict)
        self._conductors: list[Conductor] = []
        self._numbers: dict[Conductor, int] = {}
        self.generations = self._new_keys()
        """Name -> the adapter keys that its loads get."""

    def get(self, number: int) -> Conductor:
        return self._conductors[number]

    def put(self, conductor: Conductor) -> int:
        number = self._numbers.setdefault(conductor, len(self._conductors))
        if number == len(self._conductors):
            self._conductors.append(conductor)
        return number

    def start(self) -> int:
        served = tuple((name, key) for key, name in enumerate(self.config.names))
        places = (0,) * len(self.config.programs)
        return self.put(Conductor(places, (), served, self.config.faults))

    @kept
    def next_commands(self, number: int, checked: int) -> tuple[tuple[int, Body], ...]:
        """What the leader may take next, and the conductor then."""
        conductor = self.get(number)
        if conductor.pending:
            body = conductor.pending[0]
            now = conductor._replace(pending=conductor.pending[1:])
            return ((self._told(now, body), body),)
        made = self.made(number, checked)
        return tuple((self._told(self.get(now), body), body) for now, body in made)

    def _told(self, conductor: Conductor, body: Body) -> int:
        """The leader applies ``body``: it says that a load is done."""
        if body[0] == "commit":
            name = next(name for name, keys in self.generations.items() if body[1] in keys)
            conductor = conductor._replace(served=(*conductor.served, (name, body[1])))
        return self.put(conductor)

    @kept
    def made(self, number: int, checked: int) -> tuple[tuple[int, Body], ...]:
        """Messages the conductor may make now, and the conductor then."""
        conductor: Conductor = self.get(number)
        served = dict(conductor.served)
        made = []
        for index, program in enumerate(self.config.programs):
            place = conductor.places[index]
            if place == len(program):
                continue
            kind, what = program[place]
            places = (*conductor.places[:index], place + 1, *conductor.places[index + 1 :])
            now = conductor._replace(places=places)
            if kind == "new" and what in served:
                now = now._replace(keys=(*now.keys, served[what]))
                body: Body = ("new", len(conductor.keys), served[what])
            elif kind == "abort" and what < len(conductor.keys):
                body = ("abort", what)
            elif kind == "unload" and what in served:
                left = tuple(each for each in conductor.served if each[0] != what)
                now = now._replace(served=left)
                body = ("unload", served[what])
            elif kind == "load" and what not in served:
                body = ("load", self.generations[what][0])
            elif kind == "commit" and checked >> self.generations[what][0] & 1:
                body = ("commit", self.generations[what][0])
            else:
                continue
            made.append((self.put(now), body))
        return tuple(made)

    @kept
    def wrong(self, number: int, key: int) -> int:
        """The conductor after a read of the adapter went wrong somewhere."""
        conductor = self.get(number)
        faulted = conductor.faulted | 1 << key
        return self.put(conductor._replace(faults=conductor.faults - 1, faulted=faulted))

    @kept
    def ahead(self, number: int, checked: int) -> tuple[tuple[int, Body], ...]:
        """What a follower may have before the leader takes it, and the conductor then."""
        conductor = self.get(number)
        ahead = [(number, body) for body in conductor.pending]
        if len(conductor.pending) < 2:
            for now, body in self.made(number, checked):
                made = self.get(now)
                ahead.append((self.put(made._replace(pending=(*made.pending, body))), body))
        return tuple(ahead)

    @kept
    def all_said(self, number: int) -> bool:
        conductor: Conductor = self.get(number)
        programs = zip(conductor.places, self.config.programs, strict=True)
        return not conductor.pending and all(place == len(program) for place, program in programs)

    def _new_keys(self) -> dict[str, list[int]]:
        """Name -> the adapter keys that its loads get."""
        keys: dict[str, list[int]] = {}
        number = len(self.config.names)
        for program in self.config.programs:
            for kind, name in program:
                if kind == "load":
                    keys.setdefault(name, []).append(number)
                    number += 1
        return keys
