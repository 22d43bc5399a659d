"""One client's work in a round, wherever it is done: simulated among others, or on a machine of its own."""

from collections.abc import Mapping

from torch import Tensor

from fedtailor.batch import Common
from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.local import LocalView
from fedtailor.method import Method
from fedtailor.model import Model
from fedtailor.settings import Settings
from fedtailor.trees import Params, Tree, map_leaves


def work(method: Method, local: LocalView, state: Tree, message: Tree) -> Tree:
    """What a client makes of a message: its next state, its upload, its model, and notes for the record."""
    result = method.train(local, state, message)
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, dict) for part in result)):
        raise Refused(f"{type(method).__name__}.train must return two dicts: (state, upload).")
    state, upload = result
    return {
        "state": state,
        "upload": upload,
        "trained": method.trained(local, state, message, upload),
        "notes": method.note(local, state, message, upload),
    }


def start_of(model: Model, settings: Settings, initial: Mapping[str, Tensor] | None = None) -> tuple[Model, Params]:
    """The model on its device, and the common start: of the run's seed, or as given."""
    device, dtype = settings.torch_device, settings.torch_dtype
    model = (model if initial is None else model.starting_from(initial)).to(device, dtype)
    return model, {name: p.to(device, dtype) for name, p in model.init(settings.seed).items()}


def common_of(
    settings: Settings, model: Model, fed: Federation, sizes: Tensor, rounds: int, participation: float
) -> Common:
    """What all clients of a run have in common; the data are those that are here, the sizes everyone's."""
    device, dtype = settings.torch_device, settings.torch_dtype
    return Common(
        model=model.mode(training=True),
        x=map_leaves(lambda part: part.to(device).contiguous(), {"x": fed.x})["x"],
        y=fed.y.to(device, dtype) if fed.y.is_floating_point() else fed.y.to(device),
        prepare=fed.preparation(dtype, device),
        # statistics of a single example do not exist; where a model has them, padding makes it two
        batch_size=max(min(settings.batch_size, int(sizes.max())), 2 if model.statistics else 1),
        rounds=rounds,
        num_clients=len(sizes),
        total_size=int(sizes.sum()),
        seed=settings.seed,
        dtype=dtype,
        participation=participation,
    )


def state_dict_of(model: Model, params: Params, personal: Params) -> Params:
    """A personal model as an ordinary state_dict; one of another kind by the names of its tensors."""
    flat = {name: leaf.cpu() for name, leaf in personal.items()}
    if not params.keys() <= flat.keys():
        return flat
    return flat | model.state_dict({name: flat[name] for name in params})
