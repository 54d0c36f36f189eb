"""The kernels of projection.py: W_a and the activation in one launch, their gradients in two.

All tensors are contiguous. A token block is BLOCK_T tokens of one row of the batch. Products are summed in fp32 and no
kernel uses atomics, so equal inputs give bitwise equal results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .coefficients import activate, score_gradient

NUM_WARPS = 4
# The numbers that change between calls; Triton would compile a variant for those that are 1 or multiples of 16.
NUMBERS = ["num_tokens", "num_blocks", "num_parts", "divisor"]


@triton.jit
def _token_block(block, num_tokens, BLOCK_T: tl.constexpr):
    """(row of the batch, index of the first token in its row) of a token block."""
    blocks_per_row = tl.cdiv(num_tokens, BLOCK_T)
    return (block // blocks_per_row).to(tl.int64), (block % blocks_per_row) * BLOCK_T


@triton.jit(do_not_specialize=NUMBERS)
def projection_kernel(
    hidden, weight, running_alpha, scores, alpha, beta, num_tokens, divisor,
    NUM_HEADS: tl.constexpr, MODEL_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Eq. 7 and 8. One program owns one token block, all heads; writes scores (where given), alpha and beta."""
    row, start = _token_block(tl.program_id(0), num_tokens, BLOCK_T)
    token = start + tl.arange(0, BLOCK_T)
    head = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_M)
    from_hidden = hidden + (row * num_tokens + start) * MODEL_DIM
    in_tile = tl.arange(0, BLOCK_T)[:, None] * MODEL_DIM
    is_token, is_head = (token < num_tokens)[:, None], (head < NUM_HEADS)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
    for first in range(0, MODEL_DIM, BLOCK_M):
        at = first + column
        is_column = at < MODEL_DIM
        x = tl.load(from_hidden + in_tile + at[None, :], mask=is_token & is_column[None, :], other=0.0)
        w = tl.load(
            weight + head[None, :] * MODEL_DIM + at[:, None], mask=is_head & is_column[:, None], other=0.0
        )  # [BLOCK_M, BLOCK_H]
        total = tl.dot(x, w, total, input_precision="ieee")
    # Rounded as the output of a linear layer is.
    score = total.to(hidden.dtype.element_ty)
    real = is_token & is_head
    if scores is not None:
        tl.store(scores + (row * num_tokens + token[:, None]) * NUM_HEADS + head[None, :], score, mask=real)
    value, _ = activate(score.to(tl.float32), SIGMOID)
    at = (row * NUM_HEADS + head[None, :]) * num_tokens + token[:, None]
    tl.store(alpha + at, value, mask=real)
    if beta is not None:
        average = tl.load(running_alpha + head, mask=head < NUM_HEADS, other=0.0)[None, :]
        tl.store(beta + at, tl.div_rn(average - value, divisor), mask=real)


