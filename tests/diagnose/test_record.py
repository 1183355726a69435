"""Depth records against hand-made weights and literal loops."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from depthroute.diagnose import DepthRecord, record_depth
from depthroute.models import CausalLM
from depthroute.nn import Documents
from depthroute.residual import PreNorm, PreNormConfig
from helpers import VARIANTS, tiny_config, tiny_model

NUM_WRITES = 8


class TokenWeights(PreNorm):
    """A plain sum that claims weights from a table: `[vocabulary, roles, S, H]` by site.

    The state carries the first embedding column, which holds the token itself.
    """

    def __init__(self, tables: dict[int, Tensor]) -> None:
        kinds = ("attention", "mlp") * (NUM_WRITES // 2)
        super().__init__(PreNormConfig(), dim=32, kinds=kinds, eps=1e-6)
        self.tables = tables

    def forward(self, x: Tensor) -> Any:
        return x, x[..., 0].long()

    def read(self, state: Any, site: int, norm: Any) -> Any:
        return (norm(state[0]),), state

    def write(self, state: Any, site: int, y: Tensor) -> Any:
        return state[0] + y, state[1]

    def finish(self, state: Any, norm: Any) -> Tensor:
        return norm(state[0])

    def weights(self, state: Any, site: int) -> Tensor | None:
        if site not in self.tables:
            return None
        return self.tables[site][state[1]].permute(2, 3, 0, 1, 4)  # from [B, T, roles, S, H]


def _model(tables: dict[int, Tensor]) -> CausalLM:
    model = CausalLM(tiny_config(PreNormConfig()))
    model.model.residual = TokenWeights(tables)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = torch.arange(61)
    return model


def _record(model: CausalLM, *batches: Any) -> DepthRecord:
    record = record_depth(model, batches)
    assert record is not None
    return record


def test_statistics_of_two_tokens_worked_out_by_hand() -> None:
    table = torch.zeros(61, 1, 4, 1, dtype=torch.float64)
    table[0, 0, :, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # one source
    table[1, 0, :, 0] = torch.tensor([0.5, 0.5, 0.0, 0.0])  # two
    table[2, 0, :, 0] = torch.tensor([0.25, 0.25, 0.25, 0.25])  # four
    record = _record(_model({3: table}), (torch.tensor([[0, 1], [2, 1]]), None))
    assert record.num_tokens == 4
    np.testing.assert_allclose(record.weights[3], [2.25 / 4, 1.25 / 4, 0.25 / 4, 0.25 / 4])
    np.testing.assert_allclose(record.effective_sources[3], (1 + 2 + 4 + 2) / 4)
    np.testing.assert_allclose(record.max_weight[3], (1 + 0.5 + 0.25 + 0.5) / 4)
    np.testing.assert_allclose(record.spread[3, 2], math.sqrt(0.25**2 / 4 - (0.25 / 4) ** 2))
    assert record.num_sources.tolist() == [0, 0, 0, 4, 0, 0, 0, 0, 0]
    others = [0, 1, 2, 4, 5, 6, 7, 8]
    for values in (record.weights, record.spread, record.effective_sources, record.max_weight):
        assert np.isnan(values[others]).all()


def test_roles_and_heads_are_averaged_after_the_statistics_of_each() -> None:
    source = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(61, 2, 5, 3, generator=source, dtype=torch.float64)
    table = logits.softmax(2)
    ids = torch.tensor([[4, 17, 4], [60, 2, 33]])
    record = _record(_model({8: table}), (ids, None))
    rows = table[ids.flatten()].numpy()  # [tokens, roles, S, H]
    num_effective, largest = [], []
    for token in rows:
        for role in token:
            for head in role.T:
                num_effective.append(math.exp(-sum(w * math.log(w) for w in head)))
                largest.append(max(head))
    np.testing.assert_allclose(record.weights[8], rows.mean((0, 1, 3)))
    np.testing.assert_allclose(record.spread[8], rows.std(0).mean((0, 2)))
    np.testing.assert_allclose(record.effective_sources[8], np.mean(num_effective))
    np.testing.assert_allclose(record.max_weight[8], np.mean(largest))


def test_one_hot_weights_count_one_source() -> None:
    table = torch.eye(4)[torch.arange(61) % 4].view(61, 1, 4, 1)
    record = _record(_model({1: table}), (torch.arange(8).view(1, 8), None))
    assert record.effective_sources[1] == 1.0
    assert record.max_weight[1] == 1.0
    np.testing.assert_allclose(record.spread[1], math.sqrt(0.25 * 0.75))


@pytest.mark.parametrize(
    ("variant", "num_sources"),
    [
        ("attn_res_full", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("attn_res_block3", [1, 2, 2, 2, 3, 3, 3, 4, 4]),
        ("attn_res_uneven", [1, 2, 3, 3, 3, 3, 3, 4, 4]),
        ("multi_head", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("q_k_v_heads", [1, 2, 2, 2, 3, 3, 3, 4, 4]),
    ],
)
def test_zero_queries_use_every_source_alike(variant: str, num_sources: list[int]) -> None:
    model = CausalLM(tiny_config(VARIANTS[variant]))
    record = _record(model, (torch.arange(12).view(2, 6), None))
    assert record.num_sources.tolist() == num_sources
    np.testing.assert_allclose(record.effective_sources, num_sources, rtol=1e-6)
    np.testing.assert_allclose(record.max_weight, 1 / np.array(num_sources), rtol=1e-6)
    np.testing.assert_allclose(record.mean_effective_sources, np.mean(num_sources[1:]), rtol=1e-6)
    for row, spread, n in zip(record.weights, record.spread, num_sources, strict=True):
        np.testing.assert_allclose(row[:n], 1 / n, rtol=1e-6)
        np.testing.assert_allclose(spread[:n], 0, atol=1e-6)
        assert np.isnan(row[n:]).all()


def test_how_tokens_are_batched_does_not_matter() -> None:
    model = tiny_model(VARIANTS["p_lr"], dtype=torch.float64)
    ids = torch.randint(61, (5, 6))
    whole = _record(model, (ids, None))
    parts = _record(model, (ids[:1], None), (ids[1:4], None), (ids[4:], None))
    assert whole.num_tokens == parts.num_tokens == 30
    _assert_same(whole, parts, rtol=1e-9)
    assert np.nanmax(whole.spread) > 1e-3  # the comparison is of weights that vary


def test_documents_are_kept_apart() -> None:
    model = tiny_model(VARIANTS["attn_res_block3"], dtype=torch.float64)
    ids = torch.randint(61, (1, 12))
    boundaries = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = _record(model, (ids, Documents(boundaries, 7)))
    apart = _record(model, (ids[:, :5], None), (ids[:, 5:], None))
    _assert_same(packed, apart, rtol=1e-9)


def test_a_scheme_without_weights_has_no_record() -> None:
    assert record_depth(tiny_model(PreNormConfig()), [(torch.arange(4).view(1, 4), None)]) is None


def test_model_stays_as_it_is() -> None:
    model = tiny_model(VARIANTS["attn_res_block3"])
    scheme = model.model.residual
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _record(model, (torch.arange(4).view(1, 4), None))
    assert model.model.residual is scheme
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("batches", [[], [(torch.zeros(0, 4, dtype=torch.long), None)]])
def test_no_tokens_are_refused(batches: Any) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        record_depth(tiny_model(PreNormConfig()), batches)


def test_weights_that_are_not_finite_are_refused() -> None:
    table = torch.full((61, 1, 2, 1), math.nan)
    with pytest.raises(ValueError, match="site 5 are not finite"):
        record_depth(_model({5: table}), [(torch.arange(4).view(1, 4), None)])


def test_saved_record_reads_back(tmp_path: Path) -> None:
    record = _record(tiny_model(VARIANTS["s_lr"]), (torch.arange(6).view(1, 6), None))
    path = record.save(tmp_path / "new" / "record.npz")
    assert [file.name for file in path.parent.iterdir()] == ["record.npz"]
    loaded = DepthRecord.load(path)
    assert loaded.num_tokens == 6
    _assert_same(record, loaded, rtol=0)


def test_other_file_types_are_refused(tmp_path: Path) -> None:
    record = _record(tiny_model(VARIANTS["s_lr"]), (torch.arange(6).view(1, 6), None))
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        record.save(tmp_path / "record.json")
    assert not list(tmp_path.iterdir())


def test_json_holds_all_numbers() -> None:
    record = _record(tiny_model(VARIANTS["attn_res_block3"]), (torch.arange(6).view(1, 6), None))

    def refuse(word: str) -> None:
        raise AssertionError(f"not JSON: {word}")

    content = json.loads(record.to_json(), parse_constant=refuse)
    assert content["num_tokens"] == 6
    assert content["weights"][0] == [1.0, None, None, None]
    assert content["effective_sources"] == record.effective_sources.tolist()
    assert content["mean_effective_sources"] == np.mean(content["effective_sources"][1:])


def _assert_same(a: DepthRecord, b: DepthRecord, rtol: float) -> None:
    for name in ("weights", "spread", "effective_sources", "max_weight"):
        # the variance is a difference of sums, exact to some 1e-16
        atol = 1e-7 if name == "spread" and rtol else 0.0
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=rtol, atol=atol)
