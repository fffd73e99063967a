"""Stand-ins for the FlashAttention kernels: the same signatures, checked, in plain torch.

Each function checks what the real one demands of its arguments, and then computes the right
answer in float64. What they demand was read from the packages: `flash_attn.cute` of
flash-attn-4 4.0.0b36, `torch.nn.attention.varlen` of torch 2.13.0, and the interface and
`csrc/flash_attn/flash_api.cpp` of flash-attn 2.8.3; the signatures are those, parameter by
parameter. Only what our backends use is accepted.
"""

import torch

FA2_PAGE = 256


class ContractError(Exception):
    """An argument that the real kernel would refuse, or silently take for something else."""


def demand(condition, said):
    if not condition:
        raise ContractError(said)


def fa2_varlen(  # noqa: PLR0917 - the real signature
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """`flash_attn.flash_attn_varlen_func` of 2.8.3."""
    demand(block_table is not None, "block_table: unpaged")
    demand(dropout_p == 0.0, "dropout_p")
    demand(cu_seqlens_k is not None, "cu_seqlens_k: needed")
    demand(alibi_slopes is None, "alibi_slopes")
    _check_pages(k, block_table, cu_seqlens_q, multiple_of=FA2_PAGE)
    check_index("cu_seqlens_k", cu_seqlens_k, (len(cu_seqlens_q),))
    demand(cu_seqlens_k[0] == 0, "cu_seqlens_k: begins at 0")
    lengths = cu_seqlens_k.diff()
    left, right = window_size
    demand(causal or right == 0, "causal: not causal")
    demand(right in (-1, 0), "window_size: a causal window ends at the token itself")
    demand(isinstance(softcap, float), "softcap: a float")
    checked = (q, k, v, block_table, cu_seqlens_q, lengths, max_seqlen_q, max_seqlen_k)
    return _compute(checked, softmax_scale, None if left < 0 else left, softcap)


def fa4_varlen(  # noqa: PLR0917 - the real signature
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    """`flash_attn.cute.flash_attn_varlen_func` of 4.0.0b36; it returns (output, lse)."""
    demand(page_table is not None, "page_table: unpaged")
    demand(cu_seqlens_k is None, "cu_seqlens_k: not with page_table")
    demand(seqused_k is not None, "seqused_k: needed with page_table")
    _check_pages(k, page_table, cu_seqlens_q, multiple_of=1)
    check_index("seqused_k", seqused_k, (len(cu_seqlens_q) - 1,))
    left, right = window_size
    demand(left is None or left >= 0, "window_size: None, not -1, for all on one side")
    demand(causal or right == 0, "causal: not causal")
    demand(right in (None, 0), "window_size: a causal window ends at the token itself")
    demand(isinstance(softcap, float), "softcap: a float")
    checked = (q, k, v, page_table, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k)
    return _compute(checked, softmax_scale, left, softcap), None


def torch_varlen(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """`torch.nn.attention.varlen.varlen_attn` of torch 2.13, over FlashAttention 2."""
    demand(block_table is not None, "block_table: unpaged")
    demand(seqused_k is not None, "seqused_k: needed with block_table")
    demand(cu_seq_k is not None, "cu_seq_k: needed by FlashAttention 2")
    demand(enable_gqa or query.shape[1] == key.shape[2], "enable_gqa: heads differ")
    _check_pages(key, block_table, cu_seq_q, multiple_of=FA2_PAGE)
    check_index("cu_seq_k", cu_seq_k, (len(cu_seq_q),))
    check_index("seqused_k", seqused_k, (len(cu_seq_q) - 1,))
    demand(torch.equal(cu_seq_k.diff(), seqused_k), "cu_seq_k: not the lengths of seqused_k")
    left, right = window_size
    demand(right == 0, "window_size: not causal")
    checked = (query, key, value, block_table, cu_seq_q, seqused_k, max_q, max_k)
    return _compute(checked, scale, None if left < 0 else left, 0.0)


def check_index(name, tensor, shape):
    demand(tensor.dtype == torch.int32, f"{name}: int32")
    demand(tuple(tensor.shape) == shape, f"{name}: shape")
    demand(tensor.is_contiguous(), f"{name}: contiguous")


def _check_pages(k, table, cu_seqlens_q, multiple_of):
    check_index("cu_seqlens_q", cu_seqlens_q, (len(cu_seqlens_q),))
    demand(cu_seqlens_q[0] == 0, "cu_seqlens_q: begins at 0")
    demand(k.ndim == 4, "k: pages, page size, heads, head size")
    demand(k.shape[1] % multiple_of == 0, f"k: pages of a multiple of {multiple_of}")
    demand(table.dtype == torch.int32, "block_table: int32")
    demand(table.shape[:-1] == (len(cu_seqlens_q) - 1,), "block_table: shape")
    demand(table.stride(-1) == 1, "block_table: contiguous in the last dimension")


def _compute(arguments, scale, left, softcap):
    """The packed attention of all requests; demands what all kernels do of tensors and bounds."""
    q, k, v, table, cu_seqlens_q, lengths, max_q, max_k = arguments
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        demand(tensor.dtype in (torch.float16, torch.bfloat16), f"{name}: half precision")
        demand(tensor.dtype == q.dtype, f"{name}: one dtype")
        demand(tensor.stride(-1) == 1, f"{name}: contiguous in the last dimension")
    demand(q.ndim == 3, "q: tokens, heads, head size")
    demand(k.shape == v.shape, "v: shape")
    demand(q.shape[2] == k.shape[3], "q: head size")
    demand(q.shape[2] % 8 == 0, "q: head size a multiple of 8")
    demand(q.shape[2] <= 256, "q: head size up to 256")
    demand(q.shape[1] % k.shape[2] == 0, "q: heads")
    demand(cu_seqlens_q[-1] == len(q), "cu_seqlens_q: ends at the last token")
    demand(type(max_q) is int, "max_seqlen_q: an int")
    demand(type(max_k) is int, "max_seqlen_k: an int")
    demand(int(cu_seqlens_q.diff().max()) <= max_q, "max_seqlen_q: a bound")
    demand(int(lengths.max()) <= max_k, "max_seqlen_k: a bound")
    demand(scale is not None, "softmax_scale: the layer's, not the default")
    output = torch.empty_like(q)
    bounds = cu_seqlens_q.tolist()
    for i, length in enumerate(lengths.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        num_pages = -(-length // k.shape[1])
        pages = table[i, :num_pages].long()
        demand(len(pages) == num_pages, "block_table: too narrow")
        # as the kernels do: whole pages, and what is behind the end gets a weight of 0
        keys, values = k[pages].flatten(0, 1), v[pages].flatten(0, 1)
        output[rows] = _one(q[rows], (keys, values), length, scale, left, softcap)
    return output


def _one(q, pages, length, scale, left, softcap):
    keys, values = pages
    group = q.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, 1)
    values = values.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(keys))
    last = torch.arange(length - len(q), length).unsqueeze(1)
    visible = position <= last
    if left is not None:
        visible &= position >= last - left
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
