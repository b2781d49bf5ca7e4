"""The one error tree. Every failure the service has a name for carries its own answer.

    ServeError                      500
    ├── BadSetting                  500  configuration that cannot work
    ├── MalformedBody               400  not JSON, not UTF-8, not an object
    ├── InvalidField                400  missing, of the wrong type or out of range
    ├── EmptyInput                  400
    ├── WrongTask                   400  the model cannot do this task
    ├── HardwareUnavailable         400  the encoder asked for does not exist here
    ├── UnknownModel, UnknownRoute  404
    ├── MethodNotAllowed            405
    ├── BodyTooSlow                 408
    ├── BodyTooLarge                413  also once it is inflated
    ├── UnsupportedEncoding         415
    ├── UnknownParameter            422
    ├── TooManyItems, InputTooLong  422
    ├── UnknownToken                422
    ├── Overloaded                  429  nothing was computed, try again later
    ├── EngineFailed                500
    │   └── EngineLost              it answers nothing any more
    ├── ModelLoading                503  the encoder is starting
    ├── ArtifactError               503  a sealed model that must not be trusted
    │   ├── ArtifactMissing, ManifestInvalid, ManifestTooNew
    │   └── UnknownTask, DigestMismatch, PathOutsideArtifact
    └── DeadlineExceeded            504

`code` is a stable word clients may match on; the sentence may change.
"""

from __future__ import annotations

from typing import Any


class ServeError(Exception):
    """Root of the tree.

    `field` names the part of the request that is at fault, as a path such as `inputs[3]`.
    `retry_after_s` becomes the `Retry-After` header. Instances cross process borders by value.
    """

    status: int = 500
    code: str = "internal"
    retryable: bool = False
    retry_after_s: float | None = None
    recorded: bool = False  # among the requests that the metrics count

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(kind: type[ServeError], message: str, state: dict[str, Any]) -> ServeError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class BadSetting(ServeError):
    """A setting that cannot work; refused where it is parsed."""

    code = "bad_setting"


class MalformedBody(ServeError):
    """The body is not one JSON object in UTF-8."""

    status, code = 400, "malformed_body"


class InvalidField(ServeError):
    """A field is missing, of the wrong type or out of its range."""

    status, code = 400, "invalid_field"


class EmptyInput(ServeError):
    """There is nothing to compute."""

    status, code = 400, "empty_input"


class WrongTask(ServeError):
    """The model exists but was not built for this task."""

    status, code = 400, "wrong_task"


class HardwareUnavailable(ServeError):
    """The request insists on hardware this cluster does not have."""

    status, code = 400, "hardware_unavailable"


class UnknownModel(ServeError):
    """No model of this name is configured."""

    status, code = 404, "model_not_found"


class UnknownRoute(ServeError):
    """No such path."""

    status, code = 404, "route_not_found"


class MethodNotAllowed(ServeError):
    """The path exists, not with this method."""

    status, code = 405, "method_not_allowed"


class BodyTooSlow(ServeError):
    """The body did not arrive within the time one request has for it."""

    status, code = 408, "body_too_slow"


class BodyTooLarge(ServeError):
    """More bytes than one request may have, as sent or inflated."""

    status, code = 413, "body_too_large"


class UnsupportedEncoding(ServeError):
    """The body is compressed in a way that is not read here."""

    status, code = 415, "unsupported_encoding"


class TooManyItems(ServeError):
    """More texts than one request may have."""

    status, code = 422, "too_many_items"


class UnknownParameter(ServeError):
    """A parameter the task does not know; ignoring it would hide a typing error."""

    status, code = 422, "unknown_parameter"


class InputTooLong(ServeError):
    """A text longer than the model reads, and truncation was not asked for."""

    status, code = 422, "input_too_long"


class UnknownToken(ServeError):
    """A token id that is not in the model's vocabulary."""

    status, code = 422, "unknown_token"


class Overloaded(ServeError):
    """A waiting line is full. Nothing was computed; trying again later is safe."""

    status, code, retryable, retry_after_s = 429, "overloaded", True, 1.0


class EngineFailed(ServeError):
    """The engine gave up on a batch."""

    code = "engine_failed"


class EngineLost(EngineFailed):
    """The engine has ended: it answers no further call, and the replica is to be replaced."""


class ModelLoading(ServeError):
    """The encoder is starting and the request did not want to wait for it."""

    status, code, retryable = 503, "model_loading", True

    def __init__(self, message: str, *, estimated_time_s: float) -> None:
        super().__init__(message)
        self.estimated_time_s = estimated_time_s
        self.retry_after_s = estimated_time_s


class DeadlineExceeded(ServeError):
    """The request's time was over before it was answered."""

    status, code, retryable = 504, "deadline_exceeded", True


class ArtifactError(ServeError):
    """A sealed artifact that cannot be served."""

    status, code = 503, "artifact_unusable"


class ArtifactMissing(ArtifactError):
    """Nothing was built under this id and version."""

    code = "artifact_missing"


class ManifestInvalid(ArtifactError):
    """The manifest cannot be read or breaks its schema."""

    code = "manifest_invalid"


class ManifestTooNew(ArtifactError):
    """The manifest was written by a newer release."""

    code = "manifest_too_new"


class UnknownTask(ArtifactError):
    """The manifest names a task this release does not serve."""

    code = "unknown_task"


class DigestMismatch(ArtifactError):
    """A file is not the one that was sealed."""

    code = "digest_mismatch"


class PathOutsideArtifact(ArtifactError):
    """A path leads out of the artifact's own directory."""

    code = "path_outside_artifact"
