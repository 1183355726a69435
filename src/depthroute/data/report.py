"""What a data run tells about itself: how far it is, and what it left out."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

MAX_EXAMPLES = 5


class Progress(NamedTuple):
    """How far a run is.

    `stage` is what is being done, for example `"write tokens"`; the counts (bytes of UTF-8) are
    since that stage began.
    """

    stage: str
    num_documents: int
    num_bytes: int
    num_tokens: int


ProgressCallback = Callable[[Progress], None]


class SkipReport:
    """Counts what was left out, by reason, with the first few places of each.

    Args:
        strict: Raise at the first skip instead of counting it.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    @property
    def total(self) -> int:
        """Number of skips of all reasons."""
        return self.counts.total()

    def add(self, reason: str, where: str) -> None:
        """Count one skip; `where` names its file, line or document.

        Raises:
            ValueError: If the report is strict.
        """
        if self.strict:
            raise ValueError(f"{where}: {reason}; set strict = false to skip and count such input")
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(where)

    def summary(self) -> str:
        """One line a reason, most frequent first; empty if nothing was skipped."""
        return "\n".join(
            f"skipped {count}: {reason} (first: {', '.join(self.examples[reason])})"
            for reason, count in self.counts.most_common()
        )

    def to_dict(self) -> dict[str, dict[str, object]]:
        """`{reason: {"count": int, "examples": [str, ...]}}`, ready for JSON."""
        return {
            reason: {"count": count, "examples": list(self.examples[reason])}
            for reason, count in self.counts.most_common()
        }
