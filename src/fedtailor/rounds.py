"""The only round loop: every method, every engine.

send → train → receive → evaluate
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.batch import Common
from fedtailor.data.partition import hold_out
from fedtailor.engines import Engine, Way
from fedtailor.engines.choice import Trial, named
from fedtailor.errors import Refused
from fedtailor.evaluation import Evaluator, Values, plain_mean, weighted_mean
from fedtailor.federation import Federation
from fedtailor.local import LocalView
from fedtailor.machine import keep_memory, repeatable
from fedtailor.method import Exchange, Method, Setup
from fedtailor.model import Model
from fedtailor.run import LARGE, Record
from fedtailor.samples import Samples
from fedtailor.settings import Settings
from fedtailor.store import ClientStore
from fedtailor.trees import Params, Tree, add, flatten, map_leaves, take
from fedtailor.trial import check_fit, effort_of, most_at_once, useful_threads
from fedtailor.wire import LeakGuard, count_bytes, deliver

_COHORT = 64  # clients evaluated at once


@dataclass(eq=False)  # the one thing that changes: server, states and trained are replaced round by round
class Rounds:
    """The state of a run and what a round does to it."""

    method: Method
    model: Model
    params: Params  # the common start
    way: Way  # how the engine runs
    why: str  # it runs so
    engine: Engine
    guard: LeakGuard
    common: Common
    serving: Common  # with the model in evaluation mode
    device: torch.device
    train: Samples
    validation: Samples
    test: Samples
    sizes: Tensor
    start: Tree  # the server before round 1
    server: Tree
    states: ClientStore
    trained: ClientStore | None = None  # every client's model as it last trained

    @classmethod
    @torch.no_grad()
    def build(
        cls,
        settings: Settings,
        method: Method,
        model: Model,
        fed: Federation,
        plan: Sequence[Sequence[int]],
        initial: Mapping[str, Tensor] | None = None,
    ) -> "Rounds":
        """Everything as it stands before round 1; what does not fit is refused here."""
        device, dtype, seed = settings.torch_device, settings.torch_dtype, settings.seed
        keep_memory()
        model = (model if initial is None else model.starting_from(initial)).to(device, dtype)
        params = {name: p.to(device, dtype) for name, p in model.init(seed).items()}
        train, held = _hold_out(fed, settings.validation, seed, device)
        sizes = torch.from_numpy(train.sizes)
        common = Common(
            model=model.mode(training=True),
            x=map_leaves(lambda part: part.to(device).contiguous(), {"x": fed.x})["x"],
            y=fed.y.to(device, dtype) if fed.y.is_floating_point() else fed.y.to(device),
            prepare=fed.preparation(dtype, device),
            # statistics of a single example do not exist; where a model has them, padding makes it two
            batch_size=max(min(settings.batch_size, int(sizes.max())), 2 if model.statistics else 1),
            rounds=len(plan),
            num_clients=fed.num_clients,
            total_size=int(sizes.sum()),
            seed=seed,
            dtype=dtype,
            participation=sum(map(len, plan)) / (len(plan) * fed.num_clients),
        )
        serving = model.serving
        check_fit(serving, params, common, fed)
        setup = Setup(model, params, fed.num_clients, sizes.to(device), len(plan), seed)
        server = method.init_server(setup)
        effort = effort_of(serving, params, common)
        most, threads = most_at_once(effort, device), useful_threads(effort)
        if settings.engine == "auto" and settings.chunk is not None:
            raise Refused("chunk is how many clients the engine 'vectorized' takes at once; name that engine too.")
        way = named(
            "sequential" if settings.engine == "auto" else settings.engine, settings.chunk, threads, most, device
        )
        loop = cls(
            method=method,
            model=model,
            params=params,
            way=way,
            why="It was asked for.",
            engine=way.build(common, train),
            serving=replace(common, model=serving),
            guard=LeakGuard(common.x, common.prepare),
            common=common,
            device=device,
            train=train,
            validation=held,
            test=Samples(fed.test, device),
            sizes=sizes.to(device),
            start=server,
            server=server,
            states=ClientStore(method.init_client(setup)),
        )
        if settings.engine == "auto":
            loop._choose_engine(plan, most)
        return loop

    def _choose_engine(self, plan: Sequence[Sequence[int]], most: int) -> None:
        """The fastest for the clients of the largest round."""
        most_clients = max(plan, key=len)
        clients = most_clients[:1] if self.method.one_by_one else most_clients
        trial = Trial(
            build=lambda way, samples: way.build(self.common, samples),
            train=lambda engine, some: self._trained_by(engine, 1, some),
            samples=self.train,
            clients=clients,
            batch_size=self.common.batch_size,
            rounds=len(plan),
            device=self.device,
        )
        self.way, self.why = trial.choose(self.way, most)
        self.engine = self.way.build(self.common, self.train)

    def info(self, fed: Federation) -> dict[str, Any]:
        """What the record says once: where it ran, and who the clients are."""
        return {
            "engine": self.way.engine,
            "engine_why": self.why,
            "chunk": self.way.chunk,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads": self.way.threads,
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in self.model.module.parameters() if p.requires_grad),
            "score": self.model.score,
            "higher_is_better": self.model.higher_is_better,
            "layers": list(self.model.layers()),
            "clients": [self._describe(client, fed) for client in range(fed.num_clients)],
        }

    def _describe(self, client: int, fed: Federation) -> dict[str, Any]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = {part: int(samples.sizes[client]) for part, samples in parts.items()}
        counts = fed.class_counts(self.train[client].cpu())
        return {"name": fed.names[client], **sizes, "classes": counts}

    @torch.no_grad()
    def round(self, number: int, clients: Sequence[int]) -> Record:
        """One round; a method that goes one by one sees each client as a round of its own."""
        started = time.perf_counter()
        down: dict[int, int] = {}
        up: dict[int, int] = {}
        monitor: Tree = {}
        notes: dict[str, Values] = {}
        for cohort in [[client] for client in clients] if self.method.one_by_one else [list(clients)]:
            sent, result = self._trained_by(self.engine, number, cohort)
            received = deliver(result["upload"])
            self.guard.check(type(self.method).__name__, cohort, self.train, received)
            self.states.put(cohort, result["state"])
            self._keep_trained(cohort, result["trained"])
            sizes = self.sizes[cohort]
            exchange = Exchange(number, cohort, self.common.num_clients, sizes, self.model, sent, received)
            before, self.server = self.server, self.method.receive(self.server, exchange)
            pause = time.perf_counter()
            seen = dict(self.method.monitor(before, self.server, exchange))
            _extend(notes, _by_client(cohort, result["notes"] | seen.pop("per_client", {})))
            monitor |= seen
            started += time.perf_counter() - pause  # watching is not training
            down |= zip(cohort, count_bytes(sent, len(cohort)), strict=True)
            up |= zip(cohort, count_bytes(received, len(cohort)), strict=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {
            "round": number,
            "clients": list(clients),
            "bytes_up": sum(up.values()),
            "bytes_down": sum(down.values()),
            "seconds": time.perf_counter() - started,
            **dict.fromkeys(["loss", "loss_mean"]),
            **{
                f"{name}_{moment}{kind}": None
                for name in ("loss", *self.model.metrics)
                for moment in ("received", "trained")
                for kind in ("", "_mean")
            },
            "monitor": {name: _plain(value) for name, value in monitor.items()},
            "per_client": _join({"bytes_up": up, "bytes_down": down}, notes),
        }

    @torch.no_grad()
    def evaluate(self, line: Record, who: str | int, last: bool) -> Record:
        """Add both moments to a round's record: `received` as if a further round began, `trained` for its clients."""
        started, following = time.perf_counter(), line["round"] + 1
        chosen, here = self._chosen(line["clients"], who), set(line["clients"])
        values: dict[str, Values] = {}
        measured: dict[str, Values] = {}
        totals: Tree = {}
        for cohort in _cohorts(chosen):
            _extend(values, self._scores(cohort, self.received(cohort, following), "received"))
            if self.method.measures:
                stacked = self._ask(self.method.measure, self.method.send, self.server, cohort, following)
                _extend(measured, _by_client(cohort, stacked))
                sums = map_leaves(lambda leaf: leaf.sum(0), stacked)
                totals = add(totals, sums) if totals else sums
        for cohort in _cohorts([client for client in chosen if client in here]):
            personal = self.as_trained(cohort)
            _extend(values, self._scores(cohort, personal, "trained"))
            _extend(values, {"loss": self.evaluator(cohort, personal, self.train, only="loss")["loss"]})
        for name, found in values.items():
            kind = self.train if name == "loss" else self.validation if name.startswith("validation_") else self.test
            line |= {name: weighted_mean(found, kind.sizes), f"{name}_mean": plain_mean(found)}
        losses = [values.get(f"loss_{moment}", {}) for moment in ("received", "trained")]
        line["diverged"] = sorted({c for found in losses for c, loss in found.items() if not isfinite(loss)})
        overall = self.method.overall(totals) if totals else {}
        line["monitor"] |= {name: _plain(value) for name, value in overall.items()}
        line |= {f"{name}_mean": plain_mean(found) for name, found in measured.items()}
        if last:
            absent = [client for client in chosen if client not in here]
            line["last_trained"] = self._last_trained(values, absent)
        line["per_client"] = _join(line["per_client"], _join(values, measured))
        return line | {"seconds_evaluating": time.perf_counter() - started}

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.method, self.serving, self.way)

    @torch.no_grad()
    def received(self, clients: Sequence[int], number: int) -> Tree:
        """These clients' own models if round `number` began now, stacked."""
        return self._ask(self.method.personalize, self.method.serve, self.server, clients, number)

    def as_trained(self, clients: Sequence[int]) -> Tree:
        """These clients' own models as they last trained, stacked; the initial ones of those that never did."""
        store = self.trained
        if store is None:
            return self._ask(self.method.personalize, self.method.serve, self.start, clients, 1)
        if all(store.has(client) for client in clients):
            return store.get(clients, self.device)
        models = [
            store.get([client], self.device)
            if store.has(client)
            else self._ask(self.method.personalize, self.method.serve, self.start, [client], 1)
            for client in clients
        ]
        return map_leaves(lambda *parts: torch.cat(parts), *models)

    def personal_state_dict(self, client: int, moment: str) -> Params:
        """One client's own model as an ordinary state_dict."""
        with repeatable(self.way.threads):
            trained = moment == "trained"
            model = self.as_trained([client]) if trained else self.received([client], self.common.rounds + 1)
        flat = {name: leaf.cpu() for name, leaf in flatten(take(model, 0)).items()}
        if not self.params.keys() <= flat.keys():
            return flat  # a model of another kind: its tensors by name
        return flat | self.model.state_dict({name: flat[name] for name in self.params})

    def _trained_by(self, engine: Engine, number: int, clients: Sequence[int]) -> tuple[Tree, Tree]:
        """What is sent to these clients in a round, and what they make of it, stacked."""
        sent = deliver(self.method.send(self.server, clients, number))
        return sent, engine.apply(self._train, number, clients, self.states.get(clients, self.device), sent)

    def _train(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        result = self.method.train(local, state, message)
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, dict) for part in result)):
            raise Refused(f"{type(self.method).__name__}.train must return two dicts: (state, upload).")
        state, upload = result
        return {
            "state": state,
            "upload": upload,
            "trained": self.method.trained(local, state, message, upload),
            "notes": self.method.note(local, state, message, upload),
        }

    def _ask(
        self,
        function: Callable[..., Tree],
        send: Callable[..., Tree],
        server: Tree,
        clients: Sequence[int],
        number: int,
    ) -> Tree:
        """function(local, state, message) of these clients as if round `number` began with this server, stacked."""
        sent = deliver(send(server, clients, number))
        return self.engine.apply(function, number, clients, self.states.get(clients, self.device), sent)

    def _keep_trained(self, clients: Sequence[int], trained: Tree) -> None:
        if self.trained is None:
            self.trained = ClientStore(take(trained, 0))
        self.trained.put(clients, trained)

    def _chosen(self, clients: Sequence[int], who: str | int) -> list[int]:
        if who == "participants":
            return list(clients)
        everyone = np.arange(self.common.num_clients)
        if who == "all" or int(who) >= len(everyone):
            return everyone.tolist()
        return sorted(np.random.default_rng([self.common.seed, 3]).choice(everyone, int(who), replace=False).tolist())

    def _scores(self, clients: Sequence[int], personal: Tree, moment: str) -> dict[str, Values]:
        found = {f"{n}_{moment}": v for n, v in self.evaluator(clients, personal, self.test).items()}
        if self.validation.sizes[list(clients)].any():
            held = self.evaluator(clients, personal, self.validation, only=self.model.score)
            found[f"validation_{moment}"] = held[self.model.score]
        return found

    def _last_trained(self, values: dict[str, Values], absent: Sequence[int]) -> dict[str, Values]:
        """Every client's numbers as it last trained: those of this round are known, the absent are evaluated."""
        found = {name: dict(values.get(f"{name}_trained", {})) for name in ("loss", *self.model.metrics)}
        for cohort in _cohorts(absent):
            _extend(found, self.evaluator(cohort, self.as_trained(cohort), self.test))
        return found


