"""Operators of cache fusion: row attention, key re-rotation and token scores.

The package imports nothing of the engine and can be used alone. :mod:`fused_kv_kernels.reference`
specifies every operator in plain torch; the functions exported here are the fast paths and are tested
against it.
"""

from __future__ import annotations

from .batched_rows import batched_row_attention
from .chunk_views import ChunkView, LayerRotations, SequenceView, SharedChunk
from .decode_attention import DecodeCaches, decode_attention
from .decode_views import DecodeViews, decode_views
from .decoder_layer import few_row_heads, few_row_mlp
from .decoder_stack import LayerWeights, decode_layers
from .dispatch import UnsupportedOperandsError
from .eight_bit import eight_bit_attended_mlp, eight_bit_gated_mlp, eight_bit_linears
from .eight_bit_attention import eight_bit_row_attention, has_eight_bit_attention
from .elementwise import gated_silu, residual_norm, rms_norm, rotate_rows_
from .kv_change import add_change, compress_rows
from .kv_deviation import kv_deviation
from .linears import few_row_linears, float_linear
from .native import Norm, why_not_native
from .paged_rows import paged_row_attention
from .pages import PageTable, SharedPages
from .place_chunks import ChunkStack, place_chunks
from .rotate import RotationTable, rerotate_keys, rotation_table
from .rounded_weights import EightBitWeights, eight_bit_weights, has_eight_bit_linears, quantize_rows
from .row_attention import row_attention
from .row_plan import RowPlan
from .shift_chunks import ChunkShift, ShiftStack, shift_chunks
from .token_scores import token_scores
from .transfer import TransferPlan, deviation_vectors, transfer_deviation

__all__ = [
    "ChunkShift",
    "ChunkStack",
    "ChunkView",
    "DecodeCaches",
    "DecodeViews",
    "EightBitWeights",
    "LayerRotations",
    "LayerWeights",
    "Norm",
    "PageTable",
    "RotationTable",
    "RowPlan",
    "SequenceView",
    "SharedChunk",
    "SharedPages",
    "ShiftStack",
    "TransferPlan",
    "UnsupportedOperandsError",
    "add_change",
    "batched_row_attention",
    "compress_rows",
    "decode_attention",
    "decode_layers",
    "decode_views",
    "deviation_vectors",
    "eight_bit_attended_mlp",
    "eight_bit_gated_mlp",
    "eight_bit_linears",
    "eight_bit_row_attention",
    "eight_bit_weights",
    "few_row_heads",
    "few_row_linears",
    "few_row_mlp",
    "float_linear",
    "gated_silu",
    "has_eight_bit_attention",
    "has_eight_bit_linears",
    "kv_deviation",
    "paged_row_attention",
    "place_chunks",
    "quantize_rows",
    "rerotate_keys",
    "residual_norm",
    "rms_norm",
    "rotate_rows_",
    "rotation_table",
    "row_attention",
    "shift_chunks",
    "token_scores",
    "transfer_deviation",
    "why_not_native",
]
