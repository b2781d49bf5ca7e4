"""A real browser on the page of an in-process server.

Each page records its console errors and warnings, and its requests to other hosts. Screenshots for
inspection stay in SCREENSHOTS, which CONTRIBUTING.md names, until a later run replaces them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest, PruningSource
from deployments.artifacts.store import (
    HOSTS_NAME,
    LATEST_NAME,
    model_directory,
    resolve_version,
    set_latest,
)
from deployments.artifacts.types import TaskName
from deployments.ingress.apis.playground.model_report import STAGES_NAME
from tests.support.all_models import ALL_MODELS, QA_MODEL, seal_all_models
from tests.support.artifacts import CLASSIFIER, seal
from tests.support.decoder_artifacts import seal_tiny_decoder
from tests.support.report_samples import STAGES, report_of

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
TIMEOUT_MS = 30_000  # a load of the page once took more than 10 s while other tests ran
PHONE = {"width": 360, "height": 740}
TRANSLATOR = "tiny/translator"
PLAIN_TRANSLATOR = "tiny/plain-translator"  # has no language codes, as Marian models
PRUNED_QA_MODEL = "tiny/pruned-reader"  # not pruned, but its manifest has the field `pruning`
QA_VARIANT = "00000000beef"  # version of QA_MODEL that is int8 in its manifest only
PAGE_MODELS = (*ALL_MODELS, TRANSLATOR, PLAIN_TRANSLATOR, PRUNED_QA_MODEL)
# Chromium prints a line that starts with REFUSED for each response with a status of 400 or above.
# The page shows these responses to the user, so such lines are not failures.
REFUSED = "Failed to load resource: the server responded with a status of"
# Inputs of at most 16 tokens, the limit of the tiny models, whose tokens are mostly single letters.
INPUTS: dict[str, dict[str, str]] = {
    "question-answering": {"Question": "Was it good?", "Text": "The food was good."},
    "text-classification": {"Text": "A good film."},
    "zero-shot-classification": {"Text": "A film.", "Labels": "art\nfood"},
    "token-classification": {"Text": "A city."},
    "fill-mask": {"Text": "The [MASK]."},
    "sentence-similarity": {"Sentence": "A cat.", "Others": "A city.\nA film."},
    "text-ranking": {"Query": "A cat", "Texts": "A city.\nA film."},
    "feature-extraction": {"Texts": "A cat.\nA city.\nA film."},
    "token-embeddings": {"Texts": "A cat."},
    "sparse-embeddings": {"Texts": "A cat."},
    "translation": {"Text": "A cat."},
    "summarization": {"Text": "A cat."},
    "text2text-generation": {"Text": "A cat."},
}


@dataclass
class Visitor:
    """A browser tab at the page of `url`, with its console output and requests to other hosts."""

    page: Page
    url: str
    console: list[str] = field(default_factory=list)  # errors and warnings
    foreign: list[str] = field(default_factory=list)  # requests to other hosts

    @classmethod
    def arrive(cls, browser: Browser, url: str, **context: Any) -> Visitor:
        """Open an empty tab. `context` holds options of Playwright's browser context."""
        options = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        page = browser.new_context(**{**options, **context}).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        expect.set_options(timeout=TIMEOUT_MS)
        visitor = cls(page, url)
        page.on("console", visitor._note_console)
        page.on("pageerror", lambda error: visitor.console.append(str(error)))
        page.on("request", visitor._note_request)
        return visitor

    def open(self, view: str = "") -> Page:
        """Show a view, such as `play/chat`, and wait for its heading."""
        self.page.goto(f"{self.url}/#/{view}")
        self.page.locator("main h1").wait_for()
        return self.page

    def fill(self, inputs: dict[str, str]) -> None:
        for label, text in inputs.items():
            self.page.locator("form.form").get_by_label(label).first.fill(text)

    def run(self) -> None:
        """Press the button of the form and wait for the answer, or for an error."""
        self.page.locator("form.form button.primary").click()
        self.page.locator(".cost .total, .answer .problem").first.wait_for()

    def snap(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.evaluate("scrollTo(0, 0)")
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    def leave(self) -> None:
        """Close the tab. Fail the test if there were console messages or requests to other hosts.

        Console lines that start with REFUSED are allowed.
        """
        self.page.context.close()
        assert self.foreign == []
        assert [line for line in self.console if not line.startswith(REFUSED)] == []

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.console.append(message.text)

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.foreign.append(request.url)


def wait_for_server(happened: Callable[[], bool]) -> None:
    """Wait until `happened` returns True. Fail after TIMEOUT_MS."""
    ends_s = time.monotonic() + TIMEOUT_MS / 1e3
    while not happened():
        if time.monotonic() > ends_s:
            raise TimeoutError
        time.sleep(0.005)


def find_accessibility_problems(page: Page, rules: list[str] | None = None) -> list[str]:
    """Check all rules of axe-core, or only `rules`.

    Return rule and element of each problem that axe-core rates serious or critical.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    options = {} if rules is None else {"runOnly": rules}
    found = page.evaluate("async (options) => (await axe.run(options)).violations", options)
    return [
        f"{problem['id']}: {node['html'][:200]}"
        for problem in found
        if problem["impact"] in ("serious", "critical")
        for node in problem["nodes"]
    ]


def seal_page_models(store: Path) -> Path:
    """Write PAGE_MODELS, version QA_VARIANT and a report to `store`. Return `store`.

    The graphs of the translators cannot translate, so tests answer with a fake generator.
    """
    seal_all_models(store)
    translator = ArtifactManifest.parse(seal_tiny_decoder(store, TRANSLATOR))
    config = translator.generation_config
    assert config is not None
    translates = EncoderDecoderConfig(
        max_source_tokens=64, decoder_start_token_id=0, languages={"en_XX": 1, "fr_XX": 2}
    )
    tasks = (TaskName.TEXT2TEXT_GENERATION, TaskName.TRANSLATION, TaskName.SUMMARIZATION)
    reader = ArtifactManifest.parse(
        model_directory(store, QA_MODEL) / resolve_version(store, QA_MODEL, LATEST_NAME)
    )
    pruned = reader.source.model_copy(update={"pruning": PruningSource(fraction=0.4)})
    quantized = [c.model_copy(update={"precision": "int8"}) for c in reader.candidates]
    config = config.model_copy(update={"encoder_decoder": translates})
    _seal_copy(store, translator, tasks=tasks, generation_config=config)
    plain = config.model_copy(
        update={"encoder_decoder": translates.model_copy(update={"languages": {}})}
    )
    _seal_copy(store, translator, id=PLAIN_TRANSLATOR, tasks=tasks, generation_config=plain)
    _seal_copy(store, reader, id=PRUNED_QA_MODEL, source=pruned)
    _seal_copy(store, reader, version=QA_VARIANT, candidates=tuple(quantized))
    _write_report(model_directory(store, CLASSIFIER))
    return store


def _write_report(model: Path) -> None:
    """Write a report with two stages of a build to the only version of a model."""
    first, second = (
        each.model_copy(update={"size_bytes": size, "scores": {"accuracy": score}})
        for each, size, score in zip(STAGES, (90_900_000, 22_700_000), (0.9, 0.89), strict=False)
    )
    report = report_of(first, second).model_copy(update={"metric": "accuracy"})
    (version,) = (path for path in model.iterdir() if path.is_dir())
    path = version / HOSTS_NAME / "abacus" / STAGES_NAME
    path.parent.mkdir(parents=True)
    path.write_text(report.model_dump_json())


def _seal_copy(store: Path, manifest: ArtifactManifest, **update: Any) -> None:
    """Write an artifact with the files of `manifest` and updated manifest fields.

    A new version of the same model does not become the latest version.
    """
    changed = manifest.model_copy(update=update)
    source = model_directory(store, manifest.id) / manifest.version
    target = model_directory(store, changed.id) / changed.version
    if target != source:
        shutil.copytree(source, target)
    (target / MANIFEST_NAME).unlink()
    seal(target, changed)
    if changed.id != manifest.id:
        set_latest(store, changed.id, changed.version)
