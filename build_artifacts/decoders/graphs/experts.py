"""Mixtures of experts: the router of a layer, and the operator that applies its experts.

Modules have the names of Qwen's in transformers: `gate` is the router, `experts` are the MLPs of
which it selects a few per token, and `shared_expert` is an MLP for all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.block_weights import EXPERTS
from build_artifacts.decoders.graphs.config_flags import ConfigFlag, always, read_activation
from build_artifacts.decoders.graphs.expert_weights import find_experts
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.errors import UnsupportedModel
from build_artifacts.graph_nodes import ORT_DOMAIN

_NOT_SELECTED = -1e30  # router logit of an expert that is not selected
_STEEPNESS = 1e6  # of a sigmoid that is a step function


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts of a family: the selection of experts, their form and their storage."""

    # Whether the weights of the selected experts are scaled to a sum of 1.
    normalized: ConfigFlag = always
    # Function of the logits, to whose results a stored bias is added for the selection, but not for
    # the weights. None: softmax without a bias.
    corrected: Literal["Softmax", "Sigmoid"] | None = None
    # Config field with a factor of the experts' output.
    factor: str | None = None
    # Config field with the noise of the router in training. Phi-3.5-MoE selects two experts by it
    # (https://arxiv.org/abs/2409.12136): the softmax leaves out logits that are below the best one
    # by more than twice the noise, as a share of the larger of both. None: another selection.
    noise: str | None = None
    # Whether gate and up projection are clamped and the latter is raised by 1, as in GPT-OSS.
    clamped: bool = False
    transposed: bool = False  # whether tensors with the weights of all experts are [.., in, out]
    # Whether experts have no gate and compute relu(up)². The operator has gates only, so the up
    # projection is stored as the gate, too: up² times a steep sigmoid of up differs from relu(up)²
    # by less than 1e-12.
    squared: bool = False


