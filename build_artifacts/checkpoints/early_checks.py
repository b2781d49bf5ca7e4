"""Checks of a model by its config alone, before its weights are downloaded."""

from __future__ import annotations

from build_artifacts.checkpoints.architectures import load_config
from build_artifacts.checkpoints.checkpoint import Checkpoint, check_modules
from build_artifacts.checkpoints.decoders import check_decoder
from build_artifacts.checkpoints.encoder_decoders import check_encoder_decoder
from build_artifacts.checkpoints.encoders import check_encoder
from build_artifacts.checkpoints.rerankers import states_use_of_output
from build_artifacts.checkpoints.text_models import is_reduced_to_text, load_text_config
from deployments.artifacts.types import TEXT2TEXT_TASKS, ModelHead
from deployments.tasks import find_head


def check_architecture(checkpoint: Checkpoint, tasks: tuple[str, ...]) -> None:
    """Raise UnsupportedModel if no build of `tasks` takes the architecture.

    The checkpoint has no adapter, and may lack its weights. Their quantization is left to the
    build, which converts some formats first.
    """
    head, weights = find_head(tasks[0]), checkpoint.weights
    if head in (ModelHead.VECTOR, ModelHead.SPARSE):
        check_modules(checkpoint.directory, sparse=head is ModelHead.SPARSE)
    is_text_model = is_reduced_to_text(checkpoint)
    config = load_text_config(weights) if is_text_model else load_config(weights)
    config.__dict__.pop("quantization_config", None)
    if is_text_model or (head is ModelHead.NEXT_TOKEN and tasks[0] not in TEXT2TEXT_TASKS):
        check_decoder(config)
    elif head is ModelHead.NEXT_TOKEN:
        check_encoder_decoder(config, tasks[0])
    else:
        check_encoder(config, head, pooled=states_use_of_output(checkpoint, tasks[0]))
