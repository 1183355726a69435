"""Sources as the kernels take them: their own rows, by pointer and stride, never a copy."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.layout import as_rows
from depthroute.ops.kernels.tuning import Launch

# numbers that one launch writes to a table; a longer tuple takes longer to launch
TABLE_STEP = 64


class Sources(NamedTuple):
    """S sources of T rows with contiguous columns.

    Known to the compiler one by one (tuples), or read from tables in memory: one compiled kernel
    then serves any number.
    """

    rows: Any  # S tensors, or int64 addresses
    strides: Any  # row strides in elements: one of all tensors, S of them, or int64 of them
    like: Tensor | None  # gives the dtype behind an address


class Packed(NamedTuple):
    """Sources and separate keys of a launch; to be kept until the kernel has been launched."""

    values: Sources
    keys: Sources | None
    aligned: bool  # whether all rows start at a multiple of 16 bytes
    rows: list[Tensor]  # what the addresses in tables point to: some are copies


def pack(values: Sequence[Tensor], keys: Sequence[Tensor] | None, launch: Launch) -> Packed:
    """Pack what a kernel reads."""
    packed, aligned, rows = _pack(values, launch)
    if keys is None:
        return Packed(packed, None, aligned, [*rows])
    packed_keys, aligned_keys, key_rows = _pack(keys, launch)
    return Packed(packed, packed_keys, aligned and aligned_keys, [*rows, *key_rows])


def _pack(sources: Sequence[Tensor], launch: Launch) -> tuple[Sources, bool, tuple[Tensor, ...]]:
    """Return rows as tuples, or as tables that repeat the last one up to a full chunk."""
    width, itemsize = sources[0].shape[-1], sources[0].element_size()
    if all(x.is_contiguous() for x in sources):  # most often; then they need not become matrices
        rows, strides = tuple(sources), (width,)
    else:
        rows = tuple(as_rows(x) for x in sources)
        strides = tuple(x.stride(0) for x in rows)
    addresses = [x.data_ptr() for x in rows]
    aligned = not any(x % 16 for x in addresses) and not any(n * itemsize % 16 for n in strides)
    if launch.resident:
        return Sources(rows, strides, None), aligned, rows
    padding = -len(rows) % launch.chunk
    strides *= len(rows) // len(strides)
    numbers = [*addresses, *addresses[-1:] * padding, *strides, *strides[-1:] * padding]
    table = torch.empty(len(numbers), dtype=torch.int64, device=rows[0].device)
    for start in range(0, len(numbers), TABLE_STEP):
        part = numbers[start : start + TABLE_STEP]
        repeated = part[-1:] * (TABLE_STEP - len(part))
        fill_table_kernel[(1,)](table[start:], (*part, *repeated), len(part), TABLE_STEP)
    half = len(numbers) // 2
    return Sources(table[:half], table[half:], rows[0]), aligned, rows


def num_programs(num_tokens: int, per_processor: int, device: torch.device) -> int:
    """Return how many programs share the tokens of a kernel that loops over them."""
    if device.type == "cpu":  # the interpreter
        return min(num_tokens, 3)
    return min(num_tokens, _num_processors(device) * per_processor)


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


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
        p_row = sources.rows[i] + o_row * sources.strides[i if len(sources.strides) > 1 else 0]
    else:
        p_first = tl.load(sources.rows + i).to(sources.like.dtype)
        p_row = p_first + o_row * tl.load(sources.strides + i)
    if ALIGNED:
        p_row = tl.multiple_of(p_row, 16)
    return p_row


@triton.jit
def tile_of(WIDTH: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BP: tl.constexpr):
    """Return the offsets and the mask of a tile `[HP, BP]` that covers a row in H heads."""
    o_h, o_c = tl.arange(0, HP)[:, None], tl.arange(0, BP)[None, :]
    return o_h * (WIDTH // H) + o_c, (o_h < H) & (o_c < WIDTH // H)


@triton.jit
def key_tile_of(
    o_v, m_v, D: tl.constexpr, R: tl.constexpr, H: tl.constexpr,
    KEYS: tl.constexpr, HP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the offsets and the mask of a key's tile `[HP, BK]`, from those of a value's."""
    if KEYS == "value":
        o_k = o_v - (D - R)
        m_k = m_v if D == R else m_v & (o_k >= 0)
    else:
        o_k, m_k = tile_of(R, H, HP, BK)
    return o_k, m_k


@triton.jit
def key_within(b_v, m_k, D: tl.constexpr, R: tl.constexpr):
    """Return the key's tile of a value that shows it: zero outside of the last R columns."""
    return b_v if D == R else tl.where(m_k, b_v, 0.0)


@triton.jit
def load_rows(
    sources, start, o_row, num_sources, o_tile, m_tile,
    CHUNK: tl.constexpr, RESIDENT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load a tile of row `o_row` of each of the sources `start .. start + CHUNK`."""
    tiles = ()
    for c in tl.static_range(CHUNK):
        p_row = row_pointer(sources, start + c, o_row, RESIDENT, ALIGNED)
        m_row = m_tile if RESIDENT else m_tile & (start + c < num_sources)
        tiles = tiles + (tl.load(p_row + o_tile, mask=m_row, other=0.0),)
    return tiles


@triton.jit
def load_sources(
    values, keys, start, o_row, num_sources, o_v, m_v, o_k, m_k,
    D: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, RESIDENT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load the tiles of values `[H, D / H]` and keys `[H, R / H]` of some sources at one token."""
    b_vs = load_rows(values, start, o_row, num_sources, o_v, m_v, CHUNK, RESIDENT, ALIGNED)
    if KEYS == "value":
        b_ks = ()
        for c in tl.static_range(CHUNK):
            b_ks = b_ks + (key_within(b_vs[c], m_k, D, R),)
    elif KEYS == "tail":
        o_tail = o_k + (D - R)
        b_ks = load_rows(values, start, o_row, num_sources, o_tail, m_k, CHUNK, RESIDENT, ALIGNED)
    else:
        b_ks = load_rows(keys, start, o_row, num_sources, o_k, m_k, CHUNK, RESIDENT, ALIGNED)
    return b_vs, b_ks


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
