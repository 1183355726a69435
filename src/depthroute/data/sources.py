"""Where text comes from: local files, and the source code of Python's own standard library."""

import glob
import gzip
import itertools
import json
import os
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from depthroute.data.report import SkipReport

STDLIB = "stdlib"
EXTENSIONS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
STDLIB_SKIPPED_FOLDERS = frozenset(
    ("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests")
)
CHUNK_CHARACTERS = 1 << 24


class _Fault(NamedTuple):
    """What a reader yields in place of a text that it cannot give."""

    reason: str


# a reader yields (where, value) for everything it finds; _fault alone judges what is a usable text
_Reader = Callable[[Path], Iterator[tuple[str, object]]]


def iter_documents(
    source: str | Sequence[str],
    *,
    text_column: str = "text",
    separator: str | None = None,
    report: SkipReport | None = None,
) -> Iterator[str]:
    r"""Yield the documents of a source, in an order given by its file names and contents alone.

    Args:
        source: `"stdlib"` for the Python files of the running Python's standard library (without
            its tests), or one or several files, folders or glob patterns of `.txt`, `.jsonl`,
            `.jsonl.gz` and `.parquet` files. Folders are searched in depth; a file that is named
            twice is read once.
        text_column: JSON key or parquet column that holds the text.
        separator: Splits `.txt` files into documents; None makes each file one document. Line
            ends of `.txt` and Python files are read as `\n`.
        report: Receives what is skipped: files that are unreadable, empty, of an unknown type or
            not UTF-8, malformed JSON lines, rows without text, empty documents. A strict report
            makes each of these an error.

    Raises:
        ValueError: If a path does not exist, a named file has an unknown extension, the separator
            is empty, or nothing is left after the skips.
        ImportError: If a parquet file is to be read and pyarrow is not installed.
    """
    report = SkipReport() if report is None else report
    if separator == "":
        raise ValueError("separator must be None or a non-empty string, got an empty string")
    if source == STDLIB:
        return _read_all([(path, _read_python) for path in _stdlib_files()], report)
    readers: dict[str, _Reader] = {
        ".txt": partial(_read_txt, separator=separator),
        ".jsonl": partial(_read_jsonl, text_column=text_column),
        ".jsonl.gz": partial(_read_jsonl, text_column=text_column),
        ".parquet": partial(_read_parquet, text_column=text_column),
    }
    names = [source] if isinstance(source, str) else list(source)
    files = _find_files(names, report)
    return _read_all([(path, readers[extension]) for path, extension in files.items()], report)


def _read_all(files: Sequence[tuple[Path, _Reader]], report: SkipReport) -> Iterator[str]:
    num_documents = 0
    for path, reader in files:
        before = num_documents + report.total
        try:
            for where, value in reader(path):
                fault = _fault(value)
                if fault is not None:
                    report.add(fault, where)
                    continue
                num_documents += 1
                yield cast(str, value)
        except UnicodeDecodeError as error:
            report.add("not UTF-8", f"{path} ({error})")
        except (OSError, EOFError, zlib.error) as error:
            report.add("unreadable file", f"{path} ({error})")
        if num_documents + report.total == before:
            report.add("empty file", str(path))
    if num_documents == 0:
        raise ValueError(f"no document is left of {len(files)} files\n{report.summary()}".rstrip())


def _fault(value: object) -> str | None:
    if isinstance(value, _Fault):
        return value.reason
    if not isinstance(value, str):
        return f"text is {type(value).__name__}, not a string"
    if not value.strip():
        return "empty document"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        return "not UTF-8"
    return None


def _find_files(names: Sequence[str], report: SkipReport) -> dict[Path, str]:
    """Map each file to its extension, in reading order."""
    files: dict[Path, str] = {}
    for name in names:
        if Path(name).is_file():
            found = [Path(name)]
            if _extension(found[0]) is None:
                raise ValueError(f"source {name}: expected one of {', '.join(EXTENSIONS)}")
        else:
            found = _expand(name)
        for path in found:
            extension = _extension(path)
            if extension is None:
                report.add("unknown file type", str(path))
            else:
                files[path] = extension
    if not files:
        raise ValueError(f"source {', '.join(names)} has no {', '.join(EXTENSIONS)} file")
    return files


def _expand(name: str) -> list[Path]:
    """Files below a folder, or below what a glob pattern matches."""
    roots = [name] if Path(name).is_dir() else sorted(glob.glob(name, recursive=True))
    if not roots:
        raise ValueError(f"source {name} does not exist")
    found = []
    for root in map(Path, roots):
        found += [root] if root.is_file() else _walk(root, skipped_folders=frozenset())
    return found


def _walk(root: Path, *, skipped_folders: frozenset[str]) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_folders]
        found += [Path(folder, name) for name in names]
    return sorted(found)


def _extension(path: Path) -> str | None:
    name = path.name.lower()
    return next((extension for extension in EXTENSIONS if name.endswith(extension)), None)


def _stdlib_files() -> list[Path]:
    """The non-empty Python files of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, skipped_folders=STDLIB_SKIPPED_FOLDERS)
    return [path for path in files if path.suffix == ".py" and path.stat().st_size > 0]


def _read_python(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with tokenize.open(path) as file:  # honours a PEP 263 coding cookie
            yield str(path), file.read()
    except SyntaxError as error:
        yield str(path), _Fault(f"bad source encoding: {error.msg}")


def _read_txt(path: Path, *, separator: str | None) -> Iterator[tuple[str, object]]:
    with path.open(encoding="utf-8-sig") as file:
        if separator is None:
            yield str(path), file.read()
            return
        numbers = itertools.count(1)
        rest = ""
        while chunk := file.read(CHUNK_CHARACTERS):
            *pieces, rest = (rest + chunk).split(separator)
            for piece in pieces:
                yield f"{path}: document {next(numbers)}", piece
        if rest.strip():  # a separator at the end of the file opens no document
            yield f"{path}: document {next(numbers)}", rest


def _read_jsonl(path: Path, *, text_column: str) -> Iterator[tuple[str, object]]:
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _text_of_line(line, text_column)


def _text_of_line(line: bytes, text_column: str) -> object:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return _Fault("not UTF-8")
    except (ValueError, RecursionError):
        return _Fault("malformed JSON line")
    if not isinstance(row, dict) or text_column not in row:
        return _Fault(f'no column "{text_column}"')
    return row[text_column]


def _read_parquet(path: Path, *, text_column: str) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            'reading parquet needs pyarrow: pip install "depthroute[data]"'
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_column not in file.schema_arrow.names:
                yield str(path), _Fault(f'no column "{text_column}"')
                return
            numbers = itertools.count(1)
            for batch in file.iter_batches(columns=[text_column]):
                for value in batch.column(0):
                    yield f"{path}: row {next(numbers)}", _text_of_cell(value)
    except pyarrow.ArrowException as error:
        yield str(path), _Fault(f"unreadable parquet: {error}")


def _text_of_cell(value: Any) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return _Fault("not UTF-8")
