"""What `depthroute prepare` does."""

from collections.abc import Iterator

from rich.console import Console

from depthroute.data import Manifest, PrepareConfig, Progress, prepare


def run(config: PrepareConfig, out: str) -> str:
    """Make a dataset folder, showing progress, and return a summary."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with console.status("preparing") as status:

        def show(progress: Progress) -> None:
            text = f"{progress.stage}: {progress.num_documents:,} documents"
            text += f", {progress.num_bytes / 1e6:,.1f} MB, {progress.num_tokens:,} tokens"
            status.update(text)

        manifest = prepare(config, out, progress=show)
    return "\n".join([f"made {out}", *_lines(manifest)])


def _lines(manifest: Manifest) -> Iterator[str]:
    yield f"vocabulary: {manifest.vocab_size:,} ({manifest.tokenizer or 'no tokenizer'})"
    for split in manifest.splits:
        counts = manifest.counts(split)
        size = "" if counts.num_bytes is None else f" from {counts.num_bytes / 1e6:,.1f} MB"
        yield f"{split}: {counts.num_tokens:,} tokens{size}, {counts.num_documents:,} documents"
    for reason, skip in manifest.skipped.items():
        yield f"skipped {skip['count']}: {reason} (first: {', '.join(skip['examples'])})"
