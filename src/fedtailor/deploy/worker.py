"""A client's work on one message of the server: what is asked, what it makes of that, what it keeps."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from fedtailor.deploy.example import only
from fedtailor.deploy.site import Site
from fedtailor.engines import Way
from fedtailor.engines.sequential import Sequential
from fedtailor.errors import Refused
from fedtailor.evaluation import Evaluator, scores
from fedtailor.faults import not_finite
from fedtailor.files import put, write
from fedtailor.lines import without_nan
from fedtailor.machine import keep_memory, repeatable
from fedtailor.method import Setup
from fedtailor.packing import pack, unpack
from fedtailor.trees import Tree, flatten, map_leaves, repeat, take
from fedtailor.trial import effort_of, useful_threads
from fedtailor.wire import LeakGuard, count_bytes, deliver
from fedtailor.work import common_of, start_of, state_dict_of, work

log = logging.getLogger("fedtailor")
_KEPT = 2  # states of rounds that counted, beside the newest: the server may come back from the last checkpoint but one
_RUN = 64  # letters of a run's name at most


@dataclass(frozen=True)
class Asked:
    """What the server says with a message."""

    run: str
    index: int  # which client this is in the run
    round: int
    rounds: int
    sizes: tuple[int, ...]  # training samples of everyone in the run
    participation: float
    counted: int  # the last round of this client that the server counts, 0: none
    joined: int = 0  # how many rounds there were before it was one of the run's clients
    last: bool = False  # the run ends with this evaluation

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> "Asked":
        """From a message's words, checked: the server may be wrong too."""
        try:
            asked = cls(**{name: words[name] for name in cls.__dataclass_fields__ if name in words})
            numbers = [asked.index, asked.round, asked.rounds, asked.counted, asked.joined, *asked.sizes]
            if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
                raise TypeError
            whole = asked.index < len(asked.sizes) and 0 <= asked.counted < max(asked.round, 1)
            named = isinstance(asked.run, str) and asked.run.isalnum() and len(asked.run) <= _RUN
            if not whole or not named or not 0 < float(asked.participation) <= 1 or type(asked.last) is not bool:
                raise TypeError
        except (TypeError, ValueError) as error:
            raise Refused("The server's message does not say what is asked for.") from error
        return replace(asked, sizes=tuple(asked.sizes))


