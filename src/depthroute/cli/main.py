"""The `depthroute` command: arguments in, calls of the library, words out.

Settings are `key=value`; what a command does is never a flag.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from depthroute.config import load

app = typer.Typer(
    help="Learned routing over depth for Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Settings = Annotated[
    list[str] | None,
    typer.Argument(help="A TOML file and dotted key=value settings over it.", metavar="[FILE] ..."),
]


@app.command()
def doctor() -> None:
    """Show versions, devices, and which optional packages are there."""
    from depthroute.cli.doctor import report

    _say(report())


@app.command()
def prepare(
    out: Annotated[str, typer.Argument(help="Dataset folder to make.", metavar="OUT")],
    settings: Settings = None,
) -> None:
    """Tokenise text into a dataset folder.

    Example: depthroute prepare data/stdlib source=stdlib tokenizer=bpe:4096
    """
    from depthroute.cli.prepare import run
    from depthroute.data import PrepareConfig

    _say(run(load(PrepareConfig, *_split(settings)), out))


@app.command()
def train(settings: Settings = None) -> None:
    """Train a model, or continue its run folder.

    Example: depthroute train configs/demo.toml model.residual.num_blocks=4 out=runs/four
    """
    from depthroute.train import RunConfig
    from depthroute.train import train as start

    result = start(load(RunConfig, *_split(settings)))
    _say(f"{result.path} at step {result.step}")
    _exit_if(result.stopped_by)


@app.command()
def compare(settings: Settings = None) -> None:
    """Train several variants on the same batches from the same initial weights.

    Settings of the comparison (out, config, seeds, ...) apply to it, all others to every run.

    Example: depthroute compare configs/demo_compare.toml train.steps=100
    """
    from depthroute.cli.compare import run

    _exit_if(run(*_split(settings), _say))


# a prompt may begin with a dash; this command has no options
@app.command(context_settings={"ignore_unknown_options": True})
def generate(
    run: Annotated[str, typer.Argument(help="Run folder.", metavar="RUN")],
    prompt: Annotated[str, typer.Argument(help="Text to continue; may be empty.")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="tokens=100 temperature=0.8 top_k=50 top_p=1.0 seed=0", metavar="KEY=VALUE ..."
        ),
    ] = None,
) -> None:
    """Continue a text with the newest checkpoint of a run.

    Example: depthroute generate runs/demo/s_lr-seed0 "def main" tokens=50 temperature=0
    """
    from depthroute.cli.generate import GenerateConfig, looks_like_setting, sample

    if looks_like_setting(prompt):
        prompt, settings = "", [prompt, *(settings or [])]
    _say(sample(run, prompt, load(GenerateConfig, None, settings or [])))


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[str, typer.Argument(help="Hugging Face folder to make.", metavar="OUT")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="license=apache-2.0", metavar="KEY=VALUE ...")
    ] = None,
    with_code: Annotated[
        bool,
        typer.Option("--with-code", help="Add the code, for places without depthroute."),
    ] = False,
) -> None:
    """Write the newest checkpoint of a run as a Hugging Face folder.

    Example: depthroute export runs/demo/s_lr-seed0 s_lr license=apache-2.0
    """
    from depthroute.cli.hugging_face import run_export

    _say(run_export(run, out, settings or [], with_code=with_code))


@app.command("import")
def import_(
    folder: Annotated[str, typer.Argument(help="Hugging Face folder.", metavar="FOLDER")],
    out: Annotated[str, typer.Argument(help="Folder to make.", metavar="OUT")],
) -> None:
    """Make a Hugging Face folder the start of a run.

    Example: depthroute import s_lr started, then depthroute train started/start.toml ...
    """
    from depthroute.cli.hugging_face import run_import

    _say(run_import(folder, out))


@app.command()
def evaluate(
    folder: Annotated[
        str, typer.Argument(help="Run folder, or Hugging Face folder.", metavar="FOLDER")
    ],
    settings: Settings = None,
) -> None:
    """Measure the loss of a run's newest checkpoint or an exported model, and accuracy on tasks.

    Example: depthroute evaluate runs/four tasks=paper8 compare_with=runs/demo/prenorm-seed0
    """
    from depthroute.cli.evaluate import run as measure
    from depthroute.evaluate import EvaluateConfig

    text = measure(folder, load(EvaluateConfig, *_split(settings)))
    if text is not None:
        _say(text)


@app.command()
def account(
    settings: Settings = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Print the paper's cost tables beside our count.")
    ] = False,
) -> None:
    """Count parameters, multiply-adds and retained sources of a run's model.

    Example: depthroute account configs/demo.toml model.vocab_size=4096
    """
    from depthroute.account import account as count
    from depthroute.account import format_account
    from depthroute.paper import format_paper
    from depthroute.train import RunConfig

    if paper and settings:
        raise ValueError(f"--paper takes no settings, got {' '.join(settings)}; leave them out")
    if paper:
        _say(format_paper())
        return
    config = load(RunConfig, *_split(settings))
    if not config.model.vocab_size:
        raise ValueError("a run takes model.vocab_size from its data; here give model.vocab_size=N")
    _say(format_account(count(config.model, context=config.data.context)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; what the user can mend is one clear message and exit status 2."""
    try:
        app(args=None if arguments is None else list(arguments))
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        print(f"depthroute: {error}", file=sys.stderr)
        sys.exit(2)


def _split(settings: list[str] | None) -> tuple[Path | None, list[str]]:
    """Tell the file from the overrides.

    Raises:
        ValueError: More than one file, or a file that does not come first.
    """
    words = settings or []
    files = [word for word in words if _names_file(word)]
    if len(files) > 1 or (files and words[0] != files[0]):
        raise ValueError(f"expected at most one file, before all key=value, got {' '.join(words)}")
    return (Path(files[0]) if files else None), words[len(files) :]


def _names_file(word: str) -> bool:
    """Tell a file, whose path may contain "=", from `dotted.key=value`, which may end in .toml."""
    key, equals, _ = word.partition("=")
    # no key has a slash; isfile rather than Path.is_file, which raises for long values
    return not equals or os.path.isfile(word) or (word.endswith(".toml") and "/" in key)


def _say(text: Any) -> None:
    """Print text as it is: rich would read emoji codes in it and change tabs."""
    print(text, flush=True)  # flushed here, where a closed pipe is caught


def _exit_if(signal: int | None) -> None:
    """End as a command that a signal stopped, by the shell's convention."""
    if signal is not None:
        raise typer.Exit(128 + signal)
