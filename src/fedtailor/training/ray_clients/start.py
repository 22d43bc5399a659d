"""Start the actors of a run: how many, on which devices, and with which engine."""

from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError
from fedtailor.training.clients import LostClientsError
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import EngineChoice
from fedtailor.training.grouped_clients import AnyClients, GroupedClients
from fedtailor.training.ray_clients.cluster import ActorGroup, connect, default_actors, nodes
from fedtailor.training.ray_clients.ray_clients import RayClients
from fedtailor.training.server import Server

_ATTEMPTS = 3  # an actor may be lost before the run has started


def start_ray_clients(
    config: TrainingConfig, server: Server, local: AnyClients, fed: Federation, choice: EngineChoice | None = None
) -> RayClients:
    """Return the clients of a run in actors that have received their samples, before round 1.

    `local` are the same clients in this process. A resumed run passes the engine `choice` of its actors.
    """
    if config.measure_drift and isinstance(local, GroupedClients):
        raise ConfigError("With engine 'ray', measure_drift needs the same network for all clients; omit it.")
    connect(config.ray_address)
    count = min(config.actors or default_actors(nodes(), config.device), fed.num_clients)
    count = 1 if server.method.pools_data else count  # all data are in one place
    clients = RayClients(local=local, fed=fed, actors=ActorGroup(count, config.device), server=server)
    for attempt in range(_ATTEMPTS):
        try:
            clients.start()
            if choice is None:
                clients.choose_engine(config.actor_engine or "auto", config.chunk_size)
            else:
                clients.use_engine(choice, "The run was started with this engine.")
            break
        except BaseException as error:
            clients.stop()
            if not isinstance(error, LostClientsError) or attempt == _ATTEMPTS - 1:
                raise
    return clients