class ExpertLayer(NamedTuple):
    """Experts of one layer of a checkpoint."""

    graph: GraphWriter
    config: TransformersConfig
    experts: Experts
    name: str  # name of the module with router and experts
    number: int  # index of the layer

    def apply(self, hidden: Value) -> Value:
        """Apply the selected experts to each token: [B, T, D] -> [B, T, D].

        Raises UnsupportedModel for an unsupported activation or routing, or a missing tensor.
        """
        self._check()
        graph, gate = self.graph, f"{self.name}.gate"
        weights = find_experts(
            graph.weights,
            f"{self.name}.experts",
            graph.weights.shape(f"{gate}.weight")[0],
            transposed=self.experts.transposed,
            gated=not self.experts.squared,
        )
        rows = graph.op("Reshape", hidden, graph.constant([-1, weights.outer_shape[1]]))
        # The router is a Gemm, because quantizers replace MatMuls only: a small error of a logit
        # would select another expert.
        router = [graph.stored(f"{gate}.weight"), self._optional(f"{gate}.bias")]
        logits = graph.op("Gemm", rows, *router, name=gate, transB=1)
        logits, factor = self._route(logits)
        computed = graph.op(
            EXPERTS,
            rows,
            logits,
            graph.weight(f"{weights.name}.gate_up", weights.inner_shape, weights.read_inner),
            self._optional(f"{weights.name}.gate_up_proj_bias"),
            graph.weight(f"{weights.name}.down", weights.outer_shape, weights.read_outer),
            self._optional(f"{weights.name}.down_proj_bias"),
            name=weights.name,
            domain=ORT_DOMAIN,
            k=self._selected,
            normalize_routing_weights=1,  # QMoE normalizes in any case
            activation_type="swiglu",
            swiglu_fusion=1,  # rows of gate and up projection alternate
            **self._activation,
        )
        if factor is not None:
            computed = graph.op("Mul", computed, factor)
        return graph.op("Reshape", computed, graph.op("Shape", hidden))

    @property
    def _selected(self) -> int:
        """Number of experts per token."""
        if self.experts.noise is not None:
            return 2  # the method is for two experts; transformers ignores the config, too
        selected: int | list[int] = self.config.num_experts_per_tok  # some configs list the layers
        return selected if isinstance(selected, int) else selected[self.number]

    @property
    def _activation(self) -> dict[str, float]:
        """Attributes of silu(gate) x up, of GPT-OSS's variant of it, or of relu(up)²."""
        if self.experts.squared:
            return {"activation_alpha": _STEEPNESS, "activation_beta": 0.0}
        if not self.experts.clamped:
            return {"activation_alpha": 1.0, "activation_beta": 0.0}
        return {
            "activation_alpha": self.config.swiglu_alpha,
            "activation_beta": 1.0,
            "swiglu_limit": self.config.swiglu_limit,
        }

    def _optional(self, name: str) -> Value | None:
        """Return a checkpoint tensor, if there is one."""
        return self.graph.stored(name) if name in self.graph.weights else None

    def _route(self, logits: Value) -> tuple[Value, Value | None]:
        """Return logits for the operator, [tokens, experts], and the factor of its output, if any.

        The operator selects the experts with the largest logits. Their weights are the softmax of
        these logits.
        """
        graph, experts = self.graph, self.experts
        if experts.noise is not None:
            return self._select_one_by_one(logits)
        if experts.corrected is not None:
            logits = self._correct(graph.op(experts.corrected, logits))
        factor = None
        if experts.factor is not None:
            factor = graph.constant(float(getattr(self.config, experts.factor)))
        if not experts.normalized(self.config):
            best = self._find_largest(graph.op("Softmax", logits))
            total = graph.op("ReduceSum", best, graph.constant([-1]), keepdims=1)
            return logits, total if factor is None else graph.op("Mul", total, factor)
        return logits, factor

    def _select_one_by_one(self, logits: Value) -> tuple[Value, Value]:
        """Select the best expert, then the best of the others; do the same as `_route`.

        The weight of each is its share in a softmax of its own.
        """
        graph = self.graph
        limit = graph.constant(2 * float(getattr(self.config, str(self.experts.noise))))
        lowest, last = graph.constant(-np.inf), graph.constant([-1])
        left, routed, weights = logits, graph.constant(_NOT_SELECTED), []
        for _ in range(self._selected):
            best = graph.op("ReduceMax", left, last, keepdims=1)
            size = graph.op("Max", graph.op("Abs", logits), best)
            distance = graph.op("Div", graph.op("Sub", best, logits), size)
            near = graph.op("Where", graph.op("Greater", distance, limit), lowest, left)
            is_best = graph.op("Equal", left, best)
            share = graph.op("ReduceMax", graph.op("LogSoftmax", near, axis=-1), last, keepdims=1)
            routed = graph.op("Where", is_best, share, routed)
            weights.append(graph.op("Exp", share))
            left = graph.op("Where", is_best, lowest, left)
        return routed, graph.op("Add", *weights)

    def _correct(self, scores: Value) -> Value:
        """Select by corrected scores; return logits for the plain scores, [tokens, experts].

        The softmax of logarithms is the scores divided by their sum.
        """
        graph = self.graph
        bias = self._optional(f"{self.name}.gate.e_score_correction_bias")
        corrected = scores if bias is None else graph.op("Add", scores, bias)
        best = self._find_largest(corrected)
        least = graph.op("ReduceMin", best, graph.constant([-1]), keepdims=1)
        is_selected = graph.op("GreaterOrEqual", corrected, least)
        logits = graph.op("Log", scores)
        return graph.op("Where", is_selected, logits, graph.constant(_NOT_SELECTED))

    def _find_largest(self, scores: Value) -> Value:
        """Return as many of the largest scores as experts are selected: [tokens, selected]."""
        largest, _ = self.graph.multi_output_op(
            "TopK", 2, scores, self.graph.constant([self._selected])
        )
        return largest

    def _check(self) -> None:
        config, model_type = self.config, self.config.model_type
        activation = read_activation(config)
        supported = ("relu2",) if self.experts.squared else ("silu", "swish")
        if activation not in supported:
            raise UnsupportedModel(
                f"experts with the activation `{activation}` are not supported",
                hint=f"ONNX Runtime's operator for experts can compute `{supported[0]}` for them",
            )
        # A field counts only if the config class declares it: transformers ignores all others.
        if hasattr(type(config), "n_group") and config.n_group not in (None, 1):
            raise UnsupportedModel(
                f"`n_group` of the architecture `{model_type}` is {config.n_group}; the "
                "selection of experts in groups is not supported",
                hint="use a model of this architecture with one group",
            )
        if self.experts.corrected and not self.experts.normalized(config):
            raise UnsupportedModel(
                f"`norm_topk_prob` of the architecture `{model_type}` is false, which is not "
                "supported together with a correction of the scores",
                hint="use a model of this architecture with `norm_topk_prob`",
            )
