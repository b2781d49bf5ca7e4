"""The errors of the service. Each class defines its HTTP status, code and retry behavior.

Errors of one API, of grammars and of commands are defined beside what raises them.

    ServeError                      500
    ├── BadSetting                  500  configuration that cannot work
    ├── MalformedBody               400  not JSON, not UTF-8, not an object
    ├── InvalidField                400  missing, of the wrong type or out of range
    ├── EmptyInput                  400
    ├── WrongTask                   400  the model does not support the task
    ├── HardwareUnavailable         400  the cluster lacks the requested hardware
    ├── Unauthorized                401  no valid API key
    ├── Forbidden                   403  the key does not permit this
    ├── UnknownModel, UnknownRoute  404
    ├── BuildFailed                 404  the store lacks the model because its build failed
    ├── MethodNotAllowed            405
    ├── BodyTooSlow                 408
    ├── ModelInUse                  409  the model cannot be removed now
    ├── BodyTooLarge                413  as sent or after decompression
    ├── UnsupportedEncoding         415
    ├── UnknownParameter            422
    ├── TooManyItems, InputTooLong  422
    ├── UnknownToken                422
    ├── Overloaded                  429  a queue is full, nothing was computed
    │   └── RateLimited                  the API key has used its limit
    ├── ClientDisconnected          499  the client left before its answer
    ├── EngineFailed                500
    │   ├── EngineLost              the engine must be replaced
    │   └── RequirementMissing      this host or its settings cannot run the model
    ├── ModelLoading                503  the deployment is starting, or the model is being built
    ├── ModelUnavailable            503  the model keeps failing, or no memory is free for it
    ├── ReplicasLost                503  replicas ended during the request
    ├── ReplicasSilent              503  no replica answers
    ├── StoreNotWritable            503  the disk of the store is full or read-only
    ├── PlanUnusable                503  the file of the plan is damaged or cannot be accessed
    ├── ArtifactError               503  a sealed model that must not be used
    │   ├── ArtifactMissing, LatestInvalid, ManifestInvalid, ManifestTooNew
    │   └── UnknownTask, DigestMismatch, PathOutsideArtifact
    └── DeadlineExceeded            504

Clients may match on `code`, which is stable. Messages may change. A class without a code of its own
has that of its base class. docs/reference.md lists the codes that clients get.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from deployments.error_causes import list_causes


class ServeError(Exception):
    """An unexpected failure. Only the log has its details. Base class of all errors.

    `field` is the path of the invalid part of the request, such as `inputs[3]`. `retry_after_s`
    becomes the `Retry-After` header. Instances are pickled between processes.
    """

    status: int = 500
    code: str = "internal"
    retryable: bool = False
    retry_after_s: float | None = None
    elsewhere: bool = False  # True: another replica may have room, or be able to run the model
    headers: Mapping[str, str] = MappingProxyType({})  # HTTP headers of the response

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return (rebuild_error, (type(self), self.__dict__.copy()))


def rebuild_error(kind: type[ServeError], state: dict[str, Any]) -> ServeError:
    """Rebuild a pickled error from its attributes, in the process that receives it."""
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class BadSetting(ServeError):
    """A setting of the server cannot work."""

    code = "bad_setting"


class MalformedBody(ServeError):
    """The body is not a JSON object in UTF-8."""

    status, code = 400, "malformed_body"


class InvalidField(ServeError):
    """A field is missing, of the wrong type or out of its range."""

    status, code = 400, "invalid_field"


class EmptyInput(ServeError):
    """The request has no input, or an empty one."""

    status, code = 400, "empty_input"


class WrongTask(ServeError):
    """The model does not support the task."""

    status, code = 400, "wrong_task"


class HardwareUnavailable(ServeError):
    """The request requires hardware that this cluster does not have."""

    status, code = 400, "hardware_unavailable"
    lacks_graph = False  # True: the cluster has the hardware, but the model has no graph for it


class Unauthorized(ServeError):
    """The request has no valid API key. The message never quotes the sent key."""

    status, code = 401, "invalid_api_key"
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class Forbidden(ServeError):
    """The API key is valid and does not permit this operation, model or device."""

    status, code = 403, "permission_denied"


class UnknownModel(ServeError):
    """The store has no model with this id, or the model has no such version."""

    status, code = 404, "model_not_found"
    # Id from the request, if the key permits the model. A request may wait for a build of it.
    model_id: str | None = None


class BuildFailed(ServeError):
    """The store lacks the model because its build failed. The message has the reason."""

    status, code = 404, "build_failed"


class UnknownRoute(ServeError):
    """No route has this path."""

    status, code = 404, "route_not_found"


class MethodNotAllowed(ServeError):
    """The path does not support this method."""

    status, code = 405, "method_not_allowed"


class BodyTooSlow(ServeError):
    """The body arrived slower than `limits.body_timeout_s` or `body_bytes_per_s` allow."""

    status, code = 408, "body_too_slow"


class ModelInUse(ServeError):
    """The model or version cannot be removed now. The message has the reason."""

    status, code = 409, "model_in_use"


class BodyTooLarge(ServeError):
    """The body exceeds `limits.body_bytes`, as sent or after decompression."""

    status, code = 413, "body_too_large"


class UnsupportedEncoding(ServeError):
    """The content encoding of the body is not supported."""

    status, code = 415, "unsupported_encoding"


class TooManyItems(ServeError):
    """The request has more texts than `limits.items`."""

    status, code = 422, "too_many_items"


class UnknownParameter(ServeError):
    """The task has no such parameter; ignoring it would hide a misspelled name."""

    status, code = 422, "unknown_parameter"


class InputTooLong(ServeError):
    """A text exceeds the limit of the model, and the request does not allow truncation."""

    status, code = 422, "input_too_long"


# Part of messages of InputTooLong. APIs without truncation omit it.
TRUNCATION_ADVICE = " or request truncation"


class UnknownToken(ServeError):
    """A token id is not in the vocabulary of the model."""

    status, code = 422, "unknown_token"


class Overloaded(ServeError):
    """A queue is full, or too long for the deadline. Nothing was computed; retrying is safe.

    `needed_s` is the predicted time of the request, if the queue is too long.
    """

    status, code, retryable, retry_after_s = 429, "overloaded", True, 1.0
    elsewhere = True
    needed_s: float | None = None
    from_queue: bool = False  # True: HAProxy may refuse similar requests (mark_queue_refusal)


def build_overloaded(
    message: str, retry_after_s: float, needed_s: float | None = None
) -> Overloaded:
    """Build the error of a full or too long queue. The client may retry after `retry_after_s`."""
    error = Overloaded(message)
    error.retry_after_s, error.needed_s = max(retry_after_s, 1.0), needed_s
    error.from_queue = True
    return error


class RateLimited(Overloaded):
    """The API key has reached one of its limits."""

    code = "rate_limit_exceeded"


class ClientDisconnected(ServeError):
    """The client left before its answer. No client gets this error, only metrics, log and spans."""

    status, code = 499, "client_disconnected"


class EngineFailed(ServeError):
    """A computation or a health check failed, or the replica was lost during an answer."""

    code = "engine_failed"


class EngineLost(EngineFailed):
    """The engine cannot be used again; the replica must be replaced."""


class RequirementMissing(EngineFailed):
    """This host lacks what the model needs, or its settings allow too little. The model is intact.

    Another host, or other settings, may run the model.
    """

    code = "requirement_missing"


def forget_frames(error: BaseException) -> None:
    """Remove the tracebacks of an error, its causes and its contexts. Call this after logging.

    An error is part of a reference cycle if a frame of its traceback has a variable that leads to
    the error. The frames also hold the request: its body, texts and tokens. Without this call, they
    stay in memory until the next garbage collection (host/python_gc.py).
    """
    for each in list_causes(error):
        each.__traceback__ = None


def hide_details(error: BaseException) -> ServeError:
    """Return the error to send to clients, without the text of exceptions of libraries.

    Exceptions of libraries may quote paths, tensors and texts, so they belong in the log only. An
    EngineFailed may quote the exception that caused it, so an EngineFailed with a cause is replaced
    too. Any other ServeError is returned unchanged.
    """
    is_foreign = isinstance(error, EngineFailed) and error.__cause__ is not None
    if isinstance(error, ServeError) and not is_foreign:
        return error
    kinds = (EngineLost, RequirementMissing)
    kind = next((each for each in kinds if isinstance(error, each)), EngineFailed)
    return kind("the model failed on this request; the log of its replica has the reason")


class ModelLoading(ServeError):
    """The deployment is starting, or the model is being built. The client should retry later.

    `estimated_time_s` is None while no finished build of the store permits an estimate.
    """

    status, code, retryable = 503, "model_loading", True

    def __init__(self, message: str, *, estimated_time_s: float | None) -> None:
        super().__init__(message)
        self.estimated_time_s = estimated_time_s
        self.retry_after_s = 10.0 if estimated_time_s is None else estimated_time_s


class ModelUnavailable(ServeError):
    """The model keeps failing and gets no calls for some seconds, or no memory is free for it."""

    status, code, retryable, retry_after_s = 503, "model_unavailable", True, 5.0
    elsewhere = True


class ReplicasLost(ServeError):
    """The call was tried on several replicas, and the last one ended before it answered."""

    status, code, retryable, retry_after_s = 503, "replicas_lost", True, 5.0


class ReplicasSilent(ServeError):
    """No replica answers, and no new replica runs yet."""

    status, code, retryable, retry_after_s = 503, "replicas_silent", True, 5.0


class StoreNotWritable(ServeError):
    """An operation cannot write or read a file or directory of the store."""

    status, code = 503, "store_not_writable"


class PlanUnusable(ServeError):
    """The file of the plan is invalid, or cannot be read or written."""

    status, code = 503, "plan_unusable"


class DeadlineExceeded(ServeError):
    """The time limit of the request passed."""

    status, code, retryable = 504, "deadline_exceeded", True


class ArtifactError(ServeError):
    """A sealed artifact that cannot be served."""

    status, code = 503, "artifact_unusable"


class ArtifactMissing(ArtifactError):
    """The store has no such model or version."""

    code = "artifact_missing"
    # Id from the request, if the key permits the model. A request may wait for a build of it.
    model_id: str | None = None


class LatestInvalid(ArtifactError):
    """The file `latest` of a model names no version."""

    code = "latest_invalid"


class ManifestInvalid(ArtifactError):
    """The manifest is unreadable or violates its schema, or a model id is invalid."""

    code = "manifest_invalid"


class ManifestTooNew(ArtifactError):
    """The manifest was written by a newer release."""

    code = "manifest_too_new"


class UnknownTask(ArtifactError):
    """The manifest lists a task that this release does not support."""

    code = "unknown_task"


class DigestMismatch(ArtifactError):
    """A file is missing, is not in the manifest, or differs from the manifest in size or digest."""

    code = "digest_mismatch"


class PathOutsideArtifact(ArtifactError):
    """A path is outside of the artifact's directory."""

    code = "path_outside_artifact"


def missing_model(error: BaseException | None) -> str | None:
    """Return the id of the model that a request did not find; None for any other error."""
    return error.model_id if isinstance(error, UnknownModel | ArtifactMissing) else None