@triton.jit(do_not_specialize=NUMBERS)
def projection_backward_kernel(
    hidden, weight, scores, token_mask, grad_alpha, grad_beta, grad_hidden, partial_weight, partial_sums,
    num_tokens, num_blocks, divisor,
    NUM_HEADS: tl.constexpr, MODEL_DIM: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """d hidden = d score W and d W = d score^T hidden. Program (p, c) owns every P-th token block and chunk c of M.

    Writes its chunk of d hidden, and in fp32 the sum over its tokens to part p of d W. Programs with c = NUM_CHUNKS
    write the sums of alpha over real tokens and the number of those, in fp64.
    """
    if tl.program_id(1) < NUM_CHUNKS:
        _chunk_gradients(
            hidden, weight, scores, grad_alpha, grad_beta, grad_hidden, partial_weight, num_tokens, num_blocks,
            divisor, NUM_HEADS, MODEL_DIM, BLOCK_T, BLOCK_H, BLOCK_M, SIGMOID,
        )  # fmt: skip
    elif partial_sums is not None:
        _alpha_sums(scores, token_mask, partial_sums, num_tokens, num_blocks, NUM_HEADS, BLOCK_T, BLOCK_H, SIGMOID)


@triton.jit
def _chunk_gradients(
    hidden, weight, scores, grad_alpha, grad_beta, grad_hidden, partial_weight, num_tokens, num_blocks, divisor,
    NUM_HEADS: tl.constexpr, MODEL_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_H)
    column = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head, is_column = (head < NUM_HEADS)[None, :], (column < MODEL_DIM)[None, :]
    in_weight = head[:, None] * MODEL_DIM + column[None, :]
    is_weight = (head < NUM_HEADS)[:, None] & is_column
    in_tile = tl.arange(0, BLOCK_T)[:, None] * MODEL_DIM + column[None, :]
    if grad_hidden is not None:
        w = tl.load(weight + in_weight, mask=is_weight, other=0.0)
    total = tl.zeros([BLOCK_H, BLOCK_M], dtype=tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        row, start = _token_block(block, num_tokens, BLOCK_T)
        token = start + tl.arange(0, BLOCK_T)[:, None]
        real = (token < num_tokens) & is_head
        at = (row * num_tokens + token) * NUM_HEADS + head[None, :]
        _, slope = activate(tl.load(scores + at, mask=real, other=0.0).to(tl.float32), SIGMOID)
        at = (row * NUM_HEADS + head[None, :]) * num_tokens + token
        grad = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
        if grad_alpha is not None:
            grad += tl.load(grad_alpha + at, mask=real, other=0.0)
        if grad_beta is not None:
            grad -= tl.div_rn(tl.load(grad_beta + at, mask=real, other=0.0), divisor)
        grad_score = score_gradient(grad, slope, SIGMOID).to(hidden.dtype.element_ty)
        offset = (row * num_tokens + start) * MODEL_DIM
        is_element = (token < num_tokens) & is_column
        if partial_weight is not None:
            x = tl.load(hidden + offset + in_tile, mask=is_element, other=0.0)
            total = tl.dot(tl.trans(grad_score), x, total, input_precision="ieee")
        if grad_hidden is not None:
            product = tl.dot(grad_score, w, input_precision="ieee")
            tl.store(grad_hidden + offset + in_tile, product.to(grad_hidden.dtype.element_ty), mask=is_element)
    if partial_weight is not None:
        part = tl.program_id(0).to(tl.int64) * (NUM_HEADS * MODEL_DIM)
        tl.store(partial_weight + part + in_weight, total, mask=is_weight)


@triton.jit
def _alpha_sums(
    scores, token_mask, partial_sums, num_tokens, num_blocks,
    NUM_HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], dtype=tl.float64)
    count = tl.zeros([BLOCK_T], dtype=tl.float64)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        row, start = _token_block(block, num_tokens, BLOCK_T)
        token = start + tl.arange(0, BLOCK_T)
        counted = token < num_tokens
        if token_mask is not None:
            counted = counted & (tl.load(token_mask + row * num_tokens + token, mask=counted, other=0) != 0)
        real = counted[:, None] & (head < NUM_HEADS)[None, :]
        at = (row * num_tokens + token[:, None]) * NUM_HEADS + head[None, :]
        # Padding may hold anything, NaN too: it is not loaded.
        value, _ = activate(tl.load(scores + at, mask=real, other=0.0).to(tl.float32), SIGMOID)
        total += tl.sum(tl.where(real, value, 0.0).to(tl.float64), axis=0)
        count += counted.to(tl.float64)
    to = partial_sums + tl.program_id(0) * (NUM_HEADS + 1)
    tl.store(to + head, total, mask=head < NUM_HEADS)
    tl.store(to + NUM_HEADS, tl.sum(count))


@triton.jit(do_not_specialize=NUMBERS)
def projection_sum_kernel(
    partial_weight, partial_sums, grad_weight, grad_collected, num_parts,
    NUM_HEADS: tl.constexpr, MODEL_DIM: tl.constexpr, WEIGHT_PROGRAMS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Adds the parts up. Programs below WEIGHT_PROGRAMS own BLOCK_W elements of d W, others BLOCK_S sums of alpha."""
    program = tl.program_id(0)
    if program < WEIGHT_PROGRAMS:
        _add_parts(partial_weight, grad_weight, program, num_parts, NUM_HEADS * MODEL_DIM, BLOCK_P, BLOCK_W)
    else:
        _add_parts(partial_sums, grad_collected, program - WEIGHT_PROGRAMS, num_parts, NUM_HEADS + 1, BLOCK_P, BLOCK_S)


@triton.jit
def _add_parts(parts, to, program, num_parts, SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    """Sums parts [num_parts, SIZE] over the first dimension, in a fixed order; compiled away where there are none."""
    if parts is not None:
        at = program * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=parts.dtype.element_ty)
        for first in range(0, num_parts, BLOCK_P):
            part = (first + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
            real = (part < num_parts) & (at < SIZE)[None, :]
            total += tl.sum(tl.load(parts + part * SIZE + at[None, :], mask=real, other=0.0), axis=0)
        tl.store(to + at, total.to(to.dtype.element_ty), mask=at < SIZE)
