"""Sources as the kernels take them: their own rows, by pointer and stride, never a copy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# numbers that one launch writes to a table; a longer tuple takes longer to launch
TABLE_STEP = 64


class Sources(NamedTuple):
    """S sources `[T, width]` with contiguous columns.

    Known to the compiler one by one (tuples), or read from tables in memory: one compiled kernel
    then serves any number.
    """

    rows: Any  # S tensors, or int64 addresses
    strides: Any  # S row strides in elements, or int64 of them
    like: Tensor  # any source; gives the dtype behind an address


def is_aligned(rows: Sequence[Tensor]) -> bool:
    """Return whether every row starts at a multiple of 16 bytes, as vector loads need it."""
    return all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in rows)


def pack(rows: Sequence[Tensor], *, resident: bool, chunk: int) -> Sources:
    """Return the sources as tuples, or as tables that repeat the last one up to a full chunk."""
    strides = [x.stride(0) for x in rows]
    if resident:
        return Sources(tuple(rows), tuple(strides), rows[0])
    padding = -len(rows) % chunk
    addresses = [x.data_ptr() for x in rows]
    numbers = [*addresses, *addresses[-1:] * padding, *strides, *strides[-1:] * padding]
    table = torch.empty(len(numbers), dtype=torch.int64, device=rows[0].device)
    for start in range(0, len(numbers), TABLE_STEP):
        part = numbers[start : start + TABLE_STEP]
        repeated = part[-1:] * (TABLE_STEP - len(part))
        fill_table_kernel[(1,)](table[start:], (*part, *repeated), len(part), TABLE_STEP)
    half = len(numbers) // 2
    return Sources(table[:half], table[half:], rows[0])


def num_programs(num_tokens: int, per_processor: int, device: torch.device) -> int:
    """Return how many programs share the tokens of a kernel that loops over them."""
    if device.type == "cpu":  # the interpreter
        return min(num_tokens, 3)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(num_tokens, processors * per_processor)


@triton.jit
def fill_table_kernel(table, numbers, count, STEP: tl.constexpr):
    """Write numbers given at the launch to memory: no copy from the host, so graphs can hold it."""
    for i in tl.static_range(STEP):
        if i < count:
            tl.store(table + i, numbers[i])


@triton.jit
def row_pointer(sources, i, o_row, RESIDENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where row `o_row` of source i starts."""
    if RESIDENT:
        p_row = sources.rows[i] + o_row * sources.strides[i]
    else:
        p_first = tl.load(sources.rows + i).to(sources.like.dtype)
        p_row = p_first + o_row * tl.load(sources.strides + i)
    if ALIGNED:
        p_row = tl.multiple_of(p_row, 16)
    return p_row


@triton.jit
def load_values(
    values, start, o_row, num_sources, o_v, m_v,
    CHUNK: tl.constexpr, RESIDENT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load one token's tiles `[H, D / H]` of the sources `start .. start + CHUNK`."""
    b_vs = ()
    for c in tl.static_range(CHUNK):
        p_v = row_pointer(values, start + c, o_row, RESIDENT, ALIGNED)
        if RESIDENT:
            b_vs = b_vs + (tl.load(p_v + o_v, mask=m_v, other=0.0),)
        else:
            b_vs = b_vs + (tl.load(p_v + o_v, mask=m_v & (start + c < num_sources), other=0.0),)
    return b_vs


@triton.jit
def load_keys(
    values, keys, b_vs, start, o_row, num_sources, o_k, m_k,
    D: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, RESIDENT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load the key tiles `[H, R / H]` of the values whose tiles are given."""
    if KEYS == "value":
        b_ks = b_vs
    elif KEYS == "tail":
        b_ks = load_values(
            values, start, o_row, num_sources, o_k + (D - R), m_k, CHUNK, RESIDENT, ALIGNED
        )
    else:
        b_ks = load_values(keys, start, o_row, num_sources, o_k, m_k, CHUNK, RESIDENT, ALIGNED)
    return b_ks


@triton.jit
def inverse_rms(b_v, b_k, eps, NORM: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Return the factor that the key norm multiplies a raw score by."""
    if NORM == "none":
        rstd = tl.full([], 1.0, tl.float32)
    else:
        b_x = (b_v if NORM == "full" else b_k).to(tl.float32)
        square = tl.sum(tl.sum(b_x * b_x, axis=1), axis=0)
        rstd = tl.rsqrt(square / (D if NORM == "full" else R) + eps)
    return rstd
