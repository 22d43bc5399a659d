"""Compare methods on your own data: which clients benefit from federated learning?

In this example, four simulated plants measure six values per part and know which parts were faulty. One plant has much
data, the others have little. Run it with: python examples/own_data.py
"""

import tempfile
from pathlib import Path

import numpy as np

import fedtailor as ft


def measure(plant: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return simulated data of a plant: inputs [parts, 6] and labels 0 (good) or 1 (faulty)."""
    random = np.random.default_rng(plant)
    x = random.normal(size=(parts, 6)).astype(np.float32)
    weights = np.array([1.0, -1.0, 0.5, 0.0, 0.0, 0.2 * plant])  # the plants' machines differ slightly
    return x, (x @ weights + 0.3 * random.normal(size=parts) > 0).astype(np.int64)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for plant, parts in enumerate((400, 60, 40, 40)):
            x, y = measure(plant, parts)
            np.savez(Path(folder, f"plant-{plant}.npz"), x=x, y=y)  # or x_train, y_train, x_test, y_test
        fed = ft.Federation.from_folder(folder, test=0.4)
    model = ft.network("mlp", fed, hidden=(16,))
    print("accuracy".ljust(15), *(name.rjust(9) for name in fed.names))
    for method in (ft.methods.Local(), ft.methods.FedAvg(), ft.methods.FedPer(), ft.methods.Ditto()):
        run = ft.simulate(method, model, fed, rounds=15, batch_size=16)
        scores = run.scores("trained")
        print(run.method_title.ljust(15), *(f"{scores[client]:9.1%}" for client in range(fed.num_clients)))


if __name__ == "__main__":
    main()
