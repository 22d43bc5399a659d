"""Rounds whose clients are simulated: every method, every engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtailor.batch import Common
from fedtailor.data.partition import hold_out
from fedtailor.engines import Engine, Way
from fedtailor.engines.choice import Trial, named
from fedtailor.engines.pool import Lost
from fedtailor.engines.sequential import Sequential, Touched
from fedtailor.engines.vectorized import Vectorized, rows_of
from fedtailor.errors import Refused
from fedtailor.evaluation import Evaluator
from fedtailor.faults import Failure, find_failures, not_finite, unlike_sent
from fedtailor.federation import Federation
from fedtailor.intake import Intake
from fedtailor.lines import Record
from fedtailor.local import LocalView
from fedtailor.loop import Arrived, Loop
from fedtailor.machine import keep_memory, repeatable
from fedtailor.method import Method, Setup
from fedtailor.model import Model
from fedtailor.room import check_method
from fedtailor.samples import Samples
from fedtailor.settings import Settings
from fedtailor.store import ClientStore
from fedtailor.trees import Params, Tree, flatten, map_leaves, once, take
from fedtailor.trial import check_fit, effort_of, most_at_once, useful_threads
from fedtailor.turn import Turn, left, without
from fedtailor.wire import LeakGuard, deliver
from fedtailor.work import common_of, start_of, state_dict_of, work

if TYPE_CHECKING:
    from fedtailor.checkpoint import Checkpoint


@dataclass(eq=False, kw_only=True)  # what changes: server, states and trained are replaced round by round
class Rounds(Loop):
    """A run whose clients are simulated: their data, what they keep, and the engine that does their work."""

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
        way: Way | None = None,
    ) -> "Rounds":
        """Everything as it stands before round 1; what does not fit is refused here. `way` is how the engine ran when
        the run was begun, for one that is resumed."""
        device, seed = settings.torch_device, settings.seed
        keep_memory()
        model, params = start_of(model, settings, initial)
        train, held = _hold_out(fed, settings.validation, seed, device)
        sizes = torch.from_numpy(train.sizes)
        share = sum(map(len, plan)) / (len(plan) * fed.num_clients)
        common = common_of(settings, model, fed, sizes, len(plan), share)
        serving = model.serving
        check_fit(serving, params, common, fed)
        setup = Setup(model, params, fed.num_clients, sizes.to(device), len(plan), seed)
        check_method(method, setup)
        server = method.init_server(setup)
        effort = effort_of(serving, params, common)
        most, threads = most_at_once(effort, device), useful_threads(effort)
        if settings.engine == "auto" and settings.chunk is not None:
            raise Refused("chunk is how many clients the engine 'vectorized' takes at once; name that engine too.")
        chosen = "sequential" if settings.engine == "auto" else settings.engine
        found = way or named(chosen, settings.chunk, threads, most, device)
        loop = cls(
            method=method,
            model=model,
            params=params,
            way=found,
            why="It was asked for.",
            engine=found.build(common, train),
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
            noise_seed=seed,
            states=ClientStore(method.init_client(setup)),
            channel=settings.channel,
            max_failures=settings.max_failures,
        )
        if settings.engine == "auto" and way is None:
            loop._choose_engine(plan, most)
        return loop

    def _choose_engine(self, plan: Sequence[Sequence[int]], most: int) -> None:
        """The fastest for the clients of the largest round."""
        most_clients = max(plan, key=len)
        clients = most_clients[:1] if self.method.one_by_one else most_clients
        trial = Trial(
            build=lambda way, samples: way.build(self.common, samples),
            train=lambda engine, some: self._trained_by(
                engine, 1, some, deliver(self.method.send(self.server, some, 1))
            ),
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
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "threads": self.way.threads,
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in self.model.module.parameters() if p.requires_grad),
            "score": self.model.score,
            "higher_is_better": self.model.higher_is_better,
            "layers": list(self.model.layers()),
            "inputs": Intake.of(fed).plain(),
            "clients": [self._describe(client, fed) for client in range(fed.num_clients)],
        }

    def _describe(self, client: int, fed: Federation) -> dict[str, Any]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = {part: int(samples.sizes[client]) for part, samples in parts.items()}
        counts = fed.class_counts(self.train[client].cpu())
        return {"name": fed.names[client], **sizes, "classes": counts}

    def work(self, turn: Turn, number: int, clients: list[int], sent: Tree) -> Arrived | None:
        clients, sent, result = self._work(turn, number, clients, sent)
        if not clients:
            return None
        uploads = deliver(result["upload"])
        self.guard.check(type(self.method).__name__, clients, self.train, uploads)
        encoded = self.channel.encode(uploads, sent, clients, number, self.common.seed)
        notes = result["notes"] | self.channel.note(uploads, sent)
        return Arrived(clients, sent, encoded, notes, {"state": result["state"], "trained": result["trained"]})

    def _work(self, turn: Turn, number: int, clients: list[int], sent: Tree) -> tuple[list[int], Tree, Tree]:
        """Those who do not fail, what they were sent, and what they made of it, stacked."""
        try:
            result = self._trained_by(self.engine, number, clients, sent)
        except (Touched, Lost):  # no client's failure alone
            raise
        except Exception:
            failures = self._failures(number, clients, sent)
            if not failures:
                raise  # the engine's own
            turn.failures |= failures
            clients, sent = left(failures, clients), without(failures, clients, sent)
            if not clients:
                return [], sent, {}
            result = self._trained_by(self.engine, number, clients, sent)
        why = self._misfit(result, sent) or turn.misfit(result["upload"])
        if why is not None:  # stacked, they are all alike
            turn.failures |= dict.fromkeys(clients, Failure(why))
            return [], sent, {}
        spoilt = not_finite(clients, {part: deliver(result[part]) for part in ("upload", "state", "trained")})
        turn.failures |= spoilt
        return left(spoilt, clients), without(spoilt, clients, sent), without(spoilt, clients, result)

    def _failures(self, number: int, clients: list[int], sent: Tree) -> dict[int, Failure]:
        """Who of these fails when every one works alone."""
        alone = Sequential(self.common, self.train)

        def own(client: int) -> Tree:
            return rows_of(sent, [clients.index(client)])

        return find_failures(
            lambda client: self._trained_by(alone, number, [client], own(client)),
            lambda client, result: self._misfit(result, own(client)),
            clients,
        )

    def _misfit(self, result: Tree, sent: Tree) -> str | None:
        """Why what clients made of a round cannot be read or kept, if it cannot."""
        if (why := unlike_sent(result["upload"], sent)) is not None:
            return why
        for word, store, part in (("state", self.states, "state"), ("model", self.trained, "trained")):
            if store is not None and (name := store.misfit(result[part])) is not None:
                return f"its {word} changed its names or shapes at '{name}', which must stay"
        return None

    @property
    def stores(self) -> dict[str, ClientStore]:
        """All that clients have, by kind."""
        return {"states": self.states} | ({} if self.trained is None else {"trained": self.trained})

    @property
    def chunk(self) -> int | None:
        """How many clients run at once by now: fewer than at first where memory did not suffice."""
        return self.engine.chunk if isinstance(self.engine, Vectorized) else self.way.chunk

    def restore(self, found: "Checkpoint", lines: Sequence[Record]) -> None:
        """Everything as it stood when a checkpoint was written."""
        self.go_back(found.server()[0], found.round, lines)
        if isinstance(self.engine, Vectorized):
            self.engine.chunk = found.note["chunk"]
        for clients, stacked in found.shards("states"):
            self.states.put(clients, stacked)
        like = take(self.as_trained([0]), 0)  # what a model is like
        for clients, stacked in found.shards("trained"):
            self.trained = self.trained or ClientStore(like)
            self.trained.put(clients, stacked)
        strangers = [client for store in self.stores.values() for client in store.clients()[-1:]]
        if any(client >= self.common.num_clients for client in strangers):
            raise Refused(f"The checkpoint '{found.folder}' has states of clients that are not there.")

    def keep(self, turn: Turn) -> None:
        super().keep(turn)
        if not turn.clients:
            return
        kept = turn.kept[0] if len(turn.kept) == 1 else map_leaves(lambda *parts: torch.cat(parts), *turn.kept)
        kept = map_leaves(once(torch.Tensor.contiguous), kept)
        self.states.put(turn.clients, kept["state"])
        self._keep_trained(turn.clients, kept["trained"])

    def _keep_trained(self, clients: Sequence[int], trained: Tree) -> None:
        if self.trained is None:
            self.trained = ClientStore(take(trained, 0))
        self.trained.put(clients, trained)

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.method, self.serving, self.way)

    @torch.no_grad()
    def received(self, clients: Sequence[int], number: int) -> Tree:
        """These clients' own models if round `number` began now, stacked."""
        return self.ask(self.method.personalize, self.method.serve, self.server, clients, number)

    def as_trained(self, clients: Sequence[int]) -> Tree:
        """These clients' own models as they last trained, stacked; the initial ones of those that never did."""
        store = self.trained
        if store is None:
            return self.ask(self.method.personalize, self.method.serve, self.start, clients, 1)
        if all(store.has(client) for client in clients):
            return store.get(clients, self.device)
        models = [
            store.get([client], self.device)
            if store.has(client)
            else self.ask(self.method.personalize, self.method.serve, self.start, [client], 1)
            for client in clients
        ]
        return map_leaves(lambda *parts: torch.cat(parts), *models)

    def personal_state_dict(self, client: int, moment: str) -> Params:
        """One client's own model as an ordinary state_dict."""
        with repeatable(self.way.threads):
            trained = moment == "trained"
            model = self.as_trained([client]) if trained else self.received([client], self.common.rounds + 1)
        return state_dict_of(self.model, self.params, flatten(take(model, 0)))

    def _trained_by(self, engine: Engine, number: int, clients: Sequence[int], sent: Tree) -> Tree:
        """What these clients make of what they were sent in a round, stacked."""
        return engine.apply(self._train, number, clients, self.states.get(clients, self.device), sent)

    def _train(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return work(self.method, local, state, message)

    def ask(
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


def _hold_out(fed: Federation, share: float, seed: int, device: torch.device) -> tuple[Samples, Samples]:
    """Every client's training samples in two parts: to train on, and to choose a round by."""
    targets = fed.y.numpy()
    cuts = [hold_out(targets, own.numpy(), share, (seed, client)) for client, own in enumerate(fed.train)]
    train, held = (Samples([torch.from_numpy(cut[side]) for cut in cuts], device) for side in (0, 1))
    return train, held
