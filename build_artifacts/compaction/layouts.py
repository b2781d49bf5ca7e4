"""Module names of attention and feed-forward networks by architecture.

Not supported: ALBERT (layers share weights), gated feed-forward networks and fused projections
(ModernBERT, NomicBERT, GTE), bottlenecks (MobileBERT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureLayout:
    """Module paths of an architecture, relative to a layer; `layers` is relative to the encoder.

    Head h of width w owns rows h * w to (h + 1) * w - 1 of each projection. In `attention_output`,
    it owns the columns of these numbers.
    """

    layers: str = "encoder.layer"
    attention: str = "attention.self"  # module with the number of heads
    scores: tuple[str, ...] = ("attention.self.query", "attention.self.key")
    # Further query and key projections, which some configs disable.
    optional_scores: tuple[str, ...] = ()
    value: str = "attention.self.value"
    attention_output: str = (
        "attention.output.dense"  # projects the heads' outputs to the hidden size
    )
    ffn_up: str = "intermediate.dense"
    activation: str = "intermediate.intermediate_act_fn"
    ffn_down: str = "output.dense"
    # Attributes of `attention`: number of heads, width of a head, and their product.
    heads: str = "num_attention_heads"
    head_width: str = "attention_head_size"
    all_heads_width: str = "all_head_size"
    # Index of a positional argument of `attention` with one slice per head, [B, heads, T, T].
    per_head_argument: int | None = None


_BERT = ArchitectureLayout()

_DISTILBERT = ArchitectureLayout(
    layers="transformer.layer",
    attention="attention",
    scores=("attention.q_lin", "attention.k_lin"),
    value="attention.v_lin",
    attention_output="attention.out_lin",
    ffn_up="ffn.lin1",
    activation="ffn.activation",
    ffn_down="ffn.lin2",
    heads="n_heads",
    all_heads_width="dim",
)

_MPNET = replace(
    _BERT,
    attention="attention.attn",
    scores=("attention.attn.q", "attention.attn.k"),
    value="attention.attn.v",
    attention_output="attention.attn.o",
    per_head_argument=2,  # relative position bias, computed once for all layers
)

_DEBERTA_V2 = replace(
    _BERT,
    scores=("attention.self.query_proj", "attention.self.key_proj"),
    optional_scores=("attention.self.pos_key_proj", "attention.self.pos_query_proj"),
    value="attention.self.value_proj",
)

# Layout by `model_type` of config.json.
LAYOUTS: Mapping[str, ArchitectureLayout] = {
    "bert": _BERT,
    "camembert": _BERT,
    "data2vec-text": _BERT,
    "deberta-v2": _DEBERTA_V2,
    "distilbert": _DISTILBERT,
    "electra": _BERT,
    "ernie": _BERT,
    "megatron-bert": _BERT,
    "mpnet": _MPNET,
    "rembert": _BERT,
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT,
    "splinter": _BERT,
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": _BERT,
}
