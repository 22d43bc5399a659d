"""Progress in a terminal, in a notebook, and in redirected output."""

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import fedtailor as ft
from conftest import TinyNet, tiny_federation
from fedtailor.progress import Lines, NotebookBars, ProgressDisplay, TerminalBars, choose_output
from support.notebook import notebook


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def record(number: int, accuracy: float | None = None) -> dict[str, Any]:
    received = None if accuracy is None else accuracy - 0.1
    return {"round": number, "loss_trained": accuracy, "accuracy_trained": accuracy, "accuracy_received": received}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(clock: Clock) -> Iterator[ProgressDisplay]:
    with ProgressDisplay(output=Lines(clock), clock=clock) as display:
        yield display


def test_lines_are_printed_first_every_five_seconds_and_last(
    lines: ProgressDisplay, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with lines.run("FedAvg, seed 0", rounds=8) as on_round_end:
        for number in range(1, 9):  # two seconds per round
            on_round_end(record(number, 0.5 + number / 100))
            clock.now += 2
    assert capsys.readouterr().err.splitlines() == [
        "FedAvg, seed 0: round 1 of 8, accuracy 0.510 trained, 0.410 received",
        "FedAvg, seed 0: round 4 of 8, accuracy 0.540 trained, 0.440 received, 0:00:08 left",
        "FedAvg, seed 0: round 7 of 8, accuracy 0.570 trained, 0.470 received, 0:00:02 left",
        "FedAvg, seed 0: round 8 of 8, accuracy 0.580 trained, 0.480 received",
    ]


def test_line_names_the_round_of_an_older_score(
    lines: ProgressDisplay, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with lines.run("run", rounds=9) as on_round_end:
        on_round_end(record(1, 0.5))
        clock.now += 10
        on_round_end(record(2))
    assert "round 2 of 9, accuracy 0.500 trained, 0.400 received (round 1)" in capsys.readouterr().err


def test_stopped_run_ends_with_its_last_round_and_finished_run_prints_nothing(
    lines: ProgressDisplay, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), lines.run("stopped", rounds=9) as on_round_end:
        on_round_end(record(1))
        on_round_end(record(2))
        raise KeyboardInterrupt
    with lines.run("finished before", rounds=9):
        pass
    assert capsys.readouterr().err.splitlines() == ["stopped: round 1 of 9", "stopped: round 2 of 9"]


def test_lines_of_runs_at_the_same_time_take_turns(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs print a line each every ten seconds, with the number of finished runs."""
    with ProgressDisplay(runs=3, output=Lines(clock), clock=clock) as display:
        bars = [display.start(name, rounds=9) for name in ("a", "b")]
        for number in range(1, 9):
            for bar in bars:
                clock.now += 1
                display.add_round(bar, record(number))
        display.end(bars[0])
    shown = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == [
        "[0/3 finished] a: round 1 of 9",
        "[0/3 finished] a: round 6 of 9",
        "[0/3 finished] b: round 6 of 9",
        "[0/3 finished] a: round 8 of 9",
    ]


def test_total_counts_finished_failed_and_skipped_runs(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(runs=4, output=Lines(clock), clock=clock) as display:
        with pytest.raises(ZeroDivisionError), display.run("a", rounds=1):
            raise ZeroDivisionError
        display.advance()
        for name in "bc":
            with display.run(name, rounds=1) as on_round_end:
                on_round_end(record(1))
    assert capsys.readouterr().err.splitlines() == ["[3/4] b: round 1 of 1", "[4/4] c: round 1 of 1"]


def test_closed_stderr_does_not_stop_a_run(lines: ProgressDisplay, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with lines.run("run", rounds=1) as on_round_end:
        on_round_end(record(1))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_bars_and_hides_finished_ones_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    output = choose_output()
    assert isinstance(output, TerminalBars)
    with ProgressDisplay(output=output) as display:
        for number in range(14):
            with display.run(f"[bold]run {number}", rounds=2) as on_round_end:
                on_round_end(record(2, 0.8))
    text = terminal.getvalue().rpartition("[bold]run 0 ")[2]  # the last picture
    assert "[bold]run 11" in text and "run 12" not in text and "run 13" not in text
    assert "2/2" in text and "accuracy 0.800 trained, 0.700 received" in text


@pytest.mark.parametrize(("terminal", "variable"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")])
def test_redirected_output_and_dumb_terminals_get_lines(
    terminal: io.StringIO, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", variable)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert isinstance(choose_output(), Lines)


def test_notebook_updates_one_output(clock: Clock) -> None:
    with notebook() as shell:
        assert isinstance(choose_output(), NotebookBars)
        with ProgressDisplay(runs=2, clock=clock) as display:
            for name in ("<b>first</b>", "second"):
                with display.run(name, rounds=100) as on_round_end:
                    for number in range(1, 101):
                        on_round_end(record(number, 0.5))
        outputs = shell.outputs
    first, *updates = outputs
    assert len({each["transient"]["display_id"] for each in outputs}) == 1
    assert not first.get("update") and all(each["update"] for each in updates)
    assert len(updates) < 12, "a fast run must not flood the notebook"
    page = outputs[-1]["data"]["text/html"]
    assert page.count("<progress") == 3 and page.count('value="100" max="100"') == 2 and 'value="2" max="2"' in page
    assert "&lt;b&gt;first" in page and "<b>" not in page
    assert "second: round 100 of 100, accuracy 0.500 trained, 0.400 received" in outputs[-1]["data"]["text/plain"]


def test_simulate_with_progress_also_calls_on_round_end(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    ft.simulate(
        ft.methods.FedAvg(), TinyNet().double(), tiny_federation(), rounds=2, dtype="float64", seed=3,
        progress=True, on_round_end=lambda record: seen.append(record["round"]),
    )  # fmt: skip
    assert seen == [1, 2]
    assert "FedAvg, seed 3: round 2 of 2, accuracy" in capsys.readouterr().err
