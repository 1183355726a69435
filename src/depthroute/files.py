"""Files and folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name what a block writes in the errors that name no file, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, *, suffix: str = "") -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` once it is whole; its folder is made.

    A block that raises, or a process that is killed, leaves what was there before.

    Raises:
        ValueError: `path` does not end in `suffix`.
        OSError: It cannot be written; the error names the file.
    """
    if not path.name.endswith(suffix):
        raise ValueError(f"path must end in {suffix}, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text in place of a file."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to fill, which becomes `path` once it is whole.

    Raises:
        FileExistsError: `path` exists.
        OSError: It cannot be filled; the error names a file, or the folder.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; delete it or choose another folder")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        with naming(path):
            yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
