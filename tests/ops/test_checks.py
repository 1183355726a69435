"""Every bad argument of a read is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.ops import depth_attend, depth_merge, depth_weights, rms_norm
from depthroute.ops.reference import depth_attend_reference, depth_merge_reference


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


V = zeros(2, 4, 6)
Q = zeros(3, 6)
READ = {"values": [V, V], "query": Q}

BAD_READS: dict[str, tuple[dict[str, Any], str]] = {
    "no_source": ({"values": []}, "values must hold at least one source"),
    "not_a_tensor": ({"values": [V, 1.0]}, r"values\[1\] must be a tensor, got float"),
    "integers": ({"values": [V.int()]}, r"values\[0\] must be a floating tensor .*int32"),
    "scalars": ({"values": [zeros()]}, r"values\[0\] must be a floating tensor .*shape \(\)"),
    "one_vector": ({"values": zeros(3)}, r"values must be a sequence .*shape \(3,\)"),
    "one_number": ({"values": zeros()}, r"values must be a sequence .*shape \(\)"),
    "other_tokens": ({"values": [V, V, zeros(2, 5, 6)]}, r"values\[2\] .*\(2, 4, 6\).*\(2, 5, 6\)"),
    "other_width": ({"values": [V, zeros(2, 4, 5)]}, r"values\[1\] must have the shape"),
    "broadcast": ({"values": [V, zeros(1, 4, 6)]}, r"values\[1\] must have the shape"),
    "fewer_axes": ({"values": [V, zeros(4, 6)]}, r"values\[1\] must have the shape"),
    "other_dtype": ({"values": [V, V.half()]}, r"values\[1\] must have the dtype.*float16"),
    "other_device": ({"values": [V, V.to("meta")]}, r"values\[1\] must have the .*device.*meta"),
    "values_none": ({"values": None}, "values must be a sequence .*got NoneType"),
    "query_none": ({"query": None}, "query must be a tensor, got NoneType"),
    "query_list": ({"query": [1.0]}, "query must be a tensor, got list"),
    "bias_list": ({"bias": [0.0, 0.0]}, "bias must be a tensor, got list"),
    "bias_integer": ({"bias": zeros(2).int()}, "bias must be a floating tensor, got .*int32"),
    "null_list": ({"null": [0.0]}, r"null must be a number, got \[0.0\]"),
    "null_device": ({"null": zeros(device="meta")}, "null is on meta"),
    "heads_float": ({"heads": 2.0}, "heads must divide .*got 2.0"),
    "scale_text": ({"scale": "a"}, "scale must be a number, got 'a'"),
    "eps_text": ({"eps": "a"}, "eps must be a number, got 'a'"),
    "query_axes": ({"query": zeros(1, 3, 6)}, r"query must be .*\(1, 3, 6\)"),
    "query_integer": ({"query": Q.long()}, "query must be a floating tensor.*int64"),
    "query_empty": ({"query": zeros(0, 6)}, r"query must be .*\(0, 6\)"),
    "query_device": ({"query": Q.to("meta")}, "query is on meta, values on cpu"),
    "query_too_wide": ({"query": zeros(3, 7)}, "query must have 1 to 6 columns.*rank 7"),
    "heads_zero": ({"heads": 0}, "heads must divide .*got 0"),
    "heads_of_width": ({"heads": 4}, "heads must divide the value width 6.*got 4"),
    "heads_of_rank": ({"heads": 3, "query": zeros(3, 4)}, "heads must divide .*key width 4"),
    "key_norm": ({"key_norm": "rms"}, "key_norm must be one of .*got 'rms'"),
    "eps_zero": ({"eps": 0.0}, "eps must be > 0"),
    "eps_nan": ({"eps": float("nan")}, "eps must be > 0"),
    "keys_full": ({"keys": [V, V], "key_norm": "full"}, 'key_norm="full"'),
    "keys_number": ({"keys": [V]}, "keys must hold one key per value, 2, got 1"),
    "keys_shape": ({"keys": zeros(2, 2, 4, 5)}, r"keys must have .*\(2, 4, 6\), got \(2, 4, 5\)"),
    "keys_uneven": ({"keys": [V, zeros(2, 5, 6)]}, r"keys\[1\] must have the shape"),
    "keys_device": ({"keys": V.to("meta").expand(2, 2, 4, 6)}, "keys are on meta"),
    "bias_shape": ({"bias": zeros(3)}, r"bias must have shape .*\(2,\).*got \(3,\)"),
    "bias_broadcast": ({"bias": zeros(2, 2, 1)}, r"bias must have shape .*got \(2, 2, 1\)"),
    "bias_device": ({"bias": zeros(2, device="meta")}, "bias is on meta"),
    "null_shape": ({"null": zeros(2)}, r"null must be a number, .*Q=3, H=1.*\(2,\)"),
}


@pytest.mark.parametrize(("change", "message"), BAD_READS.values(), ids=BAD_READS)
@pytest.mark.parametrize("op", [depth_attend, depth_attend_reference, depth_weights])
def test_a_bad_argument_of_a_read_is_named(op: Any, change: dict[str, Any], message: str) -> None:
    op(**READ)
    with pytest.raises(ValueError, match=message):
        op(**{**READ, **change})


@pytest.mark.parametrize("op", [depth_attend, depth_attend_reference])
@pytest.mark.parametrize("dtype", [torch.int32, "float32"])
def test_an_output_of_no_floating_dtype_is_refused(op: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"out_dtype must be a floating dtype, got {dtype}"):
        op(**READ, out_dtype=dtype)


@pytest.mark.parametrize(
    ("x", "eps", "message"),
    [
        (V.int(), 1e-6, "x must be a floating tensor, got torch.int32"),
        ([1.0], 1e-6, "x must be a floating tensor, got <class 'list'>"),
        (V, 0.0, "eps must be > 0"),
    ],
)
def test_a_bad_argument_of_a_norm_is_named(x: Any, eps: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(x, eps=eps)


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan")])
def test_the_eps_of_a_norm_of_the_output_is_named(eps: float) -> None:
    for op, given in (
        (depth_attend, READ),
        (depth_attend_reference, READ),
        (depth_merge, MERGE),
        (depth_merge_reference, MERGE),
    ):
        with pytest.raises(ValueError, match=f"out_norm_eps must be > 0 .*got {eps}"):
            op(**given, out_norm_eps=eps)


MERGE = {"out": zeros(3, 2, 4, 6), "lse": zeros(3, 2, 4, 1), "value": V, "query": Q}

BAD_MERGES: dict[str, tuple[dict[str, Any], str]] = {
    "out_shape": ({"out": zeros(2, 2, 4, 6)}, r"out must have shape \(3, 2, 4, 6\), got \(2,"),
    "lse_shape": ({"lse": zeros(3, 2, 5, 1)}, r"lse must be .*\(3, 2, 4, 'H'\).*\(3, 2, 5, 1\)"),
    "lse_dtype": ({"lse": zeros(3, 2, 4, 1).bfloat16()}, "lse must be torch.float32.*bfloat16"),
    "lse_heads": ({"lse": zeros(3, 2, 4, 4)}, "heads must divide .*got 4"),
    "query": ({"query": zeros(3, 7)}, "query must have 1 to 6 columns"),
    "query_lacks_its_axis": ({"query": zeros(6)}, r"out must have shape \(2, 4, 6\)"),
    "key": ({"key": zeros(2, 5, 6)}, "keys must have the batch axes"),
    "bias": ({"bias": zeros(4)}, r"bias must be a number, \(2, 4\) or \(3, 2, 4\), .*\(4,\)"),
    "eps": ({"eps": -1.0}, "eps must be > 0"),
    "lse_number": ({"lse": zeros()}, "lse must be .*as many axes as out, 4, got 0"),
    "lse_lacks_heads": ({"lse": zeros(3, 2, 4)}, "lse must be .*as many axes as out, 4, got 3"),
    "lse_list": ({"lse": [0.0]}, "lse must be a tensor, got list"),
    "lse_device": ({"lse": zeros(3, 2, 4, 1, device="meta")}, "lse is on meta, value on cpu"),
    "out_integer": ({"out": zeros(3, 2, 4, 6).int()}, "out must be a floating .*int32"),
    "out_device": ({"out": zeros(3, 2, 4, 6, device="meta")}, "out is on meta, value on cpu"),
    "value_none": ({"value": None}, "value must be a tensor, got NoneType"),
    "bias_device": ({"bias": zeros(device="meta")}, "bias is on meta"),
    "bias_text": ({"bias": "a"}, "bias must be a number, got 'a'"),
}


@pytest.mark.parametrize(("change", "message"), BAD_MERGES.values(), ids=BAD_MERGES)
def test_a_bad_argument_of_a_merge_is_named(change: dict[str, Any], message: str) -> None:
    depth_merge(**MERGE)
    with pytest.raises(ValueError, match=message):
        depth_merge(**{**MERGE, **change})
