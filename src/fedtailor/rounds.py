"""The only round loop: every method, every engine.

send → train → receive → evaluate
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtailor.data.partition import hold_out
from fedtailor.engines import Engine, make_engine
from fedtailor.errors import Refused
from fedtailor.evaluation import Evaluator, Values, plain_mean, weighted_mean
from fedtailor.federation import Federation
from fedtailor.local import Common, LocalView, pick
from fedtailor.method import Exchange, Method, Setup
from fedtailor.model import Model, cross_entropy
from fedtailor.pure import batch_key
from fedtailor.run import Record
from fedtailor.settings import Settings
from fedtailor.store import ClientStore
from fedtailor.trees import Params, Tree, flatten, map_leaves, take
from fedtailor.wire import LeakGuard, count_bytes, deliver

_COHORT = 64  # clients evaluated at once
_SMALL_STEP = 2.5e7  # products: about a millisecond of one thread


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads inside; afterwards the process has its own number again."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(eq=False)  # the one thing that changes: server, states and trained are replaced round by round
class Rounds:
    """The state of a run and what a round does to it."""

    method: Method
    model: Model
    params: Params  # the common start
    engine: Engine
    evaluator: Evaluator
    guard: LeakGuard
    common: Common
    device: torch.device
    train: list[Tensor]
    validation: list[Tensor]
    test: list[Tensor]
    sizes: Tensor
    threads: int  # of torch while a client computes
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
        model = (model if initial is None else model.starting_from(initial)).to(device, dtype)
        params = {name: p.to(device, dtype) for name, p in model.init(seed).items()}
        train, held = _hold_out(fed, settings.validation, seed, device)
        sizes = torch.tensor([len(own) for own in train])
        common = Common(
            model=model.mode(training=True),
            x=map_leaves(lambda part: part.to(device), {"x": fed.x})["x"],
            y=fed.y.to(device, dtype) if fed.y.is_floating_point() else fed.y.to(device),
            prepare=fed.preparation(dtype, device),
            # statistics of a single example do not exist; where a model has them, padding makes it two
            batch_size=max(min(settings.batch_size, int(sizes.max())), 2 if model.statistics else 1),
            rounds=len(plan),
            num_clients=fed.num_clients,
            total_size=int(sizes.sum()),
            seed=seed,
            dtype=dtype,
        )
        serving = model.mode(training=False)
        _check_fit(serving, params, common, fed)
        setup = Setup(model, params, fed.num_clients, sizes.to(device), len(plan), seed)
        server = method.init_server(setup)
        return cls(
            method=method,
            model=model,
            params=params,
            engine=make_engine(settings.engine, common, train),
            evaluator=Evaluator(method, serving, common),
            guard=LeakGuard(common.x, common.prepare),
            common=common,
            device=device,
            train=train,
            validation=held,
            test=[own.to(device) for own in fed.test],
            sizes=sizes.to(device),
            threads=_useful_threads(serving, params, common),
            start=server,
            server=server,
            states=ClientStore(method.init_client(setup), fed.num_clients),
        )

    def info(self, fed: Federation) -> dict[str, Any]:
        """What the record says once: where it ran, and who the clients are."""
        return {
            "engine": self.engine.name,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads": self.threads,
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in self.model.module.parameters() if p.requires_grad),
            "score": self.model.score,
            "higher_is_better": self.model.higher_is_better,
            "clients": [self._describe(client, fed) for client in range(fed.num_clients)],
        }

    def _describe(self, client: int, fed: Federation) -> dict[str, Any]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = {part: len(positions[client]) for part, positions in parts.items()}
        counts = fed.class_counts(self.train[client].cpu())
        return {"name": fed.names[client], **sizes, "classes": counts}

    @torch.no_grad()
    def round(self, number: int, clients: Sequence[int]) -> Record:
        """One round; a method that goes one by one sees each client as a round of its own."""
        started = time.perf_counter()
        down: dict[int, int] = {}
        up: dict[int, int] = {}
        for cohort in [[client] for client in clients] if self.method.one_by_one else [list(clients)]:
            sent = deliver(self.method.send(self.server, cohort, number))
            result = self.engine.apply(self._train, number, cohort, self.states.get(cohort, self.device), sent)
            received = deliver(result["upload"])
            self.guard.check(type(self.method).__name__, cohort, self.train, received)
            self.states.put(cohort, result["state"])
            self._keep_trained(cohort, result["trained"])
            sizes = self.sizes[cohort]
            exchange = Exchange(number, cohort, self.common.num_clients, sizes, sent, received)
            self.server = self.method.receive(self.server, exchange)
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
            "per_client": {"bytes_up": up, "bytes_down": down},
        }

    @torch.no_grad()
    def evaluate(self, line: Record, who: str | int, last: bool) -> Record:
        """Add both moments to a round's record: `received` as if a further round began, `trained` for its clients."""
        started, following = time.perf_counter(), line["round"] + 1
        chosen, here = self._chosen(line["clients"], who), set(line["clients"])
        values: dict[str, Values] = {}
        for cohort in _cohorts(chosen):
            _extend(values, self._scores(cohort, self.received(cohort, following), "received"))
            _extend(values, self._measures(cohort, following))
        for cohort in _cohorts([client for client in chosen if client in here]):
            personal = self.as_trained(cohort)
            _extend(values, self._scores(cohort, personal, "trained"))
            _extend(values, {"loss": self.evaluator(cohort, personal, self.train)["loss"]})
        for name, found in values.items():
            kind = self.train if name == "loss" else self.validation if name.startswith("validation_") else self.test
            weights = [len(own) for own in kind]
            line |= {name: weighted_mean(found, weights), f"{name}_mean": plain_mean(found)}
        losses = [values.get(f"loss_{moment}", {}) for moment in ("received", "trained")]
        line["diverged"] = sorted({c for found in losses for c, loss in found.items() if not isfinite(loss)})
        if last:
            absent = [client for client in chosen if client not in here]
            line["last_trained"] = self._last_trained(values, absent)
        line["per_client"] |= values
        return line | {"seconds_evaluating": time.perf_counter() - started}

    @torch.no_grad()
    def received(self, clients: Sequence[int], number: int) -> Tree:
        """These clients' own models if round `number` began now, stacked."""
        sent = deliver(self.method.send(self.server, clients, number))
        return self.engine.apply(self.method.personalize, number, clients, self.states.get(clients, self.device), sent)

    def as_trained(self, clients: Sequence[int]) -> Tree:
        """These clients' own models as they last trained, stacked; the initial ones of those that never did."""
        store = self.trained
        if store is None:
            return self._initial(clients)
        if all(store.has(client) for client in clients):
            return store.get(clients, self.device)
        models = [store.get([c], self.device) if store.has(c) else self._initial([c]) for c in clients]
        return map_leaves(lambda *parts: torch.cat(parts), *models)

    def personal_state_dict(self, client: int, moment: str) -> Params:
        """One client's own model as an ordinary state_dict."""
        with torch_threads(self.threads):
            trained = moment == "trained"
            model = self.as_trained([client]) if trained else self.received([client], self.common.rounds + 1)
        flat = {name: leaf.cpu() for name, leaf in flatten(take(model, 0)).items()}
        if not self.params.keys() <= flat.keys():
            return flat  # a model of another kind: its tensors by name
        return flat | self.model.state_dict({name: flat[name] for name in self.params})

    def _train(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        result = self.method.train(local, state, message)
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, dict) for part in result)):
            raise Refused(f"{type(self.method).__name__}.train must return two dicts: (state, upload).")
        state, upload = result
        return {"state": state, "upload": upload, "trained": self.method.trained(local, state, message, upload)}

    def _initial(self, clients: Sequence[int]) -> Tree:
        sent = deliver(self.method.send(self.start, clients, 1))
        return self.engine.apply(self.method.personalize, 1, clients, self.states.get(clients, self.device), sent)

    def _keep_trained(self, clients: Sequence[int], trained: Tree) -> None:
        if self.trained is None:
            self.trained = ClientStore(take(trained, 0), self.common.num_clients)
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
        if any(len(self.validation[client]) for client in clients):
            held = self.evaluator(clients, personal, self.validation)
            found[f"validation_{moment}"] = held[self.model.score]
        return found

    def _last_trained(self, values: dict[str, Values], absent: Sequence[int]) -> dict[str, Values]:
        """Every client's numbers as it last trained: those of this round are known, the absent are evaluated."""
        found = {name: dict(values.get(f"{name}_trained", {})) for name in ("loss", *self.model.metrics)}
        for cohort in _cohorts(absent):
            _extend(found, self.evaluator(cohort, self.as_trained(cohort), self.test))
        return found

    def _measures(self, clients: Sequence[int], number: int) -> dict[str, Values]:
        if type(self.method).measure is Method.measure:
            return {}
        sent = deliver(self.method.send(self.server, clients, number))
        states = self.states.get(clients, self.device)
        measured = self.engine.apply(self.method.measure, number, clients, states, sent)
        return {name: dict(zip(clients, values.tolist(), strict=True)) for name, values in measured.items()}


