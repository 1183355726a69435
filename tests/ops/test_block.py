"""The block schedule in plain PyTorch: its steps equal reads that are done one by one."""

import pytest
import torch

from block_cases import CASES, NORM, Case, make, one_by_one, reads_and_gradients, result_names
from depthroute.ops.block import add_merge_norm, add_norm, read_ahead
from helpers import assert_all_close, assert_close


def assert_steps_equal_single_reads(case: Case, norm: torch.nn.Module = NORM) -> None:
    leaves = make(case)
    upstream = [torch.randn(*case.batch, case.width).double() for _ in range(case.queries)]
    got = reads_and_gradients(case, leaves, upstream, norm=norm)
    want = reads_and_gradients(case, leaves, upstream, one_by_one, norm=norm)
    assert_all_close(got, want, result_names(case, leaves))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reads_of_a_block_and_all_gradients_equal_single_passes(case: Case) -> None:
    assert_steps_equal_single_reads(case)


@pytest.mark.parametrize("name", ["plain", "closes_scaled", "first_read_after_a_write"])
def test_any_norm_may_follow(name: str) -> None:
    assert_steps_equal_single_reads(CASES[name], torch.nn.Softmax(-1))


def test_biases_count_in_both_steps() -> None:
    case = Case(queries=2)
    leaves, bias = make(case), torch.randn(4).double()
    ahead, values, _ = read_ahead(
        leaves.values,
        *leaves.query,
        keys=None,
        pending=None,
        share=1.0,
        bias=bias[:3],
        rule=case.rule,
        complete=1,
        norm=NORM,
    )
    ahead = ahead.without(1)
    _, _, got = add_merge_norm(
        ahead,
        None,
        *leaves.writes,
        key=None,
        key_sum=None,
        share=1.0,
        bias=bias[3].item(),
        rule=case.rule,
        norm=NORM,
    )
    keys = torch.stack([*leaves.values, *leaves.writes])
    logits = (NORM(keys) * leaves.query[0][1]).sum(-1) + bias.view(-1, 1, 1)
    assert_close(got, NORM((logits.softmax(0).unsqueeze(-1) * keys).sum(0)))
    assert all(a is b for a, b in zip(values, leaves.values, strict=True))


def test_a_stream_is_summed_then_normed() -> None:
    x, y = torch.randn(2, 2, 3, 8)
    total, out = add_norm(x, y, NORM)
    assert torch.equal(total, x + y)
    assert torch.equal(out, NORM(x + y))
