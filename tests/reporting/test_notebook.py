"""What notebooks show for federations, runs, methods, and models."""

from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import Annotated, Any

import numpy as np
import pytest
from torch import nn

import fedtailor as ft
from conftest import TinyNet, tiny_federation
from support.notebook import notebook
from support.simulation import simulate

ATTACK = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Parses what an object shows in a notebook: it must be well-formed and must not run code."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(shown._repr_html_())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "img", "link") and not any(name.startswith("on") for name, _ in attrs)
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] if tag != "br" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


def two_clients(**options: Any) -> ft.Federation:
    """Return client a with three samples of class 0, and client b with one of class 0 and three of class 1."""
    data = [(np.zeros((len(y), 2)), np.array(y), np.zeros((1, 2)), np.array([0])) for y in ([0, 0, 0], [0, 1, 1, 1])]
    return ft.Federation.from_arrays(data, **{"names": ["a", "b"], **options})


def test_federation_shows_sizes_and_classes_of_each_client() -> None:
    fed = two_clients()
    assert repr(fed) == "Federation(2 clients, 7 training and 2 test samples, 2 classes, inputs 2)"
    page = Page(fed)
    assert "training samples 7 3 3.5 4" in page.text  # in total, smallest client, median, largest client
    hints = [text for text in page.texts if "of class" in text]
    assert hints == [
        "a: 3 training samples of class 0",
        "b: 1 training sample of class 0",
        "b: 3 training samples of class 1",
    ]


@pytest.mark.parametrize(
    ("y", "inputs", "text"),
    [
        (np.array([0.5, 1.5]), np.zeros((2, 3, 8, 9)), "numbers as targets, inputs 3×8×9"),
        (np.array(["cat", "dog"]), {"image": np.zeros((2, 1, 4, 4)), "age": np.zeros(2)}, "image 1×4×4, age numbers"),
    ],
)
def test_federation_of_other_data_has_repr_and_html(y: Any, inputs: Any, text: str) -> None:
    fed = ft.Federation.from_arrays([(inputs, y, inputs, y)])
    assert "Federation(1 client, 2 training and 2 test samples, " in repr(fed) and text in repr(fed)
    assert text in Page(fed).text and ("of class dog" in Page(fed).text) == (fed.classes is not None)


def test_large_federation_shows_forty_clients_and_stays_small() -> None:
    y, owners = np.arange(60_000) % 10, [f"client {n % 600:03}" for n in range(60_000)]
    page = ft.Federation.from_owners(np.zeros((60_000, 1)), y, owners)
    assert "40 of 600 clients are shown" in Page(page).text
    assert "client 000" in Page(page).text and "client 599" in Page(page).text
    many = ft.Federation.from_owners(np.zeros((60_000, 1)), np.arange(60_000) % 1000, owners, classes=1000)
    assert "class" not in Page(many).text.split("inputs")[1], "a thousand classes do not fit"
    assert max(len(fed._repr_html_()) for fed in (page, many)) < 200_000


def test_names_are_escaped() -> None:
    fed = two_clients(names=[ATTACK, "b"], class_names=("x", ATTACK))
    run = simulate(TinyNet().double())
    run.experiment["data"]["name"] = run.info["method_title"] = ATTACK
    for shown in (fed, run):
        Page(shown)


def test_run_shows_its_table_and_its_curve(net: nn.Module) -> None:
    run = simulate(net, rounds=4, evaluate_every=2)
    page = Page(run)
    last = run.summary()["trained"]["last"]
    assert f"{100 * last['weighted']:.1f}" in page.texts and f"{100 * last['worst_tenth']:.1f}" in page.texts
    curves = [attributes["points"] for tag, attributes in page.tags if tag == "polyline"]
    assert [len(str(points).split()) for points in curves] == [2, 2]  # two evaluated rounds at two moments
    heights = [[float(point.split(",")[1]) for point in str(points).split()] for points in curves]
    scores = [[record[f"accuracy_{moment}"] for record in run.records[1::2]] for moment in ("received", "trained")]
    assert [y[0] >= y[1] for y in heights] == [s[0] <= s[1] for s in scores]  # up is better, and y points down
    expected = " trained, ".join(f"{run.records[-1][f'accuracy_{moment}']:.3f}" for moment in ("trained", "received"))
    assert repr(run) == f"Run(FedAvg on own data, 4 clients, 4 rounds, accuracy {expected} received)"


def test_run_without_an_evaluated_round_has_no_curve(net: nn.Module) -> None:
    run = simulate(net, rounds=4, evaluate_every=4)
    partial = replace(run, records=list(run.records)[:3])
    assert "3 of 4 rounds, not evaluated yet" in repr(partial)
    assert Page(partial).count("polyline") == 0 and "3 of 4 rounds" in Page(partial).text


def test_run_that_diverged_is_shown(net: nn.Module) -> None:
    run = simulate(net, rounds=1)
    records = [record | {"per_client": _nan(record["per_client"])} for record in run.records]
    assert Page(replace(run, records=records)).count("polyline") == 0


def _nan(per_client: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {name: dict.fromkeys(values, float("nan")) for name, values in per_client.items()}


@dataclass(frozen=True)
class Own(ft.Method):
    mu: Annotated[float, f"μ, {ATTACK}"] = 0.25


def test_method_shows_paper_and_fields() -> None:
    page = Page(ft.methods.FedProx(mu=0.75))
    assert "Federated Optimization in Heterogeneous Networks" in page.text and "0.75" in page.texts
    assert "μ, weight of the proximal term toward the received model" in page.texts
    assert repr(ft.methods.FedProx(mu=0.75)) == "FedProx(mu=0.75)"  # only what differs from the defaults
    assert Page(Own()).texts == [
        "Own",
        "field",
        "value",
        "meaning",
        "mu",
        "0.25",
        f"μ, {ATTACK}",
        *Page(Own()).texts[-1:],
    ]
    assert "LAG (FedAvg)" in Page(ft.methods.LAG()).text


def test_model_shows_layers_and_parameters() -> None:
    model = ft.wrap(TinyNet())  # 4·5 + 5 and 5·3 + 3 parameters
    assert repr(model) == (
        "Model(TinyNet, 43 parameters, head 'head', loss cross_entropy, metrics accuracy, macro_f1, auc)"
    )
    texts = Page(model).texts
    assert texts[texts.index("fc") :][:3] == ["fc", "5×4, 5", "25"]
    assert texts[texts.index("head") :][:4] == ["head", "head", "3×5, 3", "18"]
    plain = ft.wrap(nn.Linear(2, 1), head=None, loss=lambda outputs, targets: (outputs[:, 0] - targets).abs())
    assert "no head" in repr(plain) and "metrics" not in repr(plain)
    assert "2 parameters" not in Page(plain).text


def test_notebook_displays_html_and_text(net: nn.Module) -> None:
    with notebook() as shell:
        for shown in (tiny_federation(), simulate(net), ft.methods.FedAvg(), ft.wrap(TinyNet())):
            data = shell.format(shown)
            assert data["text/html"] == shown._repr_html_() and data["text/plain"] == repr(shown)
