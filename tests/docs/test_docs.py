"""The documentation: its code runs, its links lead somewhere, its settings are settings."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from depthroute.config import from_dict
from depthroute.data import PrepareConfig
from depthroute.evaluate import EvaluateConfig
from depthroute.nn import LowRankConfig
from depthroute.residual import SCHEMES, ResidualConfig
from depthroute.train import CompareConfig, RunConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
MODEL_TABLES = {"residual": ResidualConfig, "low_rank": LowRankConfig}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder that sees the configs, and undo what a page registers."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    registered = dict(SCHEMES)
    yield
    SCHEMES.clear()
    SCHEMES.update(registered)


@pytest.mark.usefixtures("_workplace")
@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p, "python")], ids=_name)
def test_python_blocks_run(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for i, block in enumerate(_blocks(page, "python"), start=1):
        exec(compile(block, f"{_name(page)}, python block {i}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_relative_links_exist(page: Path) -> None:
    for target in ("".join(groups) for groups in LINK.findall(_prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists(), f"{_name(page)} links to {target}"
        if anchor:
            assert anchor in _anchors(path), f"{_name(page)} links to {target}"


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p, "toml")], ids=_name)
def test_toml_blocks_are_valid_settings(page: Path) -> None:
    for block in _blocks(page, "toml"):
        table = tomllib.loads(block)
        if set(table) == {"model"}:
            for name, value in table["model"].items():
                from_dict(MODEL_TABLES[name], value)
        else:
            from_dict(_config_class(table), table)


def _config_class(table: dict[str, Any]) -> type:
    if "model" in table:
        return RunConfig
    if "tasks" in table:
        return EvaluateConfig
    return CompareConfig if "variants" in table else PrepareConfig


def test_every_scheme_has_a_page_and_every_page_says_how_to_configure_one() -> None:
    pages = {page.stem: page for page in (ROOT / "docs" / "schemes").glob("*.md")}
    assert set(SCHEMES) <= set(pages)
    for page in pages.values():
        tables = map(tomllib.loads, _blocks(page, "toml"))
        named = {table["model"]["residual"]["name"] for table in tables}
        assert named, page.name
        assert named == ({page.stem} if page.stem in SCHEMES else named & set(SCHEMES))


def test_every_metric_is_documented() -> None:
    code = "".join(path.read_text() for path in (ROOT / "src/depthroute/train").glob("*.py"))
    metrics = set(re.findall(r"\"((?:train|val|perf|lr)/\w+)\"", code))
    described = (ROOT / "docs/training.md").read_text()
    assert metrics
    assert {name for name in metrics if f"`{name}`" not in described} == set()


def test_text_is_ascii() -> None:
    own = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
    assert {_name(page) for page in own if not page.read_text(encoding="utf-8").isascii()} == set()