def _useful_threads(model: Model, params: Params, common: Common) -> int:
    """One thread where a step is small: there, sharing it costs more than it gains, and a hundred times more on a busy
    machine. A function of the model and the batch alone, so that the same run gives the same bits."""
    products = 0

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal products
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and isinstance(output, Tensor):  # linear, convolution: a row of weights an output
            products += output.numel() * weight[0].numel()

    hooks = [layer.register_forward_hook(count) for layer in model.module.modules()]
    model.logits(params, common.prepare(pick(common.x, slice(0, 1))))
    for hook in hooks:
        hook.remove()
    step = 3 * common.batch_size * max(products, sum(p.numel() for p in params.values()))  # forward, and twice back
    return torch.get_num_threads() if step > _SMALL_STEP else 1


def _hold_out(fed: Federation, share: float, seed: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Every client's training samples in two parts: to train on, and to choose a round by."""
    targets = fed.y.numpy()
    cuts = [hold_out(targets, own.numpy(), share, (seed, client)) for client, own in enumerate(fed.train)]
    train, held = ([torch.from_numpy(cut[side]).to(device) for cut in cuts] for side in (0, 1))
    return train, held


def _cohorts(clients: Sequence[int]) -> Iterator[Sequence[int]]:
    """A few clients at a time, so that evaluating everyone takes no more memory than evaluating some."""
    for start in range(0, len(clients), _COHORT):
        yield clients[start : start + _COHORT]


def _extend(values: dict[str, Values], more: dict[str, Values]) -> None:
    for name, found in more.items():
        values.setdefault(name, {}).update(found)


def _check_fit(model: Model, params: Params, common: Common, fed: Federation) -> None:
    """Try the model on the first client's first sample, so that what does not fit is said before round 1."""
    mine = fed.train[0][:1].to(common.y.device)
    first, targets = common.prepare(pick(common.x, mine)), common.y[mine]
    classify = model.loss is cross_entropy
    try:
        outputs = model.logits(params, first)
        losses = model.loss(outputs, targets.clamp(max=outputs.shape[1] - 1) if classify else targets)
    except Refused:
        raise
    except Exception as error:  # whatever a user's module raises is the reason to tell
        shape = fed.shape if fed.shape is not None else {name: tuple(part.shape[1:]) for name, part in fed.x.items()}
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise Refused(f"The model does not take client {fed.names[0]}'s inputs, {shape}: {reason}.") from error
    if losses.shape != (1,):
        raise Refused(f"The loss must give one number an example, not the shape {tuple(losses.shape)}.")
    beyond = fed.y >= outputs.shape[1] if classify else torch.zeros(1, dtype=torch.bool)
    if bool(beyond.any()):
        raise Refused(f"Client {fed.owner(beyond)} has labels beyond the model's {outputs.shape[1]} outputs.")
    _check_purity(common, params, torch.cat([mine, mine]))


def _check_purity(common: Common, params: Params, samples: Tensor) -> None:
    """A module that draws from torch's generator or changes its buffers cannot be repeated: refuse it."""
    module = common.model.module
    batch_key.set(0)
    with torch.random.fork_rng(devices=[]):
        drawn, kept = torch.get_rng_state(), {name: b.clone() for name, b in module.named_buffers()}
        common.model.logits(params, common.prepare(pick(common.x, samples)))
        if not torch.equal(drawn, torch.get_rng_state()):
            raise Refused("The model's forward draws random numbers, which cannot be repeated; use nn.Dropout layers.")
    for name, buffer in module.named_buffers():
        if not torch.equal(kept[name], buffer):
            raise Refused(f"The model's forward changes its buffer '{name}', which clients would share; leave it out.")
