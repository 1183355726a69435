"""Text to tokens to batches."""

from depthroute.data.loader import TokenLoader, ValidationWindows, validation_windows
from depthroute.data.manifest import Counts, Manifest, Shard
from depthroute.data.prepare import PrepareConfig, prepare
from depthroute.data.raw_tokens import TokenFiles, import_tokens
from depthroute.data.report import Progress, ProgressCallback, SkipReport
from depthroute.data.sources import iter_documents
from depthroute.data.tokenizer import Tokenizer, load_tokenizer
from depthroute.data.tokenizer_huggingface import train_bpe
from depthroute.data.tokens import TokenDataset, TokenSplit
from depthroute.data.windows import Batch, micro
from depthroute.data.writer import TokenWriter

__all__ = [
    "Batch",
    "Counts",
    "Manifest",
    "PrepareConfig",
    "Progress",
    "ProgressCallback",
    "Shard",
    "SkipReport",
    "TokenDataset",
    "TokenFiles",
    "TokenLoader",
    "TokenSplit",
    "TokenWriter",
    "Tokenizer",
    "ValidationWindows",
    "import_tokens",
    "iter_documents",
    "load_tokenizer",
    "micro",
    "prepare",
    "train_bpe",
    "validation_windows",
]
