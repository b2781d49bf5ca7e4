"""Resolution of a request to a model and a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME
from deployments.errors import InvalidField, WrongTask
from deployments.ingress.models.permitted_models import PermittedModels
from deployments.ingress.requests import InferenceRequest
from deployments.registry import ModelRegistry, RegisteredModel
from deployments.tasks import TASKS

DetectTask = Callable[[RegisteredModel], str | None]


class ModelSelection(NamedTuple):
    """A model, and the task that the request names or its body determines.

    `task` None means the first task of the model.
    """

    model: RegisteredModel
    task: str | None


class RequestResolver:
    """Resolver that finds the model and the task of a request."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry = registry
        self.permitted = PermittedModels(registry)

    def select(
        self, request: InferenceRequest, *, may_generate: bool = False, wants_text: bool = False
    ) -> ModelSelection:
        """Select the requested model, else a default model.

        `may_generate` lets a generative model be the default even if there are encoder models.
        `wants_text` is whether only a generative model can answer the request. Raises Forbidden,
        UnknownModel, ArtifactError or InvalidField.
        """
        detect = task_detector(request)
        if request.model_id:
            model = self.permitted.find(request.model_id)
        elif may_generate and (generator := self._default_generator(request, detect, wants_text)):
            model = generator
        else:
            model = self._default_model(request, detect)
        return ModelSelection(model, detect(model))

    def find_generator(self, model_id: str | None, *, for_chat: bool = False) -> RegisteredModel:
        """Return the requested generative model, or a default model.

        The default is the first decoder-only model. With `for_chat`, it must have a chat template.
        If no such model exists, the default is the first generative model.

        Raises Forbidden, UnknownModel or ArtifactError. Raises WrongTask if the requested model is
        not generative, or if no model is generative.
        """
        if model_id is None:
            generators = self._generators()
            for model in generators:
                if not has_encoder(model) and (has_chat_template(model) or not for_chat):
                    return model
            if generators:
                return generators[0]
            raise WrongTask("no served model generates text; `/v1/models` lists their tasks")
        model = self.permitted.find(model_id)
        if not model.is_generative:
            raise WrongTask(
                f"Model {model_id} generates no text. Its tasks: {format_tasks(model)}",
                field="model",
            )
        return model

    def _generators(self) -> list[RegisteredModel]:
        return [model for model in self.permitted.open_models() if model.is_generative]

    def _default_generator(
        self, request: InferenceRequest, detect: DetectTask, wants_text: bool
    ) -> RegisteredModel | None:
        """Return the default generative model; None if the default is an encoder model.

        A request that names a task gets no generative model by default.

        With `wants_text` and one text, the default is the first generative model. For any other
        request it is the first of all models, under two conditions: this model is generative, and
        the body fits no task of an encoder model.
        """
        generators = self._generators()
        if request.task is not None or not generators:
            return None
        if wants_text and isinstance(request.inputs, str):
            return generators[0]
        first, *_ = models = list(self.permitted.open_models())
        fits_encoder = any(detect(model) for model in models if not model.is_generative)
        return first if first.is_generative and not fits_encoder else None

    def _default_model(self, request: InferenceRequest, detect: DetectTask) -> RegisteredModel:
        """Return the first encoder model whose head is made for the task.

        Without one, return the first encoder model that supports the task. If the request names no
        task and its inputs match none, return the first encoder model. If it names no task and all
        models are generative, return the first model: tokenization can use it, and inference raises
        WrongTask with the routes of generative models. Raises InvalidField if no model fits.
        """
        every = list(self.permitted.open_models())
        models = [model for model in every if not model.is_generative]
        if request.task is None and every and not models:
            return every[0]
        if request.task is not None:
            models = [model for model in models if request.task in model.tasks]
        if not models:
            raise InvalidField("`model` is required: no default model fits", field="model")
        detected = [model for model in models if detect(model) is not None]
        native = [model for model in detected if has_native_head(model, detect(model))]
        return (native or detected or models)[0]


def has_encoder(model: RegisteredModel) -> bool:
    """Return whether a generative model is an encoder-decoder model."""
    generation_config = model.manifest.generation_config
    return generation_config is not None and generation_config.encoder_decoder is not None


def has_chat_template(model: RegisteredModel) -> bool:
    return CHAT_TEMPLATE_NAME in model.manifest.files


def task_detector(request: InferenceRequest) -> DetectTask:
    """Return a function that finds the request's task for a model.

    The request names the task, or its inputs and parameters determine it. The function returns None
    if neither holds. Parameters and inputs are checked only once per task.
    """
    known: dict[str, bool] = {}

    def matches(task: str) -> bool:
        if task not in known:
            known[task] = TASKS[task].matches(request.inputs, request.parameters)
        return known[task]

    def detect(model: RegisteredModel) -> str | None:
        if request.task is not None or model.is_generative:
            return request.task
        return next(filter(matches, model.tasks), None)

    return detect


def has_native_head(model: RegisteredModel, task: str | None) -> bool:
    return task is not None and model.manifest.head is TASKS[task].head


def resolve_task(selection: ModelSelection) -> str:
    """Return the selected task, by default the model's first task.

    Raises WrongTask for a generative model or an unsupported task.
    """
    if selection.model.is_generative:
        raise wrong_route_error(selection.model)
    if selection.task is None:
        return selection.model.tasks[0]
    return require_task(selection.task, selection.model)


def require_task(task: str, model: RegisteredModel) -> str:
    """Return `task` if the model supports it, else raise WrongTask with the model's tasks."""
    if task not in model.tasks:
        raise WrongTask(
            f"Model {model.ref.id} cannot do `{task}`. Its tasks: {format_tasks(model)}",
            field="model",
        )
    return task


def format_tasks(model: RegisteredModel) -> str:
    return ", ".join(f"`{task}`" for task in model.tasks)


def wrong_route_error(model: RegisteredModel) -> WrongTask:
    """Build the error for a generative model on a route for encoder models."""
    return WrongTask(
        f"Model {model.ref.id} generates text. Call /v1/chat/completions, /v1/responses, "
        "/v1/completions, /generate or /models/{id}",
        field="model",
    )
