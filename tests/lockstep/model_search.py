"""Breadth-first search of the lockstep model: every state that can be reached, and what is wrong.

Invariants are checked as transitions are made. Two more are looked at here: a state from which
nothing can happen must be one where everything is over, and from every state that must stay
possible.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from model import Label, Model, State
from model_cases import DEEP, TESTED, refuted
from model_config import VARIANTS, Config, ViolationError


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to. ``broken`` names the invariant that does not hold, if one does not;
    ``trace`` leads there in as few transitions as can be.
    """

    config: Config
    states: int
    transitions: int
    ends: int
    broken: str | None = None
    what: str = ""
    trace: tuple[Label, ...] = ()

    def story(self) -> str:
        """The counterexample, a line a transition."""
        lines = [f"{number:3}. {told(label)}" for number, label in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"=> {self.broken}: {self.what}"])


def explore(config: Config, limit: int = 5_000_000) -> Found:
    """Search all of it, or up to ``limit`` states, and stop at the first thing that is wrong."""
    search = _Search(Model(config), limit)
    return search.run()


class _Search:
    def __init__(self, model: Model, limit: int) -> None:
        self.model = model
        self.limit = limit
        self.number: dict[State, int] = {}
        self.states: list[State] = []
        self.parents = array("l")
        self.labels: list[Label] = []
        self.sources = array("l")
        self.targets = array("l")
        self.ends: list[int] = []

    def run(self) -> Found:
        self._meet(self.model.start(), -1, ("start",))
        at = 0
        while at < len(self.states):
            if len(self.states) > self.limit:
                raise AssertionError(f"more than {self.limit} states: {self.model.config}")
            try:
                done = self._expand(at)
            except ViolationError as error:
                what = str(error).partition(": ")[2]
                return self._found(error.invariant, what, (*self._trace(at), self.model.last))
            if not done:
                return self._found("no dead end", self._look(at), self._trace(at))
            at += 1
        lost = self._cannot_end()
        if lost is not None:
            return self._found("can always end", self._look(lost), self._trace(lost))
        return self._found(None, "", ())

    def _expand(self, at: int) -> bool:
        """Meet what follows; False in a dead end."""
        state = self.states[at]
        following = self.model.after(state)
        for label, after in following:
            target = self._meet(after, at, label)
            self.sources.append(at)
            self.targets.append(target)
        if self.model.is_done(state):
            self.model.check_end(state)
            self.ends.append(at)
            return True
        return bool(following)

    def _meet(self, state: State, parent: int, label: Label) -> int:
        number = self.number.get(state)
        if number is None:
            number = self.number[state] = len(self.states)
            self.states.append(state)
            self.parents.append(parent)
            self.labels.append(label)
        return number

    def _cannot_end(self) -> int | None:
        """The first state from which no end can be reached any more."""
        good = bytearray(len(self.states))
        for end in self.ends:
            good[end] = 1
        count = -1
        while count != (count := sum(good)):
            for source, target in zip(reversed(self.sources), reversed(self.targets), strict=True):
                if good[target]:
                    good[source] = 1
        lost = good.find(0)
        return None if lost < 0 else lost

    def _trace(self, at: int) -> tuple[Label, ...]:
        labels = []
        while at > 0:
            labels.append(self.labels[at])
            at = self.parents[at]
        return tuple(reversed(labels))

    def _look(self, at: int) -> str:
        """A state in words."""
        model, state = self.model, self.states[at]
        leader = model.leaders.get(state[1])
        ranks = [model.ranks.get(each) for each in state[4 : 4 + model.config.ranks]]
        return f"leader {leader}; ranks {ranks}; log {model.get(state[2])}"

    def _found(self, broken: str | None, what: str, trace: tuple[Label, ...]) -> Found:
        num_ends = len(self.ends)
        return Found(
            self.model.config, len(self.states), len(self.sources), num_ends, broken, what, trace
        )


def told(label: Label) -> str:
    """A transition in words."""
    kind, *rest = label
    return _WORDS[kind](*rest)


def _body(body: Label) -> str:
    if body[0] == "new":
        return f"the opening of request {body[1]} on adapter {body[2]}"
    what = "request" if body[0] == "abort" else "adapter"
    return f"the {body[0]} of {what} {body[1]}"


def _item(item: Label) -> str:
    match item:
        case ("body", body, _):
            return _body(body)
        case ("step", rows, *_):
            return f"a step with requests {list(rows)}"
        case ("remove", rid, *_):
            return f"the remove of request {rid}"
        case ("drop", key, fetch_no, *_):
            return f"the drop of adapter {key}, hold {fetch_no}"
        case _:
            return "the forget of what was unloaded"


def _report(report: Label) -> str:
    rank, key, fetch_no, outcome = report
    return f"leader notes rank {rank}'s copy of adapter {key}, hold {fetch_no}: {outcome}"


_WORDS: dict[str, Callable[..., str]] = {
    "leader takes": lambda body: f"leader applies {_body(body)}",
    "leader notes": _report,
    "leader turns": lambda items: (
        f"leader turns and orders {', '.join(map(_item, items)) or 'nothing'}"
    ),
    "follows": lambda rank, item: f"rank {rank} applies {_item(item)}",
    "comes early": lambda rank, body: f"rank {rank} receives {_body(body)}, not ordered yet",
    "removes on arrival": lambda rank, item: f"rank {rank} applies {_item(item)} as it arrives",
    "lands": lambda rank, key, outcome: f"rank {rank}'s read of adapter {key} lands: {outcome}",
    "begins": lambda rank: f"rank {rank} begins the admit of its next step",
    "settles": lambda rank: f"rank {rank} ends the admit",
    "looks again": lambda rank: f"rank {rank} has waited for its reads, and votes again",
    "ends": lambda rank: f"rank {rank} commits the step",
    "all agree": lambda: "all ranks agree on the misses",
    "all run": lambda: "all ranks run the step",
}


def main() -> None:
    """Explore, and print a table; or tell how a variant goes wrong."""
    parser = argparse.ArgumentParser(description="Explore the model of the lockstep protocol.")
    parser.add_argument("--deep", action="store_true", help="more than the tests do (minutes)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their name")
    parser.add_argument("--variant", choices=VARIANTS, help="tell how a refuted variant goes wrong")
    arguments = parser.parse_args()
    if arguments.variant:
        print(f"{arguments.variant}: {VARIANTS[arguments.variant]}")
        print(explore(refuted(arguments.variant)[0]).story())
        return
    print("| case | states | transitions | seconds |\n| --- | --- | --- | --- |")
    broken = False
    for name, config in (DEEP if arguments.deep else TESTED).items():
        if arguments.only in name:
            start = time.process_time()
            found = explore(config)
            seconds = time.process_time() - start
            print(f"| {name} | {found.states:,} | {found.transitions:,} | {seconds:.0f} |")
            if found.broken is not None:
                broken = True
                print(found.story())
    raise SystemExit(broken)