def _hold_out(fed: Federation, share: float, seed: int, device: torch.device) -> tuple[Samples, Samples]:
    """Every client's training samples in two parts: to train on, and to choose a round by."""
    targets = fed.y.numpy()
    cuts = [hold_out(targets, own.numpy(), share, (seed, client)) for client, own in enumerate(fed.train)]
    train, held = (Samples([torch.from_numpy(cut[side]) for cut in cuts], device) for side in (0, 1))
    return train, held


def _cohorts(clients: Sequence[int]) -> Iterator[Sequence[int]]:
    """A few clients at a time, so that evaluating everyone takes no more memory than evaluating some."""
    for start in range(0, len(clients), _COHORT):
        yield clients[start : start + _COHORT]


def _by_client(clients: Sequence[int], stacked: Tree) -> dict[str, Values]:
    """Name -> client -> number, of what is one number a client."""
    numbers = {name: leaf for name, leaf in stacked.items() if isinstance(leaf, Tensor) and leaf.ndim == 1}
    return {name: dict(zip(clients, leaf.tolist(), strict=True)) for name, leaf in numbers.items()}


def _join(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, if they do not speak of different things under one name."""
    if twice := sorted(values.keys() & more.keys()):
        raise Refused(f"The record already has '{twice[0]}' of every client; a method must call its number otherwise.")
    return values | more


def _plain(value: Tensor | float) -> Any:
    """A number or nested lists; large arrays stay tensors, which take a tenth of the memory."""
    value = torch.as_tensor(value)
    return value.tolist() if value.numel() <= LARGE else value.cpu()


def _extend(values: dict[str, Values], more: dict[str, Values]) -> None:
    for name, found in more.items():
        values.setdefault(name, {}).update(found)
