import gzip
import json
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from depthroute.data import SkipReport, iter_documents


def read(source, **options) -> tuple[list[str], SkipReport]:
    report = SkipReport()
    names = [str(name) for name in source] if isinstance(source, list) else str(source)
    return list(iter_documents(names, report=report, **options)), report


def write_jsonl(path: Path, rows: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(rows) + b"\n")
    return path


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    assert read(path)[0] == ["one\n\ntwo\n"]


@pytest.mark.parametrize("chunk_characters", [1, 5, 1000])
def test_text_file_is_split_at_the_separator(tmp_path, monkeypatch, chunk_characters):
    monkeypatch.setattr("depthroute.data.sources.CHUNK_CHARACTERS", chunk_characters)
    path = tmp_path / "a.txt"
    path.write_text("one<|end|>two<|x<|end|><|end|>three<|end|>\n")
    documents, report = read(path, separator="<|end|>")
    assert documents == ["one", "two<|x", "three"]
    assert report.to_dict() == {"empty document": {"count": 1, "examples": [f"{path}: document 3"]}}


def test_json_lines_are_documents_and_faults_are_counted_with_their_place(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            b'{"text": "one"}',
            b'{"text": "broken"',
            b"",
            b'{"body": "no text"}',
            b'{"text": null}',
            b'{"text": "  "}',
            b'{"text": "\xff"}',
            b'{"text": "\\ud800"}',
            b'["text"]',
            b'{"text": "tw\\u00f6"}',
        ],
    )
    documents, report = read(path)
    assert documents == ["one", "tw\u00f6"]
    assert {reason: skip["examples"] for reason, skip in report.to_dict().items()} == {
        "malformed JSON line": [f"{path}:2"],
        'no column "text"': [f"{path}:4", f"{path}:9"],
        "text is NoneType, not a string": [f"{path}:5"],
        "empty document": [f"{path}:6"],
        "not UTF-8": [f"{path}:7", f"{path}:8"],
    }


def test_report_keeps_all_counts_and_the_first_places(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [b"bad"] * 20 + [b'{"text": "one"}'])
    report = read(path)[1]
    assert report.counts == {"malformed JSON line": 20}
    assert report.examples["malformed JSON line"] == [f"{path}:{i}" for i in range(1, 6)]
    assert "skipped 20: malformed JSON line" in report.summary()


def test_gzipped_json_lines_and_another_column(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in ("one", "two"))
    assert read(path, text_column="body")[0] == ["one", "two"]


def test_parquet_rows_are_documents(tmp_path):
    path = tmp_path / "a.parquet"
    texts = ["one", None, "", "tw\u00f6"]
    pa.parquet.write_table(pa.table({"n": [1, 2, 3, 4], "body": texts}), path, row_group_size=2)
    documents, report = read(path, text_column="body")
    assert documents == ["one", "tw\u00f6"]
    assert report.counts == {"text is NoneType, not a string": 1, "empty document": 1}
    assert report.examples["empty document"] == [f"{path}: row 3"]


def test_bad_files_are_skipped_and_reported(tmp_path):
    (tmp_path / "a.txt").write_text("kept")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.jsonl").write_bytes(b"")
    (tmp_path / "e.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(b'{"text": "cut off"}\n' * 99)[:-12])
    (tmp_path / "g.parquet").write_bytes(b"not parquet")
    pa.parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "h.parquet")
    (tmp_path / "i.md").write_text("another type")
    documents, report = read(tmp_path)
    assert documents[0] == "kept"
    assert set(documents[1:]) <= {"cut off"}
    places = {
        reason: [Path(place.split(" (")[0]).name for place in skip["examples"]]
        for reason, skip in report.to_dict().items()
    }
    parquet_reason = next(reason for reason in places if reason.startswith("unreadable parquet"))
    assert places == {
        "not UTF-8": ["b.txt"],
        "empty document": ["c.txt"],
        "empty file": ["d.jsonl"],
        "unreadable file": ["e.jsonl.gz", "f.jsonl.gz"],
        parquet_reason: ["g.parquet"],
        'no column "text"': ["h.parquet"],
        "unknown file type": ["i.md"],
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.txt", b"", "empty document"),
        ("a.jsonl", b"", "empty file"),
        ("a.jsonl", b"{\n", r"a\.jsonl:1: malformed JSON line"),
        ("a.md", b"text", "unknown file type"),
    ],
)
def test_strict_report_makes_a_skip_an_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("fine")
    with pytest.raises(ValueError, match=message):
        list(iter_documents(str(tmp_path), report=SkipReport(strict=True)))


def test_folders_and_globs_are_read_sorted_and_in_depth_and_no_file_twice(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("c.txt", "a.txt", "b/x.txt", "b/y.jsonl"):
        (tmp_path / name).write_text('{"text": "y"}' if name.endswith("jsonl") else name)
    assert read(tmp_path)[0] == ["a.txt", "b/x.txt", "y", "c.txt"]
    assert read(tmp_path / "*.txt")[0] == ["a.txt", "c.txt"]
    assert read(tmp_path / "**" / "*.txt")[0] == ["a.txt", "b/x.txt", "c.txt"]
    assert read([tmp_path / "c.txt", tmp_path / "*.txt"])[0] == ["c.txt", "a.txt"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.txt", "missing.txt does not exist"),
        ("*.parquet", "does not exist"),
        ("a.md", r"a\.md: expected one of \.txt, \.jsonl"),
        ("empty", "has no .txt"),
        ("bad.txt", "no document is left of 1 files\nskipped 1: not UTF-8"),
    ],
)
def test_source_without_documents_is_an_error(tmp_path, source, message):
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        list(iter_documents(str(tmp_path / source)))


def test_wrong_path_is_an_error_before_the_first_document_is_asked_for():
    with pytest.raises(ValueError, match="does not exist"):
        iter_documents("missing.txt")


def test_empty_separator_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="separator"):
        iter_documents(str(tmp_path), separator="")


def test_stdlib_is_python_source_without_tests(monkeypatch, tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "json" / "tests").mkdir(parents=True)
    (tmp_path / "site-packages").mkdir()
    for name in ("test/a.py", "json/tests/b.py", "site-packages/c.py", "d.txt"):
        (tmp_path / name).write_text("skipped")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "json" / "e.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    (tmp_path / "f.py").write_bytes(b"# coding: no-such\n")
    (tmp_path / "z.py").write_text("z = 1\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents, report = read("stdlib")
    assert documents == ["# coding: latin-1\nx = '\u00e9'\n", "z = 1\n"]
    assert list(report.examples.values()) == [[str(tmp_path / "f.py")]]


def test_real_stdlib_starts_with_its_first_module():
    root = Path(sysconfig.get_path("stdlib"))
    assert next(iter_documents("stdlib")) == (root / "__future__.py").read_text()