class Worker:
    """A client at work on one message."""

    def __init__(self, site: Site, asked: Asked) -> None:
        keep_memory()
        self._site, self._asked = site, asked
        deployment, fed = site.deployment, site.fed
        self._model, self._params = start_of(deployment.model(), deployment)
        device = deployment.torch_device
        train, held = site.cut(asked.index)
        if len(train) != asked.sizes[asked.index]:
            says = f"this client has {len(train)} training samples, and the server counts {asked.sizes[asked.index]}"
            raise Refused(f"The data changed since the run began: {says}.")
        sizes = torch.tensor(asked.sizes)
        self._common = common_of(deployment, self._model, fed, sizes, asked.rounds, asked.participation)
        self._train, self._held, self._test = (only(own, asked.index, device) for own in (train, held, fed.test[0]))
        self._setup = Setup(self._model, self._params, len(sizes), sizes.to(device), asked.rounds, deployment.seed)
        self._device = device
        self._threads = useful_threads(effort_of(self._model.serving, self._params, self._common))
        self._folder = site.folder / "runs" / asked.run

    @torch.no_grad()
    def train(self, message: Tree) -> tuple[dict[str, Any], Tree]:
        """Train, keep what is to be kept, and say what is to be sent."""
        asked, method, channel = self._asked, self._site.method, self._site.deployment.channel
        sent, state = self._stacked(message), self._state(message)
        if self._is_new:  # where it began stays where it began, also if this round should not count
            self._write_state(asked.counted, {"state": state})
        made = self._apply(lambda *own: work(method, *own), asked.round, state, sent)
        parts = {part: deliver(made[part]) for part in ("upload", "state", "trained")}
        for failure in not_finite([asked.index], parts).values():
            raise Refused(f"Nothing is sent: {failure.why}; try a smaller lr.")
        guard = LeakGuard(self._common.x, self._common.prepare)
        guard.check(type(method).__name__, [asked.index], self._train, parts["upload"])
        # noise of its own for every message: equal noise on two uploads would show how they differ
        noise = sha256(self._site.secret + pack(message) + str(asked).encode()).digest() if channel.noise else b""
        encoded = channel.encode(parts["upload"], sent, [asked.index], asked.round, noise)
        notes = {name: float(leaf[0]) for name, leaf in made["notes"].items() if leaf.ndim == 1}
        self._keep(made, asked.round)
        if asked.round == asked.rounds:  # should it not be there when the last evaluation is
            self._write_model("trained", made["trained"])
        self._note({"round": asked.round, "bytes_up": count_bytes(encoded, 1)[0], **self._spent(), **notes})
        return self._words(), take(encoded, 0)

    @torch.no_grad()
    def evaluate(self, message: Tree) -> dict[str, Any]:
        """Numbers of this client's own models on its own data, and at the end the models themselves, on its disk."""
        asked, method = self._asked, self._site.method
        state, sent = self._state(message), self._stacked(message)
        received = self._apply(method.personalize, asked.round, state, sent)
        trained = self._trained(received)
        evaluator = Evaluator(method, replace(self._common, model=self._model.serving), Way("sequential"))
        index = [asked.index]
        with repeatable(self._threads):
            found = scores(evaluator, index, received, "received", self._test, self._held)
            found |= scores(evaluator, index, trained, "trained", self._test, self._held)
            found["loss"] = evaluator(index, trained, self._train, only="loss")["loss"]
        numbers = {name: values[asked.index] for name, values in found.items() if asked.index in values}
        measured = self._apply(method.measure, asked.round, state, sent) if method.measures else {}
        own = {name: float(leaf[0]) for name, leaf in measured.items() if isinstance(leaf, Tensor) and leaf.ndim == 1}
        self._note({"evaluated_after": asked.round - 1, **numbers, **own})
        self._write_model("trained", trained)
        if asked.last:
            self._write_model("received", received)
        return self._words() | {"scores": without_nan(numbers)}

    def _words(self) -> dict[str, Any]:
        return {"name": self._site.name, "run": self._asked.run, "round": self._asked.round}

    def _apply(self, function: Any, number: int, state: Tree, sent: Tree) -> Tree:
        engine = Sequential(self._common, self._train)
        with repeatable(self._threads):
            return engine.apply(function, number, [self._asked.index], state, sent)

    def _stacked(self, tree: Tree) -> Tree:
        return repeat(_to(tree, self._device), 1)

    def _state(self, message: Tree) -> Tree:
        """What this client kept after the round that the server counts, with room for who joined since."""
        method, found = self._site.method, self._kept
        if self._is_new:
            return repeat(method.join(self._setup, _to(message, self._device)), 1)
        if found is None:
            return repeat(method.init_client(self._setup), 1)
        return self._stacked(method.widen(_to(found["state"], self._device), self._setup))

    @property
    def _is_new(self) -> bool:
        """Whether it begins among others who did before; so does who lost all it kept."""
        return self._kept is None and max(self._asked.joined, self._asked.counted) > 0

    def _trained(self, received: Tree) -> Tree:
        """Its own model as it last trained; before that, what it begins with."""
        found = self._kept or {}
        if "trained" in found:
            return self._stacked(found["trained"])
        if found or self._is_new:
            return received
        method = self._site.method
        start = deliver(method.serve(method.init_server(self._setup), [self._asked.index], 1))
        return self._apply(method.personalize, 1, repeat(method.init_client(self._setup), 1), start)

    @cached_property
    def _kept(self) -> Tree | None:
        """What was kept after the counted round; if that is lost, the last before it."""
        counted = self._asked.counted
        known = [number for number in self._rounds() if number <= counted]
        if counted and max(known, default=0) != counted:
            log.warning("The state of round %d is not here; going on from round %d.", counted, max(known, default=0))
        if not known:
            return None
        return unpack((self._folder / "states" / f"{max(known):06d}.safetensors").read_bytes())

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in (self._folder / "states").glob("*.safetensors"))

    def _keep(self, made: Tree, number: int) -> None:
        self._write_state(number, {part: made[part] for part in ("state", "trained")})
        counted = [known for known in self._rounds() if known <= self._asked.counted]
        for known in self._rounds():
            if known != number and known not in counted[-_KEPT:]:  # rounds that did not count, or long gone
                (self._folder / "states" / f"{known:06d}.safetensors").unlink()

    def _write_state(self, number: int, stacked: Tree) -> None:
        states = self._folder / "states"
        states.mkdir(parents=True, exist_ok=True)
        write(states / f"{number:06d}.safetensors", pack(take(stacked, 0)))

    def _write_model(self, moment: str, stacked: Tree) -> None:
        models = self._folder / "models"
        models.mkdir(parents=True, exist_ok=True)
        personal = state_dict_of(self._model, self._params, flatten(take(stacked, 0)))
        write(models / f"{moment}.safetensors", pack(personal))

    def _note(self, line: dict[str, Any]) -> None:
        """A line of this client's own record."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "rounds.jsonl"
        torn = path.is_file() and not path.read_bytes().endswith(b"\n")  # power was lost in mid-line
        with path.open("ab") as file:
            put(file, (b"\n" if torn else b"") + (json.dumps(without_nan(line)) + "\n").encode())

    def _spent(self) -> dict[str, Any]:
        """The privacy spent by all that this client ever sent in the run, counted or not."""
        channel, path = self._site.deployment.channel, self._folder / "rounds.jsonl"
        if not channel.noise:
            return {}
        lines = path.read_bytes().splitlines() if path.is_file() else []
        evaluations = sum(line.startswith(b'{"evaluated_after"') for line in lines)
        return channel.spent(1 + len(lines) - evaluations)  # a torn line may have been an upload


def _to(tree: Tree, device: torch.device) -> Tree:
    return map_leaves(lambda leaf: leaf.to(device), tree)
