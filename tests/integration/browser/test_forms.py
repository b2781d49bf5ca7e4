"""The form of every task in the page: inputs, answer, cost, code, comparison of two models."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support.all_models import NLI_MODEL, QA_MODEL
from tests.support.artifacts import CLASSIFIER, EMBEDDER
from tests.support.browser import (
    INPUTS,
    PLAIN_TRANSLATOR,
    PRUNED_QA_MODEL,
    QA_VARIANT,
    TRANSLATOR,
    Visitor,
)
from tests.support.scripted_generation import TEXT, ScriptedGenerator

# Selector of an element that the answer of each task must show.
SHOWN = {
    "question-answering": ".passage mark",
    "text-classification": ".scores li",
    "zero-shot-classification": ".scores li",
    "token-classification": ".passage.entities",
    "fill-mask": ".scores li",
    "sentence-similarity": ".scores li",
    "text-ranking": ".scores li",
    "feature-extraction": "svg.map circle >> nth=2",
    "token-embeddings": "svg.map",
    "sparse-embeddings": ".scores li",
    "translation": f"text={TEXT.strip()}",
    "summarization": f"text={TEXT.strip()}",
    "text2text-generation": f"text={TEXT.strip()}",
}


@pytest.mark.parametrize("task", INPUTS)
def test_task_is_answered_with_its_cost(visitor: Visitor, task: str) -> None:
    page = visitor.open(f"play/{task}")
    visitor.fill(INPUTS[task])
    visitor.run()
    answer = page.locator(".answer").first
    expect(answer.locator(".output").locator(SHOWN[task]).first).to_be_visible()
    expect(answer.locator(".total")).to_have_text(re.compile(r"\d (ms|s) from the request"))
    expect(answer.locator(".facts")).to_contain_text("Version")
    expect(answer.locator(".phases")).to_contain_text("Network")
    visitor.snap(f"task-{task}")


def test_cost_names_every_phase_then_the_cache(visitor: Visitor) -> None:
    page = visitor.open("play/text-classification")
    visitor.fill({"Text": "A cat was good."})
    visitor.run()
    for phase in ("Queue", "Tokenize", "Wait", "Compute", "Network"):
        expect(page.locator(".phases dt", has_text=phase)).to_be_visible()
    expect(page.locator(".facts")).to_contain_text("Cache miss")
    visitor.run()
    expect(page.locator(".facts")).to_contain_text("Cache hit")
    page.get_by_label("Use the cache").uncheck()
    visitor.run()
    expect(page.locator(".facts li", has_text="Cache hit")).to_have_count(0)


def test_code_is_the_request_of_the_form(visitor: Visitor) -> None:
    page = visitor.open("play/feature-extraction")
    visitor.fill({"Texts": "it's\na cat"})
    code = page.locator("#code-panel")
    expect(code).to_contain_text(f"{visitor.url}/models/{EMBEDDER}")
    expect(code).to_contain_text(r"it'\''s")
    page.get_by_role("tab", name="huggingface_hub").click()
    expect(code).to_contain_text("client.feature_extraction(")
    page.get_by_role("tab", name="openai").click()
    expect(code).to_contain_text('input=["it\'s", "a cat"]')
    page.get_by_role("tab", name="openai").press("ArrowRight")
    expect(code).to_contain_text("curl")
    page.get_by_role("radio", name="CPU fp32").first.check()
    expect(code).to_contain_text("x-hardware: cpu")


@pytest.mark.parametrize(
    ("task", "empty", "composed"),
    [("chat", "Message", "System prompt"), ("question-answering", "Question", "Text")],
)
def test_composed_characters_stay_whole_beside_an_empty_field(
    visitor: Visitor, task: str, empty: str, composed: str
) -> None:
    """A field that loses the focus during a composition keeps the letters of its keys."""
    page = visitor.open(f"play/{task}")
    visitor.fill({empty: "", composed: ""})
    field = page.locator("form.form").get_by_label(composed)
    field.click()
    keyboard = page.context.new_cdp_session(page)
    for keys in ("n", "ni"):
        composition = {"text": keys, "selectionStart": len(keys), "selectionEnd": len(keys)}
        keyboard.send("Input.imeSetComposition", composition)
    keyboard.send("Input.insertText", {"text": "你"})
    expect(field).to_have_value("你")
    expect(field).to_be_focused()


def test_language_codes_are_offered_and_sent_for_models_that_have_them(
    visitor: Visitor, generator: ScriptedGenerator
) -> None:
    page = visitor.open("play/translation")
    first, second = (page.get_by_role("group", name=f"Model {letter}") for letter in "AB")
    expect(first.get_by_label("From")).to_have_value("en_XX")
    expect(first.get_by_label("To", exact=True)).to_have_value("fr_XX")
    code = page.locator("#code-panel")
    expect(code).to_contain_text('"src_lang": "en_XX"')
    page.get_by_label("Compare two").check()
    second.get_by_role("combobox", name="Model").select_option(PLAIN_TRANSLATOR)
    expect(second.get_by_label("From")).to_be_hidden()
    visitor.fill(INPUTS["translation"])
    visitor.run()
    expect(page.locator(".differences")).to_contain_text("Same text")
    languages = [call.options.languages for call in generator.calls[-2:]]
    assert [codes is None for codes in languages] == [False, True]
    visitor.snap("compare-translation")
    first.get_by_role("combobox", name="Model").select_option(PLAIN_TRANSLATOR)
    expect(first.get_by_label("From")).to_be_hidden()
    expect(code).not_to_contain_text("_lang")


def test_comparison_starts_with_the_languages_of_the_first_model(visitor: Visitor) -> None:
    page = visitor.open("play/translation")
    page.get_by_label("From").first.select_option("fr_XX")
    page.get_by_label("To", exact=True).first.select_option("en_XX")
    page.get_by_label("Compare two").check()
    second = page.get_by_role("group", name="Model B")
    second.get_by_role("combobox", name="Model").select_option(TRANSLATOR)
    expect(second.get_by_label("From")).to_have_value("fr_XX")
    expect(second.get_by_label("To", exact=True)).to_have_value("en_XX")


def test_long_lists_are_drawn_in_part(visitor: Visitor) -> None:
    page = visitor.open("play/feature-extraction")
    visitor.fill({"Texts": "\n".join(["A cat.", "A city.", "A film."] * 70)})
    visitor.run()
    output = page.locator(".answer .output").first
    expect(output).to_contain_text("The map shows the first 200 texts, the matrix the first 40.")
    expect(output.locator("svg.map circle")).to_have_count(200)
    expect(output.locator(".matrix tbody tr")).to_have_count(40)
    expect(output.locator(".matrix tbody td")).to_have_count(1600)
    visitor.snap("long-list")
    page = visitor.open("play/token-embeddings")
    visitor.fill({"Texts": "\n".join(["A cat."] * 12)})
    visitor.run()
    expect(output).to_contain_text("Maps are drawn for the first 8 texts.")
    expect(output.locator("svg.map")).to_have_count(8)


def test_two_models_are_compared(visitor: Visitor) -> None:
    page = visitor.open("play/text-classification")
    page.get_by_label("Compare two").check()
    for letter, model in (("A", CLASSIFIER), ("B", NLI_MODEL)):
        picker = page.get_by_role("group", name=f"Model {letter}")
        picker.get_by_role("combobox", name="Model").select_option(model)
    visitor.fill({"Text": "A good film."})
    visitor.run()
    difference = page.locator(".differences")
    expect(difference).to_contain_text("Answers")
    expect(difference).to_contain_text("ms")
    expect(page.locator(".answer .scores")).to_have_count(2)
    # The comparison skips the response cache, because a cached answer would distort the times.
    expect(page.locator("#code-panel")).to_contain_text("x-use-cache: false")
    expect(page.get_by_label("Use the cache")).to_be_hidden()
    visitor.snap("compare")


def test_demo_asks_every_model_and_version_that_answers_questions(visitor: Visitor) -> None:
    page = visitor.open("demo")
    visitor.fill(INPUTS["question-answering"])
    page.get_by_role("button", name="Ask them all").click()
    rows = page.locator(".figures tbody tr")
    for at, (model, variant) in enumerate(
        [
            (QA_MODEL, "CPU fp32 tiny"),
            (QA_MODEL, "CPU int8 tiny"),
            (PRUNED_QA_MODEL, "CPU pruned 40 %, fp32 tiny"),
        ]
    ):
        row = rows.nth(at)
        expect(row.locator("th")).to_have_text(f"{model}{variant}")
        expect(row.locator("td")).to_have_count(6)
        expect(row.locator("td").first).to_contain_text("kB")
        expect(row.locator("td").last).to_contain_text("ms")
    expect(rows).to_have_count(3)
    expect(page.locator(".passage mark")).to_be_visible()
    visitor.snap("demo")


def test_versions_are_named_by_precision_size_and_pruning(visitor: Visitor) -> None:
    page = visitor.open("play/question-answering")
    version = page.get_by_label("Version").first
    names = [re.compile(r"^fp32 tiny, [\d.]+ kB · \w{6} \(default\)$")]
    names += [re.compile(rf"^int8 tiny, [\d.]+ kB · {QA_VARIANT[:6]}$")]
    expect(version.locator("option")).to_have_text(names)
    version.select_option(QA_VARIANT)
    expect(page.get_by_role("radio", name="CPU int8").first).to_be_enabled()
    expect(page.locator("#code-panel")).to_contain_text(f"{QA_MODEL}@{QA_VARIANT}")


def test_models_are_listed_with_report(visitor: Visitor) -> None:
    page = visitor.open("models")
    card = page.locator("article", has_text=EMBEDDER)
    expect(card).to_contain_text("ready")
    card.get_by_text("Report").click()
    expect(card.locator("table")).to_contain_text("tiny-cpu")
    expect(card).to_contain_text(f"hundredfold models report {EMBEDDER}")
    visitor.snap("models")


def test_failed_report_is_loaded_when_it_is_opened_again(visitor: Visitor) -> None:
    page = visitor.open("models")
    card = page.locator("article", has_text=EMBEDDER)
    page.route("**/report", lambda route: route.fulfill(status=503, json={"error": "no disk"}))
    card.get_by_text("Report").click()
    expect(card.get_by_text("no disk")).to_be_visible()
    page.unroute_all()
    card.get_by_text("Report").click(click_count=2)  # close it and open it
    expect(card.locator("table")).to_contain_text("tiny-cpu")
    expect(card.get_by_text("no disk")).to_have_count(0)
    visitor.console.clear()  # remove the expected error


def test_failed_list_of_versions_is_loaded_when_the_model_is_chosen_again(visitor: Visitor) -> None:
    page = visitor.page
    page.route(f"**/models/{QA_MODEL}", lambda route: route.abort())
    with page.expect_event("requestfailed"):
        visitor.open("play/question-answering")
    version = page.get_by_label("Version").first
    expect(version).to_be_hidden()
    page.unroute_all()
    for model in (PRUNED_QA_MODEL, QA_MODEL):
        page.get_by_label("Model", exact=True).first.select_option(model)
    expect(version.locator("option")).to_have_count(2)
    visitor.console.clear()  # remove the expected error


def test_report_plots_size_metric_and_latency_of_every_stage(visitor: Visitor) -> None:
    page = visitor.open("models")
    card = page.locator("article", has_text=CLASSIFIER)
    card.get_by_text("Report").click()
    expect(card.locator("svg.chart")).to_be_visible()
    for name, values in (("Size", ["90.9 MB", "22.7 MB"]), ("accuracy", ["0.900", "0.890"])):
        bars = card.get_by_role("list", name=f"{name} of each stage")
        expect(bars.locator(".score-value")).to_have_text(values)
    visitor.snap("report")


def test_refused_pull_is_explained(visitor: Visitor) -> None:
    page = visitor.open("models")
    page.get_by_text("Pull a model").click()
    page.get_by_label("Source").fill("BAAI/bge-small-en-v1.5")
    page.get_by_role("button", name="Pull").click()
    expect(page.locator(".progress .problem")).to_contain_text("pulls no models")


def test_status_counts_requests_and_replicas(visitor: Visitor) -> None:
    visitor.open("play/text-classification")
    visitor.fill({"Text": "A good city."})
    visitor.run()
    page = visitor.open("status")
    cells = page.locator("tr", has_text="CpuEncoder").locator("td")
    expect(cells.first).to_have_text("1")
    expect(cells.nth(2)).to_have_text("3")
    expect(cells.nth(3)).to_have_text("1 to 8")
    expect(page.locator("tr", has_text="Tokenizer").locator("td").nth(3)).to_have_text("fixed")
    expect(page.locator("tr", has_text=CLASSIFIER)).to_contain_text("ms")
    visitor.snap("status")
