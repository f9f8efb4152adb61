"""Native CPU operators for bfloat16 and float32, prebuilt in the wheel or compiled on the machine that runs them."""

from __future__ import annotations

from .attention import (
    eight_bit_attention_scratch,
    native_eight_bit_attention,
    native_row_attention,
    native_token_scores,
    row_attention_scratch,
)
from .decoder_stack import native_decode_layers
from .decoding import cache_table, decode_attention_scratch, native_decode_attention
from .eight_bit_layers import (
    ByteOperands,
    ByteSizes,
    byte_panels,
    byte_rows,
    byte_sizes,
    native_eight_bit_linear,
    native_eight_bit_mlp,
)
from .elementwise import (
    Norm,
    native_compress_rows,
    native_gated_silu,
    native_quantize_gated,
    native_quantize_rows,
    native_residual_norm,
    native_rms_norm,
    native_rotate_rows,
    native_scale_rows,
    takes_rows,
)
from .library import native_library, why_not_native
from .linears import (
    is_dense_as,
    most_linear_rows,
    native_float_linear,
    native_gated_mlp,
    native_heads,
    native_linears,
    takes_linears,
)
from .moving import (
    Table,
    chunk_table,
    int8_chunk_table,
    native_add_change,
    native_place_chunks,
    native_shift_chunks,
    native_transfer,
    shift_table,
)
from .operands import supports, supports_int8_rows, supports_rows
from .processor import processor_features
from .views import ViewTables, native_decode_views, view_tables

__all__ = [
    "ByteOperands",
    "ByteSizes",
    "Norm",
    "Table",
    "ViewTables",
    "byte_panels",
    "byte_rows",
    "byte_sizes",
    "cache_table",
    "chunk_table",
    "decode_attention_scratch",
    "eight_bit_attention_scratch",
    "int8_chunk_table",
    "is_dense_as",
    "most_linear_rows",
    "native_add_change",
    "native_compress_rows",
    "native_decode_attention",
    "native_decode_layers",
    "native_decode_views",
    "native_eight_bit_attention",
    "native_eight_bit_linear",
    "native_eight_bit_mlp",
    "native_float_linear",
    "native_gated_mlp",
    "native_gated_silu",
    "native_heads",
    "native_library",
    "native_linears",
    "native_place_chunks",
    "native_quantize_gated",
    "native_quantize_rows",
    "native_residual_norm",
    "native_rms_norm",
    "native_rotate_rows",
    "native_row_attention",
    "native_scale_rows",
    "native_shift_chunks",
    "native_token_scores",
    "native_transfer",
    "processor_features",
    "row_attention_scratch",
    "shift_table",
    "supports",
    "supports_int8_rows",
    "supports_rows",
    "takes_linears",
    "takes_rows",
    "view_tables",
    "why_not_native",
]
