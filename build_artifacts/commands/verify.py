"""The command `verify`: check the digests and the parity of a sealed model again."""

from __future__ import annotations

import argparse

from build_artifacts.commands.store_command import MODEL_HELP, find_model, store_command
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead
from deployments.terminal.command_line import FAILED, OK
from deployments.terminal.console import add_json_option, add_store_option, print_json, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    add_json_option(parser)
    add_store_option(parser)


@store_command
def run(arguments: argparse.Namespace) -> int:
    """Verify an artifact. Return FAILED if a candidate violates the accuracy gate on this host.

    For a generative model, only the digests are verified. Raises ArtifactError if a digest differs.
    """
    from build_artifacts.verification import CandidateCheck, verify_candidates

    artifact = find_model(arguments)
    manifest = ArtifactManifest.read(artifact)
    if manifest.head is ModelHead.NEXT_TOKEN:
        note = "every digest matches; the accuracy of generative graphs is checked by the build"
        if not arguments.json:
            return print_text(note)
        unchecked = [CandidateCheck(candidate, None, note) for candidate in manifest.candidates]
        return print_json([checked.to_json() for checked in unchecked])
    checks = []
    for checked in verify_candidates(artifact):
        checks.append(checked)
        if not arguments.json:
            print(checked.line, flush=True)
    if arguments.json:
        print_json([checked.to_json() for checked in checks])
    return FAILED if any(checked.has_failed for checked in checks) else OK
