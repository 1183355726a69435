"""What a report says is text as it was given, with and without a bar."""

import pytest
from rich.console import Console

from depthroute.train.report import Reporter

TEXT = "x[:100:2]\ty :smile: [bold]z[/bold] " + "and so on " * 30


@pytest.mark.parametrize("terminal", [False, True])
def test_text_is_said_as_it_is(terminal, capsys):
    console = Console(force_terminal=terminal, width=80, soft_wrap=True)
    with Reporter("a [b] :100:", 3, console) as report:
        report.say(TEXT)
        report.step(1, "loss [i] :100:")
    out = capsys.readouterr().out
    assert f"{TEXT}\n" in out
    assert "a [b] :100:" in out
    assert "loss [i] :100:" in out


def test_no_terminal_no_bar(capsys):
    with Reporter("run", 3) as report:
        report.say(TEXT)
        report.step(1, "loss 2")
    assert capsys.readouterr().out == f"{TEXT}\nrun step 1/3 loss 2\n"
