"""One error of each kind that a request can meet, as it is told: for the documentation."""

from __future__ import annotations

from deployments.errors import (
    ArtifactMissing,
    BodyTooLarge,
    BodyTooSlow,
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    MalformedBody,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    UnknownModel,
    UnknownParameter,
    UnsupportedEncoding,
    WrongTask,
)

_NO_MODEL = UnknownModel("Model org/name does not exist", field="model")
_REFUSED = ArtifactMissing("Model org/name is refused: nothing was built under this id")
_LOADING = ModelLoading("Model org/name is currently loading", estimated_time_s=20.0)

# Wherever a model is named in the path.
OF_MODELS: tuple[ServeError, ...] = (_NO_MODEL, _REFUSED, _LOADING)

# Wherever a body is read.
OF_BODIES: tuple[ServeError, ...] = (
    MalformedBody("the body is not JSON in UTF-8", field="body"),
    InvalidField("Error in `inputs`: field required", field="inputs"),
    EmptyInput("`inputs` is empty", field="inputs"),
    WrongTask("Model org/name cannot do `fill-mask`", field="task"),
    HardwareUnavailable("`gpu` was asked for, and there is none", field="options.use_gpu"),
    _NO_MODEL,
    BodyTooSlow("the body took more than 20 seconds", field="body"),
    BodyTooLarge("the body has more than the 2000000 bytes that are read", field="body"),
    UnsupportedEncoding("this `content-encoding` is not read here", field="content-encoding"),
    UnknownParameter("`parameters.topk` is not known here", field="parameters.topk"),
    TooManyItems("`inputs` has 5000 items; at most 1024 are taken", field="inputs"),
    InputTooLong("`inputs[3]` has 700 tokens, the model reads 512", field="inputs[3]"),
    Overloaded("Model is overloaded"),
    EngineFailed("the engine failed"),
    _REFUSED,
    _LOADING,
    DeadlineExceeded("the request took more than 30 seconds"),
)
