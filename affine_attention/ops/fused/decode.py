"""A few queries against a long cache: split over the keys, one pass over K and V, then a merge. No gradients.

With the keys of a sequence cut into splits c = 1..C, for each packed query row
D1  m_c = max s_j,  l_c = sum exp(s_j - m_c),  a_c = sum exp(s_j - m_c) v_j   over the visible keys j of split c
D2  a row whose query is zero has s = 0 on every visible key: its a_c is the plain sum of visible v. With `beta`, such
    rows ride along in the tile as one more head, and the sum of values costs no second pass and no second product.
D3  m = max(m_1..m_C, sink),  O = sum_c exp(m_c - m) a_c / (sum_c exp(m_c - m) l_c + exp(sink - m))
D4  out = gate * (alpha O + beta sum of v)

The R = H / G heads that share a key-value head, times the T queries, are the rows of one tile. Scores are kept in
units of log2.

Caches. Dense: key and value [B, G, S, D], any strides; `lengths` [B] says how many keys of each sequence are real,
when the cache is larger than its content. Paged: key and value [pages, page_size, G, D], and `block_table` [B, n] of
int, where key j of sequence b lies in page block_table[b, j // page_size], slot j % page_size; then S = n * page_size.
Query t stands at position length - T + t: the last query is the last real key. Keys past the length are never read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..visibility import Visibility
from . import on_device
from .relaunch import relaunch

MAX_QUERIES = 16
MAX_ROWS = 64  # of a tile; more rows (many heads to a group, many queries) become more tiles
LOG2_E = 1.4426950408889634
MIN_STEPS = 2  # tiles of keys to a split, at least
MAX_SPLITS = 512
MAX_ROW_STRIDE = 2**23  # of a page whose tiles have 32-bit offsets inside


@triton.jit
def split_kernel(
    query, key, value, key_mask, lengths, block_table, part_max, part_sum, part_acc,
    query_b, query_h, query_t, key_page, key_g, key_s, value_page, value_g, value_s,
    mask_b, mask_s, table_b, num_queries, num_keys, groups, heads_per_group, num_rows, num_splits, window, scale_log2,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """D1, D2. One program owns one split of the keys for BLOCK_M packed rows of one group; writes m, l and a.

    Row r of the packing is query r % T of head r // T; a head past the group's last is the zero query of D2.
    Parts are [B, G, splits, rows], part_acc with D behind. fp32 state. ONE_PAGE: no tile of keys crosses a page's end.
    """
    tiles = tl.cdiv(num_rows, BLOCK_M)
    split, tile_m = tl.program_id(0) % num_splits, (tl.program_id(0) // num_splits) % tiles
    slot = tl.program_id(0) // (num_splits * tiles)
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    rows, cols = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    col_ok = cols < HEAD_DIM
    head, query_at = rows // num_queries, rows % num_queries
    query_ok = head < heads_per_group
    place = (group * heads_per_group + head) * query_h + query_at.to(tl.int64) * query_t
    q = tl.load(query + batch * query_b + place[:, None] + cols[None, :], mask=query_ok[:, None] & col_ok, other=0.0)

    length = num_keys
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + batch).to(tl.int32), num_keys)
    position = length - num_queries + query_at
    low, high = 0, length
    if WINDOW:
        low = tl.maximum(length - num_queries - window + 1, 0)
    # Each sequence is cut by its own length, so that a short one does not leave programs idle at the end.
    steps = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), num_splits)
    start = low + split * steps * BLOCK_N
    stop = tl.minimum(start + steps * BLOCK_N, high)

    key += group * key_g
    value += group * value_g
    if block_table is None:
        key += batch * key_page
        value += batch * value_page
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if ONE_PAGE:
        entries = block_table + batch * table_b
        next_page = tl.load(entries + start // PAGE_SIZE, mask=start < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        key_ok = keys < stop
        if key_mask is not None:
            key_ok &= tl.load(key_mask + batch * mask_b + keys.to(tl.int64) * mask_s, mask=key_ok, other=0) != 0
        # What is not visible to any row is not read: stale memory may hold NaN, and 0 * NaN is NaN.
        tile_ok = key_ok[:, None] & col_ok[None, :]
        if ONE_PAGE:
            # One look-up a tile, ahead of its use; the offsets inside the tile are 32-bit ones that do not change.
            page = next_page.to(tl.int64)
            next_page = tl.load(entries + (first + BLOCK_N) // PAGE_SIZE, mask=first + BLOCK_N < stop, other=0)
            in_page = page * 0 + first % PAGE_SIZE
            inner = tl.arange(0, BLOCK_N)[:, None]
            key_at, value_at = page * key_page + in_page * key_s, page * value_page + in_page * value_s
            k = tl.load(key + key_at + (inner * key_s + cols[None, :]), mask=tile_ok, other=0.0)
            v = tl.load(value + value_at + (inner * value_s + cols[None, :]), mask=tile_ok, other=0.0)
        else:
            if block_table is None:
                key_at, value_at = keys.to(tl.int64) * key_s, keys.to(tl.int64) * value_s
            else:
                entry = block_table + batch * table_b + keys // PAGE_SIZE
                page = tl.load(entry, mask=keys < stop, other=0).to(tl.int64)
                key_at = page * key_page + (keys % PAGE_SIZE) * key_s
                value_at = page * value_page + (keys % PAGE_SIZE) * value_s
            k = tl.load(key + key_at[:, None] + cols[None, :], mask=tile_ok, other=0.0)
            v = tl.load(value + value_at[:, None] + cols[None, :], mask=tile_ok, other=0.0)

        visible = key_ok[None, :] & (rows < num_rows)[:, None]
        if CAUSAL:
            visible &= keys[None, :] <= position[:, None]
        if WINDOW:
            visible &= (position[:, None] - keys[None, :] < window) & (keys[None, :] - position[:, None] < window)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen nothing yet has -inf here, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc=acc * rescale[:, None], input_precision="ieee")
        row_max = new_max

    row_ok = rows < num_rows
    part = (slot.to(tl.int64) * num_splits + split) * num_rows + rows
    tl.store(part_max + part, row_max, mask=row_ok)
    tl.store(part_sum + part, row_sum, mask=row_ok)
    tl.store(part_acc + part[:, None] * HEAD_DIM + cols[None, :], acc, mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def merge_kernel(
    part_max, part_sum, part_acc, alpha, beta, sink, gate, out,
    alpha_b, alpha_h, alpha_t, beta_b, beta_h, beta_t, gate_b, gate_h, gate_t, out_b, out_h, out_t,
    num_queries, heads, heads_per_group, num_rows, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """D3, D4. One program owns one query of one head; joins its splits and writes out. fp32 sums."""
    query_at, head = tl.program_id(0) % num_queries, (tl.program_id(0) // num_queries) % heads
    batch = (tl.program_id(0) // (num_queries * heads)).to(tl.int64)
    group, member = head // heads_per_group, head % heads_per_group
    cols = tl.arange(0, BLOCK_D)
    col_ok = cols < HEAD_DIM
    first = (batch * (heads // heads_per_group) + group) * num_splits * num_rows
    splits = tl.arange(0, BLOCK_C)
    own = first + member * num_queries + query_at

    # The sink is a split without values: l = 1, a = 0.
    top, total = float("-inf"), 0.0
    if sink is not None:
        top, total = tl.load(sink + head).to(tl.float32) * 1.4426950408889634, 1.0
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, num_splits, BLOCK_C):
        ok = start + splits < num_splits
        part = own + (start + splits) * num_rows
        tile_ok = ok[:, None] & col_ok[None, :]
        maxima = tl.load(part_max + part, mask=ok, other=float("-inf"))
        part_total = tl.load(part_sum + part, mask=ok, other=0.0)
        tile = tl.load(part_acc + part[:, None] * HEAD_DIM + cols[None, :], mask=tile_ok, other=0.0)
        if beta is not None:
            part += (heads_per_group - member) * num_queries
            sums_tile = tl.load(part_acc + part[:, None] * HEAD_DIM + cols[None, :], mask=tile_ok, other=0.0)
            sums += tl.sum(sums_tile, axis=0)
        new_top = tl.maximum(top, tl.max(maxima, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale, weight = tl.exp2(top - shift), tl.exp2(maxima - shift)
        total = total * rescale + tl.sum(weight * part_total, axis=0)
        acc = acc * rescale + tl.sum(weight[:, None] * tile, axis=0)
        top = new_top

    # A row that sees nothing, and has no sink, has total = 0 and acc = 0.
    acc = acc / tl.where(total == 0.0, 1.0, total)
    if alpha is not None:
        acc *= tl.load(alpha + batch * alpha_b + head * alpha_h + query_at * alpha_t).to(tl.float32)
    if beta is not None:
        acc += tl.load(beta + batch * beta_b + head * beta_h + query_at * beta_t).to(tl.float32) * sums
    if gate is not None:
        gate_place = gate + batch * gate_b + head * gate_h + query_at * gate_t + cols
        acc *= tl.load(gate_place, mask=col_ok, other=0.0).to(tl.float32)
    tl.store(out + batch * out_b + head * out_h + query_at * out_t + cols, acc, mask=col_ok)


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    visibility: Visibility,
) -> str | None:
    """The reason why the decode kernel cannot serve the call, None when it can."""
    if query.device.type != "cuda":
        return f"needs a CUDA GPU, got {query.device.type} tensors"
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, got query of {query.dtype}"
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return f"query, key and value must share one dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
    if visibility.num_queries > MAX_QUERIES:
        return f"serves up to {MAX_QUERIES} queries, got T = {visibility.num_queries}"
    if 0 in query.shape or 0 in key.shape:
        return f"needs at least one query and one key, got T = {query.shape[2]} and S = {visibility.num_keys}"
    if query.shape[-1] > 256:
        return f"takes head dims up to 256, got {query.shape[-1]}"
    if visibility.query_segments is not None:
        return "takes no segment ids"
    if visibility.pair_mask is not None:
        return "takes no mask of (query, key) pairs, only masks [B, S] of keys"
    given = (query, key, value, alpha, beta, sink, gate)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return "has no gradient, and an input requires one; call it under torch.no_grad()"
    return None


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    visibility: Visibility,
    softmax_scale: float,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """D1 to D4: [B, H, T, D] in the dtype of query. The module says how caches are laid out.

    `visibility.num_keys` is the room of the cache (S, or pages times page_size). With `lengths` the alignment is to
    them, not to S. Every entry of `block_table` that a length covers must be a page of the cache; it is not checked,
    which would wait for the device.
    """
    batch, _, num_queries, _ = query.shape
    if lengths is not None and lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape [B] = [{batch}], got {list(lengths.shape)}")
    if block_table is not None:
        if block_table.ndim != 2 or block_table.shape[0] != batch:
            raise ValueError(f"block_table must have shape [B, n] with B = {batch}, got {list(block_table.shape)}")
        room = block_table.shape[1] * key.shape[1]
        if room != visibility.num_keys:
            raise ValueError(
                f"visibility.num_keys must be pages * page_size = {room} for this block_table and key "
                f"[pages, page_size, G, D] = {list(key.shape)}, got {visibility.num_keys}"
            )
    given = (query, key, value, alpha, beta, sink, gate)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        raise ValueError("decode has no gradient, and an input requires one; call it under torch.no_grad()")
    # The plain function is the op without the registration around it: a step of decoding is short.
    compiling = torch.compiler.is_compiling() or type(query) not in (Tensor, torch.nn.Parameter)
    return (_decode_op if compiling else _decode)(
        _packed_rows(query), _packed_rows(key), _packed_rows(value),
        alpha, beta, sink, None if gate is None else _packed_rows(gate),
        visibility.key_mask, lengths, block_table,
        visibility.is_causal and num_queries > 1, visibility.window, visibility.num_keys, softmax_scale,
    )  # fmt: skip


@on_device
def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    key_mask: Tensor | None,
    lengths: Tensor | None,
    block_table: Tensor | None,
    is_causal: bool,
    window: int | None,
    num_keys: int,
    softmax_scale: float,
) -> Tensor:
    batch, heads, num_queries, dim = query.shape
    if block_table is None:
        groups, page_size = key.shape[1], 1
        key_strides, value_strides = key.stride()[:3], value.stride()[:3]
    else:
        page_size, groups = key.shape[1:3]
        key_strides, value_strides = ((x.stride(0), x.stride(2), x.stride(1)) for x in (key, value))
        block_table = block_table.contiguous()
    repeats = heads // groups
    rows = (repeats + (beta is not None)) * num_queries
    block_m = min(max(16, triton.next_power_of_2(rows)), MAX_ROWS)
    block_d = max(16, triton.next_power_of_2(dim))
    reach = num_keys if window is None else min(num_keys, window + num_queries - 1)
    tiles = triton.cdiv(rows, block_m)
    programs = batch * groups * tiles
    processors, shared_bytes = _device(query.device)
    # The wide plan has tiles larger than the usual page.
    plan = choose_plan(block_d * query.element_size(), programs, processors, shared_bytes if page_size == 1 else 0)
    splits = choose_splits(programs, triton.cdiv(reach, plan.block_n), processors * plan.per_processor)

    # A window may begin anywhere in a page; and offsets inside a tile are then 32-bit.
    near = max(key_strides[2], value_strides[2]) <= MAX_ROW_STRIDE
    one_page = block_table is not None and window is None and page_size % plan.block_n == 0 and near

    parts = torch.empty(2, batch, groups, splits, rows, dtype=torch.float32, device=query.device)
    part_acc = torch.empty(batch, groups, splits, rows, dim, dtype=torch.float32, device=query.device)
    out = torch.empty_like(query)
    relaunch(
        split_kernel, (splits * programs,),
        (
            query, key, value, None if key_mask is None else key_mask.view(torch.int8), lengths, block_table,
            parts[0], parts[1], part_acc,
        ),
        (
            *query.stride()[:3], *key_strides, *value_strides,
            *((0, 0) if key_mask is None else key_mask.stride()), 0 if block_table is None else block_table.stride(0),
            num_queries, num_keys, groups, repeats, rows, splits, window or 0, softmax_scale * LOG2_E,
            is_causal, window is not None, page_size, one_page, dim, block_m, plan.block_n, block_d,
        ),
        num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
    )  # fmt: skip
    relaunch(
        merge_kernel, (num_queries * heads * batch,),
        (parts[0], parts[1], part_acc, alpha, beta, sink, gate, out),
        (
            *_strides(alpha), *_strides(beta), *_strides(gate), *out.stride()[:3],
            num_queries, heads, repeats, rows, splits, dim, min(32, triton.next_power_of_2(splits)), block_d,
        ),
        num_warps=4,
    )  # fmt: skip
    return out


_decode_op = torch.library.custom_op("affine_attention::decode", _decode, mutates_args=())


@_decode_op.register_fake
def _(query, *_):
    return torch.empty_like(query)


@dataclass(frozen=True)
class Plan:
    """Keys of a tile, warps, pipeline stages, and how many programs a processor holds at once."""

    block_n: int
    warps: int
    stages: int
    per_processor: int

    @property
    def registers(self) -> int:
        """Of a thread, at most: with more, fewer programs than that would be resident, and the rest a second wave."""
        return min(255, 2**16 // (32 * self.warps * self.per_processor))


def choose_plan(row_bytes: int, programs: int, processors: int, shared_bytes: int) -> Plan:
    """Measured on an H200 with 512 MB of keys and values; row_bytes are those of one padded key.

    Long rows and few sequences: one program with deep, wide tiles on each processor. Otherwise smaller tiles, and
    programs that hide each other's waits.
    """
    if row_bytes <= 128:
        return Plan(64, 2, 3, 4)
    wide = max(32, 32768 // row_bytes)
    if programs <= processors and shared_bytes >= 160 * 1024:
        return Plan(wide, 8, 3, 1)
    return Plan(max(16, wide // 2), 4, 2, 4)


def choose_splits(programs: int, steps: int, room: int) -> int:
    """Into how many parts the keys of a sequence are cut, given the programs there are without a cut.

    As many as keep all programs resident at once (a second, nearly empty wave costs as much as a full one), never
    less than MIN_STEPS tiles of keys to a part, and no empty parts.
    """
    wanted = max(1, min(room // programs, steps // MIN_STEPS, MAX_SPLITS))
    return triton.cdiv(steps, triton.cdiv(steps, wanted))


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """(processors, bytes of shared memory that one program may take)."""
    if device.type != "cuda":
        return 4, 0
    properties = torch.cuda.get_device_properties(device)
    # The attribute is there, torch's type stubs do not know it.
    return properties.multi_processor_count, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


def _packed_rows(x: Tensor) -> Tensor:
    """The kernels read rows of D neighbours; a tensor whose last dim is strided is copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]
