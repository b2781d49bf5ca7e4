"""Names and settings that this project reads in the applications of a Serve config."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pydantic import ValidationError

from cluster.config_entries import IMPORT_PATH, ApplicationEntry, DeploymentEntry, read_mapping
from cluster.linting.schema import KeyFinding, Section, sections
from deployments.config import USER_CONFIGS, AppArgs, IngressUserConfig
from deployments.deployment_names import ENCODER_DEPLOYMENTS, GENERATOR_DEPLOYMENTS
from deployments.errors import BadSetting


def project_sections(application: ApplicationEntry) -> Iterator[Section]:
    """Yield the mappings whose keys this project defines: `args` and each `user_config`."""
    if not application.is_hundredfold:
        return
    yield from sections(AppArgs, application.raw.get("args") or {}, (*application.path, "args"))
    for entry in application.deployments():
        if entry.name in USER_CONFIGS:
            settings = entry.raw.get("user_config") or {}
            yield from sections(USER_CONFIGS[entry.name], settings, (*entry.path, "user_config"))


def find_wrong_names(application: ApplicationEntry) -> Iterator[KeyFinding]:
    """Yield findings about a wrong import path and about unknown or missing deployments."""
    if not application.is_hundredfold:
        if application.import_path.startswith(IMPORT_PATH.split(".")[0] + "."):
            yield (*application.path, "import_path"), f"the application is `{IMPORT_PATH}`"
        return
    built = _built_deployments(application)
    entries = list(application.deployments())
    for entry in entries:
        if entry.name not in built:
            close = difflib.get_close_matches(entry.name, sorted(built), n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            yield (*entry.path, "name"), f"there is no deployment `{entry.name}`{hint}"
    for name in sorted(built - {entry.name for entry in entries}):
        yield (
            (*application.path, "deployments"),
            f"`{name}` is missing: Serve would run it with unlimited queues. Add an entry for it",
        )


def parse_ingress_settings(entry: DeploymentEntry) -> IngressUserConfig | None:
    """Return the `user_config` of the Ingress; None if it is invalid."""
    try:
        return IngressUserConfig.parse(read_mapping(entry.raw, "user_config"))
    except BadSetting:  # the schema check reports this error
        return None


def _built_deployments(application: ApplicationEntry) -> set[str]:
    """Return the deployments that `build_app` creates from `args`; all if `args` is invalid."""
    try:
        args = AppArgs.model_validate(application.raw.get("args") or {})
    except ValidationError:
        return set(USER_CONFIGS)
    absent = {name for device, name in ENCODER_DEPLOYMENTS.items() if device not in args.encoders}
    absent |= {
        name for device, name in GENERATOR_DEPLOYMENTS.items() if device not in args.generators
    }
    return set(USER_CONFIGS) - absent
