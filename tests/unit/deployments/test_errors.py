from __future__ import annotations

import copy
import pickle
from weakref import ref

import pytest

from deployments import errors
from deployments.errors import ModelLoading, ServeError, forget_frames
from deployments.ingress.apis.open_inference.routes import OPEN_INFERENCE_ERROR_FORMAT
from deployments.ingress.apis.openai.routes import GENERATION_ERROR_FORMAT, OPENAI_ERROR_FORMAT
from deployments.ingress.apis.shared.cohere_forms import COHERE_ERROR_FORMAT
from deployments.ingress.apis.shared.tei_responses import TEI_ERROR_FORMAT
from deployments.ingress.apis.text_generation.responses import TGI_ERROR_FORMAT
from deployments.ingress.http.api import ErrorFormat
from deployments.ingress.http.error_responses import DEFAULT_ERROR_FORMAT

ERROR_FORMATS = (
    *(DEFAULT_ERROR_FORMAT, OPENAI_ERROR_FORMAT, GENERATION_ERROR_FORMAT, TEI_ERROR_FORMAT),
    *(TGI_ERROR_FORMAT, COHERE_ERROR_FORMAT, OPEN_INFERENCE_ERROR_FORMAT),
)

# The API contract: class, status, code, whether a retry can succeed.
CONTRACT = [
    (errors.BadSetting, 500, "bad_setting", False),
    (errors.MalformedBody, 400, "malformed_body", False),
    (errors.InvalidField, 400, "invalid_field", False),
    (errors.EmptyInput, 400, "empty_input", False),
    (errors.WrongTask, 400, "wrong_task", False),
    (errors.HardwareUnavailable, 400, "hardware_unavailable", False),
    (errors.Unauthorized, 401, "invalid_api_key", False),
    (errors.Forbidden, 403, "permission_denied", False),
    (errors.UnknownModel, 404, "model_not_found", False),
    (errors.BuildFailed, 404, "build_failed", False),
    (errors.UnknownRoute, 404, "route_not_found", False),
    (errors.MethodNotAllowed, 405, "method_not_allowed", False),
    (errors.BodyTooSlow, 408, "body_too_slow", False),
    (errors.ModelInUse, 409, "model_in_use", False),
    (errors.BodyTooLarge, 413, "body_too_large", False),
    (errors.UnsupportedEncoding, 415, "unsupported_encoding", False),
    (errors.TooManyItems, 422, "too_many_items", False),
    (errors.UnknownParameter, 422, "unknown_parameter", False),
    (errors.InputTooLong, 422, "input_too_long", False),
    (errors.UnknownToken, 422, "unknown_token", False),
    (errors.Overloaded, 429, "overloaded", True),
    (errors.RateLimited, 429, "rate_limit_exceeded", True),
    (errors.ClientDisconnected, 499, "client_disconnected", False),
    (errors.EngineLost, 500, "engine_failed", False),
    (errors.RequirementMissing, 500, "requirement_missing", False),
    (errors.ModelLoading, 503, "model_loading", True),
    (errors.ModelUnavailable, 503, "model_unavailable", True),
    (errors.ReplicasLost, 503, "replicas_lost", True),
    (errors.ReplicasSilent, 503, "replicas_silent", True),
    (errors.StoreNotWritable, 503, "store_not_writable", False),
    (errors.PlanUnusable, 503, "plan_unusable", False),
    (errors.ArtifactMissing, 503, "artifact_missing", False),
    (errors.LatestInvalid, 503, "latest_invalid", False),
    (errors.ManifestInvalid, 503, "manifest_invalid", False),
    (errors.ManifestTooNew, 503, "manifest_too_new", False),
    (errors.UnknownTask, 503, "unknown_task", False),
    (errors.DigestMismatch, 503, "digest_mismatch", False),
    (errors.PathOutsideArtifact, 503, "path_outside_artifact", False),
    (errors.DeadlineExceeded, 504, "deadline_exceeded", True),
]


def list_raised_errors(root: type[ServeError]) -> list[type[ServeError]]:
    """Return the leaf classes below `root` in its module, and Overloaded, a raised base class."""
    below = [kind for kind in root.__subclasses__() if kind.__module__ == root.__module__]
    raised = [root] if not below or root is errors.Overloaded else []
    return raised + [leaf for kind in below for leaf in list_raised_errors(kind)]


RAISED = list_raised_errors(ServeError)


def build_error(kind: type[ServeError]) -> ServeError:
    if kind is ModelLoading:
        return ModelLoading("still starting", estimated_time_s=12.5)
    return kind("a message", field="inputs[3]")


@pytest.mark.parametrize(("kind", "status", "code", "retryable"), CONTRACT)
def test_error_status_and_code_match_the_contract(
    kind: type[ServeError], status: int, code: str, retryable: bool
) -> None:
    assert (kind.status, kind.code, kind.retryable) == (status, code, retryable)


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("error_format", ERROR_FORMATS)
def test_recorded_status_is_that_of_the_response(
    error_format: ErrorFormat, kind: type[ServeError]
) -> None:
    error = build_error(kind)
    assert error_format.select_status(error) == error_format.respond(error).status_code


def test_contract_lists_every_raised_error_with_a_unique_code() -> None:
    assert {kind for kind, *_ in CONTRACT} == set(RAISED)
    assert len({kind.code for kind in RAISED}) == len(RAISED)


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_error_survives_pickling(kind: type[ServeError], protocol: int) -> None:
    sent = build_error(kind)
    received = pickle.loads(pickle.dumps(sent, protocol))
    assert type(received) is kind
    assert received.__dict__ == sent.__dict__
    assert str(received) == str(sent) == sent.message


@pytest.mark.parametrize(
    "kind", [errors.EngineFailed, errors.EngineLost, errors.RequirementMissing]
)
def test_hidden_details_keep_the_class(kind: type[errors.EngineFailed]) -> None:
    error = kind("cannot load /opt/lib/libcuda.so")
    error.__cause__ = OSError("no such file")
    hidden = errors.hide_details(error)
    assert type(hidden) is kind
    assert "libcuda" not in hidden.message


def test_error_without_frames_holds_no_request() -> None:
    class Body:
        pass

    def fail() -> tuple[ServeError, ref[Body]]:
        body, cause = Body(), ZeroDivisionError()
        try:
            try:
                raise cause
            except ZeroDivisionError as error:
                raise ServeError("failed") from error
        except ServeError as error:
            return error, ref(body)

    error, body = fail()
    assert body() is not None
    assert error.__cause__ is not None
    error.__cause__.__cause__ = error  # `raise ... from ...` permits cycles
    forget_frames(error)
    assert body() is None


def test_error_copy_is_independent() -> None:
    original = errors.InputTooLong("`inputs` is long", field="inputs")
    copied = copy.copy(original)
    copied.field = "input"
    assert original.field == "inputs"


def test_retry_after_is_set_for_temporary_errors_only() -> None:
    seconds_by_error = {kind: build_error(kind).retry_after_s for kind in RAISED}
    assert {kind: seconds for kind, seconds in seconds_by_error.items() if seconds is not None} == {
        errors.Overloaded: 1.0,
        errors.RateLimited: 1.0,  # default, if the raising code gives no wait
        errors.ModelLoading: 12.5,
        errors.ModelUnavailable: 5.0,
        errors.ReplicasLost: 5.0,
        errors.ReplicasSilent: 5.0,
    }
