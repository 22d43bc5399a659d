"""A client's work on one message of the server: train or evaluate, and save the client state."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.method import Setup
from fedtailor.core.system import deterministic, peak_memory, reset_peak_memory, retain_freed_memory
from fedtailor.core.trees import Tree, flatten, map_leaves, repeat, take
from fedtailor.deploy.client.client_folder import ClientFolder
from fedtailor.deploy.dummy_client import single_client_index
from fedtailor.deploy.messages import DivergedError
from fedtailor.errors import DeployError
from fedtailor.runs.files import write_and_sync, write_atomic
from fedtailor.runs.records import nan_to_none
from fedtailor.runs.serialization import pack, unpack
from fedtailor.training.channel.leak_check import LeakCheck
from fedtailor.training.channel.payload import count_bytes, mask_absent_rows
from fedtailor.training.client_failures import find_non_finite
from fedtailor.training.client_update import client_update, make_shared_context, personal_state_dict
from fedtailor.training.engines import EngineChoice
from fedtailor.training.engines.sequential import Sequential
from fedtailor.training.evaluator import Evaluator, global_scores, scores
from fedtailor.training.preflight import choose_num_threads, measure_step_cost

log = logging.getLogger("fedtailor")


@dataclass(frozen=True)
class RoundRequest:
    """The fields of a message from the server."""

    run: str
    index: int  # of this client in the run
    round: int
    rounds: int
    sizes: list[int]  # training samples of all clients
    participation: float
    last_counted: int  # this client's last round that counts; 0 if there is none
    joined: int = 0  # number of rounds before this client joined
    joining: str = ""  # identifies that it joined late; after a rollback, it may join again
    keep: int = 2  # states of rounds that counted, besides the newest: as many as the server has checkpoints
    last: bool = False  # the run ends with this evaluation

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "RoundRequest":
        """Return the request in a message's fields; the client trusts the server, which has the same version."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


class Worker:
    """Handles one message."""

    def __init__(self, folder: ClientFolder, request: RoundRequest) -> None:
        retain_freed_memory()
        self._client, self._request = folder, request
        deployment, fed = folder.deployment, folder.fed
        self._model, self._params = folder.initial_model
        device = deployment.torch_device
        train, validation = folder.split_training_data(request.index)
        expected = request.sizes[request.index]
        if len(train) != expected:
            raise DeployError(
                f"The data changed since the run started: there are {len(train)} training samples, expected {expected}."
            )
        sizes = torch.tensor(request.sizes)
        self._shared = make_shared_context(deployment, self._model, fed, sizes, request.rounds, request.participation)
        self._train, self._validation, self._test = (
            single_client_index(samples, request.index, device) for samples in (train, validation, fed.test[0])
        )
        self._setup = Setup(self._model, self._params, len(sizes), sizes.to(device), request.rounds, deployment.seed)
        self._device = device
        self._threads = choose_num_threads(measure_step_cost(self._model.eval_mode, self._params, self._shared))
        self._run_folder = folder.folder / "runs" / request.run

    @torch.no_grad()
    def train(self, message: Tree) -> tuple[dict[str, Any], Tree]:
        """Train one round, save the client state, and return the reply's fields and the upload."""
        request, method, channel = self._request, self._client.method, self._client.deployment.channel
        reset_peak_memory(self._device)
        sent, state = self._stacked(message), self._load_state(message)
        if self._is_newcomer:  # its initial state must not change if this round does not count
            self._write_state(self._initial_file, {"state": state})
        results = self._apply(lambda *args: client_update(method, *args), request.round, state, sent)
        parts = {part: mask_absent_rows(results[part]) for part in ("upload", "state", "trained")}
        for failure in find_non_finite([request.index], parts).values():
            raise DivergedError(
                f"Nothing is sent: {failure.reason}; the model it received is spoiled, or lr too large."
            )
        leak_check = LeakCheck(self._shared.x, self._shared.prepare)
        leak_check.check(type(method).__name__, [request.index], self._train, parts["upload"])
        # A new noise seed for every message: the same noise on two uploads would reveal their difference.
        noise = sha256(self._client.secret + pack(message) + str(request).encode()).digest() if channel.noise else b""
        encoded = channel.encode(parts["upload"], sent, [request.index], request.round, noise)
        metrics = {name: float(leaf[0]) for name, leaf in results["client_metrics"].items() if leaf.ndim == 1}
        self._save_states(results, request.round)
        if request.round == request.rounds:  # in case the client is offline during the last evaluation
            self._write_model("trained", results["trained"])
        bytes_up = count_bytes(encoded, 1)[0]
        cost = {"bytes_up": bytes_up, **peak_memory(self._device)}
        self._append_record({"round": request.round, **cost, **self._privacy_spent(), **metrics})
        return self._reply_fields(), take(encoded, 0)

    @torch.no_grad()
    def evaluate(self, message: Tree) -> dict[str, Any]:
        """Evaluate the personal models on this client's data, save them, and return the reply's fields."""
        request, method, deployment = self._request, self._client.method, self._client.deployment
        state, sent = self._load_state(message), self._stacked(message)
        received = self._apply(method.personalize, request.round, state, sent)
        trained = self._trained_model(received)
        evaluator = Evaluator(method, self._shared, EngineChoice("sequential"))
        clients, samples = [request.index], {"test": self._test, "validation": self._validation}
        samples |= {"train": self._train} if deployment.evaluate_train else {}
        with deterministic(self._threads):
            values = scores(evaluator, clients, received, "received", samples)
            values |= scores(evaluator, clients, trained, "trained", samples)
            if deployment.evaluate_global:
                values |= global_scores(evaluator, clients, sent, self._test)
            values["loss"] = evaluator(clients, trained, self._train, only="loss")["loss"]
        reported = {name: by_client[request.index] for name, by_client in values.items() if request.index in by_client}
        tensors = (
            self._apply(method.evaluation_metrics, request.round, state, sent) if method.has_evaluation_metrics else {}
        )
        metrics = {n: float(leaf[0]) for n, leaf in tensors.items() if isinstance(leaf, Tensor) and leaf.ndim == 1}
        self._append_record({"evaluated_after": request.round - 1, **reported, **metrics})
        self._write_model("trained", trained)
        if request.last:
            self._write_model("received", received)
        return self._reply_fields() | {"scores": nan_to_none(reported)}

    def _reply_fields(self) -> dict[str, Any]:
        samples = {"train": self._train, "validation": self._validation, "test": self._test}
        sizes = {part: int(index.sizes[self._request.index]) for part, index in samples.items()}
        return {"name": self._client.name, "run": self._request.run, "round": self._request.round, "samples": sizes}

    def _apply(self, function: Any, number: int, state: Tree, sent: Tree) -> Tree:
        engine = Sequential(self._shared, self._train)
        with deterministic(self._threads):
            return engine.apply(function, number, [self._request.index], state, sent)

    def _stacked(self, tree: Tree) -> Tree:
        return repeat(_to(tree, self._device), 1)

    def _load_state(self, message: Tree) -> Tree:
        """Return the client state after the last round that counts, grown for clients that joined since."""
        method, saved = self._client.method, self._saved
        if self._is_newcomer:
            return repeat(method.init_newcomer(self._setup, _to(message, self._device)), 1)
        if saved is None:
            return repeat(method.init_client(self._setup), 1)
        return self._stacked(method.grow_client(_to(saved["state"], self._device), self._setup))

    @property
    def _is_newcomer(self) -> bool:
        """Whether this client starts after other clients; also true if it has lost its saved state."""
        return self._saved is None and max(self._request.joined, self._request.last_counted) > 0

    def _trained_model(self, received: Tree) -> Tree:
        """Return the personal model after this client's last training, or the received one if it has not trained."""
        saved = self._saved or {}
        return self._stacked(saved["trained"]) if "trained" in saved else received

    @cached_property
    def _saved(self) -> Tree | None:
        """What was saved after the last round that counts or, if that is missing, after the latest round before it."""
        counted, path = self._request.last_counted, self._initial_file
        if counted:
            latest = max((number for number in self._saved_rounds() if number <= counted), default=0)
            path = self._state_file(latest)
            if latest != counted:
                log.warning("The state of round %d is missing; continuing from round %d.", counted, latest)
        return unpack(path.read_bytes()) if path.is_file() else None

    def _saved_rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self._states.glob("[0-9]*.safetensors"))

    def _save_states(self, results: Tree, number: int) -> None:
        self._write_state(self._state_file(number), {part: results[part] for part in ("state", "trained")})
        counted = [saved for saved in self._saved_rounds() if saved <= self._request.last_counted]
        for saved in self._saved_rounds():
            if saved != number and saved not in counted[-self._request.keep :]:  # it did not count, or is too old
                self._state_file(saved).unlink()

    @property
    def _states(self) -> Path:
        return self._run_folder / "states"

    def _state_file(self, number: int) -> Path:
        return self._states / f"{number:06d}.safetensors"

    @property
    def _initial_file(self) -> Path:
        """The file with a newcomer's initial state, or with the one that replaces its lost state."""
        counted = self._request.last_counted
        return self._state_file(counted) if counted else self._states / f"initial-{self._request.joining}.safetensors"

    def _write_state(self, path: Path, stacked: Tree) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, pack(take(stacked, 0)))

    def _write_model(self, moment: str, stacked: Tree) -> None:
        models = self._run_folder / "models"
        models.mkdir(parents=True, exist_ok=True)
        personal = personal_state_dict(self._model, self._params, flatten(take(stacked, 0)))
        write_atomic(models / f"{moment}.safetensors", pack(personal))

    def _append_record(self, record: dict[str, Any]) -> None:
        """Append a line to the client's own record."""
        self._run_folder.mkdir(parents=True, exist_ok=True)
        path = self._run_folder / "rounds.jsonl"
        incomplete = path.is_file() and not path.read_bytes().endswith(b"\n")  # power was lost while writing
        with path.open("ab") as file:
            write_and_sync(file, (b"\n" if incomplete else b"") + (json.dumps(nan_to_none(record)) + "\n").encode())

    def _privacy_spent(self) -> dict[str, Any]:
        """Return the privacy spent by all uploads of this client in the run, whether they counted or not."""
        channel, path = self._client.deployment.channel, self._run_folder / "rounds.jsonl"
        if not channel.noise:
            return {}
        lines = path.read_bytes().splitlines() if path.is_file() else []
        evaluations = sum(line.startswith(b'{"evaluated_after"') for line in lines)
        return channel.privacy_spent(1 + len(lines) - evaluations)  # an incomplete line may have been an upload


def _to(tree: Tree, device: torch.device) -> Tree:
    return map_leaves(lambda leaf: leaf.to(device), tree)
